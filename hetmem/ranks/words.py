"""The words that the ranks of a group share, in the first pages of its memory: numbers, and short texts.

Each rank writes its own row, but for the table of homes, which is written under a lock, and the words of a parameter,
which the rank whose turn it is writes. Knows no model and waits for nothing.
"""

from __future__ import annotations

import mmap
import threading
from enum import IntEnum
from typing import Any

import numpy as np

from hetmem.base.units import round_up

PLACE_BYTES, SAID_BYTES = 256, 4096
"""The longest text about where a rank is, and of what ranks compare."""
_SAVES = 64
"""How many files of rank 0 the others may come late for."""
_HOMES_OF_A_CHUNK = 16

_FENCE = threading.Lock()


def fence() -> None:
    """Order what this thread has written, or read, before what comes next, also where the processor would not."""
    with _FENCE:
        pass


class Doing(IntEnum):
    """What a rank has come to, as it meets its counterparts on other machines."""

    BACKWARD = 1
    STEP = 2


class Words:
    """Arrays over `memory`, which is zero where a group begins, for `ranks` ranks and a model with so many `parameters`
    in so many `chunks`, whose homes take so many `pages` of the system."""

    def __init__(self, memory: memoryview | None, ranks: int, parameters: int, chunks: int, pages: int = 0) -> None:
        """Lay the arrays out; without `memory` only `nbytes` is known."""
        self._memory, self.nbytes = memory, 0
        self.nonce = self._array((1,))
        """A number that no other group has."""
        self.table = self._array((chunks * _HOMES_OF_A_CHUNK, 4))
        """The table of homes: chunk, role, offset, bytes."""
        self.table_rows, self.home_bytes, self.drive_bytes = (self._array((1,)) for _ in range(3))
        self.entered, self.ended, self.finished = (self._array((ranks,)) for _ in range(3))
        self.passed, self.filled = self._array((ranks, parameters)), self._array((parameters,))
        """See `schedule.turns`."""
        self.offered, self.computed_parts = (self._array((ranks, chunks)) for _ in range(2))
        """See `updates`."""
        self.met = self._array((ranks,))
        """How many meetings each rank has come to."""
        self.waiting, self.polls, self.signs = (self._array((ranks,)) for _ in range(3))
        """Whether a rank waits for others and has nothing to do itself; how often it has looked since, and how often it
        has given a sign that it goes on."""
        self.summed, self.brought = self._array((ranks,)), self._array((ranks,))
        """How many sums of all machines each rank has written its part of; how often it has waited for their writes."""
        self.late = self._array((ranks,))
        """The last backward in which each rank has made gradients that came late, for a backward of their own."""
        self.has_left, self.steps = self._array((ranks,)), self._array((ranks,))
        self.has_gradient = self._array((ranks, parameters), np.uint8)
        """Whether `p.grad` was there as the rank entered its last backward or step."""
        self.waited, self.waited_for = self._array((ranks, 3)), self._array((ranks, ranks))
        self.computed, self.last, self.batch, self.step_nanoseconds = (self._array((ranks,)) for _ in range(4))
        self.moved, self.exchanged = (self._array((ranks, 2)) for _ in range(2))
        """See `figures`."""
        self.handed_out = self._array((ranks,))
        """Whether the program of a rank ever got the states of the optimizer that steps."""
        self.updating, self.updated = (self._array((ranks,)) for _ in range(2))
        """The last step in which each rank has begun to change homes, and the last one in which it has ended that."""
        self.saves, self.saved = self._array((_SAVES, 2)), self._array((1,))
        """The last files that rank 0 has saved, and whether that has failed: see `saves`. How many it has saved."""
        self.offer = self._array((3,))
        """The save whose blocks rank 0 offers, 0 if it offers none; its process and the descriptor of their table."""
        self.wrote = self._array((ranks,))
        """How many pages of homes the program of a rank had written as that entered its last backward or step."""
        self.page_hashes = self._array((ranks, pages))
        """Hashes of those pages, never 0; 0 of all others. Memory that is never written takes none."""
        self.page_shown = self._array((ranks, mmap.PAGESIZE), np.uint8)
        """What each rank sees in a page that differs."""
        self._places = self._array((ranks, PLACE_BYTES), np.uint8)
        self._said = self._array((2, ranks, SAID_BYTES), np.uint8)
        self._errors = self._array((ranks, PLACE_BYTES), np.uint8)

    def _array(self, shape: tuple[int, ...], dtype: Any = np.int64) -> Any:
        count, start = int(np.prod(shape)), self.nbytes
        self.nbytes = round_up(start + count * np.dtype(dtype).itemsize, 64)  # rows of different ranks share few lines
        if self._memory is None:
            return None
        return np.frombuffer(self._memory, dtype, count, start).reshape(shape)

    # ---- texts -------------------------------------------------------------------------------------------------

    def place(self, rank: int) -> str:
        """Return where `rank` says that it is."""
        return _read(self._places[rank])

    def set_place(self, rank: int, text: str) -> None:
        """Have `rank` say that it is at `text`."""
        _write(self._places[rank], text)

    def error(self, rank: int) -> str:
        """Return the error after which `rank` takes part in nothing any more; "" if there was none."""
        return _read(self._errors[rank])

    def set_error(self, rank: int, text: str) -> None:
        """Have `rank` say that an error has ended its part."""
        _write(self._errors[rank], text or "an error")

    def said(self, meeting: int, rank: int) -> str:
        """Return what `rank` says at `meeting`; another one may be said two meetings later."""
        return _read(self._said[meeting % 2, rank])

    def say(self, meeting: int, rank: int, text: str) -> None:
        """Have `rank` say `text` at `meeting`."""
        _write(self._said[meeting % 2, rank], text)


def _write(target: Any, text: str) -> None:
    raw = np.frombuffer(text.encode()[: len(target) - 1], np.uint8)
    target[: len(raw)] = raw
    target[len(raw)] = 0


def _read(source: Any) -> str:
    return bytes(source).split(b"\0", 1)[0].decode(errors="replace")
