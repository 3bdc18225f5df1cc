"""How reports are saved, shown from files, compared and refused."""

from __future__ import annotations

import copy
import json
import math
import os
import re
from pathlib import Path

import pytest

import hetmem
from tests.report.models import trained
from tests.report.sample import EMPTY_TIMELINE, LINKS, SAMPLE
from tests.report.tested import (
    compare,
    comparison,
    files,
    render,
    show,
    table,
)


def test_to_dict_is_a_new_dict_and_equals_the_saved_json(tmp_path: Path) -> None:
    model = trained("host", tmp_path)
    report = hetmem.report(model)
    report.save(tmp_path / "r.json")
    first = report.to_dict()
    assert json.loads((tmp_path / "r.json").read_text()) == first
    first["tiers"].clear()
    assert report.to_dict()["tiers"]
    hetmem.release(model)


@pytest.mark.parametrize("name", ["r.txt", "r", "r.htm", ".json", "json", "r.json.gz", "r.trace"])
def test_an_unknown_ending_is_refused_and_nothing_is_written(name: str, tmp_path: Path) -> None:
    model = trained("host", tmp_path / "model", steps=0)
    out = tmp_path / "out"
    out.mkdir()
    with pytest.raises(ValueError, match=re.escape(repr(name))):
        hetmem.report(model).save(out / name)
    assert list(out.iterdir()) == []
    hetmem.release(model)


def test_a_number_that_is_not_finite_is_never_written(tmp_path: Path) -> None:
    for ending in (".json", ".html", ".trace.json"):
        data = {**SAMPLE, "chunk_waste": math.nan, "parameters": math.inf}
        if ending == ".trace.json":
            data = {**SAMPLE, "timeline": {**EMPTY_TIMELINE, "segments": [["forward", 0, math.nan]]}}
        with pytest.raises(ValueError, match="not JSON compliant"):
            files.save(data, tmp_path / f"r{ending}")
    assert list(tmp_path.iterdir()) == []


def test_saving_leaves_the_old_file_when_it_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "r.json"
    target.write_text("old")

    def fail(source: str, destination: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="No space"):
        files.save(SAMPLE, target)
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]
    assert target.read_text() == "old"


def test_a_saved_file_has_the_mode_of_any_new_file(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("")
    files.save(SAMPLE, tmp_path / "r.json")
    assert (tmp_path / "r.json").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_the_table_names_every_tier_link_and_term(tmp_path: Path) -> None:
    model = trained("nvme", tmp_path)
    report = hetmem.report(model)
    text = str(report)
    for word in ("device", "host", "nvme", *LINKS, "Compute", "Host optimizer", "binds", "Overlap", "faults"):
        assert word in text
    assert max(map(len, text.splitlines())) <= 100
    assert "\x1b" not in text
    report.save(tmp_path / "r.json")
    assert show(tmp_path / "r.json") == text
    hetmem.release(model)


def test_a_saved_report_renders_to_the_same_files(tmp_path: Path) -> None:
    model = trained("nvme", tmp_path)
    report = hetmem.report(model)
    report.save(tmp_path / "r.json")
    for ending in ("json", "html", "trace.json"):
        report.save(tmp_path / f"now.{ending}")
        render(tmp_path / "r.json", tmp_path / f"later.{ending}")
        assert (tmp_path / f"now.{ending}").read_text() == (tmp_path / f"later.{ending}").read_text()
    hetmem.release(model)


def test_the_text_says_what_a_step_writes_to_nvme_as_drives_are_rated() -> None:
    report = copy.deepcopy(SAMPLE)
    report["step"]["bytes"]["nvme_write"] = 0
    assert "written in the step" not in table(report)
    report["step"]["bytes"]["nvme_write"], report["step"]["nvme_written_bytes_per_day"] = 3 << 20, 5 << 40
    said = " ".join(table(report).split())
    assert "NVMe: 3.00 MiB written in the step, 5.00 TiB a day at this pace." in said


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "is not a saved report"),
        ("[]", "is not a saved report"),
        ('{"schema": "other"}', "is not a saved report"),
        ('{"schema": "hetmem.report", "schema_version": 99}', "version 99 of the report's schema"),
    ],
)
def test_what_is_no_report_is_refused_by_name(text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text(text)
    with pytest.raises(ValueError, match=f"r.json.*{says}|{says}"):
        show(tmp_path / "r.json")


def test_a_comparison_shows_both_and_the_change(tmp_path: Path) -> None:
    slow = {**SAMPLE, "step": {**SAMPLE["step"], "seconds": 3.0, "sentence": "NVMe read binds."}}
    files.save(SAMPLE, tmp_path / "a.json")
    files.save(slow, tmp_path / "b.json")
    lines = compare(tmp_path / "a.json", tmp_path / "b.json").splitlines()
    assert lines[0].split() == ["a.json", "b.json", "change"]
    assert next(line for line in lines if line.startswith("Step time")).split()[2:] == [
        "2.00",
        "s",
        "3.00",
        "s",
        "+50.0%",
    ]
    assert next(line for line in lines if line.startswith("Parameters")).split() == ["Parameters", "10", "10", "="]
    assert lines[-1] == "b.json: NVMe read binds."


def test_a_share_changes_by_points() -> None:
    """From 40 to 60 percent is not "+50.0%" in a column beside percentages."""
    text = comparison("a", SAMPLE, "b", {**SAMPLE, "chunk_waste": SAMPLE["chunk_waste"] + 0.25})
    assert next(line for line in text.splitlines() if line.startswith("Chunk waste")).endswith("+25.0 points")


def test_a_comparison_of_two_models_says_so() -> None:
    other = comparison("a", SAMPLE, "b", {**SAMPLE, "model": "Other", "parameters": 1234})
    assert f"Two models: a is of {SAMPLE['model']} of 10 parameters, b of Other of 1,234 parameters." in other
    assert "Two models" not in comparison("a", SAMPLE, "b", SAMPLE)


def test_a_table_says_of_what_it_is() -> None:
    assert table({**SAMPLE, "created_at": "2030-01-02T03:04:05+00:00"}).splitlines()[0] == (
        f"{SAMPLE['model']}, 10 parameters, 2030-01-02 03:04 UTC"
    )


def test_a_report_that_lacks_something_is_refused_by_name(tmp_path: Path) -> None:
    files.save({key: value for key, value in SAMPLE.items() if key != "links"}, tmp_path / "a.json")
    with pytest.raises(ValueError, match=r"a\.json is not a whole report: links is missing; save one with"):
        show(tmp_path / "a.json")


def test_a_comparison_with_a_run_without_a_step_leaves_its_cells_open(tmp_path: Path) -> None:
    files.save(SAMPLE, tmp_path / "a.json")
    files.save({**SAMPLE, "step": None}, tmp_path / "b.json")
    text = compare(tmp_path / "a.json", tmp_path / "b.json")
    assert next(line for line in text.splitlines() if line.startswith("Step time")).split()[2:] == ["2.00", "s", "-"]
