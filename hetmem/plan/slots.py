"""Which slots of a pool are taken, by number. Pure; owns no memory.

Slots of a pool are equal, so nothing fragments for blocks of one slot. A block with a larger span needs slots in a
row: those are looked for from the high end and single ones from the low end, which keeps the two kinds apart.
"""

from __future__ import annotations

from collections.abc import Iterator


class SlotMap:
    """Occupancy of `count` slots; `used` of them are taken."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.used = 0
        self._owner: list[int | None] = [None] * count

    def find(self, span: int) -> int | None:
        """The first slot of `span` free ones in a row, or None."""
        owner = self._owner
        if span == 1:
            return next((slot for slot in range(self.count) if owner[slot] is None), None)
        run = 0
        for slot in range(self.count - 1, -1, -1):
            run = run + 1 if owner[slot] is None else 0
            if run == span:
                return slot
        return None

    def windows(self, span: int) -> Iterator[list[int]]:
        """The distinct blocks in every run of `span` slots, from the high end."""
        for slot in range(self.count - span, -1, -1):
            inside = (block for block in self._owner[slot : slot + span] if block is not None)
            yield list(dict.fromkeys(inside))

    def take(self, slot: int, span: int, block: int) -> None:
        """`block` takes `span` free slots from `slot` on."""
        assert all(owner is None for owner in self._owner[slot : slot + span]), f"slot {slot} is taken"
        self._owner[slot : slot + span] = [block] * span
        self.used += span

    def give(self, slot: int, span: int) -> None:
        """`span` taken slots from `slot` on become free."""
        self._owner[slot : slot + span] = [None] * span
        self.used -= span

    def owners(self) -> list[int | None]:
        """The block in each slot."""
        return list(self._owner)
