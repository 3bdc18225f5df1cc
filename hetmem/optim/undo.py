"""Host memory in which what an update changes is kept, so that it can be undone exactly.

It takes what the budget has left; without room there is nothing to undo with, which is no error.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from hetmem.errors import CapacityError
from hetmem.memory.chunk import Chunk, Role
from hetmem.memory.pools import HostPool
from hetmem.optim.kernels import Task
from hetmem.plan.trace import Tier

_TILE_BYTES = 1 << 21
_Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]


@dataclass(frozen=True, slots=True, eq=False)
class Saved:
    """Memory for the roles of one chunk."""

    buffers: dict[Role, memoryview]

    def tasks_to_save(self, opened: dict[Role, torch.Tensor]) -> list[Task]:
        """Copy what is `opened` here, tile by tile."""
        return [task for role in self.buffers for task in _copies(self._bytes(role), _bytes_of(opened[role]))]

    def tasks_to_restore(self, chunk: Chunk) -> list[Task]:
        """Copy it back to the homes of `chunk`."""
        return [task for role in self.buffers for task in _copies(_bytes_of(chunk.flat(role)), self._bytes(role))]

    def _bytes(self, role: Role) -> _Bytes:
        return np.frombuffer(self.buffers[role], np.uint8)


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


def _bytes_of(tensor: torch.Tensor) -> _Bytes:
    found: _Bytes = tensor.detach().view(torch.uint8).numpy()
    return found


def _copies(target: _Bytes, source: _Bytes) -> list[Task]:
    """Tiles of what both have room for: a home may be larger than what its chunk uses of it."""
    nbytes = min(target.size, source.size)
    tiles = [slice(start, min(start + _TILE_BYTES, nbytes)) for start in range(0, nbytes, _TILE_BYTES)]
    return [partial(np.copyto, target[tile], source[tile]) for tile in tiles]
