"""Orders one optimizer's steps over one runtime: which chunk is updated when, with which factor.

Note "overlap": gradients arrive chunk by chunk during backward. A chunk with all its gradients is updated while
backward continues, unless that needs a result of the whole backward (the norm of all gradients, whether all are
finite). In that case its squares are summed as gradients arrive, and the update follows in `update`.
"""

from __future__ import annotations

import math
import traceback
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import compress
from operator import attrgetter
from typing import Any

import torch

from hetmem.cpu.workers import WorkerPool
from hetmem.engine.gradient_views import consume, updated_by_another
from hetmem.engine.working_gradients import have_hooks_of_the_user
from hetmem.intercept.diagnostics import refuse_a_fork, refuse_a_stream
from hetmem.intercept.interceptor import Interception
from hetmem.memory.chunk import Chunk, Home, ManagedParameter, Role
from hetmem.optim.among_ranks import RankedSteps, refuse_a_later_group
from hetmem.optim.arrived_squares import ArrivedSquares
from hetmem.optim.chunk_update import ChunkUpdate, WholeUpdate
from hetmem.optim.members import Joins, Members, Options
from hetmem.optim.mutation_check import (
    Arrivals,
    backward_ended,
    came_late,
    changed,
    found_changes,
    half_updated,
    states_used,
    updated_already,
    used_again,
)
from hetmem.optim.options import Overlap
from hetmem.optim.states import SteppingOptimizer, ends_with_its_optimizer
from hetmem.optim.update_pass import Passes
from hetmem.optim.update_queue import Updates

_PARAMETER, _TRAINS = attrgetter("parameter"), attrgetter("requires_grad")

ChunkWork = dict[Chunk, Members]
"""Parameters with gradients, by chunk."""


class Stepper:
    """The steps of `optimizer` over the parameters that `interception` manages."""

    def __init__(
        self,
        optimizer: SteppingOptimizer,
        interception: Interception,
        workers: WorkerPool,
        members: Callable[[], dict[Stepper, dict[Chunk, Members]] | None],
    ) -> None:
        self._made_by = weakref.ref(
            optimizer, ends_with_its_optimizer(self, interception.gradients, optimizer.states.token)
        )
        self._interception = interception
        self.runtime = interception.runtime
        ranks = self.runtime.memory.ranks
        self._ranked = None if ranks is None else RankedSteps(interception, ranks)
        self._updates = Updates(self.runtime, workers, self._made_by)
        self._passes = Passes(optimizer, interception)
        self._states = optimizer.states
        self._groups: dict[int, dict[str, Any]] = {}
        self._all_members, self._members = members, dict[Chunk, Members]()
        """Both as they were when the first gradient of the step arrived; empty if no update begins early."""
        self._arrivals = Arrivals(sees_all=not self.runtime.memory.resident)
        self._progress: dict[Chunk, ChunkUpdate] = {}
        self._joins = Joins()
        self._options: Options = {}
        """The options that the updates of this step use, unless they change before `step()`."""
        self._squares, self._sums_squares = ArrivedSquares(self.runtime.memory.device.torch_device), False
        self._checked = self._hurries = False
        """Whether this step has compared what its updates used; and whether, the first one, it begins them early."""
        self.failed = False
        """Whether a step raised, and may be repeated with the same gradients."""
        self._ended_with = ""
        """The error of a backward of this step that had begun updates."""
        self.runtime.traffic.executor.workers.add(self._updates)
        interception.gradients.listeners.add(self)

    def optimizer_options(self) -> dict[str, Any]:
        """Return, for reports, the optimizer's options that decide when and where it updates."""
        optimizer = self._optimizer
        limit = optimizer.max_grad_norm  # infinity (only the norm is wanted) is no JSON number
        names = {"class": type(optimizer).__name__, "overlap": optimizer.overlap.value}
        return {**names, "max_grad_norm": None if limit == math.inf else limit}

    @property
    def _under_way(self) -> dict[ChunkUpdate, None]:
        """The updates of this step that are known, whatever became of them."""
        return dict.fromkeys(self._progress.values())

    @property
    def _optimizer(self) -> SteppingOptimizer:
        """The optimizer. Only updates under way hold a reference to it, so one that is dropped begins no more."""
        optimizer = self._made_by()
        assert optimizer is not None
        return optimizer

    # ---- during backward ---------------------------------------------------------------------------------------

    @property
    def begins_early(self) -> bool:
        """Whether it begins updates within a backward."""
        return self._optimizer.overlap is not Overlap.OFF and not self.runtime.memory.resident

    @property
    def wants_each_gradient(self) -> bool:
        """Whether to call `coming` and `arrived` in the backward that begins, as updates are or may get under way."""
        return bool(self._progress) or self.begins_early

    def expect(self, managed: ManagedParameter, arrivals: int) -> None:
        """Expect `arrivals` more gradients of `managed` in the backward that begins."""
        self._arrivals.expect(managed, arrivals)

    def coming(self, managed: ManagedParameter) -> None:
        """Prepare for a gradient of `managed` that will be added to its home: nothing may read that meanwhile."""
        if self._passes.corrupt:
            self.refuse_corrupt()
        if self._sums_squares:
            self._squares.drop((managed,))
        if managed.chunk in self._progress and id(managed.parameter) in self._groups:
            if self.failed:
                self.forget()  # the failed step is not repeated
            elif self._progress[managed.chunk].begun:
                raise self._refusal(came_late(managed, self._optimizer, self._under_way))
            else:
                self._drop(managed.chunk)  # its norm lacks this gradient
        if self.runtime.traffic.updating:
            self.runtime.traffic.wait_for_update(managed.chunk)

    def arrived(self, together: list[ManagedParameter], whole: Iterable[tuple[ManagedParameter, torch.Tensor]]) -> None:
        """Count gradients of `together`, of one chunk, in flight home, and begin its update if they were the last.
        `whole`: see `GradientListener`."""
        if not self._arrivals.begun:
            optimizer = self._optimizer
            self._groups = optimizer.groups_by_parameter()
            self._members = (self._all_members() or {}).get(self, {}) if self.begins_early else {}
            self._sums_squares = self.begins_early and optimizer.needs_all_gradients
            self._states.look()
        mine = [*compress(together, map(self._groups.__contains__, map(id, map(_PARAMETER, together))))]
        if not mine:
            return
        self._arrivals.count(mine)
        if self._sums_squares:
            self._squares.drop(mine)
            self._squares.add(whole)
        if (self._arrivals.learned or self._hurries) and self._complete(mine[0].chunk):
            self._begin_early(mine[0].chunk)
        if self._ranked is None:
            self._updates.pump()
        else:
            self.go_on()

    def go_on(self) -> None:
        """Begin the updates that other ranks let begin by now, and advance those that are under way."""
        self._begin_ready()
        self._updates.end_shared()
        self._updates.pump()

    def _begin_ready(self, *, all_there: bool = False) -> None:
        for update in () if self._ranked is None else self._ranked.ready(all_there=all_there):
            self._add_update(update, 1.0)

    def backward_raised(self, error: BaseException) -> None:
        """Keep the text of `error`, which has ended a backward, for what this step refuses."""
        if any(update.begun for update in self._under_way):
            self._ended_with = "".join(traceback.format_exception_only(error)).strip()

    def _refusal(self, error: RuntimeError) -> RuntimeError:
        """Return `error`, which names what a program may have done, or the one for a backward that has raised."""
        if not self._ended_with:
            return error
        return backward_ended(self._ended_with, self._optimizer, self._under_way)

    def hurry(self) -> bool:
        """In the first step, which does not know how many gradients come, begin the updates of all chunks that have
        got one of each parameter, as host memory can keep no more; return whether there are any."""
        optimizer = self._optimizer
        first = self._arrivals.begun and not (self._arrivals.learned or self._hurries)
        if not (first and self.begins_early) or optimizer.needs_all_gradients:
            return False
        self._hurries = True
        due = [chunk for chunk in self._members if self._complete(chunk)]
        for chunk in due:
            self._begin_early(chunk)
        return bool(due)

    def lost(self, chunk: Chunk) -> None:
        """Cancel the queued update of `chunk`, a gradient of which was lost; none of it has begun."""
        self._squares.drop(chunk.parameters)
        self._updates.forget(chunk)
        self._drop(chunk)

    def _drop(self, chunk: Chunk) -> None:
        """Forget how far the update of `chunk` is, if there is one."""
        if (update := self._progress.get(chunk)) is not None:
            for each in update.chunks:
                self._progress.pop(each, None)

    def used_again(self, managed: ManagedParameter) -> None:
        """Raise RuntimeError if `managed` is used before the end of the step and has been updated already."""
        update = self._progress.get(managed.chunk)
        if update is not None and update.begun and not self.failed and update.updates(managed):
            used = used_again(managed, self._optimizer, self._under_way, hurries=self._hurries)
            raise self._refusal(used)

    def refuse_states(self) -> None:
        """Raise RuntimeError if the program uses states before the end of a step that has updated some already."""
        if not self.failed and any(update.begun for update in self._under_way):
            raise self._refusal(states_used(self._optimizer, self._under_way))

    # ---- homes that move -------------------------------------------------------------------------------------------

    def updates_on_device(self) -> set[int]:
        """Return the `id`s of parameters whose update has the same bits on the device, with homes there."""
        chunks, groups = filter(self._passes.equals_host, self.runtime.chunks), self._optimizer.groups_by_parameter()
        return {id(each.parameter) for chunk in chunks for each in chunk.parameters} & groups.keys()

    def leave_gradients(self, chunk: Chunk) -> None:
        """Wait until no pass reads gradients of `chunk`: a step that was skipped leaves sums of squares behind."""
        self._updates.give_way(again=False)
        self._updates.wait_for(chunk)

    def may_move(self, chunk: Chunk) -> bool:
        """Return whether the program holds no states in homes of `chunk`. Waits until the optimizer reads none."""
        self._updates.wait_for(chunk)  # it may be summing squares of its gradients
        self._states.look()
        self._passes.notice_states(chunk)
        return not self._states.held(chunk)

    def has_held_states(self, chunk: Chunk) -> bool:
        """Return whether the program holds states in homes of `chunk`, beside those in `state`."""
        return self._states.held(chunk)

    def moved(self, chunk: Chunk) -> None:
        """Note that the homes of `chunk` have moved."""
        self._passes.prepared.pop(chunk, None)  # it refers to the old homes
        self._states.moved(chunk)

    def _complete(self, chunk: Chunk) -> bool:
        """Return whether all gradients of `chunk` that any step had have arrived and can no longer be changed."""
        if chunk not in self._members or chunk in self._progress or not chunk.hides:
            return False
        members = self._members[chunk]
        trains = [*map(_TRAINS, members.parameters)]
        trained = members.managed if False not in trains else [*compress(members.managed, trains)]
        if not self._arrivals.complete(trained):  # the last gradient often comes first
            return False
        shared = self.runtime.writes.shared
        if (shared and not shared.isdisjoint(trained)) or have_hooks_of_the_user(map(_PARAMETER, trained)):
            return False
        return self._states.steps_all(trained)

    def _begin_early(self, chunk: Chunk) -> None:
        optimizer = self._optimizer
        if self._sums_squares and self._squares.have(chunk):
            return
        if self._ranked is not None and not self._ranked.may_offer(optimizer, chunk, self._members[chunk]):
            return
        self.runtime.writes.notice_counted(chunk)  # later writes are refused
        members = self._members[chunk].with_gradients(type(optimizer).__name__)
        assert members is not None, "one has just arrived"
        if self._states.handed_out and any(members.incomplete(self._states.shown)):
            return  # the step refuses it
        update = self._progress[chunk] = ChunkUpdate(members, self._options)
        self._passes.notice_states(chunk)
        if self._ranked is not None:
            update.begun = True  # on another rank perhaps
            self.runtime.uses.begin_update(members.managed)
            self._ranked.offer(update)
        elif self._sums_squares:
            self._add_sums(update)
        else:
            self.runtime.uses.begin_update(members.managed)  # so that a hook that reads one is refused
            self._add_update(update, 1.0)

    # ---- within a step -----------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin the step: finish the updates that were begun in the backward, unless they may go on behind the step."""
        self.refuse_corrupt()
        refuse_a_fork("a step", self._interception.process)
        refuse_a_stream("a step", self.runtime.memory.device)
        if self.runtime.may_join:
            refuse_a_later_group(self.runtime)
        self._interception.reset()
        self._interception.segments.begin_step()
        with self.runtime.unwatched():
            self.runtime.writes.renew_touched()
        self._states.look()
        if self._ranked is not None:
            self._passes.notice(self.runtime.chunks)
            self._ranked.begin(self._optimizer)
            self._begin_ready(all_there=True)
        with self._remembering_a_failure():
            unbegun = [chunk for chunk, update in self._progress.items() if not update.begun]
            self._passes.notice(unbegun)  # in others `found_changes` detects writes
            if not self._deferred:
                self._carry_out()

    def place(self) -> AbstractContextManager[None]:
        """Return a context in which other ranks, if there are any, know that this one is in a step."""
        return nullcontext() if self._ranked is None else self._ranked.place()

    def refuse_begun(self, parameters: Iterable[ManagedParameter]) -> None:
        """Raise RuntimeError if another optimizer has updated any of `parameters` in the backward."""
        others = (other for other in self._interception.gradients.listeners if other is not self)
        begun = {managed for other in others for managed in other.begun()}
        for managed in parameters if begun else ():
            if managed in begun:
                raise RuntimeError(updated_by_another(managed.name))

    @property
    def updates_whole(self) -> bool:
        """Whether the model is whole on the device and a step updates it at once, with nothing begun before."""
        return self.runtime.memory.resident and self._optimizer.rule.has_kernel

    def whole_update(self, group: dict[str, Any], members: Members) -> WholeUpdate:
        """Return the update of all `members` of `group`, which have gradients, in this step."""
        rule, states = self._optimizer.rule, self._states
        if not members.roles:
            (members.roles,) = {rule.roles(group, dtype) for dtype in members.dtypes}
        update = WholeUpdate(self.runtime, group, members)
        if not update.find_states(states.shown):
            self.refuse_incomplete(members)
            chunks = list(dict.fromkeys(managed.chunk for managed in members.managed))
            for chunk in chunks:
                self.ensure_homes(chunk, members.roles)
            self._passes.notice(chunks)
            for managed in members.managed:
                states.make(managed, members.roles)
                rule.begin(states.of(managed))
            members.addresses(anew=True)
            found = update.find_states(states.shown)
            assert found, "all states are at home"
        return update

    def refuse_incomplete(self, members: Members) -> None:
        """Raise `ManageError` if states of `members` lack what an update needs."""
        states = self._states
        if any(members.incomplete(states.shown)):
            self.runtime.traffic.wait_for_updates()  # one of the last step may be about to make them
            states.refuse_incomplete(members, updated_already(self._under_way))

    def begun(self) -> Iterable[ManagedParameter]:
        """Return the parameters whose update has begun in the present step."""
        parts = (part.managed for update in self._under_way if update.begun for part in update.parts)
        return dict.fromkeys((*parts, *self._passes.corrupt))

    def square_sums(self, chunks: ChunkWork) -> list[torch.Tensor]:
        """Return the sums of squares of the gradients in `chunks`, tile by tile; see `hetmem.cpu.total`."""
        with self._remembering_a_failure():
            wanted = self._wanted(chunks)
            for update in wanted:
                if not (update.sums or update.summing or self._squares.give_to(update)):
                    self._add_sums(update)
            self._carry_out()
            if self._ranked is not None:
                self._ranked.meet("the norm of gradients")
        return [sums for update in wanted for sums in update.sums]

    def update(self, chunks: ChunkWork, grad_scale: float) -> None:
        """Update `chunks` with their gradients times `grad_scale`."""
        deferred = self._deferred
        with self._remembering_a_failure():
            wanted = self._wanted(chunks)
            for update in wanted:
                if update.begun and update.scale != grad_scale:
                    raise self._refusal(changed(update.parts, self._optimizer, wanted))
            for update in wanted:
                if not update.begun:
                    self._add_update(update, grad_scale)
                if not deferred:  # else all are queued first, and run in the order of the next forward
                    self._updates.pump()
            if deferred:
                self._updates.pump()
            else:
                self._carry_out(self._homes_of_others({*chunks, *self._progress}))
            if self._ranked is not None:
                self._ranked.end_updates(None if deferred else self._updates.end_shared)

    def _homes_of_others(self, chunks: Iterable[Chunk]) -> list[Home]:
        """Return the homes of `chunks`, which a step has updated, that more than their next update uses: of ranks also
        states, which any of them may read."""
        if self._ranked is None:
            return [chunk.homes[Role.PARAM] for chunk in chunks]
        return [home for chunk in chunks for home in chunk.homes.values()]

    def give_up(self) -> None:
        """Finish the updates that have begun on any rank, as all ranks give up a step."""
        if self._ranked is None or not self.begins_early:
            return
        begun, dropped = self._ranked.give_up()
        for update in dropped:
            update.begun = False
        for update in begun:
            self._add_update(update, 1.0)
        self._carry_out(home for chunk in self.runtime.chunks for home in chunk.homes.values())
        self._ranked.end_updates(self._updates.end_shared)

    def skip(self) -> None:
        """End the work of a step without updates. Raises RuntimeError if one has begun."""
        for update in self._under_way:
            if update.begun:
                raise self._refusal(changed(update.parts, self._optimizer, self._under_way))

    def end(self, *, updated: bool) -> None:
        """End the step for all models of the optimizer; it is not repeated."""
        self._updates.detach()  # a later failure is not repeated by a step
        if updated and self.begins_early:
            with self.runtime.unwatched(), torch.no_grad():
                for update in self._under_way:
                    consume(update.members.managed, update.gradients)
        self.forget()
        self.runtime.statistics.steps += updated
        self.runtime.after_step()
        if self._deferred:
            self.runtime.marks.updates_trail()

    def synchronize(self) -> None:
        """Wait until all updates are done and written home, also to NVMe."""
        self._carry_out(home for chunk in self.runtime.chunks for home in chunk.homes.values())
        if self._ranked is not None:
            self._ranked.await_parts(self._updates.end_shared)

    def ensure_homes(self, chunk: Chunk, roles: Collection[Role]) -> None:
        """Reserve homes for `roles` of `chunk`. Raises `BudgetError` if there is no room."""
        self._interception.share.before_reserving(chunk, set(roles))
        self.runtime.traffic.ensure_homes([chunk], roles)

    @property
    def half_stepped(self) -> bool:
        """Whether a step has begun to change weights and has not ended."""
        return bool(self._passes.corrupt) or any(update.begun for update in self._under_way)

    def refuse_corrupt(self) -> None:
        """Raise RuntimeError if an update has failed half-way."""
        if self._passes.corrupt:
            raise half_updated(self._passes.corrupt)

    def mark_corrupt(self, parameters: Iterable[ManagedParameter]) -> None:
        """Record that `parameters` are updated in a step that has failed and cannot be repeated."""
        self._passes.corrupt += parameters

    @property
    def _deferred(self) -> bool:
        """Whether updates go on after `step` returns."""
        memory = self.runtime.memory
        if memory.resident or (memory.ranks is not None and memory.staging_slots):  # ranks may read states behind it
            return False
        return self._optimizer.overlap is Overlap.FORWARD

    def _carry_out(self, homes: Iterable[Home] = ()) -> None:
        """Compute all queued updates and write `homes`. Other states are at home only after `synchronize`."""
        self._updates.finish()
        self.runtime.traffic.wait_until_written(homes)

    @contextmanager
    def _remembering_a_failure(self) -> Iterator[None]:
        """Cancel what is under way after an error, so that a repeated step continues from there."""
        try:
            yield
        except BaseException:
            self.failed = True
            self._updates.cancel()
            self._updates.end_shared(abandoned=True)
            raise

    def forget(self) -> None:
        """Discard the state of a step that has ended, or is not repeated."""
        self.failed, self._ended_with, self._passes.corrupt = False, "", []
        self._checked = self._hurries = False
        self._progress.clear()
        self._squares.clear()
        self._options = {}
        self._arrivals.end_step(sees_all=not self.runtime.memory.resident)  # there autograd keeps them

    def _wanted(self, chunks: ChunkWork) -> list[ChunkUpdate]:
        """Return the updates of `chunks`, in order; raise if anything updated in the backward has changed since."""
        if not self._checked:  # in a repeated step the failed one has changed weights itself
            begun = [update for update in self._under_way if update.begun]
            if (refused := found_changes(begun, self._optimizer, self.runtime.writes)) is not None:
                raise self._refusal(refused)
            self._checked = True
        self._options = {}
        of_updates = self._joins.of(chunks, self._progress, self._options)
        wanted = [self._current(members) for members in of_updates]
        if new := [chunk for update in wanted for chunk in update.chunks if chunk not in self._progress]:
            self._passes.notice(new)
            self._progress |= {chunk: update for update in wanted for chunk in update.chunks}
        return wanted

    def _current(self, members: Members) -> ChunkUpdate:
        """Return the update of `members`, perhaps one under way. Raises if its inputs have changed since."""
        update = self._progress.get(members.chunks[0])
        if update is None:
            return ChunkUpdate(members, self._options)
        unchanged = update.is_of(members)
        if not unchanged and (self.failed or not update.begun):
            if self.failed:
                self.forget()  # the failed step is not repeated
            self._drop(members.chunks[0])
            return ChunkUpdate(members, self._options)
        if not unchanged:
            raise self._refusal(changed(update.parts, self._optimizer, self._under_way))
        if not update.begun:
            update.read_options(self._options)
        return update

    # ---- jobs --------------------------------------------------------------------------------------------------

    def _add_sums(self, update: ChunkUpdate) -> None:
        self._passes.begin_sums(update)
        self._updates.add(update)

    def _add_update(self, update: ChunkUpdate, grad_scale: float) -> None:
        if self._ranked is not None:
            self._ranked.begin_update()
        if update.summing:
            self._updates.finish()
        if not update.chunk.homes.keys() >= {*update.roles}:  # then its only one
            self.runtime.traffic.wait_for_update(update.chunk)  # another optimizer's, of other parameters of the chunk
            self.ensure_homes(update.chunk, update.roles)
        try:
            self._passes.begin_update(update, grad_scale)
            self._updates.add(update)
        except BaseException:
            update.begun = False  # it was not queued
            raise
