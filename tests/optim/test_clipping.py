"""Clipping and loss scaling while updates overlap: the bits of plain gradients that were clipped or scaled."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hetmem
from hetmem import testing
from tests.engine.harness import (
    PLACEMENTS,
    Recipe,
    Tower,
    adamws,
    assert_same,
    assert_same_states,
    assert_same_weights,
    everywhere,
    loss_of,
    manage,
    mlp,
    pair,
    precisions,
    streamed,
    token_batches,
    train_both,
    vector_batches,
)
from tests.optim.stories import OVERLAPS, overlaps
from tests.pairs import mostly


@pytest.mark.each
@streamed
@precisions
@overlaps
def test_clipping_equals_a_clip_of_plain_gradients(
    overlap: str, mixed: torch.dtype | None, placement: str, tmp_path: Path
) -> None:
    """The norm of some steps is below the limit and of others above it, so that both factors occur. A weight
    decay of nothing and SGD's sensitivity are not there, so the moments are compared: they see the factor."""
    plain, managed = pair(Tower, placement, tmp_path, mixed_precision=mixed)
    left = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
    probe = copy.deepcopy(plain)
    norms = []
    for batch in token_batches(6):
        probe.zero_grad()
        loss_of(probe, batch).backward()
        norms.append(testing.norm([p.grad.flatten() for p in probe.parameters() if p.grad is not None]))
    limit = sorted(norms)[2]
    right = hetmem.AdamW(managed.parameters(), lr=1e-2, overlap=overlap, max_grad_norm=limit)
    clipped = []

    def clip(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        gradients = [p.grad for p in plain.parameters() if p.grad is not None]
        norm = testing.norm([gradient.flatten() for gradient in gradients])
        assert norm == pytest.approx(float(nn.utils.get_total_norm(gradients)), rel=1e-5)
        factor = limit / (norm + 1e-6)
        clipped.append(factor < 1)
        for gradient in gradients:
            gradient.mul_(min(1.0, factor))

    left.register_step_pre_hook(clip)
    feed = token_batches(6)
    for step in range(6):
        recipe = Recipe(steps=1, mixed=mixed, set_to_none=True)
        train_both(plain, managed, [feed[step]], recipe, optimizers=(left, right))
    assert True in clipped, "nothing was clipped"
    assert False in clipped, "everything was clipped"


@streamed
def test_the_norm_does_not_depend_on_overlap(placement: str, tmp_path: Path) -> None:
    seen = []
    for overlap in OVERLAPS:
        torch.manual_seed(0)
        module = manage(Tower(), placement, tmp_path)
        optimizer = hetmem.AdamW(module.parameters(), overlap=overlap, max_grad_norm=1.0)
        norms = []
        for batch in token_batches(4):
            optimizer.zero_grad()
            loss_of(module, batch).backward()
            optimizer.step()
            norms.append(optimizer.grad_norm)
        seen.append(norms)
    assert seen[0] == seen[1] == seen[2]


def poison(module: nn.Module) -> None:
    """One gradient is infinite, as an overflow leaves it."""
    parameter = next(iter(module.parameters()))
    assert parameter.grad is not None
    parameter.grad.view(-1)[0] = float("inf")


@pytest.mark.parametrize(("overlap", "placement"), mostly(OVERLAPS, ["nvme", "resident", "host"]))
def test_an_overflow_skips_one_step_and_changes_nothing_else(overlap: str, placement: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = manage(Tower(), placement, tmp_path, mixed_precision=torch.float16)
    scale = hetmem.optim.LossScale(2.0**10, growth_interval=2)
    optimizer = hetmem.AdamW(module.parameters(), lr=1e-2, overlap=overlap, loss_scale=scale)
    batches = token_batches(6)

    def step(batch: Any, factor: float = 1.0) -> None:
        optimizer.zero_grad()
        (optimizer.scale(loss_of(module, batch)) * factor).backward()
        optimizer.step()

    for batch in batches[:3]:
        step(batch)
    assert (scale.value, scale.skipped) == (2.0**11, 0)
    before = copy.deepcopy((module.state_dict(), optimizer.state_dict()))
    step(batches[3], factor=float("inf"))
    after = (module.state_dict(), optimizer.state_dict())
    assert (scale.value, scale.skipped) == (2.0**10, 1)
    for name in before[0]:
        assert_same(before[0][name], after[0][name], name)
    for index, state in before[1]["state"].items():
        for name, value in state.items():
            assert_same(value, after[1]["state"][index][name], f"{name} of {index}")
    step(batches[4])
    assert scale.skipped == 1
    assert any(not torch.equal(before[0][name], value) for name, value in module.state_dict().items())


@pytest.mark.parametrize(("placement", "overlap"), mostly(PLACEMENTS, ["off", "backward"]))
def test_unscaling_gives_the_bits_of_unscaled_gradients(overlap: str, placement: str, tmp_path: Path) -> None:
    """A power of two: nothing is rounded by it, unless a gradient leaves float32's range."""
    plain, managed = pair(Tower, placement, tmp_path)
    left, right = adamws(plain, managed, overlap=overlap, loss_scale=2.0**12)
    for batch in token_batches(4):
        for module, optimizer in ((plain, left), (managed, right)):
            optimizer.zero_grad()
            loss = loss_of(module, batch)
            (loss if module is plain else right.scale(loss)).backward()
            optimizer.step()
        assert_same_weights(plain, managed)
        assert_same_states(left, right)


@everywhere
def test_the_gradient_scaler_of_torch_works(placement: str, tmp_path: Path) -> None:
    plain, managed = pair(Tower, placement, tmp_path)
    optimizers = adamws(plain, managed)
    skipped = 0
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2) for _ in optimizers]
    for index, batch in enumerate(token_batches(6)):
        for module, optimizer, scaler in zip((plain, managed), optimizers, scalers, strict=True):
            optimizer.zero_grad()
            scaler.scale(loss_of(module, batch)).backward()
            if index == 3:
                poison(module)
            scale = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            skipped += scaler.get_scale() < scale
        assert scalers[0].get_scale() == scalers[1].get_scale()
        assert_same_weights(plain, managed)
        assert_same_states(*optimizers)
    assert skipped == 2


@pytest.mark.parametrize("change", ["written", "replaced"])
@streamed
def test_a_norm_is_of_the_gradients_as_they_are_when_the_step_begins(
    placement: str, change: str, tmp_path: Path
) -> None:
    plain, managed = pair(mlp, placement, tmp_path)
    left = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
    right = hetmem.AdamW(managed.parameters(), lr=1e-2, max_grad_norm=1.0)
    for batch in vector_batches(4, 4, 64):
        for module in (plain, managed):
            loss_of(module, batch).backward()
            for parameter in module.parameters():
                assert parameter.grad is not None
                if change == "replaced":
                    parameter.grad = parameter.grad.clone()
                flat = parameter.grad.view(-1)
                flat[int(flat.abs().argmin())] = 100.0
        gradients = [p.grad for p in plain.parameters() if p.grad is not None]
        norm = testing.norm([gradient.flatten() for gradient in gradients])
        for gradient in gradients:
            gradient.mul_(1.0 / (norm + 1e-6))
        left.step()
        right.step()
        assert right.grad_norm == norm
        left.zero_grad()
        right.zero_grad()
    assert_same_weights(plain, managed)
    assert_same_states(left, right)


@streamed
@pytest.mark.parametrize("overlap", OVERLAPS[1:])
@pytest.mark.parametrize("way", ["dropped", "zeroed", "replaced"])
def test_a_norm_counts_gradients_that_are_dropped_zeroed_or_replaced_behind_the_backward(
    way: str, overlap: str, placement: str, tmp_path: Path
) -> None:
    """Their squares were summed up in the backward."""
    plain, managed = pair(mlp, placement, tmp_path)
    left, right = adamws(plain, managed, overlap=overlap, max_grad_norm=1e9)
    for batch in vector_batches(4, 4, 64):
        for module, optimizer in ((plain, left), (managed, right)):
            loss_of(module, batch).backward()
            weight = module[2].weight
            if way == "zeroed":
                weight.grad.zero_()  # type: ignore[union-attr, operator]
            else:
                weight.grad = None if way == "dropped" else torch.full((64, 64), 0.5)  # type: ignore[union-attr]
            optimizer.step()
        gradients = [p.grad.flatten() for p in plain.parameters() if p.grad is not None]
        assert right.grad_norm == testing.norm(gradients)
        left.zero_grad()
        right.zero_grad()
    assert_same_weights(plain, managed)
    assert_same_states(left, right)


@pytest.mark.parametrize(("overlap", "placement"), mostly(OVERLAPS, ["host", "nvme"]))
@pytest.mark.parametrize("accumulation", [1, 2])
def test_gradients_that_wait_for_their_norm_keep_16_bits_and_their_sums_have_more(
    accumulation: int, overlap: str, placement: str, tmp_path: Path
) -> None:
    both = [pair(mlp, placement, tmp_path, mixed_precision=torch.bfloat16)[1] for _ in range(2)]
    off, early = (
        hetmem.AdamW(module.parameters(), lr=1e-2, max_grad_norm=0.01, overlap=how)
        for module, how in zip(both, ("off", overlap), strict=True)
    )
    inside = testing.of(both[1])
    before = inside.link_bytes()["device_to_host"]
    batches = vector_batches(3 * accumulation, 4, 64, dtype=torch.bfloat16)
    for step in range(3):
        for module, optimizer in zip(both, (off, early), strict=True):
            for batch in batches[step * accumulation : (step + 1) * accumulation]:
                loss_of(module, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert off.grad_norm == early.grad_norm
        assert_same_weights(*both)
    if accumulation == 1:
        numel = sum(parameter.numel() for parameter in both[1].parameters())
        sent = inside.link_bytes()["device_to_host"] - before
        assert sent == 3 * (4 if overlap == "off" else 2) * numel


@pytest.mark.parametrize("backwards", [1, 2])
@precisions
def test_gradients_that_arrive_whole_are_not_read_at_home_for_their_norm(
    mixed: torch.dtype | None, backwards: int, tmp_path: Path
) -> None:
    """A chunk on NVMe is read for one pass, its update; where gradients are added up at home, for their norm too."""
    plain, managed = pair(mlp, "nvme", tmp_path, mixed_precision=mixed)
    limit = 0.25
    optimizers = adamws(plain, managed, overlap="backward", max_grad_norm=limit)
    inside, passes = testing.of(managed), list[int]()
    for batch in vector_batches(8, 4, 64)[::backwards]:
        before = len(inside.spans("updates"))
        for module in (plain, managed):
            for _ in range(backwards):
                with torch.autocast("cpu", mixed, enabled=mixed is not None and module is plain):
                    loss_of(module, batch).backward()
        norm = testing.norm([p.grad.flatten() for p in plain.parameters() if p.grad is not None])
        for parameter in plain.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(min(1.0, limit / (norm + 1e-6)))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert optimizers[1].grad_norm == norm
        passes.append(len(inside.spans("updates")) - before)
    assert passes[-1] == backwards * len(inside.chunks())
    assert_same_weights(plain, managed)
