"""A model that is whole on the device and may leave it, for the tests of that."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import hetmem
from hetmem import testing
from tests.engine.harness import Tower, shared

BF16 = torch.bfloat16
MIXED = shared("mixed", [None, BF16], ids=["float32", "bfloat16"])


def build() -> nn.Module:
    return Tower(width=64, depth=4)


def room(mixed: torch.dtype | None, host: str = "8MiB") -> hetmem.Budget:
    """Whole on the device, with as much again for a small batch: see `DEVICE_SHARE`."""
    return hetmem.Budget(device="2400KiB" if mixed is None else "2700KiB", host=host)


def is_resident(module: nn.Module) -> bool:
    """Whether it is whole on the device, and has not left it."""
    return testing.of(module).memory().resident


def tiers(module: nn.Module) -> set[str]:
    return testing.of(module).homes()


def optimizers_of(plain: nn.Module, managed: nn.Module, **options: Any) -> Any:
    left = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
    return left, hetmem.AdamW(managed.parameters(), lr=1e-2, **options)
