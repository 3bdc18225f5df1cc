"""Which updates of chunks the ranks of a group may begin, and which all have computed their tiles of.

Both are counts in the words that ranks share, which a rank looks at, so that none waits for another one with a worker,
or with one of the updates that may run at once: two that did could wait for each other for ever.

A rank offers a chunk once all its gradients of this step are at home. The update may begin on any rank when all have
offered the chunk: then its home has the sum. What a rank has offered it neither uses nor adds to before the step ends.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from hetmem.ranks.words import Words, fence


class SharedUpdates:
    """The updates of one `rank`, by the number of their chunk. All ranks update each chunk equally often."""

    def __init__(self, rank: int, words: Words, failed: Callable[[BaseException], None]) -> None:
        """`failed` is called with the error of a task, on the thread that has computed it."""
        self._rank, self._words, self._failed = rank, words, failed
        self._begun = np.zeros_like(words.computed_parts[rank])
        """How many updates of each chunk this rank has begun."""

    def under_way(self) -> bool:
        """Return whether this rank computes its part of any update."""
        return bool((self._begun > self._words.computed_parts[self._rank]).any())

    def offer(self, chunks: Sequence[int]) -> None:
        """Have the next update of each of `chunks` begin as far as this rank is concerned."""
        fence()
        self._words.offered[self._rank, chunks] = self._begun[chunks] + 1

    def offered_by_all(self, chunks: Sequence[int]) -> list[bool]:
        """Return whether all ranks have offered the next update of each of `chunks`."""
        found: list[bool] = (self._words.offered[:, chunks] > self._begun[chunks]).all(0).tolist()
        fence()
        return found

    def withdraw(self, chunks: Sequence[int]) -> None:
        """Take the offers of `chunks`, which not all ranks have made, back."""
        self._words.offered[self._rank, chunks] = self._begun[chunks]

    def begin(self, chunks: Sequence[int]) -> None:
        """Count an update of each of `chunks` that this rank begins."""
        self._begun[chunks] += 1

    def counted(self, chunks: Sequence[int], tasks: Sequence[Callable[[], None]]) -> list[Callable[[], None]]:
        """Return `tasks`, this rank's part of an update of `chunks`, which count it as the last of them ends, on any
        thread; an update one of whose tasks has failed is never counted."""
        part = _CountedTasks(len(tasks), partial(self._count, chunks), self._failed)
        return [partial(part.run, task) for task in tasks]

    def computed_by_all(self, chunks: Sequence[int]) -> bool:
        """Return whether all ranks have computed their part of each update of `chunks` that this rank has begun."""
        found = bool((self._words.computed_parts[:, chunks] >= self._begun[chunks]).all())
        fence()
        return found

    def _count(self, chunks: Sequence[int]) -> None:
        fence()
        self._words.computed_parts[self._rank, chunks] += 1


class _CountedTasks:
    """Tasks of an update, the last of which to end calls `count`; without any, it is called at once."""

    def __init__(self, tasks: int, count: Callable[[], None], failed: Callable[[BaseException], None]) -> None:
        self._left, self._count, self._failed, self._lock = tasks, count, failed, threading.Lock()
        if not tasks:
            count()

    def run(self, task: Callable[[], None]) -> None:
        try:
            task()
        except BaseException as error:
            self._failed(error)  # the others wait for this part
            raise
        with self._lock:
            self._left -= 1
            last = not self._left
        if last:
            self._count()
