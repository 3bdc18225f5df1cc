"""Holds the state of one cached tier: its slots, its copies, what its schedule lacks, and what to evict. Pure.

Note "scans": forwards without backwards use all weights in the same order, again and again. MIN then evicts what was
used last, so its misses gather in one part of the round, where the link is overloaded, and elsewhere it idles. Instead
a part of the blocks, spread evenly over a round, is `retained`, and all others stream through the remaining slots,
prefetched as far ahead as these allow: as many bytes as with MIN, and a few slots more, evenly over the round. If that
would stream many more bytes than MIN fetches, MIN decides, and at most two blocks are prefetched, as each takes the
slot of one that would stay.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from itertools import accumulate

from hetmem.schedule.blocks import (
    LOADING,
    STALE,
    VALID,
    Block,
    Copy,
    CopyFacts,
    EvictionPolicy,
    NextUse,
    Order,
    PlaceMap,
    Rank,
    SlotMap,
)
from hetmem.schedule.trace import DEVICE, HOST, NEVER, Schedule, Tier, UseSequence

_AHEAD_IN_A_SCAN = 2
_RETAINED = -1
"""First number of the rank of a retained copy: less than that of any use."""

_AHEAD = 16
"""A scan prefetches into one of this many slots, or of the slots that streamed blocks take, if these are fewer."""

_MORE = 9 / 8
"""Nothing is retained if that streams this many times what MIN fetches, as where few slots are missing."""

_ALMOST = 9
"""Tenths of the distance to the furthest use: a copy used that late is as good a victim as the one used last."""


class Cache:
    """The copies on `tier`, by block number. At most `limit` of the `slots` are taken, loads in flight included.

    `nearer` is the next faster tier, which is fed from this one: see `needed`. Call `touch(block)` after a change of a
    copy on which eviction or the policy depends. `unused` are prefetched blocks whose use has not come.
    """

    def __init__(
        self, tier: Tier, count: int, blocks: Sequence[Block], policy: EvictionPolicy, nearer: Cache | None = None
    ) -> None:
        self.tier = tier
        self._row = SlotMap(count) if tier is HOST else None
        self.slots = PlaceMap(count) if self._row is None else self._row
        self.limit = self._least = count
        self.most_ahead = self.at_once = 0
        """How many prefetched copies may wait for their uses, and how many with the present schedule."""
        self.retained: set[int] = set()
        """Blocks that a scan keeps for whole rounds, evicted last: see note "scans"."""
        self._retained_for: tuple[UseSequence, int] | None = None
        self.copies: dict[int, Copy] = {}
        self.schedule = Schedule()
        self.loading = 0
        self.writing: dict[int, Copy] = {}
        self._blocks, self._policy, self._by_next_use = blocks, policy, type(policy) is NextUse
        self._nearer = nearer
        self._farther: Cache | None = None
        self._added = 0
        self.unused: set[int] = set()
        self.too_early = False
        """Whether a prefetched copy was evicted before its use, since the schedule was set."""
        self.fed_ahead = 0  # a number of uses, see `unfed`; 0 until something comes here through staging
        self.complete = 0
        """All blocks of the uses from the schedule's position up to this one have copies, in any state."""
        self.prefetch_at = 0
        """Nothing can be prefetched before the schedule reaches this use. Any change of what is missing, or of the
        room, other than by a use that the schedule expects, resets it to 0; so does the end of a use that began before
        the tick `prefetched_at`."""
        self.prefetched_at = 0
        self.exhausted = False
        """Whether the last search for victims took the last copy that is used late enough to be evicted."""
        self.is_known = True
        """Whether the schedule contains the use just reached."""
        self.needed: Callable[[int], int] = self.schedule.next_use if nearer is None else self._needed_on_either
        """Returns when a copy of a block on this tier is used next; NEVER if unknown. The device counts uses of the
        schedule; staging, which feeds a device without a copy, uses the clock of both tiers."""
        self._rank_next = self.needed
        """The first number of a rank of a block by its next use."""
        self._order = Order(self.copies, self._rank)
        self.touch, self.touch_all = self._order.touch, self._order.touch_all
        if nearer is not None and count:
            nearer._farther = self

    # ---- copies ------------------------------------------------------------------------------------------------

    def add(self, block: int, copy: Copy) -> Copy:
        """Add `copy` as the one of `block` on this tier."""
        copy.number = self._added = self._added + 1
        self.copies[block] = copy
        self.prefetch_at = 0
        if self._farther is not None:
            self._farther.touch(block)
        return copy

    def remove(self, block: int) -> None:
        """Remove the copy of `block` from this tier."""
        if block in self.unused:
            self.unused.remove(block)
        self.prefetch_at = 0
        self.touch(block)
        if self.complete and (next_use := self.schedule.next_use(block)) < self.complete:
            self.complete = next_use
        if self._farther is not None:
            self._farther.touch(block)
        del self.copies[block]

    def set_limit(self, slots: int) -> None:
        """Allow at most `slots` slots to be taken."""
        self.limit, self.prefetch_at = max(0, min(slots, self.slots.count)), 0
        if self.limit < self._least:
            self._least = self.limit
            if self._retained_for is not None and self.limit < self._retained_for[1]:
                self._choose_retained(self.limit)
                self._order.renew()

    def writing_slots(self, enough: int) -> int:
        """Count the slots that become free when the writes in flight are done, and stop at `enough`."""
        slots = 0
        for block, copy in self.writing.items():
            if slots >= enough:
                break
            if copy.uses == 0:
                slots += self._blocks[block].span
        return slots

    # ---- the schedule ------------------------------------------------------------------------------------------

    def expect(self, schedule: Schedule) -> None:
        """Make `schedule` the one that is expected next."""
        within, self._least = self._least if self.schedule.scan else self.limit, self.limit
        self.schedule, self.complete, self.prefetch_at, self.too_early = schedule, 0, 0, False
        self.at_once = min(self.most_ahead, _AHEAD_IN_A_SCAN) if schedule.scan else self.most_ahead
        self._choose_retained(within)
        self._order.renew()
        if self._farther is not None:
            self._farther._order.renew()

    def _choose_retained(self, slots: int) -> None:
        """Choose the blocks that a scan retains if a round has at least `slots` slots."""
        known = self.schedule.known
        if not (self.schedule.scan and self._by_next_use and self.tier is DEVICE):
            self.retained, self._retained_for = set(), None
        elif self._retained_for is None or self._retained_for[0] is not known or self._retained_for[1] != slots:
            order = known.spread()
            taken = [*accumulate(map(self._span, order), initial=0)]
            count, missing = 0, taken[-1] - slots
            if missing > 0:
                need = range(len(order)), slots
                count = bisect_right(*need, key=lambda at: taken[at] + self._passage(order[at:], slots)) - 1
            few = taken[-1] - taken[count] > _MORE * missing
            self.retained, self._retained_for = set() if few else set(order[: max(0, count)]), (known, slots)
        if self._nearer is None:
            self.needed = self.schedule.next_use
            self._rank_next = self._visited_next if self.retained else self.needed

    def _passage(self, blocks: Sequence[int], slots: int) -> int:
        """Return how many of `slots` slots streaming `blocks` takes in a scan: the most that they take at one time,
        each from the first to the last use of a visit, and those for prefetching."""
        visits, changes = self.schedule.known.visits(), [0] * (len(self.schedule.uses) + 1)
        for block in blocks:
            for first, last in visits[block].items():
                changes[first] += self._span(block)
                changes[last + 1] -= self._span(block)
        spans = [*map(self._span, blocks)]
        ahead = min(self.most_ahead * max(spans), min(sum(spans), slots) // _AHEAD)
        return max(accumulate(changes)) + max(*spans, ahead)

    def reach(self, blocks: tuple[int, ...]) -> None:
        """Begin a use of `blocks`. Skipped blocks, and those without copies in the use before, are ranked again."""
        schedule = self.schedule
        first = schedule.position
        if schedule.absent:
            self._change(schedule.absent)
        self.is_known = schedule.reach(blocks)
        if not self.is_known:
            self.prefetch_at = 0
            return
        last = schedule.position
        if last == first + 1:
            return
        self.complete = self.prefetch_at = 0
        if last < first:
            first, last = last, first
        self._change(set().union(blocks, *schedule.between(first, last)))

    def _change(self, blocks: Iterable[int]) -> None:
        """Rank `blocks` again, as their next uses have changed."""
        self.touch_all(blocks)
        if self._farther is not None:
            self._farther._order.touch_all(blocks)

    def meet(self, blocks: Collection[int]) -> None:
        """Count `blocks` of the use just reached as present and used."""
        if self.schedule.absent:
            self.schedule.meet(blocks)
        if self.unused:
            self.unused -= {*blocks}
        self.touch_all(blocks)

    def _needed_on_either(self, block: int) -> int:
        schedule, nearer = self.schedule, self._nearer
        assert nearer is not None
        here = schedule.time(schedule.next_use(block)) if schedule.uses else NEVER
        if block in nearer.copies:
            return here
        there = nearer.schedule
        at = there.time(there.next_use(block))
        return at if at < here else here

    def clock(self) -> int:
        """Return the present time as `needed` counts it: that of the next use expected on either tier."""
        schedule, nearer = self.schedule, self._nearer
        if nearer is None:
            return schedule.position
        now = min(schedule.time(schedule.position), nearer.schedule.time(nearer.schedule.position))
        return now if now < NEVER else 0

    def missing(self, lookahead: int) -> Iterator[int]:
        """Yield, in order, the blocks that the next `lookahead` uses read and that have no copy on this tier; not those
        that one of these uses overwrites before they are read."""
        schedule, copies = self.schedule, self.copies
        at = schedule.position
        end = at + lookahead
        if end > schedule.barrier:
            end = schedule.barrier
        if at < self.complete:
            at = self.complete
        if at >= end:
            return
        uses, count = schedule.uses, schedule.count
        comes_by_itself: tuple[int, ...] = ()
        complete = True
        while at < end:
            for block in uses[at % count]:
                if block in copies:
                    continue
                if complete:
                    complete, self.complete = False, at
                if schedule.overwrites and not schedule.reads(at):
                    comes_by_itself += (block,)
                elif block not in comes_by_itself:
                    yield block
            if self.complete == at:  # no block that is used sooner was evicted meanwhile
                complete = False not in map(copies.__contains__, uses[at % count])
            at += 1
        if complete:
            self.complete = self._complete_from(end, 4 * lookahead)

    def _complete_from(self, start: int, most: int) -> int:
        """Return up to which of the `most` uses from `start` all blocks have copies."""
        copies = self.copies
        for at, blocks in enumerate(self.schedule.between(start, start + most), start):
            for block in blocks:
                if block not in copies:
                    return at
        return start + most

    def fetched_ahead(self, lookahead: int) -> int:
        """Count the prefetched blocks whose use is among the next `lookahead` and has not come."""
        schedule, count = self.schedule, 0
        uses = schedule.between(schedule.position, schedule.position + lookahead)
        for block in self.unused:
            if block in schedule.absent:
                count += 1
                continue
            for blocks in uses:
                if block in blocks:
                    count += 1
                    break
        return count

    def unfed(self, staged: Container[int], comes_from_there: Callable[[int], bool]) -> int | None:
        """Return the first block that comes through staging, that the next `fed_ahead` uses read, and that is neither
        on this tier nor `staged`; None if there is none."""
        schedule, copies = self.schedule, self.copies
        start, end = max(schedule.position, self.complete), min(schedule.position + self.fed_ahead, schedule.barrier)
        for blocks in schedule.between(start, end) if start < end else ():
            for block in blocks:
                if block not in copies and block not in staged and comes_from_there(block):
                    return block
        return None

    # ---- what to evict -----------------------------------------------------------------------------------------

    def victims(self, span: int, spared: Collection[int]) -> list[int]:
        """Return what has to be evicted for `span` slots, by the policy's rank and without `spared`; empty if that is
        impossible now. Dirty copies among them must be written first. On the device, copies in flight may be among them
        and must arrive first, so that the choice does not depend on when transfers end."""
        return self._victims(span, spared, None, arrived=self.tier is HOST)

    def harmless_victims(self, span: int, needed_at: int, spared: Collection[int] = ()) -> list[int]:
        """Return clean, idle copies, without `spared`, that may be evicted to prefetch a block of `span` slots that is
        first needed at `needed_at`. If there are too few it returns none and sets `prefetch_at`.

        DEVICE: only copies that were used since they were fetched, and of those Belady's choice at that time, or a copy
        whose next use is at least 90 % as far away (`_ALMOST`); if the choice is in use, wait. The 90 % keep cyclic
        scans (inference) overlapped at the price of at most one fetch a cycle. HOST: any copy that is needed later.
        """
        if needed_at >= NEVER:
            return []
        if self.tier is HOST or self.retained:
            return self._victims(span, spared, needed_at + 1)
        schedule = self.schedule
        position = schedule.position
        before = position - 1 if position else 0
        awaited = schedule.furthest(before, needed_at)
        least = position + _ALMOST * (awaited - position) // 10
        if least <= needed_at:
            least = needed_at + 1
        victims = self._first(self.slots.used + span - self.limit, spared, least)
        if not victims and needed_at <= self.complete:  # nothing that is needed sooner is missing
            self.prefetch_at = min(schedule.first_with(least, before, needed_at) + 2, needed_at + 1)
        return victims

    def excess(self) -> list[int]:
        """Return what has to be evicted, beyond what writes in flight will free, as `limit` is exceeded."""
        excess = self.slots.used - self.limit
        if excess > 0:
            excess -= self.writing_slots(excess)
        return self._first(excess, (), None, partly=True) if excess > 0 else []

    def _victims(self, span: int, spared: Collection[int], least: int | None, *, arrived: bool = True) -> list[int]:
        """Return what has to be evicted for `span` slots; empty if that cannot free enough. See `_first`."""
        missing = self.slots.used + span - self.limit
        victims: list[int] = []
        if self._row is not None and span > 1 and self._row.find(span) is None:
            may_go = {*self._first(self._row.count, spared, least, arrived=arrived, partly=True)}
            victims = self._row.cheapest_row({r[-1]: r[:-2] for r in self._order.ranks() if r[-1] in may_go}, span)
            if not victims:
                return []
            missing -= sum(map(self._span, victims))
            spared = {*spared, *victims}
        if missing <= 0:
            return victims
        more = self._first(missing, spared, least, arrived=arrived)
        return victims + more if more else []

    def _first(
        self, slots: int, spared: Collection[int], least: int | None, *, arrived: bool = True, partly: bool = False
    ) -> list[int]:
        """Return idle copies in the order of eviction, until they take `slots` slots together; if all are not enough,
        all (`partly`) or none. Copies in flight are among them unless they must have `arrived`; `spared` ones are not.
        Smaller copies that the last, larger one makes unnecessary are left out. With `least`, only clean copies that
        were used since they were fetched and are not used before `least`."""
        copies, by_next_use = self.copies, self._by_next_use
        lowest = least if by_next_use and least is not None else -NEVER
        chosen: list[int] = []
        ranks = reversed(self._order.ranks())
        for rank in ranks:
            if rank[0] < lowest:
                break
            block = rank[-1]
            copy = copies[block]
            if copy.uses or block in spared or (copy.dirty and (copy.writing or least is not None)):
                continue
            if copy.state is not VALID and copy.state is not STALE and (arrived or copy.state is not LOADING):
                continue
            if least is not None and (block in self.unused or (not by_next_use and self._rank_next(block) < least)):
                continue
            chosen.append(block)
            slots -= self._blocks[block].span
            if slots <= 0:
                self.exhausted = not slots and next(ranks, (0,))[0] < lowest
                break
        if slots > 0:
            return chosen if partly else []
        for block in reversed(chosen) if slots < 0 else ():
            if slots + self._span(block) <= 0:
                slots += self._span(block)
                chosen.remove(block)
        return chosen

    def _span(self, block: int) -> int:
        return self._blocks[block].span

    def _visited_next(self, block: int) -> int:
        """Return the next use for a rank in a scan; retained copies, and those used again in this visit, rank
        lowest."""
        at = self.schedule.next_use(block)
        if at == NEVER:
            return at
        visits = self.schedule.known.visits()[block]
        return at if block not in self.retained and at % len(self.schedule.uses) in visits else _RETAINED

    def _rank(self, block: int) -> Rank:
        copy = self.copies[block]
        if self._by_next_use:  # inlines `NextUse.rank`
            return self._rank_next(block), not copy.dirty, -copy.last_use, -copy.number, block
        facts = CopyFacts(self._rank_next(block), copy.last_use, copy.fetched, copy.dirty)
        return (*self._policy.rank(facts), -copy.number, block)
