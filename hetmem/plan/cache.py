"""One cached tier: its slots, the copies in them, and what to give up for another one. Pure; sends no commands.

`Residency` owns the transitions of copies; here is only what a single tier knows by itself.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from hetmem.plan.policy import CopyFacts, EvictionPolicy
from hetmem.plan.slots import SlotMap
from hetmem.plan.trace import NEVER, Schedule, Tier

Rank = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Block:
    """One role of one chunk. `span` slots in a row hold a copy; `home` is the tier of the authoritative copy."""

    label: str
    home: Tier
    span: int = 1


class CopyState(Enum):
    """States of a copy; a block without a copy on a tier is ABSENT there."""

    WAITING = auto()
    LOADING = auto()
    VALID = auto()
    STALE = auto()


@dataclass(slots=True)
class Copy:
    """A copy on DEVICE or in HOST staging. `uses` > 0 keeps it where it is; `waiting` of them want a WAITING one.
    `load` is False while its content is undefined, because it will be overwritten."""

    state: CopyState
    slot: int = -1
    uses: int = 0
    waiting: int = 0
    dirty: bool = False
    writing: bool = False
    load: bool = True
    last_use: int = 0
    fetched: int = 0

    @property
    def idle(self) -> bool:
        """Whether an eviction may take it now."""
        return self.uses == 0 and not self.writing and self.state in (CopyState.VALID, CopyState.STALE)


class Cache:
    """The copies on `tier`, by block number. `limit` of the `slots` may be taken, those of loads in flight included.

    `nearer` are the copies of the next faster tier: what lies there too is the cheaper one to lose here.
    """

    def __init__(
        self, tier: Tier, count: int, blocks: Sequence[Block], policy: EvictionPolicy, nearer: Container[int] = ()
    ) -> None:
        self.tier = tier
        self.slots = SlotMap(count)
        self.limit = count
        self.copies: dict[int, Copy] = {}
        self.schedule = Schedule()
        self._blocks = blocks
        self._policy = policy
        self._nearer = nearer

    def writing_slots(self) -> int:
        """Slots that become free when the writes in flight are done."""
        copies = self.copies.items()
        return sum(self._blocks[block].span for block, copy in copies if copy.writing and copy.uses == 0)

    def loading(self) -> int:
        """How many copies are in flight to this tier."""
        return sum(copy.state is CopyState.LOADING for copy in self.copies.values())

    def idle(self) -> dict[int, Rank]:
        """The policy's ranks of everything that may be given up."""
        return {block: self._policy.rank(self._facts(block, copy)) for block, copy in self.copies.items() if copy.idle}

    def harmless(self, needed_at: int) -> dict[int, Rank]:
        """The ranks of what may be given up now for a block that is needed at `needed_at`.

        On the device only what MIN would give up then: if a copy that is used before is the one used furthest after
        `needed_at`, its turn must be waited for. So prefetching costs no fetch that demand would not. In HOST staging
        the optimizer scans its states round and round, where MIN's choice is always the block just used, and waiting
        for it would leave no read behind compute; there, anything needed later gives way.
        """
        ranks, awaited, schedule = {}, 0, self.schedule
        waits, now = self.tier is Tier.DEVICE, schedule.now()
        for block, copy in self.copies.items():
            if copy.dirty:
                continue
            coming = schedule.next_use(block)
            if waits and (coming < needed_at or (copy.uses and block in now)):
                awaited = max(awaited, schedule.next_use(block, needed_at))
            elif coming > needed_at and copy.idle:
                ranks[block] = (coming, -copy.last_use)
        return {block: rank for block, rank in ranks.items() if rank[0] >= awaited}

    def victims(self, span: int, ranks: dict[int, Rank]) -> list[int]:
        """Which of the ranked blocks have to go for `span` free slots in a row; empty if that cannot be done now."""
        victims: list[int] = []
        if span > 1 and self.slots.find(span) is None:
            windows = [window for window in self.slots.windows(span) if all(block in ranks for block in window)]
            if not windows:
                return []
            victims = max(windows, key=lambda window: min(ranks[block] for block in window))
        missing = self.slots.used + span - self.limit - sum(self._blocks[block].span for block in victims)
        others = {block: rank for block, rank in ranks.items() if block not in victims}
        more = self._furthest(others, missing)
        return victims + more if sum(self._blocks[block].span for block in more) >= missing else []

    def excess(self) -> list[int]:
        """What has to go because more than `limit` slots are taken, as far as it may and no write makes room."""
        excess = self.slots.used - self.limit
        if excess <= 0:
            return []
        return self._furthest(self.idle(), excess - self.writing_slots())

    def _furthest(self, ranks: dict[int, Rank], slots: int) -> list[int]:
        """The blocks of greatest rank that take `slots` slots together, and none that is not needed for that: behind
        a large one that was the last to be chosen, smaller ones may stay. All of them if they do not suffice."""
        chosen = []
        for block in sorted(ranks, key=lambda block: ranks[block], reverse=True):
            if slots <= 0:
                break
            chosen.append(block)
            slots -= self._blocks[block].span
        for block in reversed(chosen):
            if slots + self._blocks[block].span <= 0:
                chosen.remove(block)
                slots += self._blocks[block].span
        return chosen

    def _facts(self, block: int, copy: Copy) -> CopyFacts:
        next_use = self.schedule.next_use(block)
        if next_use != NEVER and block in self._nearer:
            next_use = NEVER - 1
        return CopyFacts(next_use, copy.last_use, copy.fetched, copy.dirty)

    def check(self) -> None:
        """Raise `AssertionError` where copies and slots disagree."""
        owners = self.slots.owners()
        for block, copy in self.copies.items():
            label, home, span = self._blocks[block].label, self._blocks[block].home, self._blocks[block].span
            assert copy.uses >= copy.waiting >= 0, f"{label} has a wrong use count"
            assert home > self.tier, f"{label} is cached at or above its home"
            assert not copy.dirty or (self.tier is Tier.HOST and copy.state is CopyState.VALID)
            assert not copy.writing or copy.dirty
            if copy.slot >= 0:
                assert owners[copy.slot : copy.slot + span] == [block] * span, "a slot has another owner"
            else:
                assert copy.uses == copy.waiting, "a copy without a slot is in use"
        taken = sum(self._blocks[block].span for block, copy in self.copies.items() if copy.slot >= 0)
        assert taken == self.slots.used <= self.slots.count, "slots and copies disagree"
