"""The NVMe store: extents of unnamed files, transferred by threads with O_DIRECT.

Knows directories, extents and raw bytes. Must not know torch, chunks, slots or when to transfer.

Each directory holds one unnamed file, as long as the whole capacity but sparse: blocks are allocated when extents are
reserved, and the kernel frees all of them when the process ends, however it ends. Because the length is fixed, one
shared mapping per file serves every view. The system calls release the GIL, so Python's threads suffice.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from hetmem.base.units import MIB, round_up
from hetmem.base.warning import warn_user
from hetmem.errors import BudgetError, CapacityError, StoreError
from hetmem.memory.host_memory import Loan, Spans, address_of
from hetmem.memory.nvme_io import BLOCK_BYTES, DiskLink, StoreFile, sized

__all__ = ["BLOCK_BYTES", "Extent", "NvmeStore"]

THREADS, REQUEST_BYTES = 4, 16 * MIB
"""Within 5 % of the best of 12 and of 7 combinations measured on the drives of two machines, for reads and writes."""


@dataclass(frozen=True, slots=True)
class Extent:
    """Reserved bytes [offset, offset + nbytes) of the store's file number `file`; both multiples of 4096."""

    file: int
    offset: int
    nbytes: int


class LentExtent(Loan):
    """`extent` of a store, and its bytes as `memory`: see `NvmeStore.view`. It returns to the store when this object is
    dropped, on any thread; a transfer has to hold it."""

    __slots__ = ("extent",)

    def __init__(self, spans: Spans, at: int, memory: memoryview, extent: Extent) -> None:
        super().__init__(spans, at, memory)
        self.extent = extent


class NvmeStore:
    """Disk space in one or more directories, reserved in advance and transferred asynchronously.

    All methods may be called from any thread. Transfers of one range are not ordered against each other: wait for a
    future before using its memory or its range again. Futures are settled on the store's threads. A store dropped
    without `close` cleans up too: its threads end once the queued transfers, which hold their file, have run, and each
    file closes itself when nothing holds it.

    A transfer takes memory aligned to 4096 bytes and a length that is a multiple of it. Anything else is refused with
    ValueError, on every filesystem: the page cache would take it silently, at an eighth of the speed.

    Several directories share the load by whole extents, as a view of one must be a single mapping of one file. Extents
    that are reserved together go round the files, and the next ones start one file further on: so the roles of a chunk
    lie on different disks, and so do neighbours.
    """

    def __init__(
        self,
        directories: Sequence[str | os.PathLike[str]],
        capacity_bytes: int,
        *,
        threads: int = THREADS,
        request_bytes: int = REQUEST_BYTES,
        io: Any = os,
    ) -> None:
        """Open a store of at most `capacity_bytes` spread over `directories`; no disk space is allocated yet.

        At most `threads` requests of at most `request_bytes` run per directory and direction, on threads of their own:
        a fetch never queues behind write-backs. `io` has the system calls `preadv` and `pwritev`: tests pass one that
        fails.

        Warns if there is no O_DIRECT. Raises `BudgetError` for a directory that cannot hold the file and for a capacity
        below 1; nothing stays open then.
        """
        if isinstance(directories, (str, os.PathLike)) or not directories:
            raise BudgetError(f"the NVMe store needs a sequence of at least one directory, got {directories!r}")
        if capacity_bytes < 1:
            raise BudgetError(f"the NVMe store needs a capacity of at least 1 byte, got {capacity_bytes}")
        self.capacity_bytes = capacity_bytes
        self.peak_bytes = 0
        """The most bytes that were reserved and lent at one time."""
        self._lock = threading.Lock()  # guards _closed, reservations, and submission against close
        self._closed = False
        self._first = 0  # the file of the next extent, other things being equal
        # Each file owns its descriptors: if one directory fails, files opened before close themselves.
        self._files = [self._opened(os.fspath(path), round_up(capacity_bytes, BLOCK_BYTES)) for path in directories]
        self._reads = DiskLink("read", io.preadv, len(self._files), threads, request_bytes)
        self._writes = DiskLink("write", io.pwritev, len(self._files), threads, request_bytes)
        _warn_of_buffered(self._files)

    def _opened(self, directory: str, nbytes: int) -> StoreFile:
        return StoreFile(directory, nbytes)

    @property
    def direct(self) -> tuple[bool, ...]:
        """Whether O_DIRECT works, per directory; without it transfers go through the page cache."""
        return tuple(file.is_direct for file in self._files)

    @property
    def reserved_bytes(self) -> int:
        """Bytes reserved so far, rounding included; never above `capacity_bytes`. Zero once closed."""
        return sum(file.reserved_bytes for file in self._files)

    @property
    def lent_bytes(self) -> int:
        """Bytes that `lend` has handed out, rounding included."""
        with self._lock:
            return self._lent()

    def _lent(self) -> int:
        return sum(file.loans.lent_bytes for file in self._files)

    @property
    def is_busy(self) -> bool:
        """Whether any transfer is under way; on any thread."""
        return self._reads.in_flight > 0 or self._writes.in_flight > 0

    @property
    def bytes_read(self) -> int:
        """Bytes moved from disk by completed requests."""
        return self._reads.moved_bytes

    @property
    def bytes_written(self) -> int:
        """Bytes moved to disk by completed requests."""
        return self._writes.moved_bytes

    @property
    def read_seconds(self) -> float:
        """Seconds during which at least one read was queued or running."""
        return self._reads.busy_seconds()

    @property
    def write_seconds(self) -> float:
        """Seconds during which at least one write was queued or running."""
        return self._writes.busy_seconds()

    def reserve(self, nbytes: int) -> Extent:
        """Reserve one extent of `nbytes` rounded up to 4096; see `reserve_many`."""
        return self.reserve_many([nbytes])[0]

    def reserve_many(self, sizes: Iterable[int]) -> list[Extent]:
        """Reserve one zeroed extent per size, rounded up to 4096, each whole in one file; all of them or none.

        The blocks are allocated now: a full disk is reported before training, not during it. Each extent goes to the
        file with the fewest reserved bytes, in turn if they are equal, of those whose disks have room for it by the
        free space when the store was made; if none has, to one on the disk with most space. Raises `CapacityError` if
        the capacity would be exceeded, `StoreError` if a disk has no room.
        """
        lengths = [round_up(nbytes, BLOCK_BYTES) for nbytes in sizes]
        if lengths and min(lengths) < BLOCK_BYTES:
            raise ValueError("an extent needs at least 1 byte")
        with self._lock:
            self._check_open()
            lent = self._lent()
            if self.reserved_bytes + lent + sum(lengths) > self.capacity_bytes:
                room = f"{sized(self.reserved_bytes)} of {sized(self.capacity_bytes)} are reserved"
                room += f", and {sized(lent)} lent to activations" if lent else ""
                raise CapacityError(
                    f"no room for {sized(sum(lengths))} in the NVMe store: {room}. Raise Budget(nvme=…)"
                )
            ends = [file.reserved_bytes for file in self._files]
            first = self._first + (len(set(ends)) == 1 and ends[0] > 0)
            left = self._left(ends)
            extents = []
            for nbytes in lengths:
                enough = min(nbytes, max(left.values()))
                index = min(
                    (index for index, file in enumerate(self._files) if left[file.disk] >= enough),
                    key=lambda file: (ends[file], (file - first) % len(ends)),
                )
                extents.append(Extent(index, ends[index], nbytes))
                ends[index] += nbytes
                left[self._files[index].disk] -= nbytes
            if any(end > file.loans.lowest for file, end in zip(self._files, ends, strict=True)):
                what = f"no room for {sized(sum(lengths))} in one piece of the NVMe store"
                raise CapacityError(f"{what}, beside what is lent to activations. Raise Budget(nvme=…)")
            self._allocate(ends)
            self._first = first
            return extents

    def lend(self, nbytes: int, leave_bytes: int = 0) -> LentExtent | None:
        """Lend an extent of `nbytes` with any content, and leave `leave_bytes` for reservations; None if the capacity
        has no room. Raises `StoreError` if a disk has none."""
        length = round_up(nbytes, BLOCK_BYTES)
        with self._lock:
            self._check_open()
            taken = self.reserved_bytes + self._lent() + length
            if taken + leave_bytes > self.capacity_bytes:
                return None
            for file in sorted(self._files, key=lambda file: file.reserved_bytes + file.loans.lent_bytes):
                if (at := file.lend(length)) is not None:
                    self.peak_bytes = max(self.peak_bytes, taken)
                    extent = Extent(self._files.index(file), at, length)
                    return LentExtent(file.loans, at, memoryview(file.pages)[at : at + length], extent)
        return None

    def forget(self) -> None:
        """End all reservations; written data stays in the files, and under extents that are reserved next, until
        `trim`."""
        with self._lock:
            for file in self._files:
                file.allocated_bytes, file.reserved_bytes = file.reserved_bytes, 0
            self._first = self.peak_bytes = 0

    def trim(self) -> None:
        """Free what `forget` has kept beyond the extents that are reserved now: later extents are zeroed."""
        with self._lock:
            for file in self._files:
                file.allocated_bytes = 0
                file.trim()

    def view(self, extent: Extent) -> memoryview:
        """Return the extent as writable memory (a shared file mapping), coherent with completed transfers.

        It stays valid, and keeps its file's disk space, for as long as it lives, even when the store is closed.
        """
        with self._lock:
            file = self._file_of(extent)
            return memoryview(file.pages)[extent.offset : extent.offset + extent.nbytes]

    def read(self, extent: Extent, into: memoryview) -> Future[int]:
        """Fill `into` from the start of the extent. The future resolves to the bytes moved, always all of them.

        Raises ValueError before anything starts for memory that is longer than the extent or not aligned. The future
        fails with `StoreError` (path, offset, bytes, errno) if the disk does, end of file included: then no further
        request is issued, and the content of `into` is undefined. It is settled only when no request touches `into`.
        """
        if into.readonly:
            raise ValueError("cannot read into read-only memory")
        return self._start(self._reads, extent, into)

    def write(self, extent: Extent, source: memoryview) -> Future[int]:
        """Write all of `source` to the start of the extent; otherwise as `read`.

        After a failure the content of the range on disk is undefined; views see all of `source` if the page cache took
        it, which the error says. Writes are not synced: the store dies with its process.
        """
        return self._start(self._writes, extent, source)

    def close(self) -> None:
        """Wait for every transfer, stop the threads, close the files. Views stay valid. Idempotent."""
        with self._lock:
            self._closed = True
        for link in (self._reads, self._writes):
            link.join()
        with self._lock:
            for file in self._files:
                file.close()
            self._files = []  # which unmaps those without views

    def _start(self, link: DiskLink, extent: Extent, memory: memoryview) -> Future[int]:
        flat = _block_aligned(memory)
        if flat.nbytes > extent.nbytes:
            raise ValueError(f"{flat.nbytes} bytes are more than an extent of {extent.nbytes} bytes has")
        with self._lock:
            return link.start(self._file_of(extent), extent.file, flat, extent.offset)

    def _left(self, ends: Sequence[int]) -> dict[int, int]:
        """Return what each disk has left with files that end at `ends`, by its free space when the store was made."""
        left = {file.disk: file.disk_room_bytes for file in reversed(self._files)}
        for file, end in zip(self._files, ends, strict=True):
            left[file.disk] -= end
        return left

    def _allocate(self, ends: list[int]) -> None:
        try:
            for file, end in zip(self._files, ends, strict=True):
                if end > file.reserved_bytes:
                    file.allocate(end - file.reserved_bytes)
        except BaseException:
            for file in self._files:
                file.trim()
            raise
        for file, end in zip(self._files, ends, strict=True):
            file.reserved_bytes = end
        self.peak_bytes = max(self.peak_bytes, self.reserved_bytes + self._lent())

    def _file_of(self, extent: Extent) -> StoreFile:
        self._check_open()
        files = self._files
        if not 0 <= extent.file < len(files) or not (
            0 <= extent.offset <= extent.offset + extent.nbytes <= files[extent.file].reserved_bytes
            or files[extent.file].loans.lowest <= extent.offset
        ):
            raise ValueError(f"{extent} was not reserved in this store")
        return files[extent.file]

    def _check_open(self) -> None:
        if self._closed:
            raise StoreError(errno.EBADF, "the NVMe store is closed")


def _block_aligned(memory: memoryview) -> memoryview:
    """Return `memory` as flat bytes. Raises ValueError if it does not suit O_DIRECT."""
    if memory.c_contiguous and memory.nbytes and not (memory.nbytes | address_of(memory)) % BLOCK_BYTES:
        return memory.cast("B")
    raise ValueError(
        f"a transfer needs contiguous memory aligned to {BLOCK_BYTES} bytes and a positive multiple of it in length "
        f"(take it from a hetmem Mapping), got {memory.nbytes} bytes"
    )


def _warn_of_buffered(files: Sequence[StoreFile]) -> None:
    slow = [file.directory for file in files if not file.is_direct]
    if slow:
        warn_user(
            f"no O_DIRECT in {', '.join(map(repr, slow))}: the NVMe store goes through the page cache, and is several "
            "times slower. Use a directory on ext4 or xfs",
            RuntimeWarning,
        )
