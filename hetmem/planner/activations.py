"""Activations that a plan offloads: the workload without them, and their transfers over the simulator's links.

`schedule.saved` chooses them, as it does for a run (`activations.choice`). Pure.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate

from hetmem.base.units import round_up
from hetmem.planner.reservation import arrange
from hetmem.planner.simulator import LinkQueue, SimulatedTraffic
from hetmem.planner.workload import Event, Move, Workload
from hetmem.schedule.placement import PAGE_BYTES, Capacities, NoRoom
from hetmem.schedule.saved import AT_ONCE, MANY_CHUNKS, SavedInterval, least_bytes, to_leave
from hetmem.schedule.trace import NEVER


def moving(workload: Workload, capacities: Capacities, *, all_leave: bool, by_the_caller: bool) -> Workload:
    """Return `workload` as `manage(activations=…)` runs it in `capacities`: "offload" if `all_leave`, else "auto"."""
    saved, events, needed = _worth_moving(workload, least_bytes(capacities.device_bytes))
    room, lag = room_bytes(workload, capacities), 0 if by_the_caller else AT_ONCE
    chosen = range(len(saved)) if all_leave else sorted(to_leave(saved, needed, room, lag))
    moves = (Move(max(0, events[saved[at].free_at] - 1), events[saved[at].used_at], saved[at].nbytes) for at in chosen)
    made = without(workload, tuple(move for move in moves if move.leaves_at < move.used_at))
    alone = workload.alone and moving(workload.alone, capacities, all_leave=all_leave, by_the_caller=by_the_caller)
    return replace(made, fills_device=bool(made.moves) and not all_leave, alone=alone)


def _worth_moving(workload: Workload, least_bytes: int) -> tuple[list[SavedInterval], list[int], list[int]]:
    """Return the saved tensors of `least_bytes` or more, on a clock that ticks for these alone, and for each tick its
    event and the bytes that are not parameters."""
    large = [each for each in workload.saved if each.nbytes >= least_bytes]
    ticking = {0, *(each.saved_at for each in large), *(each.used_at for each in large)}
    events, needed, tick_at = list[int](), list[int](), list[int]()
    for at, (event, nbytes) in enumerate(workload.ticks):
        if at in ticking:
            events.append(event)
            needed.append(nbytes)
        needed[-1] = max(needed[-1], nbytes)
        tick_at.append(len(events) - 1)
    saved = [
        SavedInterval(each.nbytes, *(tick_at[at] for at in (each.saved_at, each.free_at, each.used_at)))
        for each in large
        if max(each.free_at, each.used_at) < NEVER
    ]
    return saved, events, needed


def room_bytes(workload: Workload, capacities: Capacities) -> int:
    """Return the device bytes left beside homes that must be there and enough copies for some to be prefetched, as
    `DeviceRoom.saved_bytes` does."""
    try:
        ground = arrange(workload, capacities).ground
    except NoRoom:  # `search` reports it
        return capacities.usable_bytes
    if ground.resident:
        return capacities.usable_bytes - ground.whole_bytes
    spans = [chunk.span for chunk in ground.chunks]
    homes = ground.state_bytes if ground.in_codes else 0
    copies = min(sum(spans), MANY_CHUNKS * max(spans)) * ground.slot_bytes
    return capacities.usable_bytes - homes - min(copies, capacities.chunk_cap_bytes)


def without(workload: Workload, moves: tuple[Move, ...]) -> Workload:
    """Return `workload` less the device bytes of `moves`, while each is off the device."""
    if not moves:
        return workload
    away = [0] * (len(workload.events) + 1)
    lent = away.copy()  # host memory, in whole pages
    for move in moves:  # off the device between the two events, on it in both
        for changes, nbytes in ((away, move.nbytes), (lent, round_up(move.nbytes, PAGE_BYTES))):
            changes[move.leaves_at + 1] += nbytes
            changes[move.used_at] -= nbytes

    def without_bytes(event: Event, gone: int) -> Event:
        return event.resized(lambda nbytes: max(0, nbytes - gone)) if gone else event

    pairs = zip(workload.events, accumulate(away), strict=False)
    events = tuple(without_bytes(event, gone) for event, gone in pairs)
    return replace(workload, events=events, moves=moves, away_bytes=max(accumulate(lent)))


@dataclass(slots=True, eq=False)
class _Away:
    """An offloaded storage. `state`: "home" (in host memory), "disk", "reading", "coming" (to the device) or "here"."""

    nbytes: int
    state: str = "home"
    ahead: bool = False
    """Whether it is fetched before its use."""


class SimulatedActivations:
    """Simulates `activations.offload`: storages leave behind the operator that made them, and are prefetched in the
    order of the backward, as far ahead as a window of bytes and the device's room allow."""

    def __init__(
        self,
        traffic: SimulatedTraffic,
        workload: Workload,
        window_bytes: int,
        has_room: Callable[[int], bool],
        spilled_bytes: int = 0,
    ) -> None:
        """Begin with nothing offloaded. `has_room(nbytes)`: whether so many bytes more may be prefetched.
        `spilled_bytes`: of the storages in their order of leaving, the first so many go on to NVMe."""
        self._traffic, self._window, self._has_room = traffic, window_bytes, has_room
        self._out: dict[int, list[int]] = defaultdict(list)
        self._in: dict[int, list[int]] = defaultdict(list)
        moves = workload.moves
        self._using = {workload.ticks[each.used_at][0] for each in workload.saved if each.used_at < NEVER}
        """The events at which a node of the backward unpacks a saved tensor, offloaded or not."""
        self._sizes = [move.nbytes for move in moves]
        self._order = sorted(range(len(moves)), key=lambda at: (moves[at].used_at, -at))
        for at, move in enumerate(moves):
            self._out[move.leaves_at].append(at)
            self._in[move.used_at].append(at)
        self._away: dict[int, _Away] = {}
        self._next = self._next_read = self._ahead = 0
        self._leaving: dict[int, int] = {}
        first_out = sorted(range(len(moves)), key=lambda at: moves[at].leaves_at)
        gone = accumulate((moves[at].nbytes for at in first_out), initial=0)
        self._spilled = {at for at, before in zip(first_out, gone, strict=False) if before < spilled_bytes}

    def before(self, event: int) -> None:
        """Bring everything that `event` uses back to the device."""
        for at in reversed(self._in.get(event, ())):
            away = self._away.pop(at, None)
            if away is None:
                continue
            if away.state == "disk":
                self._cross(self._traffic.nvme_read, away, "reading", "home")
            while away.state == "reading":
                self._traffic.wait_for_one()
            if away.state == "home":
                self._fetch(away)
            self._traffic.ahead_bytes -= away.nbytes
            self._ahead -= away.ahead
            self._fetch_ahead()
            while away.state != "here":
                self._traffic.wait_for_one()
        if event in self._using:
            self._fetch_ahead()

    def after(self, event: int) -> None:
        """Offload the storages that only the autograd graph holds after `event`."""
        traffic = self._traffic
        for at in self._out.get(event, ()):
            nbytes = self._sizes[at]
            self._away[at] = away = _Away(nbytes)
            self._next = self._next_read = 0
            if traffic.device_to_host.rate.by_the_caller:
                traffic.send_home(nbytes)
                self._arrived(at, away)
                continue
            self._leaving[at] = nbytes
            traffic.send_beside(nbytes, nbytes, partial(self._arrived, at, away))
            while len(self._leaving) > AT_ONCE and sum(self._leaving.values()) > self._window:
                traffic.wait_for_one()

    def _arrived(self, at: int, away: _Away) -> None:
        self._leaving.pop(at, None)
        if at in self._spilled:
            self._cross(self._traffic.nvme_write, away, away.state, "disk" if away.state == "home" else away.state)

    def _cross(self, link: LinkQueue, away: _Away, meanwhile: str, then: str) -> None:
        """Copy `away` over `link`: its state is `meanwhile`, and then `then` unless it has changed by itself."""
        away.state = meanwhile

        def over() -> None:
            away.state = then if away.state == meanwhile else away.state

        self._traffic.copy_beside(link, away.nbytes, over)

    def _read_ahead(self) -> None:
        while self._next_read < len(self._order):
            away = self._away.get(self._order[self._next_read])
            if away is not None and away.state == "disk":
                reading = sum(other.nbytes for other in self._away.values() if other.state == "reading")
                if reading and reading + away.nbytes > self._window:
                    return
                self._cross(self._traffic.nvme_read, away, "reading", "home")
            self._next_read += 1

    def _fetch(self, away: _Away) -> None:
        traffic, link = self._traffic, self._traffic.host_to_device
        traffic.ahead_bytes += away.nbytes
        if link.rate.by_the_caller:
            traffic.now = link.send(traffic.now, away.nbytes)
            away.state = "here"
            return
        self._cross(link, away, "coming", "here")

    def _fetch_ahead(self) -> None:
        if self._spilled:
            self._read_ahead()
        if self._traffic.host_to_device.rate.by_the_caller:
            return
        while self._next < len(self._order):
            away = self._away.get(self._order[self._next])
            if away is not None and away.state in ("disk", "reading"):
                return
            if away is not None and away.state == "home":
                ahead = self._traffic.ahead_bytes
                if self._ahead >= AT_ONCE and ahead + away.nbytes > self._window:
                    return
                if not self._has_room(away.nbytes):
                    return
                self._fetch(away)
                self._ahead += 1
                away.ahead = True
            self._next += 1
