"""The CUDA device where a program does more with a GPU: graphs, another GPU, other streams, allocators and models."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import hetmem
from hetmem.errors import ManageError
from tests.engine.harness import BATCHES, PLACEMENTS, manage, mlp
from tests.memory.fake_cuda import CpuCuda, Event, FakeCuda, Stream, cuda
from tests.memory.tested import (
    ComputeStreams,
    CudaStreams,
    Finished,
    Job,
    Link,
    StreamCopier,
    Tier,
    registry,
    stream_for,
)

__all__ = ["cuda"]  # a fixture


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_model_and_its_step_are_not_captured_in_a_graph(cuda: FakeCuda, placement: str, tmp_path: Path) -> None:
    """A replay would move no weights, and find those that have moved no more; it would repeat one step's numbers."""
    managed = manage(mlp(), placement, tmp_path, device=CpuCuda())
    optimizer = hetmem.AdamW(managed.parameters(), lr=1e-2)
    (batch,) = BATCHES[0]
    loss = managed(batch).sum()
    loss.backward()
    weights = copy.deepcopy(managed.state_dict())
    cuda.captures = True
    with pytest.raises(ManageError, match=r"a forward within torch\.cuda\.graph"):
        managed(batch)
    with pytest.raises(ManageError, match=r"a step within torch\.cuda\.graph"):
        optimizer.step()
    cuda.captures = False
    assert all(torch.equal(weights[name], value) for name, value in managed.state_dict().items())
    optimizer.step()
    assert managed(batch).sum() != loss


def test_a_kernel_runs_on_the_gpu_of_its_tensors_whichever_is_current(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would look for them in the memory of another GPU."""
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: f"current of {device}")
    second: Any = SimpleNamespace(device=torch.device("cuda", 1))
    host, given = torch.zeros(1), Stream()
    assert str(stream_for(None, host, second)) == "current of cuda:1"
    assert stream_for(given, second) is given
    assert stream_for(None, host) is None


def test_what_a_process_is_allowed_of_a_gpu_is_no_more_than_that(cuda: FakeCuda) -> None:
    """`torch.cuda.set_per_process_memory_fraction`."""
    cuda.free_bytes, cuda.reserved_bytes = 1000, 500
    assert CpuCuda().available_bytes() == 1350
    cuda.fraction = 0.25  # of twice as many bytes as are free
    assert CpuCuda().available_bytes() == 450


def test_an_allocator_that_takes_no_observer_does_without(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """As cudaMallocAsync, of `PYTORCH_CUDA_ALLOC_CONF`."""

    def attach(_: Callable[..., None]) -> None:
        raise RuntimeError("cudaMallocAsync does not yet support attachOutOfMemoryObserver")

    monkeypatch.setattr(torch._C, "_cuda_attach_out_of_memory_observer", attach)
    managed = hetmem.manage(mlp(), hetmem.Budget(device="64MiB", host="64MiB"), device=CpuCuda())
    assert managed(*BATCHES[0]).requires_grad


def test_a_peak_is_seen_by_every_model_on_the_gpu_although_each_sets_it_back(cuda: FakeCuda) -> None:
    peak = [100]
    cuda.peak, cuda.reset_peak = lambda: peak[0], lambda: peak.__setitem__(0, 40)
    one, other = CpuCuda(), CpuCuda()
    assert one.peak_bytes() == 100
    assert other.peak_bytes() == 100 and other.peak_bytes() == 40
    peak[0] = 70
    assert other.peak_bytes() == 70
    assert one.peak_bytes() == 70 and one.peak_bytes() == 40


class NotedStreams(CudaStreams):
    """Notes which events the host waits for."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"), ComputeStreams(torch.device("cpu")))
        self.waited: list[Event] = []

    def wait(self, event: Any) -> None:
        self.waited.append(event)
        super().wait(event)


def test_the_host_waits_for_the_oldest_copy_whichever_way_it_goes(cuda: FakeCuda) -> None:
    """A gradient that is wanted at home does not wait for weights that come in behind it."""
    ended: list[Finished] = []
    copier = StreamCopier(NotedStreams(), lambda job, start, end: None, ended.append)
    copier.start(Job("gradient", Link.DEVICE_TO_HOST, lambda: None, 1), [])
    copier.start(Job("weight", Link.HOST_TO_DEVICE, lambda: None, 1), [])
    assert copier.wait()
    assert [job.tag for job in ended] == ["gradient"]
    copier.close()


def test_a_copy_that_one_stream_makes_is_there_for_the_others(cuda: FakeCuda, tmp_path: Path) -> None:
    """Its home is on the device too, and compute casts it: a program may go on on a stream that is not behind that."""
    limits = hetmem.Budget(device="64MiB", host="64MiB")
    managed = manage(mlp(), limits, tmp_path, device=CpuCuda(), mixed_precision=torch.bfloat16)
    traffic = registry.of_module(managed).runtime.traffic
    chunk = traffic.executor.chunk_of_block[0][0]
    block = chunk.operand_block
    assert block is not None
    traffic.forget_copies()
    with torch.no_grad():
        managed.get_parameter("0.weight").fill_(7.0)
    side = Stream()
    with torch.cuda.stream(side):
        traffic.execute(traffic.residency.prefetch(block, Tier.DEVICE))
    assert side.asked, "nothing is late"
    slot = traffic.acquire(block, Tier.DEVICE)
    assert torch.equal(traffic.executor.on_device(chunk, slot).float(), chunk.flat(chunk.operand).float())
    traffic.release(block, Tier.DEVICE)
