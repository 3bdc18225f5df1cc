"""Records what each segment of a step uses, and turns it into the schedule of what comes next.

It observes: moments come in, traces and schedules go out. It moves nothing and decides nothing.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from hetmem.schedule.trace import Moment, SegmentTrace, TraceBook, segment_name

_GROWS = 2
"""Up to this many times the measured size of inputs, memory is taken to grow with them."""


def _growth(size: int, known: int) -> float:
    return size / known if size > known > 0 else 1.0


_BEGIN = Moment("begin", ())


class StepTracer:
    """Traces the running segment and compares it with the book.

    A segment is *measured* (its non-model bytes are watched) when its key is new, when its inputs are more than twice
    as large as any that were measured, or when it left its trace; a segment that leaves its trace again and again is
    measured only at the 1st, 2nd, 4th, 8th … time. The trace of a key holds for inputs of every shape: for smaller
    inputs it is the most that they need, and for larger ones it grows with them.
    """

    def __init__(self) -> None:
        self.book = TraceBook()
        self.grows = _GROWS
        """Inputs of up to this many times the measured size are not measured again."""
        self._again: set[Hashable] = set()
        """Keys whose next segment is measured in any case."""
        self.key: Hashable | None = None
        self._ended: Hashable | None = None
        """The segment that has ended, until the next one begins."""
        self.measured = False
        self.position = 0
        self.known: SegmentTrace | None = None
        self._moments: list[Moment] = []
        """Moments of the running segment; not filled while it `_follows` its known trace."""
        self._ahead: tuple[Moment, ...] = ()
        """The `_count` moments of the known trace, unless the segment is measured."""
        self._follows, self._at_once, self._count = False, False, 0
        self._opening = self._expected = _BEGIN
        self.gradients_sent = 0
        self._host: list[int] = []
        self._overwritten: set[int] = set()
        self._departures: dict[Hashable, int] = {}
        self._size = 0
        self._measured_sizes: dict[Hashable, int] = {}
        """By key, the bytes of the largest measured inputs."""
        self._sizes: dict[Hashable, int] = {}
        """By key, the bytes of the largest inputs of any segment so far."""
        self.growth = 1.0
        """Factor by which the segment may need more than its trace says."""
        self.unseen_growth = 1.0
        """Factor by which its inputs are larger than any seen with its key."""
        self.is_unseen = False
        """Whether nothing is known of the memory it will need."""
        self.lacked_room = False
        """Whether it has failed for want of memory: nothing is known of its key then, as smaller inputs need less."""

    def forget_traces(self) -> None:
        """Forget all traces, and do not record that of the running segment, which still follows its known trace."""
        self.book, self.key = TraceBook(), None
        self._sizes.clear()
        self._measured_sizes.clear()

    def must_measure(self, key: Hashable, size: int = 0) -> bool:
        """Return whether a segment with `key`, and inputs of `size` bytes, must be measured."""
        departures = self._departures.get(key, 0)
        if self.book.get(key) is None or key in self._again or size > self.grows * self._measured_sizes.get(key, size):
            return True
        return departures > 0 and departures & (departures - 1) == 0

    def measure_again(self) -> None:
        """Measure every known segment once more, as memory is used otherwise from now on."""
        self._again.update(trace.key for trace in self.book.traces())

    def has_seen(self, key: Hashable, size: int) -> bool:
        """Return whether a segment of the same kind as `key`, in any mode, has run with inputs as large."""
        name = segment_name(key)
        return any(size <= seen for other, seen in self._sizes.items() if segment_name(other) == name)

    def knows_a_backward(self) -> bool:
        """Return whether a whole forward and backward were traced."""
        return any(segment_name(trace.key) == "backward" for trace in self.book.traces())

    def begin(self, key: Hashable, *, measured: bool, size: int = 0) -> None:
        """End the running segment and begin one with `key`, and inputs of `size` bytes, that follows it."""
        self.end()
        if self._ended is not None:
            self.book.follows(self._ended, key)
            self._ended = None
        self.key, self.measured, self._size = key, measured, size
        if measured:
            self._again.discard(key)
        self.known = self.book.get(key)
        self.growth = 1.0 if measured else _growth(size, self._measured_sizes.get(key, 0))
        self.unseen_growth = _growth(size, self._sizes.get(key, 0))
        seen = self.has_seen(key, size) if self.known is None else size > self._measured_sizes.get(key, 0)
        self.is_unseen = measured and not seen
        self._ahead = () if self.known is None or measured else self.known.moments
        self._count = len(self._ahead)
        self.position = self.gradients_sent = 0
        self.lacked_room = False
        self._moments, self._host, self._overwritten = [], [], set()
        self._follows, self._at_once = self.known is not None and not measured, False
        self._opening = _BEGIN
        self._expected = self._opening if self.known is None else self.known.opening.times(self.growth)

    def end(self) -> None:
        """Put what was recorded into the book."""
        key, known = self.key, self.known
        if key is None:
            return
        self.key, self._ended = None, key
        if self.lacked_room:
            self.book.forget(key)
            self._measured_sizes.pop(key, None)
            return
        self._sizes[key] = max(self._size, self._sizes.get(key, 0))
        if known is not None and self._follows and self.position == self._count:
            same = True
        else:
            self._leave_trace()
            same = known is not None and [m.blocks for m in known.moments] == [m.blocks for m in self._moments]
        on_host = (tuple(self._host), frozenset(self._overwritten))
        if known is not None and same and not self.measured and (known.host_blocks, known.overwritten) == on_host:
            return
        if not self.measured and known is not None:
            if not same:
                self._departures[key] = self._departures.get(key, 0) + 1
                worst = known.worst
                self._moments = [Moment(m.operator, m.blocks, *worst) for m in self._moments]
            else:
                self._moments = list(known.moments)
            self._opening = known.opening
        else:
            self._keep_the_most(key, known if same else None)
            if self._departures.get(key):
                self._departures[key] += 1
        self.book.put(SegmentTrace(key, tuple(self._moments), *on_host, self._opening))

    def _keep_the_most(self, key: Hashable, known: SegmentTrace | None) -> None:
        """Merge the moments just measured with what larger inputs have needed at the same moments."""
        before, self._measured_sizes[key] = self._measured_sizes.get(key, 0), self._size
        if known is not None and before > self._size:
            self._measured_sizes[key] = before
            self._moments = [mine.most(other) for mine, other in zip(self._moments, known.moments, strict=True)]
            self._opening = self._opening.most(known.opening)

    def moment(self, operator: str, blocks: tuple[int, ...], live_bytes: int, leaving_bytes: int = 0) -> Moment:
        """Record one operator boundary, and return what to expect until the next one. `leaving_bytes` of the
        `live_bytes` are gradients in flight to their homes."""
        if self._at_once:
            return self._expected
        at, known = self.position, self.known
        self.gradients_sent = 0
        if at < self._count:
            expected = self._ahead[at]
            if self.growth != 1.0:
                expected = expected.times(self.growth)
            if expected.blocks != blocks or expected.operator != operator:
                self._leave_trace()
                self._moments.append(Moment(operator, blocks, live_bytes))
            elif not self._follows:
                self._moments.append(expected)
        else:
            self._leave_trace()
            if known is None or self.measured:
                expected = Moment(operator, blocks, live_bytes, (live_bytes - leaving_bytes,))
            else:
                expected = Moment(operator, blocks, *known.worst).times(self.growth)
            self._moments.append(expected)
        self.position = at + 1
        self._expected = expected
        return expected

    @property
    def followed(self) -> SegmentTrace | None:
        """The trace that the running segment follows moment by moment, with the memory it needs; None if none."""
        return self.known if self._follows and self._count and not self._at_once and self.growth == 1.0 else None

    def comes_next(self, operator: str, blocks: tuple[int, ...]) -> bool:
        """Return whether the known trace has a moment of `operator`, which uses `blocks`, next."""
        at = self.position
        return at < self._count and (self._ahead[at].operator, self._ahead[at].blocks) == (operator, blocks)

    def expect(self, moment: Moment) -> None:
        """Expect what `moment` needs until the next one begins."""
        self.gradients_sent, self._expected = 0, moment

    def pass_over(self, count: int) -> None:
        """Record that the next `count` moments of the known trace have begun."""
        if not self._follows:
            self._moments += self._ahead[self.position : self.position + count]
        self.position += count

    def all_ahead(self, blocks: tuple[int, ...]) -> Moment | None:
        """Return the segment that has just begun as one moment, which uses `blocks`; None if its trace is unknown."""
        if self.known is None or not self._follows or not self._count or (self.position and not self._at_once):
            return None
        return Moment("all at once", blocks, *self.known.worst).times(self.growth)

    def all_at_once(self, expected: Moment) -> None:
        """Take `expected`, which `all_ahead` made, for the whole segment; that is no departure from the trace."""
        self.position, self._expected, self._at_once = self._count, expected, True

    def _leave_trace(self) -> None:
        """Record moments from here on, after those so far, as the next one may differ from the known trace."""
        if self._follows and self.known is not None:
            self._moments = list(self.known.moments[: self.position])
        self._follows = False

    def begins_with(self, live_bytes: int) -> None:
        """Record that nothing has run in the last moment yet, and that only `live_bytes` remain."""
        self._leave_trace()
        if self._moments:
            self._moments[-1] = Moment(self._moments[-1].operator, self.blocks(), live_bytes, (live_bytes,))

    def grew(self, live_bytes: int, leaving_bytes: int = 0) -> None:
        """Record that non-model memory grew to `live_bytes` within the last moment, `leaving_bytes` as in `moment`."""
        self._now = self._now.grown(live_bytes, leaving_bytes)

    def sent(self, own_bytes: int) -> None:
        """Record that a gradient was sent home, which leaves `own_bytes` beside chunks and gradients in flight."""
        self.gradients_sent += 1
        if self.measured:
            now = self._now
            self._now = Moment(now.operator, now.blocks, now.non_model_bytes, (*now.own_bytes, own_bytes))

    def blocks_until_again(self) -> set[int]:
        """Return the blocks that are used from now until the present moment's are used again, by another micro-batch
        say; those of the present moment if that is not known to be."""
        now, left = {*self._expected.blocks}, False
        found = {*now}
        for moment in self._ahead[self.position :]:
            if now.isdisjoint(moment.blocks):
                left = True
                found.update(moment.blocks)
            elif left:
                return found
        return now

    @property
    def place(self) -> tuple[Sequence[Moment], tuple[int, tuple[int, ...]]]:
        """What `blocks_until_again` follows from: the trace, and the place in it, with the blocks of the present
        moment."""
        return self._ahead, (self.position, self._expected.blocks)

    @property
    def expected(self) -> Moment:
        """What is expected until the next moment."""
        return self._expected

    @property
    def own_bytes(self) -> int:
        """The most bytes expected, up to the next moment or gradient, outside chunks and gradients in flight."""
        return self._expected.own_after(self.gradients_sent)

    @property
    def _now(self) -> Moment:
        self._leave_trace()
        return self._moments[-1] if self._moments else self._opening

    @_now.setter
    def _now(self, moment: Moment) -> None:
        if self._moments:
            self._moments[-1] = moment
        else:
            self._opening = moment

    def host_use(self, block: int, *, reads: bool) -> None:
        """Record a use of `block` in host staging; unless it `reads`, it overwrites all of the block."""
        if not reads:
            self._overwritten.add(len(self._host))
        self._host.append(block)

    def known_moments(self) -> list[Moment]:
        """Return all known moments: those of the running segment except the last one, and those of every trace."""
        self._leave_trace()
        return self._moments[:-1] + [moment for trace in self.book.traces() for moment in trace.moments]

    def blocks(self) -> tuple[int, ...]:
        """Return the blocks that the last moment uses."""
        self._leave_trace()
        return self._moments[-1].blocks if self._moments else ()
