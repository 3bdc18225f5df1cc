"""Has the C library return freed memory to the system: what its heap keeps is in no budget, and grows with the model.

glibc's `malloc` maps blocks of at least a threshold one by one, and unmaps them as they are freed. The threshold begins
at 128 KiB, and grows to the size of each mapped block that is freed, up to 32 MiB: later blocks of that size lie in the
heap. There an aligned block, as torch asks for, does not fit into the hole that one of its size has left, so that the
heap grows by blocks that come and go.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from hetmem.base.config import sets_malloc
from hetmem.base.units import KIB, MIB

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h

MAPPED_BYTES = 128 * KIB
"""Blocks from this size on are mapped: where glibc begins, and all that musl knows."""
_TRIM_BYTES = 8 * MIB
"""The most bytes of smaller blocks that are freed until the heap is trimmed, which takes half a millisecond."""


def map_large_blocks() -> None:
    """Keep the threshold of `malloc` at its first value, in this process from now on: freed blocks of `MAPPED_BYTES` or
    more go back to the system at once. The `malloc` of another library is left as it is, and so is a threshold that
    the environment sets."""
    if sets_malloc():
        return
    _call("mallopt", _M_MMAP_THRESHOLD, MAPPED_BYTES)
    _call("mallopt", _M_TRIM_THRESHOLD, 2 * MAPPED_BYTES)  # as glibc sets it with the other


def trim() -> None:
    """Return whole pages of freed blocks in the heap to the system. They cost the time of a first touch again."""
    _call("malloc_trim", 0)


_MADV_WIPEONFORK, _MADV_KEEPONFORK = 18, 19  # Linux's; Python's mmap module names neither
_PAGE_MAP = Path("/proc/self/pagemap")
_IN_MEMORY_OR_SWAPPED = 62  # the two highest bits of a page's entry


def untouched(address: int, nbytes: int) -> range:
    """Return the addresses of the whole pages in [`address`, `address + nbytes`) if none of them was touched since it
    was mapped, so that all read zeros; else an empty range, also where the system cannot tell.

    The kernel's list of pages says so of memory that belongs to no file. That it belongs to none is told by advice that
    the kernel refuses for other memory, and that is taken back.
    """
    start, stop = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE, (address + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    nowhere = range(start, start)
    if start >= stop:
        return nowhere
    try:
        with _PAGE_MAP.open("rb", buffering=0) as pages:
            entries = os.pread(pages.fileno(), (stop - start) // mmap.PAGESIZE * 8, start // mmap.PAGESIZE * 8)
    except OSError:
        return nowhere
    known = len(entries) == (stop - start) // mmap.PAGESIZE * 8
    if not known or (np.frombuffer(entries, np.uint64) >> _IN_MEMORY_OR_SWAPPED).any():
        return nowhere
    if _advise(start, stop - start, _MADV_WIPEONFORK):
        return nowhere
    _advise(start, stop - start, _MADV_KEEPONFORK)
    return range(start, stop)


def _advise(address: int, nbytes: int, advice: int) -> int:
    return ctypes.CDLL(None).madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), advice)  # type: ignore[no-any-return]


@contextmanager
def trimmed() -> Iterator[None]:
    """Trim the heap behind the body, which takes and frees many small blocks, as a report does."""
    try:
        yield
    finally:
        trim()


class Freed:
    """Trims the heap each time that some MiB of blocks too small to be mapped have been freed."""

    def __init__(self) -> None:
        self._nbytes = 0

    def add(self, nbytes: int) -> None:
        """Note that a block of `nbytes` has been freed."""
        if nbytes < MAPPED_BYTES:
            self._nbytes += nbytes
            if self._nbytes >= _TRIM_BYTES:
                self._nbytes = 0
                trim()


def _call(name: str, *arguments: int) -> None:
    if (function := _function(name)) is not None:
        function(*arguments)


@cache
def _function(name: str) -> Callable[..., Any] | None:
    """Return the C library's function `name`, or None: musl has neither of these."""
    return getattr(ctypes.CDLL(None), name, None)
