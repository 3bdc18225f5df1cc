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


def case(*values: Any, nightly: bool) -> Any:
    """Parameters of a test; with `--all-cases` only if `nightly`."""
    return pytest.param(*values, marks=[pytest.mark.nightly] * nightly)


def some(values: Iterable[Any], every: int) -> list[Any]:
    """Every so many of `values` (a tuple: of several parameters), and the others with `--all-cases`."""
    cases = [value if isinstance(value, tuple) else (value,) for value in values]
    return [case(*each, nightly=at % every > 0) for at, each in enumerate(cases)]


def turns(first: Iterable[Any], second: Sequence[Any]) -> list[Any]:
    """All of `first`, each with one of `second` in turn, and the other pairs of them with `--all-cases`."""
    product = [(at, one, number, other) for at, one in enumerate(first) for number, other in enumerate(second)]
    return [case(one, other, nightly=at % len(second) != number) for at, one, number, other in product]
