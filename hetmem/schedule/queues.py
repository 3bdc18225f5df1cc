"""Turns of updates, for run and plan alike. Pure: numbers only.

Note "turns": updates of chunks that were queued go in the order in which the next forward wants their weights, and not
in that of their gradients, which is the opposite. What a step leaves undone is wanted late then, and a forward does not
wait for all of it at its first layer. The order changes no bits: each update is of its chunk alone.
"""

from __future__ import annotations

from bisect import insort_left
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")

AT_ONCE = 3
"""Updates opening or running together: while one is computed, the next ones are brought."""


class Turns(Generic[T]):
    """What waits, the lowest `number` first, and of equal ones the first that came. One that is waited for goes before
    all others."""

    def __init__(self, number: Callable[[T], int]) -> None:
        self._number = number
        self._waiting: list[T] = []  # the next one last
        self._hastened: int | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[T]:
        """In the order of their numbers."""
        return reversed(self._waiting)

    def add(self, one: T) -> None:
        """`one` waits. O(number of those that do)."""
        insort_left(self._waiting, one, key=lambda other: -self._number(other))

    def hasten(self, number: int) -> None:
        """Somebody waits for those with `number`: if any wait here, they are next, as soon as they are ready."""
        if any(self._number(one) == number for one in self._waiting):
            self._hastened = number

    def next(self, ready: Callable[[T], bool]) -> T | None:
        """Whose turn it is among those that are `ready`; None if none is."""
        first = None
        for one in self:
            hastened = self._number(one) == self._hastened
            if (first is None or hastened) and ready(one):
                first = one
                if hastened or self._hastened is None:
                    break
        return first

    def take(self, one: T) -> T:
        """`one` waits no more; returns it."""
        self._waiting.remove(one)
        if self._number(one) == self._hastened:
            self._hastened = None
        return one

    def pop(self) -> T:
        """Whichever waits no more. Raises `IndexError` if none does."""
        return self._waiting.pop()
