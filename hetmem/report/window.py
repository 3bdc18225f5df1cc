"""The part of the event log that a report shows: the last whole training step, or the last forward if there is none.

It selects entries by time and copies them; it knows nothing of chunks, tiers or what the entries mean.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TypeVar

from hetmem.engine.events import CopyChange, EventLog, Fault, MomentSeen, Span, Stall, Transfer

Entry = TypeVar("Entry")
Timed = TypeVar("Timed", Span, Stall)

TRAINING = ("forward", "backward")
"""The segments in which the model computes."""


@dataclass(frozen=True, slots=True)
class Window:
    """Log entries that touch [start, end] (seconds of the log's clock), oldest first.

    `covers` is "step" or "forward". Segments and stalls are the device's; `launched` and `host_waits` the host's: see
    note "compute behind the host" in `engine.events`. `copies` reaches beyond `end`, so that what is present now tells
    what was present then. `forgotten` names the kinds of entries whose beginning the log has lost.
    """

    covers: str
    start: float
    end: float
    segments: list[Span]
    moments: list[MomentSeen]
    transfers: list[Transfer]
    copies: list[CopyChange]
    faults: list[Fault]
    stalls: list[Stall]
    updates: list[Span]
    forgotten: tuple[str, ...] = ()
    launched: list[Span] = field(default_factory=list)
    host_waits: list[Span] = field(default_factory=list)
    caught_up: list[Span] = field(default_factory=list)


def last_window(events: EventLog) -> Window | None:
    """The last whole step of `events`; without one, from the last forward on; None if nothing ran."""
    segments = _copied(events.segments)
    ends = [span.end for span in segments if span.what == "step"]
    if len(ends) >= 2:
        return _window(events, "step", ends[-2], ends[-1], segments)
    forwards = [span.start for span in segments if span.what == "forward"]
    running = events.running()
    if running is not None:
        segments.append(Span(*running, events.now()))
        if running[0] == "forward":
            forwards.append(running[1])
    if not forwards:
        return None
    return _window(events, "forward", forwards[-1], segments[-1].end, segments)


def _window(events: EventLog, covers: str, start: float, end: float, segments: list[Span]) -> Window:
    forgotten = []
    for kind in ("transfers", "moments", "copies", "faults", "stalls", "updates", "host_waits", "caught_up"):
        entries = getattr(events, kind)
        if len(entries) == entries.maxlen and _time_of(entries[0]) > start:
            forgotten.append(kind)

    def spans(entries: deque[Timed]) -> list[Timed]:
        return [span for span in _copied(entries) if span.end > start and span.start < end]

    return Window(
        covers,
        start,
        end,
        [span for span in segments if span.end > start and span.start < end],
        [moment for moment in _copied(events.moments) if start <= moment.at < end],
        [moved for moved in _copied(events.transfers) if moved.end > start and moved.start < end],
        [change for change in _copied(events.copies) if change.at >= start],
        [fault for fault in _copied(events.faults) if start <= fault.at < end],
        spans(events.stalls),
        spans(events.updates),
        tuple(forgotten),
        spans(events.launched),
        spans(events.host_waits),
        spans(events.caught_up),
    )


def _time_of(entry: Span | Stall | MomentSeen | Transfer | CopyChange | Fault) -> float:
    return entry.start if isinstance(entry, (Span, Stall, Transfer)) else entry.at


def _copied(entries: deque[Entry]) -> list[Entry]:
    """A copy of a log that other threads append to: one that grows meanwhile is copied anew."""
    try:
        return list(entries)
    except RuntimeError:  # mutated during iteration
        return _copied(entries)
