"""The memory of a group: one file without a name that all its ranks map, with their words and one copy of all homes.

Each rank maps it twice: shared, for hetmem, and private, for the program. The program reads homes through the private
mapping; a page that it writes there becomes its own, and leaves the home as it is. When the last process has ended, or
dropped its mappings, the memory is gone.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import weakref
import zlib
from collections.abc import Iterator

import numpy as np

from hetmem.base.units import format_size
from hetmem.errors import CapacityError, ManageError
from hetmem.memory.host_memory import PAGE_BYTES, HostPool, Loan, Mapping, address_of
from hetmem.ranks.words import Words

_MAP_NORESERVE = 0x4000
_FILE_PAGE, _THERE = np.uint64(1 << 61), np.uint64(3 << 62)
"""Bits of /proc/self/pagemap: a page of a file, and one in memory or in swap."""


def make_file() -> int:
    """Return the descriptor of a new file without a name, in memory."""
    return os.memfd_create("hetmem", os.MFD_CLOEXEC)


def open_file(process: int, descriptor: int) -> int:
    """Return a descriptor of the file that `process` has as `descriptor`. Raises OSError."""
    return os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)


class SharedMapping(Mapping):
    """The homes in the file `descriptor`, behind the first `skipped` bytes, shared with other processes."""

    __slots__ = ("_private", "_skipped", "private_address")

    def __init__(self, descriptor: int, skipped: int, nbytes: int) -> None:
        """Map `nbytes`, whole pages. Raises `CapacityError` when the system refuses."""
        try:
            self._pages = mmap.mmap(descriptor, nbytes, offset=skipped)
            self._private = mmap.mmap(descriptor, nbytes, flags=mmap.MAP_PRIVATE | _MAP_NORESERVE, offset=skipped)
        except (OSError, OverflowError) as error:
            raise CapacityError(
                f"cannot map {format_size(nbytes)} of host memory twice, for a group of ranks: {error}. Lower "
                f"Budget(host=…), or allow it (vm.overcommit_memory, ulimit -v)"
            ) from error
        self.nbytes = nbytes
        self.address = address_of(memoryview(self._pages))
        self.private_address = address_of(memoryview(self._private))

    def private(self, memory: memoryview) -> memoryview:
        """Return `memory` of this mapping as the program sees it."""
        start = address_of(memory) - self.address
        self._check_range(start, memory.nbytes)
        return memoryview(self._private)[start : start + memory.nbytes]

    def written(self) -> list[int]:
        """Return the offsets of the pages that this process has written privately. Raises `ManageError` where the
        system does not say."""
        page = mmap.PAGESIZE
        try:
            with open("/proc/self/pagemap", "rb", buffering=0) as pages:
                pages.seek(self.private_address // page * 8)
                entries = np.frombuffer(pages.read(self.nbytes // page * 8), np.uint64)
        except OSError as error:
            raise ManageError(
                f"a group of ranks needs /proc/self/pagemap, to see what a program writes: {error}"
            ) from error
        private = ((entries & _THERE) != 0) & ((entries & _FILE_PAGE) == 0)
        return [int(at) * page for at in np.flatnonzero(private)]

    def drop_written(self, offset: int) -> int:
        """Show the home again in the private page at `offset`; return the offset of the first byte that differed, or of
        the page."""
        place = slice(offset, offset + mmap.PAGESIZE)
        mine, home = (np.frombuffer(pages, np.uint8)[place] for pages in (self._private, self._pages))
        first = offset + int((mine != home).argmax())
        self._private.madvise(mmap.MADV_DONTNEED, offset, mmap.PAGESIZE)
        return first

    def keep_from_children(self) -> None:
        """Leave this memory out of forked processes, also what the program sees of it."""
        super().keep_from_children()
        with contextlib.suppress(OSError):
            self._private.madvise(mmap.MADV_DONTFORK)

    def share_with_children(self) -> None:
        """End `keep_from_children`."""
        super().share_with_children()
        with contextlib.suppress(OSError):
            self._private.madvise(mmap.MADV_DOFORK)


class SharedPool(HostPool):
    """The homes of a group, of at most `capacity_bytes` in all, in `mapping`. Each is reserved once, by the first rank
    that asks for it, and has one place for all ranks, in whatever order they ask."""

    mapping: SharedMapping

    def __init__(self, capacity_bytes: int, mapping: SharedMapping, words: Words, descriptor: int) -> None:
        self._words, self._descriptor = words, descriptor
        weakref.finalize(self, os.close, descriptor)
        super().__init__(capacity_bytes, mapping)

    @property
    def reserved_bytes(self) -> int:
        """Bytes of all homes of the group."""
        return int(self._words.home_bytes[0])

    @reserved_bytes.setter
    def reserved_bytes(self, nbytes: int) -> None:
        self._words.home_bytes[0] = max(nbytes, self.reserved_bytes)  # another rank may have begun

    def reserve_home(self, chunk: int, role: str, nbytes: int) -> memoryview:
        """Return the memory of the home of `role` of `chunk`, of `nbytes`. Raises `CapacityError`."""
        words, key = self._words, zlib.crc32(role.encode())
        with self._locked():
            table = words.table[: int(words.table_rows[0])]
            for number, kind, offset, size in table:
                if (number, kind) == (chunk, key):
                    assert size == nbytes, f"{role} of chunk {chunk} has {size} bytes, not {nbytes}"
                    return self.mapping.buffer(int(offset), nbytes)
            offset = self.reserved_bytes
            memory = self.reserve(nbytes)  # checks, and rounds up to a piece
            start = address_of(memory) - self.mapping.address
            words.table[len(table)] = chunk, key, start, nbytes
            words.table_rows[0] = len(table) + 1
        return memory

    def lend(self, nbytes: int, leave_bytes: int = 0, apart_bytes: int = 0) -> Loan | None:
        """Return None: the memory of a group has homes only."""
        return None

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        fcntl.lockf(self._descriptor, fcntl.LOCK_EX, PAGE_BYTES)
        try:
            yield
        finally:
            fcntl.lockf(self._descriptor, fcntl.LOCK_UN, PAGE_BYTES)
