"""How far a chunk is in a step: which gradients its update was, or will be, made with.

It compares and remembers; it starts nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field
from itertools import chain
from operator import is_
from typing import Any

import numpy as np
import torch

from hetmem.cpu import sums_of_tiles
from hetmem.cpu.workers import Batch, Task
from hetmem.engine.param_views import take_gradient
from hetmem.engine.sampling import Sample
from hetmem.memory.chunk import Chunk, ManagedParameter, Role
from hetmem.memory.nvme_store import Look
from hetmem.optim.rule import Left
from hetmem.schedule.update_split import Way

Sums = np.ndarray[Any, np.dtype[np.float64]]
Opened = dict[Role, torch.Tensor]
"""Flat tensors over the roles of one chunk, in host memory or, if their home is there, on the device."""

Update = Callable[[Opened], None]
"""All of a chunk on the device, on the current stream."""


@dataclass(slots=True, eq=False)
class Part:
    """A parameter that is to be updated: with which gradient, what its group says at that moment, and the states that
    this takes."""

    managed: ManagedParameter
    group: dict[str, Any]
    roles: tuple[Role, ...]
    gradient: torch.Tensor
    at_home: bool
    version: int
    sample: Sample | None = None
    look: Look | bool | None = None
    """At the element of `sample` as the step began: read, where that lies on NVMe; whether it is as it was, where that
    is known on the device."""

    @property
    def unwritten(self) -> bool:
        """Whether nobody has written to the gradient in place."""
        return self.version == self.gradient._version

    def same(self, other: Part) -> bool:
        """Whether both ask for the same update."""
        return (
            (self.managed, self.version) == (other.managed, other.version)
            and self.gradient is other.gradient
            and self.says(other.group)
        )

    def says(self, group: dict[str, Any]) -> bool:
        """Whether `group`, but for its parameters, says what the group said."""
        return len(self.group) == len(group) - ("params" in group) and all(
            key in group and (value is group[key] or _number(value) == _number(group[key]))
            for key, value in self.group.items()
        )


@dataclass(slots=True, eq=False)
class Progress:
    """How far a chunk is in the present step. `begun`: its update was queued, with the factor `scale`. `summing`: its
    sums were, and are not made. `disturbed`: its streamed gradients were written to before they were read. `kept`: they
    are read on the device, where they arrived. `optimizer`: whose update it is, which must live as long."""

    chunk: Chunk
    parts: list[Part]
    optimizer: object
    sums: list[Sums | torch.Tensor] = field(default_factory=list)
    begun: bool = False
    summing: bool = False
    scale: float = 1.0
    disturbed: bool = False
    kept: bool = False
    left: Left = field(default_factory=Left)
    """Of its update, if that is begun and has failed."""
    before: list[tuple[dict[str, Any], dict[str, Any]]] = field(default_factory=list)
    after: list[tuple[dict[str, Any], dict[str, Any]]] = field(default_factory=list)
    """What is in `before`, as an update that has tiles `left` has made it."""
    _homes: Container[str] = ()
    way: Way = Way.HOST
    """Where its update was queued for."""
    roles: tuple[Role, ...] = field(init=False)
    """The states of all parts."""

    def __post_init__(self) -> None:
        self.roles = tuple(dict.fromkeys(chain.from_iterable({part.roles: None for part in self.parts})))

    @property
    def nbytes(self) -> int:
        """Of the parameters that it is of."""
        return sum(part.managed.numel * part.managed.chunk.dtype.itemsize for part in self.parts)

    def of(self, parts: list[Part]) -> bool:
        """Whether it is of `parts`, in whatever order, as they are now."""
        theirs = {part.managed: part for part in parts}
        return len(theirs) == len(self.parts) and all(
            part.managed in theirs and part.same(theirs[part.managed]) for part in self.parts
        )

    def use_up_gradients(self) -> None:
        """The update, which trails, reads them: nobody else may find them and write zeros there."""
        for part in self.parts:
            if part.at_home and part.managed.parameter.grad is part.gradient:
                take_gradient(part.managed.parameter)

    def remember_numbers(self, states: Iterable[dict[str, Any]], homes: Container[str]) -> None:
        """Keep what an update changes beside chunks: step counts and the like. Those called `homes` lie in chunks, also
        where they are one number."""
        self.before = [
            (state, {name: value if name in homes else _copied(value) for name, value in state.items()})
            for state in states
        ]
        self._homes = homes

    def restore_numbers(self) -> None:
        """Undo what the update did to those."""
        for state, before in self.before:
            state.clear()
            state.update(before)
        if not self.left.places:  # else the update begins again from there
            self.before = []

    def note_numbers(self) -> None:
        """An update has failed that has to be finished: what its tiles have made of those so far."""
        self.after = [
            (state, {name: _copied(value) for name, value in state.items() if name not in self._homes})
            for state, _ in self.before
        ]

    def go_on_with_numbers(self) -> None:
        """They are what was noted."""
        for state, after in self.after:
            state.update({name: _copied(value) for name, value in after.items()})


@dataclass(slots=True, eq=False)
class Job:
    """Work on `chunk`: `tasks` makes it of `roles` once they are open (the value: whether what they hold matters).

    `done` is told once, at the end: True, or False if the job failed or was cancelled. If it `writes`, all roles but
    the gradient change, and nothing fetches the parameters from their home from `Updates.add` until then; the copy on
    the device is given up and fetched again, or, if it `keeps_copy`, is written by the tasks too: it is `copy`.

    `left`: written where some tasks failed for good and others have changed homes. A job with the same tasks that is
    given it does the rest.
    """

    chunk: Chunk
    roles: dict[Role, bool]
    tasks: Callable[[Job], list[Task]]
    done: Callable[[bool], None]
    writes: bool
    keeps_copy: bool = False
    left: Left = field(default_factory=Left)
    streamed: Callable[[Job], Update] | None = None
    """Given where the update is made on the device: what `tasks` is on the host. See `device_updates`."""
    opened: Opened = field(default_factory=dict)
    copy: torch.Tensor | None = None
    had_copy: bool = False
    batch: Batch | None = None
    began: float = 0.0
    owed: bool = False
    """Whether it is of a step that has ended, so that nobody will ask for it again."""


def _copied(value: Any) -> Any:
    """Numbers in tensors change in place; tensors of a parameter's size are the homes, which stay."""
    return value.clone() if isinstance(value, torch.Tensor) and value.dim() == 0 else value


def frozen(value: Any) -> Any:
    """What no write in place changes, as a learning rate in a tensor or a list may be; `value` itself if it is so."""
    if isinstance(value, (tuple, list)):
        parts = [frozen(part) for part in value]
        kept = isinstance(value, tuple) and all(map(is_, parts, value))
        return value if kept else type(value)(parts)
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def refuse_sparse(managed: ManagedParameter, optimizer: str) -> None:
    """Raise RuntimeError if the gradient of `managed` is not dense."""
    gradient = managed.parameter.grad
    if gradient is not None and gradient.layout is not torch.strided:
        raise RuntimeError(f"{optimizer} does not support sparse gradients, and {managed.name} has one")


def on_host(sums: list[Sums | torch.Tensor]) -> list[Sums]:
    """All of `sums`, those of gradients on the device behind the others: one wait for all."""
    there = [one for one in sums if isinstance(one, torch.Tensor)]
    here = [one for one in sums if not isinstance(one, torch.Tensor)]
    arrived = torch.cat(there).cpu().split([one.numel() for one in there]) if there else ()
    return [*here, *map(sums_of_tiles, arrived)]


def _number(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return [_number(part) for part in value]
    return value.tolist() if isinstance(value, torch.Tensor) else value
