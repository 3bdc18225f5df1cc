"""Turns of updates, buffers for gradients, and when the gradients of a chunk are complete: asked by run and plan alike.

Pure: numbers and bytes only.

Note "turns": updates of chunks that were queued go in the order in which the next forward wants their weights, and not
in that of their gradients, which is the opposite. What a step leaves undone is wanted late then, and a forward does not
wait for all of it at its first layer. The order changes no bits: each update is of its chunk alone.

Note "writes of gradients": users find gradients at home when a backward is over, so each is written by then. Written
only where their place is wanted, and at the end, they leave the drive idle while the device computes. A write of
a chunk that gets more is made again, so the last one is waited for. Where updates begin in the backward nothing is
written early: what is written may go, and an update that comes later has to read it again.
"""

from __future__ import annotations

from bisect import bisect_left, insort, insort_left
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
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


ChunkT = TypeVar("ChunkT", bound=Hashable)


class Complete(Generic[ChunkT]):
    """The chunks of a backward to which no more gradients come."""

    def __init__(self) -> None:
        self._missing: dict[ChunkT, set[int]] = {}
        self._came_again: set[ChunkT] = set()
        self._added_to: set[ChunkT] = set()

    def begin(self) -> None:
        """A backward begins: none has come."""
        self._missing.clear()

    def comes(self, chunk: ChunkT, parameter: int, awaited: Callable[[ChunkT], Collection[int]], *, adds: bool) -> None:
        """A gradient of `parameter` is on its way to `chunk`, where one of each that is `awaited` comes, by whatever
        numbers; it `adds` to what an earlier backward has left."""
        if adds:
            self._added_to.add(chunk)
        elif chunk in self._added_to:
            return  # the next backward will want what this one leaves
        missing = self._missing.get(chunk)
        if missing is None:
            missing = self._missing[chunk] = set(awaited(chunk))
        elif not missing:
            self._came_again.add(chunk)  # a backward has several of a parameter, and nobody knows how many
        missing.discard(parameter)

    def __contains__(self, chunk: ChunkT) -> bool:
        """Whether no other gradient of `chunk` is expected in this backward."""
        return chunk in self._missing and not self._missing[chunk] and chunk not in self._came_again
