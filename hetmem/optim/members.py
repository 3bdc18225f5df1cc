"""The parameters that an optimizer steps, by chunk or by group, and their inputs: found once, and reused until
parameters or groups change."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, compress, repeat
from operator import and_, attrgetter, is_, is_not, not_
from typing import Any, Generic, Protocol, TypeVar

import torch

from hetmem.engine.gradient_views import are_home
from hetmem.errors import ManageError
from hetmem.memory.chunk import Chunk, ManagedParameter, Role, address_of
from hetmem.memory.hidden_gradient import HiddenGradient, stored
from hetmem.optim.options import Rule
from hetmem.schedule.trace import Tier

_StepperT = TypeVar("_StepperT", bound="Steps")
Opened = dict[Role, torch.Tensor]
"""Flat tensors over the roles of one chunk, in host memory, or on the device if the home is there."""

# Read for each parameter in each step: these run in C.
_GRADIENT, _LAYOUT, _NBYTES = attrgetter("grad"), attrgetter("layout"), attrgetter("nbytes")
_INDEX, _TIER, _HOST = attrgetter("spec.index"), attrgetter("tier"), {Tier.HOST}

JOINED_BYTES = 16 << 20
"""Bytes of parameters that one update of several chunks has at most: about a millisecond, so that the copies of the
first chunks are renewed, and a forward goes on, while later ones are updated."""


def are_same(some: Sequence[object], others: Sequence[object]) -> bool:
    """Return whether both hold the same objects, in the same order."""
    return [*map(id, some)] == [*map(id, others)]


Chosen = tuple[dict[str, Any], tuple[Role, ...]]
"""The options of a group at one time, and the roles of its states."""

Options = dict[tuple["GroupOptions", torch.dtype], Chosen]
"""The options that a step has read, once for each group and dtype."""


class GroupOptions:
    """A parameter group of an optimizer with `rule`, and its options when a step last read them."""

    def __init__(self, group: dict[str, Any], rule: Rule) -> None:
        self._group, self._rule = group, rule
        self._options: dict[str, Any] | None = None
        self._found: dict[torch.dtype, Chosen] = {}
        self._needs: dict[torch.dtype, tuple[str, ...]] = {}

    def now(self, dtype: torch.dtype) -> Chosen:
        """Return the group's options without its parameters, and the roles of its states for `dtype`: the same object
        as long as they are equal. Raises the rule's errors for invalid options."""
        options = {name: value for name, value in self._group.items() if name != "params"}
        if self._options != options:
            self._options, self._found, self._needs = deepcopy(options), {}, {}
        if dtype not in self._found:
            self._found[dtype] = self._options, self._rule.roles(self._options, dtype)
        return self._found[dtype]

    def needs(self, dtype: torch.dtype) -> tuple[str, ...]:
        """Return what `Rule.needs` does for the options now."""
        options, _ = self.now(dtype)
        if dtype not in self._needs:
            self._needs[dtype] = self._rule.needs(options, dtype)
        return self._needs[dtype]


class Members:
    """Parameters that an optimizer steps, with their groups: those of one chunk or of several, in the order of their
    offsets, or those of one group in a model that is whole on the device. Reused until parameters or groups of the
    optimizer change."""

    def __init__(self, members: Iterable[tuple[ManagedParameter, GroupOptions]]) -> None:
        in_order = sorted(members, key=lambda member: (member[0].chunk.spec.index, member[0].offset))
        self.managed, self._groups = [managed for managed, _ in in_order], [group for _, group in in_order]
        self.parameters: list[torch.Tensor] = [managed.parameter for managed in self.managed]
        self.nbytes = sum(managed.numel * managed.chunk.dtype.itemsize for managed in self.managed)
        self.largest_bytes = max(map(_NBYTES, self.parameters), default=0)
        self._distinct = list(dict.fromkeys(self._groups))
        self.chunks = (*dict.fromkeys(managed.chunk for managed in self.managed),)
        self.dtypes = {chunk.dtype for chunk in self.chunks}
        self._keys = [(group, dtype) for group in self._distinct for dtype in self.dtypes]
        self._some: tuple[list[bool], Members] | None = None
        self._made: tuple[list[Chosen], list[bool], tuple[list[Part], tuple[Role, ...]]] | None = None
        """Of `parts`: the options and places of gradients for which they were made, and the result."""
        self.roles: tuple[Role, ...] = ()
        """The states of all parameters, once read."""
        self._addresses: list[list[int]] = []

    @classmethod
    def joined(cls, members: Sequence[Members]) -> Members:
        """Return the parameters of all `members`, of chunks of one dtype."""
        return cls(pair for each in members for pair in zip(each.managed, each._groups, strict=True))

    def options(self, known: Options) -> list[Chosen]:
        """Return the options of each of the groups, of parameters of one dtype; `known`: those that the step has
        read."""
        found: list[Any] = [*map(known.get, self._keys)]
        return found if None not in found else [known.get(key) or _read(key, known) for key in self._keys]

    @cached_property
    def strides(self) -> list[tuple[int, ...]]:
        """Those of the parameters."""
        return [managed.stride for managed in self.managed]

    def addresses(self, *, anew: bool = False) -> list[list[int]]:
        """Return the addresses of the homes of the parameters, and of each of `roles`; cached unless `anew`."""
        if anew or not self._addresses:
            of_states = [[_address(managed, role) for managed in self.managed] for role in self.roles]
            self._addresses = [[managed.home_address for managed in self.managed], *of_states]
        return self._addresses

    def with_gradients(self, optimizer: str) -> Members | None:
        """Return those that have a gradient; None if none has. Raises RuntimeError, in the name of `optimizer`, for a
        sparse one."""
        gradients: list[Any] = [*map(_GRADIENT, self.parameters)]
        have = [*map(is_not, gradients, repeat(None))]
        if True not in have:
            return None
        layouts = [*map(_LAYOUT, compress(gradients, have))]
        if {*layouts} != {torch.strided}:
            names = (managed.name for managed in compress(self.managed, have))
            name = next(name for name, layout in zip(names, layouts, strict=True) if layout is not torch.strided)
            raise RuntimeError(f"{optimizer} does not support sparse gradients, and {name} has one")
        if False not in have:
            return self
        if self._some is None or self._some[0] != have:
            self._some = have, Members(compress(zip(self.managed, self._groups, strict=True), have))
        return self._some[1]

    def incomplete(self, shown: Any) -> Iterator[tuple[ManagedParameter, list[str]]]:
        """Yield those that have something in `shown`, the optimizer's states, but not all that an update needs, each
        with what is missing."""
        entries = [*map(shown.get, self.parameters)]
        if not any(entries) or (all(entries) and not self._lack(entries)):
            return
        for managed, group, entry in zip(self.managed, self._groups, entries, strict=True):
            if entry and (missing := missing_in(entry, group.needs(managed.chunk.dtype))):
                yield managed, missing

    def _lack(self, entries: list[dict[str, Any]]) -> bool:
        """Return whether any of `entries` lacks what any group needs. Runs for each chunk in each step: mostly in C."""
        dtype, nothing = self.managed[0].chunk.dtype, repeat(None)
        needs = {name for group in self._distinct for name in group.needs(dtype)}
        return any(True in map(is_, map(dict.get, entries, repeat(name)), nothing) for name in needs)

    def parts(self, gradients: Sequence[torch.Tensor], known: Options) -> tuple[list[Part], tuple[Role, ...]]:
        """Return the parts of an update with `gradients`, those of all these parameters, and the roles of their states:
        the same objects in each step, as long as nothing differs. `known`: see `options`."""
        options, at_home = self.options(known), are_home(gradients, self.managed)
        if HiddenGradient in {*map(type, gradients)}:
            zeroed = map(getattr, gradients, repeat("zeroed"), repeat(False))
            at_home = [*map(and_, at_home, map(not_, zeroed))]
        if self._made is None or self._made[1] != at_home or not are_same(self._made[0], options):
            chosen = map(dict(zip(self._distinct, options, strict=True)).__getitem__, self._groups)
            of_each = zip(self.managed, chosen, at_home, strict=True)
            parts = [Part(managed, *options_of, home) for managed, options_of, home in of_each]
            roles = tuple(dict.fromkeys(role for part in parts for role in part.roles))
            self._made = options, at_home, (parts, roles)
        return self._made[2]


def _read(key: tuple[GroupOptions, torch.dtype], known: Options) -> Chosen:
    """Read the options of a group now, and keep them in `known`."""
    known[key] = key[0].now(key[1])
    return known[key]


def is_zeroed(gradient: torch.Tensor) -> bool:
    """Return whether `gradient` is hidden, and the program has zeroed it: its home is not."""
    return type(gradient) is HiddenGradient and gradient.zeroed


def missing_in(entry: Mapping[str, Any], needs: Iterable[str]) -> list[str]:
    """Return those of `needs` that are not in `entry`, or None there."""
    return [name for name in needs if entry.get(name) is None]


def _address(managed: ManagedParameter, role: Role) -> int:
    """Return the address of `role` of `managed`; 0 if it has no home, or no elements."""
    home = managed.chunk.homes.get(role)
    if home is None or not managed.numel:
        return 0
    return address_of(home.memory) + managed.byte_offsets(role)[role.name]


class Steps(Protocol):
    """Steps the parameters of one model."""

    @property
    def updates_whole(self) -> bool:
        """Whether it updates all parameters of a group at once."""


class AllMembers(Generic[_StepperT]):
    """The `Members` of all groups of an optimizer with `rule`, by stepper and chunk, or by group for a stepper that
    `updates_whole`. Reused until groups, their parameters, or models change."""

    def __init__(self, rule: Rule) -> None:
        self._rule = rule
        self._members: dict[_StepperT, dict[Chunk, Members]] = {}
        self.whole: list[tuple[_StepperT, dict[str, Any], Members]] = []
        """The `Members` by group."""
        self._made_of: list[object] = []
        self._parameters: list[torch.Tensor] = []
        self._of: list[Members | None] = []
        """Of each of these, those that it is of; None: no managed model has it any more."""

    def of(
        self,
        groups: list[dict[str, Any]],
        steppers: dict[Any, _StepperT],
        find: Callable[[torch.Tensor], tuple[_StepperT, ManagedParameter]],
    ) -> dict[_StepperT, dict[Chunk, Members]]:
        """Return the `Members` by stepper and chunk. `find` adds to `steppers`, and raises `ManageError` for a
        parameter that is not managed."""
        made_of = [*chain.from_iterable((group, *group["params"]) for group in groups)]
        now, before = [*made_of, *_ways(steppers)], self._made_of
        if len(now) == len(before) and False not in map(is_, now, before):
            return self._members
        found: dict[_StepperT, dict[Chunk, list[tuple[ManagedParameter, GroupOptions]]]] = {}
        self.whole, self._parameters = [], [*chain.from_iterable(group["params"] for group in groups)]
        for group in groups:
            options, whole = GroupOptions(group, self._rule), dict[_StepperT, list[ManagedParameter]]()
            for parameter in group["params"]:
                try:
                    stepper, managed = find(parameter)
                except ManageError:
                    continue
                if stepper.updates_whole:
                    whole.setdefault(stepper, []).append(managed)
                else:
                    found.setdefault(stepper, {}).setdefault(managed.chunk, []).append((managed, options))
            self.whole += [(to, group, Members((each, options) for each in of)) for to, of in whole.items()]
        self._members = {
            stepper: {chunk: Members(members) for chunk, members in found.get(stepper, {}).items()}
            for stepper in steppers.values()
        }
        made = chain((each for _, _, each in self.whole), *map(dict.values, self._members.values()))
        of = {id(parameter): members for members in made for parameter in members.parameters}
        self._of = [*map(of.get, map(id, self._parameters))]
        self._made_of = [*made_of, *_ways(steppers)]
        return self._members

    def with_gradients(self) -> dict[Members | None, torch.Tensor]:
        """Return those that have parameters with a gradient, each with one, of what `of` returned last; None stands for
        parameters that no managed model has."""
        has = [*map(is_not, map(_GRADIENT, self._parameters), repeat(None))]
        return dict(zip(compress(self._of, has), compress(self._parameters, has), strict=True))


def _ways(steppers: Mapping[Any, Steps]) -> list[object]:
    return [each for stepper in steppers.values() for each in (stepper, stepper.updates_whole)]


class Joins:
    """Joins the members of small chunks, and keeps what it has joined until the next call."""

    def __init__(self) -> None:
        self._made: dict[tuple[Members, ...], Members] = {}

    def of(self, chunks: Mapping[Chunk, Members], under_way: Mapping[Chunk, object], known: Options) -> list[Members]:
        """Return the members of `chunks`, in the order of their first chunks. Those of an update `under_way` are joined
        as there; of others, chunks of equal dtypes with all their homes in host memory. `known`: see
        `Members.options`."""
        found: dict[object, list[Members]] = {}
        last: dict[object, tuple[object, int]] = {}
        for chunk in sorted(chunks, key=_INDEX):
            members, homes = chunks[chunk], chunk.homes
            if chunk in under_way:
                key = under_way[chunk]
            elif _in_host_memory(members, homes, known):
                kind = chunk.dtype, chunk.compute_dtype if Role.COMPUTE in homes else None
                key, nbytes = last.get(kind, (chunk, 0))
                if nbytes + members.nbytes > JOINED_BYTES:
                    key, nbytes = chunk, 0
                last[kind] = key, nbytes + members.nbytes
            else:
                key = chunk
            if key in found:
                found[key] += (members,)
            else:
                found[key] = [members]
        before, self._made = self._made, {}
        for joined in map(tuple, found.values()):
            self._made[joined] = before.get(joined) or (Members.joined(joined) if len(joined) > 1 else joined[0])
        return [*self._made.values()]


def _in_host_memory(members: Members, homes: Mapping[Role, object], known: Options) -> bool:
    """Return whether all of `homes`, of the chunk of `members`, are in host memory, those of states among them."""
    needed = {role for _, roles in members.options(known) for role in roles}
    return needed <= homes.keys() and {*map(_TIER, homes.values())} == _HOST


@dataclass(slots=True, eq=False)
class Part:
    """A parameter to update: the options of its group at that time, the roles of its states, and whether its gradient
    is at home."""

    managed: ManagedParameter
    group: dict[str, Any]
    roles: tuple[Role, ...]
    at_home: bool

    def flat(self, gradient: torch.Tensor, opened: Opened) -> torch.Tensor:
        """Return `gradient`, that of the parameter, in the order in which its elements lie in memory."""
        if self.at_home and Role.GRAD in opened:
            return self.managed.part(opened[Role.GRAD])
        gradient = in_order(self.managed, gradient)
        return torch.as_strided(gradient, (self.managed.numel,), (1,), gradient.storage_offset())


def in_order(managed: ManagedParameter, given: torch.Tensor) -> torch.Tensor:
    """Return the gradient that was `given` for `managed`, with its elements in the order of the parameter's memory."""
    if is_zeroed(given):
        return torch.zeros_like(managed.home)
    gradient: torch.Tensor = stored(given)
    narrow = gradient is not given  # in fewer bits, which an update widens itself
    if gradient.stride() == managed.stride and (narrow or gradient.dtype == managed.chunk.dtype):
        return gradient
    flat = torch.empty(managed.numel, dtype=managed.chunk.dtype, device=gradient.device)
    ordered: torch.Tensor = flat.as_strided(managed.shape, managed.stride)
    ordered.copy_(gradient)
    return ordered
