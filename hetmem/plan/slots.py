"""Which slots of a pool are taken, by number. Pure; owns no memory.

Slots of a pool are equal, so nothing fragments for blocks of one slot. A block with a larger span needs slots in a
row: it lies at a multiple of its span, so that blocks of one span never leave a gap between them that none fits into
(four roles of a chunk fit into four times its span whatever came before). Large spans are looked for from the high end
and single slots from the low end, which keeps the two kinds apart.
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
        """The first slot of `span` free ones in a row, at a multiple of `span`, or None."""
        owner = self._owner
        if span == 1:
            return next((slot for slot in range(self.count) if owner[slot] is None), None)
        free = (slot for slot in self._starts(span) if all(block is None for block in owner[slot : slot + span]))
        return next(free, None)

    def windows(self, span: int) -> Iterator[list[int]]:
        """The distinct blocks in every place for `span` slots, from the high end."""
        for slot in self._starts(span):
            inside = (block for block in self._owner[slot : slot + span] if block is not None)
            yield list(dict.fromkeys(inside))

    def _starts(self, span: int) -> range:
        return range((self.count // span - 1) * span, -1, -span)

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
