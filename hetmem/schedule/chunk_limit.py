"""Decides how many device slots chunks may take at each moment, beside everything else on the device. Pure.

A run and a plan count the other bytes in their own ways: a run counts tensors as they are made, or asks the GPU's
allocator; a plan adds up numbers. This module decides for both what follows: idle chunks are evicted, transfers off the
device are waited for, and the trace records the bytes that remain.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from hetmem.schedule.residency import Residency
from hetmem.schedule.saved import MANY_CHUNKS
from hetmem.schedule.trace import DEVICE, Moment
from hetmem.schedule.tracer import StepTracer

_SUMS_PART = 2
"""Sums of gradients take half of the device at most."""


@dataclass(slots=True)
class DevicePeaks:
    """The most bytes on the device so far: of everything, of chunks, and of what is not chunks."""

    device_peak_bytes: int = 0
    chunk_peak_bytes: int = 0
    non_model_peak_bytes: int = 0

    def device_in_use(self, chunk_bytes: int, non_model_bytes: int) -> None:
        """Record that chunks and everything else took these many bytes of the device at one time."""
        if chunk_bytes > self.chunk_peak_bytes:  # runs at each use of a weight: three calls of `max` cost more
            self.chunk_peak_bytes = chunk_bytes
        if non_model_bytes > self.non_model_peak_bytes:
            self.non_model_peak_bytes = non_model_bytes
        if chunk_bytes + non_model_bytes > self.device_peak_bytes:
            self.device_peak_bytes = chunk_bytes + non_model_bytes


class ChunkLimit(ABC):
    """The limit of chunks on the device. `usable_bytes` is what an allocator can hand out, `spans` are those of all
    chunks, and `slots` is the most that copies may take."""

    def __init__(
        self,
        tracer: StepTracer,
        residency: Residency,
        usable_bytes: int,
        slot_bytes: int,
        spans: Collection[int],
        slots: int,
    ) -> None:
        self._tracer, self._residency = tracer, residency
        self._usable_bytes, self._slot_bytes = usable_bytes, slot_bytes
        self._all_slots = sum(spans)
        self._largest_span = max(spans, default=0)
        self._many_slots = MANY_CHUNKS * self._largest_span
        self._limit = slots
        self._turned: Sequence[Moment] = ()
        self._slots_in_turns: dict[tuple[int, tuple[int, ...]], int] = {}
        """By place in the trace `_turned`, what sums leave to copies: walking a trace costs more than a moment."""

    # ---- sources and commands: a run's or a plan's -------------------------------------------------------------

    @abstractmethod
    def _homes(self) -> int:
        """Return the bytes of homes on the device."""

    @abstractmethod
    def _live(self) -> int:
        """Return the bytes on the device beside chunks now, `leaving_bytes` included."""

    @property
    @abstractmethod
    def leaving_bytes(self) -> int:
        """Bytes of gradients and activations in flight off the device, or prefetched to it."""

    @abstractmethod
    def _for_activations(self) -> int:
        """Return the bytes that chunks beyond `MANY_CHUNKS` copies leave to prefetched activations."""

    @abstractmethod
    def _slots(self, non_model_bytes: int) -> int:
        """Return how many slots chunks may take beside `non_model_bytes`."""

    @abstractmethod
    def _limit_chunks(self, slots: int, *, before: int) -> None:
        """Carry out a command: limit chunks to `slots` slots from now on, in place of `before`."""

    @abstractmethod
    def _wait_for_room(self, missing_bytes: int) -> bool:
        """Carry out a command: wait until less of the device is taken; False if nothing in flight can free any."""

    # ---- decisions ---------------------------------------------------------------------------------------------

    def chunk_bytes(self) -> int:
        """Return the device bytes that chunks take now, homes and copies."""
        return self._residency.taken[DEVICE].used * self._slot_bytes + self._homes()

    def set_limit(self, non_model_bytes: int, *, needs_all: bool = False) -> None:
        """Leave room for `non_model_bytes` beside chunks, and for prefetched activations unless a moment `needs_all`
        slots."""
        limit = self._slots(non_model_bytes)
        if not needs_all and (ahead := self._for_activations()):
            limit = max(self._slots(non_model_bytes + ahead), min(limit, self._many_slots))
        if limit != self._limit:
            before, self._limit = self._limit, limit
            self._limit_chunks(limit, before=before)

    def make_room(self, live_bytes: int) -> int:
        """Evict idle chunks and wait for transfers off the device, as other memory has grown to `live_bytes` in a
        measured segment. Record the bytes that remain in the trace, and return them."""
        self.set_limit(live_bytes)
        while (missing := self.missing_bytes(live_bytes)) > 0 and self._wait_for_room(missing):
            live_bytes = min(live_bytes, self._live())
        self._tracer.grew(live_bytes, self.leaving_bytes)
        return live_bytes

    def missing_bytes(self, live_bytes: int) -> int:
        """Return what the device lacks for `live_bytes` beside the chunks on it; 0 or less if nothing."""
        return self.chunk_bytes() + live_bytes - self._usable_bytes

    def begin_with(self, live_bytes: int) -> None:
        """Give chunks the room of gradients that have left since this moment began: the moment's blocks lack room, and
        nothing has run in it yet."""
        self._tracer.begins_with(live_bytes)
        self.set_limit(live_bytes, needs_all=True)

    def beside_chunks(self) -> int:
        """Return the bytes left for transfers, beside chunks and what the trace expects."""
        copies = min(self._limit, self._all_slots) * self._slot_bytes
        return self._usable_bytes - max(self.chunk_bytes(), copies + self._homes()) - self._tracer.own_bytes

    # ---- sums of gradients: see `engine.summed_gradients` --------------------------------------------------------

    def has_room_for_sums(self, nbytes: int, before: int) -> bool:
        """Return whether sums of gradients of `nbytes` in all, `before` of them there already, may wait on the device
        in the moment that runs: beside the copies that it uses, and one more. Idle copies make way for them."""
        if self._tracer.measured or nbytes > self._usable_bytes // _SUMS_PART:
            return False
        needed, expected = nbytes + self.leaving_bytes - before, self._tracer.expected
        if needed <= self.beside_chunks():
            return True
        if not self.leaves_copies(expected, nbytes):
            return False
        self.set_limit(expected.non_model_bytes + nbytes)
        return needed <= self.beside_chunks()

    def leaves_copies(self, expected: Moment, nbytes: int) -> bool:
        """Return whether sums of `nbytes` leave all slots, or those that micro-batches use in turns from `expected` on,
        and those of one more chunk."""
        left = self._slots(expected.non_model_bytes + nbytes)
        if left >= self._slots(expected.non_model_bytes):
            return True
        trace, place = self._tracer.place
        if trace is not self._turned:
            self._turned, self._slots_in_turns = trace, {}
        slots = self._slots_in_turns.get(place)
        if slots is None:
            spans = [self._residency.blocks[block].span for block in self._tracer.blocks_until_again()]
            slots = self._slots_in_turns[place] = sum(spans) + self._largest_span
        return left >= slots

    def has_room_ahead(self, nbytes: int) -> bool:
        """Return whether an activation of `nbytes` may be prefetched now."""
        return self.leaving_bytes + nbytes <= self.beside_chunks()
