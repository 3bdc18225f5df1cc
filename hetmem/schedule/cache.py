"""One cached tier: its slots, the copies in them, and what to give up for another one. Pure; sends no commands."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Sequence
from itertools import chain

from hetmem.schedule.blocks import STALE, VALID, Block, Copy
from hetmem.schedule.eviction import NOTHING, CopyFacts, EvictionPolicy, NextUse, Order, Rank
from hetmem.schedule.slots import PlaceMap, SlotMap
from hetmem.schedule.trace import DEVICE, HOST, NEVER, Schedule, Tier

_ALMOST = 0.9  # as far as the furthest use, as good as: what may be given up for it at once
_FURTHER = 32  # uses that are looked at behind those that matter: where all is here, one look serves for so many


class Cache:
    """The copies on `tier`, by block number. `limit` of the `slots` may be taken, those of loads in flight included.

    `nearer` is the next faster tier, which is fed from here: see `needed`. Call `touch(block)` after a change of a
    copy that an eviction or a policy may know of.

    Note "rest": most of the time what is missing waits for room, or for something in flight, and asking for it again
    at every use would take longer than all else. So what a look came to stands until what is missing has changed
    (`moved`), or a copy that is needed late enough could give way (`touch`): a use of one that is here takes room away.
    """

    def __init__(
        self, tier: Tier, count: int, blocks: Sequence[Block], policy: EvictionPolicy, nearer: Cache | None = None
    ) -> None:
        self.tier = tier
        self._row = SlotMap(count) if tier is HOST else None
        self.slots = PlaceMap(count) if self._row is None else self._row
        self.limit = count
        self.copies: dict[int, Copy] = {}
        self.schedule = Schedule()
        self.loading = 0
        self.held: set[int] = set()  # blocks that nothing prefetches for now
        self.writing: dict[int, Copy] = {}
        self._blocks, self._policy, self._by_next_use = blocks, policy, type(policy) is NextUse
        self._nearer = nearer
        self._farther: Cache | None = None
        self._beside = self  # where copies for this tier come from, if that is a cache too
        self._added = self._present_until = self._fed_until = 0
        self.fed_ahead = 0  # uses; see `unfed`. 0 as long as nothing comes here through staging
        self.wakes = NEVER  # from this use on staging has to be looked at: the clock has come near to a use there
        self._changed: set[int] = set()
        self._ranked: set[int] = set()  # of these only the rank may have changed: that makes no room for prefetching
        self.touch = self._changed.add
        self._moves = self._lowest = self._freed = 0
        self._rest: tuple[int, int, dict[Cache, int]] | None = None
        self._resting_here = (self,) if nearer is None else (self, nearer)  # while there is no room here
        self._refused: dict[Order, tuple[int, tuple[int, int, Collection[int]]]] = {}
        self._demand = Order(self.copies, self._demand_rank)
        self._ahead = Order(self.copies, self._ahead_rank)
        if nearer is not None:
            nearer._farther = nearer._beside = self

    # ---- copies ------------------------------------------------------------------------------------------------

    def add(self, block: int, copy: Copy) -> Copy:
        """`copy` is the one of `block` here from now on."""
        copy.number = self._added = self._added + 1
        self.copies[block] = copy
        self._moves += 1
        if self._farther is not None:
            self._farther._rank_again(block)
        return copy

    def remove(self, block: int) -> Copy:
        """There is no copy of `block` here any more; returns what was."""
        schedule, fed = self.schedule, self._nearer or self
        at = schedule.next_use(block) if schedule.uses else NEVER
        if at < self._present_until:
            self._present_until = at
        if fed._fed_until:
            fed._fed_until = min(fed._fed_until, at if fed is self else fed.schedule.next_use(block))
        self._moves += 1
        self._freed += 1
        self.touch(block)
        if self._farther is not None:
            self._farther._rank_again(block)
        return self.copies.pop(block)

    def _rank_again(self, block: int) -> None:
        """Whether `block` lies on the faster tier has changed."""
        if block in self.copies:
            self._ranked.add(block)

    def moved(self) -> None:
        """What comes next here may be something else now."""
        self._present_until = self._fed_until = 0
        self._moves += 1

    def turned(self) -> None:
        """The state of a copy has changed: another tier may be fed from it now, or not any more."""
        self._moves += 1

    def feed(self, ahead: int) -> None:
        """From now on staging is filled for this tier, `ahead` uses ahead."""
        if self.fed_ahead != ahead:
            self.fed_ahead = ahead
            self._moves += 1

    def set_limit(self, slots: int) -> None:
        """At most `slots` slots may be taken."""
        slots = max(0, min(slots, self.slots.count))
        if slots > self.limit:
            self._moves += 1
            self._freed += 1
        self.limit = slots

    def writing_slots(self, enough: int) -> int:
        """Slots that become free when the writes in flight are done; no more of them are counted than are `enough`."""
        slots = 0
        for block, copy in self.writing.items():
            if slots >= enough:
                break
            if copy.uses == 0:
                slots += self._blocks[block].span
        return slots

    # ---- the schedule ------------------------------------------------------------------------------------------

    def expect(self, schedule: Schedule) -> None:
        """`schedule` is what comes next."""
        self.schedule = schedule
        self.wakes = 0
        self.moved()
        for cache in (self,) if self._farther is None else (self, self._farther):
            cache._demand.renew()
            cache._ahead.renew()

    def reach(self, blocks: tuple[int, ...]) -> None:
        """A use of `blocks` begins. Next uses change for what was waited for in vain, and for what was skipped."""
        schedule = self.schedule
        passed, first, met, copies = schedule.now, schedule.position, schedule.met, self.copies
        for block in passed:
            if block not in met or (block in copies and copies[block].uses):  # `_awaited` counts the latter no more
                self._changed.add(block)
                if self._farther is not None and block in self._farther.copies:
                    self._farther._ranked.add(block)
        if not schedule.reach(blocks):
            return
        last = schedule.position
        if last == first + 1:
            return  # the next one, as all expected
        if last < first:
            first, last = last, first
        self.moved()
        changed = set().union(passed, blocks, *(schedule.between(first, last) if last - first > 1 else ()))
        self._changed |= changed
        if self._farther is not None:
            self._farther._changed |= changed

    def meet(self, block: int) -> None:
        """`block` of the use just reached is there, and in use from now on."""
        met, ranked = self.schedule.met, self._ranked  # asked at each use: a method's call takes longer than a look
        if block not in met:
            met.add(block)
        if block not in ranked:
            ranked.add(block)

    def meet_all(self, blocks: Collection[int]) -> None:
        """`meet` of each of `blocks`."""
        self.schedule.met.update(blocks)
        self._ranked.update(blocks)

    def needed(self, block: int) -> int:
        """When a copy of `block` here is of use next, NEVER if that is not known: a use of the schedule; by the clock
        of both tiers in host staging, where the device is fed from it too, unless it has a copy already."""
        schedule, nearer = self.schedule, self._nearer
        if nearer is None:
            return schedule.next_use(block)
        here = schedule.time(schedule.next_use(block)) if schedule.uses else NEVER
        if block in nearer.copies:
            return here
        there = nearer.schedule
        at = there.time(there.next_use(block))
        return at if at < here else here

    def clock(self) -> int:
        """What `needed` says of a use that begins now: the next one expected on either tier."""
        schedule, nearer = self.schedule, self._nearer
        if nearer is None:
            return schedule.position
        now = min(schedule.time(schedule.position), nearer.schedule.time(nearer.schedule.position))
        return now if now < NEVER else 0

    def missing(self, lookahead: int, most: int) -> list[int]:
        """The first blocks, `most` at most, without a copy among those that the next `lookahead` uses read, each once,
        in order. What one of these uses overwrites first is no such block, nor is one that is `held`.

        Uses whose blocks are all here are looked at once, ahead of time; see `Schedule.present_until`. If there is no
        such block, `at_rest` says so from now on.
        """
        schedule, copies, held = self.schedule, self.copies, self.held
        if self._present_until >= schedule.position + lookahead:
            return []
        start = max(schedule.position, self._present_until)
        end = schedule.horizon(lookahead)
        missing: list[int] = []
        comes_by_itself: set[int] = set()
        overwrites, seen_all = schedule.overwrites, True
        for at, blocks in enumerate(schedule.between(start, end) if start < end else (), start):
            for block in blocks:
                if block not in copies:
                    break
            else:
                continue
            if seen_all:
                self._present_until = at
                seen_all = False
            if overwrites and not schedule.reads(at):
                comes_by_itself.update(block for block in blocks if block not in copies)
                continue
            for block in blocks:
                if block not in copies and block not in missing and block not in comes_by_itself and block not in held:
                    missing.append(block)
                    if len(missing) >= most:
                        return missing
        if seen_all:
            self._present_until = schedule.present_until(copies, max(start, end), lookahead + _FURTHER)
        elif not missing:
            self.rest(schedule.position)
        return missing

    def unfed(self, staged: Container[int], comes_from_there: Callable[[int], bool]) -> int | None:
        """The first block that the next `fed_ahead` uses read and that is neither here nor `staged`, of those that come
        through staging. As in `missing`, what was looked at is not looked at again until something of it is given up.
        """
        if self.fed_for() > 0:
            return None
        schedule, copies, ahead = self.schedule, self.copies, self.fed_ahead + _FURTHER
        start, end = max(schedule.position, self._fed_until), schedule.horizon(ahead)
        for at, blocks in enumerate(schedule.between(start, end) if start < end else (), start):
            for block in blocks:
                if block not in copies and block not in staged and comes_from_there(block):
                    self._fed_until = at
                    return block if self.fed_for() <= 0 else None
        self._fed_until = schedule.position + ahead
        return None

    def fed_for(self) -> int:
        """So many uses long `unfed` knows of nothing, if nothing is given up."""
        return self._fed_until - self.schedule.position - self.fed_ahead + 1

    # ---- rest --------------------------------------------------------------------------------------------------

    def moves(self) -> int:
        """Another number after whatever may change what is missing here, or where it comes from."""
        return self._moves + self._beside._moves

    def rest(self, until: int, where: Collection[Cache] = ()) -> None:
        """Nothing could be begun: all that may be is on its way; or there is no room on `where` for what comes next.
        That holds up to the use `until`."""
        self._rest = until, self.moves(), {place: place._lowest for place in where}

    def at_rest(self, lookahead: int) -> bool:
        """Whether looking at what the next `lookahead` uses miss would begin nothing, as far as is known."""
        position, rest = self.schedule.position, self._rest
        if self._present_until >= position + lookahead:
            fed_ahead = self.fed_ahead
            if not fed_ahead or (self._fed_until >= position + fed_ahead and position < self.wakes):
                return True
        if rest is None:
            return False
        until, moves, where = rest
        if position > until or position >= self.wakes or moves != self._moves + self._beside._moves:
            self._rest = None
            return False
        for place in where:
            if place._changed:
                place._pass_on()
        return self._rest is not None

    def _disturb(self, where: Cache) -> None:
        """On `where` copies may be given up that perhaps could not be before."""
        if self._rest is not None and where in self._rest[2]:
            lowest, needed = self._rest[2][where], where.needed
            if any(needed(block) >= lowest for block in where._changed):
                self._rest = None

    # ---- what to give up ---------------------------------------------------------------------------------------

    def victims(self, span: int, spared: Collection[int]) -> list[int]:
        """What has to go for a place of `span` slots, by the policy's rank and without `spared`; empty if that
        cannot be done now. Dirty copies are among them: they have to be written first."""
        return self._victims(self._demand, span, NOTHING, spared)

    def harmless_victims(self, span: int, needed_at: int, spared: Collection[int] = ()) -> list[int]:
        """What may be given up now, without `spared`, for a block of `span` slots that is needed at `needed_at`.

        On the device what MIN would give up then, or what is used almost as late: if a copy that is used before is the
        one used far later, its turn must be waited for. So prefetching costs hardly a fetch that demand would not.
        Where all is used round and round, as by forwards alone, MIN's choice is always the block in use, and waiting
        for it would leave no fetch behind compute: the one before is as good but for one fetch a round. In HOST
        staging, where the optimizer scans its states, anything needed later gives way.
        """
        self._lowest = needed_at + 1
        if needed_at >= NEVER:
            return []
        if self.tier is DEVICE:
            position = self.schedule.position
            self._lowest = max(self._lowest, position + int(_ALMOST * (self._awaited(needed_at) - position)))
        return self._victims(self._ahead, span, self._lowest, spared)

    def excess(self) -> list[int]:
        """What has to go because more than `limit` slots are taken, as far as it may and no write makes room."""
        excess = self.slots.used - self.limit
        if excess > 0:
            excess -= self.writing_slots(excess)
        if excess <= 0:
            return []
        self._pass_on()
        return self._without_needless(self._demand.first(excess, self._span), excess)

    def _awaited(self, needed_at: int) -> int:
        """The furthest use, from `needed_at` on, of a copy that is used before; its turn comes then."""
        schedule, copies = self.schedule, self.copies
        before = set(chain.from_iterable(schedule.between(schedule.position, needed_at)))
        for block in schedule.now:
            copy = copies.get(block)
            if copy is not None and (copy.uses or schedule.next_use(block) < needed_at):
                before.add(block)
        return max((schedule.next_use(block, needed_at) for block in before if block in copies), default=0)

    def _pass_on(self) -> None:
        """Tell waiting tiers, and the orders, of what has changed since an order was asked."""
        changed, ranked = self._changed, self._ranked
        if changed:
            for resting in self._resting_here:
                if resting._rest is not None:
                    resting._disturb(self)
            self._demand.touch(changed)
            self._ahead.touch(changed)
            changed.clear()
        if ranked:
            self._demand.touch(ranked)
            self._ahead.touch(ranked)
            ranked.clear()

    def _victims(self, order: Order, span: int, least: int, spared: Collection[int]) -> list[int]:
        """Those of `order` that have to go for a place of `span` slots; see `harmless_victims`. If there were none when
        this was last asked, and nothing has become free nor can be given up since, there are none now."""
        if self._changed or self._ranked:
            self._pass_on()
        order.ranks()
        before, question = self._refused.get(order), (span, self._freed, spared)
        if before is not None and before[0] <= least and order.gained < least and before[1] == question:
            return []
        victims = self._search(order, span, least, spared)
        if not victims:
            self._refused[order] = least, question
            order.gained = NOTHING
        return victims

    def _search(self, order: Order, span: int, least: int, spared: Collection[int]) -> list[int]:
        """As `_victims`, found by looking."""
        victims: list[int] = []
        if self._row is not None and span > 1 and self._row.find(span) is None:
            may_go = [(rank[:-2], rank[-1]) for rank in order.at_least(least) if rank[-1] not in spared]
            taken = [(rank, self.copies[block].slot, self._span(block)) for rank, block in may_go]
            victims = self._row.emptied_first(taken, span)
            if not victims:
                return []
        missing = self.slots.used + span - self.limit - (sum(map(self._span, victims)) if victims else 0)
        if missing <= 0:
            return victims
        if missing == 1 and not victims:  # most often: whatever is first is enough
            return order.first(1, self._span, least, spared)
        more = order.first(missing, self._span, least, {*spared, *victims} if victims else spared)
        more = self._without_needless(more, missing)
        return victims + more if sum(map(self._span, more)) >= missing else []

    def _without_needless(self, chosen: list[int], slots: int) -> list[int]:
        """`chosen`, in their order, without those not needed for `slots` slots: behind a large one that was the last
        to be chosen, smaller ones may stay."""
        spare = sum(map(self._span, chosen)) - slots
        if spare <= 0:
            return chosen
        for block in reversed(chosen):
            if self._span(block) <= spare:
                spare -= self._span(block)
                chosen = [other for other in chosen if other != block]
        return chosen

    def _span(self, block: int) -> int:
        return self._blocks[block].span

    def _demand_rank(self, block: int) -> Rank | None:
        copy = self.copies.get(block)
        if copy is None or copy.uses or copy.writing or (copy.state is not VALID and copy.state is not STALE):
            return None
        next_use = self.schedule.next_use(block) if self._nearer is None else self.needed(block)
        if self._by_next_use:  # as the policy would, without asking it
            return next_use, 0 if copy.dirty else 1, -copy.last_use, -copy.number, block
        facts = CopyFacts(next_use, copy.last_use, copy.fetched, copy.dirty)
        return (*self._policy.rank(facts), -copy.number, block)

    def _ahead_rank(self, block: int) -> Rank | None:
        copy = self.copies.get(block)
        if copy is None or copy.uses or copy.dirty or (copy.state is not VALID and copy.state is not STALE):
            return None  # what is written is dirty
        next_use = self.schedule.next_use(block) if self._nearer is None else self.needed(block)
        return next_use, -copy.last_use, -copy.number, block
