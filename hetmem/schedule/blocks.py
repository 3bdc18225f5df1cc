"""Names blocks, their copies and the slots of each tier, and has the eviction policies, commands, links, and limits of
prefetching.

`Residency` owns the transitions between the states of a copy. Links have the same names in a run and in a simulated
plan. Commands are named tuples, because a step makes many, and a frozen dataclass takes three times as long to make.

`NextUse` is Belady's MIN (L. A. Belady, "A study of replacement algorithms", IBM Systems Journal 5(2), 1966) over the
schedule of the trace. `LRU` and `FIFO` serve comparisons, and without a trace `NextUse` behaves as `LRU`.

Note "sorted late": a rank depends on the next use of a block and on its copy, and both change for few blocks between
two queries. So `touch` only records blocks, and the next query ranks those again. The ranks are one sorted list:
inserting or removing one of a few thousand moves a few KiB, and reading from the end costs as much as is read.

Note "slots": slots of a pool are equal, so blocks of one slot never fragment it. A block with a larger span needs
adjacent slots. In one contiguous allocation (`SlotMap`) it starts at a multiple of its span, so blocks of one span
leave no gap that is too small for another (and the roles of a chunk fit into that many times its span, whatever was
allocated before). Large spans are allocated from the high end and single slots from the low end, which keeps the two
apart. Where each span has memory of its own, committed on first use (`PlaceMap`), every span has as many places as a
whole pool holds, and only the number of slots is limited: nothing fragments.
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
    """One role of one chunk. A copy takes `span` adjacent slots; `home` is the tier of the authoritative copy."""

    label: str
    home: Tier
    span: int = 1


class CopyState(Enum):
    """State of a copy; a block without a copy on a tier is ABSENT there."""

    WAITING = auto()
    LOADING = auto()
    VALID = auto()
    STALE = auto()


WAITING, LOADING, VALID, STALE = CopyState
"""By name: CPython takes ten times as long to find a member in its enumeration."""
PLACED = (VALID, LOADING)  # states in which a copy has its slot


@dataclass(slots=True)
class Copy:
    """A copy on DEVICE or in HOST staging. While `uses` > 0 it is not evicted; `waiting` of these uses wait for it to
    arrive. `load` is False while its content is undefined because it will be overwritten. `number` is its place in the
    order in which copies were added to their cache."""

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
        """Whether the copy may be evicted now."""
        return self.uses == 0 and not self.writing and (self.state is VALID or self.state is STALE)


class CopyFacts(NamedTuple):
    """What a policy may know of an idle copy.

    `next_use` counts uses (`trace.NEVER` if none is known); `last_use` and `fetched` are ticks of the residency's own
    counter; evicting a `dirty` copy takes a write-back, a clean one is dropped for free.
    """

    next_use: int
    last_use: int
    fetched: int
    dirty: bool


class EvictionPolicy(Protocol):
    """Ranks copies: the one with the greatest rank is evicted first. Must be deterministic."""

    def rank(self, facts: CopyFacts) -> tuple[int, ...]:
        """Return a tuple of fixed length, compared as tuples are."""


class NextUse:
    """Evict the copy used furthest in the future; among equals a clean one, then the least recently used."""

    def rank(self, facts: CopyFacts) -> tuple[int, ...]:
        """Rank by next use, then clean before dirty, then by how long ago the last use was."""
        return (facts.next_use, 0 if facts.dirty else 1, -facts.last_use)


class LRU:
    """Evict the copy that was used longest ago."""

    def rank(self, facts: CopyFacts) -> tuple[int, ...]:
        """Rank by how long ago the last use was."""
        return (-facts.last_use,)


class FIFO:
    """Evict the copy that was fetched first."""

    def rank(self, facts: CopyFacts) -> tuple[int, ...]:
        """Rank by how long ago the fetch was."""
        return (-facts.fetched,)


Rank = tuple[int, ...]
"""The copy with the greatest one is evicted first. The last number is the block; the one before it breaks ties."""


class Order:
    """The blocks of `copies`, sorted by `rank(block)`.

    Call `touch` after a change of what the rank of a block depends on, or of whether `copies` has it. A query costs
    O(log blocks) comparisons for each block touched since the last one.
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
        """Rank all blocks again at the next query."""
        self._outdated = True

    def ranks(self) -> Sequence[Rank]:
        """Return all ranks, the greatest last; valid until the next `touch`."""
        touched, copies = self._touched, self._copies
        if self._outdated:
            self._rank_of = {block: self._rank(block) for block in copies}
            self._ranks = sorted(self._rank_of.values())
            self._outdated = False
            touched.clear()
        ranks, rank_of = self._ranks, self._rank_of
        for block in touched:
            rank = self._rank(block) if block in copies else None
            if block in rank_of:
                before = rank_of[block]
                if rank == before:
                    continue
                del ranks[bisect_left(ranks, before)], rank_of[block]
            if rank is not None:
                insort(ranks, rank)
                rank_of[block] = rank
        touched.clear()
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
    """Forget the copy of `block` in `slot` of `tier`; no bytes move."""

    block: int
    tier: Tier
    slot: int


Command = Fetch | Write | Drop


@dataclass(slots=True)
class Counts:
    """What the residency has done so far, in blocks. A fault is a use that found no valid copy."""

    faults: dict[Tier, int] = field(default_factory=lambda: {Tier.DEVICE: 0, Tier.HOST: 0})
    fetches: dict[Tier, int] = field(default_factory=lambda: {Tier.DEVICE: 0, Tier.HOST: 0})
    evictions: dict[Tier, int] = field(default_factory=lambda: {Tier.DEVICE: 0, Tier.HOST: 0})


SMALL_BYTES = 1 << 20
"""Below this, handing a copy to a thread costs more than making the copy."""


class Link(Enum):
    """A direction between two tiers."""

    HOST_TO_DEVICE = "host_to_device"
    DEVICE_TO_HOST = "device_to_host"
    NVME_READ = "nvme_read"
    NVME_WRITE = "nvme_write"

    __hash__ = object.__hash__  # members are singletons; the hash of `Enum` is slow Python, called for every copy


@dataclass(slots=True)
class LinkUse:
    """Bytes that crossed a link and the seconds for which it was busy."""

    bytes: int = 0
    seconds: float = 0.0


_IN_FLIGHT_BYTES = 1 << 30
_IN_FLIGHT_PART = 16


def in_flight_bytes(device_bytes: int) -> int:
    """Return how many bytes of gradients may be in flight to their homes at one time, and of copies to a tier: enough
    to keep a link busy, and a small part of a device of `device_bytes`, which holds both meanwhile."""
    return min(_IN_FLIGHT_BYTES, device_bytes // _IN_FLIGHT_PART)


_AHEAD = 2


def ahead_at_once(slot_bytes: int, device_bytes: int) -> dict[Tier, int]:
    """Return by tier how many prefetched copies may wait for their use: more on a device of `device_bytes` whose
    `slot_bytes` are small, and few reads from NVMe, as more would displace staged copies that are used sooner."""
    return {Tier.DEVICE: max(_AHEAD, in_flight_bytes(device_bytes) // max(1, slot_bytes)), Tier.HOST: _AHEAD}


class SlotMap:
    """Occupancy of `count` adjacent slots, of which `used` are taken."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.used = 0
        self._owner: list[int | None] = [None] * count

    def find(self, span: int) -> int | None:
        """Return the first free slot, or the last free row at a multiple of `span`; None if there is none."""
        if span == 1:
            return self._owner.index(None) if self.used < self.count else None
        owners, free = self._owner, [None] * span  # slices compare in C: a simulated step calls this a million times
        starts = self._starts(span)
        return next((at for at in starts if owners[at] is None and owners[at : at + span] == free), None)

    def cheapest_row(self, ranks: Mapping[int, tuple[int, ...]], span: int) -> list[int]:
        """Return the blocks to evict from one row of `span` slots, where blocks with `ranks` may be evicted, greatest
        first: of all such rows the one whose lowest rank is greatest, the last of equal ones. Empty if no row can be
        freed."""
        found, may_go = list[int](), {None, *ranks}
        first: tuple[int, ...] = ()
        for start in self._starts(span):
            owner = self._owner[start]
            if owner is not None and ranks.get(owner, ()) <= first:
                continue  # not better than the row found so far, or not evictable
            if may_go.issuperset(self._owner[start : start + span]):
                blocks = [block for block in dict.fromkeys(self._owner[start : start + span]) if block is not None]
                rank = min(map(ranks.__getitem__, blocks))
                if rank > first:
                    found, first = blocks, rank
        return found

    def _starts(self, span: int) -> range:
        """Return where rows of `span` slots start, the last one first."""
        return range((self.count // span - 1) * span, -1, -span)

    def take(self, span: int, block: int) -> int | None:
        """Give `block` the slots that `find` returns, and return the first; None if there are none."""
        slot = self.find(span)
        if slot is not None:
            self._owner[slot : slot + span] = [block] * span
            self.used += span
        return slot

    def give(self, slot: int, span: int) -> None:
        """Free the `span` slots that start at `slot`."""
        self._owner[slot : slot + span] = [None] * span
        self.used -= span

    def free(self) -> list[int]:
        """Return the numbers of the free slots."""
        return [slot for slot, owner in enumerate(self._owner) if owner is None]


class PlaceMap:
    """Occupancy of the places of each span in a pool of `count` slots, of which `used` are taken. The number of a place
    is unique across spans."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.used = 0
        self._numbers = 0
        self._free: dict[int, list[int]] = {}
        """The free places by span, in ascending order."""
        self._places_of(1)  # so that places of one slot have the numbers of slots

    def take(self, span: int, block: int) -> int | None:
        """Give `block` the first free place of `span` slots and return its number; None if fewer than `span` slots are
        free."""
        free = self._free[span] if span in self._free else self._places_of(span)
        if not free:
            return None
        self.used += span
        return free.pop(0)

    def give(self, place: int, span: int) -> None:
        """Free `place`, which has `span` slots."""
        insort(self._free[span], place)
        self.used -= span

    def free(self) -> list[int]:
        """Return the free places of all spans used so far."""
        return [place for free in self._free.values() for place in free]

    def _places_of(self, span: int) -> list[int]:
        end = self._numbers + self.count // span * span
        self._free[span] = [*range(self._numbers, end, span)]
        self._numbers = end
        return self._free[span]
