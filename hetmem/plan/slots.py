"""Which slots of a pool are taken, by number. Pure; owns no memory.

Slots of a pool are equal, so nothing fragments for blocks of one slot. A block with a larger span needs slots in a
row: it lies at a multiple of its span, so that blocks of one span never leave a gap between them that none fits into
(the roles of a chunk fit into as many times its span whatever came before). Large spans are looked for from the high
end and single slots from the low end, which keeps the two kinds apart.
"""

from __future__ import annotations


class SlotMap:
    """Occupancy of `count` slots; `used` of them are taken. The free ones are bits of one number, which makes looking
    for a place a few operations on words."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.used = 0
        self._owner: list[int | None] = [None] * count
        self._free = (1 << count) - 1
        self._starts_of: dict[int, int] = {}

    def find(self, span: int) -> int | None:
        """The first slot of `span` free ones in a row, at a multiple of `span`, or None."""
        free = self._free
        if span == 1:
            return (free & -free).bit_length() - 1 if free else None
        starts = self._starts_of.get(span)
        if starts is None:
            starts = self._starts_of[span] = sum(1 << slot for slot in self._starts(span))
        for shift in range(span):
            starts &= free >> shift
        return starts.bit_length() - 1 if starts else None

    def taken(self, place: int, span: int) -> int:
        """How many slots of the place number `place` for `span` slots, counted from the low end, are taken."""
        return span - ((self._free >> place * span) & ((1 << span) - 1)).bit_count()

    def inside(self, place: int, span: int) -> list[int]:
        """The distinct blocks in that place."""
        owners = self._owner[place * span : (place + 1) * span]
        return list(dict.fromkeys(block for block in owners if block is not None))

    def _starts(self, span: int) -> range:
        return range((self.count // span - 1) * span, -1, -span)

    def take(self, slot: int, span: int, block: int) -> None:
        """`block` takes `span` free slots from `slot` on."""
        bits = ((1 << span) - 1) << slot
        assert self._free & bits == bits, f"slot {slot} is taken"
        self._owner[slot : slot + span] = [block] * span
        self._free ^= bits
        self.used += span

    def give(self, slot: int, span: int) -> None:
        """`span` taken slots from `slot` on become free."""
        self._owner[slot : slot + span] = [None] * span
        self._free |= ((1 << span) - 1) << slot
        self.used -= span

    def owners(self) -> list[int | None]:
        """The block in each slot."""
        return list(self._owner)
