"""Files that were cut, or changed by hand, are refused in one line."""

from __future__ import annotations

import functools
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import hetmem
from hetmem.base.hardware import HardwareProfile, ProfileError
from hetmem.cli import main
from tests.planner.tested import Plan, PlanError, planner
from tests.test_planning import BATCH, GPT

ODD: list[Any] = [None, True, -1, 0.5, float("nan"), float("inf"), 10**400, "", "words", [], [[]], [None], {}]
ODD += [{"device": None}, {"device": -1}, {"": ""}]
"""What may stand in place of any value."""


@functools.cache
def fitting() -> Plan:
    return planner.plan(GPT, BATCH, hetmem.Budget(device="2MiB", host="16MiB", device_chunks="1MiB"))


def refusal(data: Any) -> str | None:
    """What is said of `data`; None if it is taken."""
    try:
        HardwareProfile.from_dict(data)
    except ProfileError as error:
        return str(error)
    return None


def test_roles_that_are_more_than_the_peak_are_said_to_be_of_different_moments() -> None:
    plan, said = fitting(), "the most of each, at different moments"
    roles = {**plan.role_bytes, "device": {"copies": 3 << 20, "activations": 4 << 20}}
    for peak, expected in ((5 << 20, True), (7 << 20, False)):
        text = str(replace(plan, role_bytes=roles, peak_bytes={**plan.peak_bytes, "device": peak}))
        assert (said in " ".join(text.split())) == expected  # it may be on two lines


@pytest.mark.parametrize("cut", [0, 1, 40, 1000])
def test_a_plan_that_was_cut_off_is_none(cut: int, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(fitting().to_dict())[:cut])
    with pytest.raises(PlanError, match=r"plan\.json is no plan"):
        hetmem.manage(GPT(), plan=path, device="sim")


def test_brackets_without_end_are_no_plan_and_no_profile(tmp_path: Path) -> None:
    path = tmp_path / "deep.json"
    path.write_text("[" * 100_000)
    with pytest.raises(PlanError, match=r"deep\.json is no plan"):
        Plan.load(path)
    with pytest.raises(ProfileError, match=r"deep\.json: .* must be JSON"):
        planner.load_profile(path)


def test_what_is_no_regular_file_or_larger_than_any_plan_is_none(tmp_path: Path) -> None:
    """A pipe would be waited for, and brackets take a hundred times their bytes as they are read."""
    path = tmp_path / "plan.json"
    os.mkfifo(path)
    with pytest.raises(PlanError, match=r"plan\.json is no plan: it is no regular file"):
        Plan.load(path)
    path.unlink()
    path.write_text(f"[{'[],' * (2 << 20)}[]]")
    with pytest.raises(PlanError, match=r"plan\.json is no plan: it has more than 4\.00 MiB"):
        Plan.load(path)
    path.write_text('{"version": 10, "fits": true, "fits": false}')
    with pytest.raises(PlanError, match=r"plan\.json is no plan: it has the key 'fits' twice"):
        Plan.load(path)


def figures(data: dict[str, Any], before: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    found = []
    for key, value in data.items():
        found += figures(value, (*before, key)) if isinstance(value, dict) else [(*before, key)]
    return found


@pytest.mark.parametrize("path", figures(planner.load_profile("l4").to_dict()), ids=".".join)
def test_a_profile_with_an_odd_value_is_refused_by_the_name_of_the_figure(path: tuple[str, ...]) -> None:
    for value in [*ODD, 1e301]:
        data = planner.load_profile("l4").to_dict()
        place: Any = data
        for group in path[:-1]:
            place = place[group]
        place[path[-1]] = value
        said = refusal(data)
        assert said is None or path[-1] in said


def test_a_figure_of_four_hundred_digits_is_absurd_and_no_crash(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = planner.load_profile("l4").to_json().replace('"cores": ', f'"cores": {10**400}')
    (tmp_path / "mine.json").write_text(text)
    command = ["plan", "tests.test_planning:GPT", "--input", "2x32", "--hardware", str(tmp_path / "mine.json")]
    assert main(command) == 2
    assert "host.cores: expected a number" in capsys.readouterr().err
    (tmp_path / "mine.json").write_text(text.replace(str(10**400), "1" + "0" * 5000))
    assert main(command) == 2
    assert "must be JSON" in capsys.readouterr().err
