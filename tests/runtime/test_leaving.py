"""A model that was put whole on the device leaves it, as far as it must, when somebody else needs the memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hetmem
from hetmem.errors import DeviceOutOfMemoryError
from hetmem.plan.trace import Tier
from hetmem.runtime import registry
from hetmem.runtime.memory import Memory
from tests.runtime.harness import Recipe, Tower, pair, token_batches, train_both

BF16 = torch.bfloat16
MIXED = pytest.mark.parametrize("mixed", [None, BF16], ids=["float32", "bfloat16"])


def build() -> nn.Module:
    return Tower(width=64, depth=4)


def room(mixed: torch.dtype | None, host: str = "8MiB") -> hetmem.Budget:
    """Whole on the device, with as much again for a small batch: see `DEVICE_SHARE`."""
    return hetmem.Budget(device="2400KiB" if mixed is None else "2700KiB", host=host)


def memory_of(module: nn.Module) -> Memory:
    return registry.of_module(module).runtime.memory


def tiers(module: nn.Module) -> set[Tier]:
    return {home.tier for chunk in memory_of(module).chunks for home in chunk.homes.values()}


@pytest.mark.pairs
@MIXED
@pytest.mark.parametrize("sanitize", [True, False])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("overlap", ["off", "backward", "speculative", "forward"])
@pytest.mark.parametrize("before", [0, 2])
def test_a_larger_batch_than_ever_trains_on_with_the_bits_of_plain_torch(
    before: int, overlap: str, accumulation: int, sanitize: bool, mixed: torch.dtype | None, tmp_path: Path
) -> None:
    plain, managed = pair(build, room(mixed), tmp_path, mixed_precision=mixed, sanitize=sanitize)
    optimizers: Any = (
        torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True),
        hetmem.AdamW(managed.parameters(), lr=1e-2, overlap=overlap),
    )
    assert memory_of(managed).resident
    small = token_batches(before * accumulation, seed=2)
    recipe = Recipe(steps=before, accumulation=accumulation, mixed=mixed)
    train_both(plain, managed, small, recipe, optimizers=optimizers)
    assert memory_of(managed).resident
    large = token_batches(3 * accumulation, rows=40 if mixed is None else 80)
    recipe = Recipe(steps=3, accumulation=accumulation, mixed=mixed)
    train_both(plain, managed, large, recipe, optimizers=optimizers)
    assert not memory_of(managed).resident
    assert Tier.HOST in tiers(managed)
    device = hetmem.report(managed).to_dict()["tiers"]["device"]
    assert device["peak_bytes"] <= device["capacity_bytes"]
