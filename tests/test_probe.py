"""The probe: a valid profile of this machine, and nothing left behind. How fast anything is, is not tested."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

import hetmem.tools.probe
from hetmem.base.hardware import HardwareProfile, ThreadCosts
from hetmem.base.units import MIB
from hetmem.errors import HetmemError
from hetmem.memory.nvme_requests import settings_for
from hetmem.tools import measuring
from hetmem.tools.measuring import measure
from hetmem.tools.probe import probe, transfers

COSTS = ThreadCosts(2e-5, 3e-4, 1e-4, 5e-4, 4e-5, 6e-5, 7e-5)


@pytest.fixture(autouse=True)
def _no_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a step costs its thread is measured in test_overheads; here it is enough that it is asked for."""
    monkeypatch.setattr(hetmem.tools.probe, "measure", lambda rounds, device: COSTS)


def test_a_quick_probe_is_a_valid_profile_and_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does it keep how to ask the disk: so few bytes say little."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(hetmem.tools.probe.psutil, "cpu_percent", lambda seconds: 80.0)
    said: list[str] = []
    profile = probe(tmp_path, quick=True, say=said.append)
    assert said[0].startswith("warning: the machine was busy, its cores to 80%")
    assert [line[:3] for line in said[1:]] == ["1/4", "2/4", "3/4", "4/4"]
    assert "busy" in profile.sources["all"]
    assert HardwareProfile.from_json(profile.to_json()) == profile
    assert list(tmp_path.iterdir()) == []
    assert profile.host.memory_bytes > 0
    assert profile.host.numa_nodes >= 1
    assert profile.nvme_read.bytes_per_second == max(s.read_bytes_per_second for s in profile.disk_samples)
    assert {s.depth for s in profile.disk_samples} == {1, 2, 4, 8}
    assert profile.nvme_both_ways_bytes_per_second > 0
    assert "measured by hetmem probe" in profile.sources["all"]
    assert profile.thread == COSTS


@pytest.mark.nightly
@pytest.mark.parametrize("default", ["float64", "meta", "no_grad"])
def test_what_a_program_has_set_is_not_measured(default: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is it lost."""
    monkeypatch.setattr(hetmem.tools.probe, "measure", lambda rounds, device: measure(1, device))
    monkeypatch.setattr(measuring, "_LAYERS", 32)
    with ExitStack() as around:
        if default == "float64":
            torch.set_default_dtype(torch.float64)
            around.callback(torch.set_default_dtype, torch.float32)
        else:
            around.enter_context(torch.device("meta") if default == "meta" else torch.no_grad())
        assert probe(tmp_path, quick=True).host.memory_bytes > 0
        assert transfers(tmp_path, quick=True)
        made = torch.ones(1)
        assert (made.dtype is torch.float64, made.is_meta, torch.is_grad_enabled()) == (
            default == "float64",
            default == "meta",
            default != "no_grad",
        )


def test_a_whole_probe_keeps_how_to_ask_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("_COPY_BYTES", "_DISK_BYTES"):
        monkeypatch.setattr(hetmem.tools.probe, name, 16 * MIB)
    monkeypatch.setattr(hetmem.tools.probe, "_UPDATE_ELEMENTS", 1 << 20)
    (tmp_path / "disk").mkdir()
    profile = probe(tmp_path / "disk")
    settings = settings_for(str(tmp_path / "disk"))
    assert settings.source == "measured"
    measured = {(sample.block_bytes, sample.depth) for sample in profile.disk_samples}
    assert {(each.nbytes, each.threads) for each in (settings.read, settings.write)} <= measured
    assert str(settings) in profile.sources["disk_samples"]
    assert str(tmp_path / "cache" / "hetmem" / "disks.json") in profile.sources["disk_samples"]
    assert list((tmp_path / "disk").iterdir()) == []


def test_a_directory_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HetmemError, match="nowhere"):
        probe(tmp_path / "nowhere", quick=True)
