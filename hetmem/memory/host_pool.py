"""Pinned host memory: one page-aligned mapping, cut into permanent homes, loans, and the slots of a staging ring.

Here is how it is page-locked too: registered with the CUDA driver in pieces. It hands out bytes and keeps to its
capacity; it does not know what is in them, nor torch's allocator.
"""

from __future__ import annotations

import os
from bisect import bisect_left, insort
from collections import deque
from typing import Any

from hetmem.base.threads import process_ends
from hetmem.base.units import format_size, round_down, round_up
from hetmem.errors import CapacityError
from hetmem.memory.mapping import Mapping
from hetmem.schedule.placement import PIECE_BYTES


class Spans:
    """The bytes [`start`, `end`) of a range, lent in multiples of `unit`; a span crosses no multiple of `piece`, unless
    it is larger. `give_back` is safe on any thread, also within a garbage collection; `take` is for one thread."""

    def __init__(self, end: int, unit: int, piece: int) -> None:
        self._end = round_down(end, unit)
        self._unit, self._piece = unit, piece
        self._free: list[tuple[int, int]] = []
        """Begin and end of what was given back and has lent spans below it, sorted."""
        self._lowest = self._end
        """No span begins below."""
        self._lent: dict[int, int] = {}
        self._given: deque[int] = deque()

    @property
    def end(self) -> int:
        """Where the range ends."""
        return self._end

    @property
    def lowest(self) -> int:
        """Return where the lowest span that is lent begins; the end of the range if none is."""
        self._settle()
        return self._lowest

    @property
    def lent_bytes(self) -> int:
        """Return what is lent now."""
        self._settle()
        return self._end - self._lowest - sum(end - start for start, end in self._free)

    def take(self, nbytes: int, start: int) -> int | None:
        """Return where `nbytes` at or above `start` are lent from now on; None if no such span is free."""
        self._settle()
        size = round_up(max(1, nbytes), self._unit)
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
        """Return the highest place for `size` bytes within [begin, end), or None."""
        at = round_down(end - size, self._unit)
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


_PORTABLE = 1  # cudaHostRegisterPortable: page-locked for every GPU


class PageLocks:
    """The pieces of `host` that are page-locked, until `end` is called.

    `cudart` has `cudaHostRegister(address, nbytes, flags)` and `cudaHostUnregister(address)`, which return an error
    code. `piece_bytes`: the most that is registered in one call. `error` is the first code other than 0; pieces
    registered before it stay so.
    """

    def __init__(self, cudart: Any, host: Mapping, piece_bytes: int) -> None:
        self._cudart, self._host, self._process = cudart, host, os.getpid()  # holds the memory until it is unregistered
        self.pieces: list[range] = []
        self.error = 0
        for start in range(host.address, host.address + host.nbytes, piece_bytes):
            piece = range(start, min(start + piece_bytes, host.address + host.nbytes))
            error = cudart.cudaHostRegister(piece.start, len(piece), _PORTABLE)
            self.error = int(getattr(error, "value", error))  # torch's own enumeration, which need not be a number
            if self.error:
                break
            self.pieces.append(piece)

    @property
    def nbytes(self) -> int:
        """Return the bytes that are page-locked."""
        return sum(map(len, self.pieces))

    def end(self) -> None:
        """Unregister all pieces, which waits for the driver. In a forked child, which has none of its state, and at the
        end of the process, which is that of page-locking too, it does nothing."""
        if process_ends():
            _LEFT.append(self)
        elif os.getpid() == self._process:
            while self.pieces:
                self._cudart.cudaHostUnregister(self.pieces.pop().start)


_LEFT: list[PageLocks] = []
"""What the end of the process unregisters, with its memory."""

PAGE_BYTES = 4096


class Loan:
    """`memory` of a `HostPool`, which has it back when this is dropped, on any thread."""

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
        """The most that was reserved and lent at one time."""
        self.for_loans_bytes = 0
        """So much at the end is never reserved."""
        self.mapping = mapping or Mapping(max(PAGE_BYTES, self.capacity_bytes))
        self.mapping.keep_from_children()
        self._staging_offset = 0
        self.slot_bytes = 0  # of staging
        self._spans = Spans(self.capacity_bytes, PAGE_BYTES, PIECE_BYTES)

    @property
    def free_bytes(self) -> int:
        """Return what may still be reserved."""
        return self._reserved_up_to() - self.reserved_bytes

    def _reserved_up_to(self) -> int:
        return min(self._spans.lowest, self.capacity_bytes - self.for_loans_bytes)

    @property
    def lent_bytes(self) -> int:
        """Return what `lend` has handed out."""
        return self._spans.lent_bytes

    def loan_room_bytes(self, leave_bytes: int) -> int:
        """Return what may be lent beside `leave_bytes` that are to be reserved, in however many pieces."""
        return self.capacity_bytes - self._first_loan(leave_bytes) - self.lent_bytes

    def _first_loan(self, leave_bytes: int) -> int:
        start = round_up(self.reserved_bytes + leave_bytes, PAGE_BYTES)
        return max(self.reserved_bytes, min(start, self.capacity_bytes - self.for_loans_bytes))

    def lend(self, nbytes: int, leave_bytes: int = 0, apart_bytes: int = 0) -> Loan | None:
        """Lend page-aligned memory for a while, and leave `leave_bytes` to be reserved, and `apart_bytes` beside them
        to other loans; None if there is no room."""
        at = self._spans.take(nbytes, round_up(self._first_loan(leave_bytes) + apart_bytes, PAGE_BYTES))
        if at is None:
            return None
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
        """Set `slots` slots of `slot_bytes` (whole pages) aside for staging; once."""
        self._staging_offset = self.reserved_bytes
        self.slot_bytes = slot_bytes
        if slots:
            self.reserve(slot_bytes * slots)

    def staged(self, slot: int, nbytes: int) -> memoryview:
        """Return `nbytes` of memory from staging slot `slot` on."""
        return self.mapping.buffer(self._staging_offset + slot * self.slot_bytes, nbytes)
