"""What the engine and the optimizer of a run have beside transfers, on the simulator's clock.

`Notes` does with segments, moments and the device's room what `engine.runtime` and `engine.device_limit` do in a run;
gradients and updates are carried out as `schedule.gradients` and `schedule.updates` decide. When an update begins is
decided in `step_program`. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass
from functools import partial

from hetmem.base.units import format_size
from hetmem.errors import CapacityError
from hetmem.planner.reservation import Arrangement, with_own_gradients
from hetmem.planner.simulator import SimulatedTraffic
from hetmem.schedule.blocks import PLACED, CopyState
from hetmem.schedule.chunk_limit import ChunkLimit, DevicePeaks
from hetmem.schedule.gradients import Lending
from hetmem.schedule.placement import Capacities, Ground, NoRoom, idle_bytes, room_bytes
from hetmem.schedule.trace import DEVICE, STEP, Tier
from hetmem.schedule.tracer import StepTracer
from hetmem.schedule.updates import HostUpdates

FORWARD, BACKWARD = ("forward",), ("backward",)


class Notes(ChunkLimit):
    """The segments and moments of one run, and what chunks may take of the device at each.

    `home_bytes` are homes on the device, and what else stays there beside copies; `kept_bytes` gradients that do.
    `ahead_bytes` are left to activations that come before their use, by copies that are many. Without slots on the
    device nothing is limited.
    """

    def __init__(
        self,
        traffic: SimulatedTraffic,
        capacities: Capacities,
        ground: Ground,
        home_bytes: int,
        ahead_bytes: int = 0,
    ) -> None:
        spans, usable_bytes = [chunk.span for chunk in ground.chunks], capacities.usable_bytes
        super().__init__(StepTracer(), traffic.residency, usable_bytes, ground.slot_bytes, spans, ground.device_slots)
        self._traffic, self.capacities = traffic, capacities
        self._streams, self._ahead_bytes, self.home_bytes = ground.device_slots > 0, ahead_bytes, home_bytes
        self._own_bytes = self.kept_bytes = 0
        self.peaks = DevicePeaks()
        self.staged, self.sent = self._tracer.host_use, self._tracer.sent
        self.knows_a_backward = self._tracer.knows_a_backward

    # ---- segments ----------------------------------------------------------------------------------------------

    def begin(self, key: Hashable) -> None:
        """The segment `key` begins, and the one before ends."""
        tracer = self._tracer
        tracer.end()
        tracer.begin(key, measured=key != STEP and tracer.must_measure(key))
        if tracer.known is not None and tracer.known.opening.non_model_bytes:
            self.set_limit(tracer.known.opening.non_model_bytes)
        self._traffic.poll()
        self._expect(key)

    def end(self) -> None:
        """The running segment ends, and nothing begins yet."""
        follower = self._tracer.book.follower(self._tracer.key)
        self._tracer.end()
        if follower is not None:
            self._expect(follower)

    def _expect(self, key: Hashable) -> None:
        self._traffic.execute(self._traffic.residency.expect(self._tracer.book.schedules(key)))

    # ---- moments -----------------------------------------------------------------------------------------------

    def moment(self, operator: str, blocks: tuple[int, ...], live_bytes: int) -> None:
        """`operator` uses `blocks` next; `live_bytes` are not chunks, gradients on their way aside."""
        self._traffic.poll()
        leaving = self._traffic.gradient_bytes()
        moment = self._tracer.moment(operator, blocks, live_bytes + leaving, leaving)
        self.set_limit(moment.non_model_bytes)
        self._traffic.residency.reach(blocks, DEVICE)
        self.peaks.device_in_use(self.chunk_bytes(), moment.non_model_bytes)

    def acquire(self, block: int, live_bytes: int) -> None:
        """A use of `block` in the moment that has begun with `live_bytes`. Where there is no room it gets what
        gradients have left since that were on their way."""
        try:
            self._traffic.acquire(block, DEVICE)
        except CapacityError:
            if not self._tracer.measured:
                raise
            self._own_bytes = live_bytes
            self.begin_with(self._live())
            self._traffic.acquire(block, DEVICE)

    def idle_bytes(self) -> int:
        """See `schedule.placement`."""
        capacities = self.capacities
        chunk_bytes = self.home_bytes + self._all_slots * self._slot_bytes
        beside = self.peaks.non_model_peak_bytes
        return idle_bytes(capacities.usable_bytes, capacities.chunk_cap_bytes, beside, chunk_bytes)

    def grew(self, live_bytes: int) -> None:
        """What is not chunks takes `live_bytes` beside gradients on their way; idle chunks give way.

        Only where no trace says it. Raises `NoRoom` if it is too much.
        """
        if not self._tracer.measured:
            return
        self._own_bytes = live_bytes
        live = self.make_room(self._live())
        missing = self.missing_bytes(live)
        if missing > 0:
            raise NoRoom(
                f"activations and other tensors take {format_size(live)} and chunks in use "
                f"{format_size(self.chunk_bytes())} of the device",
                DEVICE,
                missing,
            )
        self.peaks.device_in_use(self.chunk_bytes(), live)

    # ---- what a run counts: see `ChunkLimit` -------------------------------------------------------------------

    def _homes(self) -> int:
        return self.home_bytes

    def _live(self) -> int:
        return self._own_bytes + self._traffic.gradient_bytes() + self.kept_bytes

    @property
    def leaving_bytes(self) -> int:
        """Bytes of gradients and activations on their way."""
        return self._traffic.gradient_bytes()

    def _for_activations(self) -> int:
        return self._ahead_bytes

    def _slots(self, non_model_bytes: int) -> int:
        usable, cap = self._usable_bytes, self.capacities.chunk_cap_bytes
        room = room_bytes(usable, cap, non_model_bytes, self.home_bytes) if self._streams else 0
        return max(0, room // self._slot_bytes)

    def _limit_chunks(self, slots: int, *, before: int) -> None:
        self._traffic.execute(self._residency.limit(DEVICE, slots))

    def _wait_for_room(self, missing_bytes: int) -> bool:
        leaves = bool(self._residency.in_flight() or self._traffic.gradients.under_way)
        if leaves:
            self._traffic.wait_for_one()
        return leaves


@dataclass(frozen=True, slots=True)
class Staged:
    """A block on NVMe that an update opens in host memory. `load`: what it holds matters; `changes`: it is written."""

    block: int
    load: bool
    changes: bool


@dataclass(slots=True, eq=False)
class Update:
    """The update of a chunk, and what it takes: `thread_seconds` of the thread that trains, then `host_seconds` of all
    the host's workers together, or `device_seconds`.

    `number`: of the chunk. `operand`: the block whose copy on the device it makes old.
    `ready`: whether its gradients are at home. `done` is told at its end.
    """

    number: int
    operand: int | None
    staged: tuple[Staged, ...]
    thread_seconds: float
    host_seconds: float
    device_seconds: float
    ready: Callable[[], bool]
    done: Callable[[], None] = lambda: None
    had_copy: bool = False


class SimulatedUpdates(HostUpdates[Update]):
    """The updates of one optimizer, by the workers of `cores` cores; `notes` are told what they use in host memory.

    `seconds` are those in which at least one update was computed, or was ready for that and waited for a worker: what
    a report measures. What the thread that trains does for an update before is not among them.
    """

    def __init__(self, traffic: SimulatedTraffic, cores: int, notes: Notes) -> None:
        super().__init__(lambda update: update.number)
        self._traffic, self._cores, self._notes = traffic, cores, notes
        self._free_at = self._busy_until = 0.0
        self._waiting = False
        self.seconds = 0.0
        traffic.pump, traffic.make_way = self.pump, self.give_way

    def add(self, update: Update) -> None:
        """Queue `update`; until it is over nothing fetches its operand."""
        update.had_copy = self._traffic.begin_update(update.operand)
        self._put(update)

    def finish(self) -> None:
        """Carry everything out; the thread that trains lends a hand. Raises `CapacityError` if something cannot be
        opened."""
        self._waiting = True
        while not self.idle:
            self.pump()
            if self.idle:
                break
            if not self._traffic.busy():
                stuck = [part.block for part in self._opening[0].staged if not self._is_there(part.block)]
                raise self._traffic.residency.withdraw(stuck[0], Tier.HOST)
            self._traffic.wait_for_one()
        self._waiting = False

    def _is_free(self, update: Update) -> bool:
        return update.ready()

    def _has_places(self, update: Update) -> bool:
        state = self._traffic.residency.state
        return all(state(part.block, Tier.HOST) in PLACED for part in update.staged)

    def _is_open(self, update: Update) -> bool:
        return all(self._is_there(part.block) for part in update.staged)

    def _is_there(self, block: int) -> bool:
        residency = self._traffic.residency
        return residency.state(block, Tier.HOST) is CopyState.VALID and not residency.writing(block)

    def _request(self, update: Update) -> None:
        for part in update.staged:
            self._notes.staged(part.block, reads=part.load)
            self._traffic.ask(part.block, load=part.load)

    def _cancel(self, update: Update) -> None:
        for part in update.staged:
            self._traffic.unask(part.block)

    def _run(self, update: Update) -> None:
        traffic, seconds = self._traffic, update.host_seconds
        if not self._waiting:  # all but one of the workers: that one is the thread that trains
            seconds *= self._cores / max(1, self._cores - 1)
        else:  # which lends no hand to the update before while it prepares this one
            seconds += max(0.0, min(update.thread_seconds, self._free_at - traffic.now)) / self._cores
        traffic.now += update.thread_seconds
        self._running.append(update)
        if update.device_seconds:
            self._computes(traffic.now + update.device_seconds)
            traffic.now += update.device_seconds
            self._ended(update)
        else:
            self._free_at = max(traffic.now, self._free_at) + seconds
            self._computes(self._free_at)
            traffic.later(self._free_at, partial(self._ended, update))

    def _computes(self, end: float) -> None:
        """An update is computed, or waits for a worker, from now to `end`."""
        self.seconds += max(0.0, end - max(self._traffic.now, self._busy_until))
        self._busy_until = max(self._busy_until, end)

    def _ended(self, update: Update) -> None:
        self._running.remove(update)
        traffic = self._traffic
        for part in update.staged:
            traffic.release(part.block, Tier.HOST, dirty=part.changes)
        traffic.end_update(update.operand, renew=update.had_copy)
        for part in update.staged:
            if part.changes:
                traffic.execute(traffic.residency.settle(part.block))
        update.done()
        self.pump()


class SimulatedGradients:
    """Gradients of the chunks of one run. `arrivals` counts those of each parameter in a step; `arrangement` is as
    it is now, where chunks have got homes of gradients of their own.

    Chunks that are lent homes of gradients have one from the first arrival to their update. `new_bytes`, by tier: homes
    that gradients have for good and had not when the run began. Gradients are written to NVMe once those of all
    parameters of a chunk that are `awaited` are there; None: when the backward is over.
    """

    def __init__(
        self,
        traffic: SimulatedTraffic,
        notes: Notes,
        blocks: Mapping[tuple[str, int], int],
        arrangement: Arrangement,
        awaited: Callable[[int], Collection[int]] | None,
    ) -> None:
        self.arrangement = arrangement
        self._traffic, self._notes, self._blocks, self._awaited = traffic, notes, blocks, awaited
        self.arrivals: Counter[int] = Counter()
        self.new_bytes: Counter[Tier] = Counter()
        self._lending = Lending(arrangement.set_aside)
        self._lent: dict[int, int] = {}
        """The bytes of the homes in host memory that gradients were lent, by chunk."""

    def send(self, parameter: int, device_bytes: int) -> None:
        """A gradient of `parameter`, of `device_bytes` as it was made, arrives. Raises `NoRoom` if it has no place and
        there is none for a home of its own."""
        arrangement, sends = self.arrangement, self._traffic.gradients
        chunk, ground = arrangement.chunk_of[parameter], arrangement.ground
        if chunk in arrangement.lent and chunk not in self._lent:
            sends.find_place(chunk, self)
        elif (
            parameter in self.arrivals
            and ground.role_itemsize(chunk, arrangement.gradient(chunk)) < ground.chunks[chunk].itemsize
        ):
            self._widen(chunk)
        arrangement = self.arrangement
        nbytes = arrangement.elements[parameter] * ground.role_itemsize(chunk, arrangement.gradient(chunk))
        tier = arrangement.homes["grad"][chunk]
        if tier is Tier.HOST:
            self._traffic.send_gradient(chunk, nbytes, device_bytes)
        if tier is not Tier.NVME:
            return
        block = self._blocks["grad", chunk]
        if self._awaited is not None:
            sends.complete.add(chunk, parameter, self._awaited)
        load = any(other in self.arrivals for other in ground.chunks[chunk].parameters)
        self._notes.staged(block, reads=load)
        self._traffic.open_staged(block, load=load)
        self._traffic.send_gradient(chunk, nbytes, device_bytes, partial(self._staged, chunk, block))

    def _staged(self, chunk: int, block: int) -> None:
        """A gradient of `chunk` is in staging, in `block`."""
        self._traffic.release(block, Tier.HOST, dirty=True)
        if self._traffic.gradients.to_be_written(chunk):
            self._traffic.execute(self._traffic.residency.settle(block))

    # ---- memory: see `schedule.gradients.GradientMemory` ---------------------------------------------------------

    def lend(self, chunk: int) -> bool:
        """Give gradients of `chunk` a place that was set aside; False if all that are large enough are lent."""
        place = self._lending.take(self.arrangement.ground.home_bytes(chunk, "arriving"))
        if place is not None:
            self._lent[chunk] = place
        return place is not None

    def may_lend(self, chunk: int) -> bool:
        """Whether a place for gradients of `chunk` was set aside, lent or not."""
        return self._lending.lends(self.arrangement.ground.home_bytes(chunk, "arriving"))

    def give_own(self, chunk: int) -> None:
        """Give gradients of `chunk` a home for good. Raises `NoRoom` if there is none."""
        self.arrangement = arrangement = with_own_gradients(self.arrangement, chunk)
        tier = arrangement.homes["grad"][chunk]
        self.new_bytes[tier] += arrangement.ground.home_bytes(chunk, "grad")
        self._traffic.rehome(self._blocks["grad", chunk], tier)

    def waits(self, chunk: int) -> bool:
        """Whether gradients of `chunk` have a home that was lent for them."""
        return chunk in self._lent

    def retire(self, chunk: int) -> None:
        """The update of `chunk` has read its gradients."""
        if chunk in self._lent:
            self._lending.give(self._lent.pop(chunk))

    def _widen(self, chunk: int) -> None:
        """Give gradients of `chunk`, to which one more is added than fits into their bits, a home for good."""
        self._traffic.wait_for_gradients()
        if chunk in self.arrangement.lent:
            self.give_own(chunk)
        self.retire(chunk)
