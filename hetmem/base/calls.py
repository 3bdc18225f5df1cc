"""Calls that are all made, whatever raises."""

from __future__ import annotations

from collections.abc import Callable, Iterator


def call_all(calls: Iterator[Callable[[], object]]) -> None:
    """Call all of `calls`, also if some raise, and raise the last error. An `ExitStack` takes eight calls for each."""
    try:
        for call in calls:
            call()
    except BaseException:
        call_all(calls)
        raise
