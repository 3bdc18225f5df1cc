"""The event log for reports: bounded, and only observing. Appending is safe from any thread.

Times are seconds of the device's clock (`time.perf_counter`, where time is not simulated). An entry costs about a
microsecond; the oldest are dropped first.

Note "bounded": all of a model's logs take at most `MOST_BYTES`, however long it runs, and each kind of entry has a
share of them. So the last steps are there whole. Of each older step one row remains, of sums at its end: a history.

Note "asynchronous compute": a GPU computes later than the host launches. Timed marks in the stream of compute tell when
it has come where: at the begin and end of a segment, before compute waits for a copy, and where the host begins to
wait. They are read once compute has passed them; only a report waits for them. If compute, at the end of the stretch
between two marks, has caught up with the launching thread, that thread and not the device set the stretch's length.
Where compute is synchronous, a mark is a time, and a stretch is what the thread did.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hetmem import torch_private
from hetmem.base.packed_log import Log, Numbers
from hetmem.base.units import MIB
from hetmem.memory.transfer import HOST_CLOCK, ComputeClock
from hetmem.schedule.blocks import Link
from hetmem.schedule.chunk_limit import DevicePeaks
from hetmem.schedule.trace import Tier

LOGGER = logging.getLogger("hetmem.engine")
"""Told each segment, and each command and update of a chunk, as it begins (`HETMEM_LOG=engine`)."""
MOST_BYTES = 8 * MIB
"""The most memory that the logs of a model take."""
REMEMBERED = 500
"""The most steps in a history."""
UNPACKED = 250
"""Logs are packed when more segments, moments, and blocks of moments that use all, have been logged since."""
_TOLD = 12
"""The most events of a block in an error."""
_CHANGES = {True: "copy asked for on", False: "copy dropped from"}
_UNREAD = 256
"""The most marks that are left unread within a segment."""
CAUGHT_UP = 0.1
"""Compute has caught up if it ends a stretch at most this share of the stretch's length after the launch."""


def log_to_standard_error() -> None:
    """Log what the engine does to standard error, with milliseconds since the start and the thread."""
    if not LOGGER.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(relativeCreated)10.2f ms %(threadName)s: %(message)s"))
        LOGGER.addHandler(handler)
    LOGGER.setLevel(logging.DEBUG)


class Transfer(NamedTuple):
    """A transfer of `nbytes` of block number `block` (-1: of no block, a gradient) over `link`. On NVMe, `start` is the
    time of the request."""

    link: Link
    block: int
    start: float
    end: float
    nbytes: int


class Span(NamedTuple):
    """A segment ("forward", "backward", "step"), a wait, or an update of a chunk, from `start` to `end`."""

    what: str
    start: float
    end: float


class Stall(NamedTuple):
    """A wait of compute from `start` to `end` for a copy of `block` (-1: for something else)."""

    start: float
    end: float
    block: int


class MomentSeen(NamedTuple):
    """A moment as it began; `non_model_bytes` is what the trace expects beside chunks until the next one."""

    at: float
    operator: str
    blocks: tuple[int, ...]
    chunk_bytes: int
    non_model_bytes: int


class CopyChange(NamedTuple):
    """A copy of `block` on `tier` (0 the device, 1 host staging) appeared (its fetch was requested) or was dropped."""

    at: float
    block: int
    tier: int
    present: bool


class Fault(NamedTuple):
    """A use of `block` that found no copy on the device, nor one in flight to it."""

    at: float
    block: int


ON_DEVICE, ON_HOST, ON_NVME = 1, 2, 4
"""Bits for the tiers that hold the bytes of a saved storage, or to which they are in flight."""
Held = dict[int, int]
"""Bytes of saved storages, by the bits of their tiers."""


class SavedMove(NamedTuple):
    """A change of the tiers of a storage of `nbytes` that autograd has saved, from the bits `before` to `after`."""

    at: float
    nbytes: int
    before: int
    after: int


class _Mark(NamedTuple):
    """A timed mark in the stream of compute, its kind, and the time when the host launched it. `other`: the mark, or
    the time, that compute waits for there, or the mark at the begin of the update that ends there; `since`: when the
    segment that ends there began on the host; `tokens`: those launched before its end."""

    kind: str
    asked: float
    mark: Any
    what: str = ""
    other: Any = None
    block: int = -1
    since: float = 0.0
    tokens: int = 0


class ForwardBegan(NamedTuple):
    """The begin of a forward of the whole model, with that many `tokens`; `trains`: a backward may follow."""

    at: float
    tokens: int
    trains: bool


class Ended(NamedTuple):
    """The end of a segment at `at`, with the sums of the whole run: `stall_seconds` up to there, and the tokens of all
    forwards that were launched before it."""

    at: float
    stall_seconds: float
    tokens: int


class EventLog:
    """The last entries of each kind, oldest first: see note "bounded".

    `clock` makes and reads timed marks; `asynchronous`: compute is asynchronous, see note "asynchronous compute".
    """

    def __init__(self, clock: ComputeClock = HOST_CLOCK, *, asynchronous: bool = False) -> None:
        self._clock, self.asynchronous = clock, asynchronous
        self.now = clock.now
        self.began = clock.now()
        texts = Numbers("(other)")
        self.transfers = Log(Transfer, 30_000)
        self.moments = Log(MomentSeen, 50_000, texts)
        self.copies = Log(CopyChange, 40_000)
        self.saved = Log(SavedMove, 20_000)
        """Filled for a model whose activations move."""
        self.faults = Log(Fault, 8_000)
        self.stalls = Log(Stall, 16_000)
        self.updates = Log(Span, 12_000, texts)
        self.segments = Log(Span, 6_000, texts)
        """Segments as the device ran them."""
        self.launched = Log(Span, 6_000, texts)
        """Segments as the host launched them, if compute is asynchronous."""
        self.host_waits = Log(Span, 6_000, texts)
        """Waits of the host, if compute is asynchronous; else these are the stalls."""
        self.caught_up = Log(Span, 6_000, texts)
        """Stretches at whose end compute had caught up with the host."""
        self.unpacked = 0
        """Segments and moments, and blocks of those that use all, that have been logged since logs were packed."""
        self.ended = {what: Log(Ended, 2 * REMEMBERED) for what in ("forward", "step")}
        """The ends of the last segments of both kinds, on the device."""
        self.stall_seconds = self.host_wait_seconds = 0.0
        self.awaited = -1
        """The block that the thread which trains waits for; -1: none."""
        self.forwards = Log(ForwardBegan, 6_000)
        self._logs = [log for log in (*vars(self).values(), *self.ended.values()) if isinstance(log, Log)]
        self.tokens = 0
        self.observed = False
        """Whether the running segment is logged, or seen by torch's profiler."""
        self._labelled: Any = None
        self._segment: tuple[str, float] | None = None
        self._begin_marked = False
        self._unread: deque[_Mark] = deque()
        self._running = ("", 0.0)
        self._resumed: float | None = None
        """When the stretch began whose end is read next; None between segments."""

    def begin_forward(self, tokens: int, *, trains: bool) -> None:
        """Note that a forward of the whole model begins; see `ForwardBegan`."""
        self.forwards.append((self.now(), tokens, trains))
        self.tokens += tokens

    def begin_segment(self, what: str) -> None:
        """End the running segment, and begin the segment `what`."""
        self.end_segment()
        self.unpacked += 1
        if self.unpacked > UNPACKED:
            self.pack()
        self.observed = torch_private.profiler_runs() or 0 < LOGGER.level <= logging.DEBUG
        if self.observed:
            LOGGER.debug("%s", what)
            self._labelled = torch_private.labelled(f"hetmem {what}")
            self._labelled.__enter__()
        self._segment = (what, self.now())
        if self.asynchronous:
            self._begin_marked = self._marked(_Mark("begin", self._segment[1], self._clock.timed_mark(), what))
            self.read_marks()

    def pack(self) -> None:
        """Pack all logs: called when more than `UNPACKED` entries may have come."""
        self.unpacked = 0
        for log in self._logs:
            log.pack()

    def end_segment(self) -> None:
        """End the running segment, if there is one."""
        if self._segment is None:
            return
        (what, since), self._segment = self._segment, None
        if self._labelled is not None:
            self._labelled.__exit__(None, None, None)
            self._labelled = None
        if self._begin_marked:
            self._marked(_Mark("end", self.now(), self._clock.timed_mark(), what, since=since, tokens=self.tokens))
        elif not self.asynchronous:
            self._ended(what, since, self.now(), self.tokens)

    def _ended(self, what: str, start: float, end: float, tokens: int) -> None:
        self.segments.append((what, start, end))
        if what in self.ended:
            self.ended[what].append((end, self.stall_seconds, tokens))

    def running(self) -> tuple[str, float] | None:
        """Return the running segment and when it began on the host, or None."""
        return self._segment

    def story(self, block: int) -> str:
        """Return, for an error, the last events of copies of `block`, oldest first, in milliseconds before now."""
        changes = [change for change in self.copies if change.block == block]
        found = [(change.at, f"{_CHANGES[change.present]} {Tier(change.tier).name}") for change in changes]
        found += [(fault.at, "used without a copy on DEVICE") for fault in self.faults if fault.block == block]
        for link, of, start, end, nbytes in self.transfers:
            if of == block:
                found.append((start, f"{nbytes} bytes begun {link.name}"))
                found.append((end, f"{nbytes} bytes ended {link.name}"))
        now, last = self.now(), sorted(found)[-_TOLD:]
        return "; ".join(f"{(at - now) * 1e3:.2f} ms {what}" for at, what in last) or "none are known"

    # ---- waits and updates -------------------------------------------------------------------------------------

    def here(self) -> tuple[float, Any]:
        """Return the time, and a mark behind all launched compute if that is asynchronous."""
        return self.now(), self._clock.timed_mark() if self.asynchronous else None

    def updated(self, what: str, since: tuple[float, Any]) -> None:
        """Log an update of `what` by the device, launched since `here` returned `since`."""
        if not self.asynchronous:
            self.updates.append((what, since[0], self.now()))
        elif since[1] is not None:
            self._marked(_Mark("update", self.now(), self._clock.timed_mark(), what, since[1]))

    def waited(self, since: tuple[float, Any]) -> None:
        """Log a wait of the host since `here` returned `since`."""
        (start, mark), end = since, self.now()
        self.host_wait_seconds += end - start
        if not self.asynchronous:
            self._stalled(start, end, self.awaited)
            return
        self.host_waits.append(("wait", start, end))
        self._marked(_Mark("wait", start, mark, other=end, block=self.awaited))

    def waits_for(self, block: int, end: Any) -> None:
        """Mark where asynchronous compute waits for the copy of `block`, which ends at the mark `end`."""
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
        """Log the marks that compute has passed; with `wait`, wait for all. If the device has failed, drop them."""
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
            self._ended(mark.what, self._running[1], ready, mark.tokens)
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
    parks: int = 0
    prepare_seconds: float = 0.0
    """How long it took to page-lock the host memory that parking takes; in no other number."""
    park_seconds: float = 0.0
    wake_seconds: float = 0.0
    """How often the model was parked, and how long moving off the device and back took in all."""
    parked_kept_bytes: int = 0
    parked_used_bytes: int = 0
    """What the process kept of the device when it was parked last, and what of that tensors had."""
    updated_bytes: Counter[Tier] = field(default_factory=Counter)
    """Bytes of parameters, by the tier where they were updated."""
