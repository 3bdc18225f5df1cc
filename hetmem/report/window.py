"""Selects the part of the event log that a report shows: the last whole training step, or the last forward if there is
none; and the history of all steps, or forwards. Also has the arithmetic of time intervals.

It selects entries by time and copies them; it knows nothing of chunks, tiers or the meaning of entries.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from itertools import accumulate, pairwise
from math import inf
from typing import Any

from hetmem.engine.events import CopyChange, EventLog, Fault, MomentSeen, SavedMove, Span, Stall, Transfer

Interval = tuple[float, float]

TRAINING = ("forward", "backward")
"""The segments in which the model computes."""
REMEMBERED = 500
"""The most steps in a history."""


@dataclass(frozen=True, slots=True)
class Window:
    """Log entries that touch [start, end] (seconds of the log's clock), oldest first.

    `covers` is "step" or "forward"; `whole`: it is a whole step, or a whole forward of a model that is not trained.
    Segments and stalls are the device's; `launched` and `host_waits` the host's: see note "compute behind the host" in
    `engine.events`. `copies` and `saved` reach beyond `end`, so that the state at `start` can be computed from the
    present one. `forgotten` names the kinds of entries whose beginning the log has lost.
    """

    covers: str
    start: float
    end: float
    forgotten: tuple[str, ...] = ()
    whole: bool = True
    segments: list[Span] = field(default_factory=list)
    moments: list[MomentSeen] = field(default_factory=list)
    transfers: list[Transfer] = field(default_factory=list)
    copies: list[CopyChange] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    stalls: list[Stall] = field(default_factory=list)
    updates: list[Span] = field(default_factory=list)
    launched: list[Span] = field(default_factory=list)
    host_waits: list[Span] = field(default_factory=list)
    caught_up: list[Span] = field(default_factory=list)
    saved: list[SavedMove] = field(default_factory=list)

    def spent(self, entries: Iterable[Span | Stall | Transfer]) -> list[Interval]:
        """Return the time of `entries` within the window, as disjoint intervals."""
        return union(clip(((each.start, each.end) for each in entries), self.start, self.end))


def last_window(events: EventLog) -> Window | None:
    """Return the last whole step of `events`; without one, all from the last forward on; None if nothing ran."""
    segments, inference = list(events.segments), only_infers(events)
    ends = [span.end for span in segments if span.what == "step"]
    if len(ends) >= 2:
        return _window(events, "step", ends[-2], ends[-1], segments, whole=True)
    forwards = [span.start for span in segments if span.what == "forward"]
    running = events.running()
    if running is not None:
        segments.append(Span(*running, events.now()))
        if running[0] == "forward":
            forwards.append(running[1])
    if not forwards:
        return None
    return _window(events, "forward", forwards[-1], segments[-1].end, segments, whole=inference and running is None)


def only_infers(events: EventLog) -> bool:
    """Return whether all forwards of the log are inference: no backward can follow."""
    fed = list(events.fed)
    return bool(fed) and not any(each.trains for each in fed)


def history(events: EventLog) -> dict[str, Any]:
    """Return the last steps, or forwards in inference, as columns: seconds from the end of the one before, stalls of
    compute in them, and the tokens of their inputs."""
    of = "forward" if only_infers(events) else "step"
    stalls, fed = list(events.stalls), list(events.fed)
    full = [log[0][0] for log in (stalls, fed) if log and len(log) == events.stalls.maxlen]
    since = max(full, default=0.0)  # the log has lost earlier entries
    ends, asked = (
        [span.end for span in spans if span.what == of and span.end >= since][-REMEMBERED - 1 :]
        for spans in (events.segments, events.launched if events.behind else events.segments)
    )
    waited = union((stall.start, stall.end) for stall in stalls)
    at, sums = [each.at for each in fed], [0, *accumulate(each.tokens for each in fed)]
    return {
        "of": of,
        "seconds": [end - start for start, end in pairwise(ends)],
        "stall_seconds": [overlap(waited, start, end) for start, end in pairwise(ends)],
        "tokens": [sums[bisect_left(at, end)] - sums[bisect_left(at, start)] for start, end in pairwise(asked)],
    }


_LOGS = [log.name for log in fields(Window) if log.default_factory is list and log.name != "segments"]
_REACHING_ON = ("copies", "saved")


def _window(events: EventLog, covers: str, start: float, end: float, segments: list[Span], *, whole: bool) -> Window:
    logs: dict[str, list[Any]] = {"segments": _touching(segments, start, end)}
    forgotten = []
    for kind in _LOGS:
        entries = getattr(events, kind)
        if len(entries) == entries.maxlen and getattr(entries[0], "start", getattr(entries[0], "at", 0.0)) > start:
            forgotten.append(kind)
        logs[kind] = _touching(list(entries), start, inf if kind in _REACHING_ON else end)
    return Window(covers, start, end, forgotten=tuple(forgotten), whole=whole, **logs)


def _touching(entries: list[Any], start: float, end: float) -> list[Any]:
    """Return those of `entries`, which are spans or points of time, that touch [start, end]."""
    if entries and hasattr(entries[0], "end"):
        return [each for each in entries if each.end > start and each.start < end]
    return [each for each in entries if start <= each.at < end]


# ---- intervals -------------------------------------------------------------------------------------------------------


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union of `intervals` as disjoint intervals in order; empty ones are left out."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        elif end > start:
            merged.append((start, end))
    return merged


def clip(intervals: Iterable[Interval], start: float, end: float) -> list[Interval]:
    """Return the parts of `intervals` within [start, end]."""
    return [(max(low, start), min(high, end)) for low, high in intervals if high > start and low < end]


def length(disjoint: Iterable[Interval]) -> float:
    """Return the total length of disjoint intervals."""
    return sum(end - start for start, end in disjoint)


def overlap(disjoint: list[Interval], start: float, end: float) -> float:
    """Return the length of [start, end] that the intervals of a `union` cover. O(log n + overlapping)."""
    index = max(0, bisect_left(disjoint, (start, start)) - 1)
    covered = 0.0
    while index < len(disjoint) and disjoint[index][0] < end:
        low, high = disjoint[index]
        covered += max(0.0, min(high, end) - max(low, start))
        index += 1
    return covered


def without(disjoint: list[Interval], taken: list[Interval]) -> list[Interval]:
    """Return the parts of one `union` that another does not cover. O(n + m)."""
    left: list[Interval] = []
    first = 0
    for start, end in disjoint:
        while first < len(taken) and taken[first][1] <= start:
            first += 1
        at = first
        while at < len(taken) and taken[at][0] < end:
            if taken[at][0] > start:
                left.append((start, taken[at][0]))
            start = max(start, taken[at][1])
            at += 1
        if start < end:
            left.append((start, end))
    return left
