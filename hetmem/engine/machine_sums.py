"""Adds the gradients of the machines that a group spans: each has the sum of its ranks in its homes, and gets that of
all, in the order of machines. What was there before a backward is in the sum of the first machine alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from hetmem.memory.chunk import Chunk, ManagedParameter, Role
from hetmem.ranks.group import Ranks

if TYPE_CHECKING:
    from hetmem.ranks.machines import Machines  # imports torch.distributed, which one process does without

_MADE, _THERE = 1, 2
"""Whether a machine has made a gradient of a parameter in this backward, and had one before it."""


class MachineSums:
    """The sums of one rank, for the chunks that are its part of those of its machine."""

    def __init__(self, ranks: Ranks, machines: Machines, parameters: Sequence[ManagedParameter]) -> None:
        self._ranks, self.machines = ranks, machines
        self._parameters = parameters
        self._numbers: dict[Chunk, list[int]] = {}
        for number, managed in enumerate(parameters):
            self._numbers.setdefault(managed.chunk, []).append(number)

    def add(self, made: Callable[[int], bool], there: Sequence[int], open_home: Callable[[Chunk], None]) -> list[int]:
        """Add what all machines have made, once the ranks of each have ended; return the numbers of all parameters that
        have a gradient now. `made`: whether this machine has made one; `there`: whether it was there before, a number
        each. Raises `PeerError`."""
        flags = torch.tensor(
            [_MADE * made(number) + _THERE * bool(there[number]) for number in range(len(self._parameters))],
            dtype=torch.uint8,
            device="cpu",
        )
        of_all = self.machines.present(flags)
        self.machines.compare(
            (flags & _THERE).tolist(), lambda number: f"whether {self._parameters[number].name}.grad is None"
        )
        has = (of_all & _MADE).bool()
        changed = has.any(0).tolist()
        for chunk, numbers in self._numbers.items():
            new = [number for number in numbers if changed[number]]
            if not new:
                continue
            if Role.GRAD not in chunk.homes:
                open_home(chunk)
            if chunk.spec.index % self._ranks.count == self._ranks.rank:
                self._add_chunk(chunk, new, has, there)
        self._ranks.summed()
        return [number for number, is_new in enumerate(changed) if is_new]

    def _add_chunk(self, chunk: Chunk, numbers: list[int], has: torch.Tensor, there: Sequence[int]) -> None:
        home = chunk.flat(Role.GRAD)
        spans = []
        for number in numbers:
            managed = self._parameters[number]
            parts = [at for at in range(self.machines.count) if has[at, number] or (at == 0 and there[number])]
            spans.append((slice(managed.offset, managed.offset + managed.numel), parts))
        self.machines.add(home, sorted(spans, key=lambda span: span[0].start))
