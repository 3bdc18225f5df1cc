"""Micro-batches of a rehearsed step that are counted and not rehearsed. Pure.

Note "repetition": the first micro-batch of a step finds what the step before has left, the last one may begin updates.
Those between are alike but for how the last few copies of one meet the first of the next. So `_REHEARSED` are
rehearsed, the mean of the last four of them stands for the others, and the last one is rehearsed again.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from operator import sub

from hetmem.planner.simulator import SimulatedTraffic
from hetmem.schedule.trace import DEVICE, HOST

_REHEARSED, _MEAN = 8, 4
"""With fewer before the four that count, a step of homes on NVMe was 1 % off: staging fills up for longer."""

Reading = tuple[float, ...]
"""What a run has come to so far; differences of two are what lies between."""


def micro_batches(
    count: int,
    traffic: SimulatedTraffic,
    rehearse: Callable[[], None],
    left_out: Callable[[int], None],
    settled: Callable[[], bool],
) -> tuple[float, float]:
    """Have `rehearse` go through as many of `count` micro-batches as need it, and tell `left_out` of the others.

    None is left out before so many have been rehearsed after which all was `settled`: updates of the step before were
    not under way any more. Returns the seconds of all that were no stalls, and those of what was left out,
    which the clock of `traffic` does not show; what `traffic` counts has them all.
    """
    left, busy, more = count, 0.0, 0.0
    readings: list[Reading] = []
    while left:
        start, stalled = traffic.now, traffic.stall_seconds
        rehearse()
        busy += traffic.now - start - (traffic.stall_seconds - stalled)
        left -= 1
        readings = [*readings, reading_of(traffic)] if settled() else []
        if len(readings) == _REHEARSED and left > 1:
            each = tuple(value / _MEAN for value in map(sub, readings[-1], readings[-1 - _MEAN]))
            busy += (left - 1) * (each[0] - each[1])
            more = _count_in(left - 1, each, traffic)
            left_out(left - 1)
            left = 1
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


def _count_in(count: int, each: Reading, traffic: SimulatedTraffic) -> float:
    """Add `count` micro-batches that come to `each` to what `traffic` has counted; returns their seconds, as the clock
    is not touched: what is in flight would have to move with it."""
    seconds, stalled, *rest = (count * value for value in each)
    traffic.stall_seconds += stalled
    counts, loads = traffic.residency.counts, [link.load for link in traffic.links.values()]
    for load, nbytes, busy in zip(loads, rest[:4], rest[4:8], strict=True):
        load.bytes += round(nbytes)
        load.seconds += busy
    for (counted, tier), times in zip(product((counts.fetches, counts.faults), (DEVICE, HOST)), rest[8:], strict=True):
        counted[tier] += round(times)
    return seconds
