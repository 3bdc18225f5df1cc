"""Which idle copy to give up when a slot is needed: policies rank copies, `Order` keeps blocks by rank. Pure.

`NextUse` is Belady's MIN (L. A. Belady, "A study of replacement algorithms", IBM Systems Journal 5(2), 1966) over
the schedule of the trace; `LRU` and `FIFO` are there to compare with, and LRU is what NextUse does without a trace.

Note "sorted late": a rank depends on the next use of a block and on its copy, and both change for few blocks between
two questions. So `touch` only notes blocks, and the next question ranks those again. The ranks are one sorted list: to
put one of a few thousand in, or to take it out, moves a few KiB, and to read from the end on costs what is read.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from hetmem.schedule.trace import NEVER


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


NOTHING = -2 * NEVER
"""Less than any rank begins with."""

Rank = tuple[int, ...]
"""The greatest is given up first. Its last number is the block, the one before tells copies of equal rank apart."""


class Order:
    """The blocks of `copies` by `rank(block)`; those without one (None) may not be given up.

    Call `touch` after a change of what `rank` depends on. A question costs O(log blocks) comparisons for each
    block that was touched since the last one.
    """

    def __init__(self, copies: Mapping[int, object], rank: Callable[[int], Rank | None]) -> None:
        self._copies = copies
        self._rank = rank
        self._rank_of: dict[int, Rank] = {}
        self._ranks: list[Rank] = []
        self._touched: set[int] = set()
        self.touch: Callable[[Iterable[int]], None] = self._touched.update
        """The ranks of so many blocks may have changed."""
        self._outdated = False

    def renew(self) -> None:
        """Every rank may have changed."""
        self._outdated = True

    def ranks(self) -> Sequence[Rank]:
        """All ranks, the greatest last, as they are until the next `touch`."""
        if self._outdated:
            found = map(self._rank, self._copies)
            self._rank_of = {rank[-1]: rank for rank in found if rank is not None}
            self._ranks = sorted(self._rank_of.values())
            self._outdated = False
            self._touched.clear()
        elif self._touched:
            self._update()
        return self._ranks

    def at_least(self, least: int) -> Sequence[Rank]:
        """The ranks that do not begin with less than `least`, the greatest first."""
        ranks = self.ranks()
        return ranks[bisect_left(ranks, (least,)) :][::-1]

    def _update(self) -> None:
        ranks, rank_of, rank_now = self._ranks, self._rank_of, self._rank
        for block in self._touched:
            rank, before = rank_now(block), rank_of.get(block)
            if before is not None:
                if rank == before:
                    continue
                del ranks[bisect_left(ranks, before)]
                if rank is None:
                    del rank_of[block]
            if rank is not None:
                insort(ranks, rank)
                rank_of[block] = rank
        self._touched.clear()

    def first(
        self, slots: int, span: Callable[[int], int], least: int = NOTHING, spared: Collection[int] = ()
    ) -> list[int]:
        """The first blocks that take `slots` slots together, all there are if they do not suffice.

        Without those whose rank begins with less than `least`, and without `spared`.
        """
        ranks = self.ranks() if self._touched or self._outdated else self._ranks
        if slots == 1 and ranks and ranks[-1][0] >= least and ranks[-1][-1] not in spared:
            return [ranks[-1][-1]]  # as the loop would, most often
        chosen: list[int] = []
        for rank in reversed(ranks):
            if slots <= 0 or rank[0] < least:
                break
            block = rank[-1]
            if block not in spared:
                chosen.append(block)
                slots -= span(block)
        return chosen
