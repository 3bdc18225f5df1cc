"""Host memory in whole pages, straight from the kernel, near a device; how much memory the machine has left; and a pool
of it, divided into permanent homes, loans, and the slots of a staging ring.

O_DIRECT, page-locking and huge pages all need whole pages. Where Linux has no files about them, all cores count as
equally near, and there is no limit. A container, or a job of a batch system, has a limit that the machine's own numbers
do not show, and a process that exceeds it is killed. A pool keeps to its capacity. Must not know torch, or what the
memory is for.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import weakref
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from hetmem.base.units import GIB, MIB, format_size, round_down, round_up
from hetmem.errors import CapacityError
from hetmem.schedule.placement import PIECE_BYTES

SYSFS = Path("/sys")


def cores_near(pci_address: str) -> tuple[int, ...]:
    """Return the CPU numbers nearest to the device at "domain:bus:device.function" (hexadecimal) on which this process
    may run, ascending; empty if all are equally near, or the system does not say."""
    allowed = os.sched_getaffinity(0)
    try:
        text = (SYSFS / "bus/pci/devices" / pci_address.lower() / "local_cpulist").read_text()
    except OSError:
        return ()
    near = allowed.intersection(_numbers(text))
    return () if near == allowed else tuple(sorted(near))


def _numbers(text: str) -> list[int]:
    """Parse a list such as "0-3,8,10-11"."""
    found: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found.extend(range(int(first), int(last or first) + 1))
    return found


_UNLIMITED = 1 << 60  # version 1 has a number near 2 ** 63 for no limit


def free_host_bytes() -> int:
    """Return what the machine, or a control group of this process, has left, whichever is less."""
    import psutil  # imported late: takes longer than hetmem, and only runs without a budget need it

    return min(int(psutil.virtual_memory().available), *left_by_groups())


def left_by_groups(root: Path = Path("/")) -> list[int]:
    """Return what each control group that limits memory leaves; 2 ** 60 if none does. The page cache counts as left."""
    return [_UNLIMITED, *(left for folder in _groups(root) if (left := _left(folder)) is not None)]


def _groups(root: Path) -> Iterator[Path]:
    """Yield the folders of this process's control groups, of either version, and of their parents."""
    mounted = root / "sys/fs/cgroup"
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top = mounted / "memory" if controllers else mounted
        inside = top / path.lstrip("/")
        yield from (folder for folder in (inside, *inside.parents) if folder == top or top in folder.parents)


def _left(folder: Path) -> int | None:
    """Return what the group of `folder` leaves; None without a readable limit. A container's is the topmost."""
    names = ("memory.max", "memory.current", "inactive_file")
    if not (folder / names[0]).exists():
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    try:
        limit, used = ((folder / name).read_text().strip() for name in names[:2])
        statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        if limit == "max" or int(limit) >= _UNLIMITED:
            return None
        return max(0, int(limit) - int(used) + int(statistics.get(names[2], 0)))
    except (OSError, ValueError):
        return None


_SYSTEM_PAGE_BYTES = mmap.PAGESIZE

# Below this a huge page would be mostly padding (its size is 2 MiB on x86-64 and on most arm64).
_HUGE_PAGE_BYTES = 2 * MIB

# Linux's; Python's mmap module names neither. Without the first, a machine that limits overcommit refuses a mapping
# larger than its free memory, though only touched pages take memory.
_MAP_NORESERVE = 0x4000
_MADV_POPULATE_WRITE = 23  # since Linux 5.14

_POPULATE_STEP_BYTES = GIB
"""After each such step `Mapping.populate` checks what the machine has left."""
_POPULATE_THREADS = 8


def address_of(memory: memoryview) -> int:
    """Return the address of the first byte of `memory` (contiguous, not empty; it may be read-only)."""
    if memory.readonly:
        address: int = np.frombuffer(memory, dtype=np.uint8).__array_interface__["data"][0]
        return address
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))  # in a fifth of the time, for each transfer


_KEPT_FROM_CHILDREN: weakref.WeakSet[Mapping] = weakref.WeakSet()
_NEVER_UNMAPPED: list[Mapping] = []


def _after_fork() -> None:
    """Keep a child from unmapping what it does not have: other memory may have been mapped at that address since."""
    _NEVER_UNMAPPED.extend(_KEPT_FROM_CHILDREN)


os.register_at_fork(after_in_child=_after_fork)


def _stay_on(cores: Collection[int]) -> None:
    """Bind this thread to `cores`, if there are any and the system allows it."""
    if cores:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, cores)


def _touch(address: int, nbytes: int) -> int:
    """Populate whole pages from `address` on; return an errno, 0 if it worked. The GIL is released meanwhile."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), _MADV_POPULATE_WRITE) == 0:
        return 0
    error = ctypes.get_errno()
    if error != errno.EINVAL:
        return error
    pages = (ctypes.c_ubyte * nbytes).from_address(address)  # an older kernel: write one byte of each page
    first = np.ctypeslib.as_array(pages)[::_SYSTEM_PAGE_BYTES]
    first |= 0
    return 0


class Mapping:
    """`nbytes` of private, page-aligned, zeroed memory that belongs to no file.

    Nothing is touched on creation: a page costs memory, and the time of its first touch (0.5 to 3 s per GiB), when it
    is first written. The memory is freed when the mapping and every view of it are gone; there is no `close`, so a view
    cannot dangle. Large mappings ask for huge pages, which make disk transfers and updates 1.2 times faster.
    """

    __slots__ = ("__weakref__", "_pages", "address", "memory_nbytes", "nbytes")

    def __init__(self, nbytes: int) -> None:
        """Map `nbytes`. Raises ValueError for less than 1 and `CapacityError` when the address space has no room."""
        if nbytes < 1:
            raise ValueError(f"a mapping needs at least 1 byte, got {nbytes}")
        try:
            # mmap's default, MAP_SHARED, is backed by shmem: that gets no huge pages.
            self._pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
        except (OSError, OverflowError) as error:
            raise CapacityError(
                f"cannot map {nbytes} bytes ({format_size(nbytes)}) of host memory: {error}. Lower Budget(host=…), "
                "or raise the limit of address space (ulimit -v)"
            ) from error
        if nbytes >= _HUGE_PAGE_BYTES:
            with contextlib.suppress(OSError):  # a kernel built without huge pages: only slower
                self._pages.madvise(mmap.MADV_HUGEPAGE)
        self.nbytes = nbytes
        self.memory_nbytes = nbytes
        """Those that are no file on a drive, which can be populated and page-locked."""
        self.address = address_of(memoryview(self._pages))

    def populate(self, cores: Collection[int] = (), first: int = 0) -> None:
        """Touch every page from byte `first` on, by several threads, so that page-locking finds them; their contents
        stay.

        Those threads run on `cores`, if any are given: the system allocates pages in the memory nearest to the core
        that touches them. Raises `CapacityError` as soon as the machine, or a control group of this process, has less
        memory left than the next step of 1 GiB takes: continuing would get this process, or another one, killed.
        """
        threads = min(_POPULATE_THREADS, len(cores) or os.cpu_count() or 1)
        with ThreadPoolExecutor(threads, "hetmem-populate", _stay_on, (cores,)) as pool:
            for start in range(first, self.memory_nbytes, _POPULATE_STEP_BYTES):
                step = min(_POPULATE_STEP_BYTES, self.memory_nbytes - start)
                if (left := free_host_bytes()) < step:
                    raise CapacityError(
                        f"host memory ends: {format_size(start)} of {format_size(self.memory_nbytes)} are populated, "
                        f"and the machine (or a control group of this process) has {format_size(left)} left. Lower "
                        f"Budget(host=…) to at most {format_size(start + left)}, or end other programs"
                    )
                part = round_up(-(-step // threads), _SYSTEM_PAGE_BYTES)
                parts = [(at, min(part, start + step - at)) for at in range(start, start + step, part)]
                for error in pool.map(lambda span: _touch(self.address + span[0], span[1]), parts):
                    if error:
                        raise CapacityError(
                            f"cannot populate {format_size(self.memory_nbytes)} of host memory: {os.strerror(error)}. "
                            f"Lower Budget(host=…), or end other programs"
                        )

    def keep_from_children(self) -> None:
        """Leave this memory out of processes made by `fork()`, where reading it becomes a segmentation fault.

        Otherwise each forked process (a worker of a `DataLoader`) costs a copy of it: page-locked pages are copied at
        once, others as training writes to them.
        """
        with contextlib.suppress(OSError):
            self._pages.madvise(mmap.MADV_DONTFORK)
            _KEPT_FROM_CHILDREN.add(self)

    def share_with_children(self) -> None:
        """End `keep_from_children`, for processes forked from now on."""
        if self in _KEPT_FROM_CHILDREN:
            self._pages.madvise(mmap.MADV_DOFORK)
            _KEPT_FROM_CHILDREN.discard(self)

    def buffer(self, offset: int, nbytes: int) -> memoryview:
        """Return writable bytes [offset, offset + nbytes), valid for as long as the view lives.

        Raises ValueError when the range leaves the mapping.
        """
        self._check_range(offset, nbytes)
        return memoryview(self._pages)[offset : offset + nbytes]

    def shorten(self, nbytes: int, used: int) -> None:
        """Keep the first `nbytes` only. What lies behind the `used` ones, whole pages, reads zeros and takes no memory;
        the rest stays mapped for views of it, and unused."""
        if used < self.nbytes:
            self._pages.madvise(mmap.MADV_DONTNEED, used, self.nbytes - used)
        self.nbytes = self.memory_nbytes = nbytes

    def drop(self, offset: int, nbytes: int) -> None:
        """Free the whole pages in bytes [offset, offset + nbytes), which read zeros then, also in views of them."""
        self._check_range(offset, nbytes)
        start, end = round_up(offset, mmap.PAGESIZE), (offset + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if start < end:
            self._pages.madvise(mmap.MADV_DONTNEED, start, end - start)

    def _check_range(self, offset: int, nbytes: int) -> None:
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise ValueError(f"bytes [{offset}, {offset + nbytes}) are not within the {self.nbytes} of the mapping")


# ---- The pool. ----

PAGE_BYTES = 4096
"""Reservations and loans are multiples of it."""


class Spans:
    """The bytes up to `end` of a range, lent in whole pages; a span no larger than `piece` crosses no multiple of it.
    `give_back` is safe on any thread, also within a garbage collection; `take` is for one thread."""

    def __init__(self, end: int, piece: int) -> None:
        self._end, self._piece = round_down(end, PAGE_BYTES), piece
        self._free: list[tuple[int, int]] = []
        """Sorted starts and ends of free spans above the lowest lent one."""
        self._lowest = self._end
        """No span starts below."""
        self._lent: dict[int, int] = {}
        self._given: deque[int] = deque()

    @property
    def end(self) -> int:
        """The end of the range."""
        return self._end

    @property
    def lowest(self) -> int:
        """The start of the lowest lent span; the end of the range if there is none."""
        self._settle()
        return self._lowest

    @property
    def lent_bytes(self) -> int:
        """Bytes lent now."""
        self._settle()
        return self._end - self._lowest - sum(end - start for start, end in self._free)

    def take(self, nbytes: int, start: int) -> int | None:
        """Lend `nbytes` at or above `start` and return where they start; None if no such span is free."""
        self._settle()
        size = round_up(max(1, nbytes), PAGE_BYTES)
        fitting = [(end - begin, begin, end) for begin, end in self._free if end - begin >= size]
        for _, begin, end in sorted(fitting):  # the best fit first
            if (at := self._fit(begin, end, size)) is not None:
                self._free.remove((begin, end))
                for rest in ((begin, at), (at + size, end)):
                    if rest[0] < rest[1]:
                        insort(self._free, rest)
                self._lent[at] = size
                return at
        at = self._fit(start, self._lowest, size)
        if at is not None:
            if at + size < self._lowest:
                insort(self._free, (at + size, self._lowest))
            self._lowest, self._lent[at] = at, size
        return at

    def give_back(self, at: int) -> None:
        """End the loan of the span at `at`."""
        self._given.append(at)

    def _fit(self, begin: int, end: int, size: int) -> int | None:
        """Return the highest start for `size` bytes within [begin, end), or None."""
        at = round_down(end - size, PAGE_BYTES)
        if size <= self._piece and at // self._piece != (at + size - 1) // self._piece:
            at = round_down(end - 1, self._piece) - size
        return at if at >= begin else None

    def _settle(self) -> None:
        while self._given:
            at = self._given.popleft()
            begin, end = at, at + self._lent.pop(at)
            index = bisect_left(self._free, (begin, end))
            if index < len(self._free) and self._free[index][0] == end:
                end = self._free.pop(index)[1]
            if index and self._free[index - 1][1] == begin:
                begin = self._free.pop(index - 1)[0]
            if begin == self._lowest:
                self._lowest = end
            else:
                insort(self._free, (begin, end))


class Loan:
    """`memory` of a `HostPool`, returned to it when this object is dropped, on any thread."""

    __slots__ = ("_at", "_spans", "memory")

    def __init__(self, spans: Spans, at: int, memory: memoryview) -> None:
        self._spans, self._at, self.memory = spans, at, memory

    def __del__(self) -> None:
        self._spans.give_back(self._at)


class HostPool:
    """`capacity_bytes` of host memory (rounded down to pages), exact: nothing is rounded up to powers of two.

    `mapping`: memory to use, at least as large; None = new memory.
    """

    def __init__(self, capacity_bytes: int, mapping: Mapping | None = None) -> None:
        self.capacity_bytes = round_down(capacity_bytes, PAGE_BYTES)
        self.reserved_bytes = 0
        self.peak_bytes = 0
        """The most bytes that were reserved and lent at one time."""
        self.for_loans_bytes = 0
        """Bytes at the end that are never reserved."""
        self.mapping = mapping or Mapping(max(PAGE_BYTES, self.capacity_bytes))
        self.mapping.keep_from_children()
        self._staging_offset = 0
        self.slot_bytes = 0  # of staging
        self._spans = Spans(self.capacity_bytes, PIECE_BYTES)
        self._lowest_loan = self.capacity_bytes

    def is_untouched(self, reserved: memoryview) -> bool:
        """Return whether the bytes that were just `reserved` are zeros, as they were never lent before."""
        return address_of(reserved) + reserved.nbytes - self.mapping.address <= self._lowest_loan

    @property
    def free_bytes(self) -> int:
        """Bytes that may still be reserved."""
        return self._reserved_up_to() - self.reserved_bytes

    def _reserved_up_to(self) -> int:
        return min(self._spans.lowest, self.capacity_bytes - self.for_loans_bytes)

    @property
    def lent_bytes(self) -> int:
        """Bytes that `lend` has handed out."""
        return self._spans.lent_bytes

    def loan_room_bytes(self, leave_bytes: int) -> int:
        """Return what may be lent beside `leave_bytes` that are to be reserved, in any number of pieces."""
        return self.capacity_bytes - self._first_loan(leave_bytes) - self.lent_bytes

    def _first_loan(self, leave_bytes: int) -> int:
        start = round_up(self.reserved_bytes + leave_bytes, PAGE_BYTES)
        return max(self.reserved_bytes, min(start, self.capacity_bytes - self.for_loans_bytes))

    def lend(self, nbytes: int, leave_bytes: int = 0, apart_bytes: int = 0) -> Loan | None:
        """Lend page-aligned memory, and leave `leave_bytes` for reservations and `apart_bytes` for other loans; None if
        there is no room."""
        at = self._spans.take(nbytes, round_up(self._first_loan(leave_bytes) + apart_bytes, PAGE_BYTES))
        if at is None:
            return None
        self._lowest_loan = min(self._lowest_loan, at)
        self.peak_bytes = max(self.peak_bytes, self.reserved_bytes + self.lent_bytes)
        return Loan(self._spans, at, self.mapping.buffer(at, round_up(nbytes, PAGE_BYTES)))

    def reserve(self, nbytes: int) -> memoryview:
        """Reserve `nbytes` of page-aligned memory for good. Raises `CapacityError` with nothing changed."""
        taken = round_up(nbytes, PAGE_BYTES)
        start = self.reserved_bytes
        if start // PIECE_BYTES != (start + taken - 1) // PIECE_BYTES and 0 < taken <= PIECE_BYTES:
            start = round_up(start, PIECE_BYTES)
        if start + taken > self._reserved_up_to():
            raise CapacityError(
                f"the host pool has no room: {format_size(taken)} wanted, {format_size(self.free_bytes)} left "
                f"of {format_size(self.capacity_bytes)}. Raise Budget(host=…)"
            )
        self.reserved_bytes = start + taken
        self.peak_bytes = max(self.peak_bytes, self.reserved_bytes + self.lent_bytes)
        return self.mapping.buffer(start, nbytes)

    def reserve_staging(self, slot_bytes: int, slots: int) -> None:
        """Reserve `slots` slots of `slot_bytes` (whole pages) for staging; once."""
        self._staging_offset = self.reserved_bytes
        self.slot_bytes = slot_bytes
        if slots:
            self.reserve(slot_bytes * slots)

    def staged(self, slot: int, nbytes: int) -> memoryview:
        """Return `nbytes` of memory that start at staging slot `slot`."""
        return self.mapping.buffer(self._staging_offset + slot * self.slot_bytes, nbytes)
