"""Mistakes that train something else, or somewhere else, than the user believes: each says so when it is made."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hetmem
from hetmem.report import live
from tests.forked import Forks

STATES = 8 * 4 * (32 * 32 + 32)
"""Bytes of the two states of AdamW of four layers."""


def managed(budget: hetmem.Budget | None = None, *, bias: bool = True, **options: int) -> nn.Module:
    model = nn.Sequential(*[nn.Linear(32, 32, bias=bias) for _ in range(4)])
    budget = budget or hetmem.Budget(device="1MiB", device_chunks="64KiB", host="1MiB")
    return hetmem.manage(model, budget, device="sim", **options)


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 32)).sum().backward()
        optimizer.step()


def test_an_optimizer_of_torch_is_told_of_once_with_the_bytes_beside_the_budget() -> None:
    model = managed()
    with pytest.warns(UserWarning, match="^AdamW keeps 33.00 KiB of states outside of the budget") as told:
        trained(model, torch.optim.AdamW(model.parameters()))
    assert [Path(warning.filename).name for warning in told] == [Path(__file__).name]
    assert STATES == 33 * 1024
    hetmem.release(model)


@pytest.mark.parametrize("kind", [torch.optim.Muon, torch.optim.Adafactor])
def test_one_that_offload_refuses_is_told_of_with_what_works(kind: Any) -> None:
    """It told of `hetmem.optim.offload(Muon, …)`, which raises."""
    model = managed(bias=False)
    with pytest.warns(UserWarning, match=f"^{kind.__name__} keeps .* KiB of states") as told:
        trained(model, kind(model.parameters()))
    assert "cannot run it; it trains as it is" in str(told[0].message)
    with pytest.raises(hetmem.errors.ManageError, match="Make it as in plain torch"):
        hetmem.optim.offload(kind, model.parameters())
    hetmem.release(model)


def test_an_optimizer_without_states_is_not_told_of() -> None:
    model = managed()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained(model, torch.optim.SGD(model.parameters(), lr=0.1))
    hetmem.release(model)


def test_steps_of_an_optimizer_of_torch_are_in_report_and_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "status_directory", lambda: tmp_path)
    model = managed()
    trained(model, torch.optim.SGD(model.parameters(), lr=0.1))
    report = hetmem.report(model).to_dict()
    assert report["steps"] == 3
    assert report["step"]["terms"]["host_optimizer"] > 0
    assert hetmem.progress(model).startswith("step 3")
    assert live.statuses()[0]["steps"] == 3
    hetmem.release(model)


SHARDED = """
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from tests.test_silent_mistakes import managed

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = managed()
fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
model(torch.ones(2, 32))
"""


def test_a_managed_model_that_is_sharded_is_refused(forks: Forks) -> None:
    """In a process of its own: torch keeps what it knows of sharded tensors, and with it the group and its threads."""
    ended = forks.run(SHARDED)
    assert ended.returncode == 1
    assert "ManageError: torch's fully_shard has replaced the parameters of this managed model" in ended.stderr
