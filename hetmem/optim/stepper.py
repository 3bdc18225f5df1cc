"""One optimizer's steps over one runtime: which chunk is updated when, with which factor, and what is undone again.

Note "overlap": gradients arrive chunk by chunk during backward. A chunk whose gradients are all in is updated while
backward goes on, if nothing is needed that only the end of backward can tell (the norm of all gradients, whether all
are finite). Where it is needed, its share is summed up as gradients arrive, and the update follows in `update`; or it
is made on trial, after its memory was saved, and undone and made again if the factor turns out not to be 1.

How often gradients of a parameter arrive in a step is learned from the steps before: the most that was ever seen. The
first step overlaps nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from hetmem.memory.chunk import Chunk, Home, ManagedParameter, Role
from hetmem.memory.transfer import Link
from hetmem.optim.kernels import Task, square_sum_tasks
from hetmem.optim.overlap import Gradients, Overlap
from hetmem.optim.progress import Part, Progress, Sums, bits_at, frozen, on_host, sample_of
from hetmem.optim.rule import ParameterUpdate
from hetmem.optim.undo import UndoLog
from hetmem.optim.updates import Job, Opened, Updates
from hetmem.optim.workers import WorkerPool
from hetmem.plan.trace import Tier
from hetmem.runtime.construction import recast_all
from hetmem.runtime.gradients import has_hooks_of_the_user, honour_written_gradients, is_home_gradient
from hetmem.runtime.interception import Interception

if TYPE_CHECKING:
    from hetmem.optim.offloaded import OffloadedOptimizer

Members = list[tuple[ManagedParameter, dict[str, Any]]]
Work = dict[Chunk, Members]
"""Parameters that have a gradient, and their groups, by chunk."""


class Stepper:
    """The steps of `optimizer` over the parameters that `interception` manages."""

    def __init__(self, optimizer: OffloadedOptimizer, interception: Interception, workers: WorkerPool) -> None:
        self._optimizer, self._interception, self._workers = optimizer, interception, workers
        self._runtime = interception.runtime
        self._updates = Updates(self._runtime, workers)
        self._undo = UndoLog(self._runtime.memory.host_pool)
        self._groups: dict[int, dict[str, Any]] = {}
        self._arrivals: Counter[int] = Counter()
        self._most: Counter[int] = Counter()
        self._progress: dict[Chunk, Progress] = {}
        self.failed = False
        """Whether a step raised, and may be tried again with the same gradients."""
        self._runtime.traffic.workers.add(self._updates)
        if self._runtime.memory.streams:
            interception.gradients.watchers.add(self)

    # ---- during backward ---------------------------------------------------------------------------------------

    def coming(self, managed: ManagedParameter) -> None:
        """A gradient of `managed` is about to be added to its home: nothing may be reading that."""
        progress = self._progress.get(managed.chunk) if id(managed.parameter) in self._groups else None
        if progress is not None and self.failed:
            self.forget()  # the step that failed is not tried again
        elif progress is not None and progress.begun:
            raise RuntimeError(
                f"a gradient of {managed.name} arrived after its update had begun (overlap="
                f"{self._optimizer.overlap.value!r}): either step() was not called after the last backward, or this "
                f"step has more backwards than any before: use overlap='off', or begin with the step that has most "
                f"(streamed gradients allow one)"
            )
        elif progress is not None:
            del self._progress[managed.chunk]  # its norm is of less than all
        self._runtime.traffic.wait_for_update(managed.chunk)

    def arrived(self, managed: ManagedParameter) -> None:
        """A gradient of `managed` is on its way home: perhaps the last one that its chunk waited for."""
        if not self._arrivals:
            self._groups = self._optimizer.groups_by_parameter()
        if id(managed.parameter) not in self._groups:
            return
        self._arrivals[id(managed)] += 1
        learned = bool(self._most) or self._optimizer.gradients is Gradients.STREAMED
        if self._optimizer.overlap is not Overlap.OFF and learned and self._complete(managed.chunk):
            self._begin_early(managed.chunk)
        self._updates.pump()

    def recomputed_with(self, managed: ManagedParameter) -> None:
        """An operator within a backward uses `managed`, which may be updated already."""
        progress = self._progress.get(managed.chunk)
        if progress is not None and progress.begun and not self.failed:
            raise RuntimeError(
                f"{managed.name} is used by a recomputation within backward after its update had begun (overlap="
                f"{self._optimizer.overlap.value!r}), as all its gradients had arrived: use overlap='off'"
            )

    # ---- homes that move -------------------------------------------------------------------------------------------

    def updates_on_device(self) -> set[int]:
        """See `Watcher`."""
        return set(self._optimizer.groups_by_parameter()) if self._optimizer.rule.runs_on_device else set()

    def settle(self) -> None:
        """See `Watcher`."""
        self.synchronize()

    def may_move(self, chunk: Chunk) -> bool:
        """See `Watcher`."""
        progress = self._progress.get(chunk)
        self._notice_states(chunk)
        return (progress is None or progress.saved is None) and not self._optimizer.states_held(chunk)

    def moved(self, chunk: Chunk) -> None:
        """See `Watcher`."""
        self._optimizer.states_moved(chunk)

    def _complete(self, chunk: Chunk) -> bool:
        """Whether all gradients of `chunk` that a step ever had are in, and nobody will change them."""
        mine = [m for m in chunk.parameters if id(m.parameter) in self._groups and m.parameter.requires_grad]
        usual = max(self._most.values(), default=1)  # for a parameter that never had one
        return chunk not in self._progress and all(
            self._arrivals[id(m)] >= (self._most[id(m)] or usual) and not has_hooks_of_the_user(m.parameter)
            for m in mine
        )

    def _begin_early(self, chunk: Chunk) -> None:
        parts = [
            self._part(m, self._groups[id(m.parameter)])
            for m in chunk.parameters
            if id(m.parameter) in self._groups and m.parameter.grad is not None
        ]
        progress = self._progress[chunk] = Progress(chunk, parts)
        self._notice_states(chunk)
        if not self._optimizer.needs_all_gradients:
            self._add_update(progress, 1.0)
            return
        if self._optimizer.overlap is Overlap.SPECULATIVE:
            progress.saved = self._undo.make_room(chunk, self._state_roles(parts))
        self._updates.add(self._sums_job(progress))

    # ---- within a step -----------------------------------------------------------------------------------------

    def begin(self) -> None:
        """The step begins: the backward, if one ran, is over, and what was begun in it gets done."""
        self._interception.reset()
        self._interception.segments.begin_step()
        self._look_ahead()
        with self._remembering_a_failure():
            self._carry_out()

    def square_sums(self, chunks: Work) -> list[Sums]:
        """The sums of squares of the gradients in `chunks`, tile by tile; see `hetmem.optim.kernels.total`."""
        with self._remembering_a_failure():
            self._check_untouched()
            wanted = [self._current(chunk, chunks[chunk]) for chunk in sorted(chunks, key=_index)]
            for progress in wanted:
                if not progress.sums:
                    self._updates.add(self._sums_job(progress))
            self._carry_out()
        return on_host([sums for progress in wanted for sums in progress.sums])

    def update(self, chunks: Work, grad_scale: float) -> None:
        """Update `chunks`; gradients count `grad_scale` times."""
        with self._remembering_a_failure():
            self._check_untouched()
            for chunk in sorted(chunks, key=_index):
                progress = self._current(chunk, chunks[chunk])
                if progress.begun and progress.scale != grad_scale:
                    self._take_back(progress)
                if not progress.begun:
                    self._add_update(progress, grad_scale)
            if self._optimizer.overlap is Overlap.FORWARD and self._runtime.memory.streams:
                self._use_up_gradients()
            else:
                self._carry_out([chunk.homes[Role.PARAM] for chunk in {*chunks, *self._progress}])

    def skip(self) -> None:
        """No update is made: take back what was made on trial."""
        for progress in self._progress.values():
            if progress.begun:
                self._take_back(progress)

    def end(self, *, updated: bool) -> None:
        """The step is over for all models of the optimizer: nobody will try it again."""
        self._end()
        self._runtime.statistics.steps += updated
        self._runtime.after_step()

    def synchronize(self) -> None:
        """Everything is done and at home, also on NVMe."""
        self._carry_out(home for chunk in self._runtime.chunks for home in chunk.homes.values())

    def ensure_homes(self, chunk: Chunk, roles: Collection[Role]) -> None:
        """`roles` of `chunk` have homes. Raises `BudgetError` if there is no room."""
        self._interception.share.before_reserving(chunk, set(roles))
        self._runtime.traffic.ensure_homes([chunk], roles)

    @property
    def half_stepped(self) -> bool:
        """Whether a step has begun to change weights and has not ended."""
        return any(progress.begun for progress in self._progress.values())

    def forget(self) -> None:
        """What was done belongs to a step that is not tried again."""
        self._end()
        self._arrivals.clear()

    def _carry_out(self, homes: Iterable[Home] = ()) -> None:
        """All that is queued is computed, and `homes` are written. Other states are at home after `synchronize`."""
        self._updates.finish()
        self._runtime.traffic.wait_until_written(homes)

    @contextmanager
    def _remembering_a_failure(self) -> Iterator[None]:
        """What raises leaves nothing under way, and the next step with the same gradients goes on from there."""
        try:
            yield
        except BaseException:
            self.failed = True
            self._updates.cancel()
            raise

    def _end(self) -> None:
        self.failed = False
        for progress in self._progress.values():
            self._undo.give_back(progress.saved)
        self._progress.clear()
        for key, count in self._arrivals.items():
            self._most[key] = max(self._most[key], count)
        self._arrivals.clear()

    def _current(self, chunk: Chunk, members: Members) -> Progress:
        """How far `chunk` is; what was begun must have been of what is asked for now."""
        parts = [self._part(managed, group) for managed, group in members]
        progress = self._progress.get(chunk)
        if progress is not None and self.failed and not progress.of(parts):
            self.forget()  # the step that failed is not tried again
            progress = None
        untouched = progress is not None and progress.of(parts)
        if progress is not None and untouched and not progress.begun:
            untouched = all(map(self._unscaled, progress.parts))
        if progress is None or not (progress.begun or untouched):
            self._notice(chunk)
            progress = self._progress[chunk] = Progress(chunk, [self._part(*member) for member in members])
        elif not untouched:
            raise self._changed(progress)
        return progress

    def _look_ahead(self) -> None:
        """`_check_untouched` looks at one element of each gradient: where they lie on NVMe, all are fetched at once."""
        store = self._runtime.memory.store
        for progress in self._progress.values():
            home = progress.chunk.homes.get(Role.GRAD)
            if store is None or home is None or home.extent is None:
                continue
            for part in progress.parts:
                if part.sample is not None and part.at_home:
                    at = (part.managed.offset + part.sample[0]) * progress.chunk.dtype.itemsize
                    store.will_look(home.extent, at)

    def _check_untouched(self) -> None:
        """Whatever was updated during backward, with a gradient that others see, must still be as it was then."""
        if self.failed:
            return
        writes = self._runtime.writes
        for progress in self._progress.values():
            used_up = self._optimizer.gradients is Gradients.STREAMED
            for part in progress.parts if progress.begun else ():
                kept = part.managed.parameter.grad is part.gradient and self._unscaled(part)
                if not (used_up or kept) or writes.changed(part.managed):
                    raise self._changed(progress)

    def _see_gradients(self, progress: Progress, job: Job) -> None:
        """The gradients have arrived: whoever writes to them from now on, before `step`, changes what was used."""
        for part in progress.parts if self._optimizer.overlap is not Overlap.OFF else ():
            part.version = part.gradient._version
            part.sample = sample_of(self._flat_gradient(part, job.opened))

    def _unscaled(self, part: Part) -> bool:
        """Whether the gradient of `part` is what was seen, as far as its sample says."""
        return part.sample is None or part.sample[1] == bits_at(self._flat_gradient(part, {}), part.sample[0])

    def _changed(self, progress: Progress) -> RuntimeError:
        names = ", ".join(part.managed.name for part in progress.parts[:3])
        return RuntimeError(
            f"weights, gradients or hyper-parameters of {names} … changed after their update had begun during backward "
            f"(overlap={self._optimizer.overlap.value!r}): use max_grad_norm= to clip and loss_scale= to scale, or "
            f"overlap='off'"
        )

    def _use_up_gradients(self) -> None:
        """The updates that trail read them: nobody else may find them and write zeros there."""
        for progress in self._progress.values():
            for part in progress.parts:
                if part.at_home and part.managed.parameter.grad is part.gradient:
                    part.managed.parameter.grad = None

    # ---- jobs --------------------------------------------------------------------------------------------------

    def _sums_job(self, progress: Progress) -> Job:
        """Sum up squares; with memory for it, also save what an update would change, and then make it on trial."""
        roles = {Role.GRAD: True} if any(part.at_home for part in progress.parts) else {}
        saved = progress.saved
        roles |= dict.fromkeys(saved.buffers, True) if saved is not None else {}
        tasks, done = partial(self._sum_tasks, progress), partial(self._summed, progress)
        return Job(progress.chunk, roles, tasks, done, writes=False)

    def _sum_tasks(self, progress: Progress, job: Job) -> list[Task]:
        self._see_gradients(progress, job)
        tasks: list[Task] = []
        progress.sums = []
        for part in progress.parts:
            gradient = self._flat_gradient(part, job.opened)
            sums: Sums | torch.Tensor
            if gradient.device.type == "cpu":
                more, sums = square_sum_tasks(gradient)
                tasks += more
            else:
                sums = torch.linalg.vector_norm(gradient, dtype=torch.float64).square()  # read in `on_host`
            progress.sums.append(sums)
        if progress.saved is not None:
            tasks += progress.saved.tasks_to_save(job.opened, [part.managed for part in progress.parts])
        return tasks

    def _summed(self, progress: Progress, done: bool) -> None:
        if not done:
            progress.sums = []
        elif progress.saved is not None and self._progress.get(progress.chunk) is progress:
            self._add_update(progress, self._optimizer.expected_scale())

    def _add_update(self, progress: Progress, grad_scale: float) -> None:
        chunk, parts = progress.chunk, progress.parts
        roles = self._state_roles(parts)
        self._runtime.traffic.wait_for_update(chunk)  # another optimizer's, which may make states that lie beside these
        self.ensure_homes(chunk, roles)
        needed = {Role.PARAM: True}
        if Role.COMPUTE in chunk.homes:
            needed[Role.COMPUTE] = len(parts) < len(chunk.parameters)
        needed |= {Role.GRAD: True} if any(part.at_home for part in parts) else {}
        needed |= {role: chunk.homes[role].written for role in roles}
        progress.begun, progress.scale = True, grad_scale
        tasks, done = partial(self._update_tasks, progress), partial(self._updated, progress)
        self._updates.add(Job(chunk, needed, tasks, done, writes=True, keeps_copy=self._writes_copy(progress)))

    def _writes_copy(self, progress: Progress) -> bool:
        """Whether the pass that updates `progress` can write the copy on the device too."""
        chunk, memory = progress.chunk, self._runtime.memory
        if chunk.compute_dtype is chunk.dtype or len(progress.parts) < len(chunk.parameters):
            return False
        if Role.COMPUTE in chunk.homes or memory.device.torch_device.type != "cpu":
            return False
        here = chunk.homes[Role.PARAM].tier is Tier.DEVICE
        idle = not self._interception.segments.in_backward and self._optimizer.overlap is not Overlap.FORWARD
        return idle and (here or self._runtime.traffic.engine.unlimited(Link.HOST_TO_DEVICE))

    def _update_tasks(self, progress: Progress, job: Job) -> list[Task]:
        self._see_gradients(progress, job)
        if job.copy is not None and progress.chunk.homes[Role.PARAM].tier is not Tier.DEVICE:
            self._runtime.traffic.engine.copy_now(Link.HOST_TO_DEVICE, _nothing, progress.chunk.compute_nbytes)
        homes = {name for role in self._state_roles(progress.parts) for name in (role.name, f"{role.name}_scale")}
        progress.remember_numbers((self._optimizer.state_of(part.managed) for part in progress.parts), homes)
        updates = [self._update_of(part, job, progress.scale) for part in progress.parts]
        if job.opened[Role.PARAM].device.type != "cpu":
            self._optimizer.rule.on_device(updates)
            for update in updates:
                if update.copy is not None:
                    update.copy.copy_(update.param)
            return []
        return [task for update in updates for task in self._optimizer.rule.tasks(update)]

    def _update_of(self, part: Part, job: Job, grad_scale: float) -> ParameterUpdate:
        managed = part.managed
        state, roles = self._optimizer.state_of(managed), self._state_roles([part])
        states: dict[str, torch.Tensor] = {}
        fresh: set[str] = set()
        copy = job.opened.get(Role.COMPUTE, job.copy)
        for role in roles:
            parts = managed.parts(role, job.opened[role])
            states |= parts
            if state.get(role.name) is None:
                fresh |= parts.keys()
                for part_of_role in parts.values():
                    part_of_role.zero_()
                self._optimizer.show_state(managed, role)
        return ParameterUpdate(
            part.group,
            state,
            managed.part(job.opened[Role.PARAM]),
            self._flat_gradient(part, job.opened),
            states,
            grad_scale,
            frozenset(fresh),
            self._optimizer.number_of(managed),
            None if copy is None else managed.part(copy),
        )

    def _updated(self, progress: Progress, done: bool) -> None:
        chunk = progress.chunk
        if not done:
            progress.begun = False
            progress.restore_numbers()
        for part in progress.parts:
            self._optimizer.forget_empty(part.managed)
        if not done:
            return
        for role in self._state_roles(progress.parts):
            chunk.homes[role].written = True
        self._count_versions(progress)
        self._interception.gradients.retire(chunk, {part.managed for part in progress.parts})

    def _take_back(self, progress: Progress) -> None:
        """Undo the update of `progress`: every bit is as before it."""
        saved, chunk, traffic = progress.saved, progress.chunk, self._runtime.traffic
        if saved is None:
            raise RuntimeError(
                f"chunk {chunk.spec.index} was updated with a factor of {progress.scale} for its gradients during "
                f"backward, and step() wants another one: max_grad_norm or loss_scale was changed in between"
            )
        traffic.begin_update(chunk, keep_copy=False)
        try:
            self._workers.run(saved.tasks_to_restore(chunk, [part.managed for part in progress.parts]))
        finally:
            recast_all(chunk)
            traffic.end_update(chunk)
        progress.restore_numbers()
        progress.begun = False
        self._count_versions(progress)

    @staticmethod
    def _count_versions(progress: Progress) -> None:
        for part in progress.parts:
            torch.autograd.graph.increment_version(part.managed.parameter)
            part.managed.version += 1

    # ---- parts and states --------------------------------------------------------------------------------------

    def _part(self, managed: ManagedParameter, group: dict[str, Any]) -> Part:
        gradient = managed.parameter.grad
        assert gradient is not None
        options = {name: frozen(value) for name, value in group.items() if name != "params"}
        return Part(managed, options, gradient, is_home_gradient(managed), gradient._version)

    def _state_roles(self, parts: Iterable[Part]) -> tuple[Role, ...]:
        found = [role for part in parts for role in self._optimizer.rule.roles(part.group, part.managed.chunk.dtype)]
        return tuple(dict.fromkeys(found))

    def _flat_gradient(self, part: Part, opened: Opened) -> torch.Tensor:
        """The gradient in the order in which the parameter's elements lie in memory."""
        managed, gradient = part.managed, part.gradient
        if part.at_home and Role.GRAD in opened:
            return managed.part(opened[Role.GRAD])
        if gradient.stride() == managed.stride and gradient.dtype == managed.chunk.dtype:
            return torch.as_strided(gradient, (managed.numel,), (1,), gradient.storage_offset())
        ordered = torch.empty(managed.numel, dtype=managed.chunk.dtype, device=gradient.device)
        ordered.as_strided(managed.shape, managed.stride).copy_(gradient)
        return ordered

    def _notice(self, chunk: Chunk) -> None:
        """Whatever the user wrote to parameters, gradients or states at home counts."""
        writes = self._runtime.writes
        for managed in chunk.parameters:
            if writes.changed(managed):
                writes.by_user(managed)
        honour_written_gradients(self._runtime, chunk)
        self._notice_states(chunk)

    def _notice_states(self, chunk: Chunk) -> None:
        for role in chunk.homes:
            if role.is_state and self._optimizer.states_written(chunk, role):
                self._runtime.traffic.superseded(chunk, role)


def _index(chunk: Chunk) -> int:
    return chunk.spec.index


def _nothing() -> None:
    """The pass that updates has written the copy; only its bytes are counted."""
