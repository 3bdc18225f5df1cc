"""Lends parts of a range of bytes, from its end downward, while what is permanent grows from its begin upward.

Pure numbers: it knows no memory.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque

from hetmem.base.units import round_down, round_up


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
    def lowest(self) -> int:
        """Where the lowest span that is lent begins; the end of the range if none is."""
        self._settle()
        return self._lowest

    @property
    def lent_bytes(self) -> int:
        """What is lent now."""
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
