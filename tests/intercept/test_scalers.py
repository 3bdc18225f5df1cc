"""What torch's `GradScaler` sends to host memory is there before it is read; a GPU's copies are faked here."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.amp.grad_scaler import _MultiDeviceReplicator

from tests.engine.harness import manage, mlp

GPU = torch.device("cuda", 0)


class OnGpu(torch.Tensor):
    """A number that says it is on a GPU."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return GPU

    def cpu(self) -> torch.Tensor:  # type: ignore[override]
        return torch.full((), 2.0)


class LateCopies:
    """The number 2 on a GPU: a copy of it that nobody waits for reads as 0."""

    device = GPU

    def __init__(self) -> None:
        self.copies: list[torch.Tensor] = []

    def to(self, device: torch.device, **_: Any) -> torch.Tensor:
        self.copies.append(torch.zeros((), device=device))
        return self.copies[-1]

    def synchronize(self) -> None:
        for copied in self.copies:
            copied.fill_(2.0)


@pytest.fixture
def managed(tmp_path: Path) -> torch.nn.Module:
    return manage(mlp(), "host", tmp_path)


def test_a_scale_is_waited_for_where_gradients_are_in_host_memory(
    managed: torch.nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    scale: Any = LateCopies()
    streams = {GPU: scale}
    monkeypatch.setattr(torch.cuda, "current_stream", streams.__getitem__)
    sent = _MultiDeviceReplicator(scale)
    assert sent.get(torch.device("cpu")).item() == 2.0
    streams.clear()  # what goes elsewhere is in order there
    assert sent.get(torch.device("meta")).is_meta
    assert _MultiDeviceReplicator(torch.ones(())).get(torch.device("cpu")).item() == 1.0


@pytest.mark.parametrize("name", ["grad_scale", "found_inf"])
def test_a_fused_optimizer_of_weights_in_host_memory_gets_it_there(managed: torch.nn.Module, name: str) -> None:
    plain = mlp()
    seen = []
    for module in (managed, plain):
        optimizer: Any = torch.optim.AdamW(module.parameters(), fused=True)
        setattr(optimizer, name, torch.zeros(()).as_subclass(OnGpu))
        optimizer.register_step_pre_hook(lambda mine, *_: seen.append(getattr(mine, name)))
        optimizer.step()
    assert [type(value) for value in seen] == [torch.Tensor, OnGpu]
    assert seen[0].item() == 2.0


def test_an_optimizer_without_a_scaler_is_left_alone(managed: torch.nn.Module) -> None:
    optimizer = torch.optim.AdamW(managed.parameters(), fused=True)
    before = SimpleNamespace(**vars(optimizer))
    optimizer.step()
    assert vars(before).keys() == vars(optimizer).keys()
