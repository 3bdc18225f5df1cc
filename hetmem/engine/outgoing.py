"""Keeps the homes of one model as they are until a save in the background has written them to its file.

A write to a home waits for its chunk here. The file and its threads are the checkpoint's.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Protocol

from hetmem.engine.events import EventLog
from hetmem.errors import ManageError
from hetmem.memory.chunk import Chunk
from hetmem.memory.interrupts import HELD_BACK

_POLL_SECONDS = 0.05


class ChunkWriter(Protocol):
    """A save in the background."""

    process: int
    """The process whose threads write it."""

    def is_out(self, chunks: Collection[Chunk]) -> bool:
        """Return whether it reads homes of none of `chunks` any more."""

    def call_when_out(self, chunks: Collection[Chunk] | None, call: Callable[[], object]) -> None:
        """Write `chunks` (None: all) next, and then `call`, once, on any thread. `chunks` None: when all has ended."""

    def raise_unseen(self) -> None:
        """Raise the error with which it has ended, unless that was raised already."""


class Outgoing:
    """The save in the background of one model, of which there is at most one."""

    def __init__(self, events: EventLog) -> None:
        self.save: ChunkWriter | None = None
        """The save that runs."""
        self.failed: ChunkWriter | None = None
        """The last one, if it failed and its error was not raised yet."""
        self.saves = self.saved_bytes = 0
        self.save_seconds = 0.0
        """Of all that have ended with a file."""
        self.wait_seconds = 0.0
        """Seconds that training has waited for chunks that were not written yet."""
        self._events = events

    def holds(self, chunks: Collection[Chunk]) -> bool:
        """Return whether homes of `chunks` must stay as they are for now."""
        save = self.save
        return save is not None and not save.is_out(chunks)

    def ask_for(self, chunks: Collection[Chunk]) -> None:
        """Have a save that runs write `chunks` next."""
        if (save := self.save) is not None:
            save.call_when_out(chunks, bool)

    def wait_for(self, chunks: Collection[Chunk]) -> None:
        """Wait until homes of `chunks` may be written to."""
        if (save := self.save) is not None and not save.is_out(chunks):
            before = self._events.here()
            with self.waiting():
                _wait(save, chunks)
            self._events.waited(before)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time of the body in `wait_seconds`."""
        began = self._events.now()
        try:
            yield
        finally:
            self.wait_seconds += self._events.now() - began

    def wait_for_all(self) -> None:
        """Wait until no save runs."""
        if (save := self.save) is not None:
            _wait(save, None)

    def ended(self, save: ChunkWriter, nbytes: int | None, seconds: float) -> None:
        """Note that `save` has ended, after `seconds`: with a file of `nbytes`, or (None) with an error."""
        if nbytes is None:
            self.failed = save
        else:
            self.saves, self.saved_bytes = self.saves + 1, self.saved_bytes + nbytes
            self.save_seconds += seconds
        self.save = None

    def raise_error(self) -> None:
        """Raise the error of a save that failed, if `wait` has not raised it."""
        failed, self.failed = self.failed, None
        if failed is not None:
            failed.raise_unseen()


def _wait(save: ChunkWriter, chunks: Collection[Chunk] | None) -> None:
    if os.getpid() != save.process:
        raise ManageError(
            "a save in the background is the parent's of this forked process: wait for it before the fork"
        )
    out = threading.Event()
    save.call_when_out(chunks, out.set)
    while not out.wait(_POLL_SECONDS):
        HELD_BACK.raise_here()
