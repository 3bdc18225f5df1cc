"""Small managed models that ran, for the tests of reports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

import hetmem
from tests.engine.harness import manage


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))


def trained(placement: str, directory: Path, steps: int = 3, **options: Any) -> nn.Module:
    """A network under `placement` that took `steps` steps of AdamW."""
    model = manage(network(), placement, directory, **options)
    optimizer = hetmem.AdamW(model.parameters(), lr=1e-3)
    for _ in range(steps):
        model(torch.ones(8, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model
