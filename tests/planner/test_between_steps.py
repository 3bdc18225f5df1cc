"""What a plan says of checkpoints and of parking is what they take in a run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import hetmem
from hetmem.planner import load_profile

WIDTH = 256


def build() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(8)))


@pytest.mark.parametrize("device", ["64MiB", "3MiB"])
def test_a_checkpoint_has_as_many_bytes_as_are_planned(device: str, tmp_path: Path) -> None:
    """And takes as long as these take at the drive's rate; on a slow drive longer than a step."""
    fast = load_profile("h100")
    slow = replace(fast, nvme_write=replace(fast.nvme_write, bytes_per_second=1e6))
    batch, limits = (torch.ones(4, WIDTH, device="meta"),), hetmem.Budget(device=device, host="64MiB")
    plan = hetmem.plan(build, batch, limits, hardware=slow, loss=torch.sum)
    told = plan.between_steps
    model = hetmem.manage(build(), plan=plan, device="sim")
    optimizer = hetmem.AdamW(model.parameters())
    model(torch.ones(4, WIDTH)).sum().backward()
    optimizer.step()
    hetmem.save(tmp_path / "c", model, optimizer)
    assert told["saved_bytes"] == pytest.approx((tmp_path / "c").stat().st_size, rel=0.05)
    assert told["save_seconds"] == pytest.approx(told["saved_bytes"] / 1e6, rel=1e-3)
    assert not told["hides"]
    assert "at the drive's rate, longer than a step" in " ".join(str(plan).split())
    assert (told["parked_bytes"] >= told["saved_bytes"]) == (device == "64MiB"), "of a whole model all homes move"
    assert told["park_seconds"] == pytest.approx(fast.device_to_host.seconds(told["parked_bytes"]))
    assert hetmem.plan(build, batch, limits, hardware=slow, inference=True).between_steps is None
