"""The passes over the memory of a chunk that a step is made of: squares are summed up, an update is made.

It knows what a pass reads and writes, and nothing of when: jobs are made here and queued by the `Stepper`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from hetmem.cpu import Task, square_sum_tasks, square_sums_on_device
from hetmem.engine.param_views import is_home_gradient
from hetmem.engine.sampling import Sample, as_sampled, sample_of
from hetmem.intercept.interceptor import Interception
from hetmem.memory.chunk import Chunk, ManagedParameter, Role
from hetmem.memory.nvme_store import Look
from hetmem.optim.device_gradients import KeptGradients
from hetmem.optim.overlap import Gradients, Overlap
from hetmem.optim.owners import SteppingOptimizer
from hetmem.optim.progress import (
    Job,
    Opened,
    Part,
    Progress,
    Sums,
    Update,
    frozen,
    refuse_sparse,
)
from hetmem.optim.rule import ParameterUpdate, Streamable
from hetmem.optim.update_placement import UpdatePlaces
from hetmem.schedule.trace import Tier
from hetmem.schedule.update_split import Way

Members = list[tuple[ManagedParameter, dict[str, Any]]]
"""Parameters that have a gradient, and their groups."""


class Passes:
    """The passes of `optimizer` over the chunks that `interception` manages."""

    def __init__(
        self,
        optimizer: SteppingOptimizer,
        interception: Interception,
        places: UpdatePlaces,
        kept: KeptGradients,
    ) -> None:
        self._made_by, self._interception = weakref.ref(optimizer), interception
        self._places, self._kept = places, kept
        self._runtime = interception.runtime

    @property
    def _optimizer(self) -> SteppingOptimizer:
        """It lives as long as any `Progress` of it."""
        optimizer = self._made_by()
        assert optimizer is not None
        return optimizer

    # ---- what a pass is of -------------------------------------------------------------------------------------

    def parts(self, chunk: Chunk, members: Members) -> list[Part]:
        """What a pass over `members` of `chunk` would be made with now: their gradients and what their groups say."""
        rule, found = self._optimizer.rule, []
        said: dict[int, tuple[dict[str, Any], tuple[Role, ...]]] = {}  # most are in one group
        for managed, group in members:
            gradient = managed.parameter.grad
            assert gradient is not None
            refuse_sparse(managed, type(self._optimizer).__name__)
            if id(group) not in said:
                options = {name: frozen(value) for name, value in group.items() if name != "params"}
                said[id(group)] = options, rule.roles(options, chunk.dtype)
            found.append(Part(managed, *said[id(group)], gradient, is_home_gradient(managed), gradient._version))
        return found

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

    def _see_gradients(self, progress: Progress, job: Job) -> None:
        """The gradients have arrived: whoever writes to them from now on, before `step`, changes what was used."""
        if progress.kept:  # which counted its versions as it arrived, and has no sample that nobody waits for
            return
        self._notice_disturbance(progress, job.opened)
        for part in progress.parts if self._optimizer.overlap is not Overlap.OFF else ():
            part.version = part.gradient._version
            part.sample = sample_of(self._flat_gradient(part, job.opened))

    def see_what_is_left(self, progress: Progress) -> None:
        """The backward is over: the user finds gradients that the update of `progress` has still to read. All have
        arrived, which counts a version."""
        for part in progress.parts:
            if part.sample is None and part.managed.parameter.grad is part.gradient:
                part.version = part.gradient._version
                if self._optimizer.gradients is Gradients.STREAMED and not progress.kept:
                    self.seen(part)

    def seen(self, part: Part) -> Part:
        """`part`, with a sample of its gradient as it is now."""
        part.sample = sample_of(self._flat_gradient(part, {}))
        return part

    def as_seen(self, part: Part) -> bool:
        """Whether nobody has written to the gradient of `part` since."""
        return part.version == part.gradient._version and self.unscaled([part])

    def _notice_disturbance(self, progress: Progress, opened: Opened) -> None:
        """Whether streamed gradients of `progress` that were seen are as they were."""
        if self._optimizer.gradients is not Gradients.STREAMED or self._interception.segments.in_backward:
            return
        for part in progress.parts:
            if part.sample is not None and part.managed.parameter.grad is part.gradient:
                (same,) = as_sampled([(part.sample, self._flat_gradient(part, opened))])
                progress.disturbed |= not same or part.version != part.gradient._version

    def look_at(self, parts: Iterable[Part]) -> None:
        """Begin to read what `unscaled` looks at, where it lies on NVMe, and look there, where it is on the device: one
        by one, each would cost a whole access, or a wait."""
        there: list[tuple[Part, tuple[Sample, torch.Tensor]]] = []
        for part in parts:
            part.look = None  # one that failed, or from before the home moved, says nothing now
            if part.sample is None:
                continue
            at = part.sample[0]
            if isinstance(at, torch.Tensor):
                there.append((part, (part.sample, self._flat_gradient(part, {}))))
            else:
                part.look = self._look_on_disk(part, at)
        for (part, _), same in zip(there, as_sampled([sample for _, sample in there]), strict=True):
            part.look = same

    def _look_on_disk(self, part: Part, at: int) -> Look | None:
        store = self._runtime.memory.store
        home = part.managed.chunk.homes.get(Role.GRAD) if part.at_home else None  # none: streamed, and used up
        extent = home.extent if home is not None else None
        if store is None or extent is None:
            return None
        return store.look(extent, (part.managed.offset + at) * part.managed.chunk.dtype.itemsize)

    def unscaled(self, parts: Iterable[Part]) -> bool:
        """Whether the gradients of `parts` are what was seen, as far as their samples say."""
        asked: list[tuple[Sample, torch.Tensor]] = []
        for part in parts:
            if part.sample is None or isinstance(part.look, bool):
                if part.look is False:
                    return False
            elif part.look is None:
                asked.append((part.sample, self._flat_gradient(part, {})))
            else:
                bits = part.sample[1]
                assert isinstance(bits, bytes)
                if bits != part.look.first(len(bits)):
                    return False
        return all(as_sampled(asked))

    # ---- what the user wrote -----------------------------------------------------------------------------------

    def notice(self, chunk: Chunk) -> None:
        """Whatever the user wrote to parameters, gradients or states at home counts."""
        self.notice_written(chunk)
        self._runtime.writes.honour_written_gradients(chunk)

    def notice_written(self, chunk: Chunk) -> None:
        """The same, but of gradients."""
        writes = self._runtime.writes
        for managed in chunk.parameters:
            if writes.changed(managed):
                writes.by_user(managed)
        self.notice_states(chunk)

    def notice_before(self, progress: Progress) -> None:
        """A step begins. What a pass of `progress` will read, and has not, it may find in staging, and it has seen
        nothing that could be compared with the home later."""
        if not progress.begun:  # else `MutationCheck` sees it
            self.notice_written(progress.chunk)
        if not progress.kept and any(part.sample is None for part in progress.parts):
            self._runtime.writes.honour_written_gradients(progress.chunk)

    def notice_states(self, chunk: Chunk) -> None:
        """The same of states alone."""
        for role in self._optimizer.states.written(chunk):
            self._runtime.traffic.superseded(chunk, role)

    # ---- squares -----------------------------------------------------------------------------------------------

    def sums_job(self, progress: Progress, done: Callable[[bool], None]) -> Job:
        """Return the job that sums up squares of the gradients of `progress`."""
        roles = {Role.GRAD: True} if any(part.at_home for part in progress.parts) else {}
        return Job(progress.chunk, roles, partial(self._sum_tasks, progress), done, writes=False)

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
                sums = square_sums_on_device(gradient)  # read in `on_host`
            progress.sums.append(sums)
        return tasks

    # ---- updates -----------------------------------------------------------------------------------------------

    def update_job(self, progress: Progress, grad_scale: float) -> Job:
        """Update the parts of `progress`, whose states have homes; gradients count `grad_scale` times."""
        chunk, parts = progress.chunk, progress.parts
        needed = {Role.PARAM: True}
        if Role.COMPUTE in chunk.homes:
            needed[Role.COMPUTE] = len(parts) < len(chunk.parameters) or bool(progress.left.places)
        needed |= {Role.GRAD: True} if any(part.at_home for part in parts) else {}
        needed |= {role: chunk.homes[role].written for role in progress.roles}
        progress.begun, progress.scale = True, grad_scale
        tasks, done = partial(self._update_tasks, progress), partial(self._updated, progress)
        if not progress.left.places:  # what others have begun they finish
            progress.way = self._places.way_of(progress)
        if progress.way is Way.STREAMED:
            progress.kept |= self._kept.holds(chunk)
            streamed, left = partial(self._streamed, progress), progress.left
            return Job(chunk, needed, tasks, done, writes=True, left=left, streamed=streamed)
        if self._kept.holds(chunk):
            self._kept.bring_home(chunk)
        return Job(chunk, needed, tasks, done, writes=True, keeps_copy=self._writes_copy(progress), left=progress.left)

    def _streamed(self, progress: Progress, job: Job) -> Update:
        """What the device is to do."""
        self._see_gradients(progress, job)
        rule = self._optimizer.rule
        assert isinstance(rule, Streamable)
        there, parameters = rule.there(self._begin(progress, job)), [part.managed for part in progress.parts]

        def updated(opened: Opened) -> None:
            there([{role.name: managed.part(flat) for role, flat in opened.items()} for managed in parameters])

        return updated

    def _writes_copy(self, progress: Progress) -> bool:
        """Whether the pass that updates `progress` can write the copy on the device too."""
        chunk, memory = progress.chunk, self._runtime.memory
        if chunk.compute_dtype is chunk.dtype or len(progress.parts) < len(chunk.parameters):
            return False
        if Role.COMPUTE in chunk.homes or memory.device.torch_device.type != "cpu":
            return False
        here = chunk.homes[Role.PARAM].tier is Tier.DEVICE  # else it would not see what the user writes after the step
        return here and not self._interception.segments.in_backward and self._optimizer.overlap is not Overlap.FORWARD

    def _begin(self, progress: Progress, job: Job) -> list[ParameterUpdate]:
        """Everything that can be undone is remembered."""
        homes = {name for role in progress.roles for name in (role.name, f"{role.name}_scale")}
        states = [self._optimizer.states.of(part.managed) for part in progress.parts]
        if progress.left.places:
            progress.restore_numbers()
        progress.remember_numbers(states, homes)
        return [
            self._update_of(part, state, job, progress.scale)
            for part, state in zip(progress.parts, states, strict=True)
        ]

    def _update_tasks(self, progress: Progress, job: Job) -> list[Task]:
        if progress.way is Way.STREAMED:  # it was left to the host
            progress.way = Way.HOST
        self._see_gradients(progress, job)
        updates = self._begin(progress, job)
        if job.opened[Role.PARAM].device.type != "cpu":
            self._optimizer.rule.on_device(updates, as_host=not self._runtime.memory.resident)
            return []
        tasks = [task for update in updates for task in self._optimizer.rule.tasks(update)]
        progress.go_on_with_numbers()
        return tasks

    def _update_of(self, part: Part, state: dict[str, Any], job: Job, grad_scale: float) -> ParameterUpdate:
        managed = part.managed
        states: dict[str, torch.Tensor] = {}
        fresh: set[str] = set()
        copy = job.opened.get(Role.COMPUTE, job.copy)
        for role in part.roles:
            parts = managed.parts(role, job.opened[role])
            states |= parts
            if state.get(role.name) is None:
                fresh |= parts.keys()
                for part_of_role in parts.values() if not job.left.places else ():
                    part_of_role.zero_()
                self._optimizer.states.show(managed, role)
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
        if progress.left.places:
            progress.note_numbers()
            for role in progress.roles:
                chunk.homes[role].written = True
            return
        if not done:
            progress.begun = False
            progress.restore_numbers()
            progress.kept = False
        for part in progress.parts:
            if not done or not part.roles:
                self._optimizer.states.forget_empty(part.managed)
        if not done:
            return
        for role in progress.roles:
            chunk.homes[role].written = True
        self._runtime.statistics.updated_bytes[progress.way] += progress.nbytes
        self._count_versions(progress)
        gradients = chunk.homes.get(Role.GRAD)
        if gradients is not None and gradients.extent is None:  # on NVMe it would be a read for each parameter
            self._notice_disturbance(progress, {})
        self._interception.gradients.retire(chunk, {part.managed for part in progress.parts})

    @staticmethod
    def _count_versions(progress: Progress) -> None:
        for part in progress.parts:
            torch.autograd.graph.increment_version(part.managed.parameter)
            part.managed.version += 1
