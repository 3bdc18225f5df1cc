"""Segments, moments, gradients and updates of a simulated run: what a run does beside the transfers of copies.

`Notes` does with segments, moments and the device's room what `engine.runtime` and `engine.device_limit` do in a run.
Gradients and updates follow the decisions of `schedule.gradients` and `schedule.updates`; `step_program` decides when
an update begins. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from hetmem.base.hardware import HostProfile
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

    # ---- moments -----------------------------------------------------------------------------------------------

    def moment(self, operator: str, blocks: tuple[int, ...], live_bytes: int) -> None:
        """Begin a moment: `operator` uses `blocks` next. `live_bytes`: device bytes beside chunks and gradients in
        flight."""
        self._traffic.poll()
        leaving = self._traffic.gradient_bytes()
        moment = self._tracer.moment(operator, blocks, live_bytes + leaving, leaving)
        self.set_limit(moment.non_model_bytes)
        self._traffic.residency.reach(blocks, DEVICE)
        self.peaks.device_in_use(self.chunk_bytes(), moment.non_model_bytes)

    def all_at_once(self, blocks: Iterable[int]) -> bool:
        """Count what the segment that has begun needs beside chunks, at most, with all copies if each of `blocks` has
        one: they are leased until it ends. Return whether they are."""
        moment = self._tracer.all_ahead(())
        if moment is None or not self._traffic.residency.all_on_device(blocks):
            return False
        if self.missing_bytes(moment.non_model_bytes) <= 0:
            self.peaks.device_in_use(self.chunk_bytes(), moment.non_model_bytes)
        return True

    def acquire(self, block: int, live_bytes: int) -> None:
        """Use `block` on the device in the moment that began with `live_bytes`. If there is no room, try again with
        the bytes that gradients in flight have freed since the moment began."""
        try:
            self._traffic.acquire(block, DEVICE)
        except CapacityError:
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


class SimulatedGradients:
    """Gradients of the chunks of one run. `arrivals` counts those of each parameter in a step; `arrangement` is the
    current one: it changes when gradients get a permanent home.

    A chunk of `arrangement.lent` borrows a home for gradients from their first arrival to their update. `new_bytes`, by
    tier: permanent homes that gradients got during the run. `hurry` begins updates in the first step, if it may: see
    `schedule.gradients.GradientMemory`. A chunk's gradients are written to NVMe once those of its `awaited` parameters
    have arrived; None: when the backward is over. `most` returns how many gradients a chunk gets in a backward.
    """

    def __init__(
        self,
        traffic: SimulatedTraffic,
        notes: Notes,
        blocks: Mapping[tuple[str, int], int],
        arrangement: Arrangement,
        awaited: Callable[[int], Collection[int]] | None,
        hurry: Callable[[], bool],
        most: Callable[[int], int],
    ) -> None:
        self.arrangement = arrangement
        self._traffic, self._notes, self._blocks, self._awaited = traffic, notes, blocks, awaited
        self._most = most
        self.arrivals: Counter[int] = Counter()
        self.new_bytes: Counter[Tier] = Counter()
        self._lending = Lending(arrangement.set_aside)
        self._lent: dict[int, int] = {}
        """The bytes of the places that chunks borrow, by chunk."""
        self._loans: dict[int, int] = {}
        """Those of memory that was not set aside."""
        self.loaned_bytes = 0
        """The most of that, beside `new_bytes`, at one time."""
        self.hurry = hurry
        self.gathers = False
        """Whether gradients of a chunk wait on the device until they are all there: those of working weights."""
        self.gathered: dict[int, tuple[int, int, int]] = {}
        """By chunk, how many are missing, and the bytes at home and on the device of those that wait."""
        self._allowed = 0

    def send(self, parameter: int, device_bytes: int) -> None:
        """Send a gradient of `parameter`, of `device_bytes` on the device, home. Raises `NoRoom` if no home can be
        borrowed and there is no room for a permanent one."""
        arrangement, sends = self.arrangement, self._traffic.gradients
        chunk, ground = arrangement.chunk_of[parameter], arrangement.ground
        if chunk in arrangement.lent and not self.waits(chunk):
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
            self._send_to_host(chunk, nbytes, device_bytes)
        if tier is not Tier.NVME:
            return
        block = self._blocks["grad", chunk]
        if self._awaited is not None:
            sends.complete.add(chunk, parameter, self._awaited)
        load = any(other in self.arrivals for other in ground.chunks[chunk].parameters)
        self._notes.staged(block, reads=load)
        self._traffic.open_staged(block, load=load)
        self._traffic.send_gradient(chunk, nbytes, device_bytes, partial(self._staged, chunk, block))

    def _send_to_host(self, chunk: int, nbytes: int, device_bytes: int) -> None:
        """Send a gradient of `chunk`; where they are gathered, all of them with the last: see `gathered_gradients`."""
        traffic = self._traffic
        if not self.gathers:
            traffic.send_gradient(chunk, nbytes, device_bytes)
            return
        if chunk not in self.gathered:
            self._allowed = traffic.gradients.room_bytes(max(0, self._notes.beside_chunks()))
        missing, at_home, on_device = self.gathered.get(chunk, (self._most(chunk), 0, 0))
        self.gathered[chunk] = missing - 1, at_home + nbytes, on_device + device_bytes
        traffic.gathered_bytes += device_bytes
        if missing == 1 or traffic.gathered_bytes > self._allowed:
            self.send_gathered([chunk] if missing == 1 else [*self.gathered])

    def send_gathered(self, chunks: Collection[int]) -> None:
        """Send the gradients of `chunks` that wait for others."""
        for chunk in chunks:
            _, nbytes, device_bytes = self.gathered.pop(chunk)
            self._traffic.gathered_bytes -= device_bytes
            self._traffic.send_gradient(chunk, nbytes, device_bytes)

    def _staged(self, chunk: int, block: int) -> None:
        """Release `block`, now that a gradient of `chunk` is in it in staging, and write it if it is complete."""
        self._traffic.release(block, Tier.HOST, dirty=True)
        if self._traffic.gradients.to_be_written(chunk):
            self._traffic.execute(self._traffic.residency.settle(block))

    # ---- memory: see `schedule.gradients.GradientMemory` ---------------------------------------------------------

    def lend(self, chunk: int) -> bool:
        """Lend gradients of `chunk` a home that was set aside, or what is free; False if there is none now."""
        arrangement = self.arrangement
        nbytes = arrangement.ground.home_bytes(chunk, "arriving")
        place = self._lending.take(nbytes)
        if place is not None:
            self._lent[chunk] = place
        elif not arrangement.ground.staging_slots and nbytes <= arrangement.left.host_bytes:
            self._loans[chunk] = nbytes
            self._borrow(nbytes)
        return self.waits(chunk)

    def _borrow(self, nbytes: int) -> None:
        left = self.arrangement.left
        self.arrangement = replace(self.arrangement, left=replace(left, host_bytes=left.host_bytes - nbytes))
        self._note_loans()

    def _note_loans(self) -> None:
        self.loaned_bytes = max(self.loaned_bytes, sum(self._loans.values()) + self.new_bytes[Tier.HOST])

    def may_lend(self, chunk: int) -> bool:
        """Return whether a home large enough for gradients of `chunk` was set aside, lent or not."""
        return self._lending.lends(self.arrangement.ground.home_bytes(chunk, "arriving"))

    def give_own(self, chunk: int) -> None:
        """Give gradients of `chunk` a permanent home. Raises `NoRoom` if there is no room."""
        self.arrangement = arrangement = with_own_gradients(self.arrangement, chunk)
        tier = arrangement.homes["grad"][chunk]
        self.new_bytes[tier] += arrangement.ground.home_bytes(chunk, "grad")
        self._note_loans()
        self._traffic.rehome(self._blocks["grad", chunk], tier)

    def waits(self, chunk: int) -> bool:
        """Return whether gradients of `chunk` wait in a borrowed home for their update."""
        return chunk in self._lent or chunk in self._loans

    def retire(self, chunk: int) -> None:
        """Give the borrowed home of `chunk` back, now that the update has read its gradients."""
        if chunk in self._lent:
            self._lending.give(self._lent.pop(chunk))
        elif chunk in self._loans:
            self._borrow(-self._loans.pop(chunk))

    def prepare_sums(self, begun: Collection[int]) -> None:
        """As another backward of the step begins, move gradients that wait, and that no update has `begun` to read,
        where sums are exact: the last loans first, as their memory is beside what is free."""
        ground = self.arrangement.ground
        for chunk in (*self._lent, *reversed(self._loans)):
            if chunk not in begun and ground.role_itemsize(chunk, "arriving") < ground.chunks[chunk].itemsize:
                self._widen(chunk)

    def _widen(self, chunk: int) -> None:
        """Give gradients of `chunk` a permanent home, as their sum needs a wider dtype than a single one."""
        self._traffic.wait_for_gradients()
        if chunk in self.arrangement.lent:
            self.give_own(chunk)
        self.retire(chunk)
