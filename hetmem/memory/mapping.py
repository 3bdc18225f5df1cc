"""Host memory in whole pages, straight from the kernel, near a device, and how much of it the machine has left.

What O_DIRECT, page-locking and huge pages all need. Where Linux has no files about them, all cores are as near, and
there is no limit. A container, or a job of a batch system, has a limit that the machine's own numbers say nothing of,
and a process that goes beyond it is killed. Must not know torch, pools or what the memory is for.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import weakref
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from hetmem.base.units import GIB, MIB, format_size, round_up
from hetmem.errors import CapacityError

SYSFS = Path("/sys")


def cores_near(pci_address: str) -> tuple[int, ...]:
    """Return the CPU numbers nearest to the device at "domain:bus:device.function" (hexadecimal) that this process may
    run on, ascending; none where all of them are as near, or the system does not say."""
    allowed = os.sched_getaffinity(0)
    try:
        text = (SYSFS / "bus/pci/devices" / pci_address.lower() / "local_cpulist").read_text()
    except OSError:
        return ()
    near = allowed.intersection(_numbers(text))
    return () if near == allowed else tuple(sorted(near))


def _numbers(text: str) -> list[int]:
    """Return the numbers of a list such as "0-3,8,10-11"."""
    found: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found.extend(range(int(first), int(last or first) + 1))
    return found


_UNLIMITED = 1 << 60  # version 1 says no limit by a number near 2 ** 63


def free_host_bytes() -> int:
    """Return what the machine, or a control group of this process, has left, whichever is less."""
    import psutil  # costs more than all of hetmem to import, and a budget that is said needs it not

    return min(int(psutil.virtual_memory().available), *left_by_groups())


def left_by_groups(root: Path = Path("/")) -> list[int]:
    """Return what each control group that limits memory leaves; 2 ** 60 if none does. Files that are read again from
    the disk count as left."""
    return [_UNLIMITED, *(left for folder in _groups(root) if (left := _left(folder)) is not None)]


def _groups(root: Path) -> Iterator[Path]:
    """Yield the folders of this process's control groups, of either version, and of those around them."""
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
    """Return what the group of `folder` leaves; None without a limit that can be read. A container's is the topmost."""
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


PAGE_BYTES = mmap.PAGESIZE

# Below this a huge page would be mostly padding (its size is 2 MiB on x86-64 and on most arm64).
_HUGE_PAGE_BYTES = 2 * MIB

# Linux's; Python's mmap module names neither. Without the first, a machine that counts commitments refuses one mapping
# larger than the memory it has at present, though only what is touched takes memory.
_MAP_NORESERVE = 0x4000
_MADV_POPULATE_WRITE = 23  # since Linux 5.14

_POPULATE_STEP_BYTES = GIB
"""Between two steps of `Mapping.populate` the machine is asked what it has left."""
_POPULATE_THREADS = 8


def address_of(memory: memoryview) -> int:
    """Return the address of the first byte of `memory` (contiguous, not empty; it may be read-only)."""
    if memory.readonly:
        address: int = np.frombuffer(memory, dtype=np.uint8).__array_interface__["data"][0]
        return address
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))  # a fifth of the time, for each transfer


_KEPT_FROM_CHILDREN: weakref.WeakSet[Mapping] = weakref.WeakSet()
_NEVER_UNMAPPED: list[Mapping] = []


def _after_fork() -> None:
    """Keep a child from unmapping what it does not have: other memory may have come to lie at that address since."""
    _NEVER_UNMAPPED.extend(_KEPT_FROM_CHILDREN)


os.register_at_fork(after_in_child=_after_fork)


def _stay_on(cores: Collection[int]) -> None:
    """Keep this thread on `cores`, if there are any and the system allows it."""
    if cores:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, cores)


def _touch(address: int, nbytes: int) -> int:
    """Populate whole pages from `address` on; returns an errno, 0 if it worked. The GIL is not held meanwhile."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), _MADV_POPULATE_WRITE) == 0:
        return 0
    error = ctypes.get_errno()
    if error != errno.EINVAL:
        return error
    pages = (ctypes.c_ubyte * nbytes).from_address(address)  # an older kernel: write one byte of each page
    first = np.ctypeslib.as_array(pages)[::PAGE_BYTES]
    first |= 0
    return 0


class Mapping:
    """`nbytes` of private, page-aligned, zeroed memory that belongs to no file.

    Nothing is touched on creation: a page costs memory, and the time of its first touch (0.5 to 3 s per GiB), when it
    is first written. The memory is given back when the mapping and every view of it are gone; there is no `close`, so
    a view cannot dangle. Large mappings ask for huge pages, which make disk transfers and updates 1.2 times faster.
    """

    __slots__ = ("__weakref__", "_pages", "address", "nbytes")

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
        self.address = address_of(memoryview(self._pages))

    def populate(self, cores: Collection[int] = ()) -> None:
        """Touch every page, by several threads, so that page-locking finds them; their contents stay.

        Those threads run on `cores`, if any are given: the system takes new pages from the memory that is nearest to
        the core that touches them. Raises `CapacityError` as soon as the machine, or a control group of this process,
        has less memory left than the next step of 1 GiB takes: going on would end the process, or another one.
        """
        threads = min(_POPULATE_THREADS, len(cores) or os.cpu_count() or 1)
        with ThreadPoolExecutor(threads, "hetmem-populate", _stay_on, (cores,)) as pool:
            for start in range(0, self.nbytes, _POPULATE_STEP_BYTES):
                step = min(_POPULATE_STEP_BYTES, self.nbytes - start)
                if (left := free_host_bytes()) < step:
                    raise CapacityError(
                        f"host memory ends: {format_size(start)} of {format_size(self.nbytes)} are populated, and the "
                        f"machine (or a control group of this process) has {format_size(left)} left. Lower "
                        f"Budget(host=…) to at most {format_size(start + left)}, or end other programs"
                    )
                part = round_up(-(-step // threads), PAGE_BYTES)
                parts = [(at, min(part, start + step - at)) for at in range(start, start + step, part)]
                for error in pool.map(lambda span: _touch(self.address + span[0], span[1]), parts):
                    if error:
                        raise CapacityError(
                            f"cannot populate {format_size(self.nbytes)} of host memory: {os.strerror(error)}. Lower "
                            f"Budget(host=…), or end other programs"
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

    def discard(self, offset: int, nbytes: int) -> None:
        """Give the pages of [offset, offset + nbytes) back to the system; views stay valid and read zeros there.

        Raises ValueError, and changes nothing, unless the range consists of whole pages (the last page of the mapping
        counts as whole): rounding inwards would leave old bytes, rounding outwards would destroy a neighbour's.
        """
        self._check_range(offset, nbytes)
        end = offset + nbytes
        if offset % PAGE_BYTES or (end % PAGE_BYTES and end != self.nbytes):
            raise ValueError(f"can only discard whole pages of {PAGE_BYTES} bytes, got [{offset}, {end})")
        if nbytes:
            self._pages.madvise(mmap.MADV_DONTNEED, offset, nbytes)

    def shorten(self, nbytes: int) -> None:
        """Keep the first `nbytes` only; the rest stays mapped for views of it, and unused."""
        self._check_range(0, nbytes)
        self.nbytes = nbytes

    def _check_range(self, offset: int, nbytes: int) -> None:
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise ValueError(f"bytes [{offset}, {offset + nbytes}) are not within the {self.nbytes} of the mapping")
