"""A managed model trains as a plain one does, bit for bit, whatever the placement, precision, chunk size or recipe."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hetmem
from tests.engine import harness
from tests.engine.harness import (
    PLACEMENTS,
    Recipe,
    Tower,
    assert_same,
    assert_same_grads,
    assert_same_weights,
    budget,
    manage,
    pair,
    token_batches,
    train_both,
)

BF16 = torch.bfloat16


def two_groups(module: nn.Module) -> list[dict[str, Any]]:
    """Matrices with decay, the rest without it and with another learning rate."""
    parameters = list(module.parameters())
    return [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.3},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0, "lr": 3e-2},
    ]


def homes(module: nn.Module) -> dict[str, int]:
    """Peak bytes of each tier; of host memory without what activations took of it for a while."""
    tiers = hetmem.report(module).to_dict()["tiers"]
    return {name: tier["used_bytes" if name == "host" else "peak_bytes"] for name, tier in tiers.items()}


@pytest.mark.pairs
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("mixed", [None, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("sanitize", [True, False], ids=["checked", "known"])
def test_training_equals_torch_in_every_placement(
    placement: str, mixed: torch.dtype | None, accumulation: int, sanitize: bool, tmp_path: Path
) -> None:
    """Where each access is checked each step is measured: the shortest way of a use is taken in those that are not."""
    plain, managed = pair(Tower, placement, tmp_path, mixed_precision=mixed, sanitize=sanitize)
    recipe = Recipe(accumulation=accumulation, clip=0.05, mixed=mixed, groups=two_groups)
    train_both(plain, managed, token_batches(recipe.steps * accumulation), recipe)
    assert (homes(managed)["nvme"] > 0) == (placement == "nvme")
    if placement == "resident":
        assert homes(managed)["host"] == 0
        moved = any(link["bytes"] for link in hetmem.report(managed).to_dict()["links"].values())
        assert moved == (harness.ACTIVATIONS != "keep")


@pytest.mark.each
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("mixed", [None, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
def test_activation_checkpointing_equals_torch(
    placement: str, mixed: torch.dtype | None, reentrant: bool, tmp_path: Path
) -> None:
    plain, managed = pair(partial(Tower, checkpointing=reentrant), placement, tmp_path, mixed_precision=mixed)
    recipe = Recipe(accumulation=2, clip=0.05, mixed=mixed)
    train_both(plain, managed, token_batches(4), recipe)


@pytest.mark.each
@pytest.mark.parametrize("chunk_bytes", ["16KiB", "64KiB", "1MiB", None])
@pytest.mark.parametrize("mixed", [None, BF16], ids=["fp32", "bf16"])
def test_the_chunk_size_changes_no_bit(chunk_bytes: str | None, mixed: torch.dtype | None, tmp_path: Path) -> None:
    room = budget("nvme", tmp_path, host="4100KiB", device_chunks="2MiB")
    plain, managed = pair(Tower, room, tmp_path, chunk_bytes=chunk_bytes, mixed_precision=mixed)
    train_both(plain, managed, token_batches(3), Recipe(mixed=mixed, groups=two_groups))


def smallest_device(directory: Path, chunk_bytes: str, mixed: torch.dtype | None, accumulation: int) -> int:
    """The least `device_chunks`, in slots of a chunk, with which training runs at all (found by trying)."""
    slot = {"16KiB": 16384, "64KiB": 65536}[chunk_bytes] // (2 if mixed else 1)
    for slots in range(1, 40):
        room = budget("nvme", directory, host="1MiB", device_chunks=slots * slot)
        torch.manual_seed(0)
        module = Tower()
        try:
            manage(module, room, directory, chunk_bytes=chunk_bytes, mixed_precision=mixed)
            optimizer = hetmem.AdamW(module.parameters(), lr=1e-2)
            for batch in token_batches(2 * accumulation):
                module(*batch).backward()
            optimizer.step()
        except (hetmem.errors.BudgetError, hetmem.errors.DeviceOutOfMemoryError):
            continue
        return slots * slot
    raise AssertionError("no device budget is enough")


@pytest.mark.each
@pytest.mark.parametrize("mixed", [None, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("chunk_bytes", ["16KiB", "64KiB"])
def test_the_smallest_device_that_works_gives_the_same_bits(
    chunk_bytes: str, mixed: torch.dtype | None, tmp_path: Path
) -> None:
    least = smallest_device(tmp_path, chunk_bytes, mixed, 2)
    room = budget("nvme", tmp_path, host="1MiB", device_chunks=least)
    plain, managed = pair(Tower, room, tmp_path, chunk_bytes=chunk_bytes, mixed_precision=mixed)
    train_both(plain, managed, token_batches(6), Recipe(accumulation=2, clip=0.05, mixed=mixed))
    assert hetmem.report(managed).to_dict()["tiers"]["device"]["chunk_peak_bytes"] <= least


@pytest.mark.parametrize("mixed", [None, BF16], ids=["fp32", "bf16"])
def test_the_least_staging_gives_the_same_bits(mixed: torch.dtype | None, tmp_path: Path) -> None:
    """Four slots of the one-slot chunks: one chunk's update at a time, nothing in flight beside it."""
    room = budget("nvme", tmp_path, host=4 * 16384, device_chunks="64KiB")
    plain, managed = pair(partial(Tower, 32, 2), room, tmp_path, chunk_bytes="16KiB", mixed_precision=mixed)
    train_both(plain, managed, token_batches(6), Recipe(accumulation=2, mixed=mixed))
    assert homes(managed)["nvme"] > 0
    assert homes(managed)["host"] <= 4 * 16384


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_clipping_changes_what_plain_sgd_steps(placement: str, tmp_path: Path) -> None:
    """Adam does not see the scale of gradients; SGD does."""
    plain, managed = pair(Tower, placement, tmp_path)
    for batch in token_batches(3):
        for module in (plain, managed):
            optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
            optimizer.zero_grad()
            module(*batch).backward()
            assert nn.utils.clip_grad_norm_(module.parameters(), 0.05) > 0.05
            optimizer.step()
        assert_same_grads(plain, managed)
        assert_same_weights(plain, managed)


@pytest.mark.each
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_gradients_that_are_not_finite_arrive_as_they_are_and_recover(
    placement: str, value: float, tmp_path: Path
) -> None:
    """Gemini adds an infinity of one step to all later ones."""
    plain, managed = pair(partial(Tower, tied=False), placement, tmp_path)
    batches = token_batches(4)
    for index, batch in enumerate(batches):
        for module in (plain, managed):
            (module(*batch) * (value if index == 1 else 1.0)).backward()
        assert_same_grads(plain, managed, f"{index}")
        finite = all(p.grad.isfinite().all() for p in managed.parameters())
        assert finite == (index != 1)
        for module in (plain, managed):
            module.zero_grad()


def test_clip_by_value_and_norms_of_gradients_equal_torch(tmp_path: Path) -> None:
    plain, managed = pair(Tower, "nvme", tmp_path)
    (batch,) = token_batches(1)
    for module in (plain, managed):
        module(*batch).backward()
        nn.utils.clip_grad_value_(module.parameters(), 1e-3)
    assert_same_grads(plain, managed)
    norms = [torch.stack([p.grad.norm() for p in module.parameters()]) for module in (plain, managed)]
    assert_same(*norms, "norms")
