"""Defers Ctrl-C while hetmem works, until that work ends or waits for something.

Python raises KeyboardInterrupt between any two instructions: a copy that has begun and is not recorded yet would be
waited for without end. So within `HELD_BACK`, and within a segment (a forward, a backward), an interrupt is only
remembered. It is raised where something is waited for, like an error of that transfer, as the outermost `HELD_BACK`
ends, and at the end of each hook that torch calls around modules and gradients (`leave`). A second interrupt is raised
at once, whatever it breaks.

Only the main thread gets signals; in the end the program's own handler is called. This module does not know what the
work is.
"""

from __future__ import annotations

import importlib
import signal
import threading
from collections.abc import Callable
from contextlib import ContextDecorator
from threading import get_ident
from typing import Any

_INTERRUPT = int(signal.SIGINT)
_SIGNALS: Any = importlib.import_module("_signal")
"""The C module that `signal` wraps, twenty times slower, to make enums; called around every operator."""


_main = threading.main_thread().ident
"""Identifier of the main thread, as `current_thread` would make an object for each thread not started by Python."""


class _Here(threading.local):
    """Facts of each thread that are read around every module, without a call."""

    def __init__(self) -> None:
        self.ident = get_ident()
        self.is_main = self.ident == _main


HERE = _Here()


class HeldBack(ContextDecorator):
    """A context, or a decorator, in which interrupts wait; it can be nested."""

    def __init__(self) -> None:
        self.depth = 0
        """How many times it is entered."""
        self.segments = 0
        """How many segments run."""
        self._handler_before: Any = None
        self.came = False
        """Whether an interrupt was remembered."""
        self._wake: Callable[[], None] | None = None
        self._ours = self._remember

    def begin_segment(self) -> None:
        """Hold interrupts back until `end_segment`, but where `leave` is called with no `HELD_BACK` around it."""
        if HERE.is_main and (self.depth or self._take()):
            self.segments += 1

    def end_segment(self) -> None:
        """End a segment; call it once for each `begin_segment`. Without effect if none runs. Raises an interrupt that
        came, if nothing is entered any more."""
        if self.segments and HERE.is_main:
            self.segments -= 1
            if not (self.segments or self.depth):
                self._give_back()

    def _take(self) -> bool:
        """Install the handler if it is not installed; False if that is impossible. After a forward that ended without
        calling `end_segment`, the program may have set another one."""
        handler = _SIGNALS.getsignal(_INTERRUPT)
        if handler is None:  # set by C, so it cannot be restored
            return False
        if handler == self._ours:
            return True
        self._handler_before = handler
        _SIGNALS.signal(_INTERRUPT, self._ours)  # an interrupt before this is raised, with nothing begun
        return True

    def __enter__(self) -> None:
        if HERE.is_main and (self.depth or self._take()):
            self.depth += 1

    def __exit__(self, *_: object) -> None:
        if self.depth and HERE.is_main:
            self.depth -= 1
            self.leave()

    def leave(self) -> None:
        """Raise an interrupt that came, if nothing is entered any more. Hooks call it last, if one `came`."""
        if not self.depth and (self.came or not self.segments) and HERE.is_main:
            self._give_back()

    def raise_here(self) -> None:
        """Raise an interrupt that came; call it before a wait."""
        if self.came and HERE.is_main:
            self.came = False
            self._deliver()

    def wait(self, wait: Callable[[], Any], wake: Callable[[], None]) -> Any:
        """Return `wait()`. An interrupt calls `wake`, which makes it return; the caller then calls `raise_here`."""
        if not HERE.is_main:
            return wait()
        self._wake = wake
        try:
            if self.came:
                wake()
            return wait()
        finally:
            self._wake = None

    def _remember(self, *_: object) -> None:
        if not (self.depth or self.segments):
            self._deliver()
            return
        if self.came:  # the second one
            self._give_back()
            self._deliver()  # the second, if the handler did not raise for the first
            return
        self.came = True
        if self._wake is not None:
            self._wake()

    def _give_back(self) -> None:
        """End holding interrupts back."""
        came, self.came = self.came, False
        self.depth = 0
        if not self.segments and _SIGNALS.getsignal(_INTERRUPT) == self._ours:
            _SIGNALS.signal(_INTERRUPT, self._handler_before)
        if came or self.came:
            self.came = False
            self._deliver()

    def _deliver(self) -> None:
        """Call the program's handler: usually it raises KeyboardInterrupt, which ends a forward without calling
        `end_segment`. So no segment counts from here on, unless it does not raise."""
        segments, self.segments = self.segments, 0
        if _SIGNALS.getsignal(_INTERRUPT) == self._ours:
            _SIGNALS.signal(_INTERRUPT, self._handler_before)
        if callable(self._handler_before):
            self._handler_before(_INTERRUPT, None)
        else:  # the default: end the process, or ignore it
            _SIGNALS.signal(_INTERRUPT, self._handler_before)
            signal.raise_signal(signal.SIGINT)
        if segments and self._take():
            self.segments = segments


HELD_BACK = HeldBack()
"""The only instance: there is one main thread, and one handler."""
