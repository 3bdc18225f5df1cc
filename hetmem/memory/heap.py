"""Has the C library return freed memory to the system: what its heap keeps is in no budget, and grows with the model.

glibc's `malloc` maps blocks of at least a threshold one by one, and unmaps them as they are freed. The threshold begins
at 128 KiB, and grows to the size of each mapped block that is freed, up to 32 MiB: later blocks of that size lie in the
heap. There an aligned block, as torch asks for, does not fit into the hole that one of its size has left, so that the
heap grows by blocks that come and go.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

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
