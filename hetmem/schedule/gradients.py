"""Decides for gradients in flight to their homes, in a run and a plan: their memory, their order, who waits, and when
they are written.

Pure: numbers and bytes only. Events come in (a backward begins, a gradient is made, one has arrived), commands go out;
threads and streams carry them out in a run, a clock in a plan.

Note "order": gradients are sent in the order in which autograd makes them. The end of a transfer frees bytes and wakes
the thread that waits for them; it starts no other transfer.

Note "writes of gradients": gradients must be at home when a backward ends, so each is written to NVMe by then. Writing
them only when their staging slots are needed, and at the end, would leave the drive idle while the device computes. A
chunk that gets another gradient is written again, so a write waits for the chunk's last gradient. If updates begin in
the backward, nothing is written early: a written gradient may be evicted, and a later update would read it again.
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
"""How many chunks have buffers set aside for gradients at least: some arrive, two are read by updates, some wait."""


class Waiting(Protocol):
    """What a thread that needs memory can do, with threads and streams or on a clock."""

    def poll(self) -> None:
        """Process the transfers and updates that have ended."""

    def pump(self) -> None:
        """Advance updates as far as that takes no waiting."""

    def busy(self) -> bool:
        """Return whether anything is in flight that `wait_for_one` can wait for."""

    def wait_for_one(self) -> None:
        """Wait until one transfer, or update, has ended."""

    def make_way(self, *, again: bool) -> bool:
        """Have updates release memory that they hold and do not use yet. Return False if they hold none, or if they did
        so `again` and again in one wait without getting all their memory."""


def wait_until(waiting: Waiting, reached: Callable[[], bool]) -> bool:
    """Wait until `reached()`; return False if nothing in flight, and no memory that updates release, brings it about.

    Updates advance as far as they can before they are asked for memory, and are asked again only once something has
    ended: otherwise they would take back what they released, without end.
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


class GradientMemory(Protocol[OfChunkT]):
    """Memory for the gradients of a chunk."""

    def lend(self, chunk: OfChunkT) -> bool:
        """Lend `chunk` a buffer in host memory, that was set aside or is free; False if there is none now."""
        ...

    def may_lend(self, chunk: OfChunkT) -> bool:
        """Return whether any buffer that was set aside, lent or not, is large enough for `chunk`."""
        ...

    def hurry(self) -> bool:
        """Send gradients that wait on the device for others of their chunk, or begin updates that wait only because it
        is not known yet how many gradients a step has; False if there are none."""
        ...

    def give_own(self, chunk: OfChunkT) -> None:
        """Give the gradients of `chunk` a permanent home."""


class Send(NamedTuple):
    """Command: copy a gradient of `nbytes` to its home. `number` is its position in the order of issue."""

    number: int
    nbytes: int


class GradientSends(Generic[ChunkT]):
    """Decides for the gradients of one model. At most `most_bytes` are in flight to their homes, or one gradient."""

    def __init__(self, waiting: Waiting, most_bytes: int) -> None:
        self._waiting, self.most_bytes = waiting, most_bytes
        self._numbers = count()
        self.on_their_way: Counter[ChunkT] = Counter()
        self.nbytes = 0
        """Bytes in flight, as they are at home."""
        self.complete: Complete[ChunkT] = Complete()

    def send(self, chunk: ChunkT, nbytes: int) -> Send:
        """Return the command for a gradient of `chunk` that was made and takes `nbytes` at home."""
        self.on_their_way[chunk] += 1
        self.nbytes += nbytes
        return Send(next(self._numbers), nbytes)

    def at_once(self, nbytes: int) -> bool:
        """Return whether the thread that made a gradient of `nbytes` copies it itself: a small one behind no other."""
        return nbytes < SMALL_BYTES and not self.on_their_way

    def arrived(self, chunk: ChunkT, send: Send) -> None:
        """Record that `send`, of a gradient of `chunk`, has ended."""
        self.nbytes -= send.nbytes
        self.on_their_way[chunk] -= 1
        if not self.on_their_way[chunk]:
            del self.on_their_way[chunk]

    def arriving(self, chunk: ChunkT) -> bool:
        """Return whether gradients of `chunk` are in flight."""
        return chunk in self.on_their_way

    def to_be_written(self, chunk: ChunkT) -> bool:
        """Return whether all gradients that this backward gives `chunk` are in staging, to be written to NVMe."""
        return chunk in self.complete and chunk not in self.on_their_way

    @property
    def under_way(self) -> bool:
        """Whether any gradient is in flight."""
        return bool(self.on_their_way)

    def wait_for_room(self) -> None:
        """Process gradients that have arrived, so that updates begin; wait while too many bytes are in flight."""
        self._waiting.poll()
        while self.nbytes > self.most_bytes and self.on_their_way.total() > 1:
            self._waiting.wait_for_one()

    def room_bytes(self, beside: int) -> int:
        """Return how many device bytes of gradients may be gathered: beside those in flight, in `beside` bytes that
        copies and all else leave; see `engine.gathered_gradients`."""
        return min(beside, self.most_bytes) - self.nbytes

    # ---- places ------------------------------------------------------------------------------------------------

    def find_place(self, chunk: ChunkT, memory: GradientMemory[ChunkT]) -> None:
        """Provide memory for gradients of `chunk`, which has no permanent home for them: a lent buffer, waiting as long
        as anything in flight may free one, or else in the first step updates that begin early; else a permanent home,
        as when the gradients of many chunks wait for their last one."""
        self._waiting.poll()
        if lent := memory.lend(chunk):
            return

        def settled() -> bool:
            nonlocal lent
            lent = memory.lend(chunk)
            return lent or not memory.may_lend(chunk)

        while not wait_until(self._waiting, settled) and memory.hurry():
            pass
        if not lent:
            memory.give_own(chunk)


def set_aside(sizes: Iterable[int], free_bytes: int) -> tuple[int, ...]:
    """Return the bytes of each buffer to set aside for gradients of chunks of `sizes`: those of the largest chunks, as
    far as `free_bytes` of host memory suffice."""
    found: list[int] = []
    for nbytes in sorted(sizes, reverse=True)[:_CHUNKS]:
        if sum(found) + nbytes <= free_bytes:
            found.append(nbytes)
    return tuple(found)


def more_aside(sizes: Iterable[int], have: Iterable[int]) -> tuple[int, ...]:
    """Return the bytes of each buffer to set aside for gradients of chunks of `sizes`, beside those that there are, of
    the bytes `have`."""
    left, more = sorted(have), list[int]()
    sizes = [*sizes]
    for nbytes in set_aside(sizes, sum(sizes)):
        at = bisect_left(left, nbytes)
        if at < len(left):
            left.pop(at)
        else:
            more.append(nbytes)
    return tuple(more)


class Lending:
    """Lends buffers of fixed sizes: the smallest free one that is large enough."""

    def __init__(self, sizes: Iterable[int] = ()) -> None:
        self._free = sorted(sizes)
        self._largest = max(self._free, default=0)

    def add(self, nbytes: int) -> None:
        """Add a buffer of `nbytes`."""
        self._largest = max(self._largest, nbytes)
        self.give(nbytes)

    @property
    def free_bytes(self) -> int:
        """Sum of the bytes of all free buffers."""
        return sum(self._free)

    def lends(self, nbytes: int) -> bool:
        """Return whether any buffer, lent or free, is large enough for `nbytes`."""
        return nbytes <= self._largest

    def take(self, nbytes: int) -> int | None:
        """Lend a buffer for `nbytes` and return its size in bytes; None if all that are large enough are lent."""
        if not self._free or self._free[-1] < nbytes:
            return None
        return self._free.pop(bisect_left(self._free, nbytes))

    def give(self, nbytes: int) -> None:
        """Take a buffer of `nbytes` back."""
        insort(self._free, nbytes)


class Complete(Generic[ChunkT]):
    """Finds the chunks that have all their gradients of the running backward."""

    def __init__(self) -> None:
        self._missing: dict[ChunkT, set[int]] = {}
        self._repeated: set[ChunkT] = set()

    def begin(self) -> None:
        """Begin a backward, in which no gradient was made yet."""
        self._missing.clear()

    def add(self, chunk: ChunkT, parameter: int, awaited: Callable[[ChunkT], Collection[int]]) -> None:
        """Record that a gradient of `parameter` is in flight to `chunk`; `awaited` returns the numbers of all
        parameters of the chunk that get one."""
        missing = self._missing.get(chunk)
        if missing is None:
            missing = self._missing[chunk] = set(awaited(chunk))
        elif not missing:
            self._repeated.add(chunk)  # the parameter gets several in a backward, of unknown number
        missing.discard(parameter)

    def __contains__(self, chunk: ChunkT) -> bool:
        """Return whether no other gradient of `chunk` is expected in this backward."""
        return chunk in self._missing and not self._missing[chunk] and chunk not in self._repeated
