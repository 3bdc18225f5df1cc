"""A model whose states fit into device, host and NVMe together trains, with the bits of plain torch; what no tier has
room for is named once, in all."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hetmem
from hetmem.errors import BudgetError

WIDTH, LAYERS = 128, 12
STATES = 16 * LAYERS * (WIDTH * WIDTH + WIDTH)
"""3.02 MiB: weights, gradients and two states in float32."""


class Backwards(nn.Module):
    """Layers used in another order than they are registered in, so that chunks are rearranged."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in reversed(self.layers):
            x = torch.tanh(layer(x))
        return x.square().mean()


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 4) -> list[float]:
    losses = []
    for step in range(steps):
        loss = model(torch.full((4, WIDTH), 0.1 * (step + 1)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def managed(model: nn.Module, device: str, host: str, nvme: Path | None = None, **options: Any) -> nn.Module:
    budget = hetmem.Budget(device=device, host=host, nvme="1MiB" if nvme else None, nvme_dir=nvme)
    return hetmem.manage(model, budget, device="sim", chunk_bytes=80 * 1024, **options)


@pytest.mark.each
@pytest.mark.parametrize("nvme", [False, True], ids=["host", "nvme"])
@pytest.mark.parametrize("how", ["off", "backward", "forward"])
def test_states_of_more_than_the_host_holds_train_with_the_same_bits(how: str, *, nvme: bool, tmp_path: Path) -> None:
    torch.manual_seed(1)
    plain = Backwards()
    model = managed(copy.deepcopy(plain), "3MiB", "1.25MiB", tmp_path if nvme else None)
    optimizer = hetmem.AdamW(model.parameters(), overlap=how)
    assert trained(model, optimizer) == trained(plain, torch.optim.AdamW(plain.parameters(), fused=True))
    for left, right in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(left, right)
    tiers = hetmem.report(model).to_dict()["tiers"]
    assert all(tier["peak_bytes"] <= tier["capacity_bytes"] for tier in tiers.values())
    assert tiers["host"]["peak_bytes"] < STATES
    hetmem.release(model)


def test_an_optimizer_that_keeps_less_leaves_the_device_to_copies() -> None:
    """Homes are reckoned for AdamW; what turns out to have room in host memory goes there."""
    model = managed(Backwards(), "3MiB", "2MiB")
    assert hetmem.report(model).to_dict()["tiers"]["device"]["homes"]
    optimizer = hetmem.optim.offload(torch.optim.SGD, model.parameters(), lr=0.1)
    assert not hetmem.report(model).to_dict()["tiers"]["device"]["homes"]
    trained(model, optimizer)
    hetmem.release(model)


def test_what_is_missing_is_named_once_and_is_enough() -> None:
    """Of all roles together, and neither more than is needed nor less."""
    model = managed(Backwards(), "256KiB", "1MiB")
    with pytest.raises(BudgetError, match="in all beside the device") as refused:
        hetmem.AdamW(model.parameters())
    hetmem.release(model)
    enough = re.search(r"raise Budget\(host=…\) to ([\d.]+) MiB", str(refused.value))
    assert enough is not None
    model = managed(Backwards(), "256KiB", f"{enough[1]}MiB")
    trained(model, hetmem.AdamW(model.parameters()))
    hetmem.release(model)
    model = managed(Backwards(), "256KiB", f"{float(enough[1]) - 0.1}MiB")
    with pytest.raises(BudgetError):
        hetmem.AdamW(model.parameters())
    hetmem.release(model)


def test_without_a_budget_the_host_pool_is_as_large_as_the_model_can_use() -> None:
    model = hetmem.manage(Backwards(), hetmem.Budget(device="1MiB"), device="sim")
    host = hetmem.report(model).to_dict()["tiers"]["host"]
    assert STATES <= host["capacity_bytes"] <= 1.5 * STATES
    trained(model, hetmem.AdamW(model.parameters()))
    hetmem.release(model)


@pytest.mark.parametrize(("rows", "device"), [(2048, "29MiB"), (4, "600KiB")], ids=["activations", "weights"])
def test_chunks_that_are_searched_need_no_more_of_the_device_than_small_ones(rows: int, device: str) -> None:
    """A hundredth more than any chunk size needs: the user is not left to find one."""
    layers = nn.Sequential(*[nn.Linear(256, 256) for _ in range(12)])
    model = hetmem.manage(layers, hetmem.Budget(device=device, host="64MiB"), device="sim")
    optimizer = hetmem.AdamW(model.parameters(), moments="float32")
    for _ in range(2):
        model(torch.ones(rows, 256)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert hetmem.report(model).to_dict()["steps"] == 2
    hetmem.release(model)
