"""Gradients that are scaled, clipped or not finite: torch's scaler and norm, and hetmem's, behind a backward."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hetmem
from hetmem.intercept import registry
from hetmem.memory.chunk import Role
from hetmem.memory.nvme_store import BLOCK_BYTES
from hetmem.optim.update_queue import Updates
from tests.engine.harness import (
    WIDTH,
    adamws,
    assert_same_weights,
    budget,
    everywhere,
    loss_of,
    mlp,
    pair,
    vector_batches,
)
from tests.faults.disk import FaultyDisk
from tests.optim.stories import adamw, on_either, on_the_other, overlaps, twins, with_gradients


@on_either
def test_gradients_are_as_large_as_they_are(overlap: str, placement: str, tmp_path: Path) -> None:
    """Gradients of more than a megabyte go home on another thread."""
    build = lambda: nn.Sequential(nn.Linear(600, 600), nn.Tanh(), nn.Linear(600, 600))  # noqa: E731
    room = budget(placement, tmp_path, device_chunks="16MiB", host="64MiB" if placement == "host" else "16MiB")
    both = twins(pair(build, room, tmp_path, chunk_bytes=None), overlap=overlap)
    for batch in vector_batches(4, 2, 600):
        both.train([batch])
        assert_same_weights(both.plain, both.managed)


@on_the_other
def test_the_gradient_scaler_of_torch_works_or_is_refused(overlap: str, placement: str, tmp_path: Path) -> None:
    plain, managed = pair(mlp, placement, tmp_path)
    optimizers: Any = (
        torch.optim.SGD(plain.parameters(), lr=0.1),
        hetmem.optim.offload(torch.optim.SGD, managed.parameters(), lr=0.1, overlap=overlap),
    )
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**8) for _ in optimizers]
    for batch in vector_batches(4, 4, 64):
        for module, optimizer, scaler in zip((plain, managed), optimizers, scalers, strict=True):
            optimizer.zero_grad()
            scaler.scale(loss_of(module, batch)).backward()
            try:
                scaler.step(optimizer)
            except RuntimeError as error:
                assert module is managed
                assert overlap != "off"
                assert "overlap='off'" in str(error)  # noqa: PT017
                return
            scaler.update()
        assert_same_weights(plain, managed)


def test_a_scaler_writes_gradients_while_those_before_are_read_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`unscale_` counts no version, so that only what has been read can be compared with what lies at home."""
    disk = FaultyDisk()
    disk.used_by(monkeypatch)
    plain, managed = pair(mlp, "nvme", tmp_path)
    optimizers = adamw(plain.parameters()), hetmem.AdamW(managed.parameters(), lr=1e-2)
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**8) for _ in optimizers]
    for batch in vector_batches(4, 4, 64):
        for module, optimizer, scaler in zip((plain, managed), optimizers, scalers, strict=True):
            optimizer.zero_grad()
            loss = scaler.scale(loss_of(module, batch))
            disk.tells_late_seconds = 0.02
            loss.backward()
            scaler.step(optimizer)
            disk.tells_late_seconds = 0.0
            scaler.update()
        assert_same_weights(plain, managed)


@pytest.mark.each
@everywhere
@overlaps
@pytest.mark.parametrize("value", [float("inf"), float("nan"), float("-inf")])
def test_clipping_gradients_that_are_not_finite_does_what_torch_does(
    value: float, overlap: str, placement: str, tmp_path: Path
) -> None:
    plain, managed = pair(mlp, placement, tmp_path)
    left: Any = torch.optim.SGD(plain.parameters(), lr=0.1, foreach=False)
    right = hetmem.optim.offload(torch.optim.SGD, managed.parameters(), lr=0.1, max_grad_norm=1e6, overlap=overlap)
    for step, batch in enumerate(vector_batches(4, 4, 64)):
        for module, optimizer in ((plain, left), (managed, right)):
            loss = loss_of(module, batch)
            if step == 3:
                loss = loss + module[2].weight[0, 0] * value
            loss.backward()
            if module is plain:
                nn.utils.clip_grad_norm_(module.parameters(), 1e6)
            optimizer.step()
            optimizer.zero_grad()
    for (name, expected), got in zip(plain.named_parameters(), managed.state_dict().values(), strict=True):
        assert torch.equal(expected.isnan(), got.isnan()), name
        assert torch.equal(expected.nan_to_num(), got.nan_to_num()), name


class HalfwayDisk(FaultyDisk):
    """A read of two blocks or more waits in the middle, while `waits`, until the test goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.waits = False
        self.halfway, self.goes_on = threading.Event(), threading.Event()

    def preadv(self, fd: int, buffers: list[memoryview], offset: int, /) -> int:
        (memory,) = buffers
        if not self.waits or len(memory) < 2 * BLOCK_BYTES:
            return super().preadv(fd, buffers, offset)
        moved = super().preadv(fd, [memory[:BLOCK_BYTES]], offset)
        self.halfway.set()
        assert self.goes_on.wait(30)
        return moved + super().preadv(fd, [memory[BLOCK_BYTES:]], offset + BLOCK_BYTES)


def test_a_gradient_that_was_being_read_ahead_while_it_was_scaled_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One block of the copy is of before, and its greatest element of after."""
    disk = HalfwayDisk()
    disk.used_by(monkeypatch)
    plain, managed = pair(mlp, "nvme", tmp_path)
    right = hetmem.AdamW(managed.parameters(), lr=1e-2, max_grad_norm=1e-2)
    interception = registry.of_module(managed)
    traffic = interception.runtime.traffic
    for batch in vector_batches(3, 4, 64):
        plain.load_state_dict(managed.state_dict())
        for module in (plain, managed):
            module.zero_grad()
            with monkeypatch.context() as patch:
                patch.setattr(Updates, "pump", lambda _: None)
                loss_of(module, batch).backward()
            if module is managed:
                chunk = interception.runtime.bindings.by_id[id(managed[2].weight)].chunk
                traffic.superseded(chunk, Role.GRAD)
                traffic.executor.quiesce()
                disk.halfway.clear()
                disk.goes_on.clear()
                disk.waits = True
                traffic.ask_role(chunk, Role.GRAD, load=True)
                assert disk.halfway.wait(30)
            for parameter in module.parameters():
                assert parameter.grad is not None
                parameter.grad.data.mul_(16.0)
            disk.waits = False
            disk.goes_on.set()
        while not traffic.role_has_arrived(chunk, Role.GRAD):
            traffic.wait_for_one()
        traffic.unask_role(chunk, Role.GRAD)
        norm = float(nn.utils.get_total_norm([p.grad for p in plain.parameters() if p.grad is not None]))
        right.step()
        assert right.grad_norm == pytest.approx(norm, rel=1e-5)


class PartlyUsed(nn.Module):
    """The last bias shares a chunk with a parameter that nobody uses: its update waits for `step`."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.unused = mlp(), nn.ParameterList([torch.zeros(WIDTH)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)  # type: ignore[no-any-return]


EDITS: dict[str, Callable[[Any], None]] = {
    "zeroed": lambda weight: weight.grad.zero_(),
    "another": lambda weight: setattr(weight, "grad", torch.ones(WIDTH)),
    "taken away": lambda weight: setattr(weight, "grad", None),
    "none": lambda weight: None,
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_gradients_left_for_the_step_beside_consumed_ones_are_stepped_as_the_program_leaves_them(
    edit: Callable[[Any], None], tmp_path: Path
) -> None:
    plain, managed = pair(PartlyUsed, "host", tmp_path)
    left, right = adamws(plain, managed, overlap="backward")
    for step, batch in enumerate(vector_batches(3, 4, WIDTH)):
        for module, optimizer in ((plain, left), (managed, right)):
            loss_of(module, batch).backward()
            if step and module is managed:
                next(iter(right._steppers.values()))._updates.finish()  # those that have begun
                assert [*map(id, with_gradients(managed))] == [id(managed.layers[4].bias)]
            edit(module.layers[4].bias)
            optimizer.step()
            optimizer.zero_grad()
        assert_same_weights(plain, managed)


def test_gradients_that_hooks_of_the_program_see_may_be_clipped(tmp_path: Path) -> None:
    """All updates wait for `step`."""
    plain, managed = pair(mlp, "host", tmp_path)
    left, right = adamws(plain, managed, overlap="backward")
    for parameter in managed.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: None)
    for batch in vector_batches(3, 4, WIDTH):
        for module, optimizer in ((plain, left), (managed, right)):
            loss_of(module, batch).backward()
            nn.utils.clip_grad_norm_(module.parameters(), 1e-3)
            optimizer.step()
            optimizer.zero_grad()
        assert_same_weights(plain, managed)
