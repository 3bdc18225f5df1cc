"""What one step updates: a chunk (what its update is made with, how far it is, and the pass over its memory that is
under way), or at once all parameters of a group that is whole on the device."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import chain, compress
from operator import attrgetter
from typing import Any, Generic, TypeVar

import torch

from hetmem.cpu import square_sum_tasks
from hetmem.cpu.workers import Batch, Task, WorkerPool
from hetmem.engine.gradient_views import are_home, take_gradient
from hetmem.engine.runtime import Runtime
from hetmem.engine.sampling import Sample
from hetmem.errors import ManageError
from hetmem.memory.chunk import Chunk, ManagedParameter, Role, address_of, stored
from hetmem.optim.options import Rule
from hetmem.schedule.placement import Way

_StepperT = TypeVar("_StepperT")
Opened = dict[Role, torch.Tensor]
"""Flat tensors over the roles of one chunk, in host memory or, if their home is there, on the device."""


# Looked up of each parameter in each step: by C alone.
ADDRESS, _STRIDES = torch.Tensor.data_ptr, torch.Tensor.stride
_LAYOUT, _DTYPE, _NBYTES = attrgetter("layout"), attrgetter("dtype"), attrgetter("nbytes")
_COUNT = attrgetter("is_cpu", "dtype", "ndim")
_ROLES, _GRADIENT, VERSION = attrgetter("roles"), attrgetter("grad"), attrgetter("_version")


def are_same(some: Sequence[object], others: Sequence[object]) -> bool:
    """Return whether both hold the same objects, in the same order."""
    return [*map(id, some)] == [*map(id, others)]


class GroupOptions:
    """A parameter group of an optimizer with `rule`, and what it said when a step last asked it."""

    def __init__(self, group: dict[str, Any], rule: Rule) -> None:
        self._group, self._rule = group, rule
        self._said: dict[str, Any] | None = None
        self._roles: dict[torch.dtype, tuple[Role, ...]] = {}

    def now(self, dtype: torch.dtype) -> tuple[dict[str, Any], tuple[Role, ...]]:
        """Return what the group says but for its parameters, the same object as long as it says the same, and the
        states that those of `dtype` take. Raises what the rule does for options that make no sense."""
        says = {name: value for name, value in self._group.items() if name != "params"}
        if self._said != says:
            self._said, self._roles = deepcopy(says), {}
        if dtype not in self._roles:
            self._roles[dtype] = self._rule.roles(self._said, dtype)
        return self._said, self._roles[dtype]


class Members:
    """Parameters of one chunk that an optimizer steps, in the order of their places, and their groups: the same object
    in each step, until parameters or groups of the optimizer change."""

    def __init__(self, members: Iterable[tuple[ManagedParameter, GroupOptions]]) -> None:
        in_order = sorted(members, key=lambda member: member[0].offset)
        self.managed, self._groups = [managed for managed, _ in in_order], [group for _, group in in_order]
        self.parameters = [managed.parameter for managed in self.managed]
        self.nbytes = sum(managed.numel * managed.chunk.dtype.itemsize for managed in self.managed)
        self._distinct = list(dict.fromkeys(self._groups))
        self._some: tuple[list[bool], Members] | None = None

    def with_gradients(self, optimizer: str) -> Members | None:
        """Return those that have a gradient; None if none has. Raises RuntimeError for one that is not dense, which the
        optimizer of that name does not support."""
        gradients: list[Any] = [*map(_GRADIENT, self.parameters)]
        have = [gradient is not None for gradient in gradients]
        if not any(have):
            return None
        layouts = [*map(_LAYOUT, compress(gradients, have))]
        if set(layouts) != {torch.strided}:
            names = (managed.name for managed in compress(self.managed, have))
            name = next(name for name, layout in zip(names, layouts, strict=True) if layout is not torch.strided)
            raise RuntimeError(f"{optimizer} does not support sparse gradients, and {name} has one")
        if all(have):
            return self
        if self._some is None or self._some[0] != have:
            self._some = have, Members(compress(zip(self.managed, self._groups, strict=True), have))
        return self._some[1]

    def parts(self) -> list[Part]:
        """Return what an update of these, which have gradients, would be made with now."""
        dtype, gradients = self.managed[0].chunk.dtype, [*map(_GRADIENT, self.parameters)]
        said = {group: group.now(dtype) for group in self._distinct}
        at_home = are_home(gradients, self.managed)
        fields = zip(self.managed, map(said.__getitem__, self._groups), gradients, at_home, strict=True)
        return [
            Part(managed, *options, gradient, home, gradient._version) for managed, options, gradient, home in fields
        ]


class AllMembers(Generic[_StepperT]):
    """The `Members` of all groups of an optimizer with `rule`, by what steps them and by chunk: the same objects until
    groups, what is in these, or models are others."""

    def __init__(self, rule: Rule) -> None:
        self._rule = rule
        self._members: dict[_StepperT, dict[Chunk, Members]] = {}
        self._made_of: list[object] = []
        self.not_managed: list[torch.Tensor] = []
        """Parameters that no managed model has any more."""

    def of(
        self,
        groups: list[dict[str, Any]],
        steppers: dict[Any, _StepperT],
        find: Callable[[torch.Tensor], tuple[_StepperT, ManagedParameter]],
    ) -> dict[_StepperT, dict[Chunk, Members]]:
        """Return them. `find` adds to `steppers`, and raises `ManageError` for a parameter that is not managed."""
        made_of = [each for group in groups for each in (group, *group["params"])]
        if are_same([*made_of, *steppers.values()], self._made_of):
            return self._members
        found: dict[_StepperT, dict[Chunk, list[tuple[ManagedParameter, GroupOptions]]]] = {}
        self.not_managed = []
        for group in groups:
            options = GroupOptions(group, self._rule)
            for parameter in group["params"]:
                try:
                    stepper, managed = find(parameter)
                except ManageError:
                    self.not_managed.append(parameter)
                    continue
                found.setdefault(stepper, {}).setdefault(managed.chunk, []).append((managed, options))
        self._members = {
            stepper: {chunk: Members(members) for chunk, members in found.get(stepper, {}).items()}
            for stepper in steppers.values()
        }
        self._made_of = [*made_of, *steppers.values()]
        return self._members


@dataclass(slots=True, eq=False)
class Part:
    """A parameter to update: its gradient, the options of its group at that time, and the states that these take."""

    managed: ManagedParameter
    group: dict[str, Any]
    roles: tuple[Role, ...]
    gradient: torch.Tensor
    at_home: bool
    version: int
    sample: Sample | None = None

    def same(self, other: Part) -> bool:
        """Whether both ask for the same update."""
        return (
            (self.managed, self.version) == (other.managed, other.version)
            and self.gradient is other.gradient
            and (self.group is other.group or self.says(other.group))
        )

    def says(self, group: dict[str, Any]) -> bool:
        """Whether `group`, but for its parameters, has the options that this was made with."""
        return self.group == {name: value for name, value in group.items() if name != "params"}

    def flat_gradient(self, opened: Opened) -> torch.Tensor:
        """Return the gradient in the order in which the parameter's elements lie in memory."""
        managed, gradient = self.managed, stored(self.gradient)
        if self.at_home and Role.GRAD in opened:
            return managed.part(opened[Role.GRAD])
        kept = gradient is not self.gradient  # in fewer bits, which an update widens itself
        if gradient.stride() == managed.stride and (kept or gradient.dtype == managed.chunk.dtype):
            return torch.as_strided(gradient, (managed.numel,), (1,), gradient.storage_offset())
        ordered = torch.empty(managed.numel, dtype=managed.chunk.dtype, device=gradient.device)
        ordered.as_strided(managed.shape, managed.stride).copy_(gradient)
        return ordered


@dataclass(eq=False)
class ChunkUpdate:
    """The update of `members` of `chunk`, with the gradients of `parts`. At most one pass of it is queued or under way:
    its sums of squares, or the update itself. `tasks` makes the tiles once the roles that it `needs` are open, `done`
    ends it."""

    members: Members
    parts: list[Part]
    chunk: Chunk = field(init=False)
    sums: list[torch.Tensor] = field(default_factory=list)
    summing: bool = False
    """Whether the sums of squares are queued or under way."""
    begun: bool = False
    """Whether the update was queued, with the factor `scale` for its gradients."""
    scale: float = 1.0
    disturbed: bool = False
    """Whether streamed gradients were written to before they were read."""
    ruined: bool = False
    """Whether it failed with some of its elements updated and others not: only a checkpoint helps."""
    owed: bool = False
    """Whether its step has ended: nothing will ask for it again."""
    before: list[tuple[dict[str, Any], dict[str, Any]]] = field(default_factory=list)
    numbers: list[tuple[torch.Tensor, Any]] = field(default_factory=list)
    """Of `before`, what changes in place, and the values of that."""
    roles: tuple[Role, ...] = field(init=False)
    """The states of all parts."""

    needs: dict[Role, bool] = field(default_factory=dict)
    """The roles to open; the value says whether what they hold matters."""
    staged: list[Role] = field(default_factory=list)
    """Of those that were asked for, the ones that come by way of staging."""
    tasks: Callable[[ChunkUpdate], list[Task]] = field(init=False)
    done: Callable[[ChunkUpdate, bool], None] = field(init=False)
    """Called once at the end of a pass: with False if it failed or was cancelled."""
    writes: bool = False
    """Whether all roles but the gradient change. Until the end nothing fetches the parameters from their home then."""
    had_copy: bool = False
    """Whether a copy on the device was given up, which is fetched again."""
    opened: Opened = field(default_factory=dict)
    batch: Batch | None = None
    began: float = 0.0

    def __post_init__(self) -> None:
        self.chunk = self.members.managed[0].chunk
        self.roles = tuple(dict.fromkeys(chain.from_iterable(map(_ROLES, self.parts))))

    def updates(self, managed: ManagedParameter) -> bool:
        """Whether `managed` is one of the parts."""
        return any(part.managed is managed for part in self.parts)

    def of(self, parts: list[Part]) -> bool:
        """Whether it is of `parts`, in whatever order, as they are now."""
        theirs = {part.managed: part for part in parts}
        return len(theirs) == len(self.parts) and all(
            part.managed in theirs and part.same(theirs[part.managed]) for part in self.parts
        )

    def use_up_gradients(self) -> None:
        """Take the gradients away, which an update behind the step still reads: a zero_grad must not write to them."""
        for part in self.parts:
            if part.at_home and part.managed.parameter.grad is part.gradient:
                take_gradient(part.managed.parameter)

    def remember_numbers(self, states: Iterable[dict[str, Any]], homes: Container[str]) -> None:
        """Keep what an update changes beside chunks: step counts and the like. States called `homes` lie in chunks."""
        self.before = [(state, dict(state)) for state in states]
        self.numbers = [
            (value, value.item())
            for _, before in self.before
            for name, value in before.items()
            if isinstance(value, torch.Tensor) and not value.dim() and name not in homes
        ]

    def restore_numbers(self) -> None:
        """Undo what the update did to those."""
        for state, before in self.before:
            state.clear()
            state.update(before)
        for number, value in self.numbers:
            number.fill_(value)
        self.before, self.numbers = [], []


# ---- Parameters that are whole on the device, states and all: one call of torch's kernel for each group. Nothing
# moves, chunks, jobs and workers have no part in it, and an update that begins is made.


@dataclass(slots=True, eq=False)
class WholeUpdate:
    """What one step updates of a `WholeGroup`."""

    of: WholeGroup
    group: dict[str, Any]
    managed: list[ManagedParameter]
    params: list[torch.Tensor]
    grads: list[torch.Tensor]
    states: list[list[torch.Tensor]]
    steps: list[torch.Tensor]

    def square_sums(self, workers: WorkerPool) -> list[torch.Tensor]:
        """Sum up the squares of the gradients; see `hetmem.cpu.norm`."""
        made = [square_sum_tasks(torch.as_strided(grad, (grad.numel(),), (1,))) for grad in self.grads]
        workers.run([task for tasks, _ in made for task in tasks])
        return [sums for _, sums in made]

    def carry_out(self, rule: Rule, scale: float) -> None:
        """Update all, or raise with nothing changed."""
        runtime, began = self.of.runtime, self.of.runtime.events.here()
        chunks = dict.fromkeys(managed.chunk for managed in self.managed) if runtime.memory.uses_copies else {}
        with runtime.unwatched(), runtime.traffic.updated_at_home(chunks):
            rule.whole(self.group, self.params, self.grads, self.states, self.steps, scale)
            torch.autograd.graph.increment_version(self.params)
            for managed in self.managed:
                managed.version = managed.counter._version
        runtime.statistics.updated_bytes[Way.RESIDENT] += sum(map(_NBYTES, self.params))
        runtime.events.updated("all chunks", began)


class WholeGroup:
    """Parameters of one group of an optimizer, all of one model and with homes on the device, and where they lie."""

    def __init__(self, runtime: Runtime, managed: list[ManagedParameter], roles: tuple[Role, ...]) -> None:
        self.runtime, self._managed = runtime, managed
        self.parameters = [each.parameter for each in managed]
        self.largest_bytes = max(map(_NBYTES, self.parameters), default=0)
        self._names = [role.name for role in roles]
        self._dtypes = [each.chunk.dtype for each in managed]
        self._strides = [each.stride for each in managed]
        self._at = [each.home_address for each in managed]
        self._states_at = [[_address(each, role) for each in managed] for role in roles]

    def is_of(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether it is of `parameters`, and they still are whole on the device."""
        return are_same(parameters, self.parameters) and self.runtime.memory.resident

    def update(self, group: dict[str, Any], shown: Any) -> WholeUpdate | None:
        """What a step is to update, of what has a gradient; `shown` are the optimizer's states. None if something is
        not as the kernel needs it (no state yet, a gradient of another layout, other memory than the home's)."""
        given: list[Any] = [parameter.grad for parameter in self.parameters]
        live = [grad is not None for grad in given]
        pick: Callable[[Iterable[Any]], list[Any]] = list if all(live) else lambda each: list(compress(each, live))
        params, grads, managed = pick(self.parameters), pick(given), pick(self._managed)
        entries: list[Any] = list(map(shown.get, params))
        if not params:
            return WholeUpdate(self, group, [], [], [], [], [])
        if not all(entries) or set(map(_LAYOUT, grads)) != {torch.strided}:
            return None
        try:
            states = [[entry[name] for entry in entries] for name in self._names]
            steps = [entry["step"] for entry in entries]
        except KeyError:
            return None
        as_at_home = (
            list(map(ADDRESS, params)) == pick(self._at)
            and list(map(_STRIDES, params)) == pick(self._strides) == list(map(_STRIDES, grads))
            and list(map(_DTYPE, grads)) == pick(self._dtypes)
            and set(map(_COUNT, steps)) == {(True, torch.float32, 0)}
            and all(list(map(ADDRESS, some)) == pick(at) for some, at in zip(states, self._states_at, strict=True))
        )
        return WholeUpdate(self, group, managed, params, grads, states, steps) if as_at_home else None


def _address(managed: ManagedParameter, role: Role) -> int:
    """Where `role` of `managed` lies; 0 if it has no home, or no elements."""
    home = managed.chunk.homes.get(role)
    if home is None or not managed.numel:
        return 0
    return address_of(home.memory) + managed.places(role)[role.name]
