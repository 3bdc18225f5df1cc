"""What `Residency` tells the runtime to do, and what it counted of that.

Commands are named tuples: many are made, and a frozen dataclass takes three times as long to make.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from hetmem.schedule.trace import Tier


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
