"""Gradients on their way home, for run and plan alike: which place they get, which go, who waits, which are written.

Pure: numbers and bytes only. Events come in (a backward begins, a gradient is made, one has arrived), commands go out;
threads and streams carry them out in a run, a clock in a plan.

Note "order": gradients are sent in the order in which autograd makes them. The end of one frees bytes and wakes the
thread that waits for them; it sends none.

Note "writes of gradients": users find gradients at home when a backward is over, so each is written by then. Written
only where their place is wanted, and at the end, they leave the drive idle while the device computes. A write of
a chunk that gets more is made again, so the last one is waited for. Where updates begin in the backward nothing is
written early: what is written may go, and an update that comes later has to read it again.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable
from itertools import count
from typing import Generic, NamedTuple, Protocol, TypeVar

from hetmem.schedule.blocks import SMALL_BYTES

ChunkT = TypeVar("ChunkT", bound=Hashable)
OfChunkT = TypeVar("OfChunkT", contravariant=True)

_CHUNKS = 6
"""Chunks whose streamed gradients have a home at a time: some arrive, two are computed with, some wait for that."""


class Waiting(Protocol):
    """What a thread that needs memory can do, on threads or on a clock."""

    def poll(self) -> None:
        """Take note of what has ended meanwhile."""

    def pump(self) -> None:
        """Have updates go on as far as that needs no waiting."""

    def busy(self) -> bool:
        """Whether anything is under way that `wait_for_one` can wait for."""

    def wait_for_one(self) -> None:
        """Wait until one transfer, or update, has ended."""

    def make_way(self, *, again: bool) -> bool:
        """Have updates let go of memory that they hold and do not use yet; False if there is none, or if they have let
        go `again` and again in one wait while none had all its memory."""


def wait_until(waiting: Waiting, reached: Callable[[], bool]) -> bool:
    """Wait until `reached()`; False if nothing is under way and no memory that updates let go of brings it about.

    Updates run as far as they can before they are asked for memory, and are asked again only once something has ended:
    what they let go of and nothing else takes would be theirs again, without end.
    """
    made_way = asked = False
    while not reached():
        waiting.pump()
        if waiting.busy():
            waiting.wait_for_one()
            made_way = False
        elif made_way or not waiting.make_way(again=asked):
            return False
        else:
            made_way = asked = True
    return True


class Places(Protocol[OfChunkT]):
    """Memory for the gradients of a chunk."""

    def lend(self, chunk: OfChunkT) -> bool:
        """Give them a place that was set aside in host memory; False if all that are large enough are lent."""
        ...

    def may_lend(self, chunk: OfChunkT) -> bool:
        """Whether a place that was set aside is large enough, lent or not."""
        ...

    def give_own(self, chunk: OfChunkT) -> None:
        """Give them a home for good."""


class Send(NamedTuple):
    """Command: take a gradient, `nbytes` at home, there. The `number` says which in the order of issue."""

    number: int
    nbytes: int


class GradientSends(Generic[ChunkT]):
    """Decides for the gradients of one model. At most `most_bytes` are on their way home, or one gradient."""

    def __init__(self, waiting: Waiting, most_bytes: int) -> None:
        self._waiting, self._most_bytes = waiting, most_bytes
        self._numbers = count()
        self.on_their_way: Counter[ChunkT] = Counter()
        self._bytes = 0
        self.complete: Complete[ChunkT] = Complete()

    def send(self, chunk: ChunkT, nbytes: int) -> Send:
        """A gradient of `chunk` was made, of `nbytes` at home."""
        self.on_their_way[chunk] += 1
        self._bytes += nbytes
        return Send(next(self._numbers), nbytes)

    def at_once(self, nbytes: int) -> bool:
        """Whether the thread that made a gradient of `nbytes` copies it itself, if it can: a small one, behind none."""
        return nbytes < SMALL_BYTES and not self.on_their_way

    def arrived(self, chunk: ChunkT, send: Send) -> None:
        """`send`, of a gradient of `chunk`, is over."""
        self._bytes -= send.nbytes
        self.on_their_way[chunk] -= 1
        if not self.on_their_way[chunk]:
            del self.on_their_way[chunk]

    def arriving(self, chunk: ChunkT) -> bool:
        """Whether gradients of `chunk` are on their way."""
        return chunk in self.on_their_way

    def to_be_written(self, chunk: ChunkT) -> bool:
        """Whether all gradients of `chunk` that this backward has are in staging: then they are written to NVMe."""
        return chunk in self.complete and chunk not in self.on_their_way

    @property
    def under_way(self) -> bool:
        """Whether any gradient is on its way."""
        return bool(self.on_their_way)

    def wait_for_room(self) -> None:
        """Take note of those that have arrived, so that updates begin; wait while too many bytes are on their way."""
        self._waiting.poll()
        while self._bytes > self._most_bytes and self.on_their_way.total() > 1:
            self._waiting.wait_for_one()

    # ---- places ------------------------------------------------------------------------------------------------

    def find_place(self, chunk: ChunkT, places: Places[ChunkT]) -> None:
        """Gradients of `chunk`, which have no home of their own, begin to arrive: in memory that was set aside, which
        is waited for as long as anything is under way, or in a home of their own where no update will end (gradients of
        many chunks wait for their last one)."""
        lent = False

        def settled() -> bool:
            nonlocal lent
            lent = places.lend(chunk)
            return lent or not places.may_lend(chunk)

        self._waiting.poll()
        wait_until(self._waiting, settled)
        if not lent:
            places.give_own(chunk)


def set_aside(sizes: Iterable[int], free_bytes: int) -> tuple[int, ...]:
    """The bytes of each place for gradients of chunks of `sizes`: those of the largest ones, as far as `free_bytes` of
    host memory go."""
    found: list[int] = []
    for nbytes in sorted(sizes, reverse=True)[:_CHUNKS]:
        if sum(found) + nbytes <= free_bytes:
            found.append(nbytes)
    return tuple(found)


class Lending:
    """Lends places of so many bytes each: the smallest free one that is large enough."""

    def __init__(self, sizes: Iterable[int] = ()) -> None:
        self._free = sorted(sizes)
        self._largest = max(self._free, default=0)

    def add(self, nbytes: int) -> None:
        """Add a place of `nbytes`."""
        self._largest = max(self._largest, nbytes)
        self.give(nbytes)

    @property
    def free_bytes(self) -> int:
        """Sum of the bytes of all places that are free."""
        return sum(self._free)

    def lends(self, nbytes: int) -> bool:
        """Return whether any place, lent or free, is large enough for `nbytes`."""
        return nbytes <= self._largest

    def take(self, nbytes: int) -> int | None:
        """Lend a place for `nbytes` and return its own bytes; None if all that are large enough are lent."""
        at = bisect_left(self._free, nbytes)
        return self._free.pop(at) if at < len(self._free) else None

    def give(self, nbytes: int) -> None:
        """Take a place of `nbytes` back."""
        insort(self._free, nbytes)


class Complete(Generic[ChunkT]):
    """Knows the chunks of a backward to which no more gradients come."""

    def __init__(self) -> None:
        self._missing: dict[ChunkT, set[int]] = {}
        self._came_again: set[ChunkT] = set()

    def begin(self) -> None:
        """A backward begins: none has come."""
        self._missing.clear()

    def comes(self, chunk: ChunkT, parameter: int, awaited: Callable[[ChunkT], Collection[int]]) -> None:
        """A gradient of `parameter` is on its way to `chunk`, where one of each that is `awaited` comes, by whatever
        numbers."""
        missing = self._missing.get(chunk)
        if missing is None:
            missing = self._missing[chunk] = set(awaited(chunk))
        elif not missing:
            self._came_again.add(chunk)  # a backward has several of a parameter, and their number is unknown
        missing.discard(parameter)

    def __contains__(self, chunk: ChunkT) -> bool:
        """Whether no other gradient of `chunk` is expected in this backward."""
        return chunk in self._missing and not self._missing[chunk] and chunk not in self._came_again
