"""A backward whose end raises, as gradients did not get home, is over all the same."""

from __future__ import annotations

import time
from functools import partial

import pytest
import torch
from torch import nn

import hetmem
from hetmem.optim.workers import WorkerPool
from hetmem.runtime import registry
from tests.runtime.harness import WIDTH, assert_same

BATCH = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1))


class Failing(hetmem.SimDevice):
    """Loses gradients while `fails`. Its link is slow enough for them to be on their way at the end of a backward."""

    fails = False

    def gradient_out(self, target: torch.Tensor, arrived: torch.Tensor, *, add: bool) -> None:
        if self.fails:
            raise OSError("the link is broken")
        super().gradient_out(target, arrived, add=add)


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, *, both: bool = True) -> torch.Tensor:
        return self.one(x).square().sum() + (self.other(x).square().sum() if both else 0)


def test_what_trails_behind_a_step_is_waited_for_after_a_backward_that_raised_at_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody was told that the user has his turn: a weight that it did not use was read as it was before its update."""
    torch.manual_seed(0)
    plain, managed, device = Heads(), Heads(), Failing(device_to_host="1GB")
    managed.load_state_dict(plain.state_dict())
    limits = hetmem.Budget(device="64MiB", host="64MiB", device_chunks="48KiB")
    hetmem.manage(managed, limits, device=device, chunk_bytes="16KiB")
    left = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
    right = hetmem.AdamW(managed.parameters(), lr=1e-2, overlap="forward")
    begin, slowly = WorkerPool.begin, partial(time.sleep, 0.2)
    for model, optimizer in ((plain, left), (managed, right)):
        for last in (False, True):
            optimizer.zero_grad()
            model(BATCH).backward()
            if last:
                monkeypatch.setattr(
                    WorkerPool, "begin", lambda pool, tasks, after: begin(pool, [slowly, *tasks], after)
                )
            optimizer.step()
    optimizer.zero_grad()
    loss = managed(BATCH, both=False)
    device.fails = True
    with pytest.raises(OSError, match="the link is broken"):
        loss.backward()
    device.fails = False
    runtime = registry.of_module(managed).runtime
    assert runtime.events.running() is None
    assert runtime.traffic.updating, "the test waits for nothing"
    assert_same(plain.other.weight, managed.other.weight, "the weight that it did not use")
