"""Which pages of a private mapping a process has written, and has a copy of its own of.

`PAGEMAP_SCAN` (Linux 6.7 on) skips what the process has never touched. Older kernels say 8 bytes a page.
Source: Documentation/admin-guide/mm/pagemap.rst of Linux.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from functools import lru_cache
from io import FileIO

import numpy as np

_PAGEMAP_SCAN = 0xC0606610  # _IOWR('f', 16, struct pm_scan_arg)
_IS_FILE, _IS_PRESENT, _IS_SWAPPED = 1 << 2, 1 << 3, 1 << 4
_FILE_PAGE, _THERE = np.uint64(1 << 61), np.uint64(3 << 62)
"""Bits of an entry of /proc/self/pagemap: a page of a file, and one in memory or in swap."""
_RUNS = 512


def own_pages(address: int, count: int, most_runs: int | None = None) -> list[int]:
    """Return which of the `count` pages from `address` on are the process's own, by number; all of them, where the
    system does not say. With `most_runs` those of the first so many runs of adjacent pages are enough."""
    try:
        pagemap = _pagemap(os.getpid())
    except OSError:
        return [*range(count)]
    try:
        return _scanned(pagemap, address, count, most_runs)
    except OSError:
        return _listed(pagemap, address, count)


@lru_cache(maxsize=1)
def _pagemap(process: int) -> FileIO:
    """Return the page map of this `process`; in one that was forked it would be that of the parent."""
    return open("/proc/self/pagemap", "rb", buffering=0)


class _PageRun(ctypes.Structure):
    _fields_ = [("start", ctypes.c_uint64), ("end", ctypes.c_uint64), ("categories", ctypes.c_uint64)]


class _Scan(ctypes.Structure):
    """`struct pm_scan_arg`."""

    _fields_ = [
        (name, ctypes.c_uint64)
        for name in "size flags start end walk_end vec vec_len max_pages inverted mask anyof_mask return_mask".split()
    ]


def _scanned(pagemap: FileIO, address: int, count: int, most_runs: int | None) -> list[int]:
    runs = (_PageRun * (most_runs or _RUNS))()
    at, end, found = address, address + count * mmap.PAGESIZE, list[int]()
    while at < end:
        asked = _Scan(size=ctypes.sizeof(_Scan), start=at, end=end, vec=ctypes.addressof(runs), vec_len=len(runs))
        asked.inverted, asked.mask, asked.anyof_mask = _IS_FILE, _IS_FILE, _IS_PRESENT | _IS_SWAPPED
        asked.return_mask = _IS_PRESENT | _IS_SWAPPED
        filled = fcntl.ioctl(pagemap, _PAGEMAP_SCAN, asked)
        for run in runs[:filled]:
            found += range((run.start - address) // mmap.PAGESIZE, (run.end - address) // mmap.PAGESIZE)
        if most_runs is not None and filled:
            break
        at = asked.walk_end
    return found


def _listed(pagemap: FileIO, address: int, count: int) -> list[int]:
    try:
        listed = os.pread(pagemap.fileno(), 8 * count, address // mmap.PAGESIZE * 8)
    except OSError:
        return [*range(count)]
    entries = np.frombuffer(listed, np.uint64)
    if len(entries) < count:
        return [*range(count)]
    return [*map(int, np.flatnonzero(((entries & _THERE) != 0) & ((entries & _FILE_PAGE) == 0)))]
