"""What a step did and what is expected next: moments, segments and the schedule made from them.

Pure data. It knows block numbers, never tensors, modules or time.

Note "segments": a training step is cut into segments with a key each (a forward of one module and mode, its backward,
the optimizer's step). Every segment keeps its own trace, and the chain of segments is learned: which key followed
which. So an evaluation pass or two forwards before one backward each have a trace of their own and never shift another
one. Another batch size or sequence length has the same: the order of uses does not depend on shapes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
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
    """One operator boundary: the blocks it uses at once and what everything else needs meanwhile.

    `non_model_bytes` is the most device memory that was not chunks from this moment up to the next one. `own_bytes` is
    the most that was no gradient on its way home either: up to the first one that was sent meanwhile, from there to the
    second, and so on.
    """

    operator: str
    blocks: tuple[int, ...]
    non_model_bytes: int = 0
    own_bytes: tuple[int, ...] = (0,)

    def grown(self, live_bytes: int, leaving_bytes: int) -> Moment:
        """It with so many bytes at one time, of which `leaving_bytes` were gradients on their way home."""
        own = (*self.own_bytes[:-1], max(self.own_bytes[-1], live_bytes - leaving_bytes))
        return Moment(self.operator, self.blocks, max(self.non_model_bytes, live_bytes), own)

    def times(self, factor: float) -> Moment:
        """It with `factor` as many bytes."""
        if factor == 1.0:
            return self
        own = tuple(int(nbytes * factor) for nbytes in self.own_bytes)
        return Moment(self.operator, self.blocks, int(self.non_model_bytes * factor), own)

    def most(self, other: Moment) -> Moment:
        """It with the bytes that either needs, at each time."""
        own = tuple(map(max, zip_longest(self.own_bytes, other.own_bytes, fillvalue=0)))
        return Moment(self.operator, self.blocks, max(self.non_model_bytes, other.non_model_bytes), own)

    def own_after(self, sent: int) -> int:
        """The bytes of its own once so many gradients were sent."""
        return self.own_bytes[sent] if sent < len(self.own_bytes) else max(self.own_bytes)


@dataclass(frozen=True)
class SegmentTrace:
    """The moments of one segment on the device, and the blocks it used in host staging, each in order. Those at the
    places `overwritten` were overwritten as a whole: what they held before was not read. `opening` is
    what was before the first moment: it uses no blocks."""

    key: Hashable
    moments: tuple[Moment, ...] = ()
    host_blocks: tuple[int, ...] = ()
    overwritten: frozenset[int] = frozenset()
    opening: Moment = Moment("begin", ())

    @cached_property
    def worst(self) -> tuple[int, tuple[int]]:
        """The most non-model bytes at any moment, and the most of their own, as a `Moment` has them."""
        moments = (self.opening, *self.moments)
        own = chain.from_iterable(moment.own_bytes for moment in moments)
        return max(moment.non_model_bytes for moment in moments), (max(own),)


class UseSequence:
    """A sequence of uses, `blocks[i]` at once, and where each is: `positions` of a block, `places` of a use. Those at
    the indices `overwritten` write their blocks without reading them, so that nothing is prefetched for them. `times`
    says when each comes, on a clock that the uses of another tier have too; one round takes `period`. Made once for all
    schedules of the same uses; O(uses)."""

    __slots__ = ("_visits", "blocks", "furthest", "overwritten", "period", "places", "positions", "times")

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
        self.places: dict[tuple[int, ...], list[int]] = {}
        for index, blocks in enumerate(self.blocks):
            self.places.setdefault(blocks, []).append(index)
            for block in blocks:
                self.positions.setdefault(block, []).append(index)
        self._visits: dict[int, dict[int, int]] | None = None
        count = len(self.blocks)
        self.furthest = [0] * count
        """By use, when all of its blocks have been used again, counted from the start of its round."""
        again = {block: count + positions[0] for block, positions in self.positions.items()}
        for at in range(count - 1, -1, -1):
            for block in self.blocks[at]:
                if again[block] > self.furthest[at]:
                    self.furthest[at] = again[block]
                again[block] = at

    def visits(self) -> dict[int, dict[int, int]]:
        """Where each block is used again and again: the last use of each row of them, by the first. In a row less than
        a sixteenth of a round, or 8 uses, lie between two."""
        if self._visits is None:
            near = max(8, len(self.blocks) // 16)
            self._visits = {}
            for block, positions in self.positions.items():
                rows = self._visits[block] = {}
                first = last = positions[0]
                for at in positions:
                    if at - last > near:
                        first = at
                    rows[first] = last = at
        return self._visits

    def spread(self) -> list[int]:
        """The blocks in an order of which any beginning is spread evenly over a round: that of the reversed bits of
        their places (J. G. van der Corput, "Verteilungsfunktionen", 1935). First come those with several visits, then
        those with long ones, which would take a slot for long if they were fetched for each."""
        bits, ranked = len(self.positions).bit_length(), []
        for at, (block, visits) in enumerate(self.visits().items()):
            length = max(last - first for first, last in visits.items())
            ranked.append((-len(visits), -(length // 4), int(f"{at:0{bits}b}"[::-1], 2), block))
        return [block for *_, block in sorted(ranked)]


class Schedule:
    """The uses expected on one tier: a sequence of block tuples, repeated for ever.

    `position` counts the uses that were reached. The first `segment` uses belong to the segment that runs (all, if not
    given): only there can the next use be one that is not the next one expected. What is used behind `barrier` (an
    index of `uses`) will be rewritten before: it counts for eviction but is not prefetched. `scan`: all is used in the
    same order again and again, as by forwards without backwards. `next_use` and `reach` are O(log uses).
    """

    def __init__(
        self,
        uses: Sequence[tuple[int, ...]] | UseSequence = (),
        *,
        barrier: int | None = None,
        segment: int = NEVER,
        scan: bool = False,
    ) -> None:
        known = uses if isinstance(uses, UseSequence) else UseSequence(uses)
        self.known, self.scan = known, scan
        self.uses = known.blocks
        self._count = len(self.uses)
        self.barrier = barrier
        self.position = 0
        self._segment = segment
        self._overwritten = known.overwritten
        self.overwrites = bool(known.overwritten)
        """Whether any use writes its blocks without reading them, so that `reads` is to be asked."""
        self.unmet: tuple[int, ...] = ()
        """The blocks of the use just reached that are not there yet: from then on their next use counts."""
        self._passed_over: set[int] = set()
        self._next: dict[int, int] = {}  # known next uses; right for as long as they lie ahead
        self._positions, self._places = known.positions, known.places
        self._times, self._period = known.times, known.period

    def time(self, at: int) -> int:
        """Return when the use number `at` comes on the clock of `UseSequence`; NEVER if `at` is NEVER."""
        if at >= NEVER or not self._count:
            return NEVER
        lap, inside = divmod(at, self._count)
        return lap * self._period + self._times[inside]

    def reach(self, blocks: tuple[int, ...]) -> bool:
        """The use of `blocks` begins: `position` moves past the nearest such use, ahead or behind, which is the next
        one as long as the trace is followed. False, and nothing moves, if none is known."""
        count = self._count
        if not count:
            return False
        at = self.position % count
        if self._passed_over:
            self._passed_over.difference_update(blocks)
        if self.uses[at] == blocks and self.position < self._segment:  # as expected
            self.position += 1
            self.unmet = blocks
            return True
        places = self._places.get(blocks)
        if places is None:
            return False
        lap, inside = divmod(self.position, count)
        index = bisect_left(places, inside)
        behind = lap * count + places[index - 1] if index else -1
        ahead = lap * count + places[index] if index < len(places) else (lap + 1) * count + places[0]
        near = [at for at in (ahead, behind) if 0 <= at < self._segment]
        if not near:
            return False
        before, self.position = self.position, 1 + min(near, key=lambda at: abs(at - self.position))
        if self.position < before:
            self._next.clear()
        elif self._overwritten:
            self._pass_over(before, self.position - 1)
        self.unmet = blocks
        return True

    def _pass_over(self, start: int, end: int) -> None:
        """The uses from `start` up to `end` have not come: what they will overwrite, they still will."""
        for at, blocks in enumerate(self.between(start, end), start):
            if at % len(self.uses) in self._overwritten:
                self._passed_over.update(blocks)

    def next_use(self, block: int) -> int:
        """The first use of `block` at or after `position`, counted in uses from the start; NEVER if unknown.

        A block of the use just reached is used there until it is there: it must not look far away, and be given up,
        while the other blocks of that use are brought in.
        """
        if block in self.unmet:
            return self.position - 1
        known = self._next[block] if block in self._next else -1  # noqa: SIM401 - without a call, as it is asked often
        position = self.position
        if known < position:
            where, known = self._positions[block] if block in self._positions else None, NEVER  # noqa: SIM401
            if where is not None:
                inside = position % self._count
                index = bisect_left(where, inside)
                known = position - inside + (where[index] if index < len(where) else self._count + where[0])
            self._next[block] = known
        return known

    def meet(self, blocks: Collection[int]) -> None:
        """Note that `blocks` of the use just reached are there."""
        for block in self.unmet:
            if block not in blocks:
                self.unmet = tuple([block for block in self.unmet if block not in blocks])
                return
        self.unmet = ()

    def furthest(self, start: int, end: int) -> int:
        """When the blocks of the uses from `start` up to `end`, a round apart at most, have all been used again."""
        furthest, count = self.known.furthest, self._count
        if start >= end:
            return start
        first = start % count
        last = first + end - start
        found = max(furthest[first:last])
        if last > count:  # around the end of a round
            found = max(found, count + max(furthest[: last - count]))
        return start - first + found

    def first_with(self, least: int, start: int, end: int) -> int:
        """Which of the uses from `start` up to `end` is the first that has a block which is used again at `least` or
        later; `end` if none has."""
        furthest, count = self.known.furthest, self._count
        for at in range(start, end):
            place = at % count
            if at - place + furthest[place] >= least:
                return at
        return end

    def horizon(self, count: int) -> int:
        """The end of the next `count` uses, those known and not behind the barrier."""
        end = self.position + (count if self._count else 0)
        return end if self.barrier is None or end < self.barrier else self.barrier

    def reads(self, at: int) -> bool:
        """Whether the use number `at`, counted as `position` is, needs what its blocks hold now. It does not if it
        overwrites them, nor if a use that does, and comes before it, is late: it was passed over for others."""
        if not self._overwritten:
            return True
        place = at % len(self.uses)
        return place not in self._overwritten and not self._passed_over.issuperset(self.uses[place])

    def between(self, start: int, end: int) -> Sequence[tuple[int, ...]]:
        """The uses from `start` up to `end`, both counted as `position` is."""
        count = self._count
        if end <= count or not count:
            return self.uses[start:end]
        first = start % count
        last = first + max(0, end - start)
        return self.uses[first:last] if last <= count else [self.uses[at % count] for at in range(first, last)]


def segment_name(key: Hashable) -> str:
    """What a segment with `key` is, for people: "forward", "backward" or "step"."""
    return str(key[0]) if isinstance(key, tuple) else str(key)


def infers(key: Hashable | None) -> bool:
    """Whether the segment with `key` is a forward without gradients; its key has the module, its mode, and whether
    gradients are enabled."""
    return isinstance(key, tuple) and segment_name(key) == "forward" and key[3:4] == (False,)


STEP = ("step",)
"""The key of the segment in which the optimizer updates: no copy of a weight outlives it unchanged."""


class TraceBook:
    """Every known segment trace and the order in which segments follow each other.

    `chain(key)` is the expected run of segments that starts with `key`, up to the point where it repeats.
    """

    def __init__(self) -> None:
        self._traces: dict[Hashable, SegmentTrace] = {}
        self._successor: dict[Hashable, Hashable] = {}
        self._uses: dict[Hashable, tuple[list[SegmentTrace], UseSequence, UseSequence]] = {}

    def get(self, key: Hashable) -> SegmentTrace | None:
        """The trace of `key`, or None if no such segment was seen."""
        return self._traces.get(key)

    def put(self, trace: SegmentTrace) -> None:
        """Remember `trace`, in place of an older one with the same key."""
        self._traces[trace.key] = trace

    def follows(self, first: Hashable, second: Hashable) -> None:
        """Note that segment `second` came right after segment `first`."""
        self._successor[first] = second

    def follower(self, key: Hashable) -> Hashable | None:
        """The segment that came after `key` the last time, or None."""
        return self._successor.get(key)

    def traces(self) -> tuple[SegmentTrace, ...]:
        """All traces, in the order in which their keys were first seen."""
        return tuple(self._traces.values())

    def chain(self, key: Hashable) -> list[SegmentTrace]:
        """The known traces from `key` on, following the last seen successors, each segment at most once."""
        chain: list[SegmentTrace] = []
        seen: set[Hashable] = set()
        at: Hashable | None = key
        while at is not None and at not in seen and at in self._traces:
            seen.add(at)
            chain.append(self._traces[at])
            at = self._successor.get(at)
        return chain

    def schedules(self, key: Hashable) -> dict[Tier, Schedule]:
        """What is expected on each tier from the start of the segment `key` on."""
        chain = self.chain(key)
        device, host = self._uses_of(key, chain)
        barrier, met = None, 0
        for trace in chain:
            if trace.key == STEP:
                barrier = met
                break
            met += len(trace.moments)
        first = len(chain[0].moments) if chain else 0
        scan = all(segment_name(trace.key) == "forward" for trace in chain)
        there = Schedule(device, barrier=barrier, segment=first, scan=scan)
        return {Tier.DEVICE: there, Tier.HOST: Schedule(host)}

    def _uses_of(self, key: Hashable, chain: list[SegmentTrace]) -> tuple[UseSequence, UseSequence]:
        """The uses of `chain`, which starts with `key`, on the device and in host staging; kept as long as it is."""
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
    """When each use of `chain` comes: those on the device, those in host staging; and how long one round takes.

    The clock counts blocks that are used anew, on either tier, which is about how many have to be moved till then. In a
    segment that uses both tiers each is spread evenly over it: how the two will be interleaved is not known.
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
        there = len(trace.host_blocks)
        length = turns + there
        device.extend(began + turn * length // max(turns, 1) for turn in at_turn)
        host.extend(began + at * length // max(there, 1) for at in range(there))
        began += length
    return device, host, began
