"""Once warm, a step waits for the GPU only where this file says: every other place fails here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hetmem
from hetmem.runtime import registry
from tests.memory.fake_cuda import CpuCuda, FakeCuda, cuda
from tests.memory.waiting import Watch
from tests.runtime.harness import PLACEMENTS, Tower, manage, token_batches

__all__ = ["cuda"]  # a fixture


def waits_of(
    module: nn.Module, batches: list[tuple[torch.Tensor, ...]], monkeypatch: pytest.MonkeyPatch, **options: Any
) -> dict[str, set[str]]:
    """Where the host waits in forward, backward and step, in the third to the fifth step of training `module`."""
    optimizer = hetmem.AdamW(module.parameters(), lr=1e-3, **options)
    memory = registry.of_module(module).runtime.memory
    watch = Watch(memory.is_home_address, memory.is_device_address)
    found: dict[str, set[str]] = {"forward": set(), "backward": set(), "step": set()}
    for index, batch in enumerate(batches):
        if index < 2:
            module(*batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            continue
        with watch.watching(monkeypatch):
            watch.computed(batch)
            loss = module(*batch)
            found["forward"] |= set(watch.waits)
            watch.waits.clear()
            optimizer.scale(loss).backward()
            found["backward"] |= set(watch.waits)
            watch.waits.clear()
            optimizer.step()
            found["step"] |= set(watch.waits)
            watch.waits.clear()
            optimizer.zero_grad()
    return found


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("mixed", [None, torch.bfloat16], ids=["fp32", "bf16"])
def test_show(cuda: FakeCuda, placement: str, mixed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    managed = manage(Tower(), placement, tmp_path, mixed_precision=mixed, device=CpuCuda(), sanitize=False)
    for key, found in waits_of(managed, token_batches(5), monkeypatch, max_grad_norm=0.01).items():
        for one in sorted(found):
            print(key, "|", one)
