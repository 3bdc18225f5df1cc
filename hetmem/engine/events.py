"""What happened when, for reports: a bounded log that only observes. Appending is safe from any thread.

Times are seconds of the device's clock (`time.perf_counter`, where time is not simulated). An entry costs about a
microsecond; the oldest are forgotten first.

Note "plain entries": a log keeps tuples of numbers and strings. Python's garbage collector forgets such tuples at its
first look, while it goes through all named ones, and through those that hold a member of an enumeration, again and
again. They get names as they are read.

Note "compute behind the host": a GPU computes later than it is asked to. When it has come where is told by timed marks
in the stream of compute: where a segment begins and ends, before compute waits for a copy, and where the host begins to
wait. They are read once they are passed, and waited for only by a report. Between two marks lies a stretch. At its end
compute may have caught up with the thread that asks for it: then that thread, not the device, made the stretch as long
as it is. Where compute is over when it is asked for, a mark is a time, and all of this is what the thread did.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

from hetmem.memory.transfer import HOST_CLOCK, ComputeClock
from hetmem.schedule.blocks import Link
from hetmem.schedule.chunk_limit import DevicePeaks
from hetmem.schedule.trace import Tier

ENTRIES = 100_000
"""Kept of each kind: some steps of a model with ten thousand operators."""
_UNREAD = 256
"""Marks that are not looked at before the next segment begins."""
CAUGHT_UP = 0.1
"""Compute has caught up where it ends a stretch later than it was asked to by less than this share of the stretch."""


class Transfer(NamedTuple):
    """`nbytes` of block number `block` (-1: of no block, a gradient) crossed `link`. Of NVMe, `start` is when it was
    asked for."""

    link: Link
    block: int
    start: float
    end: float
    nbytes: int


class Span(NamedTuple):
    """`what` took from `start` to `end`: a segment ("forward", "backward", "step"), a wait, an update of a chunk."""

    what: str
    start: float
    end: float


class Stall(NamedTuple):
    """Compute waited from `start` to `end` for a copy of `block` (-1: for something else)."""

    start: float
    end: float
    block: int


class MomentSeen(NamedTuple):
    """An operator was about to run; `non_model_bytes` is what the trace expects beside chunks up to the next one."""

    at: float
    operator: str
    blocks: tuple[int, ...]
    chunk_bytes: int
    non_model_bytes: int


class CopyChange(NamedTuple):
    """A copy of `block` on `tier` (0 the device, 1 host staging) appeared (its fetch was asked for) or went away."""

    at: float
    block: int
    tier: int
    present: bool


class Fault(NamedTuple):
    """A use of `block` found no copy on the device, nor one on its way there."""

    at: float
    block: int


ON_DEVICE, ON_HOST, ON_NVME = 1, 2, 4
"""Bits of the tiers on which the bytes of a saved storage lie, or which they are on their way to."""
Held = dict[int, int]
"""By such bits, the bytes that lie so."""


class SavedMove(NamedTuple):
    """A storage of `nbytes` that autograd has saved lay `before` on those tiers, and lies on those `after` it."""

    at: float
    nbytes: int
    before: int
    after: int


class _Mark(NamedTuple):
    """A timed mark in the stream of compute, what of, and the time at which it was asked for. `other`: the mark, or the
    time, that compute waits for there, or the mark where the update began that ends there; `since`: when the segment
    that ends there began on the host."""

    kind: str
    asked: float
    mark: Any
    what: str = ""
    other: Any = None
    block: int = -1
    since: float = 0.0


class Fed(NamedTuple):
    """A forward of the whole model began, with so many `tokens`; `trains`: a backward may follow."""

    at: float
    tokens: int
    trains: bool


Entry = TypeVar("Entry")


class Log(deque[Any], Generic[Entry]):
    """The last `maxlen` entries, each of which `named` makes of a plain tuple: see note "plain entries"."""

    def __init__(self, named: Callable[[Any], Entry], maxlen: int) -> None:
        super().__init__((), maxlen)
        self._named = named

    def __iter__(self) -> Iterator[Entry]:
        return map(self._named, [*super().__iter__()])  # as it is now, while threads append

    def __getitem__(self, at: int) -> Entry:  # type: ignore[override]
        return self._named(super().__getitem__(at))


def _transfer(plain: tuple[Any, ...]) -> Transfer:
    """Return a transfer of what has the name of its link, or the link, in front."""
    return Transfer(Link(plain[0]), *plain[1:])


class EventLog:
    """The last entries of each kind, oldest first.

    `clock` tells when compute has come where; `behind` says that it runs behind the host: see note "compute behind the
    host".
    """

    def __init__(self, entries: int = ENTRIES, clock: ComputeClock = HOST_CLOCK, *, behind: bool = False) -> None:
        self._clock, self.behind = clock, behind
        self.now = clock.now
        self.began = clock.now()
        self.transfers = Log(_transfer, entries)
        self.moments = Log(MomentSeen._make, entries)
        self.copies = Log(CopyChange._make, entries)
        self.saved = Log(SavedMove._make, entries)
        """Of a model whose activations move."""
        self.faults = Log(Fault._make, entries)
        self.stalls = Log(Stall._make, entries)
        self.updates = Log(Span._make, entries)
        self.segments = Log(Span._make, entries)
        """As the device ran them."""
        self.launched = Log(Span._make, entries)
        """The same as the host asked for them, where compute is behind it."""
        self.host_waits = Log(Span._make, entries)
        """When the host waited, where compute is behind it; else these are the stalls."""
        self.caught_up = Log(Span._make, entries)
        """Stretches at whose end compute had caught up with the host."""
        self.stall_seconds = self.host_wait_seconds = 0.0
        self.awaited = -1
        """The block that waits are for."""
        self.fed = Log(Fed._make, entries)
        self.tokens = 0
        self._segment: tuple[str, float] | None = None
        self._begin_marked = False
        self._unread: deque[_Mark] = deque()
        self._running = ("", 0.0)
        self._resumed: float | None = None
        """When the stretch began whose end is read next; None outside of segments."""

    def feed(self, tokens: int, *, trains: bool) -> None:
        """Note that a forward of the whole model begins; see `Fed`."""
        self.fed.append((self.now(), tokens, trains))
        self.tokens += tokens

    def begin_segment(self, what: str) -> None:
        """`what` begins, and what ran before is over."""
        self.end_segment()
        self._segment = (what, self.now())
        if self.behind:
            self._begin_marked = self._marked(_Mark("begin", self._segment[1], self._clock.timed_mark(), what))
            self.read_marks()

    def end_segment(self) -> None:
        """No segment runs."""
        if self._segment is None:
            return
        (what, since), self._segment = self._segment, None
        if self._begin_marked:
            self._marked(_Mark("end", self.now(), self._clock.timed_mark(), what, since=since))
        elif not self.behind:
            self.segments.append((what, since, self.now()))

    def running(self) -> tuple[str, float] | None:
        """The segment that runs now and when it began, on the host."""
        return self._segment

    # ---- waits and updates -------------------------------------------------------------------------------------

    def here(self) -> tuple[float, Any]:
        """The time, and a mark behind compute so far where that is behind the host."""
        return self.now(), self._clock.timed_mark() if self.behind else None

    def updated(self, what: str, since: tuple[float, Any]) -> None:
        """The device was asked to update `what`, where it lives there, since `here`."""
        if not self.behind:
            self.updates.append((what, since[0], self.now()))
        elif since[1] is not None:
            self._marked(_Mark("update", self.now(), self._clock.timed_mark(), what, since[1]))

    def waited(self, since: tuple[float, Any]) -> None:
        """The host has waited since `here`."""
        (start, mark), end = since, self.now()
        self.host_wait_seconds += end - start
        if not self.behind:
            self._stalled(start, end, self.awaited)
            return
        self.host_waits.append(("wait", start, end))
        self._marked(_Mark("wait", start, mark, other=end, block=self.awaited))

    def waits_for(self, block: int, end: Any) -> None:
        """Compute, which is behind the host, waits here for the copy of `block` that is over at the mark `end`."""
        self._marked(_Mark("copy", self.now(), self._clock.timed_mark(), other=end, block=block))

    def _stalled(self, start: float, end: float, block: int) -> None:
        self.stall_seconds += end - start
        self.stalls.append((start, end, block))

    # ---- marks -------------------------------------------------------------------------------------------------

    def _marked(self, mark: _Mark) -> bool:
        if mark.mark is None:
            return False
        self._unread.append(mark)
        if len(self._unread) > _UNREAD:
            self.read_marks()
        return True

    def read_marks(self, *, wait: bool = False) -> None:
        """Take note of the marks that are passed; with `wait`, of all of them. Those of a device that has failed, which
        answers with errors, are forgotten."""
        unread, clock = self._unread, self._clock
        try:
            all_passed = bool(unread) and not wait and self._passed(unread[-1])  # compute passes them in order
            while unread:
                if wait:
                    clock.wait(unread[0].mark)
                    if unread[0].kind == "copy":
                        clock.wait(unread[0].other)
                elif not (all_passed or self._passed(unread[0])):
                    return
                self._read(unread.popleft())
        except Exception:  # the thread that computes gets the error
            unread.clear()
            self._resumed = None

    def _passed(self, mark: _Mark) -> bool:
        passed = self._clock.passed
        return passed(mark.mark) and (mark.kind != "copy" or passed(mark.other))

    def _read(self, mark: _Mark) -> None:
        clock, ready = self._clock, self._clock.when(mark.mark)
        resumed = ready
        if self._resumed is not None and ready - mark.asked <= CAUGHT_UP * (ready - self._resumed):
            self.caught_up.append(("caught up", self._resumed, ready))
        if mark.kind == "begin":
            self._running = (mark.what, ready)
        elif mark.kind == "end":
            self.segments.append((mark.what, self._running[1], ready))
            self.launched.append((mark.what, mark.since, mark.asked))
        elif mark.kind == "update":
            self.updates.append((mark.what, clock.when(mark.other), ready))
        else:
            resumed = max(ready, clock.when(mark.other) if mark.kind == "copy" else mark.other)
            if resumed > ready:
                self._stalled(ready, resumed, mark.block)
        inside = mark.kind == "begin" or (self._resumed is not None and mark.kind != "end")
        self._resumed = resumed if inside else None


@dataclass(slots=True)
class Statistics(DevicePeaks):
    """Peaks and sums of a run. Only grows."""

    steps: int = 0
    updated_bytes: Counter[Tier] = field(default_factory=Counter)
    """Of parameters, by where they were updated."""
