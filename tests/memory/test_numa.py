"""Page-locked memory and threads are near the GPU where there is a near; where there is none nothing happens."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from pathlib import Path

import pytest

from tests.memory.fake_cuda import CpuCuda, FakeCuda, cuda
from tests.memory.tested import Mapping, SimDevice, mapping

__all__ = ["cuda"]  # a fixture

GPU = "0000:1b:00.0"
ALL = set(range(64))


def sysfs(root: Path, nodes: dict[int, str], device_node: str | None) -> Path:
    """A tree with the `cpulist` of each node, and what the GPU's `numa_node` says."""
    for node, cpus in nodes.items():
        folder = root / "devices/system/node" / f"node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{cpus}\n")
    if device_node is not None:
        folder = root / "bus/pci/devices" / GPU
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(f"{device_node}\n")
    return root


def test_a_device_lies_at_the_node_that_the_system_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapping, "SYSFS", sysfs(tmp_path, {0: "0-3", 1: "4-7"}, "1"))
    assert mapping.node_of(GPU) == mapping.node_of(GPU.upper()) == 1
    assert mapping.node_of("0000:1c:00.0") is None


@pytest.mark.parametrize(
    ("nodes", "said"), [({0: "0-7"}, "0"), ({0: "0-3", 1: "4-7"}, "-1"), ({0: "0", 1: "1"}, "x"), ({}, "0")]
)
def test_with_one_node_or_an_unknown_one_there_is_none(
    nodes: dict[int, str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mapping, "SYSFS", sysfs(tmp_path, nodes, said))
    assert mapping.node_of(GPU) is None


def test_the_cores_of_a_node_are_those_that_this_process_may_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mapping, "SYSFS", sysfs(tmp_path, {0: "0-3,8,10-11", 1: "4-7,9", 2: ""}, None))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1, 2, 5, 8, 11, 40})
    assert mapping.cores_of(0) == (1, 2, 8, 11)
    assert mapping.cores_of(1) == (5,)
    assert mapping.cores_of(2) == mapping.cores_of(3) == ()


@pytest.mark.skipif(not sys.platform.startswith("linux") or platform.machine() != "x86_64", reason="x86-64 Linux")
def test_the_system_is_told_which_node_a_mapping_prefers() -> None:
    if not mapping.SYSFS.joinpath("devices/system/node/node0").exists():
        pytest.skip("a kernel without NUMA")
    memory = Mapping(3 * 4096 - 5)
    if not memory.prefer_node(0):
        pytest.skip("mbind is not allowed here")
    assert policy_at(memory.address) == policy_at(memory.address + 2 * 4096) == (1, {0})
    assert policy_at(Mapping(4096).address) == (0, set())
    assert not memory.prefer_node(1000)
    assert not memory.prefer_node(-1)


def policy_at(address: int) -> tuple[int, set[int]]:
    """The mode and the nodes of the policy there, from the system."""
    mode, words = ctypes.c_int(), (ctypes.c_ulong * 16)()
    get_mempolicy = 239
    result = ctypes.CDLL(None).syscall(
        ctypes.c_long(get_mempolicy),
        ctypes.byref(mode),
        words,
        ctypes.c_ulong(1025),
        ctypes.c_void_p(address),
        ctypes.c_ulong(2),  # of an address
    )
    assert result == 0
    return mode.value, {64 * index + bit for index, word in enumerate(words) for bit in range(64) if word >> bit & 1}


def test_host_memory_is_told_its_node_before_it_is_page_locked(
    cuda: FakeCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mapping, "SYSFS", sysfs(tmp_path, {0: "0-1", 1: "2-3"}, "1"))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: ALL)
    told: list[tuple[int, int]] = []
    monkeypatch.setattr(Mapping, "prefer_node", lambda self, node: told.append((node, len(cuda.pinned))))
    device = CpuCuda()
    device.pin(Mapping(4096))
    assert told == [(1, 0)] and list(cuda.pinned.values()) == [4096]
    assert device.cores == (2, 3)


def test_with_one_node_nothing_is_told(cuda: FakeCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapping, "SYSFS", sysfs(tmp_path, {0: "0-3"}, "0"))
    monkeypatch.setattr(Mapping, "prefer_node", lambda self, node: pytest.fail("there is no choice"))
    device = CpuCuda()
    device.pin(Mapping(4096))
    assert device.cores == SimDevice().cores == ()
