"""Cases enough of tests whose parameters are a full product: every two values meet, or each value occurs; or, of values
that many tests share, the one whose turn it is.

Faults that need three particular values at once are rare, and random programs look for them (Kuhn, Wallace, Gallo,
"Software fault interactions and implications for software testing", IEEE TSE 2004).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from itertools import combinations
from typing import Any
from zlib import crc32

import pytest

Values = tuple[Hashable, ...]


def values_of(case: pytest.Function) -> Values:
    """The value of each parameter of a test; those that are named together are one."""
    marked = [marker.args[0] for marker in case.iter_markers("parametrize")]
    together = [[name.strip() for name in names.split(",")] if isinstance(names, str) else names for names in marked]
    single = [[name] for name in case.callspec.params if not any(name in names for names in together)]
    return tuple(tuple(id(case.callspec.params[name]) for name in names) for names in together + single)


def every_two_meet(cases: Sequence[Values]) -> list[int]:
    """Indices of some of `cases`, in order, such that every two values that meet in one of all meet in one of them.

    A case is something for the value of each parameter; a value without another to meet is kept too.

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


def each_occurs(cases: Sequence[Values]) -> list[int]:
    """Indices of some of `cases`, in order, in which each value of each parameter occurs: as few as the parameter with
    most values needs, over which the values of the others take turns."""
    values = [set(enumerate(case)) for case in cases]
    missing, uses = set[Any]().union(*values), Counter[Any]()
    chosen = []
    while missing:
        best = max(range(len(cases)), key=lambda at: (len(values[at] & missing), -sum(uses[one] for one in values[at])))
        missing -= values[best]
        uses.update(values[best])
        chosen.append(best)
    return sorted(chosen)


def in_turn(name: str, cases: Sequence[Values]) -> list[int]:
    """Indices of some of `cases` of the test `name`, which shares a parameter with many others: `each_occurs`, or, if
    that is its only parameter, one case, by the name, so that the tests together have all of its values."""
    if cases and len(cases[0]) > 1:
        return each_occurs(cases)
    return [crc32(name.encode()) % len(cases)] if cases else []


ALL_CASES = False
"""Whether this run takes `--all-cases`; set before tests are imported."""


def examples(most: int) -> int:
    """How many examples Hypothesis tries: `most` with `--all-cases`, otherwise a third of them, the first."""
    return most if ALL_CASES else most // 3


THINNED = ("pairs", "each", "in_turn")
"""Marks of tests that leave out cases, the strongest first."""


def few_of(cases: Sequence[pytest.Function]) -> set[int]:
    """Indices of those cases of one test that its mark leaves."""
    mark = next(filter(cases[0].get_closest_marker, THINNED))
    values = [values_of(case) for case in cases]
    if mark == "pairs":
        return set(every_two_meet(values))
    return set(each_occurs(values) if mark == "each" else in_turn(cases[0].originalname, values))


def case(*values: Any, nightly: bool) -> Any:
    """Parameters of a test; with `--all-cases` only if `nightly`."""
    return pytest.param(*values, marks=[pytest.mark.nightly] * nightly)


def mostly(values: Iterable[Any], others: Iterable[Any], kinds: Iterable[Any] = ()) -> list[Any]:
    """Two parameters of a test: each of `kinds` with all of `others`, the rest of `values` with one in turn, and the
    other pairs with `--all-cases`."""
    kinds, others = list(kinds), list(others)
    return [
        case(value, other, nightly=value not in kinds and turn != at % len(others))
        for at, value in enumerate(values)
        for turn, other in enumerate(others)
    ]


def some(values: Iterable[Any], every: int) -> list[Any]:
    """Every so many of `values` (a tuple: of several parameters), and the others with `--all-cases`."""
    cases = [value if isinstance(value, tuple) else (value,) for value in values]
    return [case(*each, nightly=at % every > 0) for at, each in enumerate(cases)]
