"""A block, and a copy of it on a cached tier. Pure data; `Residency` owns the transitions between states."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

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
