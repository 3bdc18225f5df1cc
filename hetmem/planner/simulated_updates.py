"""Updates on the simulator's clock: what `schedule.updates` decides, carried out by workers and links that are numbers.

Those on the device have their states brought to a slot on one link, are made behind that, and go home on the other;
then a copy for operators is made from the slot. Gradients are brought to a place beside the slots, or stay in one as
they arrive. Pure.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from hetmem.planner.reservation import Arrangement
from hetmem.planner.simulated_trace import Notes
from hetmem.planner.simulator import SimulatedTraffic
from hetmem.planner.workload import Workload
from hetmem.schedule.blocks import PLACED, CopyState
from hetmem.schedule.trace import Tier
from hetmem.schedule.update_split import SLOTS, Facts, Fitting
from hetmem.schedule.updates import DeviceUpdates, GradientPlaces, HostUpdates


@dataclass(frozen=True, slots=True)
class Staged:
    """A block on NVMe that an update opens in host memory. `load`: what it holds matters; `changes`: it is written."""

    block: int
    load: bool
    changes: bool


@dataclass(frozen=True, slots=True)
class Crossing:
    """What of a chunk is brought to the device for its update, and what of it goes home again."""

    there_bytes: int
    home_bytes: int


@dataclass(slots=True, eq=False)
class Update:
    """The update of a chunk, and what it takes: `thread_seconds` of the thread that trains, then `host_seconds` of all
    the host's workers together, or `device_seconds`.

    `number`: of the chunk. `operand`: the block whose copy on the device it makes old, unless it `keeps_copy`.
    `ready`: whether its gradients are at home. `done` is told at its end. `crossing`: given where states come to the
    device for it.
    """

    number: int
    operand: int | None
    staged: tuple[Staged, ...]
    thread_seconds: float
    host_seconds: float
    device_seconds: float
    keeps_copy: bool
    ready: Callable[[], bool]
    done: Callable[[], None] = lambda: None
    crossing: Crossing | None = None
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

    def _wait(self) -> bool:
        return self._traffic.go_on()

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
        brought = partial(self._brought, update, update.crossing.home_bytes)
        traffic.copy_beside(traffic.host_to_device, update.crossing.there_bytes, brought, update.device_seconds)

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
        traffic.worker = self

    def add(self, update: Update) -> None:
        """Queue `update`; until it is over nothing fetches its operand."""
        update.had_copy = self._traffic.begin_update(update.operand, keep_copy=update.keeps_copy)
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
                self._queue.hasten(update.number)

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
        traffic.end_update(update.operand, renew=update.had_copy and not update.keeps_copy)
        for part in update.staged:
            if part.changes:
                traffic.execute(traffic.residency.settle(part.block))
        update.done()
        self.pump()


def fits(arrangement: Arrangement, workload: Workload, chunk: int) -> bool:
    """Whether all of `chunk` can be updated on the device: float32, all of it trained, its homes in host memory."""
    spec = arrangement.ground.chunks[chunk]
    if (
        chunk not in arrangement.homes["exp_avg"]
        or spec.itemsize != 4
        or not workload.trainable.issuperset(spec.parameters)
    ):
        return False
    return all(homes[chunk] is Tier.HOST for homes in arrangement.homes.values() if chunk in homes)


def facts_of(arrangement: Arrangement, workload: Workload, *, gradients_stay: bool = False) -> Facts:
    """What the choice of `schedule.update_split` depends on, as `optim.device_updates` sees it."""
    homes, chunks = arrangement.homes, [chunk.index for chunk in arrangement.ground.chunks]
    fitting = [chunk for chunk in chunks if fits(arrangement, workload, chunk)]
    copy_bytes = 0
    if fitting:
        copy_bytes = workload.compute_itemsizes[arrangement.ground.chunks[fitting[0]].parameters[0]]
    return Facts(
        [Fitting(chunk, arrangement.numels[chunk], _bytes(arrangement, chunk)) for chunk in fitting],
        sum(arrangement.numels[chunk] for chunk in chunks if homes["param"][chunk] is Tier.DEVICE),
        copy_bytes,
        copy_bytes if fitting and fitting[0] in homes.get("compute", {}) else 0,
        gradients_stay,
    )


def crossing(arrangement: Arrangement, chunk: int, *, kept: bool = False) -> Crossing:
    """All of `chunk` comes to the device but the 16-bit copy, which is made there, and a gradient that is `kept` there;
    all but the gradient goes home."""
    made_there = ("compute", "grad") if kept else ("compute",)
    return Crossing(_bytes(arrangement, chunk, *made_there), _bytes(arrangement, chunk, "grad"))


def _bytes(arrangement: Arrangement, chunk: int, *but: str) -> int:
    """Of all roles of `chunk` together, without those named."""
    roles = (role for role, homes in arrangement.homes.items() if chunk in homes and role not in but)
    return sum(arrangement.role_bytes(chunk, role) for role in roles)
