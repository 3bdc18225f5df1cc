"""Pinned host memory: one page-aligned mapping, cut into permanent homes and the slots of a staging ring.

It hands out bytes and keeps to its capacity; it does not know what is in them.
"""

from __future__ import annotations

from hetmem.base.units import format_size, round_down, round_up
from hetmem.errors import CapacityError
from hetmem.memory.mapping import Mapping
from hetmem.schedule.placement import PIECE_BYTES

PAGE_BYTES = 4096


class HostPool:
    """`capacity_bytes` of host memory (rounded down to pages), exact: nothing is rounded up to powers of two."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = round_down(capacity_bytes, PAGE_BYTES)
        self.reserved_bytes = 0
        self.mapping = Mapping(max(PAGE_BYTES, self.capacity_bytes))
        self.mapping.keep_from_children()
        self._staging_offset = 0
        self.slot_bytes = 0  # of staging

    @property
    def free_bytes(self) -> int:
        """What may still be reserved."""
        return self.capacity_bytes - self.reserved_bytes

    def reserve(self, nbytes: int) -> memoryview:
        """`nbytes` of page-aligned memory for good. Raises `CapacityError` with nothing changed."""
        taken = round_up(nbytes, PAGE_BYTES)
        start = self.reserved_bytes
        if start // PIECE_BYTES != (start + taken - 1) // PIECE_BYTES and 0 < taken <= PIECE_BYTES:
            start = round_up(start, PIECE_BYTES)
        if start + taken > self.capacity_bytes:
            raise CapacityError(
                f"the host pool has no room: {format_size(taken)} wanted, {format_size(self.free_bytes)} left "
                f"of {format_size(self.capacity_bytes)}"
            )
        self.reserved_bytes = start + taken
        return self.mapping.buffer(start, nbytes)

    def reserve_staging(self, slot_bytes: int, slots: int) -> None:
        """Set `slots` slots of `slot_bytes` (whole pages) aside for staging; once."""
        self._staging_offset = self.reserved_bytes
        self.slot_bytes = slot_bytes
        if slots:
            self.reserve(slot_bytes * slots)

    def staged(self, slot: int, nbytes: int) -> memoryview:
        """`nbytes` of memory from staging slot `slot` on."""
        return self.mapping.buffer(self._staging_offset + slot * self.slot_bytes, nbytes)
