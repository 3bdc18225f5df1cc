"""One cached tier: its slots, the copies in them, and what to give up for another one. Pure; sends no commands.

`Residency` owns the transitions of copies; here is only what a single tier knows by itself.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Sequence
from contextlib import closing
from dataclasses import dataclass
from enum import Enum, auto

from hetmem.plan.order import Key, Order
from hetmem.plan.policy import CopyFacts, EvictionPolicy
from hetmem.plan.slots import PlaceMap, SlotMap
from hetmem.plan.trace import NEVER, Schedule, Tier


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
    `load` is False while its content is undefined, because it will be overwritten. `number` counts the copies of a
    cache in the order in which they came."""

    state: CopyState
    slot: int = -1
    uses: int = 0
    waiting: int = 0
    dirty: bool = False
    writing: bool = False
    load: bool = True
    last_use: int = 0
    fetched: int = 0
    number: int = 0

    @property
    def idle(self) -> bool:
        """Whether an eviction may take it now."""
        return self.uses == 0 and not self.writing and self.state in (CopyState.VALID, CopyState.STALE)


class Cache:
    """The copies on `tier`, by block number. `limit` of the `slots` may be taken, those of loads in flight included.

    `nearer` is the next faster tier: what lies there too is the cheaper one to lose here. Whoever changes a copy in a
    way that an eviction or a policy may know of says so with `touch(block)`.

    Note "refusals": most of the time what is missing waits for room, and asking for it again at every use would take
    longer than all the rest. So a refusal is remembered, and stands until something has changed that could make room
    (`touch`), or what is missing (`moved`). A use of a copy that is here only takes room away.
    """

    def __init__(
        self, tier: Tier, count: int, blocks: Sequence[Block], policy: EvictionPolicy, nearer: Cache | None = None
    ) -> None:
        self.tier = tier
        self._row = SlotMap(count) if tier is Tier.HOST else None
        self.slots = PlaceMap(count) if self._row is None else self._row
        self.limit = count
        self.copies: dict[int, Copy] = {}
        self.schedule = Schedule()
        self.loading = 0
        self.writing: dict[int, Copy] = {}
        self._blocks = blocks
        self._policy = policy
        self._nearer: Container[int] = nearer.copies if nearer is not None else ()
        self._farther: Cache | None = None
        self._added = 0
        self._present_until = 0
        self._changed: set[int] = set()
        self._ranked: set[int] = set()  # of these only the rank may have changed: that makes no room for prefetching
        self.touch = self._changed.add
        self._moves = 0
        self.refused: tuple[int, int, Cache, int] | None = None
        self._demand = Order(self.copies, self._demand_key)
        self._ahead = Order(self.copies, self._ahead_key)
        if nearer is not None:
            nearer._farther = self

    # ---- copies ------------------------------------------------------------------------------------------------

    def add(self, block: int, copy: Copy) -> Copy:
        """`copy` is the one of `block` here from now on."""
        copy.number = self._added = self._added + 1
        self.copies[block] = copy
        self._moves += 1
        if self._farther is not None:
            self._farther._ranked.add(block)
        return copy

    def remove(self, block: int) -> Copy:
        """There is no copy of `block` here any more; returns what was."""
        self._present_until = min(self._present_until, self.schedule.next_use(block))
        self._moves += 1
        copy = self.copies.pop(block)
        self.touch(block)
        if self._farther is not None:
            self._farther._ranked.add(block)
        return copy

    def moved(self) -> None:
        """What comes next here may be something else now."""
        self._present_until = 0
        self._moves += 1

    def set_limit(self, slots: int) -> None:
        """At most `slots` slots may be taken."""
        self.limit = max(0, min(slots, self.slots.count))
        self._moves += 1

    def writing_slots(self) -> int:
        """Slots that become free when the writes in flight are done."""
        return sum(self._span(block) for block, copy in self.writing.items() if copy.uses == 0)

    # ---- the schedule ------------------------------------------------------------------------------------------

    def expect(self, schedule: Schedule) -> None:
        """`schedule` is what comes next."""
        self.schedule = schedule
        self.moved()
        self._demand.renew()
        self._ahead.renew()

    def reach(self, blocks: tuple[int, ...]) -> None:
        """A use of `blocks` begins. Next uses change for what was waited for in vain, and for what was skipped."""
        schedule = self.schedule
        passed, first = schedule.now, schedule.position
        for block in passed:
            copy = self.copies.get(block)
            if block not in schedule.met or (copy is not None and copy.uses):  # `_awaited` counts the latter no more
                self.touch(block)
        if not schedule.reach(blocks):
            return
        last = schedule.position
        if last == first + 1:
            return  # the next one, as all expected
        if last < first:
            first, last = last, first
        self.moved()
        self._changed.update(passed, blocks, *(schedule.between(first, last) if last - first > 1 else ()))

    def meet(self, block: int) -> None:
        """`block` of the use just reached is there, and in use from now on."""
        self.schedule.met.add(block)
        self._ranked.add(block)

    def missing(self, lookahead: int) -> list[int]:
        """The blocks without a copy among those that the next `lookahead` uses read, each once, in order. What one of
        these uses overwrites first is no such block.

        Uses whose blocks are all here are looked at once: until something is removed they need no second look.
        """
        schedule, copies = self.schedule, self.copies
        start = max(schedule.position, self._present_until)
        if start >= schedule.position + lookahead:
            return []
        end = schedule.horizon(lookahead)
        missing: dict[int, None] = {}
        comes_by_itself: set[int] = set()
        for at, blocks in enumerate(schedule.between(start, end) if start < end else (), start):
            absent = [block for block in blocks if block not in copies and block not in comes_by_itself]
            if schedule.reads(at):
                missing.update(dict.fromkeys(absent))
            else:
                comes_by_itself.update(absent)
            if not (missing or comes_by_itself):
                self._present_until = at + 1
        return list(missing)

    def refuse(self, block: int, where: Cache) -> None:
        """What is missing here first, `block`, gets no room on `where` now."""
        if not where._changed:
            farther = self._farther or self  # whether `block` is staged says where it has to be fetched from
            self.refused = self.schedule.next_use(block), self._moves, where, farther._moves

    def still_refused(self) -> bool:
        """Whether asking again for what `refuse` said would end the same way."""
        if self.refused is None:
            return False
        needed_at, moves, where, farther_moves = self.refused
        farther = self._farther or self
        stands = moves == self._moves and farther_moves == farther._moves and needed_at >= self.schedule.position
        if not stands or where._changed:
            self.refused = None
        return self.refused is not None

    # ---- what to give up ---------------------------------------------------------------------------------------

    def victims(self, span: int, spared: Collection[int]) -> list[int]:
        """What has to go for a place of `span` slots, by the policy's rank and without `spared`; empty if that
        cannot be done now. Dirty copies are among them: they have to be written first."""
        return self._victims(self._demand, span, None, spared)

    def harmless_victims(self, span: int, needed_at: int, spared: Collection[int] = ()) -> list[int]:
        """What may be given up now, without `spared`, for a block of `span` slots that is needed at `needed_at`.

        On the device only what MIN would give up then: if a copy that is used before is the one used furthest after
        `needed_at`, its turn must be waited for. So prefetching costs no fetch that demand would not. In HOST staging
        the optimizer scans its states round and round, where MIN's choice is always the block just used, and waiting
        for it would leave no read behind compute; there, anything needed later gives way.
        """
        if needed_at >= NEVER:
            return []
        lowest = needed_at + 1
        if self.tier is Tier.DEVICE:
            lowest = max(lowest, self._awaited(needed_at))
        return self._victims(self._ahead, span, -lowest, spared)

    def excess(self) -> list[int]:
        """What has to go because more than `limit` slots are taken, as far as it may and no write makes room."""
        excess = self.slots.used - self.limit
        if excess > 0:
            excess -= self.writing_slots()
        if excess <= 0:
            return []
        return self._without_needless(self._up_to_date(self._demand).least(excess, self._span), excess)

    def _awaited(self, needed_at: int) -> int:
        """The furthest use, from `needed_at` on, of a copy that is used before; its turn comes then."""
        schedule, copies = self.schedule, self.copies
        before = {block for use in schedule.between(schedule.position, needed_at) for block in use if block in copies}
        for block in schedule.now:
            copy = copies.get(block)
            if copy is not None and (copy.uses or schedule.next_use(block) < needed_at):
                before.add(block)
        return max((schedule.next_use(block, needed_at) for block in before), default=0)

    def _up_to_date(self, order: Order) -> Order:
        """`order`, told of what has changed since either was asked."""
        for changed in (self._changed, self._ranked):
            if changed:
                self._demand.touch(changed)
                self._ahead.touch(changed)
        if self._changed:
            self._changed.clear()
            self._moves += 1
        self._ranked.clear()
        return order

    def _victims(self, order: Order, span: int, most: int | None, spared: Collection[int]) -> list[int]:
        victims: list[int] = []
        if self._row is not None and span > 1 and self._row.find(span) is None:
            victims = self._window(self._row, order, span, most, spared)
            if not victims:
                return []
        missing = self.slots.used + span - self.limit - sum(map(self._span, victims))
        if missing <= 0:
            return victims
        more = self._up_to_date(order).least(missing, self._span, most, {*spared, *victims} if victims else spared)
        more = self._without_needless(more, missing)
        return victims + more if sum(map(self._span, more)) >= missing else []

    def _window(self, slots: SlotMap, order: Order, span: int, most: int | None, spared: Collection[int]) -> list[int]:
        """The place for `span` slots whose blocks are needed last, by the first of them that is needed again."""
        left: dict[int, int] = {}
        best, found = -1, None
        with closing(self._up_to_date(order).ascending(most)) as blocks:
            for key, block in blocks:
                if found is not None and key[:-1] != found:
                    break  # of places that become free with equal keys it is the last one
                if block in spared:
                    continue
                start = self.copies[block].slot
                for place in range(start // span, (start + self._span(block) - 1) // span + 1):
                    if (place + 1) * span > slots.count:
                        break
                    inside = min(start + self._span(block), (place + 1) * span) - max(start, place * span)
                    left[place] = left.get(place, slots.taken(place, span)) - inside
                    if not left[place]:
                        best, found = max(best, place), key[:-1]
        return slots.inside(best, span) if found is not None else []

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

    def _demand_key(self, block: int) -> Key | None:
        copy = self.copies.get(block)
        if copy is None or not copy.idle:
            return None
        next_use = self.schedule.next_use(block)
        if next_use != NEVER and block in self._nearer:
            next_use = NEVER - 1
        rank = self._policy.rank(CopyFacts(next_use, copy.last_use, copy.fetched, copy.dirty))
        return (*(-value for value in rank), copy.number)

    def _ahead_key(self, block: int) -> Key | None:
        copy = self.copies.get(block)
        if copy is None or copy.dirty or not copy.idle:
            return None
        return -self.schedule.next_use(block), copy.last_use, copy.number

    def check(self) -> None:
        """Raise `AssertionError` where copies and slots disagree."""
        for block, copy in self.copies.items():
            label, home, span = self._blocks[block].label, self._blocks[block].home, self._blocks[block].span
            assert copy.uses >= copy.waiting >= 0, f"{label} has a wrong use count"
            assert home > self.tier, f"{label} is cached at or above its home"
            assert not copy.dirty or (self.tier is Tier.HOST and copy.state is CopyState.VALID)
            assert not copy.writing or copy.dirty
            if copy.slot >= 0:
                assert self.slots.has(block, copy.slot, span), "a slot has another owner"
            else:
                assert copy.uses == copy.waiting, "a copy without a slot is in use"
        taken = sum(self._blocks[block].span for block, copy in self.copies.items() if copy.slot >= 0)
        assert taken == self.slots.used <= self.slots.count, "slots and copies disagree"
