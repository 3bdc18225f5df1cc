"""Schedules against a model that looks at every use, and the book of segments."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.schedule.tested import NEVER, STEP, Moment, Schedule, SegmentTrace, Tier, TraceBook, UseSequence

blocks = st.integers(0, 4)
uses = st.lists(st.lists(blocks, min_size=1, max_size=3, unique=True).map(tuple), max_size=8)


class NaiveSchedule:
    """The same promises, kept by looking at one use after the other."""

    def __init__(self, uses: list[tuple[int, ...]], segment: int = NEVER) -> None:
        self.uses = uses * 40
        self.segment = segment
        self.position = 0
        self.absent: set[int] = set()

    def next_use(self, block: int) -> int:
        if block in self.absent:
            return self.position - 1
        return self.next_use_from(block, self.position)

    def next_use_from(self, block: int, start: int) -> int:
        return next((at for at in range(start, len(self.uses)) if block in self.uses[at]), NEVER)

    def reach(self, blocks: tuple[int, ...], lap: int) -> bool:
        """Only the lap that `position` is in counts for what lies behind."""
        first = self.position // lap * lap if lap else 0
        known = [at for at in range(first, len(self.uses)) if self.uses[at] == blocks and at < self.segment]
        if not known:
            return False
        self.position = 1 + min(known, key=lambda at: (abs(at - self.position), at < self.position))
        self.absent = set(blocks)
        return True


@given(
    uses,
    st.none() | st.integers(0, 8),
    st.lists(st.tuples(st.integers(0, 7), st.lists(blocks, max_size=2)), max_size=20),
)
def test_reaching_uses_moves_on_as_if_every_use_was_looked_at(
    uses: list[tuple[int, ...]], segment: int | None, reached: list[tuple[int, list[int]]]
) -> None:
    end = NEVER if segment is None else segment
    schedule = Schedule(uses, segment=end)
    naive = NaiveSchedule(uses, segment=end)
    for number, met in reached:
        blocks = uses[number] if number < len(uses) else (0, 1, 2, 3)
        assert schedule.reach(blocks) == naive.reach(blocks, len(uses))
        for block in met:
            schedule.meet((block,))
            naive.absent.discard(block)
        assert schedule.position == naive.position
        assert [schedule.next_use(b) for b in range(6)] == [naive.next_use(b) for b in range(6)]


@given(uses.filter(bool), st.integers(0, 20), st.integers(0, 14), st.integers(0, 40))
def test_the_furthest_use_of_what_some_uses_have_is_found_and_whose_is_far(
    uses: list[tuple[int, ...]], start: int, more: int, least: int
) -> None:
    schedule, naive, end = Schedule(uses), NaiveSchedule(uses), start + min(more, len(uses) + 1)
    again = {at: max((naive.next_use_from(b, at + 1) for b in naive.uses[at]), default=0) for at in range(start, end)}
    assert schedule.first_with(least + 1, start, end) == next((at for at in again if again[at] > least), end)
    if any(again.values()):
        assert schedule.furthest(start, end) == max(again.values())


@given(
    uses,
    st.none() | st.integers(0, 10),
    st.lists(st.integers(0, 7), max_size=12),
    st.integers(0, 12),
)
def test_between_now_and_the_horizon_lie_the_next_uses_in_order_up_to_the_barrier(
    uses: list[tuple[int, ...]], barrier: int | None, reached: list[int], count: int
) -> None:
    schedule, naive = Schedule(uses, barrier=barrier), NaiveSchedule(uses)
    for number in reached:
        schedule.reach(uses[number % len(uses)] if uses else ())
    end = schedule.position + count
    end = min(end, end if barrier is None else barrier)
    expected = naive.uses[schedule.position : max(schedule.position, end)]
    assert list(schedule.between(schedule.position, min(schedule.position + count, schedule.barrier))) == expected


def test_a_block_of_the_present_use_is_used_now_until_it_was_met() -> None:
    schedule = Schedule([(0, 1), (2,), (0,)])
    assert schedule.reach((0, 1))
    schedule.meet((0,))
    assert (schedule.absent, schedule.next_use(1), schedule.next_use(0)) == ((1,), 0, 2)
    schedule.meet((1,))
    assert (schedule.position, schedule.next_use(1)) == (1, 3)


def test_two_blocks_of_one_chunk_in_one_operator_are_one_use() -> None:
    """Found as 30 % more bytes than needed: a weight and its bias lie in one chunk, and acquiring the second moved the
    schedule on to the chunk's next use, a whole forward away in the end."""
    schedule = Schedule([(0,), (1,), (2,), (0,)])
    assert schedule.reach((0,))
    schedule.meet((0,))
    schedule.meet((0,))
    assert (schedule.position, schedule.next_use(1)) == (1, 1)


def test_an_unexpected_use_moves_to_the_nearest_known_one_and_the_next_expected_one_moves_back() -> None:
    schedule = Schedule([(0,), (1,), (2,), (3,), (4,), (0,)])
    for block in (0, 1):
        assert schedule.reach((block,))
    assert schedule.reach((0,))
    assert schedule.position == 1, "the use behind is nearer"
    assert schedule.reach((2,))
    assert schedule.position == 3
    assert not schedule.reach((2, 3))
    assert schedule.position == 3


def test_no_use_of_a_later_segment_is_taken_for_one_of_this() -> None:
    schedule = Schedule([(0,), (1,), (2,), (1,)], segment=2)
    assert not schedule.reach((2,))
    assert schedule.reach((1,))
    assert schedule.position == 2


def test_an_empty_schedule_expects_nothing() -> None:
    schedule = Schedule()
    assert (schedule.next_use(0), schedule.absent, schedule.barrier) == (NEVER, (), 0)
    assert not schedule.reach((0,))


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
    assert (newer.worst[0], SegmentTrace("c").worst[0]) == (5, 0)


def test_what_segments_overwrite_lies_at_the_same_places_of_their_schedule() -> None:
    book = TraceBook()
    book.put(SegmentTrace("backward", (), (5, 6), frozenset({0})))
    book.put(SegmentTrace(STEP, (), (5, 7, 6), frozenset({1})))
    book.follows("backward", STEP)
    schedule = book.schedules("backward")[Tier.HOST]
    assert [schedule.reads(at) for at in range(10)] == [False, True, True, False, True] * 2


def test_what_is_skipped_still_overwrites_its_block_and_until_then_nobody_reads_that_ahead() -> None:
    """Block 1 is written, then read; the use of 2, which came between, is early this time."""
    schedule = Schedule(UseSequence([(0,), (1,), (2,), (1,), (3,)], overwritten=[1]))
    assert [schedule.reads(at) for at in range(5)] == [True, False, True, True, True]
    schedule.reach((0,))
    schedule.reach((2,))
    assert [schedule.reads(at) for at in range(3, 10)] == [False, True, True, False, True, False, True]
    schedule.reach((1,))  # it is late, and written now
    assert [schedule.reads(at) for at in range(3, 10)] == [True, True, True, False, True, True, True]


def test_what_is_skipped_and_only_read_is_read_ahead_as_ever() -> None:
    schedule = Schedule(UseSequence([(0,), (1,), (2,), (3,), (1,)], overwritten=[2]))
    schedule.reach((0,))
    schedule.reach((2,))
    assert [schedule.reads(at) for at in range(5)] == [True, True, False, True, True]


@pytest.mark.parametrize("start", range(12))
def test_between_is_what_comes_then_also_over_the_end_of_a_round(start: int) -> None:
    uses = [(0,), (1,), (2, 3), (4,)]
    schedule = Schedule(uses)
    for end in range(14):
        assert list(schedule.between(start, end)) == [uses[at % 4] for at in range(start, end)]
