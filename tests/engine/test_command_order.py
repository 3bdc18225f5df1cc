"""Commands are carried out in the order in which the residency gave them, and nothing of hetmem's own is in a mode."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hetmem
from hetmem.engine.executor import Executor
from hetmem.schedule.residency import Residency


def stack() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))


def tight(module: nn.Module, directory: Path) -> nn.Module:
    budget = hetmem.Budget(device="1MiB", device_chunks="64KiB", host="128KiB", nvme="8MiB", nvme_dir=directory)
    return hetmem.manage(module, budget, chunk_bytes="16KiB", device="sim", sanitize=True)


def test_no_command_overtakes_one_that_was_given_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fetch done at once used to run what followed from it before the drops given with it, so that a slot was
    poisoned after it had been filled anew: rarely, and then with wrong results."""
    given: list[Any] = []
    carried_out: list[Any] = []
    events = "acquire use release release_all settle invalidate invalidate_all limit expect resume prefetch done failed"
    for name in events.split():
        event = getattr(Residency, name)

        def spy(self: Residency, *args: Any, _event: Any = event, **keywords: Any) -> Any:
            found = _event(self, *args, **keywords)
            given.extend(found[1] if isinstance(found, tuple) else found or ())  # `use` also says the slot
            return found

        monkeypatch.setattr(Residency, name, spy)
    carry_out = Executor._carry_out
    monkeypatch.setattr(
        Executor, "_carry_out", lambda self, command: (carried_out.append(command), carry_out(self, command))
    )
    model = tight(stack(), tmp_path)
    optimizer = hetmem.AdamW(model.parameters())
    for _ in range(3):
        model(torch.ones(2, 64)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert len(carried_out) > 100
    assert [id(command) for command in carried_out] == [id(command) for command in given]


def test_a_first_forward_in_inference_mode_leaves_a_model_that_trains(tmp_path: Path) -> None:
    plain, model = stack(), tight(stack(), tmp_path)
    optimizers = torch.optim.AdamW(plain.parameters(), fused=True), hetmem.AdamW(model.parameters())
    with torch.inference_mode():
        assert torch.equal(plain(torch.ones(2, 64)), model(torch.ones(2, 64)))
    for _ in range(2):
        for module, optimizer in zip((plain, model), optimizers, strict=True):
            module(torch.ones(2, 64)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    for left, right in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(left, right)


class Scaled(nn.Linear):
    """Writes to one row of its weight in forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.weight[0].mul_(0.5)
        return super().forward(x)


def test_a_write_in_a_mixed_forward_leaves_the_other_masters_their_bits() -> None:
    torch.manual_seed(0)
    layer = Scaled(64, 64)
    before = layer.weight.detach().clone()
    budget = hetmem.Budget(device="64KiB", host="1MiB", device_chunks="32KiB")
    hetmem.manage(layer, budget, mixed_precision=torch.bfloat16, chunk_bytes="16KiB", device="sim", sanitize=True)
    layer(torch.ones(2, 64))
    assert torch.equal(layer.weight[1:], before[1:])
    assert torch.equal(layer.weight[0], (before[0].bfloat16() * 0.5).float())
