"""Names blocks, their copies on the tiers, the commands about them, their links, and how far ahead of uses they come.

`Residency` owns the transitions between the states of a copy. The names of links are the same where transfers are made
and where they are simulated. Commands are named tuples: many are made, and a frozen dataclass takes three times as long
to make.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

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

    acquires: int = 0
    faults: dict[Tier, int] = field(default_factory=lambda: {Tier.DEVICE: 0, Tier.HOST: 0})
    fetches: dict[Tier, int] = field(default_factory=lambda: {Tier.DEVICE: 0, Tier.HOST: 0})
    evictions: dict[Tier, int] = field(default_factory=lambda: {Tier.DEVICE: 0, Tier.HOST: 0})
    writes: int = 0


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


@dataclass(frozen=True, slots=True)
class Prefetch:
    """Says that blocks of the next `uses_ahead` uses are fetched. At most `in_flight` copies are on the device ahead of
    their use, more if they are small; at most `in_flight` reads from NVMe are under way, as more of them displace what
    staging holds for uses that come sooner."""

    uses_ahead: int = 8
    in_flight: int = 2

    def at_once(self, slot_bytes: int, device_bytes: int) -> dict[Tier, int]:
        """Return how many copies in device slots of `slot_bytes` are fetched at once beside a device of `device_bytes`,
        and how many reads from NVMe."""
        small = in_flight_bytes(device_bytes) // max(1, slot_bytes)
        return {Tier.DEVICE: max(self.in_flight, small), Tier.HOST: self.in_flight}
