"""A step that failed is repeated with the same gradients: every chunk is updated once, and the bits are those of a run
that nothing disturbed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hetmem
from hetmem import testing
from hetmem.errors import StoreError
from tests.engine.harness import (
    adamws,
    assert_same_states,
    assert_same_weights,
    loss_of,
    mlp,
    pair,
    vector_batches,
)
from tests.faults.disk import EIO, ENOSPC, Fault, FaultyDisk, healthy, once, settle
from tests.faults.training import REQUEST_BYTES, Training
from tests.optim.test_graphs import Backwards
from tests.pairs import some


@pytest.fixture
def training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Training:
    return Training(FaultyDisk(), tmp_path, monkeypatch)


@pytest.mark.parametrize("call", some(range(0, 66, 6), 2))
@pytest.mark.parametrize("fault", some([EIO, ENOSPC], 2), ids=["EIO", "full"])
def test_a_step_that_is_repeated_after_a_fault_updates_every_chunk_once(
    training: Training, fault: Fault, call: int
) -> None:
    batch = next(training.batches)
    for module in (training.plain, training.managed):
        loss_of(module, batch).backward()
    training.left.step()
    training.disk.fault = once(call, fault)
    try:
        training.right.step()
    except StoreError:
        training.right.step()
    else:  # it was a write of states, which trail behind the step
        with pytest.raises(StoreError):
            training.right.synchronize()
    training.assert_same()
    for optimizer in (training.left, training.right):
        optimizer.zero_grad()
    training.both()
    training.assert_same()
    hetmem.release(training.managed)


@pytest.mark.each
@pytest.mark.parametrize("call", some(range(0, 30, 6), 3))
@pytest.mark.parametrize("wait", ["synchronize", "state_dict", "forward"])
def test_what_trails_behind_a_step_and_could_not_be_read_is_updated_for_whoever_waits_again(
    wait: str, call: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was forgotten: the error was told once, and later waits found nothing to do."""
    disk = FaultyDisk()
    disk.used_by(monkeypatch, threads=2, request_bytes=REQUEST_BYTES)
    plain, managed = pair(mlp, "nvme", tmp_path)
    left, right = adamws(plain, managed, overlap="forward", max_grad_norm=1e9)  # all is updated behind the step
    waits = {"synchronize": right.synchronize, "state_dict": right.state_dict}
    batches = vector_batches(4, 8, 64)
    for number, batch in enumerate(batches):
        for module, optimizer in ((plain, left), (managed, right)):
            loss_of(module, batch).backward()
            with testing.updates_held() if number == 2 else nullcontext():
                optimizer.step()
        if number == 2:
            disk.fault = once(call, EIO)
            wait_for_all = waits.get(wait, partial(managed, *batch))
            with pytest.raises(StoreError):
                wait_for_all()
            wait_for_all()
        left.zero_grad()
        right.zero_grad()
    assert_same_weights(plain, managed)
    assert_same_states(left, right)
    hetmem.release(managed)


class Branches(nn.Module):
    """Two of equal layers, of which a forward takes the first, or both."""

    def __init__(self) -> None:
        super().__init__()
        self.both = True
        self.left, self.right = (nn.Sequential(*(nn.Linear(64, 64) for _ in range(3))) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.left(x) + (self.right(x) if self.both else 0)
        return out.square().mean()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """Ends what a test has entered, also where it fails."""
    with ExitStack() as stack:
        yield stack


@pytest.mark.parametrize("placement", ["host", "nvme"])
def test_a_step_that_fails_forgets_nothing_that_the_one_before_has_left_to_do(
    placement: str, tmp_path: Path, stack: ExitStack
) -> None:
    plain, managed = pair(Branches, placement, tmp_path)
    left, right = adamws(plain, managed, overlap="forward")
    held = {testing.of(managed).chunk_of(parameter) for parameter in managed.right.parameters()}

    def is_free(original: Any, updates: Any, job: Any) -> bool:
        return job.chunk.spec.index not in held and original(updates, job)

    batches = vector_batches(4, 8, 64)
    for number, batch in enumerate(batches):
        for module, optimizer in ((plain, left), (managed, right)):
            module.both = number < 3
            if number == 2 and module is managed:
                right.synchronize()
                stack.enter_context(testing.around("is an update free", is_free))
            module(*batch).backward()
            if number == 3 and module is managed:
                right.param_groups[0]["lr"] *= 2
                with pytest.raises(RuntimeError, match="changed after their update had begun"):
                    right.step()
                right.param_groups[0]["lr"] /= 2
            optimizer.step()
            optimizer.zero_grad()
    stack.close()
    right.synchronize()
    assert_same_weights(plain, managed)
    assert_same_states(left, right)
    hetmem.release(managed)


@pytest.mark.each
@pytest.mark.parametrize("call", some(range(0, 24, 3), 3))
@pytest.mark.parametrize("overlap", ["off", "backward"])
def test_an_error_while_an_update_gives_back_what_it_used_leaves_nobody_waiting(
    overlap: str, call: int, tmp_path: Path
) -> None:
    plain, managed = pair(mlp, "nvme", tmp_path)
    left, right = adamws(plain, managed, overlap=overlap)
    calls = iter(range(1 << 30))

    def closed(close: Any, *args: Any, **keywords: Any) -> None:
        close(*args, **keywords)
        if next(calls) == call:
            raise torch.OutOfMemoryError("for what comes in its place")

    for number, batch in enumerate(vector_batches(4, 8, 64)):
        for module in (plain, managed):
            loss_of(module, batch).backward()
        left.step()
        with testing.around("close a role", closed) if number == 2 else nullcontext():
            try:
                right.step()
            except torch.OutOfMemoryError:
                right.step()
        for optimizer in (left, right):
            optimizer.zero_grad()
    assert_same_weights(plain, managed)
    assert_same_states(left, right)
    hetmem.release(managed)


@pytest.mark.parametrize("tasks", ["tasks that sum", "tasks that update"])
def test_a_step_of_which_a_tile_fails_in_staging_is_repeated(tasks: str, tmp_path: Path) -> None:
    plain, managed = pair(mlp, "nvme", tmp_path)
    left, right = adamws(plain, managed, max_grad_norm=1e9)
    first = iter([True])

    def fails() -> None:
        raise MemoryError("for a temporary")

    def made(tasks_of: Any, *args: Any) -> list[Any]:
        task, *others = tasks_of(*args)
        return [fails if next(first, False) else task, *others]

    for number, batch in enumerate(vector_batches(3, 8, 64)):
        for module in (plain, managed):
            loss_of(module, batch).backward()
        left.step()
        with testing.around(tasks, made) if number == 1 else nullcontext():
            if number == 1:
                with pytest.raises(MemoryError):
                    right.step()
            right.step()
        norm = nn.utils.get_total_norm([p.grad for p in plain.parameters() if p.grad is not None])
        assert right.grad_norm == pytest.approx(float(norm), rel=1e-6)
        for optimizer in (left, right):
            optimizer.zero_grad()
    assert next(first, None) is None
    assert_same_weights(plain, managed)
    assert_same_states(left, right)


@pytest.mark.parametrize("call", some(range(0, 66, 12), 2))
def test_a_step_that_is_repeated_counts_once_for_the_loss_scale(training: Training, call: int) -> None:
    """It counted when it failed too: the scale grew in between, and the rest was updated with another factor."""
    training.right.loss_scale = scale = hetmem.optim.LossScale(2.0**10, growth_interval=1)
    batch = next(training.batches)
    loss_of(training.plain, batch).backward()
    training.right.scale(loss_of(training.managed, batch)).backward()
    training.left.step()
    training.disk.fault = once(call, EIO)
    try:
        training.step_to_the_end()
    except StoreError:
        training.step_to_the_end()
    training.assert_same()
    assert scale.value == 2.0**11
    hetmem.release(training.managed)


@pytest.mark.parametrize("call", some(range(0, 132, 12), 3))
def test_a_step_over_two_models_that_is_repeated_updates_each_once(
    call: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first was done when the second failed, and was updated once more."""
    disk = FaultyDisk()
    disk.used_by(monkeypatch, threads=2, request_bytes=REQUEST_BYTES)
    pairs = [pair(mlp, "nvme", tmp_path) for _ in range(2)]
    left = torch.optim.AdamW([p for plain, _ in pairs for p in plain.parameters()], lr=1e-2, fused=True)
    right = hetmem.AdamW([p for _, managed in pairs for p in managed.parameters()], lr=1e-2)
    for batch, fault in zip(vector_batches(3, 8, 64), (healthy, once(call, EIO), healthy), strict=True):
        for which, optimizer in ((0, left), (1, right)):
            sum(loss_of(both[which], batch) for both in pairs).backward()
            disk.fault = fault if optimizer is right else healthy
            try:
                optimizer.step()
            except StoreError:
                optimizer.step()
            settle(*(managed for _, managed in pairs))
            optimizer.zero_grad()
    for plain, managed in pairs:
        assert_same_weights(plain, managed)
        hetmem.release(managed)


def test_a_gradient_that_could_not_be_written_and_that_nobody_wants_stops_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FaultyDisk()
    disk.used_by(monkeypatch, threads=2)
    plain, managed = pair(Backwards, "nvme", tmp_path)
    plain.keeps = managed.keeps = False
    left, right = adamws(plain, managed)
    batches = vector_batches(3, 4, 32)
    disk.fault = lambda verb, at, nbytes: EIO(verb, at, nbytes) if verb == "write" else nbytes
    with pytest.raises(StoreError):
        loss_of(managed, batches[0]).backward()
    settle(managed)
    managed.zero_grad()
    disk.fault = healthy
    for optimizer in (left, right):
        optimizer.step()
    for batch in batches:
        for module, optimizer in ((plain, left), (managed, right)):
            loss_of(module, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_same_weights(plain, managed)


@pytest.mark.each
@pytest.mark.parametrize("overlap", ["backward", "forward"])
def test_a_write_after_an_update_is_refused_also_where_the_disk_failed_before_it_was_found(
    overlap: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step that was repeated took all that was updated before it for what it had updated itself."""
    disk = FaultyDisk()
    disk.used_by(monkeypatch, threads=2, request_bytes=REQUEST_BYTES)
    _, managed = pair(mlp, "nvme", tmp_path)
    optimizer = hetmem.AdamW(managed.parameters(), lr=1e-2, overlap=overlap)
    batches = vector_batches(3, 8, 64)
    for batch in batches[:2]:
        loss_of(managed, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    loss_of(managed, batches[2]).backward()
    torch.autograd.graph.increment_version(managed[-1].weight)  # as code that torch asks nothing of, of the first
    with monkeypatch.context() as patch:
        patch.setattr("hetmem.optim.update_pass.Passes.notice", _fails)
        with pytest.raises(StoreError):
            optimizer.step()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="changed after their update had begun"):
            optimizer.step()
    optimizer.forget_step()
    optimizer.zero_grad()
    loss_of(managed, batches[2]).backward()
    optimizer.step()


def _fails(*_: object) -> None:
    raise StoreError(5, "Input/output error")
