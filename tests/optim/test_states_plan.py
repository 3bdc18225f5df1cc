"""Plan and report of an optimizer with `budget=`: the planned bytes are those of a run, and the report tells them."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

import hetmem
from hetmem import cli
from tests.optim.test_unmanaged import PLACES, budget, build, train


@pytest.mark.parametrize("place", PLACES)
def test_a_plan_has_the_bytes_of_a_run_and_the_report_those_that_it_moved(place: str, tmp_path: Path) -> None:
    given = budget(place, tmp_path)
    plan = hetmem.plan_optimizer(build, given, offloaded=True)
    room = plan.budget_bytes
    within = hetmem.Budget(host=room["host"], nvme=room["nvme"] or None, nvme_dir=tmp_path if room["nvme"] else None)
    assert plan.fits and room["host"] <= given.limits().host_bytes, str(plan)
    model = build()
    optimizer = hetmem.AdamW(model.parameters(), budget=within)
    report = optimizer.report()
    assert "no step yet" in str(report)
    train(model, optimizer, range(2))
    report = optimizer.report()
    assert (report.state_bytes, report.slots_bytes) == (plan.state_bytes, plan.slots_bytes)
    assert (report.state_bytes["nvme"] > 0) == (place == "nvme")
    moved = {way: report.moved_bytes[way] for way in ("nvme_read", "nvme_write")}
    assert moved == {"nvme_read": plan.link_bytes["NVMe read"], "nvme_write": plan.link_bytes["NVMe write"]}
    assert (report.steps, report.early_seconds) == (2, 0)
    assert report.updated == sum(p.numel() for p in model.parameters() if p.grad is not None or p.requires_grad) - 5
    assert 0 < report.update_seconds <= report.step_seconds
    assert f"{report.parameters:,} parameters" in str(report) and "last step()" in str(report)
    with pytest.raises(hetmem.errors.BudgetError):  # a page less has no room
        hetmem.AdamW(build().parameters(), budget=hetmem.Budget(host=plan.slots_bytes))


def test_the_report_says_how_much_of_the_update_was_in_the_backward() -> None:
    model = build()
    optimizer = hetmem.AdamW(model.parameters(), overlap="backward", budget=hetmem.Budget(host="64MiB"))
    for _ in range(2):
        model(torch.ones(4, 3, 8, 8)).square().mean().backward()
        time.sleep(0.2)  # as a program that has more to do
        optimizer.step()
        optimizer.zero_grad()
    report = optimizer.report()
    assert 0 < report.early_seconds <= report.update_seconds
    assert "of it in the backward" in str(report)


def test_what_does_not_fit_and_what_cannot_be_meant(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = hetmem.plan_optimizer(build, hetmem.Budget(host="1MiB"))
    assert not plan.fits and "are missing" in str(plan)
    enough = plan.budget_bytes["host"]
    assert enough == (1 << 20) + plan.missing_bytes
    assert hetmem.plan_optimizer(build, hetmem.Budget(host=enough)).fits
    with pytest.raises(hetmem.errors.HetmemError, match="8 ranks cannot be divided among 3 machines"):
        hetmem.plan_optimizer(build, ranks=8, machines=3)
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
    name = f"{build.__module__}:build"
    assert cli.main(["plan", name, "--optimizer-only", "--ranks", "4", "--hardware", "l4"]) == 0
    assert "4 ranks" in capsys.readouterr().out
    assert cli.main(["plan", name, "--optimizer-only", "--host-memory", "1MiB"]) == 1
    assert cli.main(["plan", name, "--optimizer-only", "--overlap", "backward"]) == 2
    assert "--overlap does not go with --optimizer-only" in capsys.readouterr().err
    assert cli.main(["plan", name, "--input", "1x3x8x8:float32", "--ranks", "4"]) == 2
