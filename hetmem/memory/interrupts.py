"""Ctrl-C while hetmem works: it comes when that is done, or where that waits for something.

Python raises KeyboardInterrupt between any two instructions: a copy that was begun and not taken note of would be
waited for without end. So within `HELD_BACK` an interrupt is only remembered. It is raised where a transfer is waited
for, as an error of that transfer would be, and at the end. The second of two comes at once, whatever it breaks.

Only the main thread gets signals; what somebody has set for them is what happens in the end. What the work is, nobody
knows here.
"""

from __future__ import annotations

import importlib
import os
import signal
import threading
from collections.abc import Callable
from contextlib import ContextDecorator
from threading import get_ident
from types import FrameType
from typing import Any

_INTERRUPT = int(signal.SIGINT)
_SIGNALS: Any = importlib.import_module("_signal")
"""What `signal` wraps, which takes twenty times as long, to make enums; this is asked around every operator."""


_main = threading.main_thread().ident
"""Of the main thread. Asked by its number: `current_thread` would make an object for each thread not Python's own."""


def _ask_anew() -> None:
    """In a fork. One that another thread has made has not what the main thread was doing."""
    global _main
    before, _main = _main, threading.main_thread().ident
    if _main != before:
        HELD_BACK.forget()


os.register_at_fork(after_in_child=_ask_anew)


class HeldBack(ContextDecorator):
    """A context, or a decorator, to be entered any number of times within itself, in which interrupts wait."""

    def __init__(self) -> None:
        self._depth = 0
        self._theirs: Any = None
        self._came = False
        self._wake: Callable[[], None] | None = None
        self._ours = self._remember

    def __enter__(self) -> None:
        if get_ident() != _main:
            return
        if not self._depth:
            theirs = _SIGNALS.getsignal(_INTERRUPT)
            if theirs is None:  # set by C: nobody could set it again
                return
            if theirs != self._ours:  # left behind by another signal, which raised in here
                self._theirs = theirs
            _SIGNALS.signal(_INTERRUPT, self._ours)  # until here one may be raised, and nothing has begun
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        if self._depth and get_ident() == _main:
            if self._depth == 1:
                self._give_back()
            else:
                self._depth -= 1

    def raise_here(self) -> None:
        """Whoever calls this is going to wait: an interrupt that came before is raised instead."""
        if self._came and get_ident() == _main:
            self._came = False
            self._deliver()

    def wait(self, wait: Callable[[], Any], wake: Callable[[], None]) -> Any:
        """`wait()`. An interrupt calls `wake`, which makes it return; then the caller is to ask `raise_here`."""
        if get_ident() != _main:
            return wait()
        self._wake = wake
        try:
            if self._came:
                wake()
            return wait()
        finally:
            self._wake = None

    def forget(self) -> None:
        """Whoever has entered it is no more, and what came is not this process's."""
        self._came, self._wake = False, None
        self._give_back()

    def _remember(self, _: int, __: FrameType | None) -> None:
        if self._came:  # the second one
            self._give_back()
            self._deliver()  # for whoever counts them, and has not raised
            return
        self._came = True
        if self._wake is not None:
            self._wake()

    def _give_back(self) -> None:
        """Nothing is held back any more."""
        came, self._came = self._came, False
        self._depth = 0
        if _SIGNALS.getsignal(_INTERRUPT) == self._ours:
            _SIGNALS.signal(_INTERRUPT, self._theirs)
        if came or self._came:
            self._came = False
            self._deliver()

    def _deliver(self) -> None:
        """What an interrupt does when nobody holds it back: usually it raises KeyboardInterrupt."""
        if callable(self._theirs):
            self._theirs(_INTERRUPT, None)
        else:  # it ends the process, or is ignored
            _SIGNALS.signal(_INTERRUPT, self._theirs)
            signal.raise_signal(signal.SIGINT)


HELD_BACK = HeldBack()
"""There is one main thread, and one handler."""
