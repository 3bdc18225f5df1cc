"""Modes of the user around a training, for functions (a default device is one) and for operators: they see the model's,
as in plain torch, and nothing of what hetmem does itself, which they would change."""

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
from torch.utils._python_dispatch import TorchDispatchMode

import hetmem
from tests.engine.harness import (
    BATCHES,
    adamws,
    assert_same,
    assert_same_states,
    assert_same_weights,
    budget,
    loss_of,
    manage,
    mlp,
    offloaded,
    pair,
    precisions,
    streamed,
)
from tests.optim.stories import one, overlaps

OPTIONS: dict[str, dict[str, Any]] = {
    "off": {},
    "backward": {"overlap": "backward"},
    "clipped": {"overlap": "backward", "max_grad_norm": 1e-3},
    "forward": {"overlap": "forward"},
    "clipped forward": {"overlap": "forward", "max_grad_norm": 1e-3},
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


@pytest.mark.each
@offloaded
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


@pytest.mark.each
@offloaded
@pytest.mark.parametrize("options", OPTIONS)
def test_a_mode_sees_the_functions_of_the_model(placement: str, options: str, tmp_path: Path) -> None:
    modules = pair(mlp, placement, tmp_path)
    seen, losses = [], []
    for module, optimizer in zip(
        modules,
        (
            torch.optim.AdamW(modules[0].parameters(), lr=1e-2, fused=True),
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


class Seen(TorchDispatchMode):
    """The names of operators."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.each
@streamed
@overlaps
def test_a_mode_of_the_user_s_sees_the_operators_of_the_model_alone(
    overlap: str, placement: str, tmp_path: Path
) -> None:
    plain, managed = modules = pair(mlp, placement, tmp_path, sanitize=False)
    left, right = adamws(*modules, overlap=overlap)
    for batch in BATCHES:
        seen = Seen(), Seen()
        for mode, module in zip(seen, modules, strict=True):
            with mode:
                module(*batch)
        assert seen[0].names == [name for name in seen[1].names if "detach" not in name]
        one(plain, batch, left)
        one(managed, batch, right)
    right.synchronize()
    assert_same_weights(plain, managed)
