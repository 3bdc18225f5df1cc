"""Micro-batches of a rehearsed step that are like one before: they are counted and not rehearsed. Pure.

Note "repetition": what a micro-batch does depends on where all copies are, on what is in flight, and on what is
expected next. If all that is after one micro-batch as it was after an earlier one of the same step, those between them
come again and again, each time with the same seconds and bytes, until the last one, which may begin updates. So they
are added as often as they would come, which gives what rehearsing each would.

Where nothing comes again for `_MOST` micro-batches, the later half of these stands for the ones that follow, in the
mean: they differ in how the last few copies of one meet the first of the next.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from itertools import product
from operator import sub

from hetmem.planner.simulator import SimulatedTraffic
from hetmem.schedule.trace import DEVICE, HOST

_MOST = 8
"""Micro-batches that are rehearsed, at most, before the mean is taken."""

_DIGITS = 9
"""Times are compared by nanoseconds: sums of the same seconds differ in their last bits."""

Reading = tuple[float, ...]
"""What a run has come to so far; differences of two are what lies between."""


@dataclass(frozen=True, slots=True)
class Repeated:
    """`count` micro-batches that come to `each` in the mean, if they are not rehearsed."""

    count: int
    each: Reading


class Repetition:
    """The micro-batches of one step, of `count` in all. `reading()` tells what the run has come to."""

    def __init__(self, count: int, reading: Callable[[], Reading]) -> None:
        self._left, self._reading = count, reading
        self._readings = [reading()]
        self._states: dict[Hashable, int] = {}

    def ended(self, state: Callable[[], Hashable]) -> Repeated | None:
        """A micro-batch is over, and this is the `state` in which the next one finds everything (None: one that is
        not to be compared). Those that need not be rehearsed; never the last one."""
        self._left -= 1
        if self._left < 2:
            return None
        self._readings.append(self._reading())
        at, now = len(self._readings) - 1, state()
        if now is None:
            return None
        before = self._states.setdefault(now, at)
        if before == at and at >= _MOST:
            before = at - _MOST // 2
            return self._skip(before, self._left - 1)
        length = at - before
        return self._skip(before, (self._left - 1) // length * length) if length else None

    def _skip(self, before: int, count: int) -> Repeated | None:
        """`count` micro-batches that are like those since the reading `before`."""
        if not count:
            return None
        self._left -= count
        length = len(self._readings) - 1 - before
        total = map(sub, self._readings[-1], self._readings[before])
        return Repeated(count, tuple(value / length for value in total))


def micro_batches(
    count: int,
    traffic: SimulatedTraffic,
    rehearse: Callable[[], None],
    left_out: Callable[[int], None],
    state: Callable[[], Hashable | None],
) -> tuple[float, float]:
    """Have `rehearse` go through as many of `count` micro-batches as need it, and tell `left_out` of the others.

    Returns the seconds of all that were no stalls, and those of what was left out, which the clock of `traffic` does
    not show; what `traffic` counts has them all.
    """
    repetition, left = Repetition(count, lambda: reading_of(traffic)), count
    busy = more = 0.0
    while left:
        start, stalled = traffic.now, traffic.stall_seconds
        rehearse()
        busy += traffic.now - start - (traffic.stall_seconds - stalled)
        left -= 1
        repeated = repetition.ended(state)
        if repeated is not None:
            left -= repeated.count
            busy += repeated.count * (repeated.each[0] - repeated.each[1])
            more += _count_in(repeated, traffic)
            left_out(repeated.count)
    return busy, more


def reading_of(traffic: SimulatedTraffic) -> Reading:
    """The clock, the stalls, the bytes of each link and its busy seconds, fetches and faults of each tier."""
    counts, loads = traffic.residency.counts, [link.load for link in traffic.links.values()]
    return (
        traffic.now,
        traffic.stall_seconds,
        *(load.bytes for load in loads),
        *(load.seconds for load in loads),
        *(counted[tier] for counted in (counts.fetches, counts.faults) for tier in (DEVICE, HOST)),
    )


def state_of(traffic: SimulatedTraffic, held: Iterable[int]) -> Hashable:
    """Where copies are and in which state, what is under way and for how long, with the blocks that are `held`."""
    of, now = traffic.residency, traffic.now
    copies = tuple(
        (tier, block, of.state(block, tier), of.uses(block, tier), tier is HOST and of.dirty(block))
        for tier in (DEVICE, HOST)
        for block in of.resident(tier)
    )
    free = tuple(round(max(0.0, link.free_at - now), _DIGITS) for link in traffic.links.values())
    return copies, traffic.under_way(_DIGITS), free, of.allowed_slots(DEVICE), frozenset(held)


def _count_in(repeated: Repeated, traffic: SimulatedTraffic) -> float:
    """Add what was not rehearsed to what `traffic` has counted; returns its seconds, as the clock is not touched: what
    is in flight would have to move with it."""
    seconds, stalled, *rest = (repeated.count * value for value in repeated.each)
    traffic.stall_seconds += stalled
    counts, loads = traffic.residency.counts, [link.load for link in traffic.links.values()]
    for load, nbytes, busy in zip(loads, rest[:4], rest[4:8], strict=True):
        load.bytes += round(nbytes)
        load.seconds += busy
    for (counted, tier), times in zip(product((counts.fetches, counts.faults), (DEVICE, HOST)), rest[8:], strict=True):
        counted[tier] += round(times)
    return seconds
