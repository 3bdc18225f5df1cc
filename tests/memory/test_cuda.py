"""The CUDA device on a machine without a GPU: the same bits as torch however late streams are, and its own limits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hetmem
from hetmem.errors import ManageError
from tests.engine.harness import PLACEMENTS, Recipe, Tower, pair, token_batches, train_both
from tests.engine.lazy_device import host_slots
from tests.memory.fake_cuda import CpuCuda, Event, FakeCuda, Stream, cuda, streams_of_cpu
from tests.memory.tested import (
    CudaDevice,
    DevicePool,
    Link,
    Mapping,
    registry,
)
from tests.memory.tested import cuda_device as cuda_module

__all__ = ["cuda"]  # a fixture


def train(fake: FakeCuda, placement: str, directory: Path, **options: Any) -> nn.Module:
    """Three steps of `Tower` beside torch, with every loss, gradient, weight and state compared."""
    build = partial(Tower, checkpointing=options.pop("checkpointing", None))
    plain, managed = pair(build, placement, directory, device=CpuCuda(), **options)
    train_both(
        plain, managed, token_batches(6), Recipe(accumulation=2, clip=0.05, mixed=options.get("mixed_precision"))
    )
    assert (fake.deferred > 20) == (placement != "resident")
    return managed


@pytest.mark.each
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("mixed", [None, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("sanitize", [True, False], ids=["sanitize", "fast"])
def test_training_equals_torch(
    cuda: FakeCuda, placement: str, mixed: torch.dtype | None, sanitize: bool, tmp_path: Path
) -> None:
    train(cuda, placement, tmp_path, mixed_precision=mixed, sanitize=sanitize)


@pytest.mark.each
@pytest.mark.parametrize("checkpointing", [True, False])
@pytest.mark.parametrize("placement", ["host", "nvme"])
def test_training_with_activation_checkpointing_equals_torch(
    cuda: FakeCuda, placement: str, checkpointing: bool, tmp_path: Path
) -> None:
    train(cuda, placement, tmp_path, mixed_precision=torch.bfloat16, checkpointing=checkpointing)


@pytest.mark.parametrize("method", ["wait_event", "synchronize"])
def test_the_test_sees_a_wait_that_is_forgotten(
    cuda: FakeCuda, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forgetful: Callable[..., None] = lambda self, *args: None  # noqa: E731
    monkeypatch.setattr(Stream if method == "wait_event" else Event, method, forgetful)
    monkeypatch.setattr(Event, "query", lambda self: self.at > 0 or method == "synchronize")
    with pytest.raises(AssertionError):
        train(cuda, "host", tmp_path)
    monkeypatch.undo()


def test_all_host_memory_is_page_locked_while_the_model_is_managed(cuda: FakeCuda, tmp_path: Path) -> None:
    managed = train(cuda, "host", tmp_path)
    assert list(cuda.pinned.values()) == [64 << 20]
    hetmem.release(managed)
    assert cuda.pinned == {}


def test_where_page_locking_is_refused_a_warning_says_so_and_the_next_launch_does_not_fail(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    zeros = torch.zeros

    def launching(*args: Any, **kwargs: Any) -> torch.Tensor:
        cuda.launch()
        return zeros(*args, **kwargs)

    monkeypatch.setattr(torch, "zeros", launching)
    cuda.register_error = 2
    device = CpuCuda()
    with pytest.warns(UserWarning, match=r"refused to page-lock 8\.00 KiB .*CUDA error 2"):
        unpin = device.pin(Mapping(8192))
    device.allocate(16)
    unpin()


def test_the_report_says_that_torch_casts_and_that_memory_is_not_page_locked(
    cuda: FakeCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    managed = train(cuda, "host", tmp_path)
    (said,) = hetmem.report(managed).to_dict()["missing"]
    assert said.startswith("Weights and gradients are cast by torch's operators, not by kernels of hetmem: a test. pip")
    cuda.register_error = 2
    with pytest.warns(UserWarning, match="refused to page-lock"):
        managed = train(cuda, "host", tmp_path)
    (said,) = hetmem.report(managed).to_dict()["missing"]
    assert said.startswith("Host memory is not page-locked: the driver refused to page-lock 64.00 MiB")


def test_chunks_leave_the_room_that_the_allocator_was_seen_to_need(cuda: FakeCuda, tmp_path: Path) -> None:
    """24 KiB of 96 go to other things, 3 % to what an allocator wastes, so 4 slots of 16 KiB are left."""
    pools: list[DevicePool] = []

    class Counted(CpuCuda):
        def pool(self, slot_bytes: int, slots: int) -> DevicePool:
            pools.append(DevicePool(slot_bytes, slots, self.torch_device, host_slots))
            return pools[-1]

    cuda.peak = lambda: 24 * 1024 + sum(pool.held_bytes() for pool in pools)
    room = hetmem.Budget(device="96KiB", host="8MiB")
    plain, managed = pair(Tower, room, tmp_path, chunk_bytes="16KiB", device=Counted(), sanitize=False)
    train_both(plain, managed, token_batches(6), Recipe(steps=6))
    assert 3 * 16384 <= pools[0].held_bytes() <= 4 * 16384


def test_what_the_process_needed_before_is_no_need_of_the_model(cuda: FakeCuda, tmp_path: Path) -> None:
    """A plain model was trained here first, say: its peak would have left no room for chunks, for ever."""
    peaks = [80 * 1024]
    cuda.peak = lambda: peaks[0]
    cuda.reset_peak = lambda: peaks.__setitem__(0, 0)
    room = hetmem.Budget(device="96KiB", host="8MiB")
    plain, managed = pair(Tower, room, tmp_path, chunk_bytes="16KiB", device=CpuCuda(), sanitize=False)
    train_both(plain, managed, token_batches(6), Recipe())
    assert registry.of_module(managed).runtime.room.non_model_peak_bytes == 0


def test_the_report_says_how_much_of_the_device_lay_in_fragments(cuda: FakeCuda, tmp_path: Path) -> None:
    """The most of all times, whichever of two models on the device has set the allocator's count back."""
    one, other = (train(cuda, "host", tmp_path) for _ in range(2))
    assert "fragments" not in str(hetmem.report(one))
    cuda.fragment_bytes = 3 << 20
    registry.of_module(other).runtime.memory.device.forget_peak()
    cuda.fragment_bytes = 1 << 20
    registry.of_module(one).runtime.room.look_at_allocator()
    for managed in (one, other):
        report = hetmem.report(managed)
        assert report.to_dict()["tiers"]["device"]["fragment_bytes"] == 3 << 20
        assert "up to 3.00 MiB of the device lay in fragments of torch's allocator" in str(report)


def test_the_report_reads_when_compute_was_over_from_few_events(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two a segment, and two around the update, whatever the number of operators."""
    timed: list[Event] = []

    class Counted(Event):
        def __init__(self, enable_timing: bool = False) -> None:
            super().__init__(enable_timing)
            timed.extend([self] * enable_timing)

    model = hetmem.manage(nn.Sequential(*(nn.Linear(8, 8) for _ in range(20))), device=CpuCuda())
    optimizer = hetmem.AdamW(model.parameters())
    for step in range(3):
        if step == 2:
            monkeypatch.setattr(torch.cuda, "Event", Counted)
        model(torch.ones(2, 8)).square().mean().backward()
        optimizer.step()
    assert len(timed) <= 8
    data = hetmem.report(model).to_dict()
    assert [name for name, _, _ in data["timeline"]["segments"]] == ["forward", "step"]
    assert [name for name, _, _ in data["timeline"]["launched"]] == ["forward", "step"]
    assert 0 < data["step"]["terms"]["launching"] <= data["step"]["seconds"]
    assert 0 < data["step"]["terms"]["compute"] <= data["step"]["seconds"]


def test_no_event_is_asked_for_while_a_graph_is_captured(cuda: FakeCuda) -> None:
    """It could not be read, and would be a part of the graph."""
    streams = streams_of_cpu()
    cuda.captures = True
    assert streams.timed_mark() is None


def test_the_budget_is_nine_tenths_of_what_is_free_or_already_this_process_s(cuda: FakeCuda) -> None:
    cuda.free_bytes, cuda.reserved_bytes = 700, 300
    assert CpuCuda().available_bytes() == 900


def test_without_a_gpu_or_with_a_wrong_index_the_user_is_told(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ManageError, match=r"there is no cuda:1: torch sees 1 GPU"):
        CudaDevice(1)
    with pytest.raises(ManageError, match=r"there is no cuda:-1: torch sees 1 GPU"):
        CudaDevice(-1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ManageError, match=r"torch sees no CUDA GPU"):
        CudaDevice()


def test_a_process_of_a_launcher_has_the_gpu_of_its_number_unless_the_program_has_set_one(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "2")
    assert CudaDevice().torch_device.index == 0, "it sees this one alone"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert CudaDevice().torch_device.index == 2
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert CudaDevice().torch_device.index == 3


class Clock:
    """The host's, which stands still."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(cuda_module, "time", found)
    return found


def test_times_stay_exact_however_long_the_process_runs(cuda: FakeCuda, clock: Clock) -> None:
    """CUDA says them in a float32 of milliseconds: after a day that would be 8 ms apart."""
    streams = streams_of_cpu()
    end: Any = streams.enqueue(Link.HOST_TO_DEVICE, [], lambda: None)
    streams.wait(end)
    base = streams.when(end)
    for second in range(0, 90_000, 100):
        now = Event(enable_timing=True)
        now.record()
        now.last.at = end.at + second
        clock.now = base + second + 1.0
        assert streams.when(now) == pytest.approx(base + second, abs=1e-2)
        assert float(torch.tensor(streams._base.elapsed_time(now))) < 1e6


@pytest.mark.parametrize("drift", [-1e-4, 1e-4])
def test_times_are_the_host_s_though_the_gpu_s_clock_is_another(cuda: FakeCuda, clock: Clock, drift: float) -> None:
    """A ten-thousandth is nine seconds a day: the report would show copies in other steps than theirs."""
    streams = streams_of_cpu()
    assert streams._base.last is not None
    streams._base.last.at = 1.0
    for asked in range(10, 30_000, 10):
        clock.now = asked
        start, end = streams.mark(), streams.enqueue(Link.HOST_TO_DEVICE, [], lambda: None)
        streams.wait(end)
        for event, seconds in ((start, asked + 0.001), (end, asked + 0.002)):
            event.last.at = 1.0 + seconds * (1.0 + drift)
        clock.now = asked + 0.003
        began, ended = streams.when(start), streams.when(end)
        assert (began, ended) == pytest.approx((asked + 0.001, asked + 0.002), abs=0.003)
        assert drift > 0 or ended - began == pytest.approx(0.001, abs=1e-5)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_what_a_first_forward_in_inference_mode_takes_serves_training_too(
    cuda: FakeCuda, mode: Any, tmp_path: Path
) -> None:
    device = CpuCuda()
    options: dict[str, Any] = {"mixed_precision": torch.bfloat16, "device": device, "sanitize": False}
    plain, managed = pair(Tower, "host", tmp_path, home_copies=False, **options)
    batches = token_batches(6)
    with mode():
        managed(*batches[0])
    assert device.moves.staging_bytes > 0
    train_both(plain, managed, batches, Recipe(mixed=torch.bfloat16))


def test_slots_are_taken_when_used_and_given_back_whole() -> None:
    pool = DevicePool(64, 8, torch.device("cpu"), host_slots)
    assert pool.held_bytes() == 0
    pool.prepare(8, 2)
    pool.prepare(2, 1)
    assert pool.holds_place(8) and not pool.holds_place(9)
    first = pool.flat(8, torch.float32, 4, 28)
    assert first.untyped_storage().nbytes() == 16 and pool.holds(first.data_ptr()) and pool.held_bytes() == 192
    pool.give_back([0, 2, 8], keep=1)
    assert pool.held_bytes() == 64 and pool.holds(pool.flat(2, torch.uint8, 1).data_ptr())
    pool.give_back([2], keep=1)
    assert pool.holds_place(2), "no more than was asked for"
    assert pool.flat(5, torch.float16, 0).numel() == 0
