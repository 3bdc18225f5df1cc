"""The same checks as on the CPU, on a GPU through CuPy: the launchers, streams and pinned memory included."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

from hetmem.cuda.backend import CupyBackend, TorchBackend, backend
from hetmem.cuda.kernels import cast
from tests.cuda.kernel_checks import CHECKS
from tests.cuda.vectors import Place, assert_same, ordinary

HERE = backend()

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HERE.native, reason=f"no CUDA and CuPy here: {HERE.reason}"),
]


@pytest.mark.parametrize("check", CHECKS)
def test_equals_torch(check: str) -> None:
    CHECKS[check](Place(HERE, "cuda"))


@pytest.mark.parametrize("check", CHECKS)
def test_without_cupy_torch_does_the_same_work(check: str) -> None:
    CHECKS[check](Place(TorchBackend("a test"), "cuda", thorough=False))


def test_kernels_run_on_the_stream_they_are_given() -> None:
    """The other stream sleeps first: a kernel on any other one would have read the zeros."""
    numel = 1 << 20
    data = ordinary(numel).cuda()
    source, destination = torch.zeros_like(data), torch.zeros(numel, dtype=torch.bfloat16, device="cuda")
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    cast(HERE, source, destination, stream=stream)  # compiled and loaded before the race
    stream.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        source.copy_(data)
    cast(HERE, source, destination, stream=stream)
    assert not stream.query(), "the launcher waited for the stream"
    stream.synchronize()
    assert_same(destination.cpu(), data.bfloat16().cpu())

    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        source.neg_()
        cast(HERE, source, destination)  # torch's current stream
    stream.synchronize()
    assert_same(destination.cpu(), (-data).bfloat16().cpu())


def test_a_launch_allocates_nothing() -> None:
    numel = 1 << 16
    source = torch.zeros(numel, device="cuda")
    destination = torch.zeros(numel, dtype=torch.float16).pin_memory()
    cast(HERE, source, destination)
    torch.cuda.synchronize()
    pool = importlib.import_module("cupy").get_default_memory_pool()
    before = torch.cuda.memory_stats()["allocation.all.allocated"], pool.total_bytes()
    for _ in range(20):
        cast(HERE, source, destination)
    torch.cuda.synchronize()
    assert (torch.cuda.memory_stats()["allocation.all.allocated"], pool.total_bytes()) == before


def test_memory_that_the_gpu_cannot_reach_is_refused() -> None:
    with pytest.raises(ValueError, match=r"destination must be on the GPU or in pinned memory, got unpinned memory"):
        cast(HERE, torch.zeros(8, device="cuda"), torch.zeros(8, dtype=torch.float16))


def test_compiled_kernels_are_kept(tmp_path: Path) -> None:
    data = ordinary(100).cuda()
    for _ in range(2):
        fresh = CupyBackend(tmp_path)
        out = torch.zeros(100, dtype=torch.bfloat16, device="cuda")
        cast(fresh, data, out)
        assert_same(out.cpu(), data.bfloat16().cpu())
    assert len(list(tmp_path.iterdir())) == 1
