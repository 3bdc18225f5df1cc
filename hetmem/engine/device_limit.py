"""Limits what chunks may take of the device, by what everything else needs.

On a watched device every tensor is counted as it is made; of a GPU the allocator's peaks and refusals count, and
tensors are counted for the report alone. Everything else has priority over chunks: slots are freed, and homes that
moved to the device go back to host memory. Copies have priority over homes that moved.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from hetmem.base.weak import weakly
from hetmem.engine.events import Statistics
from hetmem.engine.homes import Memory
from hetmem.engine.shortage import Shortage
from hetmem.engine.traffic import Traffic
from hetmem.engine.upward import LeavingActivations
from hetmem.memory.device import lies_in_a_slot
from hetmem.memory.live_bytes import DeviceMonitor
from hetmem.schedule.chunk_limit import ChunkLimit
from hetmem.schedule.trace import Moment, Tier
from hetmem.schedule.tracer import StepTracer


class DeviceRoom(ChunkLimit):
    """The chunk limit of one managed module. `sanitize`: see `DeviceMonitor`."""

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
        self.give_way: Callable[[int], None] = _no_homes_moved
        """Called with bytes: moves at least so many bytes of homes off the device, if it can; with 0, all homes of a
        model that is whole on the device."""
        self.leaving: dict[int, int] = {}
        """Device bytes of activations in flight to host memory, by number of the storage."""
        self.ahead: dict[int, int] = {}
        """Device bytes of activations that are fetched, or in flight back, before a node needs them."""
        self._watched = memory.device.watched
        self._most_non_model = 0
        self._harmless = 0
        """Bytes that anything but chunks may take without reducing the chunk limit, or the room of all copies."""
        self._left = -1
        """`device_home_bytes` as of the last moment within `_harmless`; -1: the limit has changed since."""
        self._peak_seen = self._grown_bytes = 0
        """The allocator's peak at the last look; and the most bytes of tensors counted since then."""
        memory.device.forget_peak()  # earlier allocations of the process are no need of this model
        traffic.gradients.room = weakref.ref(self)

    # ---- needs ------------------------------------------------------------------------------------------------

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
        """Bytes that anything but chunks needs: now, or at most where only peaks are known."""
        return self.monitor.live_bytes if self._memory.device.watched else self._most_non_model

    @property
    def non_model_peak_bytes(self) -> int:
        """The most bytes that anything but chunks has ever needed of the device."""
        return max(self.statistics.non_model_peak_bytes, self._room_seen)

    def look_at_allocator(self) -> int:
        """Return the bytes beside chunks now; on a GPU the most since the last call, which the moment gets: as of the
        allocator's peak if that has grown, else of the tensors that a measured segment has counted.

        The allocator has one peak, which belongs to the program (`torch.cuda.max_memory_allocated`). It starts anew
        only where chunks have given memory back: until then what needs more beside them than ever raises it.
        """
        device = self._memory.device
        if device.watched:
            return self.monitor.live_bytes
        chunks = self._memory.device_pool.held_bytes() + self._memory.device_home_bytes
        peak = device.peak_bytes()
        beside = peak - chunks
        if peak == self._peak_seen:
            beside = min(beside, max(self._grown_bytes, device.allocated_bytes() - chunks))
        beside, self._peak_seen, self._grown_bytes = max(0, beside), peak, 0
        if self._tracer.measured:
            self._tracer.grew(beside)
        self._most_non_model = max(self._most_non_model, beside)
        return beside

    @property
    def _guess(self) -> int:
        return self._memory.device_bytes * 3 // 4

    @property
    def _room_seen(self) -> int:
        return max(self._most_non_model, self.shortage.refused_room_bytes)

    @property
    def _room_wanted(self) -> int:
        """Bytes to leave beside chunks in the running segment, whose inputs may be larger than any before."""
        return min(int(self._room_seen * self._tracer.unseen_growth), self._memory.usable_bytes)

    def _least_room(self) -> int:
        """Return the bytes that a GPU must leave beside chunks: the most ever seen, so that slots stay where they are,
        or what would have been enough when its allocator refused memory.

        The need of a segment unlike any before is unknown, so chunks get a quarter of the device; if they need more
        than that at once, `widen` gives it.
        """
        return max(self._room_seen, self._guess) if self._tracer.is_unseen else self._room_wanted

    # ---- when it changes ---------------------------------------------------------------------------------------

    def before_segment(self) -> None:
        """Make room for a segment that has begun, before anything of it runs."""
        if self._tracer.is_unseen and self._tracer.known is None and not self._memory.device.watched:
            self._let_homes_go(self._guess)  # a node of a backward cannot be called again with more room
        if self.shortage.refused_room_bytes:
            self._leave_device(self.shortage.refused_room_bytes)
        known = self._tracer.known
        if self._memory.device.watched and known is not None and known.opening.non_model_bytes:
            opening = known.opening.times(self._tracer.growth)
            if self._tracer.measured or not self.is_as_left(opening):
                self.before_moment(opening)

    def is_as_left(self, expected: Moment, *, beside_gradients: bool = False) -> bool:
        """Return whether `before_moment` would change nothing: the chunk limit is the largest, and stays so, also
        beside gradients that wait or are in flight, if these are asked for. What is left then may be gathered."""
        if self._left != self._memory.device_home_bytes:
            return False
        needed = expected.non_model_bytes if self._watched else self._room_wanted
        gradients = self._traffic.gradients
        waiting = gradients.gathered_bytes if beside_gradients else gradients.summed_bytes
        left = self._harmless - needed
        if beside_gradients and gradients.leaving:
            left -= gradients.leaving_bytes
        most = gradients.sends.most_bytes - gradients.sends.nbytes
        gradients.allowed_bytes = left if left < most else most
        return waiting <= left

    def has_room_for(self, expected: Moment, slots: int | None = None) -> bool:
        """Return whether chunks may have `slots` slots (None: one for each copy) beside the bytes `expected`."""
        needed = expected.non_model_bytes if self._memory.device.watched else self._least_room()
        return self._memory.device_slots(needed) >= (self._all_slots if slots is None else slots)

    def before_moment(self, expected: Moment) -> None:
        """Set the chunk limit for a moment that begins, in which anything but chunks needs what is `expected`."""
        watched, sums = self._memory.device.watched, self._sum_bytes(expected)
        needed = (expected.non_model_bytes if watched else self._room_wanted) + sums
        self._let_homes_go(needed)
        self.set_limit((expected.non_model_bytes if watched else self._least_room()) + sums)
        self._wait_for_leaving()
        memory, homes = self._memory, self._memory.device_home_bytes
        chunks = memory.device_chunk_bytes
        if self.shortage.activations is None:  # copies may have to leave room for activations
            chunks = min(chunks, homes + self._all_slots * memory.device_pool.slot_bytes)
        self._harmless = memory.usable_bytes - chunks
        if needed <= self._harmless and not self._tracer.measured:
            self._left = homes

    def has_room_for_sums(self, nbytes: int, before: int) -> bool:
        """Return whether sums of gradients may wait on the device; see `ChunkLimit`. A GPU, of which peaks alone are
        known, has to have that room now."""
        if self._memory.device.watched:
            return super().has_room_for_sums(nbytes, before)
        if self._tracer.measured or nbytes > self._memory.usable_bytes // 2:
            return False
        if not self.leaves_copies(self._tracer.expected, nbytes):
            return False
        self.set_limit(self._least_room() + nbytes)
        return self.chunk_bytes() + self._room_wanted + nbytes <= self._memory.usable_bytes

    def leaves_copies(self, expected: Moment, nbytes: int) -> bool:
        """Return whether sums leave room for copies; see `ChunkLimit`."""
        if not self._memory.device.watched:
            expected = expected.grown(self._least_room(), 0)
        return super().leaves_copies(expected, nbytes)

    def _sum_bytes(self, expected: Moment) -> int:
        """Return the bytes of sums of gradients on the device. Sends them home if they leave too few slots."""
        gradients = self._traffic.gradients
        if gradients.summed_bytes and not self.leaves_copies(expected, gradients.summed_bytes):
            gradients.send_gathered()
        return gradients.summed_bytes

    def room_for_gradients(self) -> int:
        """Return how many device bytes gradients may take in the moment that runs, until they are at home."""
        known = self._memory.device.watched and not self._tracer.measured
        activations = sum(self.leaving.values()) + sum(self.ahead.values())
        return self.beside_chunks() - activations if known else self._memory.device_bytes

    def gradients_sent(self, count: int) -> None:
        """Note that `count` gradients were sent home, and of a measured segment the live bytes beside them."""
        if self._memory.device.watched:
            if self._tracer.measured:
                live_bytes = self.monitor.live_bytes  # read first: those in flight may be freed any time
                self._tracer.sent(live_bytes - self.leaving_bytes)
            else:
                self._tracer.gradients_sent += count
            if self._traffic.gradients.leaving or self.leaving or self.ahead:
                self._wait_for_leaving()

    @property
    def leaving_bytes(self) -> int:
        """Device bytes of gradients that are gathered, of gradients and activations in flight, or fetched ahead."""
        gradients = self._traffic.gradients
        leaving = (gradients.leaving_bytes if gradients.leaving else 0) + gradients.gathered_bytes
        if self.leaving or self.ahead:
            leaving += sum(self.leaving.values()) + sum(self.ahead.values())
        return leaving

    def _wait_for_leaving(self) -> None:
        """Wait for gradients and activations in flight, of which there may be more than in the measured segment, until
        they have room beside the chunk limit."""
        if not self._memory.device.watched or self._tracer.measured:
            return
        room = self.beside_chunks()
        if self._traffic.gradients.gathered_bytes and self.leaving_bytes > room:
            self._traffic.gradients.send_gathered()
        while 0 < self.leaving_bytes > room:  # activations fetched ahead last: they would be fetched again
            if self._traffic.gradients.under_way or self.leaving:
                self._traffic.wait_for_one()
            elif not self._give_way() and not self._traffic.gradients.await_turns():
                if not self._anything_leaves():  # what came late on ranks stays until the backward ends
                    return
                self._traffic.wait_for_one()

    def _give_way(self) -> bool:
        moves = self._activations
        return moves is not None and moves.give_way()

    @property
    def _activations(self) -> LeavingActivations | None:
        return None if self.shortage.activations is None else self.shortage.activations()

    def transit_grew(self) -> None:
        """Note that an activation has begun to leave the device."""
        self._wait_for_leaving()

    def has_room_ahead(self, nbytes: int) -> bool:
        """Return whether an activation of `nbytes` may be fetched ahead."""
        if not self._memory.device.watched:
            return True
        if self._tracer.measured:
            return self.missing_bytes(self.monitor.live_bytes + nbytes) <= 0
        return super().has_room_ahead(nbytes)

    def count(self, what: str, tensor: torch.Tensor) -> None:
        """Count the memory of `tensor`, which no operator has made, as of `what`, in a measured segment."""
        if self._memory.device.watched and self._tracer.measured:
            self.monitor.count(what, (tensor,))

    def non_model_grew(self, operator: str, live_bytes: int) -> None:
        """Make room for an operator of a measured segment: free idle chunks, as on a GPU, and wait for gradients in
        flight. The trace notes what is live beside chunks then.

        Raises `DeviceOutOfMemoryError` if chunks in use do not fit beside it. On a GPU, where the allocator's peaks
        count, this only notes `live_bytes`.
        """
        if not self._memory.device.watched:
            self._grown_bytes = max(self._grown_bytes, live_bytes)
            self.monitor.peak.reached(live_bytes, self.statistics.steps + 1)
            return
        with self.monitor.unwatched():
            self._let_homes_go(live_bytes)
            live_bytes = self.make_room(live_bytes)
            if self.missing_bytes(live_bytes) > 0:
                self.monitor.left |= self._leave_device(live_bytes)
        if self.missing_bytes(live_bytes) > 0:
            self._tracer.lacked_room = True
            raise self.shortage.error(operator, live_bytes)
        self.statistics.device_in_use(self.chunk_bytes(), live_bytes)
        self.monitor.peak.reached(live_bytes, self.statistics.steps + 1)
        if (moves := self._activations) is not None:
            moves.needs(live_bytes - self.leaving_bytes)

    def own_bytes(self) -> int:
        """Return the bytes needed now beside chunks, without those in flight where these are known."""
        return self.look_at_allocator() - (self.leaving_bytes if self._memory.device.watched else 0)

    def saved_bytes(self) -> int:
        """Return the device's bytes beside homes that must stay and enough copies for prefetching."""
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
        self._traffic.gradients.send_gathered()
        if not self._anything_leaves():
            return bool(self._traffic.gradients.await_turns())
        self._traffic.wait_for_one()
        return True

    def _anything_leaves(self) -> bool:
        """Return whether a transfer is in flight at whose end device memory becomes free."""
        leaving = self._traffic.gradients.under_way or bool(self.leaving or self.ahead)
        return leaving or bool(self._traffic.residency.in_flight())

    def _let_activations_go(self, nbytes: int) -> bool:
        moves = self._activations
        return moves is not None and moves.make_room(nbytes)

    def widen(self) -> bool:
        """Raise the chunk limit for chunks that are used at once and have no room, with nothing in flight: to what was
        only guessed to be needed beside them, or what gradients in flight have left since the moment began. Returns
        False if there is no such room."""
        watched = self._memory.device.watched
        before = self.leaving_bytes, self.non_model_bytes
        if self._traffic.gradients.summed_bytes:  # copies of earlier moments are in use beside those of this one
            self._traffic.gradients.send_gathered()
            self.set_limit(self._tracer.expected.non_model_bytes if watched else self._least_room(), needs_all=True)
            return True
        self._let_activations_go(self._memory.device_pool.slot_bytes)
        if self._give_way() or before != (self.leaving_bytes, self.non_model_bytes):
            if watched and self._tracer.measured:
                self.set_limit(self.monitor.live_bytes)
            return True
        needed = self.monitor.live_bytes if watched else self._most_non_model
        room = needed if watched else self._room_seen
        if self._memory.resident and self._leave_device(room):
            return True
        if (watched and not self._tracer.measured) or self._limit >= self._memory.device_slots(needed):
            return self._leave_device(room)
        if watched:
            self.begin_with(needed)
        else:
            self.set_limit(needed, needs_all=True)
        return True

    def out_of_memory(self) -> None:
        """Free all device memory that no chunk in use needs, as the allocator has no room for an operator."""
        self.look_at_allocator()
        self._let_activations_go(self._memory.device_bytes)
        while self._give_way():
            pass
        self._leave_device(self._room_seen)
        self._let_homes_go(self._room_seen)
        self.free_slots()

    def free_slots(self) -> None:
        """Free the memory of all slots that no copy in use needs; they take memory again as they are used."""
        before = self._limit
        try:
            self._set_slots(0, before=before)
            self._traffic.executor.drain()  # an interrupt or a transfer's error is raised here
            self._traffic.gradients.wait()  # gradients in flight take device memory
            self._traffic.executor.wait_while(lambda: bool(self.leaving))
            self._memory.device_pool.give_back(self._traffic.residency.free_slots(Tier.DEVICE), 0)
        finally:
            self._set_slots(before, before=before)
            self._memory.device.forget_peak()  # it counts freed chunks

    def _limit_chunks(self, slots: int, *, before: int) -> None:
        self.look_at_allocator()
        held = self._memory.device_pool.held_slots
        self._set_slots(slots, before=before)
        if self._memory.device_pool.held_slots < held:
            self._memory.device.forget_peak()  # as above

    def _set_slots(self, slots: int, *, before: int) -> None:
        """Limit chunks to `slots` slots, and free memory of slots if that is less than `before`."""
        self._traffic.execute(self._traffic.residency.limit(Tier.DEVICE, slots))
        if slots < before:
            self._memory.device_pool.give_back(self._traffic.residency.free_slots(Tier.DEVICE), slots)

    @contextmanager
    def moving_homes(self) -> Iterator[None]:
        """Move homes in the body, without counting their memory as a peak of anything else."""
        self.look_at_allocator()
        try:
            with self.monitor.unwatched(), torch.no_grad():
                yield
        finally:
            self._memory.device.forget_peak()

    # ---- giving way -------------------------------------------------------------------------------------------

    def _let_homes_go(self, non_model_bytes: int) -> None:
        """Move homes off the device if they take room that copies need beside `non_model_bytes`."""
        if self._memory.moved_bytes:
            missing = self._all_slots * self._memory.device_pool.slot_bytes - self._memory.room_bytes(non_model_bytes)
            if missing > 0:
                self.give_way(missing)

    def _leave_device(self, non_model_bytes: int) -> bool:
        """Have a model that is whole on the device make room for `non_model_bytes`: homes without room there move to
        host memory, now and later; of one in codes all of them. Returns False if it is not whole there, or must
        stay."""
        if self._memory.in_codes:
            before = self._memory.device_home_bytes
            self.give_way(0)
            self.set_limit(non_model_bytes)
            return self._memory.device_home_bytes < before
        if self._memory.resident:
            self.give_way(0)
            if not self._memory.resident:
                self._tracer.forget_traces()  # they have no uses of weights
                with self.monitor.unwatched():
                    self._let_homes_go(non_model_bytes)
                    self.set_limit(non_model_bytes)
                return True
        return False

    def set_limit(self, non_model_bytes: int, *, needs_all: bool = False) -> None:
        """Leave room for `non_model_bytes` beside chunks; see `ChunkLimit`."""
        self._left = -1
        super().set_limit(non_model_bytes, needs_all=needs_all)


def _no_homes_moved(nbytes: int) -> None:
    """Do nothing, as no homes have moved to the device."""
