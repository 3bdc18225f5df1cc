"""The room of chunks on the device.

On a watched device every tensor is counted as it is made; of a GPU its allocator's peaks count, and what it refused,
and tensors are seen for the report alone. Everything else comes before chunks: slots are given back, homes that moved
to the device go back to host memory. Copies come before homes that moved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from weakref import WeakMethod

import torch

from hetmem.base.weak import weakly
from hetmem.engine.events import Statistics
from hetmem.engine.homes import Memory
from hetmem.engine.shortage import MovingActivations, Shortage
from hetmem.engine.traffic import Traffic
from hetmem.memory.device import lies_in_a_slot
from hetmem.memory.live_bytes import DeviceMonitor
from hetmem.schedule.chunk_limit import ChunkLimit
from hetmem.schedule.trace import Moment, Tier
from hetmem.schedule.tracer import StepTracer


class DeviceRoom(ChunkLimit):
    """Of one managed module. `sanitize`: see `DeviceMonitor`."""

    def __init__(
        self, memory: Memory, traffic: Traffic, tracer: StepTracer, statistics: Statistics, *, sanitize: bool
    ) -> None:
        spans, pool = [chunk.spec.span for chunk in memory.chunks], memory.device_pool
        super().__init__(tracer, traffic.residency, memory.usable_bytes, pool.slot_bytes, spans, pool.slots)
        self._memory, self._traffic, self.statistics = memory, traffic, statistics
        self.monitor = DeviceMonitor(
            memory.is_home_address,
            lambda address: memory.is_device_address(address) or lies_in_a_slot(address),
            weakly(self.non_model_grew),
            memory.device.torch_device,
            strict=sanitize and memory.device.watched,
        )
        self.shortage = Shortage(memory, traffic.residency, tracer)
        self.give_way: Callable[[int], None] = _nothing_to_give
        """Homes of so many bytes at least, or all of a model that is whole on the device (0), leave it if they can."""
        self.leaving: dict[int, int] = {}
        """Device memory of activations on their way home, by number; that keeps it."""
        self.ahead: dict[int, int] = {}
        """The same of those that have come, or are coming, and that no node has asked for yet."""
        self._most_non_model = 0
        self._harmless = 0
        """So much of anything else takes nothing of what chunks may have, or of what all copies need."""
        self._left = -1
        """The bytes of homes on the device when nothing took any of that."""
        memory.device.peak_bytes()  # what the process had there before is no need of this model
        traffic.gradients.sent = WeakMethod(self.gradient_sent)

    # ---- what is needed ----------------------------------------------------------------------------------------

    def _homes(self) -> int:
        return self._memory.device_home_bytes

    def _live(self) -> int:
        return self.monitor.live_bytes

    def _for_activations(self) -> int:
        moves = self._activations
        return 0 if moves is None else moves.ahead_bytes

    def _slots(self, non_model_bytes: int) -> int:
        return self._memory.device_slots(non_model_bytes)

    @property
    def non_model_bytes(self) -> int:
        """What anything but chunks needs: now, or at most where only peaks are known."""
        return self.monitor.live_bytes if self._memory.device.watched else self._most_non_model

    @property
    def non_model_peak_bytes(self) -> int:
        """The most that anything but chunks has ever needed of the device."""
        return max(self.statistics.non_model_peak_bytes, self._room_seen)

    def look_at_allocator(self) -> int:
        """The bytes beside chunks now; where the device's allocator knows their peak, the last moment gets that."""
        if self._memory.device.watched:
            return self.monitor.live_bytes
        chunks = self._memory.device_pool.held_bytes() + self._memory.device_home_bytes
        peak = max(0, self._memory.device.peak_bytes() - chunks)
        if self._tracer.measured:
            self._tracer.grew(peak)
        self._most_non_model = max(self._most_non_model, peak)
        return peak

    @property
    def _guess(self) -> int:
        return self._memory.device_bytes * 3 // 4

    @property
    def _room_seen(self) -> int:
        return max(self._most_non_model, self.shortage.refused_room_bytes)

    @property
    def _room_wanted(self) -> int:
        """For the segment that runs, whose inputs may be larger than any that were seen."""
        return min(int(self._room_seen * self._tracer.unseen_growth), self._memory.usable_bytes)

    def _least_room(self) -> int:
        """What a GPU must leave beside chunks: the most that was ever seen, so that slots stay where they are, or what
        would have been enough when its allocator refused memory.

        What a segment unlike any before needs is unknown, so chunks keep to a quarter of the device; if they need more
        than that at once, `widen` takes it.
        """
        return max(self._room_seen, self._guess) if self._tracer.is_unseen else self._room_wanted

    # ---- when it changes ---------------------------------------------------------------------------------------

    def before_segment(self) -> None:
        """A segment has begun, and nothing of it has run."""
        if self._tracer.is_unseen and self._tracer.known is None and not self._memory.device.watched:
            self._let_homes_go(self._guess)  # a part of a backward cannot be tried again with more room
        if self.shortage.refused_room_bytes:
            self._leave_device(self.shortage.refused_room_bytes)
        known = self._tracer.known
        if self._memory.device.watched and known is not None and known.opening.non_model_bytes:
            opening = known.opening.times(self._tracer.growth)
            if self._tracer.measured or not self.is_as_left(opening):
                self.before_moment(opening)

    def is_as_left(self, expected: Moment) -> bool:
        """Whether `before_moment` would find that chunks may have all that they may ever have, as they did before."""
        if self._left != self._memory.device_home_bytes:
            return False
        return (expected.non_model_bytes if self._memory.device.watched else self._room_wanted) <= self._harmless

    def has_room_for(self, expected: Moment, slots: int | None = None) -> bool:
        """Whether chunks may have `slots` slots, or one for each copy, beside what is `expected`."""
        needed = expected.non_model_bytes if self._memory.device.watched else self._least_room()
        return self._memory.device_slots(needed) >= (self._all_slots if slots is None else slots)

    def before_moment(self, expected: Moment) -> None:
        """Anything but chunks is expected to need what it says in the moment that begins."""
        watched = self._memory.device.watched
        needed = expected.non_model_bytes if watched else self._room_wanted
        self._let_homes_go(needed)
        self.set_limit(expected.non_model_bytes if watched else self._least_room())
        self._wait_for_leaving()
        memory, homes = self._memory, self._memory.device_home_bytes
        chunks = memory.device_chunk_bytes
        if self.shortage.activations is None:  # for which copies may have to leave some room
            chunks = min(chunks, homes + self._all_slots * memory.device_pool.slot_bytes)
        self._harmless = memory.usable_bytes - chunks
        if needed <= self._harmless and not self._tracer.measured:
            self._left = homes

    def gradient_sent(self) -> None:
        """A gradient has begun its way home: from here on the trace knows what else there is."""
        if self._memory.device.watched:
            if self._tracer.measured:
                live_bytes = self.monitor.live_bytes  # before the others, which may die any time
                self._tracer.sent(live_bytes - self.leaving_bytes)
            else:
                self._tracer.gradients_sent += 1
            if self._traffic.gradients.leaving or self.leaving or self.ahead:
                self._wait_for_leaving()

    @property
    def leaving_bytes(self) -> int:
        """Device memory of gradients and activations on their way, which is needed no more, or not yet."""
        gradients = self._traffic.gradients
        leaving = gradients.leaving_bytes if gradients.leaving else 0
        return leaving + sum(self.leaving.values()) + sum(self.ahead.values())

    def _wait_for_leaving(self) -> None:
        """Wait for what is on its way, of which there may be more than in the segment that was measured, until there is
        room for it beside what chunks may take."""
        if not self._memory.device.watched or self._tracer.measured:
            return
        room = self.beside_chunks()
        while 0 < self.leaving_bytes > room:  # what has come ahead would have to come once more
            if self._traffic.gradients.under_way or self.leaving or not self._give_way():
                self._traffic.wait_for_one()

    def _give_way(self) -> bool:
        moves = self._activations
        return moves is not None and moves.give_way()

    @property
    def _activations(self) -> MovingActivations | None:
        return None if self.shortage.activations is None else self.shortage.activations()

    def transit_grew(self) -> None:
        """An activation has begun its way home."""
        self._wait_for_leaving()

    def has_room_ahead(self, nbytes: int) -> bool:
        """Whether an activation of `nbytes` may come before it is asked for."""
        if not self._memory.device.watched:
            return True
        if self._tracer.measured:
            return self.missing_bytes(self.monitor.live_bytes + nbytes) <= 0
        return super().has_room_ahead(nbytes)

    def count(self, what: str, tensor: torch.Tensor) -> None:
        """`what` takes the memory of `tensor` from now on, which no operator has made."""
        if self._memory.device.watched and self._tracer.measured:
            self.monitor.count(what, (tensor,))

    def non_model_grew(self, operator: str, live_bytes: int) -> None:
        """An operator of a measured segment needs memory: give up idle chunks, as a GPU's allocator would be made to,
        and wait for gradients on their way home. The trace has what is left beside chunks then.

        Raises `DeviceOutOfMemoryError` if what is left in use does not fit beside it. Of a GPU, whose allocator says
        what chunks may have, it is noted for the report alone.
        """
        if not self._memory.device.watched:
            self.monitor.peak.reached(live_bytes, self.statistics.steps + 1)
            return
        with self.monitor.unwatched():
            self._let_homes_go(live_bytes)
            live_bytes = self.make_room(live_bytes)
            if self.missing_bytes(live_bytes) > 0:
                self.monitor.left |= self._leave_device(live_bytes)
        if self.missing_bytes(live_bytes) > 0:
            raise self.shortage.error(operator, live_bytes)
        self.statistics.device_in_use(self.chunk_bytes(), live_bytes)
        self.monitor.peak.reached(live_bytes, self.statistics.steps + 1)
        if (moves := self._activations) is not None:
            moves.needs(live_bytes - self.leaving_bytes)

    def own_bytes(self) -> int:
        """What is needed now beside chunks, and beside what crosses the links where that is known."""
        return self.look_at_allocator() - (self.leaving_bytes if self._memory.device.watched else 0)

    def saved_bytes(self) -> int:
        """What the device has for all but homes that must be there and as many copies as let some come before their
        use."""
        memory, slots = self._memory, 0
        if memory.uses_copies:
            blocks = self._traffic.residency.blocks
            used = {moment.blocks for trace in self._tracer.book.traces() for moment in trace.moments}
            most = max((sum(blocks[block].span for block in at_once) for at_once in used), default=0)
            slots = max(most, min(self._many_slots, self._all_slots))
        copies = min(slots * memory.device_pool.slot_bytes, memory.device_chunk_bytes)
        return memory.usable_bytes - (memory.device_home_bytes - memory.moved_bytes) - copies

    def _wait_for_room(self, missing_bytes: int) -> bool:
        if self._let_activations_go(missing_bytes) or self._give_way():
            return True
        leaves = self._anything_leaves()
        if leaves:
            self._traffic.wait_for_one()
        return leaves

    def _anything_leaves(self) -> bool:
        """Whether something is under way at whose end less of the device is taken."""
        leaving = self._traffic.gradients.under_way or bool(self.leaving or self.ahead)
        return leaving or bool(self._traffic.residency.in_flight())

    def _let_activations_go(self, nbytes: int) -> bool:
        moves = self._activations
        return moves is not None and moves.make_room(nbytes)

    def widen(self) -> bool:
        """Chunks in use at once need more than they may have, and nothing is under way any more: let them have what was
        only guessed to be needed beside them, or what gradients have left that were on their way when the moment began.
        False if there is no such room."""
        watched = self._memory.device.watched
        before = self.leaving_bytes, self.non_model_bytes
        self._let_activations_go(self._memory.device_pool.slot_bytes)
        if self._give_way() or before != (self.leaving_bytes, self.non_model_bytes):
            if watched and self._tracer.measured:
                self.set_limit(self.monitor.live_bytes)
            return True
        needed = self.monitor.live_bytes if watched else self._most_non_model
        if self._leave_device(needed if watched else self._room_seen):
            return True
        if (watched and not self._tracer.measured) or self._limit >= self._memory.device_slots(needed):
            return False
        if watched:
            self.begin_with(needed)
        else:
            self.set_limit(needed, needs_all=True)
        return True

    def out_of_memory(self) -> None:
        """The device's allocator has no room for an operator: give it all that no chunk in use needs."""
        self.look_at_allocator()
        self._let_activations_go(self._memory.device_bytes)
        while self._give_way():
            pass
        self._leave_device(self._room_seen)
        self._let_homes_go(self._room_seen)
        before = self._limit
        try:
            self._set_slots(0, before=before)
            self._traffic.executor.drain()  # where an interrupt or a transfer's error is raised
            self._traffic.gradients.wait()  # they are on the device as long as they are on their way
            self._traffic.executor.wait_while(lambda: bool(self.leaving))
            self._memory.device_pool.give_back(self._traffic.residency.free_slots(Tier.DEVICE), 0)
        finally:
            self._set_slots(before, before=before)
            self._memory.device.peak_bytes()  # what was given back by this is no peak of anything else

    def _limit_chunks(self, slots: int, *, before: int) -> None:
        self.look_at_allocator()
        self._set_slots(slots, before=before)
        self._memory.device.peak_bytes()  # as above

    def _set_slots(self, slots: int, *, before: int) -> None:
        """Let chunks have `slots` slots from now on; what is less than `before` is given back."""
        self._traffic.execute(self._traffic.residency.limit(Tier.DEVICE, slots))
        if slots < before:
            self._memory.device_pool.give_back(self._traffic.residency.free_slots(Tier.DEVICE), slots)

    @contextmanager
    def moving_homes(self) -> Iterator[None]:
        """Homes move within: what they take, or took, of the device is no peak of anything else."""
        self.look_at_allocator()
        try:
            with self.monitor.unwatched(), torch.no_grad():
                yield
        finally:
            self._memory.device.peak_bytes()

    # ---- who gives way -----------------------------------------------------------------------------------------

    def _let_homes_go(self, non_model_bytes: int) -> None:
        """Homes that moved to the device give way where copies would have less room for them."""
        if self._memory.moved_bytes:
            missing = self._all_slots * self._memory.device_pool.slot_bytes - self._memory.room_bytes(non_model_bytes)
            if missing > 0:
                self.give_way(missing)

    def _leave_device(self, non_model_bytes: int) -> bool:
        """A model that was put whole on the device makes room for `non_model_bytes`: what has none there goes to host
        memory, now and from now on. False if it is not, or if it must stay."""
        if self._memory.resident:
            self.give_way(0)
            if not self._memory.resident:
                self._tracer.forget_traces()  # operators were not seen to use it
                with self.monitor.unwatched():
                    self._let_homes_go(non_model_bytes)
                    self.set_limit(non_model_bytes)
                return True
        return False

    def set_limit(self, non_model_bytes: int, *, needs_all: bool = False) -> None:
        """Leave room for `non_model_bytes` beside chunks; see `ChunkLimit`."""
        self._left = -1
        super().set_limit(non_model_bytes, needs_all=needs_all)


def _nothing_to_give(nbytes: int) -> None:
    """No homes have moved to the device."""
