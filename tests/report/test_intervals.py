"""Unions, overlaps and differences of intervals against sets of unit cells."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from tests.report.tested import clip, length, overlap, union, without

Interval = tuple[float, float]
INTERVALS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 8)).map(lambda pair: (pair[0], pair[0] + pair[1])))


def cells(intervals: list[Interval]) -> set[int]:
    return {cell for start, end in intervals for cell in range(int(start), int(end))}


@given(INTERVALS)
def test_a_union_is_disjoint_in_order_and_covers_the_same(intervals: list[Interval]) -> None:
    merged = union(intervals)
    assert all(before[1] < after[0] for before, after in pairwise(merged))
    assert cells(merged) == cells(intervals)
    assert length(merged) == len(cells(intervals))


@given(INTERVALS, st.integers(0, 30), st.integers(1, 10))
def test_clip_and_overlap_see_only_what_is_within(intervals: list[Interval], start: int, size: int) -> None:
    inside = cells(intervals) & set(range(start, start + size))
    assert cells(clip(intervals, start, start + size)) == inside
    assert overlap(union(intervals), start, start + size) == len(inside)


@given(INTERVALS, INTERVALS)
def test_a_difference_is_what_only_the_first_covers(left: list[Interval], right: list[Interval]) -> None:
    rest = without(union(left), union(right))
    assert cells(rest) == cells(left) - cells(right)
    assert rest == union(rest)
