"""Of a product of parameters enough cases are left for every two values to meet."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from itertools import combinations, product
from pathlib import Path

import pytest

from tests.pairs import each_occurs, every_two_meet, in_turn, mostly


@pytest.mark.parametrize(("sizes", "most"), [((4, 2, 4), 16), ((5, 3, 3), 16), ((4, 2, 2, 3), 14), ((7, 2), 14)])
def test_every_two_values_meet_in_few_cases(sizes: tuple[int, ...], most: int) -> None:
    cases = list(product(*map(range, sizes)))
    chosen = [cases[index] for index in every_two_meet(cases)]
    for first, second in combinations(range(len(sizes)), 2):
        assert {(case[first], case[second]) for case in chosen} == set(
            product(range(sizes[first]), range(sizes[second]))
        )
    assert len(chosen) <= most


@pytest.mark.parametrize("sizes", [(4, 2, 4), (16, 3), (3, 16, 2), (5,)])
def test_each_value_occurs_in_as_many_cases_as_there_are_of_one_and_the_others_take_turns(
    sizes: tuple[int, ...],
) -> None:
    cases = list(product(*map(range, sizes)))
    chosen = [cases[index] for index in each_occurs(cases)]
    assert len(chosen) == max(sizes)
    for axis, size in enumerate(sizes):
        uses = Counter(case[axis] for case in chosen)
        assert len(uses) == size and max(uses.values()) - min(uses.values()) <= 1


def test_mostly_is_all_of_the_kinds_and_one_of_each_other() -> None:
    cases = [case.values for case in mostly("abcd", range(3), kinds="b") if not case.marks]
    assert [sum(value == name for value, _ in cases) for name in "abcd"] == [1, 3, 1, 1]
    assert {other for value, other in cases if value != "b"} == {0, 1, 2} - {1} | {0}


def test_what_never_meets_is_not_asked_for() -> None:
    assert every_two_meet([(0, 0, 0), (1, 1, 1)]) == [0, 1]


def test_a_single_parameter_or_case_keeps_everything() -> None:
    assert every_two_meet([(0,), (1,), (2,)]) == [0, 1, 2]
    assert every_two_meet([(0, 0)]) == [0]
    assert every_two_meet([]) == []


def test_tests_that_share_a_parameter_have_its_values_in_turn() -> None:
    shared = [(value,) for value in range(3)]
    chosen = [in_turn(f"test_{number}", shared) for number in range(30)]
    assert {len(indices) for indices in chosen} == {1} and {index for (index,) in chosen} == {0, 1, 2}
    assert chosen == [in_turn(f"test_{number}", shared) for number in range(30)], "the same in every process"
    assert in_turn("test", [*product(range(3), range(2))]) == each_occurs([*product(range(3), range(2))])
    assert in_turn("test", []) == []


@pytest.mark.nightly
def test_a_test_that_is_asked_for_by_name_runs_whole_and_one_left_out_says_how_it_runs(tmp_path: Path) -> None:
    """From whatever directory, by itself or by one of its cases."""
    (tmp_path / "test_some.py").write_text(
        "import pytest\n"
        "@pytest.mark.nightly\ndef test_long(): ...\n"
        "@pytest.mark.each\n@pytest.mark.parametrize('a', [0, 1])\n@pytest.mark.parametrize('b', [0, 1])\n"
        "def test_thinned(a, b): ...\n"
    )
    root = Path(__file__).parent.parent
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "tests.conftest", f"--rootdir={root}"]

    def said(*arguments: str, at: Path = tmp_path) -> str:
        environment = {"PATH": "", "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
        command_line = [*command, "-c", root / "pyproject.toml", "--collect-only", "-q", *arguments]
        done = subprocess.run(command_line, cwd=at, env=environment, capture_output=True, text=True, check=False)
        return done.stdout + done.stderr

    assert "--all-cases also runs what" in said("test_some.py", "-k", "long")
    assert "test_long" in said("test_some.py::test_long")
    assert "test_long" in said(f"{tmp_path}/test_some.py::test_long", at=root)
    assert said("test_some.py").count("test_thinned") == 2
    assert said("test_some.py::test_thinned").count("test_thinned") == 4
    for case in ("0-0", "0-1", "1-0", "1-1"):
        assert f"test_thinned[{case}]" in said(f"test_some.py::test_thinned[{case}]", "test_some.py::test_long")
