"""Says what a command is doing once that takes longer than a moment."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType

LONG_SECONDS = 2.0
"""How long a command is silent."""


class Stages:
    """Calls `say` with the stage that runs `LONG_SECONDS` after the block has begun, and with each later one as it
    begins. `say` may be called from another thread."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say, self._stage = say, ""
        self._lock = threading.Lock()
        self._is_long = self._is_over = False
        self._timer = threading.Timer(LONG_SECONDS, self._takes_long)
        self._timer.daemon = True

    def __enter__(self) -> Stages:
        self._timer.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        with self._lock:
            self._is_long, self._is_over = False, True
        self._timer.cancel()

    def begin(self, stage: str) -> None:
        """Note that `stage` begins."""
        with self._lock:
            self._stage = stage
            if self._is_long:
                self._say(stage)

    def _takes_long(self) -> None:
        with self._lock:
            self._is_long = not self._is_over
            if self._is_long and self._stage:
                self._say(self._stage)
