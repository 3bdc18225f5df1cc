"""Counters of one run that no other part owns."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from hetmem.schedule.update_split import Way


@dataclass(slots=True)
class Statistics:
    """Peaks in bytes, waiting in seconds. Only grows."""

    device_peak_bytes: int = 0
    chunk_peak_bytes: int = 0
    non_model_peak_bytes: int = 0
    stall_seconds: float = 0.0
    steps: int = 0
    updated_bytes: Counter[Way] = field(default_factory=Counter)
    """Of parameters, by where they were updated."""

    def device_in_use(self, chunk_bytes: int, non_model_bytes: int) -> None:
        """Chunks and everything else held these many bytes of the device at one time."""
        if chunk_bytes > self.chunk_peak_bytes:  # told of each use of a weight: three calls of `max` cost more
            self.chunk_peak_bytes = chunk_bytes
        if non_model_bytes > self.non_model_peak_bytes:
            self.non_model_peak_bytes = non_model_bytes
        if chunk_bytes + non_model_bytes > self.device_peak_bytes:
            self.device_peak_bytes = chunk_bytes + non_model_bytes
