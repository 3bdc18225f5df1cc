"""Host memory that a driver page-locks: populated in steps, registered in pieces, kept from forked processes."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import hetmem
from hetmem.errors import CapacityError
from tests.engine.harness import BATCHES, Recipe, mlp, pair, train_both
from tests.forked import nothing_collected
from tests.memory.fake_cuda import CpuCuda, FakeCuda, cuda
from tests.memory.test_mapping import resident_bytes
from tests.memory.tested import MIB, PAGE_BYTES, HostPool, Mapping, host_memory
from tests.memory.tested import cuda_device as cuda_module

__all__ = ["cuda"]  # a fixture


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is done for each GiB and each 64 GiB, for each MiB."""
    monkeypatch.setattr(host_memory, "_POPULATE_STEP_BYTES", MIB)
    for module in (host_memory, cuda_module):
        monkeypatch.setattr(module, "PIECE_BYTES", MIB)


@pytest.mark.parametrize("kernel", ["this", "older than 5.14"])
def test_populating_touches_every_page_and_keeps_what_is_there(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kernel != "this":
        monkeypatch.setattr(host_memory, "_MADV_POPULATE_WRITE", 9999)
    mapping = Mapping(5 * MIB + 3)
    view = mapping.buffer(0, mapping.nbytes)
    view[MIB : MIB + 4] = b"kept"
    mapping.populate()
    assert resident_bytes(mapping) >= mapping.nbytes
    assert bytes(view[MIB : MIB + 4]) == b"kept"
    assert sum(view) == sum(b"kept")


@pytest.mark.usefixtures("small_pieces")
def test_populating_stops_before_the_machine_has_nothing_left(monkeypatch: pytest.MonkeyPatch) -> None:
    left = iter([3 * MIB, 2 * MIB, MIB - 1])
    monkeypatch.setattr(host_memory, "free_host_bytes", lambda: next(left))
    mapping = Mapping(8 * MIB)
    with pytest.raises(CapacityError, match=r"2\.00 MiB of 8\.00 MiB are populated.*Lower Budget\(host=…\) to at most"):
        mapping.populate()
    assert resident_bytes(mapping) == 2 * MIB


def test_a_failure_to_populate_is_an_error_before_anything_is_managed(
    cuda: FakeCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_memory, "_touch", lambda address, nbytes: 12)
    with pytest.raises(CapacityError, match="Cannot allocate memory"):
        pair(mlp, "host", tmp_path, device=CpuCuda())
    assert cuda.pinned == {}
    monkeypatch.undo()


def test_what_a_class_was_built_in_is_page_locked_when_its_homes_are_there(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Layers(nn.Sequential):
        def __init__(self) -> None:
            assert not cuda.pinned
            super().__init__(*(nn.Linear(128, 128) for _ in range(20)))

    budget = hetmem.Budget(device="8MiB", device_chunks="512KiB", host="6MiB")
    managed = hetmem.managed(budget, device=CpuCuda())(Layers)
    model = managed()
    assert 5 * MIB < sum(cuda.pinned.values()) <= 6 * MIB
    assert all(
        any(p.data_ptr() - start in range(size) for start, size in cuda.pinned.items()) for p in model.parameters()
    )
    hetmem.release(model)
    assert cuda.pinned == {}
    monkeypatch.setattr(host_memory, "_touch", lambda address, nbytes: 12)
    with pytest.raises(CapacityError, match="Cannot allocate memory"):
        managed()
    assert cuda.pinned == {}


@pytest.mark.usefixtures("small_pieces")
def test_memory_is_registered_in_pieces_that_no_reservation_crosses(cuda: FakeCuda) -> None:
    pool, device = HostPool(3 * MIB), CpuCuda()
    unpin = device.pin(pool.mapping)
    assert sorted(cuda.pinned.values()) == [MIB] * 3
    sizes = [400 * 1024, 400 * 1024, 400 * 1024, PAGE_BYTES, MIB]
    for size in sizes[:-1]:
        memory = torch.frombuffer(pool.reserve(size), dtype=torch.uint8)
        first, last = (device.is_registered(memory[at:]) for at in (0, size - 1))
        assert first and last
        piece = next(start for start in cuda.pinned if start <= memory.data_ptr() < start + MIB)
        assert memory.data_ptr() + size <= piece + MIB
    pool.reserve(sizes[-1])
    with pytest.raises(CapacityError, match="no room"):
        pool.reserve(PAGE_BYTES)
    unpin()
    assert cuda.pinned == {}


@pytest.mark.usefixtures("small_pieces")
def test_a_piece_that_is_refused_leaves_the_ones_before_it_and_names_the_right_limit(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda.register_error, cuda.registered_before_error = 2, 2
    device, host = CpuCuda(), Mapping(4 * MIB)
    monkeypatch.setattr(cuda_module.resource, "getrlimit", lambda which: (cuda_module.resource.RLIM_INFINITY,) * 2)
    with pytest.warns(UserWarning, match=r"refused to page-lock 2\.00 MiB of 4\.00 MiB .* No limit of this process"):
        unpin = device.pin(host)
    assert sorted(cuda.pinned.values()) == [MIB, MIB]
    unpin()
    assert cuda.pinned == {}
    cuda.registered_before_error = 0
    monkeypatch.setattr(cuda_module.resource, "getrlimit", lambda which: (MIB, MIB))
    with pytest.warns(UserWarning, match=r"This process may lock 1\.00 MiB: raise the limit \(ulimit -l"):
        device.pin(host)()


def test_host_memory_is_unregistered_when_a_model_is_released_or_dropped(cuda: FakeCuda, tmp_path: Path) -> None:
    for end in (hetmem.release, lambda managed: None):
        _, managed = pair(mlp, "host", tmp_path, device=CpuCuda())
        assert cuda.pinned
        end(managed)
        del managed
        gc.collect()
        assert not cuda.pinned


class Rows(Dataset[torch.Tensor]):
    """Batches of `mlp`; `model` is what a careless data set holds, too."""

    def __init__(self, model: torch.nn.Module | None = None) -> None:
        self.model = model

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.model is not None:
            return self.model[0].weight[0] + index  # type: ignore[index, operator]
        return torch.full((64,), float(index))


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.nightly)])
def test_workers_of_a_data_loader_feed_training(context: str, tmp_path: Path) -> None:
    plain, managed = pair(mlp, "host", tmp_path)
    train_both(plain, managed, BATCHES, Recipe(steps=1))  # threads run, and the optimizer's states are there
    loader = DataLoader(Rows(), batch_size=4, num_workers=1, multiprocessing_context=context)
    with nothing_collected():
        batches = [(rows,) for rows in loader]
    train_both(plain, managed, batches, Recipe(steps=2))


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_worker_that_reads_the_model_is_told_why_it_cannot(tmp_path: Path) -> None:
    _, managed = pair(mlp, "host", tmp_path)
    loader = DataLoader(Rows(managed), num_workers=1, multiprocessing_context="fork")
    with pytest.raises(hetmem.errors.ManageError, match=r"made by fork\(\), has none of it"), nothing_collected():
        list(loader)


def test_memory_is_shared_with_children_again_once_the_model_is_released(tmp_path: Path) -> None:
    pool = HostPool(MIB)
    with open("/proc/self/smaps") as maps:
        kept = _flags(maps.read(), pool.mapping.address)
    pool.mapping.share_with_children()
    with open("/proc/self/smaps") as maps:
        shared = _flags(maps.read(), pool.mapping.address)
    assert "dc" in kept and "dc" not in shared


def _flags(smaps: str, address: int) -> list[str]:
    """The kernel's flags of the memory at `address`."""
    inside = False
    for line in smaps.splitlines():
        first = line.split(" ", 1)[0]
        if "-" in first and not first.endswith(":"):
            start, _, end = first.partition("-")
            inside = int(start, 16) <= address < int(end, 16)
        elif inside and line.startswith("VmFlags:"):
            return line.split()[1:]
    raise AssertionError("not mapped")
