"""Working weights of a model all of whose copies fit on the device.

Note "working weights": each parameter has a second one, over its copy on the device. During a forward, or a
recomputation of a checkpoint, modules have these under the names of their parameters (`placing.shown`). So autograd
saves and checks them like any weight, without a hook. FSDP2 gives modules its unsharded parameters likewise. The
parameters stay at home, and a function that gets one itself computes with its working weight (`intercept.faults`). Uses
that working weights cannot serve are found in measured forwards: the model then uses `intercept.leases`.

Of a model that is whole on the device nothing moves, and autograd adds gradients up in their homes: these begin as
-0.0, which changes no value added to them. Copies of homes that are elsewhere are requested together as a forward
begins, and leased until its backward ends (`engine.all_copies`); the first call of a module waits for those that are
on their way, so compute is behind the copies that it uses and not behind all. A hook of each working weight sends its
gradient home as it arrives (`GradientSink.arrived`).
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterable
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch

from hetmem import torch_private
from hetmem.base.weak import weakly
from hetmem.engine.gradient_views import Given, let_arrive, show_gradient, take_arrived
from hetmem.engine.gradients import GradientSink
from hetmem.engine.param_views import leave_working, show_copies, working_weight
from hetmem.engine.runtime import Runtime
from hetmem.memory.chunk import Chunk, ManagedParameter, Role
from hetmem.placing.shown import ShowingModules
from hetmem.schedule.trace import Moment

# Read for each parameter in each step: these run in C.
_VERSION, _VERSION_SEEN, _TRAINS = attrgetter("counter._version"), attrgetter("version"), attrgetter("requires_grad")
_HOOKS = attrgetter("_backward_hooks"), attrgetter("_post_accumulate_grad_hooks")
_DEVICE, _COUNTER = attrgetter("device"), attrgetter("counter")
_referrers: Any = torch_private.tensor_references


class WorkingWeights:
    """The working weights of the model `module`, and the leases of their copies."""

    def __init__(self, module: torch.nn.Module, runtime: Runtime, sink: GradientSink) -> None:
        self._runtime, self._sink = runtime, sink
        self._copies = runtime.all_copies
        self.modules = ShowingModules(module, runtime)
        self.cannot_serve = False
        """Whether the program was seen to do what working weights of a whole forward cannot serve."""
        self._managed = runtime.parameters
        self._parameters = [managed.parameter for managed in self._managed]
        self._weights: list[torch.Tensor] = []
        self._over: list[Any] = []
        """The views of copies on which `_weights` are based, and which of them are trained."""
        self._are_hooked = False
        """Whether `_weights` send their gradients home by hooks, as homes are elsewhere."""
        self._pending = False
        """Whether a forward has had working weights since the last backward, of which one may follow."""
        self._older: list[tuple[ManagedParameter, weakref.ref[torch.Tensor], bool]] = []
        """Earlier working weights, which a graph may still refer to; and whether they send gradients by hooks."""
        self._blocks: tuple[int, ...] = ()
        """The blocks of a whole model on the device that are leased until `release`; empty if none are."""
        self._beside: list[ManagedParameter] = []
        """Parameters whose working weights show their copies also between calls of modules that bind them."""
        self._checked = False
        """Whether the working weights were found to fit the parameters since the running backward began."""
        self._in_backward = False
        self._given: list[Given] | None = None
        """Tensors given to autograd for the gradients of the running backward."""
        runtime.uses.release_working = weakly(self.release)

    # ---- forward -----------------------------------------------------------------------------------------------

    def begin(self, operator: str, backward: Hashable | None, *, anew: bool, turns: bool) -> bool:
        """Do `enter` for a forward, if all copies can be leased until its backward ends; else return False, with
        nothing begun. `backward` is the key of the backward that may follow. `anew`: see `enter`; `turns`: see
        `AllCopies.begin`."""
        streams, trains = not self._runtime.memory.resident, backward is not None
        if not (self.serve and self._are_plain(streams=streams) and self._are_in_place()):
            return False
        goes_on = trains and anew and self._pending
        chunks = self._copies.begin(operator, backward, goes_on=goes_on, turns=turns) if streams else None
        if chunks is not None:
            self._make_hooked(anew=anew)
            self._show(chunks)
        elif not streams and self._hold(operator, backward):
            self._make(anew=anew)
        else:
            return False
        self._pending |= trains
        self.modules.begin()
        return True

    def hold(self) -> None:
        """Have what `begin` has leased stay so until `let_go`, for forwards that take turns."""
        self.modules.begin()

    def enter_leased(self, *, all_at_once: bool) -> bool:
        """Do `enter` for another one of these forwards, and return `all_at_once`: if it is not, each call of a module
        in it leases what it uses beside these leases."""
        if not all_at_once and not self._beside:
            self.arrive([managed for chunk in self._copies.missing for managed in chunk.parameters], "a forward")
            self._beside = [managed for chunk in self._copies.leased for managed in chunk.parameters]
            for managed in self._beside:
                managed.bound += 1
        self.modules.begin()
        return all_at_once

    def let_go(self) -> None:
        """End `hold`."""
        for managed in self._beside:
            managed.bound -= 1
        self._beside = []
        self.end(shown=True, all_at_once=True)

    def enter(self, *, anew: bool) -> bool:
        """Have modules compute with working weights, whose copies are leased as they are used, until `end`. `anew`:
        gradients of this forward are added to those of another one in float32. Returns whether each module had the
        parameters of the forward before."""
        if self.modules.entered:
            in_place = self.modules.have_parameters()
        else:
            self.make(anew=anew)
            in_place = self._are_in_place()
        self.modules.begin()
        return in_place

    def make(self, *, anew: bool = False) -> None:
        """Have working weights without memory, whose gradients are sent home as they arrive."""
        if not self.modules.entered:
            self.release()
            self._make_hooked(anew=anew)

    def exist(self) -> None:
        """Make working weights unless there are some, for a function that computes with one outside of all modules."""
        if not self._weights:
            self.make()

    def arrive(self, used: Iterable[ManagedParameter], operator: str) -> bool:
        """Have the working weights of `used` show device copies, which are leased from here on, for a use called
        `operator`. Returns whether no copy is on its way any more that the forward is known to use."""
        copies = self._copies
        if not self._blocks:
            chunks = dict.fromkeys(managed.chunk for managed in used if managed.chunk not in copies.leased)
            if chunks:
                copies.lease(chunks, operator)
                with self._runtime.unwatched(), torch_private.NoFunctionsOfSubclasses():
                    self._show(chunks)
        return not copies.missing

    @staticmethod
    def _show(chunks: Iterable[Chunk]) -> None:
        show_copies([managed for chunk in chunks for managed in chunk.parameters])

    @property
    def holds_all(self) -> bool:
        """Whether copies are leased for a graph that waits for its backward."""
        return bool(self._blocks or self._copies.leased)

    def enter_again(self, *, all_at_once: bool, by_call: bool) -> tuple[bool, bool]:
        """Do `enter` for a recomputation; return whether it is `all_at_once`, as what is around it, or as asked if the
        copies are leased, and whether all modules show working weights. Else, as asked by `by_call`, each shows its own
        for its call alone (`show_in`), so that a recomputation costs what it uses and not what there is.

        The segment of the backward begins here: else it would in a nested backward, which has the first gradient and
        ends before the one around it.
        """
        all_at_once = self.holds_all and (all_at_once or self.modules.entered > 0)
        by_call = by_call and not (all_at_once or self.modules.shown)
        if all_at_once:
            self.modules.begin()
        elif by_call:
            if not (self._checked and self._weights):
                self.make()
            self._checked = self._in_backward
            self.modules.begin(shown=False)
        else:
            self.enter(anew=False)
        if not self._runtime.memory.resident:
            self._sink.segments.on_backward()
        return all_at_once, not by_call

    def end(self, *, shown: bool, all_at_once: bool) -> None:
        """End `begin`, `enter` or `enter_again`: `shown` is whether all modules showed working weights; `all_at_once`:
        take writes to working weights home."""
        self.modules.end(shown=shown)
        if self.modules.entered or not all_at_once:
            return
        written = [*map(_VERSION, self._managed)] != [*map(_VERSION_SEEN, self._managed)]
        if written or not self.serve:
            with self._runtime.unwatched(), torch_private.NoFunctionsOfSubclasses():
                self._bring_writes_home()
        if self._copies.leased and not self._pending:
            self.release()
        self._copies.missing = set()

    def _bring_writes_home(self) -> None:
        writes = self._runtime.writes
        for managed in self._managed:
            taken, managed.data_taken = managed.data_taken, False
            if managed.counter._version != managed.version:
                self.cannot_serve = True
                writes.by_operator(managed)
            elif taken:
                writes.compare(managed)

    # ---- whether they can ----------------------------------------------------------------------------------------

    @property
    def serve(self) -> bool:
        """Whether working weights have been able to serve all that the program did so far."""
        return not (self.cannot_serve or self.modules.exchanged)

    def _are_plain(self, *, streams: bool) -> bool:
        """Return whether no listener needs each gradient, and, unless `streams`, only hetmem has hooks at parameters
        and all gradients are dense."""
        if streams:
            return True
        hooks = {*map(len, filter(None, chain.from_iterable(map(which, self._parameters) for which in _HOOKS)))}
        notifies = any(listener.wants_each_gradient for listener in self._sink.listeners)
        return hooks <= {1} and self._sink.are_dense and not notifies

    def _hold(self, operator: str, backward: Hashable | None) -> bool:
        """Begin a segment in which nothing moves, if all homes, and a copy of each, are on the device, with room for
        all else that it and `backward` need. Leases the copies until `release`."""
        runtime = self._runtime
        memory, tracer, residency, room = runtime.memory, runtime.tracer, runtime.traffic.residency, runtime.room
        found = self._blocks or tuple(block for chunk in memory.chunks if (block := chunk.operand_block) >= 0)
        if len(found) < len(memory.chunks) or not residency.all_on_device(found):
            return False
        moment, later = tracer.all_ahead(found), None if backward is None else tracer.book.get(backward)
        if moment is None or (later is None) is not (backward is None):
            return False
        needed = [moment] if later is None else [moment, Moment("backward", found, *later.worst).times(tracer.growth)]
        if not all(map(room.has_room_for, needed)):
            return False
        if not (self._blocks and room.is_as_left(moment)):
            with runtime.unwatched():
                room.before_moment(moment)
                self._blocks = self._blocks or self._lease(found)
        tracer.all_at_once(moment)
        runtime.uses.log_moment(moment, operator, found)
        return True

    def _lease(self, blocks: tuple[int, ...]) -> tuple[int, ...]:
        """Begin a lease of each copy for each of its parameters."""
        runtime, chunks = self._runtime, self._runtime.chunks
        runtime.uses.release_unheld()
        slots = runtime.traffic.residency.use_all(blocks, [len(chunk.parameters) for chunk in chunks])
        runtime.traffic.executor.set_working_copies(chunks, slots)
        return blocks

    def release(self) -> None:
        """End the leases; copies that a graph still refers to live as long as it."""
        if self.modules.entered:
            return
        if self._blocks:
            self._blocks = ()
            self._retire()
            self._runtime.traffic.executor.set_working_copies((), ())
            self._runtime.uses.release(self._managed)
        elif self._copies.leased or self._copies.missing:
            self._leave()
            self._copies.release()

    def _retire(self) -> None:
        """Drop the working weights. A graph that has saved one keeps its copy alive; one that only accumulates its
        gradient needs no memory of it."""
        self._checked = False
        self._older = [each for each in self._older if each[1]() is not None]
        weights, self._weights, self._over = self._weights, [], []
        self.modules.forget()
        with torch_private.NoFunctionsOfSubclasses():
            for managed, weight in zip(self._managed, weights, strict=False):
                self._older += ((managed, weakref.ref(weight), self._are_hooked),)
                managed.working = None
                if _referrers(weight) <= 2:
                    leave_working([managed], [weight])

    def _leave(self) -> None:
        """Have working weights take no memory until the next forward. One that a graph has saved keeps its copy alive,
        and another one takes its place."""
        with self._runtime.unwatched(), torch_private.NoFunctionsOfSubclasses():
            if max(map(_referrers, self._weights), default=0) <= 2:
                leave_working(self._managed, self._weights)
                return
            for at, (managed, weight) in enumerate(zip(self._managed, self._weights, strict=True)):
                if _referrers(weight) <= 2:
                    leave_working([managed], [weight])
                else:
                    self._older += ((managed, weakref.ref(weight), True),)
                    self._weights[at] = self._hooked(managed)
            self._place()

    def replace(self, used: Iterable[ManagedParameter]) -> None:
        """Have modules show other working weights of `used`, as the program may keep the present ones: what these show
        stays as long as they do."""
        others = {*used}
        with self._runtime.unwatched(), torch_private.NoFunctionsOfSubclasses():
            for at, managed in enumerate(self._managed):
                if managed in others:
                    self._older += ((managed, weakref.ref(self._weights[at]), True),)
                    self._weights[at] = self._hooked(managed)
            self._place()
            if self.modules.shown:
                self.modules.show()

    def _hooked(self, managed: ManagedParameter) -> torch.Tensor:
        """Return a new working weight that sends its gradients home."""
        with torch.inference_mode(False):
            weight = working_weight(managed, None)
            if weight.is_floating_point() or weight.is_complex():
                trains = weight.requires_grad
                weight.requires_grad_(True)  # else torch registers no hook
                weight.register_post_accumulate_grad_hook(self._sink.working.hook(managed))
                weight.requires_grad_(trains)
        return weight

    def _make(self, *, anew: bool) -> None:
        """Make working weights, unless the present ones fit and need not be made `anew`."""
        over = [*map(_DEVICE, self._managed), *map(_TRAINS, self._parameters)]
        anew |= self._are_hooked
        if not anew and len(over) == len(self._over) and all(map(is_, over, self._over)):
            return
        self._retire()
        with self._runtime.unwatched(), torch.inference_mode(False):
            self._weights = list(map(working_weight, self._managed, map(_DEVICE, self._managed)))
        self._over, self._are_hooked = over, False
        self._find_modules()

    def _make_hooked(self, *, anew: bool) -> None:
        """Make working weights with hooks, unless there are some that need not be made `anew`: sums in 16 bits would
        be other ones."""
        anew &= self._runtime.memory.mixed_precision is not None
        counters = [*map(_COUNTER, self._managed)]  # another one after `torch.utils.swap_tensors`
        if self._are_hooked and self._weights and not anew and all(map(is_, counters, self._over)):
            self.freeze()
            return
        self._retire()
        with self._runtime.unwatched():
            self._weights = list(map(self._hooked, self._managed))
        self._are_hooked, self._over = True, counters
        self._find_modules()

    def _find_modules(self) -> None:
        self.modules.find()
        self._place()

    def _place(self) -> None:
        self.modules.place(self._weights)
        for managed, weight in zip(self._managed, self._weights, strict=True):
            managed.working = weight

    def _are_in_place(self) -> bool:
        """Return whether the modules still have the same parameters, and none was replaced for this call."""
        if self.modules.have_parameters():
            return True
        self._find_modules()  # for the next forward
        return False

    # ---- backward ------------------------------------------------------------------------------------------------

    @property
    def in_backward(self) -> bool:
        """Whether a backward runs that may be of a graph with working weights."""
        return self._in_backward

    def begin_backward(self, *, accumulates: bool) -> None:
        """Have autograd accumulate gradients in their homes. Parameters are at home, unless a forward runs.

        `accumulates`: whether this backward gives parameters gradients. One that returns them, of which a graph may be
        made, leaves the accumulators that this graph will refer to alone: for a second one, sums would be of two.
        """
        if self._given or (self._given is not None and not accumulates):
            return
        self._in_backward = self._in_backward or bool(self._weights) or bool(self._older)
        if not self._in_backward:  # else it is one of several micro-batches
            self._sink.began = False
        self._checked = False
        self.freeze()
        used = self._used()
        if not used:
            return
        with self._runtime.unwatched(), torch.no_grad(), torch_private.NoFunctionsOfSubclasses():
            if not accumulates:
                self._given = []
                return
            self._given = let_arrive(used, self._begin_gradients([managed for managed, _ in used]))

    def freeze(self) -> None:
        """Set `requires_grad` of working weights to that of their parameters, which may have changed within the forward
        or since: torch reads it as it computes and as it accumulates."""
        with torch_private.NoFunctionsOfSubclasses():
            if self._weights and [*map(_TRAINS, self._weights)] != [*map(_TRAINS, self._parameters)]:
                if not self._are_hooked:
                    self._over = []  # so that the next forward makes new ones
                for parameter, weight in zip(self._parameters, self._weights, strict=True):
                    weight.requires_grad_(parameter.requires_grad)
            self._older = [each for each in self._older if each[1]() is not None]  # of graphs that are alive: few
            for managed, older, _ in self._older:
                alive, trains = older(), managed.parameter.requires_grad
                if alive is not None and alive.requires_grad is not trains:  # a transform refuses to set it
                    alive.requires_grad_(trains)

    def _used(self) -> list[tuple[ManagedParameter, torch.Tensor]]:
        """Return the trained working weights without hooks that a graph may refer to, with their parameters."""
        used: list[tuple[ManagedParameter, torch.Tensor]] = []
        if not self._are_hooked and max(map(_referrers, self._weights), default=0) > 1:
            used = [each for each in zip(self._managed, self._weights, strict=True) if each[1].requires_grad]
        if self._older:
            older = [(managed, weight()) for managed, weight, is_hooked in self._older if not is_hooked]
            used += [(managed, weight) for managed, weight in older if weight is not None and weight.requires_grad]
        return used

    def _begin_gradients(self, used: list[ManagedParameter]) -> set[ManagedParameter] | None:
        """Set the missing gradients of `used` to -0.0 and return their parameters; None if autograd is not to
        accumulate gradients in their homes."""
        runtime = self._runtime
        notifies = any(listener.wants_each_gradient for listener in self._sink.listeners)
        if notifies or self._sink.lent or not runtime.memory.resident:
            return None
        runtime.traffic.ensure_homes(list(dict.fromkeys([managed.chunk for managed in used])), [Role.GRAD])
        fresh = [managed for managed in used if managed.parameter.grad is None]
        self._sink.open_homes(fresh)
        others = {managed.chunk for managed in self._managed if managed.parameter.grad is not None}
        whole = {managed.chunk for managed in fresh} - others if len(used) >= len(self._weights) else set[Chunk]()
        zeros = [chunk.flat(Role.GRAD) for chunk in whole]
        zeros += [
            managed.grad_home for managed in fresh if managed.chunk not in whole and managed.grad_home is not None
        ]
        if zeros:
            torch_private.foreach_zero(zeros)
            torch_private.foreach_neg(zeros)
        return {*fresh}

    def end_backward(self) -> bool:
        """End `begin_backward`, also after an error: parameters that got no gradient have none. Returns whether it may
        have been of this model."""
        given, self._given = self._given, None
        self._in_backward = self._checked = False
        with torch_private.NoFunctionsOfSubclasses():
            for managed, arrived, gradient in take_arrived(given or ()):
                self._hand_over(managed, arrived, gradient)
        if self._sink.began or self._blocks:  # else it was of another model
            self._pending = False
            if not (self._blocks or self._copies.are_held(1)):  # else by a graph that is kept for another backward
                self.release()
            return True
        return False

    def _hand_over(self, managed: ManagedParameter, arrived: torch.Tensor, given: torch.Tensor | None) -> None:
        """Take a gradient of `managed` that autograd did not add to the tensor `given` for it."""
        if given is not None:  # autograd made a new sum, with a graph of its own (create_graph=True)
            show_gradient(managed.parameter, arrived)
            return
        self._sink.before(managed)
        show_gradient(managed.parameter, arrived)
        self._sink.after(managed)
        self._sink.wait_until_home()
