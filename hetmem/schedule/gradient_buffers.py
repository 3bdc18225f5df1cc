"""Places of a few sizes that are lent: who gets which. A run and its simulation both ask here. Pure: bytes only."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable

_CHUNKS = 6
"""Chunks whose streamed gradients have a home at a time: some arrive, two are computed with, some wait for that."""


def set_aside(sizes: Iterable[int], free_bytes: int) -> tuple[int, ...]:
    """The bytes of each place for gradients of chunks of `sizes`: those of the largest ones, as far as `free_bytes` of
    host memory go."""
    found: list[int] = []
    for nbytes in sorted(sizes, reverse=True)[:_CHUNKS]:
        if sum(found) + nbytes <= free_bytes:
            found.append(nbytes)
    return tuple(found)


class Lending:
    """Places of so many bytes each. Whoever asks gets the smallest one that is large enough and that nobody has."""

    def __init__(self, sizes: Iterable[int] = ()) -> None:
        self._free = sorted(sizes)
        self._largest = max(self._free, default=0)

    def add(self, nbytes: int) -> None:
        """There is one more place, of `nbytes`."""
        self._largest = max(self._largest, nbytes)
        self.give(nbytes)

    @property
    def free_bytes(self) -> int:
        """Of all places that nobody has."""
        return sum(self._free)

    def lends(self, nbytes: int) -> bool:
        """Whether there is a place for `nbytes` at all, whoever has it."""
        return nbytes <= self._largest

    def take(self, nbytes: int) -> int | None:
        """A place for `nbytes`: its own bytes; None if all that are large enough are taken."""
        at = bisect_left(self._free, nbytes)
        return self._free.pop(at) if at < len(self._free) else None

    def give(self, nbytes: int) -> None:
        """Nobody has a place of `nbytes` any more."""
        insort(self._free, nbytes)
