"""What holds of a residency between any two of its events."""

from __future__ import annotations

from typing import Any


def check_invariants(residency: Any) -> None:
    """Raise `AssertionError` if an invariant of the state machine does not hold."""
    for cache in residency._caches:
        spans = {block: residency.blocks[block].span for block in cache.copies}
        taken = [c.slot + at for block, c in cache.copies.items() if c.slot >= 0 for at in range(spans[block])]
        assert len(taken) == cache.slots.used <= cache.slots.count, "slots and copies disagree"
        assert len(taken) == len(set(taken)), "a slot has two owners"
        assert not set(taken) & set(cache.slots.free()), "a slot that is taken is free"
        for block, copy in cache.copies.items():
            label, state = residency.blocks[block].label, copy.state.name
            assert copy.uses >= copy.waiting >= 0, f"{label} has a wrong use count"
            assert residency.blocks[block].home > cache.tier, f"{label} is cached at or above its home"
            assert not copy.dirty or (cache.tier.name == "HOST" and state == "VALID"), "a copy is dirty that cannot be"
            assert not copy.writing or copy.dirty, "a clean copy is written"
            assert copy.slot >= 0 or copy.uses == copy.waiting, "a copy without a slot is in use"
            waits = (cache.tier, block) in residency._supply.waiting
            assert waits == (state == "WAITING") == (copy.waiting > 0), "a wait is lost"
