"""The updates of one step: of chunks (their inputs, progress, and the pass over their memory that is under way), or of
all parameters of a group at once in a model that is whole on the device."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import InitVar, dataclass, field
from itertools import chain
from operator import attrgetter
from typing import Any

import torch

from hetmem.cpu import square_sum_tasks
from hetmem.cpu.workers import Batch, Task, WorkerPool
from hetmem.engine.runtime import Runtime
from hetmem.memory.chunk import Chunk, ManagedParameter, Role
from hetmem.memory.hidden_gradient import HiddenGradient
from hetmem.optim.members import Members, Opened, Options, Part, are_same, in_order
from hetmem.optim.options import Rule
from hetmem.schedule.trace import Tier

# Read for each parameter in each step: these run in C.
ADDRESS, _STRIDES = torch.Tensor.data_ptr, torch.Tensor.stride
_DTYPE, _COUNT = attrgetter("dtype"), attrgetter("is_cpu", "dtype")
_GRADIENT, VERSION = attrgetter("grad"), attrgetter("_version")
_HOMES, _FLAT = attrgetter("homes"), attrgetter("flat")


@dataclass(eq=False)
class ChunkUpdate:
    """The update of `members` of `chunks` (several only if all their homes are in host memory), all of which have
    gradients, with the options that are `known` of their groups. At most one pass of it is queued or under way: that of
    its sums of squares, or the update itself. `tasks` makes the tiles once the roles that it `needs` are open, `done`
    ends the pass."""

    members: Members
    known: InitVar[Options]
    gradients: list[torch.Tensor] = field(init=False)
    """Those of the members, and their versions, when this was made."""
    versions: list[int] = field(init=False)
    parts: list[Part] = field(init=False)
    chunks: tuple[Chunk, ...] = field(init=False)
    chunk: Chunk = field(init=False)
    """The first of `chunks`."""
    sums: list[torch.Tensor] = field(default_factory=list)
    summing: bool = False
    """Whether the sums of squares are queued or under way."""
    begun: bool = False
    """Whether the update was queued, with the factor `scale` for its gradients."""
    scale: float = 1.0
    corrupt: bool = False
    """Whether it failed with only some elements updated: training can only go on from a checkpoint."""
    detached: bool = False
    """Whether its step has ended, so that no step will repeat it."""
    before: list[tuple[dict[str, Any], dict[str, Any]]] = field(default_factory=list)
    numbers: list[tuple[torch.Tensor, Any]] = field(default_factory=list)
    """The scalars in `before` that change in place, and their values."""
    roles: tuple[Role, ...] = field(init=False)
    """The states of all parts."""

    needs: dict[Role, bool] = field(default_factory=dict)
    """The roles to open; the value says whether their present content is read."""
    staged: list[Role] = field(default_factory=list)
    """The requested roles that come through staging."""
    tasks: Callable[[ChunkUpdate], list[Task]] = field(init=False)
    done: Callable[[ChunkUpdate, bool], None] = field(init=False)
    """Called once at the end of a pass: with False if it failed or was cancelled."""
    writes: bool = False
    """Whether all roles but the gradient change; nothing fetches parameters from their home until the end then."""
    had_copies: Sequence[Chunk] = ()
    """The chunks whose device copies were dropped, to be fetched again."""
    opened: dict[Chunk, Opened] = field(default_factory=dict)
    batch: Batch | None = None
    began: float = 0.0

    def __post_init__(self, known: Options) -> None:
        self.chunks = self.members.chunks
        self.chunk = self.chunks[0]
        self.gradients = [*map(_GRADIENT, self.members.parameters)]
        self.versions = [*map(VERSION, self.gradients)]
        self.read_options(known)

    def read_options(self, known: Options) -> None:
        """Take over the options that are `known` of the groups: one that has not begun needs none before."""
        self.parts, self.roles = self.members.parts(self.gradients, known)

    @property
    def flats(self) -> list[torch.Tensor | None]:
        """The flat tensors over all homes of the chunks, as far as they were made. In C alone."""
        return [*map(_FLAT, chain(*map(dict.values, map(_HOMES, self.chunks))))]

    def open_homes(self) -> None:
        """Open the roles that are not staged, at home."""
        for chunk in self.chunks:
            opened = self.opened.setdefault(chunk, {})
            for role in self.needs:
                if role not in opened and role in chunk.homes:
                    opened[role] = chunk.flat(role)

    def updates(self, managed: ManagedParameter) -> bool:
        """Return whether `managed` is one of the parts."""
        return any(part.managed is managed for part in self.parts)

    def is_of(self, members: Members) -> bool:
        """Return whether it is the update of `members`, with the gradients that they have now. In C alone."""
        if members.managed != self.members.managed:
            return False
        gradients = [*map(_GRADIENT, members.parameters)]
        return are_same(gradients, self.gradients) and [*map(VERSION, gradients)] == self.versions

    def consume(self) -> None:
        """Note that this update has read its gradients."""
        for gradient in self.gradients:
            if type(gradient) is HiddenGradient:
                gradient.consumed = True

    def remember_numbers(self, states: Iterable[dict[str, Any]], homes: Container[str]) -> None:
        """Save the states outside chunks that an update changes (step counts); those in `homes` are in chunks."""
        self.before = [(state, dict(state)) for state in states]
        self.numbers = [
            (value, value.item())
            for _, before in self.before
            for name, value in before.items()
            if isinstance(value, torch.Tensor) and not value.dim() and name not in homes
        ]

    def restore_numbers(self) -> None:
        """Restore what `remember_numbers` saved."""
        for state, before in self.before:
            state.clear()
            state.update(before)
        for number, value in self.numbers:
            number.fill_(value)
        self.before, self.numbers = [], []


class WholeUpdate:
    """The update of the `members` of one `group`, which have gradients, in a model that is whole on the device. One
    call of torch's kernel; it moves nothing and uses no chunk jobs or worker threads."""

    def __init__(self, runtime: Runtime, group: dict[str, Any], members: Members) -> None:
        self._runtime, self._group, self.members = runtime, group, members
        self._grads: list[Any] = [*map(_GRADIENT, members.parameters)]
        strides = [*map(_STRIDES, self._grads)]
        if strides != members.strides or {*map(_DTYPE, self._grads)} != members.dtypes:
            self._grads = [*map(in_order, members.managed, self._grads)]
        self._states: list[list[torch.Tensor]] = []
        self._steps: list[torch.Tensor] = []

    def find_states(self, shown: Any) -> bool:
        """Find the states among `shown`, those of the optimizer; False if one is missing, or if a parameter or a state
        is not in the memory of its home."""
        members, entries = self.members, [*map(shown.get, self.members.parameters)]
        if not all(entries):
            return False
        try:
            self._states = [[entry[role.name] for entry in entries] for role in members.roles]
            self._steps = [entry["step"] for entry in entries]
            found = [[*map(ADDRESS, tensors)] for tensors in (members.parameters, *self._states)]
            counts = {*map(_COUNT, self._steps)}
        except (KeyError, TypeError, AttributeError):  # no such state, or None in its place
            return False
        at_home = found == members.addresses() and [*map(_STRIDES, members.parameters)] == members.strides
        return at_home and counts == {(True, torch.float32)}

    def square_sums(self, workers: WorkerPool) -> list[torch.Tensor]:
        """Sum up the squares of the gradients; see `hetmem.cpu.norm`."""
        made = [square_sum_tasks(torch.as_strided(grad, (grad.numel(),), (1,))) for grad in self._grads]
        workers.run([task for tasks, _ in made for task in tasks])
        return [sums for _, sums in made]

    def carry_out(self, rule: Rule, scale: float) -> None:
        """Update all, or raise with nothing changed."""
        self._runtime.outgoing.wait_for(self.members.chunks)
        runtime, began, members = self._runtime, self._runtime.events.here(), self.members
        chunks = members.chunks if runtime.memory.uses_copies else ()
        with runtime.unwatched(), runtime.traffic.updated_at_home(chunks):
            rule.whole(self._group, members.parameters, self._grads, self._states, self._steps, scale)
            torch.autograd.graph.increment_version(members.parameters)
            for managed in members.managed:
                managed.version = managed.counter._version
        runtime.statistics.updated_bytes[Tier.DEVICE] += members.nbytes
        runtime.events.updated("all chunks", began)
