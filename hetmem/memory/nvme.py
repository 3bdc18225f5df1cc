"""The NVMe store: extents of unnamed files, moved by threads with O_DIRECT.

Knows directories, extents and raw bytes. Must not know torch, chunks, slots or when a transfer is worth while.

Each directory holds one file without a name, as long as the whole capacity but sparse: blocks are taken when extents
are reserved, and the kernel gives all of them back when the process ends, however it ends. Because the length is
fixed, one shared mapping per file serves every view. The system calls drop the GIL, so Python's threads suffice.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from hetmem.errors import BudgetError, CapacityError, StoreError
from hetmem.memory.mapping import Mapping, address_of
from hetmem.units import MIB, format_size, round_up

BLOCK_BYTES = 4096  # covers the O_DIRECT alignment of the disks and filesystems in use


class VectoredIo(Protocol):
    """The two system calls of the store; `os` is the real one, tests pass one that fails."""

    def preadv(self, fd: int, buffers: list[memoryview], offset: int, /) -> int: ...

    def pwritev(self, fd: int, buffers: list[memoryview], offset: int, /) -> int: ...


@dataclass(frozen=True, slots=True)
class Extent:
    """Reserved bytes [offset, offset + nbytes) of the store's file number `file`; both multiples of 4096."""

    file: int
    offset: int
    nbytes: int


class NvmeStore:
    """Disk space in one or more directories, reserved ahead and moved asynchronously.

    All methods may be called from any thread. Transfers of one range are not ordered against each other: wait for a
    future before touching its memory or its range again. Futures are settled on the store's threads. A store dropped
    without `close` cleans up too: its executors end their threads once the queued transfers, which hold their file,
    have run, and each file closes itself when nothing holds it.

    A transfer takes memory aligned to 4096 bytes and a length that is a multiple of it. Anything else is refused with
    ValueError, on every filesystem: the page cache would take it, at an eighth of the speed with nobody told why.
    """

    def __init__(
        self,
        directories: Sequence[str | os.PathLike[str]],
        capacity_bytes: int,
        *,
        threads: int = 4,
        request_bytes: int = 16 * MIB,
        io: VectoredIo = os,
    ) -> None:
        """A store of at most `capacity_bytes` spread over `directories`; no disk space is taken yet.

        At most `threads` requests of at most `request_bytes` run per direction: each has its own threads, so that a
        fetch never queues behind write-backs. Raises `BudgetError` for a directory that cannot hold the file and for
        a capacity below 1, ValueError for the rest; nothing stays open then.
        """
        if isinstance(directories, (str, os.PathLike)) or not directories:
            raise BudgetError(f"the NVMe store needs a sequence of at least one directory, got {directories!r}")
        if capacity_bytes < 1:
            raise BudgetError(f"the NVMe store needs a capacity of at least 1 byte, got {capacity_bytes}")
        if request_bytes < 1 or request_bytes % BLOCK_BYTES:
            raise ValueError(f"request_bytes must be a positive multiple of {BLOCK_BYTES}, got {request_bytes}")
        self.capacity_bytes = capacity_bytes
        self._request_bytes = request_bytes
        self._lock = threading.Lock()  # guards _closed, reservations, and submission against close
        self._closed = False
        self._reads = _Link("read", io.preadv, threads)
        self._writes = _Link("write", io.pwritev, threads)
        # Each file owns its descriptors: if one directory fails, those opened before it close themselves.
        self._files = [_File(os.fspath(path), round_up(capacity_bytes, BLOCK_BYTES)) for path in directories]

    @property
    def direct(self) -> tuple[bool, ...]:
        """Whether O_DIRECT works, per directory; where it does not, transfers go through the page cache."""
        return tuple(file.direct != file.buffered for file in self._files)

    @property
    def reserved_bytes(self) -> int:
        """Bytes reserved so far, rounding included; never above `capacity_bytes`. Zero once closed."""
        return sum(file.reserved_bytes for file in self._files)

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
        """One extent of `nbytes` rounded up to 4096; see `reserve_many`."""
        return self.reserve_many([nbytes])[0]

    def reserve_many(self, sizes: Iterable[int]) -> list[Extent]:
        """One zeroed extent per size, rounded up to 4096, each whole in one file; all of them or none.

        The blocks are allocated now: a full disk is reported before training, not during it. Each extent goes to the
        file with the fewest reserved bytes: the disks share the load.
        Raises `CapacityError` when the capacity would be passed, `StoreError` when a disk has no room.
        """
        lengths = [round_up(nbytes, BLOCK_BYTES) for nbytes in sizes]
        if lengths and min(lengths) < BLOCK_BYTES:
            raise ValueError("an extent needs at least 1 byte")
        with self._lock:
            self._check_open()
            if self.reserved_bytes + sum(lengths) > self.capacity_bytes:
                room = f"{_sized(self.reserved_bytes)} of {_sized(self.capacity_bytes)} are reserved"
                raise CapacityError(f"no room for {_sized(sum(lengths))} in the NVMe store: {room}. Raise its budget")
            ends = [file.reserved_bytes for file in self._files]
            extents = []
            for nbytes in lengths:
                index = ends.index(min(ends))
                extents.append(Extent(index, ends[index], nbytes))
                ends[index] += nbytes
            self._allocate(ends)
            return extents

    def view(self, extent: Extent) -> memoryview:
        """The extent as writable memory (a shared file mapping), coherent with completed transfers.

        It stays valid, and keeps its file's disk space, for as long as it lives, even when the store is closed.
        """
        with self._lock:
            file = self._file_of(extent)
            return memoryview(file.pages)[extent.offset : extent.offset + extent.nbytes]

    def read(self, extent: Extent, into: memoryview, offset: int = 0) -> Future[int]:
        """Fill `into` from byte `offset` of the extent. The future resolves to the bytes moved, always all of them.

        Raises ValueError before anything starts for a range outside the extent and for what is not aligned. The
        future fails with `StoreError` (path, offset, bytes, errno) when the disk does, end of file included: then no
        further request is issued, and `into` holds anything. It is settled only when no request touches `into`.
        """
        if into.readonly:
            raise ValueError("cannot read into read-only memory")
        return self._start(self._reads, extent, into, offset)

    def write(self, extent: Extent, source: memoryview, offset: int = 0) -> Future[int]:
        """Write all of `source` to byte `offset` of the extent; otherwise as `read`.

        After a failure the range on disk holds anything. Writes are not synced: the store dies with its process.
        """
        return self._start(self._writes, extent, source, offset)

    def close(self) -> None:
        """Wait for every transfer, stop the threads, close the files. Views stay valid. Idempotent."""
        with self._lock:
            self._closed = True
        for link in (self._reads, self._writes):
            link.threads.shutdown()
        with self._lock:
            for file in self._files:
                file.close()
            self._files = []  # and with them the mappings that nobody views

    def _start(self, link: _Link, extent: Extent, memory: memoryview, offset: int) -> Future[int]:
        flat = _block_aligned(memory)
        if offset < 0 or offset % BLOCK_BYTES or offset + flat.nbytes > extent.nbytes:
            end = offset + flat.nbytes
            raise ValueError(f"[{offset}, {end}) are not whole blocks within an extent of {extent.nbytes} bytes")
        with self._lock:
            transfer = _Transfer(link, self._file_of(extent))
            return transfer.start(flat, extent.offset + offset, self._request_bytes)

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

    def _file_of(self, extent: Extent) -> _File:
        self._check_open()
        files = self._files
        if not 0 <= extent.file < len(files) or not (
            0 <= extent.offset <= extent.offset + extent.nbytes <= files[extent.file].reserved_bytes
        ):
            raise ValueError(f"{extent} was not reserved in this store")
        return files[extent.file]

    def _check_open(self) -> None:
        if self._closed:
            raise StoreError(errno.EBADF, "the NVMe store is closed")


class _File:
    """A file without a name: its descriptors, its mapping and how much of it is reserved (a prefix)."""

    def __init__(self, directory: str, nbytes: int) -> None:
        self.directory = directory
        self.reserved_bytes = 0
        with contextlib.ExitStack() as opened:
            try:
                self.buffered = _open_unnamed(directory)
                opened.callback(os.close, self.buffered)
                os.ftruncate(self.buffered, nbytes)
                self.pages = mmap.mmap(self.buffered, nbytes)
            except (OSError, OverflowError) as error:
                what = f"cannot keep an NVMe store of {_sized(nbytes)} in {directory!r}: {error}"
                raise BudgetError(f"{what}. Name an existing, writable directory on the disk to use") from error
            self.direct = _open_direct(self.buffered)
            if self.direct != self.buffered:
                opened.callback(os.close, self.direct)
            # Runs at `close` or when the last transfer and the store have let go of the file, whichever is first.
            self.close = weakref.finalize(self, opened.pop_all().close)

    def allocate(self, nbytes: int) -> None:
        """Take disk blocks for `nbytes` after the reserved ones; `trim` gives them back."""
        disk = os.fstatvfs(self.buffered)
        free = disk.f_bavail * disk.f_frsize
        try:
            # Asked first because a failing fallocate fills the disk, for every process on it, before it says so.
            if nbytes > free:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.posix_fallocate(self.buffered, self.reserved_bytes, nbytes)
        except OSError as error:
            raise StoreError(
                error.errno,
                f"cannot reserve {_sized(nbytes)} in {self.directory!r}: {error.strerror}; {_sized(free)} were free, "
                f"{_sized(max(0, nbytes - free))} are missing. Free disk space or lower the NVMe budget",
            ) from error

    def trim(self) -> None:
        """Give back blocks beyond the reserved ones; nobody has a view of them, and `allocate` lengthens the file."""
        os.ftruncate(self.buffered, self.reserved_bytes)


class _Link:
    """One direction of the store: its threads, the bytes they moved and the time they were busy."""

    def __init__(self, verb: str, move: Callable[[int, list[memoryview], int], int], threads: int) -> None:
        self.verb = verb
        self.move = move
        self.moved_bytes = 0
        self.threads = ThreadPoolExecutor(threads, thread_name_prefix=f"hetmem-nvme-{verb}")
        self._lock = threading.Lock()
        self._in_flight = 0
        self._busy_since = 0.0
        self._busy_seconds = 0.0

    def begin(self) -> None:
        with self._lock:
            if not self._in_flight:
                self._busy_since = time.perf_counter()
            self._in_flight += 1

    def end(self, moved_bytes: int) -> None:
        with self._lock:
            self.moved_bytes += moved_bytes
            self._in_flight -= 1
            if not self._in_flight:
                self._busy_seconds += time.perf_counter() - self._busy_since

    def busy_seconds(self) -> float:
        with self._lock:
            return self._busy_seconds + (time.perf_counter() - self._busy_since if self._in_flight else 0.0)


class _Transfer:
    """One read or write, cut into requests; the last request to end settles the future."""

    def __init__(self, link: _Link, file: _File) -> None:
        self._link = link
        self._file = file
        self._lock = threading.Lock()
        self._pending = 0
        self._moved_bytes = 0
        self._error: BaseException | None = None
        self._future: Future[int] = Future()

    def start(self, memory: memoryview, position: int, request_bytes: int) -> Future[int]:
        future = self._future
        future.set_running_or_notify_cancel()  # a cancelled future would hide that the memory is in use
        starts = range(0, memory.nbytes, request_bytes)
        self._pending = len(starts)
        self._link.begin()
        for start in starts:
            self._link.threads.submit(self._run, memory[start : start + request_bytes], position + start)
        return future

    def _run(self, memory: memoryview, position: int) -> None:
        moved_bytes = 0
        if self._error is None:
            try:
                _transfer_piece(self._link, self._file, memory, position)
                moved_bytes = memory.nbytes
            except BaseException as error:  # whatever it is, the one who waits must learn of it
                self._error = error
        with self._lock:
            self._moved_bytes += moved_bytes
            self._pending -= 1
            last = not self._pending
        if last:
            self._settle()

    def _settle(self) -> None:
        # Only now, also after an error: until the last request ends, the disk may still write into the memory.
        self._link.end(self._moved_bytes)
        future, error = self._future, self._error
        del self._future, self._error  # the error's frames hold this transfer: a cycle that would keep memory alive
        if error is None:
            future.set_result(self._moved_bytes)
        else:
            future.set_exception(error)


def _transfer_piece(link: _Link, file: _File, memory: memoryview, position: int) -> None:
    """Move all of `memory` from or to the file at `position`, however little each call moves; `StoreError` if not."""
    done = 0
    while done < memory.nbytes:
        # A call that stopped within a block leaves a rest that O_DIRECT refuses: the page cache takes it.
        fd = file.buffered if done % BLOCK_BYTES else file.direct
        try:
            moved = link.move(fd, [memory[done:]], position + done)
            if not moved:
                raise OSError(errno.EIO, "end of file")
        except OSError as error:
            raise StoreError(
                error.errno,
                f"cannot {link.verb} {memory.nbytes} bytes at offset {position} of the NVMe store in "
                f"{file.directory!r}: {error.strerror} after {done} bytes",
            ) from error
        done += moved


def _open_unnamed(directory: str) -> int:
    """A new file, readable by its owner only, that has no name: no crash leaves it behind."""
    with tempfile.TemporaryFile(buffering=0, dir=directory) as file:  # O_TMPFILE, or mkstemp and unlink
        return os.dup(file.fileno())


def _open_direct(fd: int) -> int:
    """A second descriptor of the same file, with O_DIRECT; `fd` itself where the filesystem does not do that."""
    direct = fd
    try:
        direct = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_DIRECT)
        os.preadv(direct, [Mapping(BLOCK_BYTES).buffer(0, BLOCK_BYTES)], 0)  # some accept the flag and fail the I/O
    except OSError:
        if direct != fd:
            os.close(direct)
        return fd
    return direct


def _block_aligned(memory: memoryview) -> memoryview:
    """`memory` as flat bytes, if it suits O_DIRECT."""
    if memory.c_contiguous and memory.nbytes and not (memory.nbytes | address_of(memory)) % BLOCK_BYTES:
        return memory.cast("B")
    raise ValueError(
        f"a transfer needs contiguous memory aligned to {BLOCK_BYTES} bytes and a positive multiple of it in length "
        f"(take it from a hetmem Mapping), got {memory.nbytes} bytes"
    )


def _sized(nbytes: int) -> str:
    return f"{nbytes} bytes ({format_size(nbytes)})"
