"""Host memory in which what an update changes is kept, so that it can be undone exactly.

It takes what the budget has left; without room there is nothing to undo with, which is no error.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from hetmem.cpu import Task
from hetmem.errors import CapacityError
from hetmem.memory.chunk import Chunk, ManagedParameter, Role
from hetmem.memory.host_pool import HostPool
from hetmem.schedule.trace import Tier

_TILE_BYTES = 1 << 21


@dataclass(frozen=True, slots=True, eq=False)
class Saved:
    """Memory for the roles of one chunk."""

    buffers: dict[Role, memoryview]

    def tasks_to_save(self, opened: dict[Role, torch.Tensor], parameters: Sequence[ManagedParameter]) -> list[Task]:
        """Copy what `parameters` have of `opened` here, tile by tile."""
        return self._tasks(opened, parameters, back=False)

    def tasks_to_restore(self, chunk: Chunk, parameters: Sequence[ManagedParameter]) -> list[Task]:
        """Copy it back to the homes of `chunk`, whose other parameters may have changed meanwhile."""
        return self._tasks({role: chunk.flat(role) for role in self.buffers}, parameters, back=True)

    def _tasks(
        self, flats: dict[Role, torch.Tensor], parameters: Sequence[ManagedParameter], *, back: bool
    ) -> list[Task]:
        tasks: list[Task] = []
        for role, memory in self.buffers.items():
            for managed in parameters:
                kept = managed.parts(role, managed.chunk.over(role, memory))
                for name, there in managed.parts(role, flats[role]).items():
                    tasks += _copies(there, kept[name]) if back else _copies(kept[name], there)
        return tasks


class UndoLog:
    """Memory of `pool` that chunks borrow. Only homes in host memory are saved: others are streamed from where they
    still are what they were."""

    def __init__(self, pool: HostPool) -> None:
        self._pool = pool
        self._free: dict[int, list[memoryview]] = {}

    def make_room(self, chunk: Chunk, states: Iterable[Role]) -> Saved | None:
        """Memory for parameters and `states` of `chunk`; None if there is none left."""
        taken: dict[Role, memoryview] = {}
        for role in (Role.PARAM, *states):
            home = chunk.homes.get(role)
            buffer = self._take(chunk.home_nbytes(role)) if home is not None and home.tier is Tier.HOST else None
            if buffer is None:
                self.give_back(Saved(taken))
                return None
            taken[role] = buffer
        return Saved(taken)

    def give_back(self, saved: Saved | None) -> None:
        """What was kept is not needed any more."""
        for buffer in saved.buffers.values() if saved is not None else ():
            self._free.setdefault(buffer.nbytes, []).append(buffer)

    def _take(self, nbytes: int) -> memoryview | None:
        free = self._free.get(nbytes)
        if free:
            return free.pop()
        try:
            return self._pool.reserve(nbytes)
        except CapacityError:
            return None


def _copies(target: torch.Tensor, source: torch.Tensor) -> list[Task]:
    to, of = (tensor.detach().view(torch.uint8).numpy() for tensor in (target, source))
    tiles = [slice(start, min(start + _TILE_BYTES, of.size)) for start in range(0, of.size, _TILE_BYTES)]
    return [partial(np.copyto, to[tile], of[tile]) for tile in tiles]
