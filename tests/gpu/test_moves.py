"""Copies across the link of a real GPU: torch's bits, no memory once warm, and what its allocator refuses.

`tests/memory/test_moves.py` has the same on a fake one, with every order of streams. `make gpu` runs this.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import hetmem
from hetmem.cuda.backend import Backend, TorchBackend, backend
from hetmem.memory.cuda_device import CudaDevice, pci_address
from hetmem.memory.host_memory import Mapping
from hetmem.memory.stream_copies import PIECE_BYTES
from tests.cuda.vectors import assert_same, ordinary

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here"),
    pytest.mark.filterwarnings("default"),
]

NUMEL = 2 * PIECE_BYTES // 4 + 12345  # three pieces, the last an odd one


class Given(CudaDevice):
    """With `kernels`, whatever else is here."""

    def __init__(self, kernels: Backend) -> None:
        super().__init__()
        self.kernels = kernels

    def _kernels(self) -> Backend:
        return self.kernels


@pytest.fixture(params=["torch", "kernels"])
def kernels(request: pytest.FixtureRequest) -> Backend:
    if request.param == "torch":
        return TorchBackend("a test")
    if not backend().native:
        pytest.skip(backend().reason)
    return backend()


@pytest.fixture
def mapping() -> Iterator[Mapping]:
    yield Mapping(4 * NUMEL)
    torch.cuda.synchronize()


def test_torch_s_bits_and_no_memory_once_warm(kernels: Backend, mapping: Mapping) -> None:
    device = Given(kernels)
    unpin = device.pin(mapping)
    home = torch.frombuffer(mapping.buffer(0, 4 * NUMEL), dtype=torch.float32)
    data = ordinary(NUMEL)
    slot = torch.zeros(NUMEL, dtype=torch.bfloat16, device="cuda")
    gradient = ordinary(NUMEL, torch.bfloat16, seed=1).cuda()
    stream = torch.cuda.Stream()

    def move(write: Any) -> None:
        torch.cuda.synchronize()
        with torch.cuda.stream(stream), torch.no_grad():
            write()
        stream.synchronize()

    taken = []
    for _ in range(3):
        home.copy_(data)
        move(lambda: device.copy_in(slot, home))
        assert_same(slot.cpu(), data.bfloat16(), "weights")
        move(lambda: device.gradient_out(home, gradient, add=True))
        assert_same(home, data + gradient.cpu(), "added")
        move(lambda: device.gradient_out(home, gradient, add=False))
        assert_same(home, gradient.cpu().float(), "overwritten")
        taken.append(torch.cuda.memory_stats()["allocation.all.allocated"])
    assert taken[1] == taken[2]
    unpin()


def test_asking_for_a_move_does_not_wait_for_the_gpu(kernels: Backend, mapping: Mapping) -> None:
    device = Given(kernels)
    unpin = device.pin(mapping)
    home = torch.frombuffer(mapping.buffer(0, 4 * NUMEL), dtype=torch.float32)
    slot, gradient = (torch.zeros(NUMEL, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    stream = torch.cuda.Stream()
    for sleeps in (False, True):
        with torch.cuda.stream(stream), torch.no_grad():
            if sleeps:
                torch.cuda._sleep(2_000_000_000)
            device.copy_in(slot, home)
            device.gradient_out(home, gradient, add=True)
        assert not sleeps or not stream.query(), "the host waited for the stream"
        stream.synchronize()
    unpin()


def test_a_gpu_s_place_is_known_and_its_cores_are_numbers_of_this_process() -> None:
    device = CudaDevice()
    address = pci_address(device.torch_device)
    assert len(address.split(":")) == 3
    assert set(device.cores) <= os.sched_getaffinity(0)


class TooMuch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        torch.empty(1 << 44, dtype=torch.uint8, device="cuda")
        return grad


class Greedy(nn.Module):
    greedy = True

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers(x)
        out: torch.Tensor = TooMuch.apply(x) if self.greedy else x
        return out.square().mean()


def test_memory_refused_in_a_backward_is_explained_and_training_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    workspaces = 256 << 20  # cuBLAS and cuBLASLt take up to 32 MiB each, for each of the two threads
    room = hetmem.Budget(device=torch.cuda.memory_allocated() + workspaces, device_chunks="4MiB", host="256MiB")
    managed = hetmem.manage(Greedy(), room, device="cuda", chunk_bytes="1MiB")
    x = torch.ones(4, 512, device="cuda")
    with pytest.raises(torch.OutOfMemoryError):
        managed(x).backward()
    assert "No room for an allocation of 16.00 TiB" in caplog.text
    managed.greedy = False
    managed.zero_grad()
    managed(x).backward()
    assert all(parameter.grad.isfinite().all() for parameter in managed.parameters())
    hetmem.release(managed)


@pytest.mark.parametrize("resident", [True, False])
def test_gradients_from_before_a_model_is_managed_go_where_its_weights_go(resident: bool) -> None:
    plain = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    plain(torch.ones(4, 64)).sum().backward()
    managed = copy.deepcopy(plain)
    for left, right in zip(plain.parameters(), managed.parameters(), strict=True):
        assert left.grad is not None
        right.grad = left.grad.clone()
    plain.cuda()
    room = torch.cuda.memory_allocated() + (256 << 20)
    limits = hetmem.Budget(device=room, host="64MiB", device_chunks=None if resident else "48KiB")
    hetmem.manage(managed, limits, device="cuda", chunk_bytes="16KiB")
    for parameter in managed.parameters():
        assert parameter.grad is not None
        assert parameter.grad.device == parameter.device
        assert parameter.is_cuda == resident
    for model in (plain, managed):
        model(torch.ones(4, 64, device="cuda")).square().sum().backward()
    for left, right in zip(plain.parameters(), managed.parameters(), strict=True):
        assert left.grad is not None
        assert right.grad is not None
        assert torch.equal(left.grad.cpu(), right.grad.cpu())
    hetmem.release(managed)
