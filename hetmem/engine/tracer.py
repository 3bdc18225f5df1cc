"""Records what each segment of a step uses, and turns what is known into the schedule of what comes next.

It observes: moments come in, traces and schedules go out. It moves nothing and decides nothing.
"""

from __future__ import annotations

from collections.abc import Hashable

from hetmem.schedule.trace import Moment, SegmentTrace, TraceBook


def segment_name(key: Hashable) -> str:
    """What a segment with `key` is, for people: "forward", "backward" or "step"."""
    return str(key[0]) if isinstance(key, tuple) else str(key)


class StepTracer:
    """The segment that runs now, beside what the book says of it.

    A segment is *measured* (its non-model bytes are watched) when its key is new, or when it left its trace; a
    segment that leaves its trace again and again is measured again only at the 1st, 2nd, 4th, 8th … time.
    """

    def __init__(self) -> None:
        self.book = TraceBook()
        self.key: Hashable | None = None
        self.measured = False
        self.position = 0
        self.known: SegmentTrace | None = None
        self._moments: list[Moment] = []
        self._opening = self._expected = Moment("begin", ())
        self._sent = 0
        self._host: list[int] = []
        self._overwritten: set[int] = set()
        self._departures: dict[Hashable, int] = {}

    def forget_traces(self) -> None:
        """No trace holds any more, nor will that of the segment that runs, which goes by what was known of it."""
        self.book, self.key = TraceBook(), None

    def must_measure(self, key: Hashable) -> bool:
        """Whether a segment with `key` has to be watched."""
        departures = self._departures.get(key, 0)
        return self.book.get(key) is None or (departures > 0 and departures & (departures - 1) == 0)

    def knows_a_backward(self) -> bool:
        """Whether a whole forward and backward was seen."""
        return any(segment_name(trace.key) == "backward" for trace in self.book.traces())

    def begin(self, key: Hashable, *, measured: bool) -> None:
        """End the segment that ran and begin one with `key`."""
        self.end()
        self.key, self.measured = key, measured
        self.known = self.book.get(key)
        self.position = self._sent = 0
        self._moments, self._host, self._overwritten = [], [], set()
        self._opening = Moment("begin", ())
        self._expected = self._opening if self.known is None else self.known.opening

    def end(self) -> None:
        """Put what was recorded into the book."""
        key, known = self.key, self.known
        if key is None:
            return
        self.key = None
        same = known is not None and [m.blocks for m in known.moments] == [m.blocks for m in self._moments]
        on_host = (tuple(self._host), frozenset(self._overwritten))
        if known is not None and same and not self.measured and (known.host_blocks, known.overwritten) == on_host:
            return
        if not self.measured and known is not None:
            if not same:
                self._departures[key] = self._departures.get(key, 0) + 1
                worst = known.worst()
                self._moments = [Moment(m.operator, m.blocks, *worst) for m in self._moments]
            else:
                self._moments = list(known.moments)
            self._opening = known.opening
        elif self._departures.get(key):
            self._departures[key] += 1
        self.book.put(SegmentTrace(key, tuple(self._moments), *on_host, self._opening))

    def moment(self, operator: str, blocks: tuple[int, ...], live_bytes: int, leaving_bytes: int = 0) -> Moment:
        """One operator boundary; returns what to expect until the next one. Of `live_bytes` gradients on their way home
        are `leaving_bytes`."""
        at = self.position
        self.position += 1
        self._sent = 0
        if self.measured or self.known is None:
            expected = Moment(operator, blocks, live_bytes, (live_bytes - leaving_bytes,))
        else:
            moments = self.known.moments
            expected = moments[at] if at < len(moments) else Moment(operator, blocks, *self.known.worst())
        as_expected = expected.blocks == blocks and expected.operator == operator
        self._moments.append(expected if as_expected else Moment(operator, blocks, live_bytes))
        self._expected = expected
        return expected

    def begins_with(self, live_bytes: int) -> None:
        """Nothing has run in the last moment, and no more than `live_bytes` are left of what was there."""
        if self._moments:
            self._moments[-1] = Moment(self._moments[-1].operator, self.blocks(), live_bytes, (live_bytes,))

    def grew(self, live_bytes: int, leaving_bytes: int = 0) -> None:
        """Non-model memory grew to `live_bytes` within the last moment, `leaving_bytes` of them as in `moment`."""
        self._now = self._now.grown(live_bytes, leaving_bytes)

    def sent(self, own_bytes: int) -> None:
        """A gradient was sent home within the last moment; beside those on their way `own_bytes` are no chunks."""
        self._sent += 1
        if self.measured:
            now = self._now
            self._now = Moment(now.operator, now.blocks, now.non_model_bytes, (*now.own_bytes, own_bytes))

    @property
    def own_bytes(self) -> int:
        """The most to expect, up to the next moment or gradient, that is neither chunks nor gradients on their way."""
        return self._expected.own_after(self._sent)

    @property
    def _now(self) -> Moment:
        return self._moments[-1] if self._moments else self._opening

    @_now.setter
    def _now(self, moment: Moment) -> None:
        if self._moments:
            self._moments[-1] = moment
        else:
            self._opening = moment

    def host_use(self, block: int, *, reads: bool) -> None:
        """`block` was used in host staging; unless it `reads`, that use overwrites all of it."""
        if not reads:
            self._overwritten.add(len(self._host))
        self._host.append(block)

    def known_moments(self) -> list[Moment]:
        """All moments that are known: those of the running segment up to the last one, and those of every trace."""
        return self._moments[:-1] + [moment for trace in self.book.traces() for moment in trace.moments]

    def blocks(self) -> tuple[int, ...]:
        """The blocks that the last moment uses."""
        return self._moments[-1].blocks if self._moments else ()
