"""Function modes of the user around a training: a default device is one. They see the model's operators, as in plain
torch, and nothing of what hetmem does itself, which they would change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

import hetmem
from tests.runtime.harness import (
    BATCHES,
    assert_same,
    assert_same_states,
    assert_same_weights,
    budget,
    everywhere,
    loss_of,
    manage,
    mlp,
    pair,
    precisions,
)

OPTIONS: dict[str, dict[str, Any]] = {
    "off": {},
    "backward": {"overlap": "backward"},
    "speculative": {"overlap": "speculative", "max_grad_norm": 1e-3},
    "forward": {"overlap": "forward", "max_grad_norm": 1e-3},
    "streamed": {"overlap": "forward", "gradients": "streamed"},
    "scaled": {"loss_scale": 4.0},
}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": hetmem.AdamW,
    "8 bits": partial(hetmem.AdamW, moments="8bit"),
    "SGD": partial(hetmem.optim.offload, torch.optim.SGD, momentum=0.9),
    "Adam": partial(hetmem.optim.offload, torch.optim.Adam, amsgrad=True),
}


class Counts(TorchFunctionMode):
    """How often each function was called, but for reads and writes of attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__qualname__", str(func))
        self.calls[name] += not name.startswith("getset_descriptor")
        return func(*args, **(kwargs or {}))


def train(module: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable[Any]) -> None:
    for batch in batches:
        loss_of(module, batch).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.pairs
@everywhere
@precisions
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_default_device_changes_no_bit(
    placement: str, mixed: torch.dtype | None, options: str, kind: str, tmp_path: Path
) -> None:
    """One that would raise, or compute nothing, for every tensor that is made there."""
    if kind == "8 bits" and placement == "resident":
        pytest.skip("states in 8 bits are the host's")
    sides: list[tuple[nn.Module, torch.optim.Optimizer]] = []
    for device in ("cpu", "meta"):
        torch.manual_seed(0)
        model = mlp()
        directory = tmp_path / device
        directory.mkdir()
        with torch.device(device):
            limits = budget(placement, directory, **({"host": "1MiB"} if placement == "nvme" else {}))
            manage(model, limits, directory, mixed_precision=mixed)
            optimizer = OPTIMIZERS[kind](model.parameters(), lr=1e-2, **OPTIONS[options])
            train(model, optimizer, BATCHES)
            hetmem.save(directory / "checkpoint", model, optimizer)
            train(model, optimizer, BATCHES[:1])
            hetmem.load(directory / "checkpoint", model, optimizer)
            train(model, optimizer, BATCHES[:2])
        sides.append((model, optimizer))
    (left, there), (right, here) = sides
    assert_same_weights(left, right)
    assert_same_states(there, here)


@everywhere
@pytest.mark.parametrize("options", OPTIONS)
def test_a_mode_sees_the_functions_of_the_model(placement: str, options: str, tmp_path: Path) -> None:
    modules = pair(mlp, placement, tmp_path)
    seen, losses = [], []
    for module, optimizer in zip(
        modules,
        (
            torch.optim.AdamW(modules[0].parameters(), lr=1e-2),
            hetmem.AdamW(modules[1].parameters(), lr=1e-2, **OPTIONS[options]),
        ),
        strict=True,
    ):
        train(module, optimizer, BATCHES[:3])  # in the first ones hetmem does what it does but once
        with Counts() as counts:
            loss = loss_of(module, BATCHES[3])
            loss.backward()
        optimizer.step()
        seen.append(counts.calls)
        losses.append(loss)
    assert seen[0] == seen[1]
    assert seen[0]["linear"] == 3
    if not any(name in OPTIONS[options] for name in ("max_grad_norm", "loss_scale")):
        assert_same(*losses, "loss")
