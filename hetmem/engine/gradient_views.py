"""Sets `p.grad`: to the home of the gradient, or to a stand-in for a gradient that only its update reads.

The one writer of `p.grad`. Also lends memory to gradients that an update consumes.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Container, Iterable, Sequence
from itertools import repeat
from operator import and_, attrgetter, eq, is_
from types import SimpleNamespace
from typing import Any

import torch

from hetmem.base.warning import warn_user
from hetmem.engine.param_views import get_data, is_shared, leave_coded, references, set_data, storage_address
from hetmem.engine.runtime import Runtime
from hetmem.engine.upward import GradientListener
from hetmem.memory.chunk import Chunk, ManagedParameter, Role, address_of
from hetmem.memory.hidden_gradient import HiddenGradient, stored

_GRADIENT, _STORED = attrgetter("grad"), attrgetter("gradient")
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


def show_first_gradient(parameter: torch.Tensor, weight: torch.Tensor, gradient: torch.Tensor) -> None:
    """Set `p.grad` to `gradient`, which takes the place of the gradient of `weight`, a working weight."""
    weight.grad = None
    if gradient.device == parameter.device and gradient.dtype is parameter.dtype:
        parameter.grad = gradient
    else:
        show_gradient(parameter, gradient)


def add_arrived(sum_so_far: torch.Tensor, weight: torch.Tensor, arrived: torch.Tensor) -> None:
    """Take `arrived`, the gradient of the working weight `weight`, and add it to `sum_so_far`, on the device."""
    sum_so_far.add_(arrived)
    weight.grad = None


def to_host_memory(managed: ManagedParameter) -> None:
    """Make the parameter and its gradient ordinary tensors in host memory, as the model is released."""
    parameter = managed.parameter
    gradient = take_gradient(parameter)
    if managed.code is not None:
        leave_coded(managed, managed.decoded())
    else:
        parameter.data = parameter.data.to("cpu", copy=True, memory_format=torch.preserve_format)
    if gradient is not None and not is_consumed(gradient):
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
    tensors: Any = gradients
    if (kinds := set(map(type, gradients))) == {HiddenGradient}:
        tensors = [*map(_STORED, gradients)]
    elif HiddenGradient in kinds:
        tensors = [*map(stored, gradients)]
    same = map(is_, tensors, map(_GRAD_HOME, managed))
    in_place = map(eq, map(torch.Tensor.data_ptr, tensors), map(_GRAD_ADDRESS, managed))
    return [*map(and_, same, in_place)]


def is_consumed(gradient: torch.Tensor | None) -> bool:
    """Return whether `gradient` stands for one that an update has read, or that the program has zeroed."""
    return type(gradient) is HiddenGradient and (gradient.consumed or gradient.zeroed)


def move_gradient(managed: ManagedParameter, gradient: torch.Tensor | None) -> None:
    """Make `gradient` a view of the role's present memory, and `managed.grad_home`: a tensor that the program may hold
    stays the same object."""
    if gradient is not None:
        gradient.data = managed.view(Role.GRAD)
        managed.grad_address = gradient.data_ptr()
    managed.grad_home = gradient


def show_revealed(managed: ManagedParameter) -> None:
    """Make the gradient's home `p.grad`, where that was hidden, and its chunk hides none any more."""
    view = managed.grad_view
    if view is None or managed.chunk.hides:
        return
    managed.grad_view = None
    if managed.parameter.grad is view:
        show_gradient(managed.parameter, managed.grad_home)


_NUMEL = attrgetter("numel")
_SHAPE, _STRIDE, _OFFSET = attrgetter("shape"), attrgetter("stride"), attrgetter("offset")


def open_hidden_homes(chunk: Chunk) -> None:
    """Do `open_grad_home` for all parameters of `chunk`, which hides their gradients, at once: mostly in C. Their homes
    share the storage of its `flat`, as the program cannot hold them. Without effect unless all have spare ones."""
    parameters, flat = chunk.parameters, chunk.flat(Role.GRAD)
    views: list[Any] = [None if each.grad_spare is None else each.grad_spare[1] for each in parameters]
    if True in map(is_, views, repeat(None)) or not flat.is_cpu or 0 in map(_NUMEL, parameters):
        return
    places = map(_SHAPE, parameters), map(_STRIDE, parameters), map(_OFFSET, parameters)
    homes = [*map(torch.as_strided, repeat(flat), *places)]
    addresses = map(torch.Tensor.data_ptr, homes)
    for managed, home, address, view in zip(parameters, homes, addresses, views, strict=True):
        managed.grad_home, managed.grad_address, managed.grad_view, managed.grad_spare = home, address, view, None
        view.gradient, view.zeroed, view.consumed, view.stepped = home, False, False, False  # as `begin`


_alone = SimpleNamespace(grad_home=object())
_REFERENCES = sys.getrefcount(_alone.grad_home)
"""`getrefcount` of an object to which one attribute alone refers."""


def leave_gradient_to_holders(managed: ManagedParameter, warned: list[str]) -> None:
    """Give a gradient of an earlier backward that the program keeps (`kept = p.grad; p.grad = None`) memory of its own,
    as the next gradient goes to the same home, where torch would make a new tensor. Views of it (`p.grad.detach()`)
    keep showing the home: the first one gets a warning, noted in `warned`."""
    if managed.grad_home is None or not managed.numel or not is_held(managed):
        return
    if managed.grad_view is not None:  # the program has not read it
        managed.close_grad_home()
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


def is_held(managed: ManagedParameter) -> bool:
    """Return whether the program holds the gradient's home, which is not `p.grad` now, or a view of it."""
    view = managed.grad_view is not None
    if (sys.getrefcount(managed.grad_view) if view else sys.getrefcount(managed.grad_home)) > _REFERENCES:
        return managed.grad_home is not None
    home = managed.grad_home
    if home is None or references(storage_address(home)) <= 1:  # asked first, as Python's own handle would be a second
        return False
    held: bool = references(home.untyped_storage()._cdata) > 2  # as `is_shared`
    return held


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
        if is_fresh:
            parameter.grad = managed.grad_home
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


# ---- gradients that an update consumes ----------------------------------------------------------------------------


def consume(used: Iterable[ManagedParameter], gradients: Iterable[torch.Tensor]) -> None:
    """Note that a step that has ended has used up `gradients` of those `used`: one that is `p.grad` still cannot be
    read from now on, and no step or backward adds to it."""
    for managed, gradient in zip(used, gradients, strict=True):
        if type(gradient) is HiddenGradient:
            gradient.consumed = gradient.stepped = True
        elif managed.parameter.grad is gradient:
            parameter = managed.parameter
            hidden = HiddenGradient(parameter, parameter.dtype, f"the gradient of {managed.name}")
            hidden.consumed = hidden.stepped = True
            take_gradient(parameter)
            show_gradient(parameter, hidden)


def clear_consumed(parameter: torch.Tensor) -> None:
    """Clear a zeroed stand-in, as a new gradient of `parameter` arrives. Raises RuntimeError for one that the last step
    has consumed, and that the program has not zeroed."""
    gradient = parameter.grad
    if type(gradient) is not HiddenGradient:
        return
    if gradient.zeroed:
        parameter.grad = None
    elif gradient.stepped:
        raise RuntimeError(
            f"{gradient.label} arrives, and that of the last step was not cleared: torch would add to it, but its "
            f"update has used it up (overlap='backward' or 'forward'): call zero_grad() between step() and the next "
            f"backward, or use overlap='off', which keeps it"
        )


def refuse_consumed(parameters: Iterable[torch.Tensor]) -> None:
    """Raise RuntimeError if a step would begin with gradients of `parameters` that the step before has consumed."""
    gradients: list[Any] = [*map(_GRADIENT, parameters)]
    for gradient in gradients if HiddenGradient in set(map(type, gradients)) else ():
        if type(gradient) is HiddenGradient and gradient.stepped:
            raise RuntimeError(
                f"{gradient.label} is that of the last step, which has used it up (overlap='backward' or 'forward'), "
                f"and torch would step with it, or with zeros, once more: call zero_grad() between step() and the next "
                f"backward, which leaves None behind"
            )


def are_as_they_were(parameters: Iterable[torch.Tensor], used: Sequence[torch.Tensor]) -> bool:
    """Return whether the gradients of `parameters` are those `used`, which updates read, and none was zeroed. In C
    alone."""
    if False in map(is_, map(_GRADIENT, parameters), used):
        return False
    return True not in map(getattr, used, repeat("zeroed"), repeat(False))


def updated_by_another(name: str) -> str:
    """Return the message for a step of the parameter called `name` whose update another optimizer has begun."""
    return (
        f"{name} was updated during backward by another optimizer, made with overlap=, whose step() was to be called: "
        f"make that with overlap='off', or drop it before the backward"
    )


# ---- memory of gradients that an update consumes -------------------------------------------------------------------


class GradientLoans:
    """The memory of the gradients of one model that updates consume: see `schedule.gradients.GradientMemory`."""

    def __init__(self, runtime: Runtime, listeners: Iterable[GradientListener]) -> None:
        self._runtime, self._listeners = runtime, listeners
        self.lends = False
        """Whether updates consume gradients as they arrive: those of chunks that hide them have homes from their
        arrival to the update, and `retire` ends a home."""
        self.sums = False
        """Whether what is lent takes sums, of full precision, in the backward that runs."""
        self.took_sums = False
        """Whether it did in the last one."""
        self.consumers: set[object] = set()
        """The tokens of the optimizers whose updates consume gradients: see `ManagedParameter.stepped_by`."""
        self.lent: set[Chunk] = set()
        """Chunks whose gradients lie in lent memory."""

    def bytes_for(self, chunk: Chunk) -> int:
        """Return the bytes that gradients of `chunk` borrow in a backward like the last one."""
        return chunk.sum_nbytes if self.took_sums else chunk.lent_nbytes

    def lend(self, chunk: Chunk) -> bool:
        """Lend gradients of `chunk` memory that was set aside; return False if all that is large enough is lent."""
        if lent := self._runtime.memory.lend(chunk, wide=self.sums):
            self.lent.add(chunk)
        return lent

    def hurry(self) -> bool:
        """Send gradients that wait for others of their chunk, so that their updates begin, or else have updates begin
        that a step begins late because it does not know how many gradients come; return whether there were any."""
        gradients = self._runtime.traffic.gradients
        before = gradients.gathered_bytes
        if before > gradients.summed_bytes:
            gradients.send_gathered()
        return gradients.gathered_bytes < before or any(listener.hurry() for listener in self._listeners)

    def may_lend(self, chunk: Chunk) -> bool:
        """Return whether memory for gradients of `chunk` was set aside, lent or not."""
        return self._runtime.memory.lends(chunk, wide=self.sums)

    def give_own(self, chunk: Chunk) -> None:
        """Give gradients of `chunk` a home for good, unless they have one."""
        self._runtime.traffic.ensure_homes([chunk], [Role.GRAD])

    def retire(self, chunk: Chunk, used: Collection[ManagedParameter]) -> None:
        """End the loan of `chunk`, unless its update has not used all its gradients; `used`: those that it has."""
        if chunk not in self.lent:
            return
        if not {*chunk.parameters}.issubset(used):
            shown = [managed for managed in chunk.parameters if is_home_gradient(managed)]
            if any(managed not in used for managed in shown):
                return
        chunk.close_grad_homes()
        self.lent.discard(chunk)
        self._runtime.memory.end_loan(self._runtime.memory.take_gradients(chunk))

    def prepare_sums(self) -> None:
        """Move gradients that wait for the one of the backward that begins where sums are exact: the last loans first,
        so that each gives its memory to the next."""
        waiting = [
            chunk
            for chunk in self._runtime.chunks
            if chunk.gradient_dtype is not None
            and Role.GRAD in chunk.homes
            and chunk not in self._runtime.traffic.updating
            and any(
                is_home_gradient(managed) and not is_consumed(managed.parameter.grad) for managed in chunk.parameters
            )
        ]
        for chunk in sorted(waiting, key=lambda chunk: address_of(chunk.homes[Role.GRAD].memory)):
            for listener in self._listeners:
                listener.leave_gradients(chunk)
            self.widen(chunk)

    def hide(self, chunks: Iterable[Chunk]) -> None:
        """Have gradients of those of `chunks` hidden whose parameters are all of optimizers that consume them."""
        for chunk in chunks:
            trained = [managed for managed in chunk.parameters if managed.parameter.requires_grad]
            chunk.hides = all(managed.stepped_by in self.consumers for managed in trained)

    def reveal(self, chunk: Chunk) -> None:
        """Let the program read and write gradients of `chunk`, of full precision and in a home of their own, and have
        their update wait for the step. If this raises nothing has moved."""
        self.widen(chunk)
        chunk.hides = False
        for managed in chunk.parameters:
            show_revealed(managed)

    def widen(self, chunk: Chunk) -> None:
        """Move gradients of `chunk`, if they are lent memory or narrow, to a home of full precision, where sums are
        exact. If this raises nothing has moved."""
        memory, traffic = self._runtime.memory, self._runtime.traffic
        traffic.gradients.wait()
        lent = chunk in self.lent
        if not lent and (chunk.gradient_dtype is None or Role.GRAD not in chunk.homes):
            return
        traffic.superseded(chunk, Role.GRAD)
        values = chunk.flat(Role.GRAD)
        before = memory.take_gradients(chunk)
        self.lent.discard(chunk)
        try:
            self.give_own(chunk)
            target = traffic.open_role(chunk, Role.GRAD, load=False)
            try:
                with torch.no_grad():
                    target.copy_(values)
            finally:
                traffic.close_role(chunk, Role.GRAD, dirty=True)
        except BaseException:
            memory.keep_gradients(chunk, before)
            self.lent.update([chunk] if lent else ())
            raise
        for home in (before, before.away):
            if home is not None:
                memory.end_loan(home)
        for managed in chunk.parameters:
            if managed.grad_home is not None:
                move_gradient(managed, managed.grad_home)
