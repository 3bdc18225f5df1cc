"""The probe: a valid profile of this machine, and nothing left behind. How fast anything is, is not tested."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import astuple, replace
from pathlib import Path

import pytest
import torch

import hetmem.tools.probe
from hetmem.base.hardware import HardwareProfile
from hetmem.errors import HetmemError
from hetmem.planner import load_profile
from hetmem.tools.probe import probe


def test_a_quick_probe_is_a_valid_profile_and_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hetmem.tools.probe.psutil, "cpu_percent", lambda seconds: 80.0)
    said: list[str] = []
    profile = probe(tmp_path, quick=True, say=said.append)
    assert said[0].startswith("warning: the machine was busy, its cores to 80%")
    assert [line[:3] for line in said[1:]] == ["1/3", "2/3", "3/3"]
    assert "busy" in profile.sources["all but thread"]
    assert HardwareProfile.from_json(profile.to_json()) == profile
    assert list(tmp_path.iterdir()) == []
    assert profile.host.memory_bytes > 0
    assert profile.host.numa_nodes >= 1
    assert profile.host.ranks_copy_bytes_per_second > 0
    assert profile.host.page_lock_bytes_per_second == 0, "there is no GPU to lock it for"
    assert profile.sources["host.ranks_copy_bytes_per_second"].startswith("processes at once, 1: ")
    assert min(profile.nvme_read.bytes_per_second, profile.nvme_write.bytes_per_second) > 0
    assert profile.nvme_both_ways_bytes_per_second > 0
    assert "measured by hetmem probe" in profile.sources["all but thread"]


def test_costs_of_the_thread_are_those_of_a_shipped_profile_by_the_time_of_a_launch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shipped = load_profile("h100")
    device = replace(shipped.device, operator_seconds=2 * shipped.device.operator_seconds)
    for gpu, factor in ((False, 1), (True, 2)):
        monkeypatch.setattr(torch.cuda, "is_available", lambda gpu=gpu: gpu)
        costs, source = hetmem.tools.probe._thread_costs(device)
        assert astuple(costs) == pytest.approx([factor * seconds for seconds in astuple(shipped.thread)])
        assert source.startswith(f"{factor}.00 times those of H100")


@pytest.mark.nightly
@pytest.mark.parametrize("default", ["float64", "meta", "no_grad"])
def test_what_a_program_has_set_is_not_measured(default: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is it lost."""
    with ExitStack() as around:
        if default == "float64":
            torch.set_default_dtype(torch.float64)
            around.callback(torch.set_default_dtype, torch.float32)
        else:
            around.enter_context(torch.device("meta") if default == "meta" else torch.no_grad())
        assert probe(tmp_path, quick=True).host.memory_bytes > 0
        made = torch.ones(1)
        assert (made.dtype is torch.float64, made.is_meta, torch.is_grad_enabled()) == (
            default == "float64",
            default == "meta",
            default != "no_grad",
        )


def test_a_directory_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HetmemError, match="nowhere"):
        probe(tmp_path / "nowhere", quick=True)
