"""Which idle copy to give up when a slot is needed. Pure: ranks facts about a copy, touches nothing.

`NextUse` is Belady's MIN (L. A. Belady, "A study of replacement algorithms", IBM Systems Journal 5(2), 1966) over
the schedule of the trace; `LRU` and `FIFO` are there to compare with, and LRU is what NextUse does without a trace.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol


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
        ...


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
