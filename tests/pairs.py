"""Cases enough for every two values to meet, of tests whose parameters are a full product.

Faults that need three particular values at once are rare, and random programs look for them (Kuhn, Wallace, Gallo,
"Software fault interactions and implications for software testing", IEEE TSE 2004).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import Any

import pytest


def every_two_meet(cases: Sequence[tuple[int, ...]]) -> list[int]:
    """Indices of some of `cases`, in order, such that every two values that meet in one of all meet in one of them.

    A case is a number for the value of each parameter; a value without another to meet is kept too.

    Greedy: the case with most that is new comes next, the first of equals. So which ones depends on `cases` only.
    """
    pairs = [{*combinations(enumerate(case), 1), *combinations(enumerate(case), 2)} for case in cases]
    missing = set().union(*pairs)
    chosen = []
    while missing:
        best = max(range(len(cases)), key=lambda index: len(pairs[index] & missing))
        missing -= pairs[best]
        chosen.append(best)
    return sorted(chosen)


def some(values: Iterable[Any], every: int) -> list[Any]:
    """Parameters of a test (a tuple: several): every so many of `values`, and the others with `--all-cases`."""
    nightly = pytest.mark.nightly
    return [
        pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=[nightly] * (at % every > 0))
        for at, value in enumerate(values)
    ]
