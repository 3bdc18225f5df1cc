"""Ctrl-C while hetmem works: it comes when that is done, or where that waits for something.

Python raises KeyboardInterrupt between any two instructions: a copy that was begun and not taken note of would be
waited for without end. So within `HELD_BACK` an interrupt is only remembered. It is raised where a transfer is waited
for, as an error of that transfer would be, and at the end. The second of two comes at once, whatever it breaks.

Only the main thread gets signals; the handler that is set for them is what happens in the end. What the work is, is not
known here.

Note "hooks": what torch calls around each module and each gradient is held back by its code alone (`covers`), as that
costs no call: the handler is set for the length of a segment, and looks for such code on the stack.
"""

from __future__ import annotations

import importlib
import signal
import threading
from collections.abc import Callable
from contextlib import ContextDecorator
from threading import get_ident
from types import CodeType, FrameType
from typing import Any, TypeVar

_FunctionT = TypeVar("_FunctionT", bound=Callable[..., Any])
_INTERRUPT = int(signal.SIGINT)
_SIGNALS: Any = importlib.import_module("_signal")
"""What `signal` wraps, which takes twenty times as long, to make enums; this is asked around every operator."""


_main = threading.main_thread().ident
"""Of the main thread. Asked by its number: `current_thread` would make an object for each thread not Python's own."""


class _Here(threading.local):
    """Facts of each thread that are asked for around every module: looking them up calls nothing."""

    def __init__(self) -> None:
        self.ident = get_ident()
        self.is_main = self.ident == _main


HERE = _Here()


class HeldBack(ContextDecorator):
    """A context, or a decorator, to be entered any number of times within itself, in which interrupts wait."""

    def __init__(self) -> None:
        self.depth = 0
        """How often this is entered."""
        self.segments = 0
        self._covered: set[CodeType] = set()
        self._handler_before: Any = None
        self.came = False
        self._wake: Callable[[], None] | None = None
        self._ours = self._remember

    def covers(self, function: _FunctionT) -> _FunctionT:
        """Hold interrupts back while `function` runs within a segment; at its end it calls `leave` if one `came`."""
        self._covered.add(function.__code__)
        return function

    def begin_segment(self) -> None:
        """Note that a forward, a backward or a step begins: until `end_segment` hetmem's handler stays, and does what
        the program's handler does wherever nothing is held back."""
        if HERE.is_main and (self.depth or self._take()):
            self.segments += 1

    def end_segment(self) -> None:
        """End a segment; call it once for each `begin_segment`. Nothing happens if that was forgotten."""
        if self.segments and HERE.is_main:
            self.segments -= 1
            if not (self.segments or self.depth):
                self._give_back()

    def _take(self) -> bool:
        """Have interrupts come here, if they do not; False if they cannot. A segment may have been forgotten, by a
        forward that ended without a word, and the handler of the program be another one since."""
        handler = _SIGNALS.getsignal(_INTERRUPT)
        if handler is None:  # set by C: it could not be set again
            return False
        if handler == self._ours:
            return True
        self._handler_before = handler
        _SIGNALS.signal(_INTERRUPT, self._ours)  # until here one may be raised, and nothing has begun
        return True

    def __enter__(self) -> None:
        if HERE.is_main and (self.depth or self._take()):
            self.depth += 1

    def __exit__(self, *_: object) -> None:
        if self.depth and HERE.is_main:
            self.depth -= 1
            self.leave()

    def leave(self) -> None:
        """End what was entered, if all is: an interrupt that came is raised."""
        if not self.depth and (self.came or not self.segments) and HERE.is_main:
            self._give_back()

    def raise_here(self) -> None:
        """Call before a wait: an interrupt that came before is raised instead."""
        if self.came and HERE.is_main:
            self.came = False
            self._deliver()

    def wait(self, wait: Callable[[], Any], wake: Callable[[], None]) -> Any:
        """Return `wait()`. An interrupt calls `wake`, which makes it return; then the caller is to ask `raise_here`."""
        if not HERE.is_main:
            return wait()
        self._wake = wake
        try:
            if self.came:
                wake()
            return wait()
        finally:
            self._wake = None

    def _remember(self, _: int, frame: FrameType | None) -> None:
        held = self.depth > 0
        while not held and frame is not None:
            held, frame = frame.f_code in self._covered, frame.f_back
        if not held:
            self._deliver()
            return
        if self.came:  # the second one
            self._give_back()
            self._deliver()  # for a handler that counts them, and has not raised
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
        """Do what an interrupt does when it is not held back: usually it raises KeyboardInterrupt, which ends a forward
        without a word. So no segment runs from here on, unless it has not raised."""
        segments, self.segments = self.segments, 0
        if _SIGNALS.getsignal(_INTERRUPT) == self._ours:
            _SIGNALS.signal(_INTERRUPT, self._handler_before)
        if callable(self._handler_before):
            self._handler_before(_INTERRUPT, None)
        else:  # it ends the process, or is ignored
            _SIGNALS.signal(_INTERRUPT, self._handler_before)
            signal.raise_signal(signal.SIGINT)
        if segments and self._take():
            self.segments = segments


HELD_BACK = HeldBack()
"""There is one main thread, and one handler."""
