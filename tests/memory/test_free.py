"""Free memory is what the machine has and what a control group leaves: a container is killed for more."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
import torch

import hetmem
from tests.memory.tested import free_host_bytes, host_memory, left_by_groups

GIB = 1 << 30


def put(folder: Path, limit: str, used: int, again: int, *, first: bool = False) -> None:
    """The files of a group of version 2, or of the first one."""
    folder.mkdir(parents=True, exist_ok=True)
    names = (
        ("limit_in_bytes", "usage_in_bytes", "total_inactive_file") if first else ("max", "current", "inactive_file")
    )
    (folder / f"memory.{names[0]}").write_text(f"{limit}\n")
    (folder / f"memory.{names[1]}").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 1\n{names[2]} {again}\n")


def belongs_to(root: Path, *lines: str) -> None:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize("first", [False, True], ids=["version 2", "version 1"])
def test_the_tightest_group_around_the_process_counts(first: bool, tmp_path: Path) -> None:
    mounted = tmp_path / "sys/fs/cgroup" / ("memory" if first else "")
    belongs_to(tmp_path, "5:cpu:/other", f"{'4:memory' if first else '0:'}:/job/step")
    put(mounted / "job", str(8 * GIB), 3 * GIB, GIB, first=first)
    put(mounted / "job/step", str(9 * GIB), 2 * GIB, 0, first=first)
    put(mounted / "other", "1", 0, 0, first=first)
    assert min(left_by_groups(tmp_path)) == 6 * GIB


@pytest.mark.parametrize("first", [False, True], ids=["version 2", "version 1"])
def test_a_container_sees_its_own_group_as_the_topmost(first: bool, tmp_path: Path) -> None:
    """The path is that of the machine, and not there."""
    belongs_to(tmp_path, "4:memory:/docker/abc" if first else "0::/../../docker/abc")
    put(tmp_path / "sys/fs/cgroup" / ("memory" if first else ""), str(8 * GIB), GIB, 0, first=first)
    assert min(left_by_groups(tmp_path)) == 7 * GIB


def test_without_a_limit_nothing_is_less(tmp_path: Path) -> None:
    assert left_by_groups(tmp_path) == [1 << 60]
    belongs_to(tmp_path, "4:memory:/", "0::/")
    put(tmp_path / "sys/fs/cgroup/memory", "9223372036854771712", 5, 0, first=True)
    put(tmp_path / "sys/fs/cgroup", "max", 5, 0)
    assert left_by_groups(tmp_path) == [1 << 60]
    (tmp_path / "sys/fs/cgroup/memory.max").write_text("what?")
    assert left_by_groups(tmp_path) == [1 << 60]


def test_a_budget_that_nobody_says_is_within_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 0 < free_host_bytes() <= psutil.virtual_memory().total
    monkeypatch.setattr(host_memory, "left_by_groups", lambda: [100 << 20])
    assert free_host_bytes() == 100 << 20
    assert hetmem.SimDevice().available_bytes() == 25 << 20
    for width, expected in ((8, range(1, 16 << 20)), (2048, [60 << 20])):  # by the model, as far as there is room
        managed = hetmem.manage(torch.nn.Linear(width, width), device=hetmem.SimDevice(1 << 30))
        assert hetmem.report(managed).to_dict()["tiers"]["host"]["capacity_bytes"] in expected
