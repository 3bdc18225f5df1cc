"""Sets `p.grad`: to the home of the gradient, or to a stand-in for a gradient that an update has consumed.

The one writer of `p.grad`. Also carries out the copies of gradients in flight from the device to their homes.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Container, Iterable, Sequence
from functools import partial
from itertools import repeat
from operator import and_, attrgetter, eq, is_
from types import SimpleNamespace
from typing import Any

import torch

from hetmem import torch_private
from hetmem.base.warning import warn_user
from hetmem.base.weak import weakly
from hetmem.engine.executor import Executor
from hetmem.engine.param_views import get_data, is_in_place, is_shared, references, set_data, storage_address
from hetmem.memory.chunk import Chunk, HiddenGradient, Home, ManagedParameter, Role, UnreadableGradient, stored
from hetmem.memory.transfer import TransferEngine
from hetmem.schedule.blocks import SMALL_BYTES, Link
from hetmem.schedule.gradients import GradientSends, Send
from hetmem.schedule.residency import Residency
from hetmem.schedule.trace import Tier

_GRADIENT = attrgetter("grad")
_GRAD_HOME, _GRAD_ADDRESS = attrgetter("grad_home"), attrgetter("grad_address")


def show_gradient(parameter: torch.Tensor, gradient: torch.Tensor | None) -> None:
    """Set `p.grad`. For a gradient on another device, or of another dtype, `.data` is that gradient meanwhile, as torch
    accepts such a gradient from autograd only."""
    if gradient is None or (gradient.device == parameter.device and gradient.dtype is parameter.dtype):
        parameter.grad = gradient
        return
    home = parameter.data
    if type(gradient) is HiddenGradient:  # has no memory that a parameter could show
        parameter.data = torch.empty((), dtype=gradient.dtype, device=gradient.device).expand(gradient.shape)
    else:
        parameter.data = gradient
    try:
        parameter.grad = gradient
    finally:
        parameter.data = home


def to_host_memory(managed: ManagedParameter) -> None:
    """Make the parameter and its gradient ordinary tensors in host memory, as the model is released."""
    parameter = managed.parameter
    gradient = take_gradient(parameter)
    parameter.data = parameter.data.to("cpu", copy=True, memory_format=torch.preserve_format)
    if gradient is not None and not isinstance(gradient, ConsumedGradient):
        gradient = stored(gradient).to("cpu", gradient.dtype, copy=True, memory_format=torch.preserve_format)
        parameter.grad = gradient


def take_gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    """Take `p.grad` away and return it."""
    gradient = parameter.grad
    if gradient is not None:
        parameter.grad = None
    return gradient


def hide_gradients(bound: Iterable[ManagedParameter]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Take away each `p.grad` of `bound` whose device or dtype differs from the parameter's now, as a compiler expects
    them to be equal. Returns parameters and gradients, for `show_gradient`."""
    hidden: list[tuple[torch.Tensor, torch.Tensor]] = []
    for managed in bound:
        parameter = managed.parameter
        gradient = parameter.grad
        if gradient is not None and not (gradient.device == parameter.device and gradient.dtype is parameter.dtype):
            hidden.append((parameter, gradient))
            parameter.grad = None
    return hidden


def is_home_gradient(managed: ManagedParameter) -> bool:
    """Return whether `p.grad` is the home of the gradient, as hetmem left it there."""
    gradient = managed.parameter.grad
    return gradient is not None and is_home(gradient, managed)


def is_home(gradient: torch.Tensor, managed: ManagedParameter) -> bool:
    """Return whether `gradient` is, or shows, `managed.grad_home`, at the address where hetmem made it."""
    tensor: torch.Tensor = stored(gradient)
    return tensor is managed.grad_home and tensor.data_ptr() == managed.grad_address


def are_home(gradients: Sequence[torch.Tensor], managed: Sequence[ManagedParameter]) -> list[bool]:
    """Return `is_home` of each of `gradients`, of a chunk in C alone."""
    tensors = [*map(stored, gradients)] if HiddenGradient in set(map(type, gradients)) else gradients
    same = map(is_, tensors, map(_GRAD_HOME, managed))
    in_place = map(eq, map(torch.Tensor.data_ptr, tensors), map(_GRAD_ADDRESS, managed))
    return [*map(and_, same, in_place)]


def move_gradient(managed: ManagedParameter, gradient: torch.Tensor | None) -> None:
    """Make `gradient` a view of the role's present memory, and `managed.grad_home`: a tensor that the program may hold
    stays the same object."""
    if gradient is not None:
        gradient.data = managed.view(Role.GRAD)
        managed.grad_address = gradient.data_ptr()
    managed.grad_home = gradient


def show_widened(managed: ManagedParameter) -> None:
    """Make the gradient's home `p.grad`, where that was a view of a gradient kept in 16 bits and is float32 now."""
    view, managed.grad_view = managed.grad_view, None
    if view is not None and managed.parameter.grad is view:
        show_gradient(managed.parameter, managed.grad_home)


_alone = SimpleNamespace(grad_home=object())
_REFERENCES = sys.getrefcount(_alone.grad_home)
"""`getrefcount` of an object to which one attribute alone refers."""


def leave_gradient_to_holders(managed: ManagedParameter, warned: list[str], *, others: int = 0) -> None:
    """Give a gradient of an earlier backward that the program keeps (`kept = p.grad; p.grad = None`) memory of its own,
    as the next gradient goes to the same home, where torch would make a new tensor. Views of it (`p.grad.detach()`)
    keep showing the home: the first one gets a warning, noted in `warned`. `others`: how many other references hetmem
    has to the tensor, as the update that has used it."""
    if managed.grad_home is None or not managed.numel or not is_held(managed, others=others):
        return
    if is_shared(managed.grad_home) and not warned:
        warned.append(managed.name)
        warn_user(
            f"a view of an earlier p.grad of {managed.name} is kept, and will show the next gradient, as hetmem "
            f"puts that in the same place: keep p.grad itself, or a clone of it (said once)",
        )
    with torch.no_grad():
        managed.grad_home.data = managed.grad_home.clone()
    managed.close_grad_home()


def is_held(managed: ManagedParameter, *, others: int = 0) -> bool:
    """Return whether the program holds the gradient's home, which is not `p.grad` now, or a view of it. `others`: how
    many other references hetmem has to it."""
    view = managed.grad_view is not None
    if (sys.getrefcount(managed.grad_view) if view else sys.getrefcount(managed.grad_home)) > _REFERENCES + others:
        return managed.grad_home is not None
    home = managed.grad_home
    return home is not None and references(home.untyped_storage()._cdata) > 2  # as `is_shared`


Given = tuple[ManagedParameter, torch.Tensor, torch.Tensor | None, int, bool]
"""A parameter, its working weight (see `placing.working`), the tensor to which the running backward adds its gradient
(None: it is added at the end), that tensor's version, and whether there was no gradient before."""


def let_arrive(
    used: Iterable[tuple[ManagedParameter, torch.Tensor]], fresh: Container[ManagedParameter] | None
) -> list[Given]:
    """Have autograd add gradients of the working weights in `used` to `p.grad`, which for those in `fresh` becomes the
    home here. `fresh` None: autograd adds to nothing, and `take_arrived` returns the gradients."""
    given: list[Given] = []
    for managed, weight in used:
        parameter, is_fresh = managed.parameter, fresh is not None and managed in fresh
        if is_fresh and parameter.dtype is managed.chunk.dtype:
            parameter.grad = managed.grad_home
        elif is_fresh:  # the parameter rests, as a forward is around
            show_gradient(parameter, managed.grad_home)
        gradient = parameter.grad if fresh is not None else None
        if type(gradient) is not torch.Tensor:
            gradient = None
        if gradient is not None:  # as `show_gradient`
            own = get_data(weight)
            set_data(weight, gradient)
            weight.grad = gradient
            set_data(weight, own)
        given += ((managed, weight, gradient, 0 if gradient is None else gradient._version, is_fresh),)
    return given


def take_arrived(given: Iterable[Given]) -> list[tuple[ManagedParameter, torch.Tensor, torch.Tensor | None]]:
    """End `let_arrive`: a parameter without a new gradient has none, or the one from before. Return parameters and new
    gradients that autograd did not add in place, with the tensors they belong to."""
    others: list[tuple[ManagedParameter, torch.Tensor, torch.Tensor | None]] = []
    for managed, weight, gradient, version, is_fresh in given:
        arrived, weight.grad = weight.grad, None
        if arrived is not gradient and arrived is not None:
            others += ((managed, arrived, gradient),)
        elif is_fresh and gradient is not None and gradient._version == version and managed.parameter.grad is gradient:
            managed.parameter.grad = None
    return others


def are_own(homes: list[torch.Tensor | None], addresses: list[int]) -> bool:
    """Return whether the program holds none of `homes` of gradients, which are not `p.grad` now, nor views of them, and
    all are at `addresses`: `is_held` of many, in C alone."""
    if any(map(is_, homes, repeat(None))):
        return False
    found: Any = homes
    alone = max(map(sys.getrefcount, found), default=0) <= _REFERENCES_OF_LISTED
    alone = alone and max(map(references, map(storage_address, found)), default=0) <= 1
    return alone and [*map(torch.Tensor.data_ptr, found)] == addresses


def _references_of_listed() -> int:
    listed = [SimpleNamespace(grad_home=object())]
    return max(map(sys.getrefcount, [each.grad_home for each in listed]))


_REFERENCES_OF_LISTED = _references_of_listed()
"""`getrefcount` of an object to which one attribute and one list alone refer."""


# ---- gradients that an update has consumed -----------------------------------------------------------------------


class ConsumedGradient(UnreadableGradient):
    """Stands for a gradient that an update has consumed: `zero_grad` clears it (`hetmem_zeroed`). With None in its
    place a clip before `step()` would use a norm of 0, and after it (`hetmem_stepped`) the next backward would not add
    to the gradient."""

    exist = False
    """Whether one was ever made."""
    hetmem_name: str
    hetmem_zeroed: bool
    hetmem_stepped: bool

    @staticmethod
    def __new__(cls, parameter: torch.Tensor, name: str) -> ConsumedGradient:
        """Make one for `parameter`, called `name`."""
        made: ConsumedGradient = cls.like(parameter, parameter.dtype)
        ConsumedGradient.exist = True
        made.hetmem_name, made.hetmem_zeroed, made.hetmem_stepped = name, False, False
        return made

    def __init__(self, parameter: torch.Tensor, name: str) -> None:
        pass

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch has no types there
        return f"<the gradient of {self.hetmem_name}, used up by its update>"

    def zero(self) -> None:
        self.hetmem_zeroed = True

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares it without `func`
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        found = [each for each in torch_private.tree_leaves((args, kwargs)) if isinstance(each, UnreadableGradient)]
        zeroed = all(isinstance(each, ConsumedGradient) and each.hetmem_zeroed for each in found)
        if zeroed and not (func.is_view or is_in_place(func.overloadpacket)):  # reading one shows zeros
            args, kwargs = torch_private.tree_map(_zeros_for, (args, kwargs or {}))
            return func(*args, **kwargs)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def refused(self, what: object) -> str:
        if self.hetmem_stepped:
            return (
                f"{what} met the gradient of {self.hetmem_name}, which the last step() has used up "
                f"(overlap='forward' or gradients='streamed'): read gradients before step(), or use overlap='backward' "
                f"and gradients='visible', which keep them"
            )
        return (
            f"{what} met the gradient of {self.hetmem_name}, which its update has used up during backward "
            f"(gradients='streamed'): nothing can be clipped, scaled or measured any more. To clip, use "
            f"gradients='visible' with max_grad_norm=, or with overlap='off'"
        )


def _zeros_for(value: Any) -> Any:
    if not isinstance(value, ConsumedGradient):
        return value
    return torch.zeros((), dtype=value.dtype, device=value.device).expand(value.shape)


def clear_zeroed(parameter: torch.Tensor) -> None:
    """Clear a zeroed stand-in for a consumed gradient, as a new gradient of `parameter` arrives. Raises RuntimeError if
    the program has not zeroed it."""
    gradient = parameter.grad
    if not isinstance(gradient, ConsumedGradient):
        return
    if not gradient.hetmem_zeroed:
        raise RuntimeError(
            f"a gradient of {gradient.hetmem_name} arrives, and that of the last step was not cleared: torch would add "
            f"to it, but its update has used it up (overlap='forward' or gradients='streamed'): call zero_grad() "
            f"between step() and the next backward, or use overlap='backward' and gradients='visible', which keep it"
        )
    parameter.grad = None


def refuse_consumed(parameters: Iterable[torch.Tensor]) -> None:
    """Raise RuntimeError if a step would begin with gradients of `parameters` that the step before has consumed."""
    for gradient in map(_GRADIENT, parameters) if ConsumedGradient.exist else ():
        if isinstance(gradient, ConsumedGradient) and gradient.hetmem_stepped:
            raise RuntimeError(
                f"the gradient of {gradient.hetmem_name} is that of the last step, which has used it up "
                f"(overlap='forward' or gradients='streamed'), and torch would step with it, or with zeros, once more: "
                f"call zero_grad() between step() and the next backward, which leaves None behind"
            )


def is_as_it_was(gradient: torch.Tensor | None, used: torch.Tensor) -> bool:
    """Return whether a parameter's `gradient` is `used`, the one that an update reads, or its stand-in, not zeroed."""
    return gradient is used or (isinstance(gradient, ConsumedGradient) and not gradient.hetmem_zeroed)


def updated_by_another(name: str) -> str:
    """Return the message for a step of the parameter called `name` whose update another optimizer has begun."""
    return (
        f"{name} was updated during backward by another optimizer, made with overlap=, whose step() was to be called: "
        f"make that with overlap='off', or drop it before the backward"
    )


# ---- gradients in flight -------------------------------------------------------------------------------------------


def _without_functions(work: Callable[[], None]) -> None:
    """Do `work`, which writes to a gradient in flight, that a use of the program waits for."""
    with torch_private.NoFunctionsOfSubclasses():
        work()


class GradientCopies:
    """Carries out what `GradientSends` decides: gradients in flight from the device to their homes."""

    def __init__(self, engine: TransferEngine, residency: Residency, executor: Executor, most_bytes: int) -> None:
        self._engine, self._residency, self._executor = engine, residency, executor
        self.sends: GradientSends[Chunk] = GradientSends(executor, most_bytes)
        self.arriving = self.sends.arriving
        self._unlimited = engine.unlimited(Link.DEVICE_TO_HOST)
        self.loss_listeners: Iterable[Any] = ()
        """The `GradientListener`s, whose `lost` is called if a gradient of a chunk was sent and did not arrive."""
        self.sent: Callable[[], Callable[[], None] | None] = lambda: None
        """A weak reference to the function that is called after each gradient sent."""
        self.leaving: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        """The device memory of gradients in flight, by number of the send."""

    def send_now(self, home: Home, work: Callable[[], None], nbytes: int) -> None:
        """Run `work`, which copies `nbytes` from the device to `home`, on this thread."""
        if home.tier is Tier.DEVICE:
            work()
        else:
            self._engine.copy_now(Link.DEVICE_TO_HOST, work, nbytes)

    def send(self, chunk: Chunk, work: Callable[[], None], nbytes: int, gradient: torch.Tensor) -> None:
        """Run `work`, which copies `gradient`, of `nbytes` at home, to the home of `chunk`: a small one on this thread,
        others while the backward goes on. Then end the lease of the staged role, if it is on NVMe."""
        home = chunk.homes[Role.GRAD]
        if home.tier is Tier.DEVICE or (self._unlimited and nbytes < SMALL_BYTES and not self.sends.on_their_way):
            try:
                if home.tier is Tier.DEVICE:
                    work()
                else:
                    self._engine.copy_now(Link.DEVICE_TO_HOST, work, nbytes)
            finally:
                if home.tier is Tier.NVME:
                    self._end_lease(home)
            if (sent := self.sent()) is not None:
                sent()
            if home.tier is Tier.NVME:
                self._write_back(chunk, home)
            return
        memory = weakref.ref(gradient.untyped_storage())
        send = self.sends.send(chunk, nbytes)
        self.leaving[send.number] = memory
        ended = partial(weakly(self._arrived), chunk, send)
        self._executor.copy_beside(Link.DEVICE_TO_HOST, partial(_without_functions, work), nbytes, ended)
        if (sent := self.sent()) is not None:
            sent()
        self.sends.wait_for_room()

    def _arrived(self, chunk: Chunk, send: Send, error: BaseException | None) -> None:
        del self.leaving[send.number]
        self.sends.arrived(chunk, send)
        home = chunk.homes[Role.GRAD]
        if home.tier is Tier.NVME:
            self._end_lease(home)
        if error is not None:
            for listener in self.loss_listeners:
                listener.lost(chunk)
            raise error
        if home.tier is Tier.NVME:
            self._write_back(chunk, home)

    def _end_lease(self, home: Home) -> None:
        """End the lease of the staged role that was opened before the gradient was sent."""
        assert home.block is not None
        self._executor.execute(self._residency.release(home.block, Tier.HOST, dirty=True))

    def _write_back(self, chunk: Chunk, home: Home) -> None:
        """Write the gradients of `chunk` to NVMe once all have arrived: see note "writes of gradients" in
        `schedule.gradients`."""
        if self.sends.to_be_written(chunk):
            assert home.block is not None
            self._executor.execute(self._residency.settle(home.block))

    @property
    def under_way(self) -> bool:
        """Whether any gradient is in flight."""
        return self.sends.under_way

    @property
    def leaving_bytes(self) -> int:
        """Device bytes that gradients in flight still take; one that has arrived is free before its end is handled."""
        if not self.leaving:
            return 0
        storages = [memory() for memory in self.leaving.values()]
        return sum({id(storage): storage.nbytes() for storage in storages if storage is not None}.values())

    def wait(self) -> None:
        """Wait until every gradient has arrived; then raise the first error, if there was one."""
        self._executor.wait_while(lambda: self.sends.under_way)
