"""The staging ring of host memory through which homes on NVMe pass: how large it is, and which chunks never use it.

Note [Chunks that are never staged]
    Staging holds all roles of a chunk while it is updated, so the largest chunk sets its size. An embedding of 3.4 GiB
    beside matrices of 0.2 GiB would make it 14 to 41 GiB, for an update of milliseconds a step. The homes of such a
    chunk take no more of host memory than staging it would, so they lie there for good, and the ring is sized for the
    other chunks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

STAGED_ROLES = 4
"""Staging holds a chunk's parameter, gradient and two optimizer states together while it is updated."""

MOST_ROLES = STAGED_ROLES + 1
"""The homes for which host memory is kept free beside a chunk that is never staged, until its optimizer is known: some
keep a third state."""

_HOST_PER_STAGING = 4
"""Slots of host memory per slot of staging beyond the minimum, so that homes have room."""

_AMPLE_BYTES = 4 << 30
"""What keeps a drive busy both ways: beyond it the ring holds two updates at most."""

_UNSTAGED_SHARE = 2
"""Chunks that are never staged, and staging, take at most one in so many bytes of host memory together."""


def staging_slots(spans: Collection[int], host_slots: int, slot_bytes: int = 0) -> int:
    """Return how many of `host_slots`, of `slot_bytes`, form the staging ring for chunks of `spans`, given that not all
    homes fit in host memory.

    The minimum holds one chunk's update; twice that lets the next one be read meanwhile, three times also lets the last
    one be written, if that takes at most `_AMPLE_BYTES`. Beyond the minimum it takes at most a quarter of the slots.
    """
    largest = STAGED_ROLES * max(spans, default=1)
    most = 3 * largest if 3 * largest * slot_bytes <= _AMPLE_BYTES else max(2 * largest, _AMPLE_BYTES // slot_bytes)
    return max(largest, min(most, host_slots // _HOST_PER_STAGING))


def slots_for_staging(slots: int) -> int:
    """Return how many slots of host memory a staging ring of `slots` needs in all."""
    return _HOST_PER_STAGING * slots


def never_staged(
    spans: Mapping[int, int], trained: Collection[int], host_slots: int, slot_bytes: int
) -> tuple[frozenset[int], int]:
    """Return the chunks that are never staged, and the slots of the ring for all others. `spans`: slots of each chunk;
    `trained` ones have all roles. See Note [Chunks that are never staged]: only chunks without which the ring takes
    half as much or less are worth it."""
    found, ring = frozenset[int](), staging_slots(spans.values(), host_slots, slot_bytes)
    for span in sorted(set(spans.values()), reverse=True)[1:]:
        larger = frozenset(index for index, of in spans.items() if of > span)
        taken = sum(spans[index] * (MOST_ROLES if index in trained else 1) for index in larger)
        rest = [of for index, of in spans.items() if index not in larger]
        slots = staging_slots(rest, host_slots - taken, slot_bytes)
        if 2 * slots <= ring and taken + slots <= host_slots // _UNSTAGED_SHARE:
            found, ring = larger, slots
    return found, ring
