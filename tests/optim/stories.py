"""What the stories of `tests.optim` have in common: models, halves of them, and one step."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.runtime.harness import (
    loss_of,
)

OVERLAPS = ("off", "backward", "speculative", "forward")


def small() -> nn.Sequential:
    """Many parameters in each chunk."""
    return nn.Sequential(*[layer for _ in range(9) for layer in (nn.Linear(40, 40), nn.Tanh())])


def halves(module: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Every other parameter: neighbours in one chunk."""
    parameters = list(module.parameters())
    return parameters[::2], parameters[1::2]


def adamw(parameters: Any, **options: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=1e-2, fused=True, **options)


def one(module: nn.Module, batch: Any, *optimizers: Any) -> None:
    loss_of(module, batch).backward()
    for optimizer in optimizers:
        optimizer.step()
    for optimizer in optimizers:
        optimizer.zero_grad()
