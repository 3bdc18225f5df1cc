"""Of a product of parameters enough cases are left for every two values to meet."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from tests.pairs import every_two_meet


@pytest.mark.parametrize(("sizes", "most"), [((4, 2, 4), 16), ((5, 3, 3), 16), ((4, 2, 2, 3), 14), ((7, 2), 14)])
def test_every_two_values_meet_in_few_cases(sizes: tuple[int, ...], most: int) -> None:
    cases = list(product(*map(range, sizes)))
    chosen = [cases[index] for index in every_two_meet(cases)]
    for first, second in combinations(range(len(sizes)), 2):
        assert {(case[first], case[second]) for case in chosen} == set(
            product(range(sizes[first]), range(sizes[second]))
        )
    assert len(chosen) <= most


def test_what_never_meets_is_not_asked_for() -> None:
    assert every_two_meet([(0, 0, 0), (1, 1, 1)]) == [0, 1]


def test_a_single_parameter_or_case_keeps_everything() -> None:
    assert every_two_meet([(0,), (1,), (2,)]) == [0, 1, 2]
    assert every_two_meet([(0, 0)]) == [0]
    assert every_two_meet([]) == []
