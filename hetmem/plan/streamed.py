"""Updates on the device with states brought there, on the simulator's clock: the counterpart of `optim.streamed`.

States are brought to a slot on one link, updated behind that, and sent home on the other; then a copy for operators is
made from the slot. Pure. `plan.streaming` says which chunks; here are its facts, and the slots.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

from hetmem.plan.arrangement import Arrangement
from hetmem.plan.notes import Notes
from hetmem.plan.simulator import SimulatedTraffic
from hetmem.plan.streaming import SLOTS, Facts, Fitting
from hetmem.plan.trace import Tier
from hetmem.plan.updates import Crossing, Update
from hetmem.plan.workload import Workload


class StreamedUpdates:
    """Those updates that run on the device, each in one of the slots. `seconds` are those that something was computed;
    `ended` is called after each update that is over."""

    def __init__(self, traffic: SimulatedTraffic, notes: Notes) -> None:
        self._traffic, self._notes = traffic, notes
        self._queue: deque[Update] = deque()
        self._free = 0
        self.slot_bytes = 0
        self.sent_home_bytes = 0
        self.seconds = 0.0
        self.ended: Callable[[], None] = lambda: None

    # ---- slots -------------------------------------------------------------------------------------------------

    def idle_bytes(self) -> int:
        """See `plan.share`; what slots take is not idle."""
        return self._notes.idle_bytes()

    def take_slots(self, nbytes: int) -> bool:
        """Have slots of `nbytes` each. Call it with nothing under way."""
        self.give_slots_back()
        self.slot_bytes, self._free = nbytes, SLOTS
        self._notes.home_bytes += SLOTS * nbytes
        return True

    def give_slots_back(self) -> None:
        """Their memory is the device's again."""
        assert self.idle, "slots are given back between updates"
        self._notes.home_bytes -= SLOTS * self.slot_bytes
        self.slot_bytes = self._free = 0

    # ---- updates -----------------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Whether nothing is queued or under way."""
        return not self._queue and (self._free == SLOTS or not self.slot_bytes)

    def add(self, update: Update) -> None:
        """Queue `update`, of a chunk all of whose roles have homes in host memory."""
        self._queue.append(update)

    def pump(self) -> None:
        """Begin what has a slot."""
        while self._queue and self._free and self._queue[0].ready():
            self._begin(self._queue.popleft())

    def _begin(self, update: Update) -> None:
        """The host does its part, the last few elements, and what it has told the link to bring is updated there."""
        assert update.crossing is not None
        self._free -= 1
        traffic = self._traffic
        traffic.now += update.thread_seconds
        self.seconds += update.thread_seconds + update.device_seconds
        brought = partial(self._brought, update, update.crossing.home_bytes)
        traffic.copy_beside(traffic.host_to_device, update.crossing.there_bytes, brought, update.device_seconds)

    def _brought(self, update: Update, home_bytes: int) -> None:
        self.sent_home_bytes += home_bytes
        self._traffic.copy_beside(self._traffic.device_to_host, home_bytes, partial(self._home, update))

    def _home(self, update: Update) -> None:
        self._traffic.end_update(update.operand, renew=update.had_copy, near=True)
        self._free += 1
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


def facts_of(arrangement: Arrangement, workload: Workload) -> Facts:
    """What the choice of `plan.streaming` depends on, as `optim.places` sees it."""
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
    )


def crossing(arrangement: Arrangement, chunk: int) -> Crossing:
    """All of `chunk` comes to the device but the 16-bit copy, which is made there; all but the gradient goes home."""
    return Crossing(_bytes(arrangement, chunk, "compute"), _bytes(arrangement, chunk, "grad"))


def _bytes(arrangement: Arrangement, chunk: int, *but: str) -> int:
    """Of all roles of `chunk` together, without those named."""
    roles = (role for role, homes in arrangement.homes.items() if chunk in homes and role not in but)
    return sum(arrangement.role_bytes(chunk, role) for role in roles)
