"""Chunks, the parameters in them, and tensors over their memory: the home of each role of a chunk, and views of it.

Holds addresses and views; decides nothing and moves nothing. Every view of a home has a storage of its own, so its
reference count shows whether the program holds it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch

from hetmem import torch_private
from hetmem.base.units import round_up
from hetmem.base.weak import Referable
from hetmem.memory import host_memory
from hetmem.memory.coded import CodedHome, CodedPart
from hetmem.memory.hidden_gradient import HiddenGradient
from hetmem.memory.host_memory import PAGE_BYTES
from hetmem.memory.nvme_store import Extent
from hetmem.schedule.layout import ChunkSpec
from hetmem.schedule.trace import Tier

RawMemory = memoryview | torch.Tensor
"""Host memory, or a 1-D uint8 tensor on a device."""


def elements(memory: RawMemory, dtype: torch.dtype, numel: int, offset_bytes: int = 0) -> torch.Tensor:
    """Return a 1-D tensor of `numel` elements of `dtype`, starting `offset_bytes` into `memory`."""
    if type(memory) is memoryview:
        if numel == 0:
            return torch.empty(0, dtype=dtype, device="cpu")
        return torch.frombuffer(memory, dtype=dtype, count=numel, offset=offset_bytes)
    if numel == 0:
        return torch.empty(0, dtype=dtype, device=memory.device)
    part = memory[offset_bytes : offset_bytes + numel * dtype.itemsize]
    alone: torch.Tensor = torch_private.from_dlpack(
        torch_private.to_dlpack(part)
    )  # the public function may wait for a stream
    return alone.view(dtype)


def address_of(memory: RawMemory) -> int:
    """Return the address of the first byte of `memory`."""
    return host_memory.address_of(memory) if isinstance(memory, memoryview) else memory.data_ptr()


def give_away(view: torch.Tensor) -> bool:
    """Move the present values of `view` and of all other views of its storage to memory of their own. Return False if
    that is impossible: on a GPU, with torch before 2.13."""
    storage = view.untyped_storage()
    before, swap = storage.data_ptr(), getattr(storage, "_swap_data_ptr_", None)
    if swap is not None:
        swap(storage.clone())
    else:
        storage.share_memory_()
    return storage.data_ptr() != before


_AS_IT_IS = nullcontext()


def without_graph() -> AbstractContextManager[None]:
    """Return `torch.no_grad()` if it changes anything: within a backward it does not, and costs more than a copy."""
    return torch.no_grad() if torch.is_grad_enabled() else _AS_IT_IS


class _RoleFields(NamedTuple):
    """Key of every dictionary of homes: a tuple hashes and compares in C."""

    name: str
    dtype: torch.dtype | None = None
    scale_block: int = 0


class Role(_RoleFields):
    """The purpose of a part of a chunk's memory: parameters, their 16-bit copies (COMPUTE, if these have homes of their
    own), gradients, or the optimizer's state of that `name`.

    All roles of a chunk share one layout, so offsets agree. Elements have the chunk's dtype, or `dtype`; those of
    COMPUTE have the dtype that operators see. With `scale_block`, a float32 scale for every so many elements of a
    parameter lies behind the elements.
    """

    __slots__ = ()

    PARAM: ClassVar[Role]
    COMPUTE: ClassVar[Role]
    GRAD: ClassVar[Role]

    @property
    def is_state(self) -> bool:
        """Whether it is a state of an optimizer."""
        return self not in (Role.PARAM, Role.COMPUTE, Role.GRAD)


Role.PARAM, Role.COMPUTE, Role.GRAD = Role("param"), Role("compute"), Role("grad")


@dataclass(slots=True, eq=False)
class Home:
    """The authoritative memory of one role of one chunk.

    `memory` is host memory, or the shared mapping of the file region `extent`, or device memory. `block` is its number
    in the residency; None for a home on the device that operators use directly. `away` is the home that stays reserved
    on another tier while this one is on the device.
    """

    tier: Tier
    memory: RawMemory
    block: int | None = None
    extent: Extent | None = None
    written: bool = False
    """Whether it was ever written (a state of an optimizer)."""
    untouched: bool = False
    """Whether its memory is zero as the kernel has made it, as no update has begun to use it and nothing else has."""
    away: Home | None = None
    flat: torch.Tensor | None = None
    """The result of `Chunk.flat`: neither the number nor the dtype of elements changes while it is a home."""
    private: memoryview | None = None
    """A private mapping of `memory`, if that is shared with other ranks: what the program sees."""
    has_own_pages: Callable[[], bool] | None = None
    """Whether the program may have written to `private`, and so sees other values than `memory` has."""

    @property
    def shown(self) -> RawMemory:
        """The memory that the program sees."""
        return self.memory if self.private is None else self.private


@dataclass(slots=True, eq=False)
class Chunk:
    """`numel` elements of `dtype` on their home tier and of `compute_dtype` on the device.

    `numel` is what the parameters need, rounded up so that every role is whole 4096-byte pages; only these are copied.
    A home has room for `capacity` elements. Of quantised weights (`codes`) the home has bytes instead, that of other
    roles does not exist, and `dtype` is that of the values.
    """

    spec: ChunkSpec
    capacity: int
    numel: int
    dtype: torch.dtype
    compute_dtype: torch.dtype
    most_parameters: int
    codes: tuple[CodedPart, ...] = ()
    hides: bool = False
    """Whether updates consume its gradients as they arrive, so that the program cannot read them."""
    gradient_dtype: torch.dtype | None = None
    """Dtype of gradients that stay as autograd made them until their update has read them; None: `dtype`."""
    parameters: list[ManagedParameter] = field(default_factory=list)
    homes: dict[Role, Home] = field(default_factory=dict)
    operand_block: int = -1
    """The number in the residency of the role that operators use; -1: they use the home itself."""
    layout: int = 0
    """The number of the layout of its parameters: chunks of one layout share the views of a slot."""

    @property
    def may_be_narrow(self) -> bool:
        """Whether autograd makes its gradients in fewer bits than its home has, and no home of them exists."""
        return self.compute_dtype is not self.dtype and Role.GRAD not in self.homes and not self.moved

    @property
    def operand(self) -> Role:
        """The role that a device copy is fetched from: the 16-bit copies at home, or the parameters."""
        return Role.COMPUTE if Role.COMPUTE in self.homes else Role.PARAM

    @property
    def moved(self) -> bool:
        """Whether its homes are on the device."""
        return Role.PARAM in self.homes and self.homes[Role.PARAM].tier is Tier.DEVICE

    def dtype_of(self, role: Role) -> torch.dtype:
        """Return the dtype of elements of `role`."""
        if role == Role.GRAD and self.gradient_dtype is not None:
            return self.gradient_dtype
        return self.compute_dtype if role == Role.COMPUTE else role.dtype or self.dtype

    def role_nbytes(self, role: Role) -> int:
        """Return the bytes of `role` that are copied: whole pages."""
        return self._bytes(role, self.numel)

    def home_nbytes(self, role: Role) -> int:
        """Return the bytes that a home of `role` takes."""
        return self._bytes(role, self.capacity)

    @property
    def lent_nbytes(self) -> int:
        """Bytes of a lent home of gradients, in the dtype in which autograd makes them."""
        return self.capacity * self.compute_dtype.itemsize

    @property
    def sum_nbytes(self) -> int:
        """Bytes of a lent home of a sum of gradients."""
        return self.capacity * self.dtype.itemsize

    def _bytes(self, role: Role, count: int) -> int:
        if self.codes and role == Role.PARAM:
            return self.spec.coded_bytes
        itemsize = self.dtype_of(role).itemsize
        return count * itemsize + (self._scales_nbytes(role) if role.scale_block else 0)

    def _scales_nbytes(self, role: Role) -> int:
        """Return bytes enough for a last, shorter block of each parameter, however many this chunk gets."""
        return round_up(4 * (self.capacity // role.scale_block + self.most_parameters), PAGE_BYTES)

    @property
    def compute_nbytes(self) -> int:
        """Bytes of the copy that operators use."""
        return self.numel * self.compute_dtype.itemsize

    def source(self, role: Role, memory: RawMemory | None = None) -> torch.Tensor | CodedHome:
        """Return what a copy to the device is made of: `flat(role)`, or `over(role, memory)`; of quantised weights the
        `CodedHome`."""
        home = self.homes[role]
        if memory is None and home.flat is not None and home.has_own_pages is None:
            return home.flat
        if self.codes and role == Role.PARAM:
            memory = home.memory if memory is None else memory
            with torch.inference_mode(False):
                return CodedHome(elements(memory, torch.uint8, self.spec.coded_bytes), self.codes)
        has_own_pages = home.has_own_pages
        if memory is None and has_own_pages is not None and has_own_pages():
            memory = home.private
        return self.flat(role) if memory is None else self.over(role, memory)

    def flat(self, role: Role) -> torch.Tensor:
        """Return the used part of the home of `role` as a 1-D tensor with a storage of its own; cached."""
        home = self.homes[role]
        if home.flat is None:
            if torch.is_inference_mode_enabled():
                with torch.inference_mode(False):
                    home.flat = self.over(role, home.memory)
            else:
                home.flat = self.over(role, home.memory)
        return home.flat

    def over(self, role: Role, memory: RawMemory) -> torch.Tensor:
        """Return `memory` of `role` as a 1-D tensor: its elements, or its bytes if scales lie behind them."""
        assert not (self.codes and role == Role.PARAM), f"{self.label(role)} has codes, which are no values"
        if role.scale_block:
            return elements(memory, torch.uint8, self._bytes(role, self.numel))
        return elements(memory, self.dtype_of(role), self.numel)

    def close_grad_homes(self) -> None:
        """Drop the `grad_home` of each parameter, as its update has read it: nothing else holds its views, so the next
        one reuses them."""
        for managed in self.parameters:
            if managed.grad_home is not None and managed.grad_home.is_cpu:
                managed.grad_spare = managed.grad_home, managed.grad_view
            managed.grad_home = managed.grad_view = None

    def recast(self) -> None:
        """Cast the parameters to their 16-bit copies at home, if there are any."""
        for managed in self.parameters:
            managed.recast(managed.home)

    def __repr__(self) -> str:
        """Return its index, parameters, dtypes, bytes and where its homes are."""
        homes = ", ".join(f"{role.name} on {home.tier.name.lower()}" for role, home in self.homes.items())
        kinds = {str(dtype).removeprefix("torch.") for dtype in (self.dtype, self.compute_dtype)}
        return f"<{self._name()}: {self.numel} elements of {' and '.join(sorted(kinds))}; {homes}>"

    def label(self, role: Role) -> str:
        """Return the name of `role` of this chunk for messages."""
        return f"{role.name} of {self._name()}"

    def _name(self) -> str:
        names = [parameter.name for parameter in self.parameters]
        more = f", … ({len(names)} parameters)" if len(names) > 2 else ""
        return f"chunk {self.spec.index} ({', '.join(names[:2])}{more})"


NO_MEMORY = torch.empty(0, device="cpu")


@dataclass(slots=True, eq=False)
class SlotView:
    """A view of a device slot, `tensor`, with a storage of its own: the handle `storage`, at `address`, to which hetmem
    itself has `references`. `reshaped` is a view of it given to autograd, usually transposed. Until it is made it is of
    `NO_MEMORY`."""

    tensor: torch.Tensor = NO_MEMORY
    storage: int = NO_MEMORY.untyped_storage()._cdata
    address: int = -1
    references: int = sys.maxsize
    reshaped: tuple[Any, torch.Tensor] | None = None


NO_VIEW = SlotView()


@dataclass(slots=True, eq=False)
class ManagedParameter(Referable):
    """One `torch.nn.Parameter` and its place: elements [offset, offset + numel) of `chunk`.

    `home` is `.data`, with the strides `home_stride`: of a quantised parameter, whose place in the home of the chunk is
    `code`, a stand-in with strides of 0. `working` is its working weight, which modules have during compute: a
    parameter of its own, with the memory of a copy while that is used, and of `rest` else: `stand_in`, which reads as
    NaN, or the copy, while a tensor of the program holds that (see `engine.param_views`, note "views of weights").
    `home_address` is the home's address when it was made: a storage may be given other memory (by `share_memory_()`).
    `device` is a view of the slot while the chunk has a device copy, that of `slot_view`; else that is `NO_VIEW`.
    `grad_home` is the home of the gradient, and `grad_view` stands in `p.grad` for one that its chunk `hides`;
    `grad_spare` has both of the last step, to be reused. `version` is the last known version counter of the parameter:
    another value means that it was written to; `counter` is a tensor without memory that shares the counter and is
    independent of the parameter's class. `own` is the `__dict__` of the parameter: `torch.utils.swap_tensors` exchanges
    that together with the C++ tensor below. `replaced` counts assignments to `.data` that went home. `kind` is the
    parameter's class, and `watched_kind` while it may not be used as it is (see `intercept.watched`); that of `working`
    is `bound_kind` while it shows a copy, else `watched_kind`. `bound` counts the module calls that it is bound for,
    and `data_taken` says that `.data` was read within one. `stepped_by` is the token of the hetmem optimizer that steps
    it.
    """

    parameter: torch.nn.Parameter
    name: str
    chunk: Chunk
    offset: int
    numel: int
    shape: torch.Size
    stride: tuple[int, ...]
    home: torch.Tensor
    code: CodedPart | None = None
    stand_in: torch.Tensor | None = None
    rest: torch.Tensor | None = None
    home_stride: tuple[int, ...] = ()
    home_storage: int = 0
    home_references: int = 0
    home_address: int = 0
    version: int = 0
    counter: torch.Tensor = field(init=False)
    own: dict[str, Any] | None = None
    replaced: int = 0
    device: torch.Tensor | None = None
    slot_view: SlotView = NO_VIEW
    grad_home: torch.Tensor | None = None
    grad_view: HiddenGradient | None = None
    grad_spare: tuple[torch.Tensor, HiddenGradient | None] | None = None
    grad_version: int = 0
    grad_address: int = 0
    grad_hooked: bool = False
    kind: type = torch.nn.Parameter
    watched_kind: type = torch.nn.Parameter
    bound_kind: type = torch.nn.Parameter
    bound: int = 0
    data_taken: bool = False
    working: Any = None
    stepped_by: object = None

    def __repr__(self) -> str:
        """Return its name, shape, and place in its chunk; it reads no memory."""
        end = self.offset + self.numel
        return f"<parameter {self.name} {list(self.shape)}: [{self.offset}, {end}) of {self.chunk!r}>"

    def open_grad_home(self) -> None:
        """Set `grad_home` to a view of the gradient's home: a new one, or that of the last step if it is spare."""
        spare, self.grad_spare = self.grad_spare, None
        dtype = self.chunk.dtype_of(Role.GRAD)
        memory = self.chunk.homes[Role.GRAD].shown
        view = None
        if spare is not None and type(memory) is memoryview and spare[0].dtype is dtype:
            home, view = spare
            home.data = self.shaped(elements(memory, dtype, self.numel, self.offset * dtype.itemsize))
        else:
            home = self.view(Role.GRAD)
        self.grad_home, self.grad_address, self.grad_view = home, home.data_ptr(), None
        if self.chunk.hides:
            if view is None or view.device != home.device:
                view = HiddenGradient(home, self.chunk.dtype, f"the gradient of {self.name}")
            view.begin(home)
            self.grad_view = view

    def close_grad_home(self) -> None:
        """Drop `grad_home`, of which the program may hold views."""
        self.grad_home = self.grad_view = None

    def views(self, role: Role) -> dict[str, torch.Tensor]:
        """Return the home of this parameter's part of `role`, by the names that users see."""
        found = {role.name: self.view(role)}
        if role.scale_block:
            start, count = self._scales(role)
            memory = self.chunk.homes[role].shown
            found[f"{role.name}_scale"] = elements(memory, torch.float32, count, self.chunk.numel + 4 * start)
        return found

    def byte_offsets(self, role: Role) -> dict[str, int]:
        """Return the offsets in bytes of the `views` of `role` in its home, without making them."""
        found = {role.name: self.offset * self.chunk.dtype_of(role).itemsize}
        if role.scale_block:
            found[f"{role.name}_scale"] = self.chunk.numel + 4 * self._scales(role)[0]
        return found

    def parts(self, role: Role, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return this parameter's part of `flat` (see `Chunk.over`), by the same names, 1-D."""
        if not role.scale_block:
            return {role.name: self.part(flat)}
        assert role.dtype is not None
        start, count = self._scales(role)
        scales = flat[self.chunk.numel :].view(torch.float32)[start : start + count]
        return {role.name: self.part(flat).view(role.dtype), f"{role.name}_scale": scales}

    def _scales(self, role: Role) -> tuple[int, int]:
        """Return the offset and count of this parameter's scales: each parameter before it in the chunk may have a
        last, shorter block."""
        before = self.offset // role.scale_block + self.chunk.parameters.index(self)
        return before, -(-self.numel // role.scale_block)

    def view(self, role: Role) -> torch.Tensor:
        """Return what the program sees of this parameter's part of the home of `role`, in its shape and strides, with a
        storage of its own."""
        assert self.code is None, f"{self.name} has codes at home, which are no values"
        dtype = self.chunk.dtype_of(role)
        flat = elements(self.chunk.homes[role].shown, dtype, self.numel, self.offset * dtype.itemsize)
        view = torch.empty(0, dtype=dtype, device=flat.device)
        view.data = self.shaped(flat)  # a view of `flat` would keep that memory alive when its `.data` is set
        return view

    def decoded(self) -> torch.Tensor:
        """Return the values of this quantised parameter, in memory of their own in host memory."""
        found = self.chunk.source(Role.PARAM)
        assert self.code is not None, f"{self.name} has no codes"
        assert isinstance(found, CodedHome), f"{self.name} has no codes"
        with torch.inference_mode(False):
            flat = torch.empty(self.numel, dtype=self.chunk.dtype, device="cpu")
            self.code.decode(found.codes, flat)
            return self.shaped(flat)

    def like(self) -> torch.Tensor:
        """Return a tensor with the shape, strides and dtype of the values at home, perhaps on `meta`."""
        if self.code is None:
            return self.home
        return torch.empty_strided(self.shape, self.stride, dtype=self.chunk.dtype, device="meta")

    def at_home(self, role: Role) -> torch.Tensor:
        """Return this parameter's part of the home of `role`, which hetmem writes, in its shape and strides."""
        return self.shaped(self.part(self.chunk.flat(role)))

    def shaped(self, flat: torch.Tensor) -> torch.Tensor:
        """Return `flat`, this parameter's elements, in its shape and strides."""
        if self.shape == flat.shape and self.stride == (1,):
            return flat  # a bias, say
        return flat.as_strided(self.shape, self.stride) if self.numel else flat.new_empty(self.shape)

    def part(self, flat: torch.Tensor) -> torch.Tensor:
        """Return this parameter's elements of `flat`, a 1-D tensor over a whole role of its chunk."""
        return flat[self.offset : self.offset + self.numel]

    def recast(self, home: torch.Tensor) -> None:
        """Cast `home`, which holds the parameter's values, to its 16-bit copy at home, if there is one."""
        if Role.COMPUTE in self.chunk.homes:
            with torch.no_grad():
                if self.chunk.homes[Role.COMPUTE].private is None:
                    self.at_home(Role.COMPUTE).copy_(home)
                else:  # what is as before stays the memory of all ranks
                    copy = self.view(Role.COMPUTE)
                    narrow = home.to(copy.dtype)
                    if not torch.equal(copy.view(torch.int16), narrow.view(torch.int16)):
                        copy.copy_(narrow)
