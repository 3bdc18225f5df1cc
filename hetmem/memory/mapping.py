"""Host memory in whole pages, straight from the kernel: what O_DIRECT, page-locking and huge pages all need.

Knows pages and bytes. Must not know torch, pools, chunks or files.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap

import numpy as np

from hetmem.base.units import MIB, format_size
from hetmem.errors import CapacityError
from hetmem.memory import numa

PAGE_BYTES = mmap.PAGESIZE

# Below this a huge page would be mostly padding (its size is 2 MiB on x86-64 and on most arm64).
_HUGE_PAGE_BYTES = 2 * MIB


def address_of(memory: memoryview) -> int:
    """Address of the first byte of `memory` (contiguous, not empty; it may be read-only)."""
    if memory.readonly:
        address: int = np.frombuffer(memory, dtype=np.uint8).__array_interface__["data"][0]
        return address
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))  # a fifth of the time, for each transfer


class Mapping:
    """`nbytes` of private, page-aligned, zeroed memory that belongs to no file.

    Nothing is touched on creation: a page costs memory, and the time of its first touch (0.5 to 3 s per GiB), when it
    is first written. The memory is given back when the mapping and every view of it are gone; there is no `close`, so
    a view cannot dangle. Large mappings ask for huge pages, which make disk transfers and updates 1.2 times faster.
    """

    __slots__ = ("_pages", "address", "nbytes")

    def __init__(self, nbytes: int) -> None:
        """Raises ValueError for `nbytes` below 1 and `CapacityError` when the address space has no room."""
        if nbytes < 1:
            raise ValueError(f"a mapping needs at least 1 byte, got {nbytes}")
        try:
            # mmap's default, MAP_SHARED, is backed by shmem: that gets no huge pages.
            self._pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            raise CapacityError(
                f"cannot map {nbytes} bytes ({format_size(nbytes)}) of host memory: {error}. Lower the host budget, "
                "or raise the limit of address space (ulimit -v)"
            ) from error
        if nbytes >= _HUGE_PAGE_BYTES:
            with contextlib.suppress(OSError):  # a kernel built without huge pages: only slower
                self._pages.madvise(mmap.MADV_HUGEPAGE)
        self.nbytes = nbytes
        self.address = address_of(memoryview(self._pages))

    def buffer(self, offset: int, nbytes: int) -> memoryview:
        """Writable bytes [offset, offset + nbytes), valid for as long as the view lives.

        Raises ValueError when the range leaves the mapping.
        """
        self._check_range(offset, nbytes)
        return memoryview(self._pages)[offset : offset + nbytes]

    def prefer_node(self, node: int) -> bool:
        """Let pages that are touched from now on come from the NUMA node `node`, as long as it has free ones; False
        where the system refuses. Those touched before stay where they are."""
        return numa.prefer(self.address, self.nbytes, node)

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

    def _check_range(self, offset: int, nbytes: int) -> None:
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise ValueError(f"bytes [{offset}, {offset + nbytes}) are not within the {self.nbytes} of the mapping")
