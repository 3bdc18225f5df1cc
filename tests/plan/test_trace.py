"""Schedules against a model that looks at every use, and the book of segments."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from hetmem.plan.trace import NEVER, Moment, Schedule, SegmentTrace, TraceBook

blocks = st.integers(0, 4)
uses = st.lists(st.lists(blocks, min_size=1, max_size=3, unique=True).map(tuple), max_size=8)


class NaiveSchedule:
    """The same promises, kept by looking at one use after the other."""

    def __init__(self, uses: list[tuple[int, ...]], *, periodic: bool) -> None:
        self.uses = uses * 40 if periodic else uses
        self.position = 0
        self.unmet: set[int] = set()

    def next_use(self, block: int) -> int:
        if block in self.unmet:
            return self.position - 1
        return self.next_use_from(block, self.position)

    def next_use_from(self, block: int, start: int) -> int:
        return next((at for at in range(start, len(self.uses)) if block in self.uses[at]), NEVER)

    def meet(self, block: int, window: int) -> bool:
        at = self.next_use(block)
        if at == NEVER or at - self.position > window:
            return False
        if at >= self.position:
            self.position = at + 1
            self.unmet = set(self.uses[at])
        self.unmet.discard(block)
        return True


@given(uses, st.booleans(), st.lists(blocks, max_size=20), st.integers(0, 6))
def test_meeting_uses_moves_on_as_if_every_use_was_looked_at(
    uses: list[tuple[int, ...]], periodic: bool, met: list[int], window: int
) -> None:
    schedule, naive = Schedule(uses, periodic=periodic), NaiveSchedule(uses, periodic=periodic)
    for block in met:
        assert schedule.meet(block, window) == naive.meet(block, window)
        assert schedule.position == naive.position
        assert [schedule.next_use(b) for b in range(6)] == [naive.next_use(b) for b in range(6)]


@given(uses, st.booleans(), st.integers(0, 20))
def test_the_next_use_from_any_start_is_the_first_one_there(
    uses: list[tuple[int, ...]], periodic: bool, start: int
) -> None:
    schedule, naive = Schedule(uses, periodic=periodic), NaiveSchedule(uses, periodic=periodic)
    for block in range(6):
        assert schedule.next_use(block, start) == naive.next_use_from(block, start)


@given(
    uses,
    st.booleans(),
    st.none() | st.integers(0, 10),
    st.lists(blocks, max_size=12),
    st.integers(0, 12),
)
def test_upcoming_are_the_next_uses_in_order_up_to_the_barrier(
    uses: list[tuple[int, ...]], periodic: bool, barrier: int | None, met: list[int], count: int
) -> None:
    schedule, naive = Schedule(uses, periodic=periodic, barrier=barrier), NaiveSchedule(uses, periodic=periodic)
    for block in met:
        schedule.meet(block, 4)
    end = schedule.position + count
    end = min(end, end if barrier is None else barrier)
    expected = [block for use in naive.uses[schedule.position : max(schedule.position, end)] for block in use]
    assert list(schedule.upcoming(count)) == expected


def test_a_block_of_the_present_use_is_used_now_until_it_was_met() -> None:
    schedule = Schedule([(0, 1), (2,), (0,)])
    assert schedule.meet(0)
    assert (schedule.now(), schedule.next_use(1), schedule.next_use(0)) == ((0, 1), 0, 2)
    assert schedule.meet(1)
    assert (schedule.position, schedule.next_use(1)) == (1, 3)


def test_a_use_beyond_the_window_does_not_move_the_schedule() -> None:
    schedule = Schedule([(0,), (1,), (2,), (3,)])
    assert not schedule.meet(3, window=2)
    assert schedule.position == 0
    assert schedule.meet(2, window=2)
    assert schedule.position == 3


def test_an_empty_schedule_expects_nothing() -> None:
    schedule = Schedule()
    assert (schedule.next_use(0), schedule.now(), list(schedule.upcoming(8))) == (NEVER, (), [])
    assert not schedule.meet(0)


def test_a_chain_follows_the_last_seen_successors_and_stops_where_it_repeats_or_is_unknown() -> None:
    book = TraceBook()
    for key in ("forward", "backward", "step", "evaluation"):
        book.put(SegmentTrace(key))
    keys = ["forward", "backward", "step", "evaluation", "forward", "backward", "step", "forward", "unknown"]
    for first, second in pairwise(keys):
        book.follows(first, second)
    assert book.follower("step") == "forward"
    assert [trace.key for trace in book.chain("backward")] == ["backward", "step", "forward"]
    assert [trace.key for trace in book.chain("evaluation")] == ["evaluation", "forward"]
    assert book.chain("unknown") == []


def test_a_newer_trace_takes_the_place_of_the_older_one() -> None:
    book = TraceBook()
    book.put(SegmentTrace("a"))
    book.put(SegmentTrace("b"))
    newer = SegmentTrace("a", (Moment("mm", (0,), 5), Moment("add", (1,), 3)), (2,))
    book.put(newer)
    assert book.get("a") is newer
    assert [trace.key for trace in book.traces()] == ["a", "b"]
    assert (newer.peak_non_model_bytes(), SegmentTrace("c").peak_non_model_bytes()) == (5, 0)
