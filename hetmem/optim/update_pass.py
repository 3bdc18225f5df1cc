"""The passes over the memory of a chunk in a step: summing squares, and updating.

It knows what a pass reads and writes, but not when: the `Stepper` queues the jobs that are made here.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from itertools import pairwise, repeat
from operator import attrgetter, is_
from typing import Any

import torch

from hetmem.base.units import round_up
from hetmem.cpu import TILE_ELEMENTS, Task, square_sum_tasks
from hetmem.cpu.norm import sums_nbytes
from hetmem.cuda.kernels import RUN_ELEMENTS
from hetmem.intercept.interceptor import Interception
from hetmem.memory.chunk import Chunk, ManagedParameter, Role, elements
from hetmem.optim.chunk_update import ChunkUpdate
from hetmem.optim.members import Opened, Part, are_same
from hetmem.optim.options import ParameterUpdate
from hetmem.optim.states import SteppingOptimizer
from hetmem.ranks.group import Ranks
from hetmem.schedule.trace import Tier

_AT_HOME, _ROLES = attrgetter("at_home"), attrgetter("roles")


class Prepared:
    """The rule's arguments for an update whose roles are all at home, reused in the next step."""

    def __init__(
        self,
        update: ChunkUpdate,
        entries: list[dict[str, Any]],
        runs: list[slice],
        updates: list[ParameterUpdate],
    ) -> None:
        self.updates = updates
        self._members, self._gradient = update.members, update.chunk.flat(Role.GRAD)
        self._flats = [flat for flat in update.flats if flat is not self._gradient]
        self._entries, self._sizes = entries, [*map(len, entries)]
        self._counts: list[Any] = [entry.get("step") for entry in entries]
        """None in the first step."""
        ends = [(update.parts[run.start].managed, update.parts[run.stop - 1].managed) for run in runs]
        self._places = [slice(first.offset, last.offset + last.numel) for first, last in ends]
        self._starts = [run.start for run in runs]
        self._firsts = [run.start for run in runs for _ in range(run.start, run.stop)]

    def renew(self, update: ChunkUpdate) -> bool:
        """Make `updates` those of `update`; False if memory, parameters or step counts are other objects, or step
        counts differ within a run. Runs for each chunk in each step: mostly in C."""
        if update.members is not self._members or Role.GRAD not in update.chunk.homes:
            return False
        now = update.chunk.flat(Role.GRAD)
        if not are_same([flat for flat in update.flats if flat is not now], self._flats):
            return False
        if now is not self._gradient and not self._follow(update, now):
            return False
        if False in map(is_, map(dict.get, self._entries, repeat("step")), self._counts):
            return False
        if [*map(len, self._entries)] != self._sizes or False in map(_AT_HOME, update.parts):
            return False
        ages = torch.stack(self._counts).tolist()
        if [*map(ages.__getitem__, self._firsts)] != ages:
            return False
        update.numbers = [*zip(self._counts, ages, strict=True)]
        self.updates[0].ages = ages
        for start, each in zip(self._starts, self.updates, strict=True):
            each.group, each.grad_scale = update.parts[start].group, update.scale
        return True

    def _follow(self, update: ChunkUpdate, now: torch.Tensor) -> bool:
        """Take over that the gradients of `update` are in other memory, `now`, than before: each loan may be of another
        buffer. False if they differ otherwise, or are of several chunks."""
        before = self._gradient
        if update.chunks[1:] or now.dtype is not before.dtype or now.device != before.device:
            return False
        self._gradient = now
        for place, each in zip(self._places, self.updates, strict=True):
            each.grad = now[place]
        return True


def _shared_sum_tasks(ranks: Ranks, managed: ManagedParameter, grad: torch.Tensor) -> tuple[list[Task], torch.Tensor]:
    """Return `square_sum_tasks` of `grad` for the tiles of this rank, and the sums of all ranks."""
    chunk = managed.chunk
    memory = ranks.pool.reserve_home(chunk.spec.index, "squares", sums_nbytes(chunk.capacity, chunk.most_parameters))
    first = managed.offset // RUN_ELEMENTS + chunk.parameters.index(managed)  # each before it may end within a run
    sums = elements(memory, torch.float64, -(-grad.numel() // RUN_ELEMENTS), 8 * first)
    tiles = managed.offset // TILE_ELEMENTS
    return square_sum_tasks(grad, sums, lambda tile: ranks.owns(chunk.spec.index, tiles + tile))[0], sums


class Passes:
    """The passes of `optimizer` over the chunks that `interception` manages."""

    def __init__(self, optimizer: SteppingOptimizer, interception: Interception) -> None:
        self._made_by, self._interception = weakref.ref(optimizer), interception
        self._runtime = interception.runtime
        self._rule, self._states = optimizer.rule, optimizer.states
        self.corrupt: list[ManagedParameter] = []
        """Parameters whose update has failed half-way: no later step is possible."""
        self.prepared: dict[Chunk, Prepared] = {}

    @property
    def _optimizer(self) -> SteppingOptimizer:
        """The optimizer, which lives as long as any `ChunkUpdate` of it."""
        optimizer = self._made_by()
        assert optimizer is not None
        return optimizer

    # ---- writes of the program ---------------------------------------------------------------------------------

    def notice(self, chunks: Sequence[Chunk]) -> None:
        """Take over writes of the program to parameters and states of `chunks` at home."""
        writes = self._runtime.writes
        writes.by_users(writes.all_counted([managed for chunk in chunks for managed in chunk.parameters]))
        for chunk in chunks:
            self.notice_states(chunk)

    def notice_states(self, chunk: Chunk) -> None:
        """Take over writes of the program to states of `chunk` at home."""
        memory = self._runtime.memory
        if self._states.written(chunk, lambda at: memory.is_home_address(at) or memory.is_device_address(at)):
            self._runtime.traffic.wait_for_update(chunk)  # of another optimizer, which has staged its states
            self.prepared.pop(chunk, None)
            for role in chunk.homes:
                if role.is_state:
                    self._runtime.traffic.superseded(chunk, role)

    # ---- squares -----------------------------------------------------------------------------------------------

    def begin_sums(self, update: ChunkUpdate) -> None:
        """Make `update` a pass that sums the squares of its gradients."""
        update.needs = {Role.GRAD: True} if True in map(_AT_HOME, update.parts) else {}
        update.tasks, update.done = self._sum_tasks, self._summed
        update.writes, update.summing = False, True

    def _sum_tasks(self, update: ChunkUpdate) -> list[Task]:
        update.open_homes()
        tasks: list[Task] = []
        update.sums = []
        ranks = self._runtime.memory.ranks
        for part, given in zip(update.parts, update.gradients, strict=True):
            gradient = part.flat(given, update.opened[part.managed.chunk])
            if ranks is None:
                more, sums = square_sum_tasks(gradient)
            else:
                more, sums = _shared_sum_tasks(ranks, part.managed, gradient)
            tasks += more
            update.sums.append(sums)
        return tasks

    @staticmethod
    def _summed(update: ChunkUpdate, done: bool) -> None:
        update.summing = False
        if not done:
            update.sums = []

    # ---- updates -----------------------------------------------------------------------------------------------

    def begin_update(self, update: ChunkUpdate, grad_scale: float) -> None:
        """Make `update`, whose states have homes, the pass that updates, with gradients times `grad_scale`."""
        chunk, parts = update.chunk, update.parts
        update.needs = {Role.PARAM: True}
        if Role.COMPUTE in chunk.homes:
            update.needs[Role.COMPUTE] = len(parts) < sum(len(each.parameters) for each in update.chunks)
        update.needs |= {Role.GRAD: True} if True in map(_AT_HOME, parts) else {}
        for role in update.roles:
            update.needs[role] = chunk.homes[role].written
        update.tasks, update.done = self._update_tasks, self._updated
        update.begun, update.scale, update.writes = True, grad_scale, True

    def equals_host(self, chunk: Chunk) -> bool:
        """Return whether updates of `chunk` on the device have the bits of those on the host."""
        device, copy_dtype = self._runtime.memory.device.torch_device, None
        if Role.COMPUTE in chunk.homes:
            copy_dtype = chunk.compute_dtype
        rule = self._rule
        return rule.runs_on_device and (device.type == "cpu" or rule.equals_host(device, chunk.dtype, copy_dtype))

    def _begin(self, update: ChunkUpdate) -> list[ParameterUpdate]:
        """Return the rule's arguments for `update`, after saving everything that a failure must restore."""
        if update.chunk in self.prepared and not update.staged:
            prepared = self.prepared[update.chunk]
            if prepared.renew(update):
                return prepared.updates
        update.open_homes()
        homes = {name for role in update.roles for name in (role.name, f"{role.name}_scale")}
        states = [self._states.of(part.managed) for part in update.parts]
        update.remember_numbers(states, homes)
        merges = self._rule.has_kernel and all(Role.GRAD in opened for opened in update.opened.values())
        runs = self._runs(update, states, merges=merges)
        updates = [self._update_of(run, states[run], update) for run in runs]
        for home in (chunk.homes[role] for chunk in update.chunks for role in update.roles):
            home.untouched = False
        self.prepared.pop(update.chunk, None)
        if merges and not update.staged and all(part.at_home for part in update.parts):
            self.prepared[update.chunk] = Prepared(update, states, runs, updates)
        return updates

    @staticmethod
    def _runs(update: ChunkUpdate, states: list[dict[str, Any]], *, merges: bool) -> list[slice]:
        """Split the parts of `update`, which have `states`, into runs that are updated as one: each part begins where
        the one before ends, all are of one group and step count, and their gradients are adjacent too."""
        parts = update.parts
        known = {id(number): value for number, value in update.numbers}
        ages = [0 if state.get("step") is None else known.get(id(state["step"])) for state in states]
        starts = [0]
        for at in range(1, len(parts)):
            one, other = parts[at - 1], parts[at]
            alike = merges and one.group is other.group and ages[at - 1] == ages[at] is not None
            adjoin = one.managed.offset + one.managed.numel == other.managed.offset
            adjoin = adjoin and one.managed.chunk is other.managed.chunk
            if not (alike and adjoin and one.at_home and other.at_home):
                starts.append(at)
        starts.append(len(parts))
        return [slice(start, end) for start, end in pairwise(starts)]

    def _update_tasks(self, update: ChunkUpdate) -> list[Task]:
        rule = self._rule
        if update.chunk.moved and update.chunk.flat(Role.PARAM).device.type != "cpu":
            rule.on_device(self._begin(update))
            return []
        return rule.tasks(self._begin(update))

    def _update_of(self, run: slice, entries: list[dict[str, Any]], update: ChunkUpdate) -> ParameterUpdate:
        """Return the update of the `run` of parts, which are adjacent if they are several, and whose states have
        `entries`."""
        parts = update.parts[run]
        first, managed = parts[0], parts[0].managed
        opened = update.opened[managed.chunk]
        fresh = self._make_states(parts, entries, opened)
        copy = opened.get(Role.COMPUTE)
        states: dict[str, torch.Tensor] = {}
        if len(parts) == 1:
            for role in first.roles:
                states |= managed.parts(role, opened[role])
            gradient, end = first.flat(update.gradients[run.start], opened), managed.offset + managed.numel
        else:
            end = parts[-1].managed.offset + parts[-1].managed.numel
            gradient = opened[Role.GRAD][managed.offset : end]
            states = {role.name: opened[role][managed.offset : end] for role in first.roles}
        place = slice(managed.offset, end)
        ranks, chunk = self._runtime.memory.ranks, managed.chunk.spec.index
        return ParameterUpdate(
            first.group,
            entries[0],
            opened[Role.PARAM][place],
            gradient,
            states,
            update.scale,
            fresh,
            self._optimizer.number_of(managed),
            None if copy is None else copy[place],
            None if ranks is None else ranks.own(chunk, managed.offset, end),
            entries[1:],
        )

    def _make_states(self, parts: list[Part], entries: list[dict[str, Any]], opened: Opened) -> frozenset[str]:
        """Make, and show, the states of `parts` that `entries` lack, all zero; return their names. Memory that nothing
        has used is zero already: writing to it would take as long as the update."""
        made: dict[str, torch.Tensor] = {}
        for part, entry in zip(parts, entries, strict=True):
            for role in part.roles:
                if entry.get(role.name) is None:
                    made |= part.managed.parts(role, opened[role])
                    home = part.managed.chunk.homes[role]
                    if home.written or not home.untouched:
                        for name, state in part.managed.parts(role, opened[role]).items():
                            self._zero(part.managed, state, role.scale_block, in_blocks=name != role.name)
                    self._states.show(part.managed, role)
        return frozenset(made)

    def _zero(self, managed: ManagedParameter, state: torch.Tensor, block: int, *, in_blocks: bool) -> None:
        """Zero `state` of `managed`, of elements or, `in_blocks`, of a scale for each `block` of them; of ranks each
        what it updates, as another may have updated its part by now."""
        ranks, start = self._runtime.memory.ranks, managed.offset
        if ranks is None:
            state.zero_()
            return
        for part in ranks.own(managed.chunk.spec.index, start, start + managed.numel):
            first, end = (round_up(at, block or 1) // (block if in_blocks else 1) for at in (part.start, part.stop))
            state[first:end].zero_()

    def _updated(self, update: ChunkUpdate, done: bool) -> None:
        if update.corrupt:
            self.corrupt += (part.managed for part in update.parts)
        elif not done:
            update.begun = False
            update.restore_numbers()
        for part in update.parts if not done or () in set(map(_ROLES, update.parts)) else ():
            if not done or not part.roles:
                self._states.forget_empty(part.managed)
        if not done:
            return
        for chunk in update.chunks:
            for role in update.roles:
                chunk.homes[role].written = True
        on_device = update.chunk.homes[Role.PARAM].tier is Tier.DEVICE
        self._runtime.statistics.updated_bytes[Tier.DEVICE if on_device else Tier.HOST] += update.members.nbytes
        torch.autograd.graph.increment_version(update.members.parameters)
        for managed in update.members.managed:
            managed.version += 1
        update.consume()
        loans = self._interception.gradients.loans
        for chunk in update.chunks:
            if chunk in loans.lent:
                loans.retire(chunk, update.members.managed)
