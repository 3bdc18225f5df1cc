"""Arithmetic of time intervals: unions and overlaps. Pure; knows nothing of what the intervals mean."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same points of time as disjoint intervals in order; empty ones are left out."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        elif end > start:
            merged.append((start, end))
    return merged


def clip(intervals: Iterable[Interval], start: float, end: float) -> list[Interval]:
    """What of `intervals` lies within [start, end]."""
    return [(max(low, start), min(high, end)) for low, high in intervals if high > start and low < end]


def length(disjoint: Iterable[Interval]) -> float:
    """Their total length."""
    return sum(end - start for start, end in disjoint)


def overlap(disjoint: list[Interval], start: float, end: float) -> float:
    """How much of [start, end] the intervals of a `union` cover. O(log n + overlapping)."""
    index = max(0, bisect_left(disjoint, (start, start)) - 1)
    covered = 0.0
    while index < len(disjoint) and disjoint[index][0] < end:
        low, high = disjoint[index]
        covered += max(0.0, min(high, end) - max(low, start))
        index += 1
    return covered


def without(disjoint: list[Interval], taken: list[Interval]) -> list[Interval]:
    """What of the intervals of one `union` is not covered by those of another. O(n + m)."""
    left: list[Interval] = []
    first = 0
    for start, end in disjoint:
        while first < len(taken) and taken[first][1] <= start:
            first += 1
        at = first
        while at < len(taken) and taken[at][0] < end:
            if taken[at][0] > start:
                left.append((start, taken[at][0]))
            start = max(start, taken[at][1])
            at += 1
        if start < end:
            left.append((start, end))
    return left
