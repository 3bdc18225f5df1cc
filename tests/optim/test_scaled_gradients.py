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
    manage,
    mlp,
    pair,
    streamed,
    vector_batches,
)
from tests.faults.disk import FaultyDisk
from tests.optim.stories import adamw, on_either, on_the_other, one, overlaps, twins, with_gradients


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


@streamed
@pytest.mark.parametrize("overlap", ["backward", "forward"])
def test_the_norm_is_of_gradients_that_were_scaled_after_it_was_summed_up(
    overlap: str, placement: str, tmp_path: Path
) -> None:
    """By something that counts no version; nothing had been updated yet, but the sums of the backward were taken."""
    plain, managed = pair(mlp, placement, tmp_path)
    right = hetmem.AdamW(managed.parameters(), lr=1e-2, overlap=overlap, max_grad_norm=1e-2)
    for batch in vector_batches(4, 4, 64):
        plain.load_state_dict(managed.state_dict())
        for module in (plain, managed):
            module.zero_grad()
            loss_of(module, batch).backward()
            for parameter in module.parameters():
                assert parameter.grad is not None
                parameter.grad.data.mul_(0.5)
        norm = float(nn.utils.get_total_norm([p.grad for p in plain.parameters() if p.grad is not None]))
        right.step()
        assert right.grad_norm == pytest.approx(norm, rel=1e-5)


@pytest.mark.parametrize("overlap", ["backward", "forward"])
def test_the_norm_is_of_gradients_that_were_scaled_before_their_turn(
    overlap: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The backward has queued their sums, which workers that are slow have not begun, and left copies in staging."""
    plain, managed = pair(mlp, "nvme", tmp_path)
    right = hetmem.AdamW(managed.parameters(), lr=1e-2, overlap=overlap, max_grad_norm=1e-2)
    for batch in vector_batches(4, 4, 64):
        plain.load_state_dict(managed.state_dict())
        for module in (plain, managed):
            module.zero_grad()
            with monkeypatch.context() as patch:
                patch.setattr(Updates, "pump", lambda _: None)
                loss_of(module, batch).backward()
            for parameter in module.parameters():
                assert parameter.grad is not None
                parameter.grad.data.mul_(0.5)
        norm = float(nn.utils.get_total_norm([p.grad for p in plain.parameters() if p.grad is not None]))
        right.step()
        assert right.grad_norm == pytest.approx(norm, rel=1e-5)


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


@pytest.mark.parametrize("overlap", ["off", "forward"])
def test_a_gradient_that_was_being_read_ahead_while_it_was_scaled_is_read_again(
    overlap: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One block of the copy is of before, and its greatest element of after."""
    disk = HalfwayDisk()
    disk.used_by(monkeypatch)
    plain, managed = pair(mlp, "nvme", tmp_path)
    right = hetmem.AdamW(managed.parameters(), lr=1e-2, overlap=overlap, max_grad_norm=1e-2)
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


def test_updates_that_have_not_begun_are_made_of_scaled_gradients_or_the_step_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As above, where nothing waits for a norm. Some may begin before the step has looked at what was written."""
    plain, managed = pair(mlp, "nvme", tmp_path)
    optimizers = adamws(plain, managed, overlap="forward")
    for batch in vector_batches(4, 4, 64):
        for module, optimizer in zip((plain, managed), optimizers, strict=True):
            optimizer.zero_grad()
            with monkeypatch.context() as patch:
                patch.setattr(Updates, "pump", lambda _: None)
                loss_of(module, batch).backward()
            for parameter in module.parameters():
                assert parameter.grad is not None
                parameter.grad.data.mul_(0.5)
            try:
                optimizer.step()
            except RuntimeError as error:
                assert module is managed
                assert "changed after their update had begun" in str(error)  # noqa: PT017
                return
        assert_same_weights(plain, managed)


@pytest.mark.each
@pytest.mark.parametrize("write", ["counted", "uncounted", "clipped"])
@pytest.mark.parametrize("place", ["host", "nvme"])
def test_streamed_gradients_that_are_written_to_before_their_update_are_not_stepped_in_silence(
    place: str, write: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some of the others are used up by then: what is left has another norm."""
    managed = manage(mlp(), place, tmp_path)
    optimizer = hetmem.AdamW(managed.parameters(), lr=1e-2, overlap="backward", gradients="streamed")
    first, second = vector_batches(2, 4, WIDTH)
    one(managed, first, optimizer)
    optimizer.zero_grad()
    with monkeypatch.context() as patch:
        patch.setattr(Updates, "pump", lambda _: None)  # they are queued, and have not begun
        loss_of(managed, second).backward()
    left = [parameter for parameter in managed.parameters() if parameter.grad is not None]
    assert left
    if write == "clipped":
        torch.nn.utils.clip_grad_norm_(left, 1e-3)
    for parameter in left if write != "clipped" else ():
        (parameter.grad if write == "counted" else parameter.grad.data).mul_(0.5)
    with pytest.raises(RuntimeError, match=r"changed after their update had begun during backward .*max_grad_norm="):
        optimizer.step()


class PartlyUsed(nn.Module):
    """The last bias shares a chunk with a parameter that nobody uses: its update waits for `step`."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.unused = mlp(), nn.ParameterList([torch.zeros(WIDTH)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)  # type: ignore[no-any-return]


EDITS: dict[str, Callable[[Any], None]] = {
    "counted": lambda weight: weight.grad.mul_(0.5),
    "uncounted": lambda weight: weight.grad.data.mul_(0.5),
    "clipped": lambda weight: nn.utils.clip_grad_norm_([weight], 1e-3),
    "taken away": lambda weight: setattr(weight, "grad", None),
    "none": lambda weight: None,
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_gradients_left_for_the_step_beside_streamed_ones_are_stepped_as_the_program_leaves_them(
    edit: Callable[[Any], None], tmp_path: Path
) -> None:
    plain, managed = pair(PartlyUsed, "host", tmp_path)
    left, right = adamws(plain, managed, overlap="backward", gradients="streamed")
    for batch in vector_batches(3, 4, WIDTH):
        for module, optimizer in ((plain, left), (managed, right)):
            loss_of(module, batch).backward()
            if module is managed:
                next(iter(right._steppers.values()))._updates.finish()  # those that have begun
                assert [*map(id, with_gradients(managed))] == [id(managed.layers[4].bias)]
            edit(module.layers[4].bias)
            optimizer.step()
            optimizer.zero_grad()
        assert_same_weights(plain, managed)


def test_streamed_gradients_of_which_none_was_used_up_may_be_clipped(tmp_path: Path) -> None:
    """Hooks of the user see each of them, so that all updates wait for `step`."""
    plain, managed = pair(mlp, "host", tmp_path)
    left, right = adamws(plain, managed, overlap="backward", gradients="streamed")
    for parameter in managed.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: None)
    for batch in vector_batches(3, 4, WIDTH):
        for module, optimizer in ((plain, left), (managed, right)):
            loss_of(module, batch).backward()
            nn.utils.clip_grad_norm_(module.parameters(), 1e-3)
            optimizer.step()
            optimizer.zero_grad()
        assert_same_weights(plain, managed)
