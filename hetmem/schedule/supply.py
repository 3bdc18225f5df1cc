"""What comes in next, and what gives way for it: requests that wait, prefetching, and the room that both need.

Requests go first, the oldest first; while one waits nothing is prefetched. What a use of a copy means, and what an
answer to a command changes, is not its business.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from hetmem.errors import CapacityError
from hetmem.schedule.blocks import STALE, VALID, WAITING, Command, Copy
from hetmem.schedule.cache import Cache
from hetmem.schedule.ledger import Ledger
from hetmem.schedule.trace import DEVICE, HOST, NEVER, NVME, Tier

_FED_AHEAD = 4  # times the lookahead of the device: more of what is staged then is given up again before it is used


class Supply:
    """Brings blocks in: what is asked for, and what the next `lookahead` uses miss, while fewer than `at_once` loads
    of their tier are in flight.

    Prefetching follows Cao, Felten, Karlin, Li, "A study of integrated prefetching and caching strategies"
    (SIGMETRICS 1995): fetch the next missing block, give up the one needed furthest, never do harm.
    """

    def __init__(self, ledger: Ledger, lookahead: int, at_once: Mapping[Tier, int]) -> None:
        self._ledger = ledger
        self._blocks = ledger.blocks
        self._caches = ledger.caches
        self._lookahead = lookahead
        self._fed_ahead = _FED_AHEAD * lookahead
        self._at_once = at_once
        self._waiting: list[tuple[Tier, int]] = []
        self._suspended: set[int] = set()
        self._held: set[int] = set()
        for cache in self._caches:
            cache.held = self._held
        self._too_large: dict[Tier, int] = {}
        """By tier, so many slots in a row were not to be had for a request a moment ago: nor are they for the next."""

    # ---- requests ----------------------------------------------------------------------------------------------

    def request(self, block: int, tier: Tier) -> None:
        """The WAITING copy of `block` on `tier` is wanted; `serve` sees to it."""
        if (tier, block) not in self._waiting:
            self._waiting.append((tier, block))
            self._ledger.note(block, "acquire on", tier)

    def requested(self, block: int, tier: Tier) -> bool:
        """Whether a request for `block` on `tier` waits."""
        return (tier, block) in self._waiting

    def withdraw(self, block: int, tier: Tier) -> CapacityError:
        """One use of a WAITING copy less, of a request that cannot be served; says why it cannot."""
        error = CapacityError(self._no_room(block, tier))
        copy = self._caches[tier].copies[block]
        copy.uses -= 1
        copy.waiting -= 1
        if not copy.waiting:
            self._waiting.remove((tier, block))
            if copy.slot >= 0:
                copy.state = STALE  # it had a stale copy before it asked
                self._caches[tier].touch(block)
                self._caches[tier].turned()
            else:
                self._caches[tier].remove(block)
        return error

    def suspend(self, block: int) -> None:
        """Until `resume` nothing brings `block` to the device."""
        self._suspended.add(block)
        self._caches[DEVICE].moved()

    def resume(self, block: int) -> None:
        """`block` may come to the device again."""
        self._suspended.discard(block)
        self._caches[DEVICE].moved()

    def hold(self, block: int) -> None:
        """Until `lift`, `block` is fetched where it is asked for, and not prefetched."""
        self._held.add(block)

    def lift(self, blocks: Iterable[int | None] | None = None) -> None:
        """Prefetch `blocks`, or all that was held, too."""
        lifted = self._held.intersection(self._held if blocks is None else blocks)
        if lifted:
            self._held -= lifted
            for cache in self._caches:
                cache.moved()

    def serve(self, commands: list[Command], changed: Tier = HOST) -> None:
        """Move requests on: find their source, then a slot, then fetch. The oldest first. What changed on the device
        alone is of no use for those that wait for staging."""
        if not self._waiting:
            return
        self._too_large.clear()
        for tier, block in list(self._waiting):
            if (tier, block) not in self._waiting:
                continue  # feeding the device has started it meanwhile
            if tier > changed or (tier is DEVICE and block in self._suspended):
                continue
            copy = self._caches[tier].copies[block]
            source = self._blocks[block].home
            if copy.load and tier is DEVICE and source is NVME:
                if not self._stage(block, commands):
                    continue
                source = HOST
            if not self._find_place(block, tier, copy, commands):
                continue
            self._waiting.remove((tier, block))
            if copy.load:
                self._ledger.fetch(block, source, tier, copy, commands)
            else:
                self._ledger.let_overwrite(copy)

    def _stage(self, block: int, commands: list[Command]) -> bool:
        """Whether staging holds a VALID copy of `block` to feed the device from; asks for one if it has none."""
        staging = self._caches[HOST]
        staged = staging.copies.get(block)
        self._caches[DEVICE].feed(self._fed_ahead)
        if staged is None:
            staged = staging.add(block, Copy(WAITING))
        elif staged.state is STALE:
            staged.state = WAITING
            staging.touch(block)
        if staged.state is WAITING:
            if not self._find_place(block, HOST, staged, commands):
                if staged.uses == 0:
                    staging.remove(block)
                return False
            if (HOST, block) in self._waiting:
                self._waiting.remove((HOST, block))
            self._ledger.fetch(block, NVME, HOST, staged, commands)
        return staged.state is VALID

    def go_on(self, cache: Cache, commands: list[Command]) -> None:
        """A copy of `cache` is used less: give up what is too much, then requests, then prefetching."""
        if cache.slots.used > cache.limit:
            self.trim(cache, commands)
        if self._waiting:
            self.serve(commands, cache.tier)
        if not self._waiting and cache.loading < self._at_once[cache.tier] and not cache.at_rest(self._lookahead):
            self._look(cache, commands)

    # ---- prefetching -------------------------------------------------------------------------------------------

    def at_rest(self, cache: Cache) -> bool:
        """Whether `prefetch` would begin nothing, as far as is known."""
        if self._waiting or cache.loading >= self._at_once[cache.tier]:
            return True
        return cache.at_rest(self._lookahead)

    def prefetch(self, cache: Cache, commands: list[Command]) -> None:
        """Start what the schedule uses next and is missing, while that harms nothing."""
        if not self._waiting and cache.loading < self._at_once[cache.tier] and not cache.at_rest(self._lookahead):
            self._look(cache, commands)

    def _look(self, cache: Cache, commands: list[Command]) -> None:
        """As `prefetch`, where that may begin something."""
        device, staging = self._caches
        wakes = cache is device and cache.schedule.position >= cache.wakes
        if wakes:
            cache.wakes = NEVER
        self._begin(cache, commands)
        if wakes:
            self.prefetch(staging, commands)

    def _begin(self, cache: Cache, commands: list[Command]) -> None:
        """Begin what is missing, and note how long nothing else can be."""
        device, staging = self._caches
        full: list[Cache | None] = []
        most = self._at_once[cache.tier] - cache.loading
        missing = cache.missing(self._lookahead, most)
        feeds = cache is device and device.fed_ahead > 0
        moves = cache.moves()
        if missing and cache is staging and self._comes_later(missing[0]):
            return
        if feeds:
            full.append(self._feed(cache, commands))
        for block in missing:
            full.append(self._prefetch(block, cache, commands))
            if full[-1] is not None:
                break
        if cache.moves() != moves or not (missing or feeds):
            return
        where = [place for place in full if place is not None]
        if missing and (where or len(missing) >= most):
            until = cache.schedule.next_use(missing[0])
        else:
            until = self._quiet_until(cache)
        if feeds and staging.loading < self._at_once[HOST]:  # or else that it is less is a move
            until = min(until, cache.schedule.position + max(0, cache.fed_for() - 1))
        cache.rest(until, where)

    def _comes_later(self, block: int) -> bool:
        """Whether staging is for the device now, and `block`, which is used in host memory, has time. The device says
        when that is over."""
        device, staging = self._caches
        if not device.fed_ahead:
            return False
        begins = staging.needed(block) - 2 * self._lookahead
        if begins <= staging.clock():
            return False
        device.wakes = device.schedule.first_at(begins)
        return True

    def _quiet_until(self, cache: Cache) -> int:
        """Up to this use nothing that is missing in `cache`, and can come, gets among the next ones, if nothing moves;
        `_feed` aside."""
        schedule, copies, ahead = cache.schedule, cache.copies, self._lookahead
        can_come = self._can_come if cache.tier is DEVICE else self._is_on_nvme
        looked_at: tuple[int, ...] = ()
        start, end = schedule.horizon(ahead), schedule.horizon(2 * ahead)
        for at, blocks in enumerate(schedule.between(start, end), start):
            if blocks != looked_at:
                for block in blocks:
                    if block not in copies and can_come(block):
                        return at - ahead
                looked_at = blocks
        return schedule.position + ahead

    def prefetch_block(self, block: int, tier: Tier, commands: list[Command]) -> None:
        """Start to bring `block` to `tier`, if it is not there and that harms nothing."""
        cache = self._caches[tier]
        if not self._waiting and block not in cache.copies and block not in self._held:
            self._prefetch(block, cache, commands)

    def _prefetch(self, block: int, cache: Cache, commands: list[Command]) -> Cache | None:
        """Bring in `block`, which is missing in `cache`; returns where that has to wait for room, if it has to."""
        tier, home = cache.tier, self._blocks[block].home
        if home <= tier or (tier is DEVICE and block in self._suspended):
            return None
        if tier is DEVICE and home is NVME:
            cache.feed(self._fed_ahead)
            staging = self._caches[HOST]
            staged = staging.copies.get(block)
            if staged is None:
                return self._bring_in(block, NVME, staging, commands) if staging.loading < self._at_once[HOST] else None
            if staged.state is not VALID:
                return None
        return self._bring_in(block, HOST if tier is DEVICE else NVME, cache, commands)

    def _bring_in(self, block: int, source: Tier, cache: Cache, commands: list[Command]) -> Cache | None:
        """Fetch `block` from `source` into `cache`; returns `cache` if it has no room."""
        slot = self._make_room(cache, self._blocks[block].span, commands, cache.needed(block))
        if slot is None:
            return cache
        copy = cache.add(block, Copy(WAITING, last_use=self._ledger.tick))
        self._ledger.place(block, cache.tier, copy, slot)
        self._ledger.fetch(block, source, cache.tier, copy, commands)
        return None

    def _feed(self, device: Cache, commands: list[Command]) -> Cache | None:
        """Read from NVMe what the device uses next and has not, farther ahead than the device itself has room for: the
        disk works while that computes on what it has. Returns host staging if that has no room."""
        staging = self._caches[HOST]
        while staging.loading < self._at_once[HOST]:
            block = device.unfed(staging.copies, self._is_fed)
            if block is None:
                break
            if self._bring_in(block, NVME, staging, commands) is not None:
                return staging
        return None

    def _can_come(self, block: int) -> bool:
        """Whether a prefetch can do something for `block`, which is not on the device; `_feed` aside."""
        if block in self._held:
            return False
        if self._blocks[block].home is not NVME or not self._caches[DEVICE].fed_ahead:
            return True
        staged = self._caches[HOST].copies.get(block)
        return staged is not None and staged.state is VALID

    def _is_fed(self, block: int) -> bool:
        return self._blocks[block].home is NVME and block not in self._suspended and block not in self._held

    def _is_on_nvme(self, block: int) -> bool:
        return self._blocks[block].home is NVME and block not in self._held

    # ---- room --------------------------------------------------------------------------------------------------

    def trim(self, cache: Cache, commands: list[Command]) -> None:
        """Give up what is idle beyond the limit of `cache`."""
        for block in cache.excess():
            if cache.copies[block].dirty:
                self._ledger.write(block, cache.copies[block], commands)
            else:
                self._ledger.evict(block, cache.tier, commands)

    def _find_place(self, block: int, tier: Tier, copy: Copy, commands: list[Command]) -> bool:
        """Whether the WAITING `copy` has a place, after one was made if that can be done now."""
        if copy.slot < 0:
            span = self._blocks[block].span
            if span >= self._too_large.get(tier, span + 1):
                return False
            slot = self._make_room(self._caches[tier], span, commands)
            if slot is None:
                self._too_large[tier] = span
                return False
            self._ledger.place(block, tier, copy, slot)
        return True

    def _make_room(self, cache: Cache, span: int, commands: list[Command], needed_at: int | None = None) -> int | None:
        """The first of `span` free slots in a row, giving up idle copies for it; None if that must wait.

        With `needed_at` (a prefetch) only clean copies that are needed later than that are given up.
        """
        slot = cache.slots.find(span) if cache.slots.used + span <= cache.limit else None
        if slot is not None:
            return slot
        if needed_at is not None:
            victims = cache.harmless_victims(span, needed_at)
        else:
            # What is staged for another request is spared: two could take it from each other for ever.
            spared = {block for other, block in self._waiting if other is not cache.tier}
            if not cache.writing or cache.writing_slots(span) < span:
                victims = cache.victims(span, spared)
            else:  # a write on its way makes room, but what is clean and not needed for long gives way at once
                victims = cache.harmless_victims(span, cache.clock() + 2 * self._lookahead, spared)
        if not victims:
            return None
        dirty = [block for block in victims if cache.copies[block].dirty]
        for block in dirty:
            self._ledger.write(block, cache.copies[block], commands)
        if dirty:
            return None
        for block in victims:
            self._ledger.evict(block, cache.tier, commands)
        return cache.slots.find(span)

    def _no_room(self, block: int, tier: Tier) -> str:
        cache = self._caches[tier]
        held = [self._blocks[other].label for other, copy in cache.copies.items() if not copy.idle]
        return (
            f"no room on {tier.name} for {self._blocks[block].label}: it needs {self._blocks[block].span} slot(s), "
            f"{cache.limit} may be used, {cache.slots.used} are, in use or in flight: "
            f"{', '.join(held[:8]) or 'nothing'}{' …' if len(held) > 8 else ''}"
        )
