"""The drive of a group: one unnamed file that all its ranks have open, with the states that host memory has no room
for. A tile of a home is read and written by the rank alone that updates it, in staging of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from hetmem.base.units import round_up
from hetmem.cpu.workers import TILE_ELEMENTS
from hetmem.errors import CapacityError
from hetmem.memory.nvme_io import BLOCK_BYTES, StoreFile, sized
from hetmem.memory.nvme_store import Extent, LentExtent, NvmeStore
from hetmem.ranks.memory import SharedPool
from hetmem.ranks.words import Words


class SharedDrive(NvmeStore):
    """A rank's part of the file `descriptor` in `directory`, of `capacity_bytes`, mapped behind the homes in `pool`.
    `owns` says whether it updates a tile, by the numbers of the chunk and the tile."""

    def __init__(
        self,
        directory: str,
        capacity_bytes: int,
        descriptor: int,
        pool: SharedPool,
        words: Words,
        owns: Callable[[int, int], bool],
    ) -> None:
        self._descriptor, self._pool, self._words, self._owns = descriptor, pool, words, owns
        self._asked_bytes = 0
        self._tiles: dict[int, tuple[int, int]] = {}
        """By the offset of a home, the number of its chunk, and the bytes of a tile of it."""
        super().__init__([directory], capacity_bytes)

    def _opened(self, directory: str, nbytes: int) -> StoreFile:
        return StoreFile(directory, nbytes, self._descriptor)

    @property
    def reserved_bytes(self) -> int:
        """Bytes that this rank has asked for, as all ranks do."""
        return self._asked_bytes

    def reserve_home(self, chunk: int, role: str, nbytes: int, itemsize: int) -> Extent:
        """Reserve the home of `role` of `chunk`, whose elements have `itemsize` bytes; it has one place for all ranks.
        Raises `CapacityError`, or `StoreError` if the disk has no room."""
        length = round_up(nbytes, BLOCK_BYTES)
        if self._asked_bytes + length > self.capacity_bytes:
            raise CapacityError(f"no room for {sized(length)} in the NVMe store: raise Budget(nvme=…)")

        def reserve() -> int:
            offset = int(self._words.drive_bytes[0])
            self._files[0].take_blocks(offset, length)
            self._words.drive_bytes[0] = offset + length
            return self._pool.capacity_bytes + offset

        offset = self._pool.place_of(chunk, role, length, reserve) - self._pool.capacity_bytes
        self._asked_bytes += length
        self.peak_bytes = self._asked_bytes
        self._tiles[offset] = chunk, TILE_ELEMENTS * itemsize
        return Extent(0, offset, length)

    def reserve_many(self, sizes: object) -> list[Extent]:
        """Refuse: homes of a group are reserved one by one, by name."""
        raise NotImplementedError

    def lend(self, nbytes: int, leave_bytes: int = 0) -> LentExtent | None:
        """Lend nothing: activations of ranks are in host memory alone."""
        return None

    def view(self, extent: Extent) -> memoryview:
        """Return the extent as memory that all ranks share."""
        return self._pool.mapping.buffer(self._pool.capacity_bytes + extent.offset, extent.nbytes)

    def read(self, extent: Extent, into: memoryview) -> Future[int]:
        """Fill the tiles of this rank in `into`; what is between them is left as it is."""
        return _joined([super(SharedDrive, self).read(*part) for part in self._parts(extent, into)])

    def write(self, extent: Extent, source: memoryview) -> Future[int]:
        """Write the tiles of this rank in `source`, and nothing between them."""
        return _joined([super(SharedDrive, self).write(*part) for part in self._parts(extent, source)])

    def _parts(self, extent: Extent, memory: memoryview) -> list[tuple[Extent, memoryview]]:
        chunk, tile_bytes = self._tiles[extent.offset]
        found = []
        for tile, start in enumerate(range(0, memory.nbytes, tile_bytes)):
            if self._owns(chunk, tile):
                part = memory[start : start + tile_bytes]
                found.append((Extent(0, extent.offset + start, part.nbytes), part))
        return found

    def _file_of(self, extent: Extent) -> StoreFile:
        self._check_open()
        return self._files[0]


def _joined(parts: Sequence[Future[int]]) -> Future[int]:
    """Return the future of all `parts`: the sum of their bytes, or the first error once all have ended."""
    joined: Future[int] = Future()
    left, lock = [len(parts)], threading.Lock()

    def ended(_: Future[int] | None) -> None:
        with lock:
            left[0] -= 1
            if left[0] > 0:
                return
        error = next((part.exception() for part in parts if part.exception() is not None), None)
        if error is None:
            joined.set_result(sum(part.result() for part in parts))
        else:
            joined.set_exception(error)

    joined.set_running_or_notify_cancel()
    if not parts:
        ended(None)
    for part in parts:
        part.add_done_callback(ended)
    return joined
