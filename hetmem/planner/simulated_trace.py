"""What a rehearsed run notes down while it goes: its trace, what is expected after it, and the bytes on the device.

The counterpart of `engine.tracer` and of what `engine.runtime` does with its moments. Pure; it starts no transfer but
those that the residency asks for, and knows neither operators' work nor the optimizer.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from hetmem.base.units import format_size
from hetmem.errors import CapacityError
from hetmem.planner.simulator import SimulatedTraffic
from hetmem.schedule.placement import Capacities, Ground, NoRoom
from hetmem.schedule.trace import DEVICE, STEP, Moment, SegmentTrace, TraceBook
from hetmem.schedule.update_split import idle_bytes

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
        self._book = TraceBook()
        self._key: Hashable | None = None
        self._ended: Hashable | None = None
        self._known: SegmentTrace | None = None
        self._moments: list[Moment] = []
        self._opening = Moment("begin", ())
        self._host: list[int] = []
        self._overwritten: set[int] = set()
        self._measured = False

    # ---- segments ----------------------------------------------------------------------------------------------

    def begin(self, key: Hashable) -> None:
        """The segment `key` begins, and the one before ends."""
        before = self._key if self._key is not None else self._ended
        self._ended = None
        self._finish_segment()
        self._key = key
        self._known = self._book.get(key)
        self._measured = self._known is None and key != STEP
        self._moments, self._opening = [], Moment("begin", ())
        self._host, self._overwritten = [], set()
        if self._known is not None and self._known.opening.non_model_bytes:
            self._set_limit(self._known.opening.non_model_bytes)
        if before is not None:
            self._book.follows(before, key)
        self._traffic.poll()
        self._expect(key)

    def end(self) -> None:
        """The running segment ends, and nothing begins yet."""
        assert self._key is not None
        key, follower = self._key, self._book.follower(self._key)
        self._finish_segment()
        self._ended = key
        if follower is not None:
            self._expect(follower)

    def knows_a_backward(self) -> bool:
        """Whether a whole step was seen."""
        return self._book.get(BACKWARD) is not None

    def _finish_segment(self) -> None:
        if self._key is None:
            return
        known, on_host = self._known, (tuple(self._host), frozenset(self._overwritten))
        if known is None or (known.host_blocks, known.overwritten) != on_host:
            moments = tuple(self._moments) if known is None else known.moments
            opening = self._opening if known is None else known.opening
            self._book.put(SegmentTrace(self._key, moments, *on_host, opening))
        self._key = None

    def _expect(self, key: Hashable) -> None:
        self._traffic.execute(self._traffic.residency.expect_all(self._book.schedules(key)))

    # ---- moments -----------------------------------------------------------------------------------------------

    def moment(self, operator: str, blocks: tuple[int, ...], live_bytes: int) -> None:
        """`operator` uses `blocks` next; `live_bytes` are not chunks, gradients on their way aside."""
        self._traffic.poll()
        live = live_bytes + self._traffic.gradient_bytes()
        at = len(self._moments)
        known = self._known
        moment = Moment(operator, blocks, live) if known is None else known.moments[at]
        self._moments.append(moment)
        self._set_limit(moment.non_model_bytes)
        self._traffic.residency.reach(blocks, DEVICE)
        self.peaks.note(self.chunk_bytes(), moment.non_model_bytes)

    def acquire(self, block: int, live_bytes: int) -> None:
        """A use of `block` in the moment that has begun with `live_bytes`. Where there is no room it gets what
        gradients have left since that were on their way."""
        try:
            self._traffic.acquire(block, DEVICE)
        except CapacityError:
            if self._known is not None:
                raise
            live = live_bytes + self._traffic.gradient_bytes()
            self._moments[-1] = Moment(self._moments[-1].operator, self._moments[-1].blocks, live)
            self._set_limit(live)
            self._traffic.acquire(block, DEVICE)

    def staged(self, block: int, *, reads: bool) -> None:
        """`block` is used in host memory; unless it `reads`, that use overwrites all of it."""
        if not reads:
            self._overwritten.add(len(self._host))
        self._host.append(block)

    def chunk_bytes(self) -> int:
        """What chunks take of the device now, homes and copies."""
        return self._traffic.residency.used_slots(DEVICE) * self._slot_bytes + self.home_bytes

    def idle_bytes(self) -> int:
        """See `schedule.update_split`."""
        capacities = self._capacities
        usable = capacities.device_bytes - capacities.device_fragment_bytes
        return idle_bytes(usable, capacities.chunk_cap_bytes, self.peaks.other, self.home_bytes + self._copy_bytes)

    def grew(self, live_bytes: int) -> None:
        """What is not chunks takes `live_bytes` beside gradients on their way; idle chunks give way.

        Only where nobody knows it from a trace. Raises `NoRoom` if it is too much.
        """
        if not self._measured:
            return
        traffic = self._traffic
        live = live_bytes + traffic.gradient_bytes() + self.kept_bytes
        self._set_limit(live)
        while self.chunk_bytes() + live > self._capacities.device_bytes and (
            traffic.residency.in_flight() or traffic.gradients.under_way
        ):
            traffic.wait_for_one()
            live = live_bytes + traffic.gradient_bytes() + self.kept_bytes
        if not self._moments:
            self._opening = self._opening.grown(live, 0)
        elif live > self._moments[-1].non_model_bytes:
            self._moments[-1] = self._moments[-1].grown(live, 0)
        missing = self.chunk_bytes() + live - self._capacities.device_bytes
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
        left = capacities.device_bytes - capacities.device_fragment_bytes - non_model_bytes
        room = min(capacities.chunk_cap_bytes, left) - self.home_bytes
        limit = max(0, room // self._slot_bytes)
        if limit != self._limit:
            self._limit = limit
            self._traffic.execute(self._traffic.residency.limit(DEVICE, limit))
