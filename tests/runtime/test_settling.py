"""A backward whose end raises, as gradients did not get home, is over all the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import hetmem
from hetmem.intercept import registry
from hetmem.memory.chunk import Role
from hetmem.schedule.trace import Tier
from tests.runtime.harness import WIDTH, manage

BATCH = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1))


class Failing(hetmem.SimDevice):
    """Loses gradients while `fails`. It has a speed, so that they are on their way at the end of a backward."""

    fails = False

    def gradient_out(self, target: torch.Tensor, arrived: torch.Tensor, *, add: bool) -> None:
        if self.fails:
            raise OSError("the link is broken")
        super().gradient_out(target, arrived, add=add)


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor, *, both: bool = True) -> torch.Tensor:
        return self.one(x).square().sum() + (self.other(x).square().sum() if both else 0)


def test_it_is_the_user_s_turn_after_a_backward_that_raised_at_its_end(tmp_path: Path) -> None:
    device = Failing(device_to_host="1GB")
    managed = manage(Heads(), "nvme", tmp_path, device=device)
    managed(BATCH).backward()
    loss = managed(BATCH, both=False)
    device.fails = True
    with pytest.raises(OSError, match="the link is broken"):
        loss.backward()
    runtime = registry.of_module(managed).runtime
    assert runtime.events.running() is None
    (chunk,) = (chunk for chunk in runtime.chunks if chunk.parameters[0].name == "other.weight")
    block, exposed = chunk.homes[Role.GRAD].block, runtime.traffic.carrier.exposed
    assert block is not None and chunk.homes[Role.GRAD].tier is Tier.NVME
    exposed.reads(block, chunk, Role.GRAD)
    assert exposed.mixed(block), "he may be writing to a gradient that is read from now on"
