"""What `p.grad` is at each moment: the home of the gradient, one that arrives, a sign that an update has used it up.

The one writer of `p.grad`. Below are the copies of gradients that are on their way from the device to their homes.
"""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Callable, Container, Iterable, Sequence
from functools import partial
from itertools import repeat
from operator import and_, attrgetter, eq, is_
from types import SimpleNamespace
from typing import Any

import torch

from hetmem import torch_private
from hetmem.base.weak import weakly
from hetmem.engine.executor import Executor
from hetmem.engine.param_views import get_data, is_shared, references, set_data, storage_address
from hetmem.memory.chunk import ZEROING, Chunk, HiddenGradient, Home, ManagedParameter, Role, stored
from hetmem.memory.transfer import TransferEngine
from hetmem.schedule.blocks import SMALL_BYTES, Link
from hetmem.schedule.gradients import GradientSends, Send
from hetmem.schedule.residency import Residency
from hetmem.schedule.trace import Tier

_GRADIENT = attrgetter("grad")
_GRAD_HOME, _GRAD_ADDRESS = attrgetter("grad_home"), attrgetter("grad_address")


def show_gradient(parameter: torch.Tensor, gradient: torch.Tensor | None) -> None:
    """Set `p.grad`. For one on another device, or of another dtype, `parameter` is that gradient for as long: torch
    refuses it from anything but autograd otherwise."""
    if gradient is None or (gradient.device == parameter.device and gradient.dtype is parameter.dtype):
        parameter.grad = gradient
        return
    home = parameter.data
    if type(gradient) is HiddenGradient:  # it has no memory that a parameter could have
        parameter.data = torch.empty((), dtype=gradient.dtype, device=gradient.device).expand(gradient.shape)
    else:
        parameter.data = gradient
    try:
        parameter.grad = gradient
    finally:
        parameter.data = home


def to_host_memory(managed: ManagedParameter) -> None:
    """Make the parameter, and its gradient, ordinary tensors in host memory, as the model is released."""
    parameter = managed.parameter
    gradient = take_gradient(parameter)
    parameter.data = parameter.data.to("cpu", copy=True, memory_format=torch.preserve_format)
    if gradient is not None and not isinstance(gradient, UsedUp):
        gradient = stored(gradient).to("cpu", gradient.dtype, copy=True, memory_format=torch.preserve_format)
        parameter.grad = gradient


def take_gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    """Take `p.grad` away and return it."""
    gradient = parameter.grad
    if gradient is not None:
        parameter.grad = None
    return gradient


def hide_gradients(bound: Iterable[ManagedParameter]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Take away each `p.grad` of `bound` that is on another device, or of another dtype, than the parameter is now, as
    a compiler takes both for tensors of one device. Returns what `show_gradient` gives back."""
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
    """Return whether `gradient` is, or shows, the home of that of `managed`, and where that was made."""
    kept: torch.Tensor = stored(gradient)
    return kept is managed.grad_home and kept.data_ptr() == managed.grad_address


def are_home(gradients: Sequence[torch.Tensor], managed: Sequence[ManagedParameter]) -> list[bool]:
    """Return `is_home` of each of `gradients`: of those of a chunk by C alone."""
    kept = [*map(stored, gradients)] if HiddenGradient in set(map(type, gradients)) else gradients
    same = map(is_, kept, map(_GRAD_HOME, managed))
    there = map(eq, map(torch.Tensor.data_ptr, kept), map(_GRAD_ADDRESS, managed))
    return [*map(and_, same, there)]


def move_gradient(managed: ManagedParameter, gradient: torch.Tensor | None) -> None:
    """Make `gradient` the home of that of `managed`, at the present place of the role: the tensor that the program may
    hold stays the same one."""
    if gradient is not None:
        gradient.data = managed.view(Role.GRAD)
        managed.grad_address = gradient.data_ptr()
        if gradient is not managed.grad_home:
            managed.grad_version = gradient._version
    managed.grad_home = gradient


def show_widened(managed: ManagedParameter) -> None:
    """Let the gradient of `managed`, which was kept in fewer bits and has a home in all of them now, be `p.grad`."""
    view, managed.grad_view = managed.grad_view, None
    if view is not None and managed.parameter.grad is view:
        show_gradient(managed.parameter, managed.grad_home)


_alone = SimpleNamespace(grad_home=object())
_REFERENCES = sys.getrefcount(_alone.grad_home)
"""Of what one attribute alone refers to, as they are counted here."""


def leave_gradient_to_holders(managed: ManagedParameter, warned: list[str], *, others: int = 0) -> None:
    """Give a gradient of an earlier backward that the program keeps (`kept = p.grad; p.grad = None`) memory of its own,
    as the next one goes to the same home: torch makes a new tensor. Views of it (`p.grad.detach()`) cannot be told from
    the memory that they show: of the first there is a warning, in `warned`. `others`: how often hetmem itself refers to
    the tensor elsewhere, as the update that has used it does."""
    if managed.grad_home is None or not managed.numel or not is_kept(managed, others=others):
        return
    if is_shared(managed.grad_home) and not warned:
        warned.append(managed.name)
        warnings.warn(
            f"a view of an earlier p.grad of {managed.name} is kept, and will show the next gradient, as hetmem "
            f"puts that in the same place: keep p.grad itself, or a clone of it (said once)",
            stacklevel=2,
        )
    with torch.no_grad():
        managed.grad_home.data = managed.grad_home.clone()
    managed.close_grad_home()


def is_kept(managed: ManagedParameter, *, others: int = 0) -> bool:
    """Return whether the program holds the home of the gradient of `managed`, which is no `p.grad`, or a view of it."""
    view = managed.grad_view is not None
    if (sys.getrefcount(managed.grad_view) if view else sys.getrefcount(managed.grad_home)) > _REFERENCES + others:
        return managed.grad_home is not None
    return managed.grad_home is not None and references(storage_address(managed.grad_home)) > 1


Given = tuple[ManagedParameter, torch.Tensor, torch.Tensor | None, int, bool]
"""A working weight (see `placing.working`) of a parameter, what its gradient is added to in the backward that runs
(None: it is handed over at the end), which version that has, and whether there was no gradient before."""


def let_arrive(
    used: Iterable[tuple[ManagedParameter, torch.Tensor]], fresh: Container[ManagedParameter] | None
) -> list[Given]:
    """Have autograd add gradients of the working weights in `used` to what `p.grad` is; for those `fresh` that is the
    home, which it becomes here. None: nothing is added, what arrives is handed over."""
    given: list[Given] = []
    for managed, weight in used:
        parameter, is_fresh = managed.parameter, fresh is not None and managed in fresh
        if is_fresh and parameter.dtype is managed.chunk.dtype:
            parameter.grad = managed.grad_home
        elif is_fresh:  # it rests, in a forward around
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
    """End `let_arrive`: where nothing has arrived there is no gradient, or the one from before. Return what was not
    added to what was given for it, with that."""
    others: list[tuple[ManagedParameter, torch.Tensor, torch.Tensor | None]] = []
    for managed, weight, gradient, version, is_fresh in given:
        arrived, weight.grad = weight.grad, None
        if arrived is not gradient and arrived is not None:
            others += ((managed, arrived, gradient),)
        elif is_fresh and gradient is not None and gradient._version == version and managed.parameter.grad is gradient:
            managed.parameter.grad = None
    return others


def are_own(homes: list[torch.Tensor | None], addresses: list[int]) -> bool:
    """Return whether the program holds none of `homes` of gradients, none of which is a `p.grad`, nor a view of one,
    and all are at `addresses`: `is_kept` of many, by C alone."""
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
"""Of what one attribute and one list alone refer to, as they are counted there."""


# ---- gradients that an update has used up ------------------------------------------------------------------------


class UsedUp(torch.Tensor):
    """Stands in `p.grad` for a gradient that an update has used up: its shape, no memory, and an error for all that
    computes with it but `zero_grad` (`hetmem_zeroed`). None would make a clip in between clip by a norm of 0, and,
    behind the step (`hetmem_stepped`), the next backward forget to add to it."""

    exist = False
    """Whether one was ever made."""
    hetmem_name: str
    hetmem_zeroed: bool
    hetmem_stepped: bool

    @staticmethod
    def __new__(cls, like: torch.Tensor, element: torch.Tensor, name: str) -> UsedUp:
        """Make one in the shape of `like`, all of it the one `element`, for the parameter called `name`."""
        made = torch_private.make_subclass(cls, element.as_strided(like.shape, [0] * like.dim()))
        UsedUp.exist = True
        made.hetmem_name, made.hetmem_zeroed, made.hetmem_stepped = name, False, False
        return made

    def __init__(self, like: torch.Tensor, element: torch.Tensor, name: str) -> None:
        pass

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch has no types there
        return f"<the gradient of {self.hetmem_name}, used up by its update>"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares it without `func`
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        leaves = [leaf for leaf in torch_private.tree_leaves((args, kwargs)) if isinstance(leaf, cls)]
        if func in ZEROING:
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
    """Raise RuntimeError where a gradient of `parameter` arrives, and one that a step has used up was not cleared."""
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
    for gradient in map(_GRADIENT, parameters) if UsedUp.exist else ():
        if isinstance(gradient, UsedUp) and gradient.hetmem_stepped:
            raise RuntimeError(
                f"the gradient of {gradient.hetmem_name} is that of the last step, which has used it up "
                f"(overlap='forward' or gradients='streamed'), and torch would step with it, or with zeros, once more: "
                f"call zero_grad() between step() and the next backward, which leaves None behind"
            )


def is_as_it_was(gradient: torch.Tensor | None, used: torch.Tensor) -> bool:
    """Return whether `gradient`, which a parameter has, is `used`, or what stands for that once it is used up."""
    return gradient is used or (isinstance(gradient, UsedUp) and not gradient.hetmem_zeroed)


def updated_by_another(name: str) -> str:
    """Return the message for a step of the parameter called `name` whose update another optimizer has begun."""
    return (
        f"{name} was updated during backward by another optimizer, made with overlap=, whose step() was to be called: "
        f"make that with overlap='off', or drop it before the backward"
    )


# ---- on their way home -----------------------------------------------------------------------------------------------


class GradientCopies:
    """Carries out what `GradientSends` decides: gradients in flight from the device to their homes."""

    def __init__(self, engine: TransferEngine, residency: Residency, executor: Executor, most_bytes: int) -> None:
        self._engine, self._residency, self._executor = engine, residency, executor
        self.sends: GradientSends[Chunk] = GradientSends(executor, most_bytes)
        self.arriving = self.sends.arriving
        self._unlimited = engine.unlimited(Link.DEVICE_TO_HOST)
        self.told_of_losses: Iterable[Any] = ()
        """The `GradientListener`s, whose `lost` is called where a gradient of a chunk was sent and did not arrive."""
        self.sent: Callable[[], Callable[[], None] | None] = lambda: None
        """Refers to what is called where a gradient was sent."""
        self.leaving: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        """The memory of gradients in flight, by the number of each send."""

    def send_now(self, home: Home, work: Callable[[], None], nbytes: int) -> None:
        """Run `work`, which takes `nbytes` from the device to `home`, here and now."""
        if home.tier is Tier.DEVICE:
            work()
        else:
            self._engine.copy_now(Link.DEVICE_TO_HOST, work, nbytes)

    def send(self, chunk: Chunk, work: Callable[[], None], nbytes: int, gradient: torch.Tensor) -> None:
        """Run `work`, which takes `gradient`, of `nbytes` at home, to `chunk`: a small one at once, others behind the
        backward, and until then they take memory of the device. At the end the lease of the staged role is over."""
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
        self._executor.copy_beside(Link.DEVICE_TO_HOST, work, nbytes, ended)
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
            for listener in self.told_of_losses:
                listener.lost(chunk)
            raise error
        if home.tier is Tier.NVME:
            self._write_back(chunk, home)

    def _end_lease(self, home: Home) -> None:
        """End the lease of the staged role that was open before its gradient was sent."""
        assert home.block is not None
        self._executor.execute(self._residency.release(home.block, Tier.HOST, dirty=True))

    def _write_back(self, chunk: Chunk, home: Home) -> None:
        """Write the gradients of `chunk` to NVMe once all are there: see note "writes of gradients" in
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
        """Device memory that gradients in flight still take, also if their end was not noted yet."""
        if not self.leaving:
            return 0
        storages = [memory() for memory in self.leaving.values()]
        return sum({id(storage): storage.nbytes() for storage in storages if storage is not None}.values())

    def wait(self) -> None:
        """Wait until every gradient has arrived; an error is raised when all others have."""
        self._executor.wait_while(lambda: self.sends.under_way)
