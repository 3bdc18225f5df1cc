"""Files of the whole group, which rank 0 writes, alone or with the others.

Whether the others will come cannot be known: a program saves on all ranks, or on rank 0. So rank 0 begins at once, and
offers the blocks that lie in homes: each rank that comes takes one after the other, as rank 0 does. At the end rank 0
notes which file it has written after how many steps, and another rank that saves waits for that note. A save in the
background offers nothing, and its note comes from the thread that writes.
"""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import numpy as np

from hetmem.errors import PeerError
from hetmem.ranks.memory import make_file, open_file
from hetmem.ranks.waits import Waits, never
from hetmem.ranks.words import Words, fence

T = TypeVar("T")
BlockOfHome = tuple[int, int, int]
"""The first byte of a block in the mapping of homes, its bytes, and its first byte in the file."""
_NOT_WRITTEN = -1


class SharedBlocks:
    """Blocks of the open `file` that several ranks write: a table in the file `descriptor`, in memory without a name.
    Any thread may take one."""

    def __init__(self, descriptor: int, file: int) -> None:
        self._descriptor, self.file, self._lock = descriptor, file, threading.Lock()
        table = np.frombuffer(mmap.mmap(descriptor, 0), np.int64).reshape(-1, 4)
        self._head, self._rows = table[0], table[1:]
        """Key, descriptor of the file on rank 0, blocks taken, and 1 + the rank that has failed; then the blocks."""

    @staticmethod
    def table(key: int, file: int, blocks: Sequence[BlockOfHome]) -> bytes:
        """Return the content of a table, no block of which is taken."""
        return np.array([(key, file, 0, 0), *((*block, _NOT_WRITTEN) for block in blocks)], np.int64).tobytes()

    @property
    def key(self) -> int:
        """The number of the save."""
        return int(self._head[0])

    @property
    def file_of_rank_0(self) -> int:
        """The descriptor that rank 0 has of the file."""
        return int(self._head[1])

    @property
    def left(self) -> int:
        """How many blocks no rank has taken."""
        return len(self._rows) - int(self._head[2])

    @property
    def failed(self) -> int | None:
        """The rank that could not write a block that it had taken."""
        return int(self._head[3]) - 1 if self._head[3] else None

    @property
    def checks(self) -> list[int]:
        """The checksum of each block; negative for those that are not written."""
        return [*map(int, self._rows[:, 3])]

    def is_written(self) -> bool:
        """Return whether all blocks are."""
        return bool((self._rows[:, 3] != _NOT_WRITTEN).all())

    def take(self) -> tuple[int, BlockOfHome] | None:
        """Return the number of the next block, and the block; None if none is left."""
        with self._lock:  # the other one is the process's
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX)
            try:
                if not self.left:
                    return None
                number = int(self._head[2])
                self._head[2] = number + 1
            finally:
                fcntl.lockf(self._descriptor, fcntl.LOCK_UN)
        start, nbytes, offset, _ = map(int, self._rows[number])
        return number, (start, nbytes, offset)

    def wrote(self, number: int, check: int) -> None:
        """Note that a block, which has this checksum, is in the file."""
        fence()
        self._rows[number, 3] = check

    def end(self, failed: int | None = None) -> None:
        """Leave no block to take; `failed`: the rank that has failed."""
        with self._lock:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX)
            self._head[2] = len(self._rows)
            if failed is not None:
                self._head[3] = 1 + failed
            fcntl.lockf(self._descriptor, fcntl.LOCK_UN)


class Saves:
    """The files that `rank` saves."""

    def __init__(self, rank: int, words: Words, waits: Waits) -> None:
        self._rank, self._words, self._waits = rank, words, waits
        self._steps, self._times = 0, Counter[str]()
        """How often each path was saved to since that step."""
        self._key = 0
        """That of the file that rank 0 is writing, if the others may take blocks of it."""
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

    def together(self, path: str, save: Callable[[], None], write: Callable[[SharedBlocks], None]) -> None:
        """Return once rank 0 has done `save()`, which writes the file `path`, also after an error has ended the part of
        any rank. Other ranks `write` blocks that it has `offered`. Raises the error of each rank there, and `PeerError`
        on the others, or if a step that has not ended on all ranks has changed homes."""
        key = self.key(path)
        if self._rank:
            self.await_rank_0(path, key, write)
            return
        self._key = key
        try:
            self.begin(key, save)
        finally:
            self._key = 0
        self.note(key, failed=False)

    def offered(
        self, path: str, file: int, blocks: Sequence[BlockOfHome], write: Callable[[SharedBlocks], None]
    ) -> list[int]:
        """Write `blocks` to `file`, which is to become `path`, with all ranks that save it too; return their checksums.
        Raises `PeerError` if one of those has failed."""
        descriptor = make_file()
        try:
            os.pwrite(descriptor, SharedBlocks.table(self._key, file, blocks), 0)
            shared = SharedBlocks(descriptor, file)
            offer = self._words.offer
            offer[1:] = os.getpid(), descriptor
            fence()
            offer[0] = self._key
            try:
                write(shared)
                self._waits.until(lambda: shared.failed is not None or shared.is_written(), f"blocks of {path!r}")
            finally:
                offer[0] = 0
                shared.end()
        finally:
            os.close(descriptor)
        if shared.failed is not None:
            rank = self._waits.first + shared.failed
            raise PeerError(f"rank {rank} has failed in hetmem.save of {path!r}: its error says why")
        return shared.checks

    @contextmanager
    def _accepted(self, key: int) -> Iterator[SharedBlocks | None]:
        """Yield what rank 0 offers of the save that has this `key`; None if it does not, or no more."""
        process, descriptor = map(int, self._words.offer[1:])
        opened = list[int]()
        try:
            opened.append(open_file(process, descriptor))
            blocks = SharedBlocks(opened[0], -1)
            opened.append(open_file(process, blocks.file_of_rank_0))
            blocks.file = opened[1]
            fence()
            accepted = blocks if int(self._words.offer[0]) == key == blocks.key else None  # it was there meanwhile
        except (OSError, ValueError):  # closed, and perhaps another file by now
            accepted = None
        try:
            yield accepted
        finally:
            for each in opened:
                os.close(each)

    def begin(self, key: int, save: Callable[[], T]) -> T:
        """Return `save()`, of rank 0, which writes a file or begins to. Notes an error."""
        try:
            with self._waits.at("hetmem.save", ends=False, alone=True):
                self._refuse_half_stepped()
                return save()
        except BaseException:
            self.note(key, failed=True)
            raise

    def await_rank_0(self, path: str, key: int, write: Callable[[SharedBlocks], None] | None = None) -> None:
        """Wait until rank 0 has noted the save of `path` that has this `key`, and `write` what it offers meanwhile.
        Raises `PeerError` if it has failed, or the error of `write`."""
        errors, helps = list[BaseException](), write is not None

        def serve() -> None:
            nonlocal helps
            if not helps or int(self._words.offer[0]) != key:
                return
            helps = False
            with self._accepted(key) as blocks:
                if write is None or blocks is None:
                    return
                try:
                    write(blocks)
                except BaseException as error:  # raised once rank 0 knows
                    blocks.end(failed=self._rank)
                    errors.append(error)

        with self._waits.at("hetmem.save"):
            self._waits.until(lambda: self.is_noted(key), f"the file {path!r} of rank 0", serve)
        if errors:
            raise errors[0]
        row = [*self._words.saves[:, 0]].index(key)
        if self._words.saves[row, 1]:
            raise PeerError(f"rank {self._waits.first} has failed in hetmem.save of {path!r}: its error says why")

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
