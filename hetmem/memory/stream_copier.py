"""Copies on device streams: compute is ordered behind them by events, and the host does not wait.

Note "stream order": a copy is *over* when its end event has passed, and only then is it reported, so host memory that
it reads or writes stays its own until then. Compute does not wait for that: it is ordered behind the event. The other
way round a copy into a slot is ordered behind a mark of the compute that last used the slot.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from hetmem.memory.transfer import ComputeClock, Copier, Finished, Job, Seen
from hetmem.schedule.blocks import Link


class Streams(ComputeClock, Protocol):
    """One stream for each direction, beside the caller's stream of compute. Events are opaque; those of `enqueue` and
    `timed_mark` tell when they passed."""

    def mark(self) -> Any:
        """An event behind all compute that was asked for so far, on whatever streams."""

    def enqueue(self, link: Link, after: Sequence[Any], work: Callable[[], None]) -> tuple[Any, Any]:
        """Ask for `work` on the stream of `link`, behind the events `after`; the events of its start and its end. If it
        raises, nothing that `work` asked for is still under way."""

    def order_compute(self, event: Any) -> None:
        """Compute asked for from now on runs after `event`."""


class _InFlight(NamedTuple):
    number: int
    job: Job  # holds the memory that the copy reads and writes
    start: Any
    end: Any


class StreamCopier(Copier):
    """A `Copier` over `streams`. Jobs of one link are over in the order in which they were started."""

    ordered = True

    def __init__(self, streams: Streams, seen: Seen, finished: Callable[[Finished], None]) -> None:
        self._streams, self._seen, self._finished = streams, seen, finished
        self.clock: ComputeClock = streams
        self._queues: dict[Link, deque[_InFlight]] = {
            Link.HOST_TO_DEVICE: deque(),
            Link.DEVICE_TO_HOST: deque(),
        }
        self._numbers = itertools.count()
        self._ends: dict[Any, Any] = {}
        self._not_asked: set[Any] = set()

    def start(self, job: Job, after: Sequence[Any]) -> None:
        """What leaves the device is behind all compute so far, as something just computed it."""
        self._not_asked.discard(job.tag)
        try:
            marks = [*after, self._streams.mark()] if job.link is Link.DEVICE_TO_HOST else list(after)
            start, end = self._streams.enqueue(job.link, marks, job.work)
        except Exception as error:  # nothing was asked for (out of memory for a cast, say)
            self._not_asked.add(job.tag)
            self._finished(Finished(job.tag, error))
            return
        self._queues[job.link].append(_InFlight(next(self._numbers), job, start, end))
        self._ends[job.tag] = end

    def now(self, job: Job) -> None:
        start, end = self._streams.enqueue(job.link, [self._streams.mark()], job.work)
        self._streams.wait(end)
        self._seen(job, self._streams.when(start), self._streams.when(end))

    def mark(self) -> Any:
        return self._streams.mark()

    def end_of(self, tag: Any) -> Any:
        """Until its end has been reported."""
        return self._ends.get(tag)

    def order_compute_after(self, tag: Any) -> bool:
        end = self._ends.get(tag)
        if end is not None:
            self._streams.order_compute(end)
        return tag not in self._not_asked

    def order_compute_behind(self, mark: Any) -> bool:
        if self._streams.passed(mark):
            return False
        self._streams.order_compute(mark)
        return True

    def poll(self) -> None:
        for jobs in self._queues.values():
            while jobs and self._is_over(jobs[0]):
                self._report(jobs.popleft())

    def busy(self) -> bool:
        return any(self._queues.values())

    def wait(self) -> bool:
        heads = [jobs[0] for jobs in self._queues.values() if jobs]
        if not heads:
            return False
        with contextlib.suppress(Exception):  # a device that failed: `poll` reports it
            self._streams.wait(min(heads).end)
        return True

    def close(self) -> None:
        for jobs in self._queues.values():
            while jobs:
                with contextlib.suppress(Exception):
                    self._streams.wait(jobs[0].end)
                self._report(jobs.popleft())

    def abandon(self) -> None:
        """Wait for the device alone: it must not write into memory that is given back."""
        for jobs in self._queues.values():
            if jobs:
                with contextlib.suppress(Exception):  # a device that failed writes no more
                    self._streams.wait(jobs[-1].end)

    def _is_over(self, job: _InFlight) -> bool:
        """Also if the device has failed (an assertion in a kernel of the user's, say): then every event says so."""
        try:
            return self._streams.passed(job.end)
        except Exception:
            return True

    def _report(self, ended: _InFlight) -> None:
        """Report errors too: a job whose end is not reported would be waited for for ever."""
        if self._ends.get(ended.job.tag) is ended.end:
            del self._ends[ended.job.tag]
        failure = None
        try:
            self._seen(ended.job, self._streams.when(ended.start), self._streams.when(ended.end))
        except Exception as error:
            failure = error
        self._finished(Finished(ended.job.tag, failure))
