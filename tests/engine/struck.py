"""Ctrl-C, or an error, at a chosen place of a piece of code, wherever that is: each line, instruction or function can
have its turn."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any, Literal


def some_of(places: int, most: int) -> range:
    """At most so many of `places`, which are counted from 1, with equally many between them."""
    return range(1, places + 1, max(1, -(-places // most)))


class Struck:
    """Within it comes Ctrl-C as the place number `at` (1 is the first one, -1 none) is reached: before a "line" or an
    instruction ("opcode") of code that is `within`. `places` counts them."""

    def __init__(self, within: Callable[[CodeType], bool], event: Literal["line", "opcode"], at: int = -1) -> None:
        self._within, self._event, self._at = within, event, at
        self.places = 0

    def __enter__(self) -> Struck:
        sys.settrace(self._called)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _called(self, frame: FrameType, event: str, _: Any) -> Any:
        if not self._within(frame.f_code):
            return None
        frame.f_trace_opcodes = self._event == "opcode"
        return self._ran

    def _ran(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == self._event:
            self.places += 1
            if self.places == self._at:
                signal.raise_signal(signal.SIGINT)
        return self._ran


class Raising:
    """Within it `error()` is raised by the function number `at` of this thread's code that is `within`, as it is called
    (1 is the first one, -1 none), unless code of `others` calls it. `calls` counts them."""

    def __init__(
        self,
        within: Callable[[CodeType], bool],
        others: Callable[[CodeType], bool],
        error: Callable[[], Exception],
        at: int = -1,
    ) -> None:
        self._within, self._others, self._error, self._at = within, others, error, at
        self.calls = 0

    def __enter__(self) -> Raising:
        sys.settrace(self._called)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _called(self, frame: FrameType, event: str, _: Any) -> None:
        if self._within(frame.f_code) and not any(self._others(each.f_code) for each in _callers(frame)):
            self.calls += 1
            if self.calls == self._at:
                raise self._error()


def _callers(frame: FrameType) -> Iterator[FrameType]:
    caller = frame.f_back
    while caller is not None:
        yield caller
        caller = caller.f_back
