"""What a tier gives up, found by looking at every copy at each question: as it was done first, and now the oracle.

`compare(residency)` makes its caches answer each question both ways and fail where the two differ.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container

from hetmem.schedule.eviction import CopyFacts
from tests.schedule.tested import NEVER, Cache, CopyState, Residency, SlotMap, Supply, Tier

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

    def at_rest(self, lookahead: int) -> bool:
        found = super().at_rest(lookahead)
        assert not found or self.supply._waiting or scan_waits(self)
        return found

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

    def missing(self, lookahead: int, most: int) -> list[int]:
        found = super().missing(lookahead, most)
        schedule, end = self.schedule, self.schedule.horizon(lookahead)
        coming = [block for at in range(schedule.position, end) for block in schedule.uses[at % len(schedule.uses)]]
        assert found == list(dict.fromkeys(block for block in coming if block not in self.copies))[:most]
        assert self.loading == sum(copy.state is CopyState.LOADING for copy in self.copies.values())
        return found

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
        assert found == (scan_furthest(self, scan_idle(self), excess - writing) if excess > 0 else [])
        return found


def scan_unfed(device: Cache) -> int | None:
    """The first block on NVMe that the uses up to four times the lookahead ahead read and that is on neither tier."""
    assert isinstance(device, ComparedCache)
    assert device._farther is not None
    schedule, supply, staging = device.schedule, device.supply, device._farther
    for at in range(schedule.position, schedule.horizon(4 * supply._lookahead)):
        for block in schedule.uses[at % len(schedule.uses)]:
            there = block in device.copies or block in staging.copies or block in supply._suspended
            if not there and device._blocks[block].home is Tier.NVME:
                return block
    return None


def scan_feed_waits(device: Cache, staging: Cache, at_once: int) -> bool:
    """Whether nothing can be read for the device."""
    unfed = scan_unfed(device) if device.fed_ahead and staging.loading < at_once else None
    return unfed is None or not scan_room(staging, unfed)


def scan_waits(cache: Cache) -> bool:
    """Whether nothing can be begun of what is missing."""
    assert isinstance(cache, ComparedCache)
    schedule, supply = cache.schedule, cache.supply
    uses = [
        schedule.uses[at % len(schedule.uses)] for at in range(schedule.position, schedule.horizon(supply._lookahead))
    ]
    missing = dict.fromkeys(block for blocks in uses for block in blocks if block not in cache.copies)
    device = cache._nearer
    if (
        device is None
        and cache._farther is not None
        and not scan_feed_waits(cache, cache._farther, supply._at_once[Tier.HOST])
    ):
        return False
    if device is not None and device.fed_ahead and missing:
        now = min(at.schedule.time(at.schedule.position) for at in (cache, device))
        if scan_needed(cache, next(iter(missing))) > now + 2 * supply._lookahead:
            return True
    for block in list(missing)[: max(0, supply._at_once[cache.tier] - cache.loading)]:
        home = cache._blocks[block].home
        if home <= cache.tier or (cache.tier is Tier.DEVICE and block in supply._suspended):
            continue
        where: Cache = cache
        if cache.tier is Tier.DEVICE and home is Tier.NVME:
            assert cache._farther is not None
            staged = cache._farther.copies.get(block)
            if staged is not None and staged.state is not CopyState.VALID:
                continue
            where = cache if staged is not None else cache._farther
            if where.loading >= supply._at_once[where.tier]:
                continue
        return not scan_room(where, block)
    return True


def scan_room(cache: Cache, block: int) -> bool:
    """Whether `block` gets a place without harm."""
    span, needed_at = cache._blocks[block].span, scan_needed(cache, block)
    if cache.slots.used + span <= cache.limit and cache.slots.find(span) is not None:
        return True
    return needed_at < NEVER and bool(scan_victims(cache, span, scan_harmless(cache, needed_at)))


def scan_needed(cache: Cache, block: int) -> int:
    """When a copy in `cache` is of use next."""
    nearer = cache._nearer
    if nearer is None:
        return cache.schedule.next_use(block)
    asked = [cache] if block in nearer.copies else [cache, nearer]
    return min(at.schedule.time(at.schedule.next_use(block)) for at in asked)


def scan_idle(cache: Cache) -> Ranks:
    """The policy's ranks of everything that may be given up."""
    ranks = {}
    for block, copy in cache.copies.items():
        if copy.idle:
            ranks[block] = cache._policy.rank(
                CopyFacts(scan_needed(cache, block), copy.last_use, copy.fetched, copy.dirty)
            )
    return ranks


def scan_harmless(cache: Cache, needed_at: int) -> Ranks:
    """The ranks of what may be given up now for a block that is needed at `needed_at`."""
    ranks, awaited, schedule = {}, 0, cache.schedule
    waits, now = cache.tier is Tier.DEVICE, schedule.now
    for block, copy in cache.copies.items():
        if copy.dirty:
            continue
        coming = scan_needed(cache, block)
        if waits and (coming < needed_at or (copy.uses and block in now)):
            awaited = max(awaited, schedule.next_use(block, needed_at))
        elif coming > needed_at and copy.idle:
            ranks[block] = (coming, -copy.last_use)
    soonest = schedule.position + 0.9 * (awaited - schedule.position)
    return {block: rank for block, rank in ranks.items() if rank[0] >= int(soonest)}


def scan_victims(cache: Cache, span: int, ranks: Ranks) -> list[int]:
    """Which of the ranked blocks have to go for a place of `span` slots; empty if that cannot be done now."""
    victims: list[int] = []
    row = cache.slots
    if span > 1 and isinstance(row, SlotMap) and row.find(span) is None:
        windows = [row.inside(place, span) for place in reversed(range(row.count // span))]
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
