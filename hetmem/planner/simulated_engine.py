"""Segments, moments, gradients and updates of a simulated run: what a run does beside the transfers of copies.

`Notes` does with segments, moments and the device's room what `engine.runtime` and `engine.device_limit` do in a run.
Gradients and updates follow the decisions of `schedule.gradients` and `schedule.updates`; `step_program` decides when
an update begins. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from functools import partial

from hetmem.base.hardware import HostProfile
from hetmem.base.units import format_size
from hetmem.errors import CapacityError
from hetmem.planner.simulator import SimulatedTraffic
from hetmem.schedule.blocks import PLACED, CopyState
from hetmem.schedule.chunk_limit import ChunkLimit, DevicePeaks
from hetmem.schedule.placement import Capacities, Ground, NoRoom, idle_bytes, room_bytes
from hetmem.schedule.trace import DEVICE, STEP, Tier
from hetmem.schedule.tracer import StepTracer
from hetmem.schedule.updates import HostUpdates

FORWARD, BACKWARD = ("forward",), ("backward",)


class Notes(ChunkLimit):
    """The segments and moments of one run, and the limit of device memory for chunks at each.

    `home_bytes`: homes on the device and everything else that stays there beside copies; `gradient_bytes`: gradients
    that stay there. `ahead_bytes`: room that copies, if there are many, leave to prefetched activations. A run without
    device slots has no limit.
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
        self._own_bytes = self.gradient_bytes = 0
        self.peaks = DevicePeaks()
        self.staged, self.sent = self._tracer.host_use, self._tracer.sent
        self.knows_a_backward = self._tracer.knows_a_backward

    # ---- segments ----------------------------------------------------------------------------------------------

    def begin(self, key: Hashable) -> None:
        """Begin the segment `key`, and end the one before."""
        tracer = self._tracer
        tracer.end()
        tracer.begin(key, measured=key != STEP and tracer.must_measure(key))
        if tracer.known is not None and tracer.known.opening.non_model_bytes:
            self.set_limit(tracer.known.opening.non_model_bytes)
        self._traffic.poll()
        self._expect(key)

    def end(self) -> None:
        """End the running segment, and prefetch for the one that usually follows."""
        follower = self._tracer.book.follower(self._tracer.key)
        self._tracer.end()
        if follower is not None:
            self._expect(follower)

    def _expect(self, key: Hashable) -> None:
        self._traffic.execute(self._traffic.residency.expect(self._tracer.book.schedules(key)))

    @property
    def measured(self) -> bool:
        """Whether the running segment is measured."""
        return self._tracer.measured

    # ---- moments -----------------------------------------------------------------------------------------------

    def moment(self, operator: str, blocks: tuple[int, ...], live_bytes: int) -> None:
        """Begin a moment: `operator` uses `blocks` next. `live_bytes`: device bytes beside chunks and gradients in
        flight."""
        self._traffic.poll()
        leaving = self._traffic.gradient_bytes()
        moment = self._tracer.moment(operator, blocks, live_bytes + leaving, leaving)
        if self._traffic.summed_bytes and not self.leaves_copies(moment, self._traffic.summed_bytes):
            self._traffic.send_sums()
        self.set_limit(moment.non_model_bytes + self._traffic.summed_bytes)
        self._traffic.residency.reach(blocks, DEVICE)
        if self._traffic.gathered_bytes and not self._tracer.measured and self.leaving_bytes > self.beside_chunks():
            self._traffic.send_gathered()
        self.peaks.device_in_use(self.chunk_bytes(), moment.non_model_bytes)

    def all_at_once(self, blocks: Iterable[int]) -> None:
        """Count what the segment that has begun needs beside chunks, at most, with all copies if each of `blocks` has
        one: they are leased until it ends."""
        moment = self._tracer.all_ahead(())
        if moment is None or not self._traffic.residency.all_on_device(blocks):
            return
        if self.missing_bytes(moment.non_model_bytes) <= 0:
            self.peaks.device_in_use(self.chunk_bytes(), moment.non_model_bytes)

    def acquire(self, block: int, live_bytes: int) -> None:
        """Use `block` on the device in the moment that began with `live_bytes`. If there is no room, try again with
        the bytes that gradients in flight have freed since the moment began."""
        try:
            self._traffic.acquire(block, DEVICE)
        except CapacityError:
            if self._traffic.summed_bytes:  # copies of earlier moments are in use beside those of this one
                self._traffic.send_sums()
                self.set_limit(self._tracer.expected.non_model_bytes, needs_all=True)
                self._traffic.acquire(block, DEVICE)
                return
            if not self._tracer.measured:
                raise
            self._own_bytes = live_bytes
            self.begin_with(self._live())
            self._traffic.acquire(block, DEVICE)

    def idle_bytes(self) -> int:
        """Return the device bytes that a step leaves idle; see `schedule.placement`."""
        capacities = self.capacities
        chunk_bytes = self.home_bytes + self._all_slots * self._slot_bytes
        beside = self.peaks.non_model_peak_bytes
        return idle_bytes(capacities.usable_bytes, capacities.chunk_cap_bytes, beside, chunk_bytes)

    def grew(self, live_bytes: int) -> None:
        """Evict idle copies, now that tensors beside chunks and gradients in flight take `live_bytes`.

        Does nothing where a trace predicts them. Raises `NoRoom` if too little can be evicted.
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
        return self._own_bytes + self._traffic.gradient_bytes() + self.gradient_bytes

    @property
    def leaving_bytes(self) -> int:
        """Bytes of gradients and activations in flight."""
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
    """A block on NVMe that an update opens in host memory. `load`: it is read first; `changes`: it is written back."""

    block: int
    load: bool
    changes: bool


@dataclass(slots=True, eq=False)
class Update:
    """The update of chunk `number`, and its cost: `thread_seconds` of the training thread, then traffic of `host_bytes`
    by all the host's workers together, or `device_seconds`.

    `operand`: the block whose copy on the device it makes stale. `ready()`: whether its gradients are at home. `done`
    is called at its end. `had_copy`: whether `operand` had a copy when the update was queued.
    """

    number: int
    operand: int | None
    staged: tuple[Staged, ...]
    thread_seconds: float
    host_bytes: float
    device_seconds: float
    ready: Callable[[], bool]
    done: Callable[[], None] = lambda: None
    had_copy: bool = False


class SimulatedUpdates(HostUpdates[Update]):
    """The updates of one optimizer, by the workers of `host`; the trace of `notes` records what they stage.

    `seconds`: the time in which at least one update was computed, or was ready and waited for a worker, as a report
    measures it. Time of the training thread is not included.
    """

    def __init__(self, traffic: SimulatedTraffic, host: HostProfile, notes: Notes) -> None:
        super().__init__(lambda update: update.number)
        self._traffic, self._host, self._notes = traffic, host, notes
        self._carried = 0
        self._busy_until = 0.0
        self._waiting = False
        self.seconds = 0.0
        traffic.pump, traffic.make_way = self.pump, self.give_way

    def add(self, update: Update) -> None:
        """Queue `update`; its operand is not fetched until the update has ended."""
        update.had_copy = self._traffic.begin_update(update.operand)
        self._put(update)

    def finish(self) -> None:
        """Finish all updates, with the training thread as one of the workers. Raises `CapacityError` if staging has no
        room for a block."""
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

    def _has_slots(self, update: Update) -> bool:
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
        traffic, host = self._traffic, self._host
        beside = max(0.0, traffic.updating_until - traffic.now)  # the updates before are computed for so long
        if not self._waiting:  # the training thread, one of the workers, is busy elsewhere
            seconds = update.host_bytes / host.shared_update_bytes_per_second
        else:  # while it prepares this update, it does not work on the one before
            seconds = update.host_bytes / host.update_bytes_per_second + min(update.thread_seconds, beside) / host.cores
        if beside:  # what links have carried meanwhile took the same memory
            seconds += (traffic.host_bytes - self._carried) / host.traffic_bytes_per_second
        self._carried = traffic.host_bytes
        traffic.takes(update.thread_seconds)
        self._running.append(update)
        if update.device_seconds:
            self._computes(traffic.now + update.device_seconds)
            traffic.now += update.device_seconds
            self._ended(update)
        else:
            traffic.updating_until = max(traffic.now, traffic.updating_until) + seconds
            self._computes(traffic.updating_until)
            traffic.later(traffic.updating_until, partial(self._ended, update))

    def _computes(self, end: float) -> None:
        """Count the seconds from now to `end`, in which an update is computed or waits for a worker."""
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
