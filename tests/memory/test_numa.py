"""Page-locked memory and threads are near the GPU where there is a near; where there is none nothing happens."""

from __future__ import annotations

import os
import threading
from collections.abc import Collection
from pathlib import Path

import pytest

from tests.memory.fake_cuda import CpuCuda, FakeCuda, cuda
from tests.memory.tested import Mapping, SimDevice, host_memory

__all__ = ["cuda"]  # a fixture

GPU = "0000:1b:00.0"


@pytest.fixture
def bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Collection[int]]:
    """The cores that threads were kept on, by their names, in a process that may run on five."""
    found: dict[str, Collection[int]] = {}
    monkeypatch.setattr(host_memory, "SYSFS", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1, 2, 5, 8, 11})
    monkeypatch.setattr(
        os, "sched_setaffinity", lambda pid, cores: found.__setitem__(threading.current_thread().name, cores)
    )
    return found


def near(root: Path, cpus: str) -> None:
    """Let the system say that the GPU is near `cpus`."""
    folder = root / "bus/pci/devices" / GPU
    folder.mkdir(parents=True)
    (folder / "local_cpulist").write_text(f"{cpus}\n")


@pytest.mark.parametrize(
    ("cpus", "found"),
    [("0-3,8,10-11", (1, 2, 8, 11)), ("4-7,9", (5,)), ("0-63", ()), ("", ()), ("40", ())],
    ids=["some", "one", "all are as near", "unknown", "none that this process may use"],
)
def test_the_cores_near_a_device_are_those_that_this_process_may_use(
    cpus: str, found: tuple[int, ...], bound: object, tmp_path: Path
) -> None:
    near(tmp_path, cpus)
    assert host_memory.cores_near(GPU) == host_memory.cores_near(GPU.upper()) == found
    assert host_memory.cores_near("0000:1c:00.0") == ()


def test_host_memory_is_populated_near_the_gpu_before_it_is_page_locked(
    cuda: FakeCuda, bound: dict[str, Collection[int]], tmp_path: Path
) -> None:
    near(tmp_path, "2,5")
    device, memory = CpuCuda(), Mapping(3 * 4096)
    device.pin(memory)
    assert bound and all(name.startswith("hetmem-populate") for name in bound), "no thread of the program is kept"
    assert all(cores == device.cores == (2, 5) for cores in bound.values())
    assert list(cuda.pinned.values()) == [memory.nbytes]


def test_where_all_cores_are_as_near_no_thread_is_kept_on_any(
    cuda: FakeCuda, bound: dict[str, Collection[int]], tmp_path: Path
) -> None:
    near(tmp_path, "0-63")
    device = CpuCuda()
    device.pin(Mapping(4096))
    assert device.cores == SimDevice().cores == ()
    assert not bound
