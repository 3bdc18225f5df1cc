"""Updates on the device with states brought there, on the simulator's clock: the counterpart of `optim.device_updates`.

States are brought to a slot on one link, updated behind that, and sent home on the other; then a copy for operators is
made from the slot. Gradients are brought to a place beside the slots, or stay in one as they arrive: see
`optim.device_gradients`. Pure. `schedule.update_split` says which chunks; here are its facts, the slots and the
places.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

from hetmem.planner.reservation import Arrangement
from hetmem.planner.simulated_trace import Notes
from hetmem.planner.simulated_updates import Crossing, Update
from hetmem.planner.simulator import SimulatedTraffic
from hetmem.planner.workload import Workload
from hetmem.schedule.trace import Tier
from hetmem.schedule.update_split import SLOTS, Facts, Fitting


class StreamedUpdates:
    """Those updates that run on the device, each in one of the slots, with gradients in one of as many places.
    `begun` are the numbers of the chunks.

    `ended` is called after each update that is over, `to_host` with one that must be made there.
    """

    def __init__(self, traffic: SimulatedTraffic, notes: Notes) -> None:
        self._traffic, self._notes = traffic, notes
        self._queue: deque[Update] = deque()
        self._free = self._places = 0
        self._reading = 0
        self._kept: list[int] = []
        """Chunks whose gradients are here."""
        self.begun: set[int] = set()
        self.slot_bytes = 0
        self.sent_home_bytes = 0
        self.ended: Callable[[], None] = lambda: None
        self.to_host: Callable[[Update], None] = lambda update: None

    # ---- slots -------------------------------------------------------------------------------------------------

    def idle_bytes(self) -> int:
        """See `schedule.update_split`; what slots take is not idle."""
        return self._notes.idle_bytes()

    def take_slots(self, nbytes: int) -> bool:
        """Have slots of `nbytes` each. Call it with nothing under way."""
        self.give_slots_back()
        self.slot_bytes, self._free, self._places = nbytes, SLOTS, SLOTS
        self._notes.home_bytes += SLOTS * nbytes
        return True

    def give_slots_back(self) -> None:
        """Their memory is the device's again, once updates that trail are over (a run leaves those of them that are
        queued to the host)."""
        self.pump()
        while not self.idle:
            self._traffic.wait_for_one()
            self.pump()
        assert not self._kept, "gradients that stay belong to an update"
        self._notes.home_bytes -= SLOTS * self.slot_bytes
        self.slot_bytes = self._free = self._places = 0

    # ---- gradients that stay -----------------------------------------------------------------------------------

    def keep(self, number: int) -> bool:
        """Gradients of chunk `number` are about to arrive: whether they stay here, in a place that an update may have
        to free first. Not if all places are those of chunks whose gradients have not all arrived."""
        while not self._places:
            if not (self._frees_a_place() and self._traffic.go_on()):
                return False
        self._places -= 1
        self._kept.append(number)
        return True

    def keeps(self, number: int) -> bool:
        """Whether gradients of chunk `number` are here."""
        return number in self._kept

    def kept(self) -> list[int]:
        """The chunks whose gradients are here."""
        return list(self._kept)

    def give_up(self, number: int) -> None:
        """The gradients of chunk `number` have gone home."""
        self._kept.remove(number)
        self._places += 1

    def _frees_a_place(self) -> bool:
        """Whether a place will be free that is not, whatever arrives."""
        return bool(self._reading) or any(self.keeps(update.number) for update in self._queue)

    # ---- updates -----------------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Whether nothing is queued or under way."""
        return not self._queue and (self._free == SLOTS or not self.slot_bytes)

    def add(self, update: Update) -> None:
        """Queue `update`, of a chunk all of whose roles have homes in host memory, but for gradients that stay here."""
        assert update.crossing is not None
        self._queue.append(update)

    def pump(self) -> None:
        """Begin what has a slot."""
        while self._free and (update := self._next()) is not None:
            self._queue.remove(update)
            self._begin(update)

    def _next(self) -> Update | None:
        """What can begin if there is a slot: what holds a place goes first, as others may wait for that."""
        for update in self._queue:
            if self.keeps(update.number):
                return update
        head = next(iter(self._queue), None)
        return head if head is not None and self._places and head.ready() else None

    def give_way(self) -> bool:
        """Leave to the host what waits for a place of gradients that have not all arrived; False if nothing does."""
        if self._places or self._frees_a_place():
            return False
        waiting = list(self._queue)
        self._queue.clear()
        for update in waiting:
            update.crossing, update.device_seconds = None, 0.0
            self.to_host(update)
        return bool(waiting)

    def _begin(self, update: Update) -> None:
        """The host tells the link what to bring, which is updated there."""
        assert update.crossing is not None
        self._free -= 1
        self._reading += 1
        self._places -= not self.keeps(update.number)
        self.begun.add(update.number)
        traffic = self._traffic
        traffic.now += update.thread_seconds
        brought = partial(self._brought, update, update.crossing.home_bytes)
        traffic.copy_beside(traffic.host_to_device, update.crossing.there_bytes, brought, update.device_seconds)

    def _brought(self, update: Update, home_bytes: int) -> None:
        """The gradients have been read."""
        self._reading -= 1
        self._places += 1
        if self.keeps(update.number):
            self._kept.remove(update.number)
        self.sent_home_bytes += home_bytes
        self._traffic.copy_beside(self._traffic.device_to_host, home_bytes, partial(self._home, update))

    def _home(self, update: Update) -> None:
        self._traffic.end_update(update.operand, renew=update.had_copy, near=True)
        self._free += 1
        update.done()
        self.ended()


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
    """What the choice of `schedule.update_split` depends on, as `optim.update_placement` sees it."""
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
