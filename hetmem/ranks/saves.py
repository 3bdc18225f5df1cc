"""Files of the whole group, which rank 0 writes, alone or while the others wait for it.

Whether the others will come cannot be known: a program saves on all ranks, or on rank 0. So rank 0 writes at once, and
notes which file it has written after how many steps; another rank that saves waits for that note. Of a save in the
background the note comes at its end, from the thread that writes.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

from hetmem.errors import PeerError
from hetmem.ranks.waits import Waits, never
from hetmem.ranks.words import Words, fence

T = TypeVar("T")


class Saves:
    """The files that `rank` saves."""

    def __init__(self, rank: int, words: Words, waits: Waits) -> None:
        self._rank, self._words, self._waits = rank, words, waits
        self._steps, self._times = 0, Counter[str]()
        """How often each path was saved to since that step."""
        self.end_last: Callable[[], object] = never
        """Waits, on another rank than 0, for the last save in the background."""

    def _refuse_half_stepped(self) -> None:
        """Wait until the step that rank 0 has ended has ended on all ranks. Raises `PeerError` if it cannot."""
        words = self._words
        try:
            self._waits.until(lambda: not (words.updating > words.updated.min()).any(), "the end of the last step")
        except PeerError as error:
            raise PeerError(
                "weights are partly those of the next step, as a rank has ended within one: go on from the last file, "
                "in new processes"
            ) from error

    def by_rank_0(self, path: str, save: Callable[[], None]) -> None:
        """Return once rank 0 has done `save()`, which writes the file `path`, also after an error has ended the part of
        any rank. Raises its error on rank 0, and `PeerError` on the others, or if a step that has not ended on all
        ranks has changed homes."""
        key = self.key(path)
        if self._rank == 0:
            self.begin(key, save)
            self.note(key, failed=False)
        else:
            self.await_rank_0(path, key)

    def begin(self, key: int, save: Callable[[], T]) -> T:
        """Return `save()`, of rank 0, which writes a file or begins to. Notes an error."""
        try:
            with self._waits.at("hetmem.save", ends=False, alone=True):
                self._refuse_half_stepped()
                return save()
        except BaseException:
            self.note(key, failed=True)
            raise

    def await_rank_0(self, path: str, key: int) -> None:
        """Wait until rank 0 has noted the save of `path` that has this `key`. Raises `PeerError` if it has failed."""
        with self._waits.at("hetmem.save"):
            self._waits.until(lambda: self.is_noted(key), f"the file {path!r} of rank 0")
        row = [*self._words.saves[:, 0]].index(key)
        if self._words.saves[row, 1]:
            raise PeerError(f"rank 0 has failed in hetmem.save of {path!r}: its error says why")

    def is_noted(self, key: int) -> bool:
        """Return whether rank 0 has ended the save that has this `key`, one of its last ones."""
        return key in self._words.saves[:, 0]

    def key(self, path: str) -> int:
        """Return a number for the save that begins: that of `path`, after so many steps, for the n-th time."""
        self.end_last()
        path = os.path.realpath(path)
        if (steps := int(self._words.steps[self._rank])) != self._steps:
            self._steps, self._times = steps, Counter()
        self._times[path] += 1
        text = f"{path}\0{steps}\0{self._times[path]}"
        return int.from_bytes(hashlib.blake2b(os.fsencode(text), digest_size=7).digest(), "little") + 1

    def note(self, key: int, *, failed: bool) -> None:
        """Note, on any thread of rank 0, that the save that has this `key` has ended; what was noted first counts."""
        if self.is_noted(key):
            return
        words = self._words
        row = words.saves[int(words.saved[0]) % len(words.saves)]
        row[:] = 0, failed
        fence()
        row[0] = key
        words.saved[0] += 1
        self._waits.sign()
