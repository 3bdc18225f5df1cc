"""Copies on streams of their own: what they come behind, which memory they use, and jobs that fail."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import hetmem
from hetmem.errors import ManageError
from tests.engine.harness import manage, mlp
from tests.memory.fake_cuda import CpuCuda, Event, FakeCuda, Stream, cuda, streams_of_cpu
from tests.memory.tested import (
    ComputeStream,
    CudaStreams,
    Finished,
    Job,
    Link,
    StreamCopier,
    registry,
)

__all__ = ["cuda"]  # a fixture

SEGMENTS = 8
"""Events of a step: begin and end of forward, backward and step, and what is left over."""


def test_a_model_is_refused_on_another_stream_than_the_default_one(cuda: FakeCuda, tmp_path: Path) -> None:
    """Nothing has been computed or updated, and on the default stream it goes on."""
    limits = hetmem.Budget(device="384KiB", device_chunks="96KiB", host="64MiB")
    managed = manage(mlp(), limits, tmp_path, device=CpuCuda(), sanitize=False)
    optimizer = hetmem.AdamW(managed.parameters())
    side, before = Stream(), [parameter.clone() for parameter in managed.parameters()]
    for _ in range(3):
        with (
            torch.cuda.stream(side),
            pytest.raises(ManageError, match=r"another stream of .* leave out torch.cuda"),
        ):
            managed(torch.ones(2, 64))
        output = managed(torch.ones(2, 64))
        with torch.cuda.stream(side), pytest.raises(ManageError, match="another stream"):
            output.sum().backward()
        assert all(parameter.grad is None for parameter in managed.parameters())
        assert all(map(torch.equal, before, managed.parameters()))
    managed(torch.ones(2, 64)).sum().backward()
    with torch.cuda.stream(side), pytest.raises(ManageError, match="another stream"):
        optimizer.step()
    assert all(map(torch.equal, before, managed.parameters()))
    optimizer.step()
    assert not any(map(torch.equal, before, managed.parameters()))
    side.synchronize()  # what was asked for there holds a graph


@pytest.mark.parametrize("room", [{"device_chunks": "96KiB"}, {}], ids=["host", "whole"])
def test_backwards_of_other_models_on_other_streams_are_left_alone(
    room: dict[str, str], cuda: FakeCuda, tmp_path: Path
) -> None:
    """Those of a teacher, of a graph that is warmed up: this thread has computed a managed model before."""
    limits = hetmem.Budget(device="2MiB", host="64MiB", **room)
    managed = manage(mlp(), limits, tmp_path, device=CpuCuda(), sanitize=False)
    optimizer, other, side = hetmem.AdamW(managed.parameters()), mlp(), Stream()
    for _ in range(3):
        managed(torch.ones(2, 64)).sum().backward()
        loss = other(torch.ones(2, 64)).sum()
        cuda.current = side
        loss.backward()
        cuda.current = cuda.default
        optimizer.step()
        optimizer.zero_grad()
    assert all(parameter.grad is not None for parameter in other.parameters())


class CountedStreams(CudaStreams):
    """Counts events behind compute; notes how many there were before each copy, and which it comes behind."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"), ComputeStream(torch.device("cpu")))
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
        recorded.clear()
        before, waited = len(events.transfers), len(events.host_waits)
        managed(torch.ones(2, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    copies = [transfer.link for transfer in events.transfers][before:]
    gradients, weights = copies.count(Link.DEVICE_TO_HOST), copies.count(Link.HOST_TO_DEVICE)
    assert gradients == len(list(managed.parameters())) and weights > 0
    assert len(recorded) <= 2 * gradients + 3 * weights + len(events.host_waits) - waited + SEGMENTS


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
    streams, finished = FailedStreams(torch.device("cpu"), ComputeStream(torch.device("cpu"))), []
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
