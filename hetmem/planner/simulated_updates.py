"""Updates of chunks under way on the simulator's clock: the counterpart of `optim.update_queue`.

What an update needs from NVMe is brought to host memory, the host's workers compute it, and all goes back; reads for
the next one and writes of the last one go on meanwhile, and so may a backward. Pure. It knows blocks and seconds, and
neither chunks nor gradients. Those on the device with states brought there are `planner.simulated_device_updates`'s.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from hetmem.planner.simulator import SimulatedTraffic
from hetmem.schedule.blocks import PLACED, CopyState
from hetmem.schedule.queues import AT_ONCE, Turns
from hetmem.schedule.trace import Tier


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


class Opened(Protocol):
    """Is told what is used in host memory: `Notes.staged`."""

    def __call__(self, block: int, *, reads: bool) -> None:
        """See there."""
        ...


class Elsewhere(Protocol):
    """Makes updates that are not made here; see `planner.simulated_device_updates`. It calls `ended`
    after each one, and `to_host` with one that must be made here."""

    ended: Callable[[], None]
    to_host: Callable[[Update], None]

    @property
    def idle(self) -> bool:
        """Whether nothing is queued or under way."""
        ...

    def add(self, update: Update) -> None:
        """Queue `update`."""

    def pump(self) -> None:
        """Go on as far as that needs no waiting."""

    def give_way(self) -> bool:
        """Leave to the host what could wait for ever; False if nothing could."""
        ...


class Updates:
    """The updates of one optimizer, by the workers of `cores` cores; `opened` is told what it uses in host
    memory. `streamed` has those with a `crossing`.

    `seconds` are those in which at least one update here was computed, or was ready for that and waited for a worker:
    what a report measures. What the thread that trains does for an update before is not among them, nor those of
    `streamed`.
    """

    def __init__(
        self,
        traffic: SimulatedTraffic,
        cores: int,
        opened: Opened,
        streamed: Elsewhere | None = None,
    ) -> None:
        self._traffic, self._cores, self._opened, self._streamed = traffic, cores, opened, streamed
        if streamed is not None:
            streamed.ended = self.pump
            streamed.to_host = lambda update: self._queue.add(update)
        self._queue: Turns[Update] = Turns(lambda update: update.number)
        self._opening: deque[Update] = deque()
        self._running = 0
        self._free_at = self._busy_until = 0.0
        self._waiting = False
        self._pumping = False
        self.seconds = 0.0
        traffic.worker = self

    @property
    def idle(self) -> bool:
        """Whether nothing is queued or under way."""
        here = not (self._queue or self._opening or self._running)
        return here and (self._streamed is None or self._streamed.idle)

    def add(self, update: Update) -> None:
        """Queue `update`; until it is over nothing fetches its operand."""
        update.had_copy = self._traffic.begin_update(update.operand, keep_copy=update.keeps_copy)
        if update.crossing is None:
            self._queue.add(update)
        else:
            assert self._streamed is not None
            self._streamed.add(update)

    def pump(self) -> None:
        """Go on as far as that needs no waiting."""
        if self._pumping or self.idle:
            return
        self._pumping = True
        if self._streamed is not None:
            self._streamed.pump()
        while (go_on := self._next()) is not None:
            go_on()
        self._pumping = False

    def finish(self) -> None:
        """Carry everything out; the thread that trains lends a hand. Raises `CapacityError` if something cannot be
        opened."""
        self._waiting = True
        while not self.idle:
            if self._streamed is not None:
                self._streamed.give_way()
            self.pump()
            if self.idle:
                break
            if not self._traffic.busy():
                stuck = [part.block for part in self._opening[0].staged if not self._is_open(part.block)]
                raise self._traffic.residency.withdraw(stuck[0], Tier.HOST)
            self._traffic.wait_for_one()
        self._waiting = False

    def give_way(self) -> bool:
        """Let go of what is open but not computed with yet; False if that is nothing."""
        gives = bool(self._opening) or (self._streamed is not None and self._streamed.give_way())
        while self._opening:
            update = self._opening.pop()
            for part in update.staged:
                self._traffic.unask(part.block)
            self._queue.add(update)
        return gives

    def hasten(self, block: int) -> None:
        """`block` is waited for: if it is the operand of an update that is queued, that is next."""
        for update in self._queue:
            if update.operand == block:
                self._queue.hasten(update.number)

    def _next(self) -> Callable[[], None] | None:
        """What can be done now: an update can open, or run; None if there is nothing."""
        update = self._queue.next(lambda queued: queued.ready()) if self._may_open() else None
        if update is not None:
            return partial(self._open, update)
        if self._opening and all(self._is_open(part.block) for part in self._opening[0].staged):
            return self._run
        return None

    def _may_open(self) -> bool:
        """Whether an update may open: all that opened before it have places; see note "openings" in
        `optim.update_queue`."""
        if not self._queue or len(self._opening) + self._running >= AT_ONCE:
            return False
        state = self._traffic.residency.state
        last = self._opening[-1].staged if self._opening else ()
        return all(state(part.block, Tier.HOST) in PLACED for part in last)

    def _open(self, update: Update) -> None:
        self._opening.append(self._queue.take(update))
        for part in update.staged:
            self._opened(part.block, reads=part.load)
            self._traffic.ask(part.block, load=part.load)

    def _is_open(self, block: int) -> bool:
        residency = self._traffic.residency
        return residency.state(block, Tier.HOST) is CopyState.VALID and not residency.writing(block)

    def _run(self) -> None:
        update = self._opening.popleft()
        traffic, seconds = self._traffic, update.host_seconds
        if not self._waiting:  # all but one of the workers: that one is the thread that trains
            seconds *= self._cores / max(1, self._cores - 1)
        else:  # which lends no hand to the update before while it prepares this one
            seconds += max(0.0, min(update.thread_seconds, self._free_at - traffic.now)) / self._cores
        traffic.now += update.thread_seconds
        self._running += 1
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
        self._running -= 1
        traffic = self._traffic
        for part in update.staged:
            traffic.release(part.block, Tier.HOST, dirty=part.changes)
        traffic.end_update(update.operand, renew=update.had_copy and not update.keeps_copy)
        for part in update.staged:
            if part.changes:
                traffic.execute(traffic.residency.settle(part.block))
        update.done()
        self.pump()
