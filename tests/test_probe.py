"""The probe: a valid profile of this machine, and nothing left behind. How fast anything is, is not tested."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetmem.errors import HetmemError
from hetmem.plan.hardware import HardwareProfile
from hetmem.probe import probe


def test_a_probe_is_a_valid_profile_and_leaves_no_file(tmp_path: Path) -> None:
    profile = probe(tmp_path, quick=True)
    assert HardwareProfile.from_json(profile.to_json()) == profile
    assert list(tmp_path.iterdir()) == []
    assert profile.host.memory_bytes > 0
    assert profile.host.numa_nodes >= 1
    assert profile.nvme_read.bytes_per_second == max(s.read_bytes_per_second for s in profile.disk_samples)
    assert {s.depth for s in profile.disk_samples} == {1, 2, 4, 8}
    assert "measured by hetmem probe" in profile.sources["all"]


def test_a_directory_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HetmemError, match="nowhere"):
        probe(tmp_path / "nowhere", quick=True)
