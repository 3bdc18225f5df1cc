"""The segments and moments of a rehearsal, and what chunks may take of the device at each.

It does with moments what `engine.runtime` and `engine.device_limit` do in a run. Pure.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from hetmem.base.units import format_size
from hetmem.errors import CapacityError
from hetmem.planner.rehearsal.simulator import SimulatedTraffic
from hetmem.schedule.placement import Capacities, Ground, NoRoom
from hetmem.schedule.trace import DEVICE, STEP
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
        self._traffic.execute(self._traffic.residency.expect(self._tracer.book.schedules(key)))

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
        return self._traffic.residency.taken[DEVICE].used * self._slot_bytes + self.home_bytes

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

    def has_room(self, nbytes: int) -> bool:
        """Whether an activation of `nbytes` may come before it is used."""
        needed = self._tracer.own_bytes + self._traffic.gradient_bytes() + nbytes
        return self.chunk_bytes() + needed <= self._capacities.usable_bytes

    def _set_limit(self, non_model_bytes: int) -> None:
        if not self._streams:
            return
        capacities = self._capacities
        room = room_bytes(capacities.usable_bytes, capacities.chunk_cap_bytes, non_model_bytes, self.home_bytes)
        limit = max(0, room // self._slot_bytes)
        if limit != self._limit:
            self._limit = limit
            self._traffic.execute(self._traffic.residency.limit(DEVICE, limit))
