"""The CUDA device on a machine without a GPU: the same bits as torch however late streams are, and its own limits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hetmem
from hetmem.errors import ManageError
from tests.engine.harness import PLACEMENTS, Recipe, Tower, manage, mlp, pair, token_batches, train_both
from tests.engine.lazy_device import host_slots
from tests.memory.fake_cuda import CpuCuda, Event, FakeCuda, Stream, cuda
from tests.memory.tested import (
    ComputeStreams,
    CudaDevice,
    CudaStreams,
    DevicePool,
    Finished,
    Job,
    Link,
    Mapping,
    StreamCopier,
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


SEGMENTS = 8
"""Events of a step: begin and end of forward, backward and step, and what is left over."""


def streams_of_cpu() -> CudaStreams:
    return CudaStreams(torch.device("cpu"), ComputeStreams(torch.device("cpu")))


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
    """The most of all times, whichever of two models on the device has asked: each sets the allocator's count back."""
    one, other = (train(cuda, "host", tmp_path) for _ in range(2))
    assert "fragments" not in str(hetmem.report(one))
    cuda.fragment_bytes = 3 << 20
    registry.of_module(other).runtime.room.look_at_allocator()
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


def test_a_mark_is_behind_every_stream_that_was_seen_to_compute(cuda: FakeCuda) -> None:
    """Two streams read one weight; the copy that overwrites it comes after both, whoever let go last."""
    streams, compute = streams_of_cpu(), [Stream(), Stream()]
    weight, seen = torch.ones(4), [torch.zeros(4), torch.zeros(4)]
    for stream, read in zip(compute, seen, strict=True):
        with torch.cuda.stream(stream):
            read.copy_(weight)
            mark = streams.mark()

    def overwrite() -> None:
        weight.fill_(7.0)

    end = streams.enqueue(Link.HOST_TO_DEVICE, [mark], overwrite)
    streams.wait(end)
    assert torch.equal(seen[0], torch.ones(4)) and torch.equal(seen[1], torch.ones(4)) and weight[0] == 7


def test_a_copy_comes_behind_a_use_on_a_stream_that_asked_for_no_event(cuda: FakeCuda) -> None:
    """Uses record none: the copy into their memory does, on every stream on which there were any."""
    copier = StreamCopier(streams_of_cpu(), lambda job, start, end: None, lambda finished: None)
    weight, seen = torch.ones(4), torch.zeros(4)
    with torch.cuda.stream(Stream()):
        seen.copy_(weight)
        mark = copier.mark()
    copier.start(Job("chunk", Link.HOST_TO_DEVICE, lambda: weight.fill_(7.0) and None, 1), [mark])
    copier.close()
    assert torch.equal(seen, torch.ones(4)) and weight[0] == 7


class CountedStreams(CudaStreams):
    """Counts events behind compute; notes how many there were before each copy, and which it comes behind."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"), ComputeStreams(torch.device("cpu")))
        self.events: list[Any] = []
        self.behind: list[int] = []

    def mark(self) -> Any:
        self.events.append(super().mark())
        return self.events[-1]

    def enqueue(self, link: Link, after: Sequence[Any], work: Callable[[], None]) -> Any:
        self.behind += [self.events.index(event) for event in after]
        return super().enqueue(link, after, work)


def test_a_copy_into_memory_that_is_long_free_waits_for_no_later_compute(cuda: FakeCuda) -> None:
    """A few uses share an event: one each would cost the host more, one for all would hold copies back."""
    streams = CountedStreams()
    copier = StreamCopier(streams, lambda job, start, end: None, lambda finished: None)
    marks = [copier.mark() for _ in range(20)]
    assert len(streams.events) == 5
    for mark in (marks[0], marks[3], marks[4], marks[19]):
        copier.start(Job(mark, Link.HOST_TO_DEVICE, lambda: None, 1), [mark])
    assert streams.behind == [0, 0, 1, 4] and len(streams.events) == 5
    copier.start(Job("last", Link.HOST_TO_DEVICE, lambda: None, 1), [copier.mark()])
    assert streams.behind[4:] == [5], "nothing has been recorded since"
    copier.close()


def test_events_of_a_step_are_those_of_its_copies_and_waits_and_none_of_a_use(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A gradient took four of them, and a use of a weight one, each some microseconds of the thread that launches."""
    recorded: list[Event] = []
    record = Event.record
    monkeypatch.setattr(Event, "record", lambda event, *stream: (recorded.append(event), record(event, *stream))[1])
    limits = hetmem.Budget(device="384KiB", device_chunks="96KiB", host="64MiB")  # all copies, no states
    managed = manage(mlp(), limits, tmp_path, device=CpuCuda(), sanitize=False)
    optimizer = hetmem.AdamW(managed.parameters())
    events = registry.of_module(managed).runtime.events
    for _ in range(4):
        for log in (recorded, events.transfers, events.host_waits):
            log.clear()
        managed(torch.ones(2, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    copies = [transfer.link for transfer in events.transfers]
    gradients, weights = copies.count(Link.DEVICE_TO_HOST), copies.count(Link.HOST_TO_DEVICE)
    assert gradients == len(list(managed.parameters())) and weights > 0
    assert len(recorded) <= 2 * gradients + 3 * weights + len(events.host_waits) + SEGMENTS


def test_slots_are_of_the_default_stream_s_memory_whatever_stream_is_current(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's allocator keeps what is given back for the stream that was current when it was taken."""
    taken_on: list[Stream] = []
    empty = torch.empty

    def noting(*args: Any, **kwargs: Any) -> torch.Tensor:
        taken_on.append(cuda.current)
        return empty(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", noting)
    device, side = CpuCuda(), Stream()
    pool = device.pool(64, 4)
    with torch.cuda.stream(side):
        pool.prepare(0, 1)
        pool.prepare(4, 2)
        assert cuda.current is side
    assert taken_on == [cuda.default] * 2


def test_memory_of_a_slot_that_another_stream_used_is_handed_out_after_that_is_done(cuda: FakeCuda) -> None:
    """The allocator knows of the default stream alone; the user computes on another one."""
    device, side = CpuCuda(), Stream()
    pool, streams = device.pool(64, 4), CudaStreams(device.torch_device, device._compute)
    for slot in (0, 1):
        pool.prepare(slot, 1)
    first = pool.flat(0, torch.uint8, 64).data_ptr()
    pool.give_back([1], keep=1)
    assert cuda.kept == [], "nobody else was seen to compute"
    with torch.cuda.stream(side):
        streams.mark()
    pool.prepare(4, 2)
    large = pool.flat(4, torch.uint8, 128).data_ptr()
    pool.give_back([0, 4], keep=0)
    assert cuda.kept == [(large, side), (first, side)]


def test_zeroed_memory_is_zeroed_for_the_stream_that_asked(cuda: FakeCuda) -> None:
    side = Stream()
    with torch.cuda.stream(side):
        CpuCuda().allocate(64)
        assert side.asked, "it waits for the stream that writes the zeros"


def test_work_that_fails_leaves_nothing_under_way(cuda: FakeCuda) -> None:
    """Its owner lets go of the memory as soon as it is told."""
    streams, source, target = (
        streams_of_cpu(),
        torch.ones(4),
        torch.zeros(4),
    )

    def work() -> None:
        target.copy_(source)
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        streams.enqueue(Link.DEVICE_TO_HOST, [], work)
    source.fill_(7.0)
    cuda.synchronize()
    assert torch.equal(target, torch.ones(4))


def test_a_job_that_could_not_be_asked_for_is_reported_and_may_be_asked_for_again(cuda: FakeCuda) -> None:
    finished: list[Finished] = []
    copier = StreamCopier(
        streams_of_cpu(),
        lambda job, start, end: None,
        finished.append,
    )

    def fails() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    copier.start(Job("chunk", Link.HOST_TO_DEVICE, fails, 1), [])
    assert not copier.order_compute_after("chunk") and [ended.error is None for ended in finished] == [False]
    copier.start(Job("chunk", Link.HOST_TO_DEVICE, lambda: None, 1), [])
    assert copier.order_compute_after("chunk")
    copier.close()
    assert [ended.error is None for ended in finished] == [False, True]


class FailedStreams(CudaStreams):
    """A device that has failed: every question is answered by the same error, as after an assertion in a kernel."""

    failed = False

    def passed(self, event: Any) -> bool:
        if self.failed:
            raise RuntimeError("CUDA error: device-side assert triggered")
        return super().passed(event)

    def when(self, event: Any) -> float:
        self.passed(event)
        return super().when(event)

    def wait(self, event: Any) -> None:
        self.passed(event)
        super().wait(event)


def test_a_device_that_fails_ends_every_job_with_its_error(cuda: FakeCuda) -> None:
    streams, finished = FailedStreams(torch.device("cpu"), ComputeStreams(torch.device("cpu"))), []
    copier = StreamCopier(streams, lambda job, start, end: None, finished.append)
    for tag in range(3):
        link = Link.DEVICE_TO_HOST if tag else Link.HOST_TO_DEVICE
        copier.start(Job(tag, link, lambda: None, 1), [])
    streams.failed = True
    copier.abandon()
    assert copier.wait() and len(finished) == 1
    copier.poll()
    assert [str(ended.error) for ended in finished] == ["CUDA error: device-side assert triggered"] * 3
    assert {ended.tag for ended in finished} == {0, 1, 2}
    assert not copier.wait()
    copier.close()


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
