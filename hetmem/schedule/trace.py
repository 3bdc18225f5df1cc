"""Records the uses of a step and what is expected next: moments, segments and the schedule made from them.

Pure data. It knows block numbers, not tensors, modules or time.

Note "segments": a training step is cut into segments, each with a key (a forward of one module and mode, its backward,
the optimizer's step). Every key has its own trace, and the book learns which key followed which. So an evaluation pass,
or two forwards before one backward each, have traces of their own and do not shift another one. Another batch size or
sequence length uses the same trace: the order of uses does not depend on shapes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property, lru_cache
from itertools import accumulate, chain, zip_longest
from operator import is_

NEVER = 1 << 62
"""The next use of a block that no known moment uses."""


class Tier(IntEnum):
    """A level of the memory hierarchy; smaller is faster."""

    DEVICE = 0
    HOST = 1
    NVME = 2


DEVICE, HOST, NVME = Tier
"""By name: CPython takes ten times as long to find a member in its enumeration."""


@dataclass(frozen=True, slots=True)
class Moment:
    """One operator boundary: the blocks that the operator uses at once and the memory that everything else takes
    meanwhile.

    `non_model_bytes` is the most device memory outside chunks from this moment up to the next one. `own_bytes` is the
    most of that outside gradients in flight to their homes: up to the first gradient sent in this moment, from there to
    the second, and so on.
    """

    operator: str
    blocks: tuple[int, ...]
    non_model_bytes: int = 0
    own_bytes: tuple[int, ...] = (0,)

    def grown(self, live_bytes: int, leaving_bytes: int) -> Moment:
        """Return a moment that also had `live_bytes` at one time, `leaving_bytes` of them gradients in flight."""
        own = (*self.own_bytes[:-1], max(self.own_bytes[-1], live_bytes - leaving_bytes))
        return Moment(self.operator, self.blocks, max(self.non_model_bytes, live_bytes), own)

    def times(self, factor: float) -> Moment:
        """Return a moment with `factor` times the bytes."""
        if factor == 1.0:
            return self
        own = tuple(int(nbytes * factor) for nbytes in self.own_bytes)
        return Moment(self.operator, self.blocks, int(self.non_model_bytes * factor), own)

    def most(self, other: Moment) -> Moment:
        """Return a moment with the greater bytes of this one and `other`, for each of the times."""
        own = tuple(map(max, zip_longest(self.own_bytes, other.own_bytes, fillvalue=0)))
        return Moment(self.operator, self.blocks, max(self.non_model_bytes, other.non_model_bytes), own)

    def own_after(self, sent: int) -> int:
        """Return its own bytes once `sent` gradients were sent."""
        return self.own_bytes[sent] if sent < len(self.own_bytes) else max(self.own_bytes)


@dataclass(frozen=True)
class SegmentTrace:
    """The moments of one segment on the device, and the blocks it used in host staging, both in order. The staging uses
    with indices in `overwritten` overwrite their blocks as a whole, without reading them. `opening` is the time before
    the first moment: it uses no blocks."""

    key: Hashable
    moments: tuple[Moment, ...] = ()
    host_blocks: tuple[int, ...] = ()
    overwritten: frozenset[int] = frozenset()
    opening: Moment = Moment("begin", ())

    @cached_property
    def worst(self) -> tuple[int, tuple[int]]:
        """The greatest `non_model_bytes` and `own_bytes` of all moments, as arguments of `Moment`."""
        moments = (self.opening, *self.moments)
        own = chain.from_iterable(moment.own_bytes for moment in moments)
        return max(moment.non_model_bytes for moment in moments), (max(own),)


class UseSequence:
    """A sequence of uses, `blocks[i]` at once, with the indices of each block (`positions`, of this round and the first
    of the next) and of each use (`indices`). Uses with indices in `overwritten` write their blocks without reading
    them, so nothing is prefetched for them. `times` has the time of each use on a clock of both tiers; one round takes
    `period`. Building it takes O(uses)."""

    __slots__ = ("_visits", "blocks", "furthest", "indices", "overwritten", "period", "positions", "slots", "times")

    def __init__(
        self,
        uses: Sequence[tuple[int, ...]],
        overwritten: Collection[int] = (),
        times: Sequence[int] | None = None,
        period: int | None = None,
    ) -> None:
        self.blocks = tuple(uses)
        self.overwritten = frozenset(overwritten)
        self.times = range(len(self.blocks)) if times is None else times
        self.period = len(self.blocks) if period is None else period
        self.positions: dict[int, list[int]] = {}
        self.indices: dict[tuple[int, ...], list[int]] = {}
        for index, blocks in enumerate(self.blocks):
            self.indices.setdefault(blocks, []).append(index)
            for block in blocks:
                self.positions.setdefault(block, []).append(index)
        self._visits: dict[int, dict[int, int]] | None = None
        self.slots = -1
        """How many slots copies of all blocks take, once that was asked."""
        count = len(self.blocks)
        self.furthest = [0] * count
        """By use, when all of its blocks have been used again, counted from the start of its round."""
        again = {block: count + positions[0] for block, positions in self.positions.items()}
        for block, positions in self.positions.items():
            positions.append(again[block])
        for at in range(count - 1, -1, -1):
            for block in self.blocks[at]:
                if again[block] > self.furthest[at]:
                    self.furthest[at] = again[block]
                again[block] = at

    def visits(self) -> dict[int, dict[int, int]]:
        """Return the visits of each block: the first and the last use of each run of uses that are close together, with
        less than a sixteenth of a round, or 8 uses, between two."""
        if self._visits is None:
            near = max(8, len(self.blocks) // 16)
            self._visits = {}
            for block, positions in self.positions.items():
                rows = self._visits[block] = {}
                first = last = positions[0]
                for at in positions[:-1]:
                    if at - last > near:
                        first = at
                    rows[first] = last = at
        return self._visits

    def spread(self) -> list[int]:
        """Return the blocks in an order of which every prefix is spread evenly over a round: by the reversed bits of
        their positions (J. G. van der Corput, "Verteilungsfunktionen", 1935). Blocks with several visits come first,
        then those with long ones, as streaming them would take a slot for a long time."""
        bits, ranked = len(self.positions).bit_length(), []
        for at, (block, visits) in enumerate(self.visits().items()):
            length = max(last - first for first, last in visits.items())
            ranked.append((-len(visits), -(length // 4), int(f"{at:0{bits}b}"[::-1], 2), block))
        return [block for *_, block in sorted(ranked)]


class Schedule:
    """The uses expected on one tier: a sequence of block tuples that repeats for ever.

    `position` counts the uses reached. The first `segment` uses belong to the running segment (all, if not given): only
    among those can the next use differ from the expected one. Blocks used after `barrier` (an index of `uses`) are
    rewritten before: these uses count for eviction, but nothing is prefetched for them. `scan`: all is used in the same
    order again and again, as by forwards without backwards. `turns`: so many micro-batches use each block in turns,
    before the next one is used, so that prefetching looks as many times as far ahead. `next_use` and `reach` are O(log
    uses).
    """

    def __init__(
        self,
        uses: Sequence[tuple[int, ...]] | UseSequence = (),
        *,
        barrier: int | None = None,
        segment: int = NEVER,
        scan: bool = False,
        turns: int = 1,
    ) -> None:
        known = uses if isinstance(uses, UseSequence) else UseSequence(uses)
        self.known, self.scan, self.turns = known, scan, turns
        self.uses = known.blocks
        self.count = len(self.uses)
        self.barrier = (NEVER if barrier is None else barrier) if self.count else 0
        self.position = 0
        self.segment = segment if self.count else 0
        self._overwritten = known.overwritten
        self.overwrites = bool(known.overwritten)
        """Whether any use writes its blocks without reading them, so that `reads` must be called."""
        self.absent: tuple[int, ...] = ()
        """The blocks of the use just reached that have no copy yet: their next use is this one."""
        self.skipped: set[int] = set()
        self._next: dict[int, int] = {}  # cached next uses; valid as long as they lie ahead
        self._positions, self._indices = known.positions, known.indices
        self._times, self._period = known.times, known.period

    def time(self, at: int) -> int:
        """Return the time of the use number `at` on the clock of `UseSequence`; NEVER if `at` is NEVER."""
        if at >= NEVER or not self.count:
            return NEVER
        lap, inside = divmod(at, self.count)
        return lap * self._period + self._times[inside]

    def reach(self, blocks: tuple[int, ...]) -> bool:
        """Begin a use of `blocks`: move `position` past the nearest such use, ahead or behind, which is the next one as
        long as the trace is followed. Return False, and move nothing, if no such use is known."""
        position, count = self.position, self.count
        if position < self.segment and self.uses[position % count] == blocks and not self.skipped:
            self.position, self.absent = position + 1, blocks
            return True
        if self.skipped:
            self.skipped.difference_update(blocks)
        found = self._indices.get(blocks)
        if found is None:
            return False
        lap, inside = divmod(position, count)
        index = bisect_left(found, inside)
        behind = lap * count + found[index - 1] if index else -1
        ahead = lap * count + found[index] if index < len(found) else (lap + 1) * count + found[0]
        near = [at for at in (ahead, behind) if 0 <= at < self.segment]
        if not near:
            return False
        self.position = 1 + min(near, key=lambda at: abs(at - position))
        if self.position <= position:
            self._next.clear()
        elif self._overwritten:
            self._skip(position, self.position - 1)
        self.absent = blocks
        return True

    def _skip(self, start: int, end: int) -> None:
        """Record the uses from `start` up to `end` as skipped: what they overwrite will still be overwritten."""
        for at, blocks in enumerate(self.between(start, end), start):
            if at % len(self.uses) in self._overwritten:
                self.skipped.update(blocks)

    def next_use(self, block: int) -> int:
        """Return the first use of `block` at or after `position`, counted in uses from the start; NEVER if unknown.

        A block of the use just reached counts as used now until it has a copy: otherwise it might be evicted for a far
        next use while the other blocks of that use are fetched.
        """
        try:
            known = self._next[block]
        except KeyError:
            known = -1
        position = self.position
        if known < position:  # as for all blocks of the use just reached
            if block in self.absent:
                return position - 1
            known = NEVER
            if block in self._positions:
                inside, where = position % self.count, self._positions[block]
                known = position - inside + where[bisect_left(where, inside)]
            self._next[block] = known
        return known

    def meet(self, blocks: Collection[int]) -> None:
        """Record that `blocks` of the use just reached have copies."""
        for block in self.absent:
            if block not in blocks:
                self.absent = tuple([block for block in self.absent if block not in blocks])
                return
        self.absent = ()

    def furthest(self, start: int, end: int) -> int:
        """Return when the blocks of the uses from `start` up to `end`, at most a round, have all been used again."""
        furthest, count = self.known.furthest, self.count
        if start >= end:
            return start
        first = start % count
        last = first + end - start
        found = max(furthest[first:last])
        if last > count:  # around the end of a round
            found = max(found, count + max(furthest[: last - count]))
        return start - first + found

    def first_with(self, least: int, start: int, end: int) -> int:
        """Return the first of the uses from `start` up to `end` that has a block whose next use is at `least` or later;
        `end` if none has."""
        furthest, count = self.known.furthest, self.count
        for at in range(start, end):
            place = at % count
            if at - place + furthest[place] >= least:
                return at
        return end

    def reads(self, at: int) -> bool:
        """Return whether the use number `at`, counted as `position` is, needs the present content of its blocks: not if
        it overwrites them, nor if a skipped use, which still comes before it, does."""
        if not self._overwritten:
            return True
        place = at % len(self.uses)
        return place not in self._overwritten and not self.skipped.issuperset(self.uses[place])

    def between(self, start: int, end: int) -> Sequence[tuple[int, ...]]:
        """Return the uses from `start` up to `end`, both counted as `position` is."""
        count = self.count
        if end <= count or not count:
            return self.uses[start:end]
        first = start % count
        last = first + max(0, end - start)
        return self.uses[first:last] if last <= count else [self.uses[at % count] for at in range(first, last)]


def segment_name(key: Hashable) -> str:
    """Return the kind of a segment with `key`: "forward", "backward" or "step"."""
    return str(key[0]) if isinstance(key, tuple) else str(key)


class Turns(int):
    """How many micro-batches take turns in a segment: a part of its key."""


@lru_cache(1024)  # called for each segment; a count of turns has a place of its own in a key
def turns_of(key: Hashable) -> int:
    """Return how many micro-batches take turns in a segment with `key`, or in the forwards that it names; else 1."""
    if isinstance(key, tuple):
        return max(map(turns_of, key), default=1)
    return key if isinstance(key, Turns) else 1


def infers(key: Hashable | None) -> bool:
    """Return whether the segment with `key` is a forward without gradients; its key has the module, its mode, and
    whether gradients are enabled."""
    return isinstance(key, tuple) and segment_name(key) == "forward" and key[3:4] == (False,)


STEP = ("step",)
"""The key of the segment in which the optimizer updates: it makes all copies of weights stale."""


class TraceBook:
    """All known segment traces and the order in which segments follow each other.

    `chain(key)` is the expected sequence of segments that starts with `key`, up to the point where it repeats.
    """

    def __init__(self) -> None:
        self._traces: dict[Hashable, SegmentTrace] = {}
        self._successor: dict[Hashable, Hashable] = {}
        self._uses: dict[Hashable, tuple[list[SegmentTrace], UseSequence, UseSequence]] = {}

    def get(self, key: Hashable) -> SegmentTrace | None:
        """Return the trace of `key`, or None if no such segment was seen."""
        return self._traces.get(key)

    def put(self, trace: SegmentTrace) -> None:
        """Record `trace`, in place of an older one with the same key."""
        self._traces[trace.key] = trace

    def forget(self, key: Hashable) -> None:
        """Forget the trace of `key`, if there is one."""
        self._traces.pop(key, None)

    def follows(self, first: Hashable, second: Hashable) -> None:
        """Record that segment `second` came right after segment `first`."""
        self._successor[first] = second

    def follower(self, key: Hashable) -> Hashable | None:
        """Return the segment that last came after `key`, or None."""
        return self._successor.get(key)

    def traces(self) -> tuple[SegmentTrace, ...]:
        """Return all traces, in the order in which their keys were first seen."""
        return tuple(self._traces.values())

    def chain(self, key: Hashable) -> list[SegmentTrace]:
        """Return the known traces from `key` on, following the last seen successors, each segment at most once."""
        chain: list[SegmentTrace] = []
        seen: set[Hashable] = set()
        at: Hashable | None = key
        while at is not None and at not in seen and at in self._traces:
            seen.add(at)
            chain.append(self._traces[at])
            at = self._successor.get(at)
        return chain

    def schedules(self, key: Hashable) -> dict[Tier, Schedule]:
        """Return by tier the schedule that is expected from the start of the segment `key`."""
        chain = self.chain(key)
        device, host = self._uses_of(key, chain)
        barrier, before = None, 0
        for trace in chain:
            if trace.key == STEP:
                barrier = before
                break
            before += len(trace.moments)
        first = len(chain[0].moments) if chain else 0
        scan = all(segment_name(trace.key) == "forward" for trace in chain)
        turns = max((turns_of(trace.key) for trace in chain), default=1)
        on_device = Schedule(device, barrier=barrier, segment=first, scan=scan, turns=turns)
        return {Tier.DEVICE: on_device, Tier.HOST: Schedule(host, turns=turns)}

    def _uses_of(self, key: Hashable, chain: list[SegmentTrace]) -> tuple[UseSequence, UseSequence]:
        """Return the uses of `chain`, which starts with `key`, on the device and in host staging; cached."""
        known = self._uses.get(key)
        if known is None or len(known[0]) != len(chain) or not all(map(is_, known[0], chain)):
            starts = accumulate((len(trace.host_blocks) for trace in chain), initial=0)
            device_times, host_times, period = _times(chain)
            device = UseSequence(
                [moment.blocks for trace in chain for moment in trace.moments], (), device_times, period
            )
            host = UseSequence(
                [(block,) for trace in chain for block in trace.host_blocks],
                [start + at for trace, start in zip(chain, starts, strict=False) for at in trace.overwritten],
                host_times,
                period,
            )
            known = self._uses[key] = chain, device, host
        return known[1], known[2]


def _times(chain: Sequence[SegmentTrace]) -> tuple[list[int], list[int], int]:
    """Return the time of each use of `chain` on the device, of each in host staging, and of one round.

    The clock counts block uses on either tier, repeated uses once, which is about how many blocks must be moved until
    then. In a segment that uses both tiers, each tier's uses are spread evenly over it, as their interleaving is not
    known.
    """
    device: list[int] = []
    host: list[int] = []
    began = 0
    for trace in chain:
        before: tuple[int, ...] = ()
        turns, at_turn = 0, []
        for moment in trace.moments:
            at_turn.append(turns)
            turns += sum(block not in before for block in moment.blocks)
            before = moment.blocks
        on_host = len(trace.host_blocks)
        length = turns + on_host
        device.extend(began + turn * length // max(turns, 1) for turn in at_turn)
        host.extend(began + at * length // max(on_host, 1) for at in range(on_host))
        began += length
    return device, host, began
