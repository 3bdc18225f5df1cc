"""How many slots of the device chunks may take at each moment, beside what else is there. Pure.

A run and a plan learn what else is there in their own ways: a run counts tensors as they are made, or asks a GPU's
allocator; a plan adds numbers. What follows from it is decided here for both: chunks that are idle give way, what is on
its way off the device is waited for, and the trace has what was left.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass

from hetmem.schedule.residency import Residency
from hetmem.schedule.saved import MANY_CHUNKS
from hetmem.schedule.trace import DEVICE
from hetmem.schedule.tracer import StepTracer


@dataclass(slots=True)
class DevicePeaks:
    """The most bytes on the device so far: of everything, of chunks, and of what is not chunks."""

    device_peak_bytes: int = 0
    chunk_peak_bytes: int = 0
    non_model_peak_bytes: int = 0

    def device_in_use(self, chunk_bytes: int, non_model_bytes: int) -> None:
        """Chunks and everything else held these many bytes of the device at one time."""
        if chunk_bytes > self.chunk_peak_bytes:  # told of each use of a weight: three calls of `max` cost more
            self.chunk_peak_bytes = chunk_bytes
        if non_model_bytes > self.non_model_peak_bytes:
            self.non_model_peak_bytes = non_model_bytes
        if chunk_bytes + non_model_bytes > self.device_peak_bytes:
            self.device_peak_bytes = chunk_bytes + non_model_bytes


class ChunkLimit(ABC):
    """The limit of chunks on the device. `usable_bytes` are those that an allocator can hand out; `spans` are of all
    chunks, and `slots` those that copies have at most."""

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
        self._many_slots = MANY_CHUNKS * max(spans, default=0)
        self._limit = slots

    # ---- what a run counts, and a plan adds up -----------------------------------------------------------------

    @abstractmethod
    def _homes(self) -> int:
        """Bytes of homes on the device."""

    @abstractmethod
    def _live(self) -> int:
        """Bytes beside chunks now, `leaving_bytes` among them."""

    @property
    @abstractmethod
    def leaving_bytes(self) -> int:
        """Those of gradients and activations on their way, which are needed no more, or not yet."""

    @abstractmethod
    def _for_activations(self) -> int:
        """What chunks that are many leave to activations that come before their use."""

    @abstractmethod
    def _slots(self, non_model_bytes: int) -> int:
        """The slots that chunks may take beside `non_model_bytes`."""

    @abstractmethod
    def _limit_chunks(self, slots: int, *, before: int) -> None:
        """Command: let chunks have `slots` slots from now on, in place of `before`."""

    @abstractmethod
    def _wait_for_room(self, missing_bytes: int) -> bool:
        """Command: wait until less of the device is taken; False if nothing brings that about."""

    # ---- what follows ------------------------------------------------------------------------------------------

    def chunk_bytes(self) -> int:
        """Device bytes that chunks hold now, homes and copies."""
        return self._residency.taken[DEVICE].used * self._slot_bytes + self._homes()

    def set_limit(self, non_model_bytes: int, *, needs_all: bool = False) -> None:
        """Leave room for `non_model_bytes` beside chunks, and for activations that come before their use unless what is
        in use at once `needs_all`."""
        limit = self._slots(non_model_bytes)
        if not needs_all and (ahead := self._for_activations()):
            limit = max(self._slots(non_model_bytes + ahead), min(limit, self._many_slots))
        if limit != self._limit:
            before, self._limit = self._limit, limit
            self._limit_chunks(limit, before=before)

    def make_room(self, live_bytes: int) -> int:
        """What is not chunks has grown to `live_bytes`, in a segment that is measured: idle chunks give way, and what
        leaves is waited for. Return, and have the trace know, what is left of them."""
        self.set_limit(live_bytes)
        while (missing := self.missing_bytes(live_bytes)) > 0 and self._wait_for_room(missing):
            live_bytes = min(live_bytes, self._live())
        self._tracer.grew(live_bytes, self.leaving_bytes)
        return live_bytes

    def missing_bytes(self, live_bytes: int) -> int:
        """Return what the device lacks for `live_bytes` beside the chunks on it; not above 0 if nothing."""
        return self.chunk_bytes() + live_bytes - self._usable_bytes

    def begin_with(self, live_bytes: int) -> None:
        """Nothing has run in this moment, and chunks that it uses at once lack room: they get what gradients have left
        that were on their way when it began."""
        self._tracer.begins_with(live_bytes)
        self.set_limit(live_bytes, needs_all=True)

    def beside_chunks(self) -> int:
        """Return what the device has beside chunks and what the trace expects, for what is on its way."""
        copies = min(self._limit, self._all_slots) * self._slot_bytes
        return self._usable_bytes - max(self.chunk_bytes(), copies + self._homes()) - self._tracer.own_bytes

    def has_room_ahead(self, nbytes: int) -> bool:
        """Return whether an activation of `nbytes` may come before it is used."""
        return self.leaving_bytes + nbytes <= self.beside_chunks()
