"""The report of a run by a plan shows what was planned beside what it measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import hetmem
from tests.report.sample import LINKS, SAMPLE
from tests.report.tested import page_text, planner, table
from tests.test_planning import BATCH, GPT

STREAMED = hetmem.Budget(device="2MiB", host="16MiB", device_chunks="1MiB")
WHOLE = hetmem.Budget(device="64MiB", host="16MiB")
PLANNED: dict[str, Any] = {
    "hardware": "a machine",
    "rows": 4,
    "micro_batches": 2,
    "step_seconds": 1.5,
    "terms": {"compute": 1.25, "host_optimizer": 0.25, **dict.fromkeys(LINKS, 0.0)},
    "peak_bytes": {"device": 60, "host": 50, "nvme": 0},
}


def lines(data: dict[str, Any]) -> dict[str, list[str]]:
    """What the table says behind each name of a row of what was planned."""
    text = table(data)
    rows = text[text.index("planned  ") :].split("\n\n", 1)[0].splitlines()[2:]
    return {row[:16].strip(): [cell.strip() for cell in row[16:].split("  ") if cell.strip()] for row in rows}


@pytest.mark.each
@pytest.mark.parametrize("budget", [STREAMED, WHOLE], ids=["streamed", "whole"])
@pytest.mark.parametrize("steps", [0, 3])
def test_a_report_has_what_the_plan_expects(budget: hetmem.Budget, steps: int, tmp_path: Path) -> None:
    plan = planner.plan(GPT, BATCH, budget)
    plan.save(tmp_path / "plan.json")
    model = hetmem.manage(GPT(), plan=tmp_path / "plan.json", device="sim")
    optimizer = hetmem.AdamW(model.parameters())
    for _ in range(steps):
        model(BATCH).backward()
        optimizer.step()
        optimizer.zero_grad()
    report = hetmem.report(model)
    planned = report.to_dict()["planned"]
    assert planned["step_seconds"] == plan.step_seconds
    assert planned["peak_bytes"] == plan.peak_bytes
    assert (planned["hardware"], planned["rows"], planned["micro_batches"]) == (plan.hardware, 2, 1)
    assert planned["terms"] == {"host_optimizer": plan.terms["update"]} | {
        name: seconds for name, seconds in plan.terms.items() if name != "update"
    }
    assert set(planned["terms"]) == {"compute", "host_optimizer", *LINKS}
    if steps:
        assert set(report.to_dict()["step"]["terms"]) == set(planned["terms"])
        assert report.to_dict()["tiers"]["host"]["peak_bytes"] == planned["peak_bytes"]["host"]
    assert f"Planned for {plan.hardware}" in str(report).replace("\n", " ")
    assert [said for said in report.to_dict()["missing"] if said.startswith("Planned times are of a device with cores")]
    report.save(tmp_path / "run.json")
    assert json.loads((tmp_path / "run.json").read_text())["planned"] == planned
    hetmem.release(model)


def test_a_run_without_a_plan_has_none() -> None:
    model = hetmem.manage(GPT(), WHOLE, device="sim")
    report = hetmem.report(model)
    assert report.to_dict()["planned"] is None
    assert not [said for said in report.to_dict()["missing"] if said.startswith("Planned times")]
    assert "plan" not in str(report).lower()
    hetmem.release(model)


def test_the_table_says_how_far_the_plan_is_off() -> None:
    said = lines({**SAMPLE, "planned": PLANNED})
    assert said["Step time"] == ["1.50 s", "2.00 s", "-25.0%"]
    assert said["Compute"] == ["1.25 s", "1.00 s", "+25.0%"]
    assert said["Host optimizer"] == ["250.0 ms", "500.0 ms", "-50.0%"]
    assert said["NVMe read"] == ["0 µs", "500.0 ms", "-100.0%"]
    assert said["Device peak"] == ["60 B", "50 B", "+20.0%"]
    assert said["Host peak"] == ["50 B", "50 B", "+0.0%"]
    assert "Planned for a machine, 2 micro-batches of 4 rows a step." in table({**SAMPLE, "planned": PLANNED})


def test_before_a_whole_step_only_the_peaks_are_beside_the_plan() -> None:
    said = lines({**SAMPLE, "planned": PLANNED, "step": None})
    assert said["Step time"] == ["1.50 s", "-"]
    assert said["Device peak"] == ["60 B", "50 B", "+20.0%"]


def test_a_report_that_was_saved_before_there_were_plans_in_it_is_shown() -> None:
    assert "planned" not in SAMPLE
    assert "plan is off by" not in table(SAMPLE)
    assert "Planned and measured" in page_text(SAMPLE)  # hidden, as the page finds nothing planned
