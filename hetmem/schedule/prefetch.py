"""How far ahead of their use copies are fetched: what a plan may set, and `Residency` then does. Pure data."""

from __future__ import annotations

from dataclasses import dataclass

from hetmem.schedule.blocks import in_flight_bytes


@dataclass(frozen=True, slots=True)
class Prefetch:
    """Blocks of the next `uses_ahead` uses are fetched, at most `in_flight` at once on each tier, more if small."""

    uses_ahead: int = 8
    in_flight: int = 2

    def at_once(self, slot_bytes: int, device_bytes: int) -> int:
        """Return how many copies in slots of `slot_bytes` are fetched at once, beside a device of `device_bytes`."""
        return max(self.in_flight, in_flight_bytes(device_bytes) // max(1, slot_bytes))


FARTHER = Prefetch(32, 4)
"""What a plan tries beside the default. Between the two nothing else was better in any case that was simulated."""
