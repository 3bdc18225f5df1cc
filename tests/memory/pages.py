"""Which pages of a store's file are in the page cache."""

from __future__ import annotations

import ctypes
import mmap

from tests.memory.tested import BLOCK_BYTES, Extent, NvmeStore, address_of


def cached_blocks(store: NvmeStore, extent: Extent) -> list[int]:
    """The numbers of the blocks of `extent` that are."""
    resident = (ctypes.c_ubyte * (extent.nbytes // mmap.PAGESIZE))()
    start = ctypes.c_void_p(address_of(memoryview(store._files[0].pages)) + extent.offset)
    assert ctypes.CDLL(None, use_errno=True).mincore(start, ctypes.c_size_t(extent.nbytes), resident) == 0
    pages = extent.nbytes // BLOCK_BYTES
    return [block for block in range(pages) if resident[block * BLOCK_BYTES // mmap.PAGESIZE] & 1]
