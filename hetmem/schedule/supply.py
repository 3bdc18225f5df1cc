"""Decides what to fetch next and what to evict for it: waiting requests, prefetching, and the room that both need.

Requests are served first, the oldest first; while one waits nothing is prefetched. What uses and answers to commands
mean for a copy is in `residency` and `ledger`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from hetmem.errors import CapacityError
from hetmem.schedule.blocks import LOADING, STALE, VALID, WAITING, Command, Copy
from hetmem.schedule.cache import Cache
from hetmem.schedule.ledger import Ledger
from hetmem.schedule.trace import DEVICE, HOST, NVME, Tier

_FED_AHEAD = 4  # times the lookahead of the device: beyond that, staged copies are evicted before they are used


class Supply:
    """Fetches requested blocks, and those that the next `lookahead` uses lack, while fewer than `at_once` are loaded or
    prefetched on their tier.

    Prefetching follows Cao, Felten, Karlin, Li, "A study of integrated prefetching and caching strategies" (SIGMETRICS
    1995): fetch the next missing block, evict the one needed furthest in the future, never do harm.
    """

    def __init__(self, ledger: Ledger, lookahead: int, at_once: Mapping[Tier, int]) -> None:
        self._ledger = ledger
        self._blocks = ledger.blocks
        self._caches = ledger.caches
        self.lookahead = lookahead
        self._at_once = at_once
        self.waiting: list[tuple[Tier, int]] = []
        """Requests, the oldest first."""
        self._suspended: set[int] = set()
        for cache in self._caches:
            cache.most_ahead = at_once[cache.tier]

    # ---- requests ----------------------------------------------------------------------------------------------

    def request(self, block: int, tier: Tier) -> None:
        """Queue the WAITING copy of `block` on `tier` for `serve`."""
        if (tier, block) not in self.waiting:
            self.waiting.append((tier, block))

    def withdraw(self, block: int, tier: Tier) -> CapacityError:
        """Take back one use of a WAITING copy that cannot be served, and return the error that says why."""
        error = CapacityError(self._no_room(block, tier))
        copy = self._caches[tier].copies[block]
        copy.uses -= 1
        copy.waiting -= 1
        if not copy.waiting:
            self.waiting.remove((tier, block))
            if copy.slot >= 0:
                copy.state = STALE  # it was stale before the request
                self._caches[tier].touch(block)
            else:
                self._caches[tier].remove(block)
        return error

    def suspend(self, blocks: Iterable[int]) -> None:
        """Bring `blocks` to the device no more until `resume`: their homes are being rewritten."""
        self._suspended |= {*blocks}

    def resume(self, blocks: Iterable[int]) -> None:
        """Let `blocks` come to the device again."""
        self._suspended -= {*blocks}
        self._caches[DEVICE].prefetch_at = 0

    def serve(self, commands: list[Command], changed: Tier = HOST) -> None:
        """Advance requests, the oldest first: find the source, then a slot, then fetch. If only the device has
        `changed`, requests for staging are skipped."""
        if not self.waiting:
            return
        refused: dict[Tier, int] = {}
        for tier, block in list(self.waiting):
            if (tier, block) not in self.waiting:
                continue  # `_stage` has served it for the device
            if tier > changed or (tier is DEVICE and block in self._suspended):
                continue
            copy = self._caches[tier].copies[block]
            source = self._blocks[block].home
            if copy.load and tier is DEVICE and source is NVME:
                if not self._stage(block, refused, commands):
                    continue
                source = HOST
            if not self._find_place(block, tier, copy, refused, commands):
                continue
            self.waiting.remove((tier, block))
            if copy.load:
                self._ledger.fetch(block, source, self._caches[tier], copy, commands)
            else:
                self._ledger.let_overwrite(block, tier, copy)

    def _stage(self, block: int, refused: dict[Tier, int], commands: list[Command]) -> bool:
        """Return whether staging has a VALID copy of `block` to feed the device from; request one if it has none."""
        staging = self._caches[HOST]
        staged = staging.copies.get(block)
        self._caches[DEVICE].fed_ahead = _FED_AHEAD * self._lookahead(self._caches[DEVICE])
        if staged is None:
            staged = staging.add(block, Copy(WAITING))
        elif staged.state is STALE:
            staged.state = WAITING
            staging.touch(block)
        if staged.state is WAITING:
            if not self._find_place(block, HOST, staged, refused, commands):
                if staged.uses == 0:
                    staging.remove(block)
                return False
            if (HOST, block) in self.waiting:
                self.waiting.remove((HOST, block))
            self._ledger.fetch(block, NVME, staging, staged, commands)
        return staged.state is VALID

    def go_on(self, cache: Cache, commands: list[Command]) -> None:
        """Evict what exceeds the limit and serve requests after a use of a copy in `cache` ended. Staging also
        prefetches; the device does so at its next use, which follows at once."""
        if cache.slots.used > cache.limit:
            self.trim(cache, commands)
        if self.waiting:
            self.serve(commands, cache.tier)
        elif cache.tier is HOST:
            self.prefetch(cache, commands)

    # ---- prefetching -------------------------------------------------------------------------------------------

    def prefetch(self, cache: Cache, commands: list[Command]) -> None:
        """Begin to fetch what the schedule uses next and is missing, as far as that evicts nothing of more use."""
        if self.waiting or cache.schedule.position < cache.prefetch_at:
            return
        if cache.fed_ahead:
            self._feed(commands)
        staging = self._caches[HOST]
        if cache.retained:
            self._scan(cache, commands)
        else:
            on_device, at_once = cache is not staging, cache.at_once
            lookahead = self._lookahead(cache)
            cache.exhausted = False
            for block in cache.missing(lookahead):
                if len(cache.unused) + cache.loading >= at_once and self._has_enough(cache, at_once):
                    break
                if not on_device and self._comes_later(block):
                    break
                if not self._bring_in(block, cache, commands):
                    break
                if on_device and cache.exhausted and cache.slots.used >= cache.limit:
                    break  # no room for the next block: try at the next use
            else:
                cache.prefetch_at = cache.complete - lookahead + 1
            cache.prefetched_at = self._ledger.tick + (not cache.is_known)  # see `Cache.prefetch_at`
        if staging.slots.count:
            cache.prefetch_at = 0  # reads that end make room at any time
            if cache is not staging:  # reads that `_comes_later` has postponed
                self.prefetch(staging, commands)

    def _lookahead(self, cache: Cache) -> int:
        """Return how many uses ahead to look: of micro-batches that take turns those of each come in a row, so as many
        times as far, unless what was fetched so early had no room until its use."""
        return self.lookahead * (1 if cache.too_early else cache.schedule.turns)

    def _has_enough(self, cache: Cache, at_once: int) -> bool:
        """Return whether `at_once` copies are ahead of their use. On the device prefetched copies count until used, so
        that the answer does not depend on when transfers end; in staging loads in flight count, which keep the drive
        busy."""
        if cache.tier is HOST:
            return cache.loading >= at_once
        return len(cache.unused) >= at_once and cache.fetched_ahead(self._lookahead(cache)) >= at_once

    def _scan(self, cache: Cache, commands: list[Command]) -> None:
        """Fetch what the device lacks as far ahead as the streaming slots allow: see note "scans" in `cache`."""
        while len(cache.unused) < self._at_once[cache.tier]:
            block = next(cache.missing(len(cache.schedule.uses)), None)
            if block is None or not self._bring_in(block, cache, commands) or block not in cache.copies:
                break

    def _comes_later(self, block: int) -> bool:
        """Return whether staging feeds the device at present and the use of `block` in host memory is far away."""
        device, staging = self._caches
        return device.fed_ahead > 0 and staging.needed(block) - 2 * self._lookahead(device) > staging.clock()

    def prefetch_block(self, block: int, tier: Tier, commands: list[Command]) -> None:
        """Begin to bring `block` to `tier` without a use, if it has no copy, and nothing of more use is evicted for it
        now or later."""
        cache = self._caches[tier]
        if not self.waiting and block not in cache.copies:
            known = cache.schedule.known
            if known.slots < 0:
                known.slots = sum(self._blocks[each].span for each in known.positions)
            if known.slots > cache.limit and not self._leaves_slots(block, cache):
                return
            self._bring_in(block, cache, commands)
            cache.unused -= {block}  # renewed for any later use, so it may be evicted
            cache.prefetch_at = 0  # the next missing block may be needed sooner

    def _leaves_slots(self, block: int, cache: Cache) -> bool:
        """Return whether slots are left beside `block`, if one is free for it, for all missing blocks that are used
        sooner: else one of them would take its place before it is used."""
        known, copies, schedule = self._blocks, cache.copies, cache.schedule
        free = cache.limit - cache.slots.used - known[block].span
        if free < 0:
            return True
        sooner: dict[int, None] = {}
        end = schedule.position + schedule.count
        for blocks in schedule.between(schedule.position, end if end < schedule.barrier else schedule.barrier):
            if block in blocks:
                break
            for other in blocks:
                if other not in copies and other not in sooner:
                    sooner[other] = None
                    free -= known[other].span
                    if free < 0:
                        return False
        return True

    def _bring_in(self, block: int, cache: Cache, commands: list[Command]) -> bool:
        """Fetch `block`, which `cache` lacks, if it comes from the next tier; False if there is no room for it now."""
        known, slots, on_device = self._blocks[block], cache.slots, cache.tier is DEVICE
        span, home = known.span, known.home
        if home is not NVME:
            if not on_device or home is DEVICE or block in self._suspended:
                return True
        elif on_device:
            if block in self._suspended:
                return True
            cache.fed_ahead = _FED_AHEAD * self._lookahead(cache)
            staging = self._caches[HOST]
            staged = staging.copies.get(block)
            if staged is None:
                return self._has_enough(staging, self._at_once[HOST]) or self._bring_in(block, staging, commands)
            if staged.state is not VALID:
                return True
        slot = slots.take(span, block) if slots.used + span <= cache.limit else None
        if slot is None:
            for victim in cache.harmless_victims(span, cache.needed(block)):
                self._ledger.drop(victim, cache, commands, evicted=True)
            slot = slots.take(span, block) if slots.used + span <= cache.limit else None
            if slot is None:
                return False
        copy = cache.add(block, Copy(WAITING, slot, last_use=self._ledger.tick))
        if on_device:
            cache.unused |= {block}
        self._ledger.fetch(block, HOST if on_device else NVME, cache, copy, commands)
        return True

    def _feed(self, commands: list[Command]) -> None:
        """Read from NVMe into staging what the device uses next, farther ahead than the device itself has room for, so
        that the drive works while the device computes."""
        staging = self._caches[HOST]
        while not self._has_enough(staging, self._at_once[HOST]):
            block = self._unfed()
            if block is None or not self._bring_in(block, staging, commands):
                break

    def _unfed(self) -> int | None:
        device, staging = self._caches
        return device.unfed(staging.copies, self._is_fed) if device.fed_ahead else None

    def _is_fed(self, block: int) -> bool:
        return self._blocks[block].home is NVME and block not in self._suspended

    # ---- room --------------------------------------------------------------------------------------------------

    def trim(self, cache: Cache, commands: list[Command]) -> None:
        """Evict idle copies beyond the limit of `cache`; write dirty ones first."""
        for block in cache.excess():
            if cache.copies[block].dirty:
                self._ledger.write(block, cache.copies[block], commands)
            else:
                self._ledger.drop(block, cache, commands, evicted=True)

    def _find_place(
        self, block: int, tier: Tier, copy: Copy, refused: dict[Tier, int], commands: list[Command]
    ) -> bool:
        """Give the WAITING `copy` a slot if possible now; False if not. `refused` has by tier the span that another
        request did not get just now: no larger one is tried."""
        if copy.slot < 0:
            span = self._blocks[block].span
            if span >= refused.get(tier, span + 1):
                return False
            slot = self._make_room(self._caches[tier], block, commands)
            if slot is None:
                refused[tier] = span
                return False
            copy.slot = slot
        return True

    def _make_room(self, cache: Cache, block: int, commands: list[Command]) -> int | None:
        """Return the first slot of a free place for `block`, after evicting idle copies if necessary; None if that must
        wait."""
        span, slots = self._blocks[block].span, cache.slots
        slot = slots.take(span, block) if slots.used + span <= cache.limit else None
        if slot is not None:
            return slot
        # Spare what is staged for another request: two requests could evict each other's copies for ever.
        spared = {other for tier, other in self.waiting if tier is not cache.tier}
        if not cache.writing or cache.writing_slots(span) < span:
            victims = cache.victims(span, spared)
        else:  # a write in flight will make room, but a clean copy that is not needed for long can be evicted at once
            victims = cache.harmless_victims(span, cache.clock() + 2 * self.lookahead, spared)
        if not victims:
            return None
        copies, waits = cache.copies, False
        for victim in victims:
            if copies[victim].dirty:
                self._ledger.write(victim, copies[victim], commands)
            waits = waits or copies[victim].dirty or copies[victim].state is LOADING
        if waits:
            return None
        for victim in victims:
            self._ledger.drop(victim, cache, commands, evicted=True)
        return slots.take(span, block)

    def _no_room(self, block: int, tier: Tier) -> str:
        cache = self._caches[tier]
        held = [self._blocks[other].label for other, copy in cache.copies.items() if not copy.idle]
        return (
            f"no room on {tier.name} for {self._blocks[block].label}: it needs {self._blocks[block].span} slot(s), "
            f"{cache.limit} may be used, {cache.slots.used} are, in use or in flight: "
            f"{', '.join(held[:8]) or 'nothing'}{' …' if len(held) > 8 else ''}"
        )
