"""Blocks in the order in which they are given up, kept up to date by saying what has changed. Pure.

Note "lazy heap": a rank depends on the next use of a block and on its copy, and both change for few blocks between two
questions. So `touch` only notes blocks, and the next question ranks those again; an entry of the heap that is not the
block's present one is skipped when it surfaces (a heap with lazy deletion; M. T. Goodrich, R. Tamassia, "Algorithm
Design", 2002, section 2.4).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Generator, Iterable, Mapping
from contextlib import closing

Key = tuple[int, ...]
"""A rank with its signs turned, so that the least is given up first, and the copy's number, which makes it unique."""

_SLACK = 64


class Order:
    """The blocks of `copies` by `key(block)`, the least first; those without one (None) may not be given up.

    Whoever changes what `key` depends on must say so with `touch`. A question costs O(log blocks) for each block that
    was touched since the last one, and for each in the answer.
    """

    def __init__(self, copies: Mapping[int, object], key: Callable[[int], Key | None]) -> None:
        self._copies = copies
        self._key = key
        self._keys: dict[int, Key] = {}
        self._heap: list[tuple[Key, int]] = []
        self._touched: set[int] = set()
        self._outdated = False

    def touch(self, blocks: Iterable[int]) -> None:
        """The keys of `blocks` may have changed."""
        self._touched.update(blocks)

    def renew(self) -> None:
        """Every key may have changed."""
        self._outdated = True

    def least(
        self, slots: int, spans: Callable[[int], int], most: int | None = None, spared: Collection[int] = ()
    ) -> list[int]:
        """The first blocks that take `slots` slots together, all there are if they do not suffice.

        Without those whose key begins with more than `most`, and without `spared`.
        """
        if slots <= 0:
            return []
        self._update()
        first = self._first()
        if first is None or (most is not None and first[0][0] > most):
            return []
        if first[1] not in spared and spans(first[1]) >= slots:
            return [first[1]]
        chosen: list[int] = []
        with closing(self.ascending(most)) as blocks:
            for _, block in blocks:
                if block not in spared:
                    chosen.append(block)
                    slots -= spans(block)
                    if slots <= 0:
                        break
        return chosen

    def ascending(self, most: int | None = None) -> Generator[tuple[Key, int], None, None]:
        """Keys and blocks, the least first, up to those whose key begins with more than `most`.

        To be closed before anything else is asked: what was looked at goes back then.
        """
        self._update()
        heap, keys = self._heap, self._keys
        seen: list[tuple[Key, int]] = []
        try:
            while heap:
                key, block = heap[0]
                if keys.get(block) != key or (seen and seen[-1] == heap[0]):  # it changed, and may have changed back
                    heapq.heappop(heap)
                    continue
                if most is not None and key[0] > most:
                    return
                seen.append(heapq.heappop(heap))
                yield key, block
        finally:
            for entry in seen:
                heapq.heappush(heap, entry)

    def _first(self) -> tuple[Key, int] | None:
        """The present entry of the block that comes first."""
        heap, keys = self._heap, self._keys
        while heap:
            entry = heap[0]
            if keys.get(entry[1]) == entry[0]:
                return entry
            heapq.heappop(heap)
        return None

    def _update(self) -> None:
        if self._outdated or len(self._heap) > 2 * len(self._copies) + _SLACK:
            keys = {block: self._key(block) for block in self._copies}
            self._keys = {block: key for block, key in keys.items() if key is not None}
            self._heap = [(key, block) for block, key in self._keys.items()]
            heapq.heapify(self._heap)
            self._outdated = False
        else:
            for block in self._touched:
                key = self._key(block)
                if key is None:
                    self._keys.pop(block, None)
                elif self._keys.get(block) != key:
                    self._keys[block] = key
                    heapq.heappush(self._heap, (key, block))
        self._touched.clear()
