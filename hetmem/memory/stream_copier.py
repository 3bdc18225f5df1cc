"""Copies on device streams: compute is ordered behind them by events, and the host does not wait.

Note "stream order": a copy is *over* when its end event has passed, and only then is it reported, so host memory that
it reads or writes stays its own until then. Compute does not wait for that: it is ordered behind the event. The other
way round a copy into a slot is ordered behind a mark of the compute that last used the slot.

Note "marks": a mark is the number of the first event behind compute that comes after it. Events are recorded where a
copy needs one, and at every few marks, so that none of them ends much later than what it marks: most uses need none.
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
    """One stream for each direction, beside the caller's stream of compute. Events are opaque, and tell when they
    passed."""

    def see_compute(self) -> object:
        """Take note of the stream that computes now."""

    def mark(self) -> Any:
        """An event behind all compute that was asked for so far, on whatever streams."""

    def enqueue(self, link: Link, after: Sequence[Any], work: Callable[[], None]) -> Any:
        """Ask for `work` on the stream of `link`, behind the events `after`; the event of its end. If it raises,
        nothing that `work` asked for is still under way."""

    def order_compute(self, event: Any) -> None:
        """Compute asked for from now on runs after `event`."""


_KEPT = 64
"""Events behind compute that are kept for marks; older marks take one of these, which is only later."""
_USES_AN_EVENT = 4
"""Marks without an event between them, at most."""


class _InFlight(NamedTuple):
    number: int
    job: Job  # holds the memory that the copy reads and writes
    asked: float
    after: list[Any]
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
        self._over_at = dict.fromkeys(self._queues, 0.0)
        self._events: deque[Any] = deque(maxlen=_KEPT)
        self._recorded = self._unmarked = 0

    def start(self, job: Job, after: Sequence[Any]) -> None:
        """What leaves the device is behind all compute so far, as something just computed it."""
        self._not_asked.discard(job.tag)
        try:
            begun = self._begin(job, [self._event(mark) for mark in after])
        except Exception as error:  # nothing was asked for (out of memory for a cast, say)
            self._not_asked.add(job.tag)
            self._finished(Finished(job.tag, error))
            return
        self._queues[job.link].append(begun)
        self._ends[job.tag] = begun.end

    def _begin(self, job: Job, after: list[Any], *, behind_compute: bool = False) -> _InFlight:
        if behind_compute or job.link is Link.DEVICE_TO_HOST:
            after.append(self._record())
        asked = self._streams.now()
        end = self._streams.enqueue(job.link, after, job.work)
        return _InFlight(next(self._numbers), job, asked, after, end)

    def now(self, job: Job) -> None:
        begun = self._begin(job, [], behind_compute=True)
        self._streams.wait(begun.end)
        self._tell(begun)

    def mark(self) -> int:
        """See note "marks"."""
        self._streams.see_compute()
        self._unmarked += 1
        if self._unmarked < _USES_AN_EVENT:
            return self._recorded
        self._record()
        return self._recorded - 1

    def _record(self) -> Any:
        event = self._streams.mark()
        self._unmarked = 0
        self._recorded += 1
        self._events.append(event)
        return event

    def _event(self, mark: int) -> Any:
        """The first event behind compute that was recorded after `mark`."""
        at = mark - self._recorded + len(self._events)
        return self._record() if at >= len(self._events) else self._events[max(0, at)]

    def end_of(self, tag: Any) -> Any:
        """Until its end has been reported."""
        return self._ends.get(tag)

    def order_compute_after(self, tag: Any) -> bool:
        end = self._ends.get(tag)
        if end is not None:
            self._streams.order_compute(end)
        return tag not in self._not_asked

    def order_compute_behind(self, mark: Any) -> bool:
        event = self._event(mark)
        if self._streams.passed(event):
            return False
        self._streams.order_compute(event)
        return True

    def poll(self) -> None:
        passed = self._streams.passed  # asked at every use of a weight, so not by way of `_is_over`
        for jobs in self._queues.values():
            while jobs:
                try:
                    if not passed(jobs[0].end):
                        break
                except Exception:  # of a device that failed
                    pass
                self._report(jobs.popleft())

    def busy(self) -> bool:
        return any(self._queues.values())

    def wait(self) -> bool:
        heads = sorted(jobs[0] for jobs in self._queues.values() if jobs)
        if not heads:
            return False
        over = next((head for head in heads[1:] if self._is_over(head)), heads[0])
        self._wait_for(over.job.link)
        return True

    def _wait_for(self, link: Link) -> None:
        """Wait for the oldest job of `link`, and report it."""
        with contextlib.suppress(Exception):  # a device that failed
            self._streams.wait(self._queues[link][0].end)
        self._report(self._queues[link].popleft())

    def close(self) -> None:
        for link, jobs in self._queues.items():
            while jobs:
                self._wait_for(link)

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
            self._tell(ended)
        except Exception as error:
            failure = error
        self._finished(Finished(ended.job.tag, failure))

    def _tell(self, ended: _InFlight) -> None:
        """It began when it was asked for, the one before it on its link was over, and what it came behind was."""
        when, link = self._streams.when, ended.job.link
        end = when(ended.end)
        start = max(ended.asked, self._over_at[link], *map(when, ended.after))
        self._over_at[link] = end
        self._seen(ended.job, min(start, end), end)
