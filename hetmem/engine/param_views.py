"""What `p.data` and `p.grad` are at each moment: a home, the device copy for the length of an operator, a stand-in.

Owns the views of device slots and the maps from storages to parameters. It moves no bytes and decides nothing.

Note "use counts": a view of a weight, a tensor that autograd or a checkpoint saved, `ctx.weight` of a custom function
hold the storage of a slot. Every device view has a storage of its own, so the storage's reference count is the truth
about use: above what it was when the view was made, it is in use.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

import torch

from hetmem import torch_private
from hetmem.errors import ManageError
from hetmem.memory.chunk import Chunk, ManagedParameter
from hetmem.memory.device import DevicePool
from hetmem.memory.tensor_views import give_away


class Bindings:
    """The managed parameters of one model by identity and by storage."""

    def __init__(self, parameters: Iterable[ManagedParameter]) -> None:
        self.by_id: dict[int, ManagedParameter] = {}
        self.by_address: dict[int, ManagedParameter] = {}
        self.by_storage: dict[int, ManagedParameter] = {}
        """The handles of the storages that hetmem itself made for the same memory: faster to ask, and all that an
        operator's result may share. One that a program made of an address is in `by_address` alone."""
        self._away, self.rests = 0, False
        self.resting: list[ManagedParameter] = []
        """Those that rest in a backward; see `end_rest`."""
        self.learn(parameters)

    def learn(self, parameters: Iterable[ManagedParameter]) -> None:
        """Take note of the homes of `parameters`, and of nothing else: no device view may be open."""
        self.by_address.clear()
        self.by_storage.clear()
        for managed in parameters:
            self.by_id[id(managed.parameter)] = managed
            self._learn_home(managed)

    def _learn_home(self, managed: ManagedParameter) -> None:
        for tensor in (managed.home, managed.rest) if managed.numel else ():
            self.by_address[tensor.untyped_storage().data_ptr()] = managed
            self.by_storage[storage_address(tensor)] = managed

    def move_home(self, managed: ManagedParameter, home: torch.Tensor, rest: torch.Tensor) -> None:
        """`managed` has another home, with the same values, and rests as `rest`; device views stay."""
        parameter = managed.parameter
        unbound, parameter.__class__ = type(parameter), managed.kind
        at = parameter.data_ptr()
        at_home, resting = at == managed.home.data_ptr(), at == managed.rest.data_ptr()
        for tensor in (managed.home, managed.rest):
            self.by_address.pop(tensor.untyped_storage().data_ptr(), None)
            self.by_storage.pop(storage_address(tensor), None)
        managed.home, managed.rest = home, rest
        if at_home or resting:  # both, where it was on the device
            parameter.data = rest if self.rests or not at_home else home
        managed.home_address = home.data_ptr()
        managed.home_references = storage_references(home) + (parameter.data_ptr() != home.data_ptr())
        parameter.__class__ = unbound
        self._learn_home(managed)

    def of_storage(self, tensor: torch.Tensor) -> ManagedParameter | None:
        """The parameter whose home, stand-in or device slot `tensor` is a view of; None for any other tensor."""
        try:
            return self.by_address.get(tensor.untyped_storage().data_ptr())
        except RuntimeError:  # it has no memory: sparse, of a transform, of code that is being traced
            return None

    def open_device(self, managed: ManagedParameter, pool: DevicePool, slot: int) -> torch.Tensor:
        """The view of `managed` in device slot `slot`, made at its first use in this residence."""
        if managed.device is None:
            dtype = managed.chunk.compute_dtype
            view = managed.device = managed.shaped(pool.flat(slot, dtype, managed.numel, managed.offset))
            storage = view.untyped_storage()
            managed.device_storage, managed.device_address = storage._cdata, storage.data_ptr()
            del storage  # which counts
            managed.device_references = references(managed.device_storage)
            if managed.numel:
                self.by_address[managed.device_address] = managed
                self.by_storage[managed.device_storage] = managed
        return managed.device

    def open_all(self, chunk: Chunk, pool: DevicePool, slot: int) -> None:
        """The views of all parameters of `chunk`, whose copy is in device slot `slot`."""
        for managed in chunk.parameters:
            if managed.device is None:
                self.open_device(managed, pool, slot)

    def close_device(self, chunk: Chunk) -> None:
        """Forget the device views of `chunk`: its slot goes to another one."""
        for managed in chunk.parameters:
            if managed.device is not None:
                if managed.numel:
                    self._forget_device(managed)
                managed.device = None

    def _forget_device(self, managed: ManagedParameter) -> None:
        del self.by_address[managed.device_address]
        del self.by_storage[managed.device_storage]

    # ---- what a parameter is now -------------------------------------------------------------------------------

    def bind(self, used: Iterable[ManagedParameter]) -> None:
        """Operators see the device copies of `used` from here on."""
        for managed in used:
            assert managed.device is not None
            parameter = managed.parameter
            parameter.__class__ = managed.kind  # which tells nobody of `.data`
            parameter.data = managed.device
            parameter.__class__ = managed.bound_kind

    def unbind(self, used: Iterable[ManagedParameter]) -> None:
        """Operators see the copies of `used` no more: each rests, or is its home if nothing computes."""
        for managed in used:
            parameter = managed.parameter
            parameter.__class__ = managed.kind
            parameter.data = managed.rest if self._away else managed.home
            if self._away:
                parameter.__class__ = managed.unbound_kind
                if not self.rests and managed.rest is not managed.home:
                    self.resting.append(managed)

    def is_elsewhere(self, managed: ManagedParameter) -> bool:
        """Whether somebody has set `managed.parameter.data`, which was bound."""
        at = managed.parameter.data_ptr()
        if managed.device is not None and at == managed.device.data_ptr():
            return False
        return at not in (managed.home.data_ptr(), managed.rest.data_ptr())

    @property
    def away(self) -> bool:
        """Whether something computes, so that parameters which are not bound are no ordinary ones."""
        return self._away > 0

    def leave_home(self, *, backward: bool = False) -> None:
        """Compute begins: what is not bound is asked for by whoever meets it, and rests. A custom function of autograd
        takes a parameter as it is, and expects its gradient on the device, and of the dtype, that it then has. In a
        `backward` parameters stay at home, as a graph from outside of forwards has saved the parameters themselves."""
        self._away += 1
        if self._away == 1:
            self.rests = not backward
            self.rest([managed for managed in self.by_id.values() if not managed.bound])

    def rest(self, managed_ones: Iterable[ManagedParameter]) -> None:
        """`managed_ones`, which are at home, rest as all others do while something computes."""
        for managed in managed_ones:
            parameter = managed.parameter
            if self.rests and managed.rest is not managed.home:
                parameter.data = managed.rest
            parameter.__class__ = managed.unbound_kind

    def end_rest(self) -> None:
        """What rests in a backward, as something computed it once more, is its home again: that is over. Until then it
        must not change its dtype, or torch adds its gradients up in another order."""
        while self.resting:
            managed = self.resting.pop()
            parameter = managed.parameter
            if not managed.bound and type(parameter) is managed.unbound_kind:
                parameter.__class__ = managed.kind
                parameter.data = managed.home
                parameter.__class__ = managed.unbound_kind

    def go_home(self) -> None:
        """Compute has ended: every parameter is its home again, unless something around it still computes."""
        self._away = max(0, self._away - 1)
        if not self._away:
            self.end_rest()
            rests, self.rests = self.rests, False
            for managed in self.by_id.values():
                parameter = managed.parameter
                if type(parameter) is managed.unbound_kind:
                    parameter.__class__ = managed.kind
                    if rests and managed.rest is not managed.home:
                        parameter.data = managed.home

    def all_home(self) -> None:
        """Nothing computes, whatever had begun to."""
        self._away = min(1, self._away)
        self.go_home()

    def send_home(self, managed: ManagedParameter) -> bool:
        """`managed`, if it rests, is its home, for whoever reads it while nothing computes; whether it did."""
        parameter = managed.parameter
        if type(parameter) is not managed.unbound_kind:
            return False
        parameter.__class__ = managed.kind
        if managed.rest is not managed.home and (self.rests or managed in self.resting):
            parameter.data = managed.home
        return True

    @staticmethod
    def held(managed: ManagedParameter) -> bool:
        """Whether anybody still has memory of the device view (which must not be bound)."""
        return managed.device is not None and references(managed.device_storage) > managed.device_references

    def leave_to_holders(self, managed: ManagedParameter) -> None:
        """`managed` becomes another tensor's values: whoever holds its device view keeps what that shows. Raises
        `ManageError` where they cannot."""
        if managed.device is None or not managed.numel or not self.held(managed):
            return
        if not give_away(managed.device):
            raise ManageError(
                f"{managed.name}.data was set within a forward while a view of what it was is held (as in "
                f"`kept = self.weight.data`): keep a clone of it"
            )
        self._forget_device(managed)
        managed.device = None


references: Any = torch_private.storage_references
storage_address: Any = torch_private.storage_address


def storage_references(tensor: torch.Tensor) -> int:
    """How often the memory of `tensor` is referred to, by tensors and by what C++ holds."""
    return references(tensor.untyped_storage()._cdata)  # type: ignore[no-any-return]


def is_shared(tensor: torch.Tensor) -> bool:
    """Whether anybody but `tensor`, which is no view, holds its memory (and the handle that counts)."""
    return references(tensor.untyped_storage()._cdata) > 2  # type: ignore[no-any-return]


def rest_of(managed: ManagedParameter, home: torch.Tensor, device: torch.device) -> torch.Tensor:
    """What `managed` is between operators that run on `device`, with its home where `home` is. Its stand-in was made
    when it was managed: a home comes back from the device just when there is no memory for one."""
    if managed.chunk.compute_dtype is managed.chunk.dtype and home.device == device:
        return home
    assert managed.stand_in is not None
    return managed.stand_in


def stand_in(like: torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of `dtype` on `device` in the shape of `like` that takes no memory and reads as NaN."""
    nothing = float("nan") if dtype.is_floating_point or dtype.is_complex else 0
    return torch.full((), nothing, dtype=dtype, device=device).expand(like.shape)


_ZERO = (torch.ops.aten.zero_.default, torch.ops.aten._foreach_zero_.default)


class UsedUp(torch.Tensor):
    """The used up gradient of the parameter called `name`. Only `zero_grad` may touch it: `hetmem_zeroed` says so.
    `hetmem_stepped`: the step that has used it up is over."""

    hetmem_name: str
    hetmem_zeroed: bool
    hetmem_stepped: bool

    @staticmethod
    def __new__(cls, like: torch.Tensor, element: torch.Tensor, name: str, *, stepped: bool) -> UsedUp:
        """In the shape of `like`, all of it the one `element`."""
        made = torch_private.make_subclass(cls, element.as_strided(like.shape, [0] * like.dim()))
        made.hetmem_name, made.hetmem_zeroed, made.hetmem_stepped = name, False, stepped
        return made

    def __init__(self, like: torch.Tensor, element: torch.Tensor, name: str, *, stepped: bool) -> None:
        pass

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch has no types there
        return f"<the gradient of {self.hetmem_name}, used up by its update>"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares it without `func`
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        leaves = [leaf for leaf in torch_private.tree_leaves((args, kwargs)) if isinstance(leaf, cls)]
        if func in _ZERO:
            for leaf in leaves:
                leaf.hetmem_zeroed = True
            return args[0]
        if any(leaf.hetmem_stepped for leaf in leaves):
            raise RuntimeError(
                f"{func} met the gradient of {leaves[0].hetmem_name}, which the last step() has used up "
                f"(overlap='forward' or gradients='streamed'): read gradients before step(), or use overlap='backward' "
                f"and gradients='visible', which keep them"
            )
        name = next((leaf.hetmem_name for leaf in leaves), "a parameter")
        raise RuntimeError(
            f"{func} met the gradient of {name}, which its update has used up during backward "
            f"(gradients='streamed'): nothing can be clipped, scaled or measured any more. To clip, use "
            f"gradients='visible' with max_grad_norm=, or with overlap='off'"
        )


def clear_zeroed(parameter: torch.Tensor) -> None:
    """A gradient of `parameter` arrives. Raise RuntimeError if one that a step has used up was not cleared before."""
    gradient = parameter.grad
    if not isinstance(gradient, UsedUp):
        return
    if not gradient.hetmem_zeroed:
        raise RuntimeError(
            f"a gradient of {gradient.hetmem_name} arrives, and that of the last step was not cleared: torch would add "
            f"to it, but its update has used it up (overlap='forward' or gradients='streamed'): call zero_grad() "
            f"between step() and the next backward, or use overlap='backward' and gradients='visible', which keep it"
        )
    parameter.grad = None


def refuse_used_up(parameters: Iterable[torch.Tensor]) -> None:
    """Raise RuntimeError if a step would begin with gradients in `parameters` that the step before has used up."""
    gradients = [parameter.grad for parameter in parameters]
    for gradient in gradients if UsedUp in set(map(type, gradients)) else ():
        if isinstance(gradient, UsedUp) and gradient.hetmem_stepped:
            raise RuntimeError(
                f"the gradient of {gradient.hetmem_name} is that of the last step, which has used it up "
                f"(overlap='forward' or gradients='streamed'), and torch would step with it, or with zeros, once more: "
                f"call zero_grad() between step() and the next backward, which leaves None behind"
            )


def is_as_it_was(gradient: torch.Tensor | None, used: torch.Tensor) -> bool:
    """Whether `gradient`, which a parameter has, is `used`, or what stands for that once it is used up."""
    return gradient is used or (isinstance(gradient, UsedUp) and not gradient.hetmem_zeroed)


def updated_by_another(name: str) -> str:
    """What is wrong where an optimizer steps the parameter called `name`, and another one has begun to."""
    return (
        f"{name} was updated during backward by another optimizer, made with overlap=, whose step() was to be called: "
        f"make that with overlap='off', or drop it before the backward"
    )


class Marks:
    """The gradients of one optimizer that are shown as used up."""

    def __init__(self) -> None:
        self._marked: list[torch.Tensor] = []
        self._elements: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}

    def put(self, parameters: Iterable[ManagedParameter], *, stepped: bool = False) -> None:
        """Those of `parameters` that have no gradient have had one. `stepped`: until it is cleared."""
        for managed in parameters:
            parameter = managed.parameter
            if parameter.grad is not None:
                continue
            key = parameter.dtype, parameter.device
            if key not in self._elements:
                self._elements[key] = torch.zeros(1, dtype=parameter.dtype, device=parameter.device)
            parameter.grad = UsedUp(parameter, self._elements[key], managed.name, stepped=stepped)
            if not stepped:
                self._marked.append(parameter)

    def drop(self) -> None:
        """None is what a used up gradient is from now on."""
        for parameter in self._marked:
            if isinstance(parameter.grad, UsedUp):
                parameter.grad = None
        self._marked.clear()


class InForkedChild(torch.nn.Parameter):
    """A tensor whose home the process does not have: every function of torch over it raises `ManageError`."""

    @classmethod
    def __torch_function__(
        cls,
        func: object,
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> NoReturn:
        raise ManageError(
            "this tensor lies in memory of hetmem, and this process, made by fork(), has none of it: use the model in "
            "the process that manages it. Give workers of a DataLoader ordinary tensors (weight.detach().clone()), or "
            "make them before hetmem.manage, or by multiprocessing_context='spawn'"
        )


def refuse_in_child(tensor: torch.Tensor) -> None:
    """Let every use of `tensor` raise; called in the child, where reading it would be a segmentation fault."""
    tensor.__class__ = InForkedChild
