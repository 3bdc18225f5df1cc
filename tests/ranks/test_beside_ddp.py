"""Two ranks have the bits of DistributedDataParallel, which adds gradients in another order with more ranks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import hetmem
from hetmem.testing import ranks

STEPS = 3


def made() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 5))


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    for step in range(STEPS):
        made = torch.Generator().manual_seed(10 * step + rank)
        optimizer.zero_grad()
        model(torch.randn(4, 3, 8, 8, generator=made)).square().mean().backward()
        optimizer.step()


def both(rank: int) -> list[dict[str, Tensor]]:
    """What this rank has under hetmem, with activations that leave the device, and under DistributedDataParallel."""
    model = hetmem.manage(made(), hetmem.Budget(device="4MiB", host="8MiB"), device="sim", activations="offload")
    trained(model, hetmem.AdamW(model.parameters(), lr=1e-2), rank)
    assert hetmem.report(model).data["activations"]["bytes"]["device_to_host"], "some have left"
    found = {name: value.clone() for name, value in model.state_dict().items()}
    hetmem.release(model)
    plain = made()
    replica = DistributedDataParallel(plain)
    trained(replica, torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True), rank)
    return [found, dict(plain.state_dict())]


@pytest.mark.nightly
def test_two_ranks_have_the_weights_of_replicas_and_rank_0_their_running_statistics() -> None:
    for rank, (found, expected) in enumerate(ranks(2, both)):
        for name, value in expected.items():
            if rank and "running" in name:  # each rank has its own
                continue
            assert torch.equal(found[name], value), (rank, name)
