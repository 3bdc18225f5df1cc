"""Notes down what a simulated run goes through: its trace, the bytes on the device, and micro-batches that are counted.

Does with moments what `engine.runtime` and `engine.device_limit` do in a run. Pure: it starts no transfer but those
that the residency asks for, and knows neither the work of operators nor the optimizer.

Note "repetition": the first micro-batch of a step finds what the step before has left, the last one may begin updates.
Those between are alike but for how the last few copies of one meet the first of the next. So `_REHEARSED` are
rehearsed, the mean of the last four of them stands for the others, and the last one is rehearsed again.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from itertools import product
from operator import sub

from hetmem.base.units import format_size
from hetmem.errors import CapacityError
from hetmem.planner.simulator import SimulatedTraffic
from hetmem.schedule.placement import Capacities, Ground, NoRoom
from hetmem.schedule.trace import DEVICE, HOST, STEP
from hetmem.schedule.tracer import StepTracer
from hetmem.schedule.update_split import idle_bytes, room_bytes

FORWARD, BACKWARD = ("forward",), ("backward",)


@dataclass(slots=True)
class Peaks:
    """The most bytes on the device so far: of everything, of chunks, and of what is not chunks."""

    device: int = 0
    chunk: int = 0
    other: int = 0

    def note(self, chunk_bytes: int, other_bytes: int) -> None:
        """So many are there at one time."""
        if chunk_bytes + other_bytes > self.device:
            self.device = chunk_bytes + other_bytes
        if chunk_bytes > self.chunk:
            self.chunk = chunk_bytes
        if other_bytes > self.other:
            self.other = other_bytes


class Notes:
    """The segments and moments of one run, and what chunks may take of the device at each.

    `home_bytes` are homes on the device, and what else stays there beside copies; `kept_bytes` gradients that do.
    Without slots on the device nothing is limited.
    """

    def __init__(self, traffic: SimulatedTraffic, capacities: Capacities, ground: Ground, home_bytes: int) -> None:
        self._traffic, self._capacities, self._slot_bytes = traffic, capacities, ground.slot_bytes
        self._streams = ground.device_slots > 0
        self._limit = ground.device_slots
        self._copy_bytes = sum(chunk.span for chunk in ground.chunks) * ground.slot_bytes
        self.home_bytes = home_bytes
        self.kept_bytes = 0
        self.peaks = Peaks()
        self._tracer = StepTracer()
        self.staged = self._tracer.host_use
        self.knows_a_backward = self._tracer.knows_a_backward
        self._ended: Hashable | None = None

    # ---- segments ----------------------------------------------------------------------------------------------

    def begin(self, key: Hashable) -> None:
        """The segment `key` begins, and the one before ends."""
        tracer = self._tracer
        before = tracer.key if tracer.key is not None else self._ended
        self._ended = None
        tracer.end()
        tracer.begin(key, measured=key != STEP and tracer.must_measure(key))
        if tracer.known is not None and tracer.known.opening.non_model_bytes:
            self._set_limit(tracer.known.opening.non_model_bytes)
        if before is not None:
            tracer.book.follows(before, key)
        self._traffic.poll()
        self._expect(key)

    def end(self) -> None:
        """The running segment ends, and nothing begins yet."""
        tracer, self._ended = self._tracer, self._tracer.key
        assert self._ended is not None
        follower = tracer.book.follower(self._ended)
        tracer.end()
        if follower is not None:
            self._expect(follower)

    def _expect(self, key: Hashable) -> None:
        self._traffic.execute(self._traffic.residency.expect_all(self._tracer.book.schedules(key)))

    # ---- moments -----------------------------------------------------------------------------------------------

    def moment(self, operator: str, blocks: tuple[int, ...], live_bytes: int) -> None:
        """`operator` uses `blocks` next; `live_bytes` are not chunks, gradients on their way aside."""
        self._traffic.poll()
        moment = self._tracer.moment(operator, blocks, live_bytes + self._traffic.gradient_bytes())
        self._set_limit(moment.non_model_bytes)
        self._traffic.residency.reach(blocks, DEVICE)
        self.peaks.note(self.chunk_bytes(), moment.non_model_bytes)

    def acquire(self, block: int, live_bytes: int) -> None:
        """A use of `block` in the moment that has begun with `live_bytes`. Where there is no room it gets what
        gradients have left since that were on their way."""
        try:
            self._traffic.acquire(block, DEVICE)
        except CapacityError:
            if not self._tracer.measured:
                raise
            live = live_bytes + self._traffic.gradient_bytes()
            self._tracer.begins_with(live)
            self._set_limit(live)
            self._traffic.acquire(block, DEVICE)

    def chunk_bytes(self) -> int:
        """What chunks take of the device now, homes and copies."""
        return self._traffic.residency.used_slots(DEVICE) * self._slot_bytes + self.home_bytes

    def idle_bytes(self) -> int:
        """See `schedule.update_split`."""
        capacities = self._capacities
        return idle_bytes(
            capacities.usable_bytes, capacities.chunk_cap_bytes, self.peaks.other, self.home_bytes + self._copy_bytes
        )

    def grew(self, live_bytes: int) -> None:
        """What is not chunks takes `live_bytes` beside gradients on their way; idle chunks give way.

        Only where no trace says it. Raises `NoRoom` if it is too much.
        """
        if not self._tracer.measured:
            return
        traffic = self._traffic
        live = live_bytes + traffic.gradient_bytes() + self.kept_bytes
        self._set_limit(live)
        while self.chunk_bytes() + live > self._capacities.usable_bytes and (
            traffic.residency.in_flight() or traffic.gradients.under_way
        ):
            traffic.wait_for_one()
            live = live_bytes + traffic.gradient_bytes() + self.kept_bytes
        self._tracer.grew(live)
        missing = self.chunk_bytes() + live - self._capacities.usable_bytes
        if missing > 0:
            raise NoRoom(
                f"activations and other tensors take {format_size(live)} and chunks in use "
                f"{format_size(self.chunk_bytes())} of the device",
                DEVICE,
                missing,
            )
        self.peaks.note(self.chunk_bytes(), live)

    def _set_limit(self, non_model_bytes: int) -> None:
        if not self._streams:
            return
        capacities = self._capacities
        room = room_bytes(capacities.usable_bytes, capacities.chunk_cap_bytes, non_model_bytes, self.home_bytes)
        limit = max(0, room // self._slot_bytes)
        if limit != self._limit:
            self._limit = limit
            self._traffic.execute(self._traffic.residency.limit(DEVICE, limit))


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
