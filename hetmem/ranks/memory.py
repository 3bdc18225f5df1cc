"""The memory of a group: one file without a name that all its ranks map, with their words and one copy of all homes;
behind it, if it has a drive, a file there, for those that host memory has no room for.

Each rank maps it twice: shared, for hetmem, and private, for the program. The program reads homes through the private
mapping; a page that it writes there becomes its own, and leaves the home as it is. When the last process has ended, or
dropped its mappings, the memory is gone.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import mmap
import os
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby

import numpy as np

from hetmem.base.units import format_size, round_up
from hetmem.errors import CapacityError
from hetmem.memory.host_memory import PAGE_BYTES, HostPool, Loan, Mapping, address_of
from hetmem.ranks.own_pages import own_pages
from hetmem.ranks.words import Words

_MAP_NORESERVE, _MAP_FIXED = 0x4000, 0x10


def make_file() -> int:
    """Return the descriptor of a new file without a name, in memory."""
    return os.memfd_create("hetmem", os.MFD_CLOEXEC)


def open_file(process: int, descriptor: int) -> int:
    """Return a descriptor of the file that `process` has as `descriptor`. Raises OSError."""
    return os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)


FilePart = tuple[int, int, int]
"""A descriptor, an offset and a number of bytes; the last two are whole pages."""


def _map(parts: Sequence[FilePart], flags: int) -> mmap.mmap:
    """Map `parts`, one behind the other. Raises OSError."""
    if len(parts) == 1:
        descriptor, offset, nbytes = parts[0]
        return mmap.mmap(descriptor, nbytes, flags=flags, offset=offset)
    whole = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    pages = mmap.mmap(-1, sum(nbytes for *_, nbytes in parts), flags=whole)  # its end unmaps all
    at = address_of(memoryview(pages))
    system = ctypes.CDLL(None, use_errno=True).mmap
    system.restype, system.argtypes = ctypes.c_ssize_t, [ctypes.c_size_t] * 2 + [ctypes.c_int] * 3 + [ctypes.c_int64]
    for descriptor, offset, nbytes in parts:
        if system(at, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags | _MAP_FIXED, descriptor, offset) == -1:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        at += nbytes
    return pages


class SharedMapping(Mapping):
    """The homes in the file `descriptor`, behind the first `skipped` bytes, shared with other processes; behind them
    the whole of another file, if `drive` has a descriptor and bytes."""

    __slots__ = ("_private", "_skipped", "private_address")

    def __init__(self, descriptor: int, skipped: int, nbytes: int, drive: tuple[int, int] | None = None) -> None:
        """Map `nbytes`, whole pages. Raises `CapacityError` when the system refuses."""
        parts = [(descriptor, skipped, nbytes)] + ([] if drive is None else [(drive[0], 0, drive[1])])
        try:
            self._pages = _map(parts, mmap.MAP_SHARED)
            self._private = _map(parts, mmap.MAP_PRIVATE | _MAP_NORESERVE)
        except (OSError, OverflowError) as error:
            raise CapacityError(
                f"cannot map {format_size(nbytes)} of host memory twice, for a group of ranks: {error}. Lower "
                f"Budget(host=…), or allow it (vm.overcommit_memory, ulimit -v)"
            ) from error
        with contextlib.suppress(OSError):  # a kernel without huge pages of shared memory: only slower
            self._pages.madvise(mmap.MADV_HUGEPAGE)
        self.nbytes, self.memory_nbytes = sum(size for *_, size in parts), nbytes
        self.address = address_of(memoryview(self._pages))
        self.private_address = address_of(memoryview(self._private))

    def private(self, memory: memoryview) -> memoryview:
        """Return `memory` of this mapping as the program sees it."""
        start = address_of(memory) - self.address
        self._check_range(start, memory.nbytes)
        return memoryview(self._private)[start : start + memory.nbytes]

    def is_written(self, memory: memoryview) -> bool:
        """Return whether the program may have written to `memory`, whole pages of this mapping, privately."""
        start = address_of(memory) - self.address
        return bool(own_pages(self.private_address + start, -(-memory.nbytes // mmap.PAGESIZE), most_runs=1))

    def written(self, *spans: tuple[int, int]) -> list[int]:
        """Return the numbers of the pages, within `spans` (first byte and number of bytes), that this process has
        written privately and that differ from the home; those that do not show it again."""
        size, found = mmap.PAGESIZE, list[int]()
        for start, nbytes in spans:
            found += (start // size + page for page in own_pages(self.private_address + start, -(-nbytes // size)))
        places = [slice(page * size, (page + 1) * size) for page in found]
        differ = [page for page, at in zip(found, places, strict=True) if self._private[at] != self._pages[at]]
        self.show_home(set(found).difference(differ))
        return differ

    def hash_of(self, page: int) -> int:
        """Return a hash of what the program sees in `page`, of 63 bits and not 0."""
        digest = hashlib.blake2b(self.seen(page), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1 or 1

    def seen(self, page: int) -> memoryview:
        """Return what the program sees in `page`."""
        return memoryview(self._private)[page * mmap.PAGESIZE : (page + 1) * mmap.PAGESIZE]

    def first_difference(self, page: int) -> int:
        """Return the first byte of `page` that the program has written with another value than it has at home."""
        seen, home = (np.frombuffer(memory, np.uint8) for memory in (self.seen(page), self._home(page)))
        return int((seen != home).argmax())

    def bring_home(self, pages: Iterable[int]) -> None:
        """Copy what the program has written in `pages` to the home."""
        for page in pages:
            self._home(page)[:] = self.seen(page)

    def show_home(self, pages: Iterable[int]) -> None:
        """Show the home in `pages` again."""
        for first, count in _runs(sorted(pages)):
            self._private.madvise(mmap.MADV_DONTNEED, first * mmap.PAGESIZE, count * mmap.PAGESIZE)

    def _home(self, page: int) -> memoryview:
        return memoryview(self._pages)[page * mmap.PAGESIZE : (page + 1) * mmap.PAGESIZE]

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


def _runs(pages: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yield the first number, and the count, of each run of adjacent `pages`, which are sorted."""
    for _, run in groupby(enumerate(pages), key=lambda found: found[1] - found[0]):
        numbers = [page for _, page in run]
        yield numbers[0], len(numbers)


class SharedPool(HostPool):
    """The homes of a group, of at most `capacity_bytes` in all, in `mapping`. Each is reserved once, by the first rank
    that asks for it, and has one place for all ranks, in whatever order they ask."""

    mapping: SharedMapping

    def __init__(self, capacity_bytes: int, mapping: SharedMapping, words: Words, descriptor: int) -> None:
        self._words, self._descriptor, self._count = words, descriptor, len(words.signs)
        self._own = HostPool(capacity_bytes // self._count)
        weakref.finalize(self, os.close, descriptor)
        self._asked_bytes = self._staging_bytes = 0
        super().__init__(capacity_bytes, mapping)

    @property
    def free_bytes(self) -> int:
        """Bytes that may still be reserved, beside the homes that this rank has asked for: others, of which another
        rank may have some already, are the same."""
        return self._reserved_up_to() - self._asked_bytes - self._staging_bytes

    @property
    def reserved_bytes(self) -> int:
        """Bytes of all homes of the group."""
        return int(self._words.home_bytes[0])

    @reserved_bytes.setter
    def reserved_bytes(self, nbytes: int) -> None:
        self._words.home_bytes[0] = max(nbytes, self.reserved_bytes)  # another rank may have begun

    @property
    def peak_bytes(self) -> int:
        """The most bytes that homes of the group, none of which is given back, and staging of all ranks took."""
        return self.reserved_bytes + self._staging_bytes

    @peak_bytes.setter
    def peak_bytes(self, nbytes: int) -> None:
        pass  # the words have it

    def reserve_home(self, chunk: int, role: str, nbytes: int) -> memoryview:
        """Return the memory of the home of `role` of `chunk`, of `nbytes`. Raises `CapacityError`."""

        def reserve() -> int:
            return address_of(self.reserve(nbytes)) - self.mapping.address  # checks, and rounds up to a piece

        self._asked_bytes += round_up(nbytes, PAGE_BYTES)
        return self.mapping.buffer(self.place_of(chunk, role, nbytes, reserve), nbytes)

    def place_of(self, chunk: int, role: str, nbytes: int, reserve: Callable[[], int]) -> int:
        """Return the first byte, in the mapping, of the home of `role` of `chunk`, of `nbytes`: the first rank that
        asks has it from `reserve()`."""
        words, key = self._words, zlib.crc32(role.encode())
        with self._locked():
            table = words.table[: int(words.table_rows[0])]
            for number, kind, offset, size in table:
                if (number, kind) == (chunk, key):
                    assert size == nbytes, f"{role} of chunk {chunk} has {size} bytes, not {nbytes}"
                    return int(offset)
            start = reserve()
            words.table[len(table)] = chunk, key, start, nbytes
            words.table_rows[0] = len(table) + 1
        return start

    def written(self) -> list[int]:
        """Return the numbers of the pages of homes that the program of this rank has written."""
        return self.mapping.written((0, self.reserved_bytes), (self.capacity_bytes, int(self._words.drive_bytes[0])))

    def reserve_staging(self, slot_bytes: int, slots: int) -> None:
        """Reserve staging of this rank's own; that of all ranks is a part of the group's memory."""
        self._own.reserve_staging(slot_bytes, slots)
        self.slot_bytes, self._staging_bytes = slot_bytes, self._count * slot_bytes * slots

    def staged(self, slot: int, nbytes: int) -> memoryview:
        """Return `nbytes` of this rank's own memory that start at staging slot `slot`."""
        return self._own.staged(slot, nbytes)

    def lend(self, nbytes: int, leave_bytes: int = 0, apart_bytes: int = 0) -> Loan | None:
        """Lend memory of this rank's own, of its part of what homes leave, as `HostPool.lend` does."""
        return self._own.lend(nbytes, self._own.capacity_bytes - self._share_bytes(leave_bytes), apart_bytes)

    def loan_room_bytes(self, leave_bytes: int) -> int:
        """Return what this rank may be lent beside `leave_bytes` that the group reserves."""
        return max(0, self._share_bytes(leave_bytes) - self._own.lent_bytes)

    @property
    def lent_bytes(self) -> int:
        """Bytes that `lend` has handed out to this rank."""
        return self._own.lent_bytes

    def _share_bytes(self, leave_bytes: int) -> int:
        beside = self.reserved_bytes + self._staging_bytes + leave_bytes
        return max(0, self.capacity_bytes - beside) // self._count

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        fcntl.lockf(self._descriptor, fcntl.LOCK_EX, PAGE_BYTES)
        try:
            yield
        finally:
            fcntl.lockf(self._descriptor, fcntl.LOCK_UN, PAGE_BYTES)
