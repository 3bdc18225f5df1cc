"""What happened when, for reports: a bounded log that only observes. Appending is safe from any thread.

Times are seconds of `time.perf_counter`. An entry costs about a microsecond; the oldest are forgotten first.
"""

from __future__ import annotations

import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar

from hetmem.schedule.blocks import Link
from hetmem.schedule.update_split import Way

ENTRIES = 100_000
"""Kept of each kind: some steps of a model with ten thousand operators."""


class Transfer(NamedTuple):
    """`nbytes` of block number `block` (-1: of no block, a gradient) crossed `link`. Of NVMe, `start` is when it was
    asked for."""

    link: Link
    block: int
    start: float
    end: float
    nbytes: int


class Span(NamedTuple):
    """`what` took from `start` to `end`: a segment ("forward", "backward", "step"), a stall, an update of a chunk."""

    what: str
    start: float
    end: float


class MomentSeen(NamedTuple):
    """An operator was about to run; `non_model_bytes` is what the trace expects beside chunks up to the next one."""

    at: float
    operator: str
    blocks: tuple[int, ...]
    chunk_bytes: int
    non_model_bytes: int
    staging_bytes: int


class CopyChange(NamedTuple):
    """A copy of `block` on `tier` (0 the device, 1 host staging) appeared (its fetch was asked for) or went away."""

    at: float
    block: int
    tier: int
    present: bool


class Fault(NamedTuple):
    """A use of `block` found no valid copy on the device and waited for `seconds`."""

    at: float
    block: int
    seconds: float


class EventLog:
    """The last entries of each kind, oldest first."""

    def __init__(self, entries: int = ENTRIES) -> None:
        self.began = time.perf_counter()
        self.transfers: deque[Transfer] = deque(maxlen=entries)
        self.moments: deque[MomentSeen] = deque(maxlen=entries)
        self.copies: deque[CopyChange] = deque(maxlen=entries)
        self.faults: deque[Fault] = deque(maxlen=entries)
        self.stalls: deque[Span] = deque(maxlen=entries)
        self.updates: deque[Span] = deque(maxlen=entries)
        self.segments: deque[Span] = deque(maxlen=entries)
        self.fed: deque[tuple[float, int]] = deque(maxlen=entries)
        """When each forward of the whole model began, and of how many tokens."""
        self.tokens = 0
        self._segment: tuple[str, float] | None = None

    def feed(self, tokens: int) -> None:
        """Note that a forward of the whole model begins, with `tokens`."""
        self.fed.append((time.perf_counter(), tokens))
        self.tokens += tokens

    def begin_segment(self, what: str) -> None:
        """`what` begins, and what ran before is over."""
        self.end_segment()
        self._segment = (what, time.perf_counter())

    def newest(self) -> Hashable:
        """What is another thing whenever something else has happened."""
        logs = (self.moments, self.transfers, self.updates)
        return tuple(log[-1] if log else None for log in logs)

    def end_segment(self) -> None:
        """No segment runs."""
        if self._segment is not None:
            self.segments.append(Span(*self._segment, time.perf_counter()))
            self._segment = None

    def running(self) -> tuple[str, float] | None:
        """The segment that runs now and when it began."""
        return self._segment


@dataclass(slots=True)
class Statistics:
    """Peaks in bytes, waiting in seconds. Only grows."""

    device_peak_bytes: int = 0
    chunk_peak_bytes: int = 0
    non_model_peak_bytes: int = 0
    stall_seconds: float = 0.0
    steps: int = 0
    updated_bytes: Counter[Way] = field(default_factory=Counter)
    """Of parameters, by where they were updated."""

    def device_in_use(self, chunk_bytes: int, non_model_bytes: int) -> None:
        """Chunks and everything else held these many bytes of the device at one time."""
        if chunk_bytes > self.chunk_peak_bytes:  # told of each use of a weight: three calls of `max` cost more
            self.chunk_peak_bytes = chunk_bytes
        if non_model_bytes > self.non_model_peak_bytes:
            self.non_model_peak_bytes = non_model_bytes
        if chunk_bytes + non_model_bytes > self.device_peak_bytes:
            self.device_peak_bytes = chunk_bytes + non_model_bytes


P = ParamSpec("P")
T = TypeVar("T")


def weakly(method: Callable[P, None]) -> Callable[P, None]:
    """`method`, which is bound, for those whom its owner must not outlive; it does nothing when that is gone."""
    bound: Any = method
    owner, function = weakref.ref(bound.__self__), bound.__func__

    def call(*args: P.args, **keywords: P.kwargs) -> None:
        alive = owner()
        if alive is not None:
            function(alive, *args, **keywords)

    return call


class WeakOnes(Generic[T]):
    """Weak references, in the order in which objects were added. To go through a few of them at each gradient takes a
    quarter of what a `WeakSet` does."""

    def __init__(self) -> None:
        self._references: list[weakref.ref[T]] = []

    def add(self, one: T) -> None:
        """`one` is among them for as long as it lives."""
        alive = [reference for reference in self._references if reference() is not None and reference() is not one]
        self._references = [*alive, weakref.ref(one)]

    def discard(self, one: T) -> None:
        """`one` is not among them any more, if it was."""
        self._references = [reference for reference in self._references if reference() not in (None, one)]

    def __iter__(self) -> Iterator[T]:
        for reference in self._references:
            one = reference()
            if one is not None:
                yield one
