"""Files of the NVMe store, unnamed, sparse and mapped, and the threads of each disk that read and write them, with
O_DIRECT if possible.

Knows descriptors, blocks, the page cache, memory and futures. Must not know extents, capacities or callers. Requests go
over one link for each direction, which counts its bytes and time.
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
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

from hetmem.base.threads import Threads
from hetmem.base.units import MIB, format_size, round_up
from hetmem.errors import BudgetError, StoreError
from hetmem.memory.host_memory import Mapping, Spans

BLOCK_BYTES = 4096  # covers the O_DIRECT alignment of the disks and filesystems in use
_EXIT_SECONDS = 5.0  # a disk that hangs must not keep a process alive that has failed
_LEAST_REQUEST_BYTES = 2 * MIB  # smaller ones cost more CPU time than a second thread saves

Move = Callable[[int, list[memoryview], int], int]
"""`preadv` or `pwritev`: from descriptor, buffers and offset to the bytes moved."""


class StoreFile:
    """An unnamed file: its descriptors, its mapping and how much of it is reserved (a prefix).

    Without O_DIRECT, `direct` is `buffered`, and each transfer drops its pages from the page cache: after writing them
    out, so that a failing disk fails the transfer, and memory that training needs is not spent on bytes that are used
    once. Pages that a view has touched stay.
    """

    def __init__(self, directory: str, nbytes: int, descriptor: int | None = None) -> None:
        """`descriptor`: of such a file, of the same length, that another process has made."""
        self.directory = directory
        self.reserved_bytes = 0
        self.allocated_bytes = 0
        """Allocated blocks at the start of the file, reserved or not."""
        self.loans = Spans(nbytes, nbytes + 1)
        """Lent spans, from the end of the file downward."""
        self._lent_from = nbytes
        """From here on blocks are allocated, with any content."""
        with contextlib.ExitStack() as opened:
            try:
                self.buffered = open_unnamed(directory) if descriptor is None else os.dup(descriptor)
                opened.callback(os.close, self.buffered)
                os.ftruncate(self.buffered, nbytes)
                self.pages = mmap.mmap(self.buffered, nbytes)
            except (OSError, OverflowError) as error:
                what = f"cannot keep an NVMe store of {sized(nbytes)} in {directory!r}: {error}"
                raise BudgetError(f"{what}. Name an existing, writable directory on the disk to use") from error
            disk = os.fstatvfs(self.buffered)
            self.disk = os.fstat(self.buffered).st_dev
            """The disk it lies on: files on one disk share its free space."""
            self.disk_room_bytes = disk.f_bavail * disk.f_frsize * 9 // 10
            """The disk's free space when this was made, less the tenth that a budget leaves it."""
            self.direct = _open_direct(self.buffered)
            if self.direct != self.buffered:
                opened.callback(os.close, self.direct)
            # Runs at `close` or when the last transfer and the store have let go of the file, whichever is first.
            self.close = weakref.finalize(self, opened.pop_all().close)
            # Not at the end of the process: queued writes would go to the next files with these numbers.
            self.close.atexit = False

    @property
    def is_direct(self) -> bool:
        """Whether transfers bypass the page cache."""
        return self.direct != self.buffered

    def allocate(self, nbytes: int) -> None:
        """Allocate zeroed disk blocks for `nbytes` after the reserved ones; `trim` frees them."""
        if self._lent_from < self.loans.end:
            self.trim()
        self.take_blocks(self.reserved_bytes, nbytes)
        end = self.reserved_bytes + nbytes
        if end > self._lent_from:  # into former loans, which have old content
            start = max(self.reserved_bytes, self._lent_from)
            self.pages[start:end] = bytes(end - start)
            self._lent_from = end

    def lend(self, nbytes: int) -> int | None:
        """Lend `nbytes`, whole blocks, until `loans` gets them back, and return their offset; None if there is no room.
        Their blocks stay allocated, so that the next step allocates none."""
        at = self.loans.take(nbytes, self.reserved_bytes)
        if at is not None and at < self._lent_from:
            try:
                self.take_blocks(at, self._lent_from - at)
            except StoreError:
                self.loans.give_back(at)
                raise
            self._lent_from = at
        return at

    def take_blocks(self, start: int, nbytes: int) -> None:
        """Allocate blocks. Raises `StoreError` if the disk has none."""
        disk = os.fstatvfs(self.buffered)
        free = disk.f_bavail * disk.f_frsize + max(0, self.allocated_bytes - start)
        try:
            # Checked first because a failing fallocate fills the disk, for every process on it, before it fails.
            if nbytes > free:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.posix_fallocate(self.buffered, start, nbytes)
        except OSError as error:
            missing = f", {sized(nbytes - free)} are missing" if nbytes > free else ""  # otherwise a quota, say
            raise StoreError(
                error.errno,
                f"cannot reserve {sized(nbytes)} in {self.directory!r}: {error.strerror}; {sized(free)} were free"
                f"{missing}. Free disk space or lower Budget(nvme=…)",
            ) from error

    def trim(self) -> None:
        """Free blocks beyond the reserved ones, unless some are lent; no view of them exists, and `allocate` extends
        the file again."""
        if not self.loans.lent_bytes:
            os.ftruncate(self.buffered, max(self.reserved_bytes, self.allocated_bytes))
            self._lent_from = self.loans.end

    def transfer(self, verb: str, move: Move, memory: memoryview, position: int) -> None:
        """Move all of `memory` from or to `position`, in as many calls as necessary. Raises `StoreError` for any
        failure, with its position, for the waiting thread."""
        done = 0
        try:
            while done < memory.nbytes:
                # A call that stopped within a block leaves a rest that O_DIRECT refuses: the page cache takes it.
                fd = self.buffered if done % BLOCK_BYTES else self.direct
                moved = move(fd, [memory[done:]], position + done)
                if not moved:
                    raise OSError(errno.EIO, "end of file")
                done += moved
            if not self.is_direct:
                self._drop_behind(position, memory.nbytes, written=verb == "write")
        except Exception as error:
            number, reason = errno.EIO, repr(error)
            if isinstance(error, OSError):
                number, reason = error.errno or errno.EIO, error.strerror or reason
            where = f"{memory.nbytes} bytes at offset {position} of the NVMe store in {self.directory!r}"
            raise StoreError(number, f"cannot {verb} {where}: {reason} after {done} bytes") from error

    def keep_in_cache(self, move: Move, memory: memoryview, position: int) -> bool:
        """Return, after a failed write, whether the page cache took all of it instead, so that views see all of it.

        Otherwise a part of the range is new and a part old, and a reader of a home would see a mixture of two versions.
        The cache does not replace the write: the system may lose what it cannot write out.
        """
        done = 0
        with contextlib.suppress(Exception):
            while done < memory.nbytes and (moved := move(self.buffered, [memory[done:]], position + done)):
                done += moved
        return done == memory.nbytes

    def _drop_behind(self, position: int, nbytes: int, *, written: bool) -> None:
        if written:
            os.fdatasync(self.buffered)  # posix_fadvise drops only clean pages
        os.posix_fadvise(self.buffered, position, nbytes, os.POSIX_FADV_DONTNEED)


def open_unnamed(directory: str) -> int:
    """Return a new unnamed file, accessible to its owner only: no crash leaves it behind."""
    with tempfile.TemporaryFile(buffering=0, dir=directory) as file:  # O_TMPFILE, or mkstemp and unlink
        return os.dup(file.fileno())


def _open_direct(fd: int) -> int:
    """Return a second descriptor of the same file, with O_DIRECT; `fd` itself if the filesystem has none."""
    block = Mapping(BLOCK_BYTES).buffer(0, BLOCK_BYTES)
    direct = fd
    try:
        direct = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_DIRECT)
        os.preadv(direct, [block], 0)  # some accept the flag and fail the I/O
    except OSError:
        if direct != fd:
            os.close(direct)
        return fd
    return direct


def sized(nbytes: int) -> str:
    """Return bytes, and the same in a readable unit."""
    return f"{nbytes} bytes ({format_size(nbytes)})"


class DiskLink:
    """One direction: the bytes moved, and the time it was busy.

    Each file has threads of its own, so that no disk waits for another. A transfer is divided among all of them, even
    if it is smaller than one request may be: a single one that training waits for has the whole disk.
    """

    def __init__(self, verb: str, move: Move, files: int, threads: int, request_bytes: int) -> None:
        self.verb = verb
        self.move = move
        self.moved_bytes = 0
        self._shares, self._request_bytes = threads, request_bytes
        self._threads = [Threads(threads, f"hetmem-nvme-{verb}", _EXIT_SECONDS) for _ in range(files)]
        self._lock = threading.Lock()
        self.in_flight = 0
        """Transfers that have not ended."""
        self._busy_since = 0.0
        self._busy_seconds = 0.0

    def start(self, file: StoreFile, index: int, memory: memoryview, position: int) -> Future[int]:
        """Move `memory` from or to `position` of `file`, the store's number `index`."""
        share = round_up(-(-memory.nbytes // self._shares), BLOCK_BYTES)
        nbytes = min(self._request_bytes, max(share, _LEAST_REQUEST_BYTES))
        self._threads[index].start()
        with self._lock:
            if not self.in_flight:
                self._busy_since = time.perf_counter()
            self.in_flight += 1
        return _Transfer(self, file, memory, position).start(self._threads[index], nbytes)

    def end(self, moved_bytes: int) -> None:
        """Count the end of a transfer."""
        with self._lock:
            self.moved_bytes += moved_bytes
            self.in_flight -= 1
            if not self.in_flight:
                self._busy_seconds += time.perf_counter() - self._busy_since

    def busy_seconds(self) -> float:
        """Return the seconds during which at least one transfer was queued or running."""
        with self._lock:
            return self._busy_seconds + (time.perf_counter() - self._busy_since if self.in_flight else 0.0)

    def join(self) -> None:
        """End the threads once nothing is queued, and wait for them."""
        for threads in self._threads:
            threads.stop()
        for threads in self._threads:
            threads.join()


class _Transfer:
    """One read or write, divided into requests; the last request to end settles the future."""

    def __init__(self, link: DiskLink, file: StoreFile, memory: memoryview, position: int) -> None:
        self._link = link
        self._file = file
        self._memory = memory
        self._position = position
        self._lock = threading.Lock()
        self._pending = 0
        self._moved_bytes = 0
        self._error: BaseException | None = None
        self._future: Future[int] = Future()

    def start(self, threads: Threads, request_bytes: int) -> Future[int]:
        future, memory = self._future, self._memory
        future.set_running_or_notify_cancel()  # a cancelled future would hide that the memory is in use
        starts = range(0, memory.nbytes, request_bytes)
        self._pending = len(starts)
        for start in starts:
            part = memory[start : start + request_bytes]
            threads.submit(partial(self._run, part, self._position + start))
        return future

    def _run(self, memory: memoryview, position: int) -> None:
        """Move a part, on one of the threads."""
        moved_bytes, link = 0, self._link
        if self._error is None:
            try:
                self._file.transfer(link.verb, link.move, memory, position)
                moved_bytes = memory.nbytes
            except BaseException as error:  # of any kind: the waiting thread must get it
                self._error = error
        with self._lock:
            self._moved_bytes += moved_bytes
            self._pending -= 1
            last = not self._pending
        if last:
            self._settle()

    def _settle(self) -> None:
        # Only now, also after an error: until the last request ends, the disk may still write into the memory.
        future, error = self._future, self._error
        if isinstance(error, StoreError) and self._link.verb == "write":
            error = self._whole_or_not(error)
        self._link.end(self._moved_bytes)
        del self._future, self._error  # the error's frames hold this transfer: a cycle that would keep memory alive
        if error is None:
            future.set_result(self._moved_bytes)
        else:
            future.set_exception(error)

    def _whole_or_not(self, error: StoreError) -> StoreError:
        cached = self._file.keep_in_cache(self._link.move, self._memory, self._position)
        what = "Until it is written again " + ("only the page cache has all of it" if cached else "a part of it is old")
        full = StoreError(error.errno, f"{error.strerror}. {what}")
        full.__cause__ = error.__cause__
        return full
