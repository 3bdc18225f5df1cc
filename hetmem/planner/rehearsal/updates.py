"""Carries out gradients and updates on the simulator's clock, as `schedule.gradients` and `schedule.updates` decide.

Gradients go home, or to a place on the device where their update reads them. An update on the device has its states
brought to a slot on one link, is made behind that, and its states go home on the other; a copy for operators is made
from the slot. When an update begins is decided in `step_program`. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Container, Mapping
from dataclasses import dataclass
from functools import partial

from hetmem.planner.rehearsal.room import Notes
from hetmem.planner.rehearsal.simulator import SimulatedTraffic
from hetmem.planner.reservation import Arrangement, with_own_gradients
from hetmem.schedule.blocks import PLACED, CopyState
from hetmem.schedule.gradients import Lending, wait_until
from hetmem.schedule.trace import Tier
from hetmem.schedule.update_split import SLOTS
from hetmem.schedule.updates import DeviceUpdates, GradientPlaces, HostUpdates


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
    `ready`: whether its gradients are at home. `done` is told at its end. `crossing`: the bytes
    that come to the device for it and go home again, where states do.
    """

    number: int
    operand: int | None
    staged: tuple[Staged, ...]
    thread_seconds: float
    host_seconds: float
    device_seconds: float
    ready: Callable[[], bool]
    done: Callable[[], None] = lambda: None
    crossing: tuple[int, int] | None = None
    had_copy: bool = False
    borrows: bool = False
    """Whether its gradients were brought to a place, and did not arrive in one."""


class SimulatedDeviceUpdates(DeviceUpdates[int, Update, None, None]):
    """Those updates that run on the device. `begun` are the numbers of the chunks. `updates` has the others."""

    updates: SimulatedUpdates

    def __init__(self, traffic: SimulatedTraffic, notes: Notes) -> None:
        super().__init__(GradientPlaces())
        self._traffic, self._notes = traffic, notes
        self._reading = 0
        self.begun: set[int] = set()
        self.slot_bytes = 0
        self.sent_home_bytes = 0

    # ---- slots -------------------------------------------------------------------------------------------------

    def idle_bytes(self) -> int:
        """See `schedule.update_split`; what slots take is not idle."""
        return self._notes.idle_bytes()

    def take_slots(self, nbytes: int) -> bool:
        """Have slots of `nbytes` each. Call it with nothing under way."""
        self.give_slots_back()
        self.slot_bytes, self._free = nbytes, [None] * SLOTS
        self.kept.open([None] * SLOTS)
        self._notes.home_bytes += SLOTS * nbytes
        return True

    def give_slots_back(self) -> None:
        """Their memory is the device's again, once updates that trail are over (a run leaves those of them that are
        queued to the host)."""
        self.pump()
        while not self.idle:
            self._traffic.wait_for_one()
            self.pump()
        assert not self.kept.chunks, "gradients that stay belong to an update"
        self.kept.give_up()
        self._free.clear()
        self._notes.home_bytes -= SLOTS * self.slot_bytes
        self.slot_bytes = 0

    # ---- updates -----------------------------------------------------------------------------------------------

    def _chunk(self, update: Update) -> int:
        return update.number

    def _is_ready(self, update: Update) -> bool:
        return update.ready()

    @property
    def _reads_gradients(self) -> bool:
        return bool(self._reading)

    def _leave_to_host(self, update: Update) -> None:
        update.crossing, update.device_seconds = None, 0.0
        self.updates.add_here(update)

    def _wait_until(self, reached: Callable[[], bool]) -> bool:
        return wait_until(self._traffic, reached)

    def _begin(self, update: Update, slot: None) -> None:
        """The host tells the link what to bring, which is updated there."""
        assert update.crossing is not None
        self._running.append(update)
        self._reading += 1
        update.borrows = not self.kept.holds(update.number)
        if update.borrows:
            self.kept.borrow()
        self.begun.add(update.number)
        traffic = self._traffic
        traffic.now += update.thread_seconds
        there_bytes, home_bytes = update.crossing
        brought = partial(self._brought, update, home_bytes)
        traffic.copy_beside(traffic.host_to_device, there_bytes, brought, update.device_seconds)

    def _brought(self, update: Update, home_bytes: int) -> None:
        """The gradients have been read."""
        self._reading -= 1
        if update.borrows:
            self.kept.put_back(None)
        else:
            self.kept.leave(update.number)
        self.sent_home_bytes += home_bytes
        self._traffic.copy_beside(self._traffic.device_to_host, home_bytes, partial(self._home, update))

    def _home(self, update: Update) -> None:
        self._traffic.end_update(update.operand, renew=update.had_copy, near=True)
        self._running.remove(update)
        self._free.append(None)
        update.done()
        self.updates.pump()


class SimulatedUpdates(HostUpdates[Update]):
    """The updates of one optimizer, by the workers of `cores` cores; `opened` is told what it uses in host
    memory. `streamed` has those with a `crossing`.

    `seconds` are those in which at least one update here was computed, or was ready for that and waited for a worker:
    what a report measures. What the thread that trains does for an update before is not among them, nor those of
    `streamed`.
    """

    def __init__(self, traffic: SimulatedTraffic, cores: int, notes: Notes) -> None:
        super().__init__(lambda update: update.number)
        self._traffic, self._cores, self._notes = traffic, cores, notes
        self.streamed: SimulatedDeviceUpdates = SimulatedDeviceUpdates(traffic, notes)
        self.streamed.updates = self
        self._free_at = self._busy_until = 0.0
        self._waiting = False
        self.seconds = 0.0
        traffic.pump, traffic.hasten, traffic.make_way = self.pump, self.hasten, self.give_way

    def add(self, update: Update) -> None:
        """Queue `update`; until it is over nothing fetches its operand."""
        update.had_copy = self._traffic.begin_update(update.operand)
        if update.crossing is None:
            self.add_here(update)
        else:
            self.streamed.add(update)

    def add_here(self, update: Update) -> None:
        """Queue `update` for the host."""
        self._queue.add(update)

    def finish(self) -> None:
        """Carry everything out; the thread that trains lends a hand. Raises `CapacityError` if something cannot be
        opened."""
        self._waiting = True
        while not self.idle:
            self.streamed.give_way()
            self.pump()
            if self.idle:
                break
            if not self._traffic.busy():
                stuck = [part.block for part in self._opening[0].staged if not self._is_there(part.block)]
                raise self._traffic.residency.withdraw(stuck[0], Tier.HOST)
            self._traffic.wait_for_one()
        self._waiting = False

    def hasten(self, block: int) -> None:
        """`block` is waited for: if it is the operand of an update that is queued, that is next."""
        for update in self._queue:
            if update.operand == block:
                self._queue.put_first(update.number)

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

    def _ask(self, update: Update) -> None:
        for part in update.staged:
            self._notes.staged(part.block, reads=part.load)
            self._traffic.ask(part.block, load=part.load)

    def _unask(self, update: Update) -> None:
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
    """Gradients of the chunks of one run. `arrivals` counts those of each parameter in a step.

    Chunks that are lent homes of gradients have one from the first arrival to their update; those of which
    `comes_there` is true have it on the device, as far as `streamed` has places; the bytes of these are `stayed_bytes`.
    `new_bytes`, by tier: homes that gradients have for good and had not when the run began. Gradients are written
    to NVMe once those of all parameters of a chunk that are `awaited` are there; None: when the backward is over.
    """

    def __init__(
        self,
        traffic: SimulatedTraffic,
        notes: Notes,
        streamed: SimulatedDeviceUpdates,
        blocks: Mapping[tuple[str, int], int],
        comes_there: Callable[[int], bool],
        set_aside: tuple[int, ...],
        awaited: Callable[[int], Collection[int]] | None,
    ) -> None:
        self._arrangement: Arrangement
        self._traffic, self._notes, self._streamed, self._blocks = traffic, notes, streamed, blocks
        self._kept = streamed.kept
        self._comes_there, self._awaited = comes_there, awaited
        self.arrivals: Counter[int] = Counter()
        self.stayed_bytes = 0
        self.new_bytes: Counter[Tier] = Counter()
        self._lending = Lending(set_aside)
        self._lent: dict[int, int] = {}
        """The bytes of the homes in host memory that gradients were lent, by chunk."""
        self._stayed: Counter[int] = Counter()
        """Bytes that have arrived in chunks whose gradients stay on the device."""

    def begin_step(self) -> None:
        """No gradient has arrived."""
        self.arrivals.clear()
        self._stayed.clear()

    def begin_backward(self) -> None:
        """Of the backward that begins no gradient has arrived."""
        self._traffic.gradients.complete.begin()

    def send(self, arrangement: Arrangement, parameter: int, device_bytes: int) -> Arrangement:
        """A gradient of `parameter`, of `device_bytes` as it was made, arrives. Returns `arrangement`, where its chunk
        has got a home of its own for that if there was no other. Raises `NoRoom` if there is none at all."""
        self._arrangement = arrangement
        chunk, sends = arrangement.chunk_of[parameter], self._traffic.gradients
        ground = arrangement.ground
        if chunk in arrangement.lent and not self.waits(chunk):
            sends.find_place(chunk, self)
        elif (
            parameter in self.arrivals
            and ground.role_itemsize(chunk, arrangement.gradient(chunk)) < ground.chunks[chunk].itemsize
        ):
            self._widen(chunk)
        arrangement = self._arrangement
        nbytes = arrangement.elements[parameter] * ground.role_itemsize(chunk, arrangement.gradient(chunk))
        tier = arrangement.homes["grad"][chunk]
        if tier is Tier.DEVICE:
            return arrangement
        if self._kept.holds(chunk):
            self._stayed[chunk] += nbytes
            self.stayed_bytes += nbytes
            return arrangement
        if tier is Tier.HOST:
            self._traffic.send_gradient(chunk, nbytes, device_bytes)
            return arrangement
        block = self._blocks["grad", chunk]
        if self._awaited is not None:
            sends.complete.comes(chunk, parameter, self._awaited, adds=parameter in self.arrivals)
        load = any(other in self.arrivals for other in ground.chunks[chunk].parameters)
        self._notes.staged(block, reads=load)
        self._traffic.open_staged(block, load=load)
        self._traffic.send_gradient(chunk, nbytes, device_bytes, partial(self._staged, chunk, block))
        return arrangement

    def _staged(self, chunk: int, block: int) -> None:
        """A gradient of `chunk` is in staging, in `block`."""
        self._traffic.release(block, Tier.HOST, dirty=True)
        if self._traffic.gradients.to_be_written(chunk):
            self._traffic.execute(self._traffic.residency.settle(block))

    # ---- places: see `schedule.gradients.Places` ----------------------------------------------------------------

    def keep(self, chunk: int) -> bool:
        """Keep gradients of `chunk` on the device, where their update reads them; False if they go home."""
        if not (self._comes_there(chunk) and self._streamed.find_place()):
            return False
        self._kept.take(chunk)
        return True

    def lend(self, chunk: int) -> bool:
        """Give gradients of `chunk` a place that was set aside; False if all that are large enough are lent."""
        place = self._lending.take(self._arrangement.ground.home_bytes(chunk, "arriving"))
        if place is not None:
            self._lent[chunk] = place
        return place is not None

    def may_lend(self, chunk: int) -> bool:
        """Whether a place for gradients of `chunk` was set aside, lent or not."""
        return self._lending.lends(self._arrangement.ground.home_bytes(chunk, "arriving"))

    def give_own(self, chunk: int) -> None:
        """Give gradients of `chunk` a home for good. Raises `NoRoom` if there is none."""
        self._arrangement = arrangement = with_own_gradients(self._arrangement, chunk)
        tier = arrangement.homes["grad"][chunk]
        self.new_bytes[tier] += arrangement.ground.home_bytes(chunk, "grad")
        self._traffic.rehome(self._blocks["grad", chunk], tier)

    def waits(self, chunk: int) -> bool:
        """Whether gradients of `chunk` have a home that was lent for them."""
        return chunk in self._lent or self._kept.holds(chunk)

    def retire(self, chunk: int) -> None:
        """The update of `chunk` has read its gradients."""
        if chunk in self._lent:
            self._lending.give(self._lent.pop(chunk))

    def bring_home(self, arrangement: Arrangement, but: Container[int]) -> Arrangement:
        """The backward is over: what has stayed on the device goes home, except gradients of chunks in `but`. Returns
        `arrangement` as `send` does."""
        self._arrangement = arrangement
        for chunk in self._kept.chunks:
            if chunk not in but:
                self._leave_device(chunk)
        return self._arrangement

    def _leave_device(self, chunk: int) -> None:
        if not self._traffic.gradients.lend(chunk, self):
            self.give_own(chunk)
        self._traffic.send_home(self._arrangement.role_bytes(chunk, "arriving"))
        self.stayed_bytes -= self._stayed[chunk]
        self._kept.leave(chunk)

    def _widen(self, chunk: int) -> None:
        """Give gradients of `chunk`, to which one more is added than fits into their bits, a home for good."""
        self._traffic.wait_for_gradients()
        if self._kept.holds(chunk):
            self._leave_device(chunk)
        if chunk in self._arrangement.lent:
            self.give_own(chunk)
        self.retire(chunk)
