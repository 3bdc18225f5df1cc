"""Which tier each block gets its home on. Pure: sizes and capacities in, tiers or a reasoned refusal out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hetmem.errors import BudgetError
from hetmem.plan.trace import Tier
from hetmem.units import format_size

STAGED_ROLES = 4
"""Parameter, gradient and two optimizer states of one chunk are in staging together while it is updated."""

DEVICE_SHARE = 0.5
"""A model is kept whole on the device if its states take at most this share of it: the rest is for activations."""


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes still free on the tiers that can hold homes."""

    host_bytes: int
    nvme_bytes: int


def place(sizes: Sequence[int], room: Room, what: str) -> list[Tier]:
    """A tier for each block of `sizes` bytes, in order: HOST while there is room, then NVMe.

    Callers place the roles in order of traffic per byte (parameters, gradients, states), so what is used most often
    comes to lie nearest. Raises `BudgetError` naming the bytes that are missing.
    """
    host, nvme = room.host_bytes, room.nvme_bytes
    tiers = []
    for size in sizes:
        if size <= host:
            tiers.append(Tier.HOST)
            host -= size
        else:
            tiers.append(Tier.NVME)
            nvme -= size
    if nvme < 0:
        raise BudgetError(
            f"the budget has no place for {what}: {format_size(sum(sizes))} needed, {format_size(room.host_bytes)} of "
            f"host memory and {format_size(room.nvme_bytes)} of NVMe are left, so {format_size(-nvme)} are missing; "
            f"raise Budget(host=…), or Budget(nvme=…, nvme_dir=…)"
        )
    return tiers


def fits_device(state_bytes: int, device_bytes: int, device_chunk_bytes: int | None) -> bool:
    """Whether everything (parameters, gradients, states) stays on the device for good."""
    allowed = DEVICE_SHARE * device_bytes if device_chunk_bytes is None else device_chunk_bytes
    return state_bytes <= allowed


def staging_slots(spans: Sequence[int], host_slots: int) -> int:
    """How many slots of host memory form the staging ring, given that not everything has its home in host memory.

    The least holds one chunk's update at a time; twice that lets the next one be read meanwhile, three times also the
    last one be written. Never more than a quarter of the host's slots beyond the least, so that homes have room.
    """
    largest = STAGED_ROLES * max(spans, default=1)
    return max(largest, min(3 * largest, host_slots // 4))


def largest_chunk_elements(device_bytes: int, host_bytes: int, compute_itemsize: int, itemsize: int, nvme: bool) -> int:
    """An upper bound of the chunk size: at least 16 slots on the device, and with NVMe a staging ring that takes at
    most a quarter of host memory."""
    bound = device_bytes // (16 * compute_itemsize)
    if nvme:
        bound = min(bound, host_bytes // (4 * 3 * STAGED_ROLES * itemsize))
    return bound
