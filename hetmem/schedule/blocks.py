"""Names blocks, their copies and slots on the tiers, the policies that rank copies and the order that ranks give,
commands, links, and how far ahead of uses copies come.

`Residency` owns the transitions between the states of a copy. The names of links are the same where transfers are made
and where they are simulated. Commands are named tuples: many are made, and a frozen dataclass takes three times as long
to make.

`NextUse` is Belady's MIN (L. A. Belady, "A study of replacement algorithms", IBM Systems Journal 5(2), 1966) over
the schedule of the trace; `LRU` and `FIFO` are there to compare with, and LRU is what NextUse does without a trace.

Note "sorted late": a rank depends on the next use of a block and on its copy, and both change for few blocks between
two questions. So `touch` only notes blocks, and the next question ranks those again. The ranks are one sorted list: to
put one of a few thousand in, or to take it out, moves a few KiB, and to read from the end on costs what is read.

Note "slots": slots of a pool are equal, so nothing fragments for blocks of one slot. A block with a larger span needs
its slots in a row. Where all slots are one piece of memory (`SlotMap`), it lies at a multiple of its span, so that
blocks of one span never leave a gap between them that none fits into (the roles of a chunk fit into as many times its
span whatever came before). Large spans are looked for from the high end and single slots from the low end, which keeps
the two kinds apart. Where each place takes memory of its own when it is used (`PlaceMap`), each span has places of its
own, enough for a whole pool, and only the number of slots is limited: nothing fragments, whatever is in use for however
long.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple, Protocol

from hetmem.schedule.trace import Tier


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


WAITING, LOADING, VALID, STALE = CopyState
"""By name: CPython takes ten times as long to find a member in its enumeration."""
PLACED = (VALID, LOADING)  # of a copy that has its slot


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
        return self.uses == 0 and not self.writing and (self.state is VALID or self.state is STALE)


class CopyFacts(NamedTuple):
    """What a policy may know of an idle copy.

    `next_use` counts uses (`trace.NEVER` if none is known); `last_use` and `fetched` are ticks of the residency's
    own counter; a `dirty` copy costs a write-back, a clean one costs nothing to drop.
    """

    next_use: int
    last_use: int
    fetched: int
    dirty: bool


class EvictionPolicy(Protocol):
    """Ranks copies: the one with the greatest rank is given up first. Must be deterministic."""

    def rank(self, facts: CopyFacts) -> tuple[int, ...]:
        """A rank of fixed length; compared as tuples."""


class NextUse:
    """Give up the copy used furthest in the future; among equals a clean one, then the least recently used."""

    def rank(self, facts: CopyFacts) -> tuple[int, ...]:
        """Next use, then clean before dirty, then the longer ago the last use was."""
        return (facts.next_use, 0 if facts.dirty else 1, -facts.last_use)


class LRU:
    """Give up the copy that was used longest ago."""

    def rank(self, facts: CopyFacts) -> tuple[int, ...]:
        """A tuple of one: the longer ago the last use was, the greater."""
        return (-facts.last_use,)


class FIFO:
    """Give up the copy that was fetched first."""

    def rank(self, facts: CopyFacts) -> tuple[int, ...]:
        """A tuple of one: the longer ago the fetch was, the greater."""
        return (-facts.fetched,)


Rank = tuple[int, ...]
"""The greatest is given up first. Its last number is the block, the one before tells copies of equal rank apart."""


class Order:
    """The blocks of `copies` by `rank(block)`.

    Call `touch` after a change of what the rank of a block depends on, or of whether it is in `copies`. A question
    costs O(log blocks) comparisons for each block that was touched since the last one.
    """

    def __init__(self, copies: Mapping[int, object], rank: Callable[[int], Rank]) -> None:
        self._copies = copies
        self._rank = rank
        self._rank_of: dict[int, Rank] = {}
        self._ranks: list[Rank] = []
        self._touched: set[int] = set()
        self.touch: Callable[[int], None] = self._touched.add
        self.touch_all: Callable[[Iterable[int]], None] = self._touched.update
        self._outdated = False

    def renew(self) -> None:
        """Every rank may have changed."""
        self._outdated = True

    def ranks(self) -> Sequence[Rank]:
        """All ranks, the greatest last, as they are until the next `touch`."""
        touched, copies = self._touched, self._copies
        if self._outdated:
            self._rank_of = {block: self._rank(block) for block in copies}
            self._ranks = sorted(self._rank_of.values())
            self._outdated = False
            touched.clear()
        ranks, rank_of = self._ranks, self._rank_of
        while touched:
            block = touched.pop()
            rank = self._rank(block) if block in copies else None
            if block in rank_of:
                if rank == rank_of[block]:
                    continue
                del ranks[bisect_left(ranks, rank_of[block])]
            if rank is None:
                rank_of.pop(block, None)
            else:
                insort(ranks, rank)
                rank_of[block] = rank
        return ranks


class Fetch(NamedTuple):
    """Copy `block` from its `source` tier into `slot` of `target`."""

    block: int
    source: Tier
    target: Tier
    slot: int


class Write(NamedTuple):
    """Write the HOST copy of `block` in `slot` to its home on NVME."""

    block: int
    slot: int


class Drop(NamedTuple):
    """Forget the copy of `block` in `slot` of `tier`; nothing moves."""

    block: int
    tier: Tier
    slot: int


Command = Fetch | Write | Drop


@dataclass(slots=True)
class Counts:
    """What the residency did so far, in blocks. A fault is a use that found no valid copy of what it needs."""

    faults: dict[Tier, int] = field(default_factory=lambda: {Tier.DEVICE: 0, Tier.HOST: 0})
    fetches: dict[Tier, int] = field(default_factory=lambda: {Tier.DEVICE: 0, Tier.HOST: 0})
    evictions: dict[Tier, int] = field(default_factory=lambda: {Tier.DEVICE: 0, Tier.HOST: 0})


SMALL_BYTES = 1 << 20
"""Below this, handing a copy to a thread costs more than the copy."""


class Link(Enum):
    """A direction between two tiers."""

    HOST_TO_DEVICE = "host_to_device"
    DEVICE_TO_HOST = "device_to_host"
    NVME_READ = "nvme_read"
    NVME_WRITE = "nvme_write"

    __hash__ = object.__hash__  # each is one object: that of `Enum` is Python, and asked for several times a copy


@dataclass(slots=True)
class LinkUse:
    """Bytes that crossed a link and the seconds it was busy."""

    bytes: int = 0
    seconds: float = 0.0


_IN_FLIGHT_BYTES = 1 << 30
_IN_FLIGHT_PART = 16


def in_flight_bytes(device_bytes: int) -> int:
    """Return how many bytes of gradients may be on their way home, and of copies to a tier, at one time: enough to keep
    a link busy, and no noticeable part of a device of `device_bytes`, which holds both meanwhile."""
    return min(_IN_FLIGHT_BYTES, device_bytes // _IN_FLIGHT_PART)


_AHEAD = 2


def ahead_at_once(slot_bytes: int, device_bytes: int) -> dict[Tier, int]:
    """Return how many copies in device slots of `slot_bytes` may be ahead of their use beside a device of
    `device_bytes`, more if they are small, and how many reads from NVMe may be under way: more of them displace what
    staging holds for uses that come sooner."""
    return {Tier.DEVICE: max(_AHEAD, in_flight_bytes(device_bytes) // max(1, slot_bytes)), Tier.HOST: _AHEAD}


class SlotMap:
    """Occupancy of `count` slots in a row; `used` of them are taken."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.used = 0
        self._owner: list[int | None] = [None] * count

    def find(self, span: int) -> int | None:
        """The first free slot, or the last free row of `span` at a multiple of `span`; None if there is none."""
        if span == 1:
            return self._owner.index(None) if self.used < self.count else None
        owners, free = self._owner, [None] * span  # compared by C: a simulated step asks this a million times
        starts = self._places(span)
        return next((at for at in starts if owners[at] is None and owners[at : at + span] == free), None)

    def emptied_first(self, ranks: Mapping[int, tuple[int, ...]], span: int) -> list[int]:
        """The blocks in that place for `span` slots which is free first if those with `ranks` go, the greatest first;
        of places that become free with equal ranks it is the last one. Empty if none becomes free."""
        found, may_go = list[int](), {None, *ranks}
        first: tuple[int, ...] = ()
        for start in self._places(span):
            owner = self._owner[start]
            if owner is not None and ranks.get(owner, ()) <= first:
                continue  # no later than what was found; or it stays
            if may_go.issuperset(self._owner[start : start + span]):
                blocks = [block for block in dict.fromkeys(self._owner[start : start + span]) if block is not None]
                rank = min(map(ranks.__getitem__, blocks))
                if rank > first:
                    found, first = blocks, rank
        return found

    def _places(self, span: int) -> range:
        """Where places for `span` slots begin, the last one first."""
        return range((self.count // span - 1) * span, -1, -span)

    def take(self, span: int, block: int) -> int | None:
        """Have `block` take what `find` finds; returns that."""
        slot = self.find(span)
        if slot is not None:
            self._owner[slot : slot + span] = [block] * span
            self.used += span
        return slot

    def give(self, slot: int, span: int) -> None:
        """`span` taken slots from `slot` on become free."""
        self._owner[slot : slot + span] = [None] * span
        self.used -= span

    def free(self) -> list[int]:
        """The free slots, by number."""
        return [slot for slot, owner in enumerate(self._owner) if owner is None]


class PlaceMap:
    """Occupancy of places for `count` slots; places that take `used` slots are taken. A place is named by a number that
    no place of another span has."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.used = 0
        self._numbers = 0
        self._free: dict[int, list[int]] = {}
        """By span, in order."""
        self._of(1)  # has the numbers of slots

    def take(self, span: int, block: int) -> int | None:
        """Have `block` take the first free place for `span` slots; returns that, or None: only where so many slots are
        not free."""
        free = self._free[span] if span in self._free else self._of(span)
        if not free:
            return None
        self.used += span
        return free.pop(0)

    def give(self, place: int, span: int) -> None:
        """`place`, of `span` slots, becomes free."""
        insort(self._free[span], place)
        self.used -= span

    def free(self) -> list[int]:
        """The free places of spans that were asked for."""
        return [place for free in self._free.values() for place in free]

    def _of(self, span: int) -> list[int]:
        end = self._numbers + self.count // span * span
        self._free[span] = [*range(self._numbers, end, span)]
        self._numbers = end
        return self._free[span]
