"""What a tier gives up, found by looking at every copy at each question: as it was done first, and now the oracle.

`compare(residency)` makes its caches answer each question both ways and fail where the two differ.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterator
from itertools import count

from hetmem.schedule.blocks import CopyFacts
from tests.schedule.tested import NEVER, Cache, CopyState, Residency, Schedule, SlotMap, Supply, Tier

Ranks = dict[int, tuple[int, ...]]


def compare(residency: Residency) -> Residency:
    """The same residency, whose every decision is checked from now on."""
    for cache in residency._caches:
        cache.__class__ = ComparedCache
        cache.__dict__["supply"] = residency._supply
    return residency


class ComparedCache(Cache):
    """Answers as `Cache` does, once that is what scanning says."""

    supply: Supply

    def unfed(self, staged: Container[int], comes_from_there: Callable[[int], bool]) -> int | None:
        found = super().unfed(staged, comes_from_there)
        assert found == scan_unfed(self)
        return found

    def writing_slots(self, enough: int) -> int:
        found = super().writing_slots(enough)
        copies = self.copies.items()
        all_of_them = sum(self._blocks[b].span for b, copy in copies if copy.writing and copy.uses == 0)
        assert found == all_of_them or enough <= found < all_of_them
        return found

    def missing(self, lookahead: int) -> Iterator[int]:
        assert self.loading == sum(copy.state is CopyState.LOADING for copy in self.copies.values())
        found = set(self.copies)  # and what goes meanwhile
        for block in super().missing(lookahead):
            first = self.first_missing(lookahead, found)
            assert block == first or block in found
            found.add(block)
            yield block
        else:
            assert self.first_missing(lookahead, found) is None

    def reach(self, blocks: tuple[int, ...]) -> None:
        block = self.first_missing(self.supply.lookahead, self.supply._suspended)
        if self.schedule.position < self.prefetch_at and block is not None:
            span, needed_at = self._blocks[block].span, scan_needed(self, block)
            assert self.slots.used + span > self.limit
            assert scan_victims(self, span, scan_harmless(self, needed_at)) == [], "it is not asked, and has room"
        super().reach(blocks)

    def first_missing(self, lookahead: int, beside: Container[int]) -> int | None:
        schedule = self.schedule
        end = min(schedule.position + lookahead, schedule.barrier)
        coming = [block for at in range(schedule.position, end) for block in schedule.uses[at % len(schedule.uses)]]
        return next((block for block in coming if block not in self.copies and block not in beside), None)

    def victims(self, span: int, spared: Collection[int]) -> list[int]:
        found = super().victims(span, spared)
        ranks = {block: rank for block, rank in scan_idle(self).items() if block not in spared}
        assert found == scan_victims(self, span, ranks)
        return found

    def harmless_victims(self, span: int, needed_at: int, spared: Collection[int] = ()) -> list[int]:
        found = super().harmless_victims(span, needed_at, spared)
        ranks = {block: rank for block, rank in scan_harmless(self, needed_at).items() if block not in spared}
        assert found == scan_victims(self, span, ranks)
        return found

    def excess(self) -> list[int]:
        found = super().excess()
        excess = self.slots.used - self.limit
        writing = self.writing_slots(excess)
        assert found == (scan_furthest(self, scan_idle(self, arrived=True), excess - writing) if excess > 0 else [])
        return found


def scan_unfed(device: Cache) -> int | None:
    """The first block on NVMe that the uses up to four times the lookahead ahead read and that is on neither tier."""
    assert isinstance(device, ComparedCache)
    assert device._farther is not None
    schedule, supply, staging = device.schedule, device.supply, device._farther
    for at in range(schedule.position, min(schedule.position + 4 * supply.lookahead, schedule.barrier)):
        for block in schedule.uses[at % len(schedule.uses)]:
            there = block in device.copies or block in staging.copies or block in supply._suspended
            if not there and device._blocks[block].home is Tier.NVME:
                return block
    return None


def scan_needed(cache: Cache, block: int) -> int:
    """When a copy in `cache` is of use next."""
    nearer = cache._nearer
    if nearer is None:
        return cache.schedule.next_use(block)
    asked = [cache] if block in nearer.copies else [cache, nearer]
    return min(at.schedule.time(at.schedule.next_use(block)) for at in asked)


def scan_idle(cache: Cache, *, arrived: bool = False) -> Ranks:
    """The policy's ranks of everything that may be evicted, on the device once it has `arrived`."""
    ranks = {}
    for block, copy in cache.copies.items():
        arrives = cache.tier is Tier.DEVICE and copy.state is CopyState.LOADING and not (copy.uses or arrived)
        if copy.idle or arrives:
            ranks[block] = cache._policy.rank(
                CopyFacts(scan_needed(cache, block), copy.last_use, copy.fetched, copy.dirty)
            )
    return ranks


def scan_harmless(cache: Cache, needed_at: int) -> Ranks:
    """The ranks of what may be given up now for a block that is needed at `needed_at`."""
    ranks, schedule, soonest = {}, cache.schedule, 0
    if cache.tier is Tier.DEVICE and needed_at < NEVER:
        before = [schedule.uses[at % len(schedule.uses)] for at in range(max(0, schedule.position - 1), needed_at)]
        awaited = max((scan_next(schedule, block, needed_at) for use in before for block in use), default=0)
        soonest = int(schedule.position + 0.9 * (awaited - schedule.position))
    for block, copy in cache.copies.items():
        coming = scan_needed(cache, block)
        if not copy.dirty and coming > needed_at and coming >= soonest and copy.idle and block not in cache.unused:
            ranks[block] = cache._policy.rank(CopyFacts(coming, copy.last_use, copy.fetched, copy.dirty))
    return ranks


def scan_next(schedule: Schedule, block: int, start: int) -> int:
    """The first use of `block` from `start` on."""
    return next(at for at in count(start) if block in schedule.uses[at % len(schedule.uses)])


def scan_victims(cache: Cache, span: int, ranks: Ranks) -> list[int]:
    """Which of the ranked blocks have to go for a place of `span` slots; empty if that cannot be done now."""
    victims: list[int] = []
    row = cache.slots
    if span > 1 and isinstance(row, SlotMap) and row.find(span) is None:
        owners = [row._owner[place * span : (place + 1) * span] for place in reversed(range(row.count // span))]
        windows = [list(dict.fromkeys(block for block in each if block is not None)) for each in owners]
        windows = [window for window in windows if all(block in ranks for block in window)]
        if not windows:
            return []
        victims = max(windows, key=lambda window: min(ranks[block] for block in window))
    missing = cache.slots.used + span - cache.limit - sum(cache._blocks[block].span for block in victims)
    others = {block: rank for block, rank in ranks.items() if block not in victims}
    more = scan_furthest(cache, others, missing)
    return victims + more if sum(cache._blocks[block].span for block in more) >= missing else []


def scan_furthest(cache: Cache, ranks: Ranks, slots: int) -> list[int]:
    """The blocks of greatest rank that take `slots` slots together, and none that is not needed for that."""
    chosen = []
    for block in sorted(ranks, key=lambda block: ranks[block], reverse=True):
        if slots <= 0:
            break
        chosen.append(block)
        slots -= cache._blocks[block].span
    for block in reversed(chosen):
        if slots + cache._blocks[block].span <= 0:
            chosen.remove(block)
            slots += cache._blocks[block].span
    return chosen
