"""Takes gradients from autograd as they arrive, adds them at home, and shows them to the user as `p.grad`.

Autograd must never add into a home itself (on a GPU it is the wrong device, with mixed precision the wrong dtype). So
`p.grad` is taken away just before a gradient is accumulated, which leaves the new gradient alone in `p.grad`, and given
back right after, as the home. The order of additions is autograd's own, so the bits are too.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from operator import attrgetter
from threading import get_ident
from typing import Any

import torch

from hetmem import torch_private
from hetmem.base.weak import WeakList, weakly
from hetmem.engine.gradient_views import (
    GradientLoans,
    are_own,
    clear_consumed,
    is_held,
    is_home,
    is_home_gradient,
    leave_gradient_to_holders,
    show_gradient,
    take_gradient,
)
from hetmem.engine.gradient_watch import Flights
from hetmem.engine.handed_out_gradients import HandedOutGradients
from hetmem.engine.param_views import is_shared
from hetmem.engine.ranked_gradients import RankedGradients
from hetmem.engine.runtime import Runtime
from hetmem.engine.summed_gradients import SummedGradients
from hetmem.engine.upward import GradientListener, Segments
from hetmem.engine.working_gradients import ArrivalHooks, WorkingGradients, has_hooks_of_the_user
from hetmem.memory.chunk import Chunk, ManagedParameter, Role
from hetmem.memory.hidden_gradient import HiddenGradient, stored
from hetmem.memory.interrupts import HELD_BACK
from hetmem.ranks.group import not_yet
from hetmem.schedule.trace import Tier

_HOOKS = attrgetter("_backward_hooks")


class GradientSink:
    """Takes the gradients of one model from autograd, and sends them home."""

    def __init__(self, runtime: Runtime, segments: Segments, hooks: ArrivalHooks) -> None:
        """Connect to `segments`, those of the model."""
        self.runtime = runtime
        self.segments, self._hooks = segments, hooks
        segments.backward_began, segments.backward_ended = weakly(self.begin), weakly(self.finish)
        self.listeners: WeakList[GradientListener] = WeakList()
        self.within_step = False
        """Whether the forward that runs began between a backward that has updated weights and its step."""
        self.notifies = True
        """Whether `listeners` are called for each gradient of this backward."""
        self.sent_home: list[ManagedParameter] = []
        """Parameters that are at home for hooks of the user, until a recomputation begins."""
        self.loans = GradientLoans(runtime, self.listeners)
        self.lent = self.loans.lent
        self._handles: list[Any] = []
        self.unhooked = runtime.parameters
        """Parameters that did not require a gradient when that was last asked."""
        self.taken: dict[ManagedParameter, torch.Tensor | None] = {}
        """Parameters whose gradient is being accumulated, and their `p.grad` before."""
        self.is_parted = False
        """Whether a forward has used parameters and, as the model has left the device, working weights."""
        self.parts: dict[ManagedParameter, tuple[int, torch.Tensor | None]] = {}
        """How many gradients are still to come of a parameter that gets several in this backward, and their sum so far:
        of one tensor torch would add them up before it adds them to `p.grad`."""
        self.summed = SummedGradients(self)
        self.working = WorkingGradients(self, hooks, self.summed)
        runtime.traffic.gradients.send_gathered = weakly(self.send_gathered)
        self.began = False
        """Whether a backward has begun since that was last cleared."""
        self.flights = Flights(weakref.WeakMethod(self._arrive))
        self._handed_out = HandedOutGradients(runtime, self.flights)
        segments.program_continues = weakly(self._handed_out.begin)
        segments.program_waits = weakly(self._handed_out.end)
        self._warned: list[str] = []
        self.are_dense = True
        """Whether every gradient so far was dense, and could be added to its home."""
        self._sends = runtime.traffic.gradients.sends
        ranks = runtime.memory.ranks
        self.ranked = None if ranks is None else RankedGradients(self, ranks)
        """Adds gradients at home that several ranks share."""
        runtime.traffic.gradients.loss_listeners = self.listeners

    def install_all(self) -> None:
        """Hook all that require a gradient by now."""
        with torch_private.NoFunctionsOfSubclasses():
            for managed in self.unhooked:
                self.install(managed)
        self.unhooked = [managed for managed in self.unhooked if not managed.grad_hooked]

    def install(self, managed: ManagedParameter) -> None:
        """Register the hooks of `managed`, once, if it requires a gradient."""
        if managed.grad_hooked or not managed.parameter.requires_grad:
            return
        managed.grad_hooked = True
        key = id(managed.parameter)
        before = managed.parameter.register_hook(self._hooks.before(self, key))
        handle = managed.parameter.register_post_accumulate_grad_hook(self._hooks.after(self, key))
        hooks: Any = managed.parameter._post_accumulate_grad_hooks
        self._handles += (before, handle)
        for key in [key for key in hooks if key != handle.id]:  # move behind ours (C ignores `move_to_end`):
            hooks[key] = hooks.pop(key)  # the user's hooks see the gradient that torch would show them

    def remove(self) -> None:
        """Remove all hooks."""
        for handle in self._handles:
            handle.remove()

    def before(self, managed: ManagedParameter) -> None:
        """Prepare for a gradient of `managed` that autograd accumulates next: take `p.grad` away."""
        parameter = managed.parameter
        if type(parameter) is managed.watched_kind:
            self.send_home(managed)
        if managed.chunk in self.working.gathered.chunks:
            self.working.gathered.send(managed.chunk)
        if self.notifies or self.runtime.traffic.updating:
            self.tell_coming(managed)
        if parameter.grad is not None:
            clear_consumed(parameter)
        if managed not in self.taken:
            self.taken[managed] = take_gradient(parameter)

    def after(self, managed: ManagedParameter) -> None:
        """Send what autograd has accumulated home, and show the sum as `p.grad`."""
        parameter = managed.parameter
        arrived, previous = parameter.grad, None
        if managed in self.taken:
            previous = self.taken[managed]
            del self.taken[managed]
        if arrived is None:  # frozen since the forward: torch leaves `p.grad`
            show_gradient(parameter, previous)
            return
        self.add(managed, arrived, previous)

    def add(self, managed: ManagedParameter, arrived: torch.Tensor, previous: torch.Tensor | None) -> None:
        """Add `arrived`, a gradient of `managed`, to `previous`, and show the sum as `p.grad`."""
        parameter = managed.parameter
        if managed in self.parts:
            count, sum_so_far = self.parts.pop(managed)
            arrived = arrived if sum_so_far is None else sum_so_far + arrived
            if count > 1:
                self.parts[managed] = count - 1, arrived
                show_gradient(parameter, previous)
                return
        plain = arrived.layout is torch.strided and not arrived.requires_grad
        plain = plain and (self.segments.unseen or self.segments.places) and not torch.is_grad_enabled()
        if self.summed.runs and plain and self.summed.add(managed, arrived, previous):
            return
        if type(managed.grad_home) is self.flights.kind:
            self._before_another(managed, arrived, previous)
        was_sparse = previous is not None and previous.layout is not torch.strided
        if self.ranked is not None:
            self.ranked.refuse(managed, arrived, previous)
        if arrived.requires_grad or arrived.layout is not torch.strided or was_sparse:
            # A graph of its own (create_graph=True) or sparse: what plain torch would leave in p.grad.
            self.are_dense = self.are_dense and arrived.requires_grad
            arrived = arrived.to(parameter)
            if type(previous) is HiddenGradient:
                self.wait_until_home()
                previous = stored(previous).to(parameter)
            if previous is not None:
                dense_first = was_sparse and arrived.layout is torch.strided
                arrived = arrived + previous if dense_first else previous + arrived
            show_gradient(parameter, arrived)
            return
        unseen = self.segments.unseen and not torch.is_grad_enabled()
        if unseen and not self.notifies and type(parameter) is managed.kind:
            self._take(managed, arrived, previous)
            return
        with torch_private.NoFunctionsOfSubclasses():  # else each attribute of a watched parameter would be a use
            if unseen:
                self._take(managed, arrived, previous)
                return
            with self.runtime.unwatched(), torch.no_grad():
                self._take(managed, arrived, previous)

    def _take(self, managed: ManagedParameter, arrived: torch.Tensor, previous: torch.Tensor | None) -> None:
        parameter = managed.parameter
        whole = [(managed, arrived)] if previous is None and self.ranked is None else []
        if previous is None or is_home(previous, managed):
            try:
                in_flight = self._send(managed, arrived, adds=previous is not None)
            except BaseException:
                show_gradient(parameter, previous)  # the sum so far is not lost
                raise
            show_gradient(parameter, managed.grad_view if managed.grad_view is not None else managed.grad_home)
            if in_flight and managed.grad_view is None:
                self.flights.begin(managed)
                if previous is not None and managed.grad_home is not None and is_shared(managed.grad_home):
                    self.wait_until_home()  # the program has a view of it
        else:
            show_gradient(parameter, previous.add_(arrived.to(previous)))
        if len(parameter._post_accumulate_grad_hooks) > 1:
            self.wait_until_home()
        if self.tells:
            self.tell_arrived([managed], whole)

    @property
    def tells(self) -> bool:
        """Whether listeners are told of gradients now."""
        return self.notifies or bool(self.runtime.traffic.updating)

    def send_gathered(self) -> None:
        """Send all gradients, and sums of them, that wait on the device."""
        self.working.gathered.send_all()
        self.summed.send_all()

    def tell_coming(self, managed: ManagedParameter) -> None:
        """Tell listeners that a gradient of `managed` will be sent home."""
        for listener in self.listeners:
            listener.coming(managed)

    def tell_arrived(
        self, together: list[ManagedParameter], whole: Sequence[tuple[ManagedParameter, torch.Tensor]] = ()
    ) -> None:
        """Tell listeners that gradients of `together`, of one chunk, were sent home; `whole`: see
        `GradientListener`."""
        for listener in self.listeners:
            listener.arrived(together, whole)

    def send_home(self, managed: ManagedParameter) -> None:
        """Make `managed` its home, and an ordinary parameter, for hooks of the program that run now."""
        self.runtime.outgoing.wait_for((managed.chunk,))
        if self.runtime.bindings.send_home(managed):
            self.sent_home.append(managed)

    def rest_again(self) -> None:
        """End `send_home`, as a recomputation begins, or another gradient arrives."""
        if self.sent_home:
            used, self.sent_home = self.sent_home, []
            self.runtime.uses.rest_again(used)

    @property
    def half_stepped(self) -> bool:
        """Whether updates of weights have begun, in a backward or a step, and the step has not ended."""
        return any(True for listener in self.listeners for _ in listener.begun())

    def is_whole(self) -> bool:
        """Return (within the turn) whether no other thread that runs is between a backward that has begun to update and
        its step."""
        began = self.segments.backward_thread
        return began == get_ident() or not self.half_stepped or began not in sys._current_frames()

    def notify_use(self, used: list[ManagedParameter]) -> None:
        """Tell listeners that compute uses `used` between the begin of a backward and the end of the step."""
        for listener in self.listeners:
            for managed in used:
                listener.used_again(managed)

    def begin(self) -> None:
        """Begin a backward."""
        self.began = True
        self._sends.complete.begin()
        runtime = self.runtime
        if self.ranked is not None:
            self.ranked.begin()
        self.notifies = any(listener.wants_each_gradient for listener in self.listeners)
        with torch_private.NoFunctionsOfSubclasses():
            self._look_at_parameters()
            if self.loans.consumers:
                self.loans.prepare_sums()
        if runtime.tracer.measured and runtime.memory.resident:
            runtime.uses.release_working()
        runtime.all_copies.begin_backward()

    def _look_at_parameters(self) -> None:
        """Order hooks, and give each `p.grad` that shows the memory of another one memory of its own, of parameters
        whose hooks or `grad` the program may have changed."""
        bindings = self.runtime.bindings
        met, bindings.met = bindings.met | bindings.exposed, set()
        hooks = map(_HOOKS, [managed.parameter for managed in met])
        ordered = max(map(len, filter(None, hooks)), default=0) < 2
        self.working.gathered.begin(sums=self.summed)
        for managed in met:
            if not ordered and managed.grad_hooked and len(managed.parameter._backward_hooks or ()) > 1:
                if managed.parameter.requires_grad:
                    self._handles += self._hooks.order(self, managed.parameter)
                else:  # torch registers none until it is trained again
                    bindings.met.add(managed)
            gradient = managed.parameter.grad
            if gradient is None or gradient is managed.grad_home or gradient is managed.grad_view:
                continue
            bindings.met.add(managed)  # of a tensor of the program's: that may get other memory
            if gradient.layout is not torch.strided or isinstance(gradient, HiddenGradient):
                continue
            memory, address = self.runtime.memory, gradient.untyped_storage().data_ptr()
            if memory.is_home_address(address) or memory.is_device_address(address):
                show_gradient(managed.parameter, gradient.clone())

    def expect(self, arrivals: Mapping[ManagedParameter, int], hiding: int = 0) -> None:
        """Expect so many gradients of each parameter in the backward of several micro-batches that begins next. Those
        with none may get some within checkpoints of `hiding` of the micro-batches."""
        (self.summed if self.ranked is None else self.ranked).expect(arrivals, hiding)

    def finish(self) -> None:
        """End a backward: wait until all gradients are at home, and restore each `p.grad` to which none was added."""
        parts, self.parts = self.parts, {}
        with torch_private.NoFunctionsOfSubclasses():
            for managed, (_, arrived) in parts.items():
                if arrived is not None:
                    self.add(managed, arrived, managed.parameter.grad)
            for managed in self.runtime.parameters if self.taken else ():
                if managed in self.taken:
                    previous = self.taken.pop(managed)
                    if managed.parameter.grad is None:
                        show_gradient(managed.parameter, previous)
        try:
            self.working.gathered.end()
            self.summed.end()
            if self.ranked is not None:
                self.ranked.end()
        except BaseException as error:
            if self.ranked is not None:
                self.ranked.failed = error
                self.ranked.end()
            raise
        finally:
            self.wait_until_home()
        self.notifies = True
        if not self.runtime.bindings.away:  # the model's weights are in a graph that none of its forwards has made
            self.runtime.bindings.exposed.update(self.sent_home)
            self.sent_home.clear()

    def backward_raised(self, error: BaseException) -> None:
        """Tell optimizers, and other ranks, of `error`, which ends a backward."""
        for listener in self.listeners:
            listener.backward_raised(error)
        if self.ranked is not None:
            self.ranked.failed = self.ranked.failed or error

    def wait_until_home(self) -> None:
        """Wait until all gradients are at home, also on NVMe, where the program may write to them from then on; then
        raise the first error, if there was one."""
        traffic = self.runtime.traffic
        homes = [chunk.homes[Role.GRAD] for chunk in self.runtime.chunks if Role.GRAD in chunk.homes]
        try:
            traffic.gradients.wait()
        except Exception:
            traffic.wait_until_written(homes)
            raise
        else:
            traffic.wait_until_written(homes)
        finally:
            self.flights.end()
            self._handed_out.begin()

    @HELD_BACK
    def _arrive(self) -> None:
        """Wait for gradients in flight, one of which the program uses."""
        if self.ranked is not None and self.runtime.in_backward:
            raise not_yet("reading a gradient before the backward has ended on all ranks")
        held = self.runtime.turn.held("reading a gradient")
        with held, self.runtime.unwatched(), torch_private.NoFunctionsOfSubclasses():
            self.wait_until_home()

    def _before_another(self, managed: ManagedParameter, arrived: torch.Tensor, previous: torch.Tensor | None) -> None:
        """Prepare for `arrived`, the second gradient of `managed` in a backward; `previous`: its `p.grad` before."""
        self.flights.pause(managed)
        if stored(previous) is not managed.grad_home or arrived.requires_grad or arrived.layout is not torch.strided:
            self.wait_until_home()  # else it is added behind the copy in flight

    def _send(self, managed: ManagedParameter, arrived: torch.Tensor, *, adds: bool) -> bool:
        """Send `arrived` to the home of the gradient of `managed`; `adds`: add it there, else overwrite. Return whether
        its home may lack it for a while."""
        chunk = managed.chunk
        if Role.GRAD not in chunk.homes or chunk.hides or chunk.gradient_dtype is not None:
            self.prepare_home(managed, arrived, adds=adds)
        if not adds and managed.grad_home is not None and is_held(managed):
            leave_gradient_to_holders(managed, self._warned)
        home, shown = managed.grad_home, managed.grad_view is None
        if home is None or home.data_ptr() != managed.grad_address or shown is chunk.hides:
            managed.open_grad_home()
        return self.send_to(managed, arrived, adds=adds)

    def prepare_home(self, managed: ManagedParameter, arrived: torch.Tensor, *, adds: bool) -> None:
        """Give gradients of the chunk of `managed` a home, if they have none, that can take `arrived`, or its sum."""
        chunk = managed.chunk
        if Role.GRAD not in chunk.homes:
            if self.loans.lends and chunk.hides:
                self._sends.find_place(chunk, self.loans)
            else:
                self.loans.give_own(chunk)
        if chunk.hides and (managed.stepped_by not in self.loans.consumers or has_hooks_of_the_user(managed.parameter)):
            self.loans.reveal(chunk)
        dtype = chunk.gradient_dtype  # 16 bits: a sum may not be exact
        if dtype is not None and (adds or arrived.dtype is not dtype or not chunk.hides):
            self.loans.widen(chunk)

    def send_to(self, managed: ManagedParameter, arrived: torch.Tensor, *, adds: bool) -> bool:
        """Do `_send` to `grad_home`."""
        chunk, traffic = managed.chunk, self.runtime.traffic
        assert managed.grad_home is not None
        if managed.grad_view is not None and not adds:
            managed.grad_view.begin(managed.grad_home)
        if self.ranked is not None:
            return self.ranked.send(managed, arrived)
        if traffic.engine.ordered and arrived.device != self.runtime.memory.device.torch_device:
            # Autograd copied the gradient to the host, not ordered behind an earlier one that may be in flight.
            traffic.gradients.wait()
        tier = chunk.homes[Role.GRAD].tier
        if tier is Tier.NVME and not any(listener.begins_early for listener in self.listeners):
            self._sends.complete.add(chunk, id(managed), _awaited)
        target = self._open(managed, adds=adds) if tier is Tier.NVME else managed.grad_home
        work = partial(self.runtime.memory.device.gradient_out, target, arrived, add=adds)
        traffic.gradients.send(chunk, work, managed.grad_home.nbytes, (arrived,))
        return tier is Tier.NVME or (tier is Tier.HOST and bool(self._sends.on_their_way))

    def open_homes(self, fresh: list[ManagedParameter]) -> None:
        """Give each of `fresh`, which have no gradient now, a `grad_home` that only hetmem holds."""
        homes = [managed.grad_home for managed in fresh]
        if are_own(homes, [managed.grad_address for managed in fresh]):
            return
        del homes
        for managed in fresh:
            leave_gradient_to_holders(managed, self._warned)
            if managed.grad_home is None or managed.grad_home.data_ptr() != managed.grad_address:
                managed.open_grad_home()

    def _open(self, managed: ManagedParameter, *, adds: bool) -> torch.Tensor:
        """Return the part of `managed` in its chunk's staged gradients, which are read from NVMe only if needed."""
        chunk = managed.chunk
        self._handed_out.end()  # to a hook of this backward
        others = (other for other in chunk.parameters if other is not managed and other.grad_home is not None)
        with torch_private.NoFunctionsOfSubclasses():  # those that have gradients are not read by the program
            load = adds or any(is_home_gradient(other) or self.taken.get(other) is other.grad_home for other in others)
        flat = self.runtime.traffic.open_role(chunk, Role.GRAD, load=load)
        return torch.as_strided(managed.part(flat), managed.shape, managed.stride, managed.offset)


def _awaited(chunk: Chunk) -> set[int]:
    """Return the `id`s of the managed parameters in `chunk` that get a gradient."""
    return {id(managed) for managed in chunk.parameters if managed.grad_hooked and managed.parameter.requires_grad}
