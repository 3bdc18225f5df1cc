"""Bad input gets an error that says what, how much and what to do; nothing is lost."""

from __future__ import annotations

import copy
import os
import pickle
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hetmem
from hetmem.errors import BudgetError, DeviceOutOfMemoryError, ManageError, StoreError

ROOMY = hetmem.Budget(device="8MiB", host="32MiB", device_chunks="2MiB")


def mlp(width: int = 128, layers: int = 6) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))


def values(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize(
    ("keywords", "says"),
    [
        ({"device": "20 parsecs"}, "20 parsecs"),
        ({"device": "-1GiB"}, "not a size"),
        ({"host": -5}, "negative"),
        ({"host": 1.5}, "int of bytes or a string"),
        ({"nvme": "1GiB"}, "nvme_dir"),
        ({"device": "1GiB", "device_chunks": "2GiB"}, "part of device"),
    ],
)
def test_a_malformed_budget_is_refused_when_it_is_written(keywords: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        hetmem.Budget(**keywords)


def test_a_device_budget_below_the_minimum_names_the_minimum_and_the_parameter() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(1024, 1024))
    before = values(model)
    with pytest.raises(BudgetError, match=r"1\.weight alone needs 4\.00 MiB \(4194304 bytes\)"):
        hetmem.manage(model, hetmem.Budget(device="1MiB", host="64MiB"), device="sim")
    assert same(before, values(model))
    hetmem.manage(model, hetmem.Budget(device="4MiB", host="64MiB"), device="sim")


def test_a_host_budget_too_small_for_the_parameters_names_the_missing_bytes() -> None:
    model = mlp()
    before = values(model)
    with pytest.raises(BudgetError, match="are missing; raise Budget"):
        hetmem.manage(model, hetmem.Budget(device="512KiB", host="100KiB"), device="sim")
    assert same(before, values(model))


def test_a_host_budget_too_small_to_stage_is_refused_with_the_minimum(tmp_path: Path) -> None:
    budget = hetmem.Budget(device="512KiB", host="64KiB", nvme="64MiB", nvme_dir=tmp_path)
    with pytest.raises(
        BudgetError, match=r"host budget is below the minimum.*needs 256\.00 KiB \(262144 bytes\)"
    ) as caught:
        hetmem.manage(mlp(), budget, device="sim", chunk_bytes="64KiB")
    assert caught.type is BudgetError, "not a class of the planner's, which no page of the documentation has"
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value), "it may come from another process"
    assert not list(tmp_path.iterdir())


def test_states_without_room_are_refused_when_the_optimizer_is_made() -> None:
    model = hetmem.manage(mlp(), hetmem.Budget(device="512KiB", host="800KiB"), device="sim", chunk_bytes="64KiB")
    before = values(model)
    with pytest.raises(BudgetError, match="has no room: weights, gradients and states take"):
        hetmem.AdamW(model.parameters())
    assert same(before, values(model))
    with torch.no_grad():
        model(torch.ones(2, 128))


def test_activations_beyond_the_device_are_refused_before_the_budget_is_exceeded() -> None:
    model = hetmem.manage(mlp(), hetmem.Budget(device="512KiB", host="8MiB"), device="sim", chunk_bytes="64KiB")
    with pytest.raises(DeviceOutOfMemoryError, match=r"(?s) out of memory\.\nNo room for .*smaller batch"):
        model(torch.ones(2048, 128))
    assert hetmem.report(model).to_dict()["tiers"]["device"]["peak_bytes"] <= 512 << 10
    loss = model(torch.ones(2, 128)).sum()
    loss.backward()
    assert model[0].weight.grad is not None


def test_a_shortage_says_who_holds_the_device_and_a_budget_that_is_enough() -> None:
    """Following it leads to a budget with which the step passes."""
    budget, told = "512KiB", []
    for _ in range(12):
        model = hetmem.manage(mlp(), hetmem.Budget(device=budget, host="8MiB"), device="sim", chunk_bytes="64KiB")
        try:
            model(torch.ones(2048, 128)).sum().backward()
            break
        except DeviceOutOfMemoryError as error:
            told.append(str(error))
            found = re.search(r"needs? ([0-9.]+ MiB)", " ".join(told[-1].split()))
            assert found, told[-1]
            budget = found[1]
    else:
        raise AssertionError(told)
    assert re.search(r"for \S+ \(moment \d+ of the (forward|backward)\)", told[0])
    assert "copies of parameters in use" in told[0]
    tight = hetmem.Budget(device="2MiB", device_chunks="256KiB", host="8MiB")
    model = hetmem.manage(mlp(), tight, device="sim", chunk_bytes="64KiB")
    with pytest.raises(DeviceOutOfMemoryError, match=r"param\sof\schunk"):
        model(torch.ones(2048, 128))


def test_an_operator_whose_weights_do_not_fit_together_says_so() -> None:
    model = nn.LSTM(64, 64, num_layers=4)
    hetmem.manage(model, hetmem.Budget(device="128KiB", host="8MiB"), device="sim", chunk_bytes="64KiB")
    with pytest.raises(
        DeviceOutOfMemoryError,
        match=r"(?s)memory\.\nNo room for lstm \(moment 1 of the forward\).*for the chunk it uses",
    ):
        model(torch.ones(1, 1, 64))
    assert torch.isfinite(model.weight_ih_l0).all()


@pytest.mark.parametrize("make", [lambda path: path / "missing", lambda path: path / "file"])
def test_an_nvme_directory_that_is_none_is_refused(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    (tmp_path / "file").write_text("")
    directory = make(tmp_path)
    model = mlp()
    before = values(model)
    with pytest.raises(BudgetError, match=str(directory)):
        hetmem.manage(model, hetmem.Budget(device="1MiB", host="512KiB", nvme="64MiB", nvme_dir=directory))
    assert same(before, values(model))


def test_a_full_disk_is_refused_before_anything_is_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "posix_fallocate", full)
    model = mlp()
    before = values(model)
    with pytest.raises(StoreError, match=str(tmp_path)):
        hetmem.manage(
            model, hetmem.Budget(device="1MiB", host="260KiB", nvme="64MiB", nvme_dir=tmp_path), chunk_bytes="64KiB"
        )
    assert same(before, values(model))
    assert not list(tmp_path.iterdir())


def test_managing_twice_is_refused_also_for_a_part_and_for_a_whole_around_it() -> None:
    model = hetmem.manage(mlp(), ROOMY, device="sim")
    for again in (model, model[0], nn.Sequential(model)):
        with pytest.raises(ManageError, match="managed already"):
            hetmem.manage(again, ROOMY, device="sim")
    assert model(torch.ones(1, 128)).shape == (1, 128)


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (nn.Linear(4, 4, device="meta"), "weight is on meta"),
        (nn.ReLU(), "no parameters"),
        (nn.LazyLinear(4), "lazy"),
    ],
)
def test_a_module_that_cannot_be_managed_is_refused(model: nn.Module, says: str) -> None:
    with pytest.raises(ManageError, match=says):
        hetmem.manage(model, ROOMY, device="sim")


def test_two_parameters_over_one_memory_are_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight.data = model[0].weight.data
    with pytest.raises(ManageError, match="share memory"):
        hetmem.manage(model, ROOMY, device="sim")


@pytest.mark.parametrize(
    ("keywords", "says"),
    [
        ({"device": "tpu"}, "device must be"),
        ({"device": "cuda:99"}, "torch sees"),
        ({"mixed_precision": torch.int8}, "mixed_precision must be"),
        ({"chunk_bytes": "big"}, "big"),
    ],
)
def test_a_bad_option_is_refused(keywords: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        hetmem.manage(mlp(), ROOMY, **keywords)


def test_an_optimizer_over_unmanaged_parameters_is_refused() -> None:
    with pytest.raises(ManageError, match="not managed"):
        hetmem.AdamW(mlp().parameters())


def test_a_step_after_release_is_refused_and_the_weights_are_there() -> None:
    model = hetmem.manage(mlp(), ROOMY, device="sim")
    optimizer = hetmem.AdamW(model.parameters())
    model(torch.ones(1, 128)).sum().backward()
    before = values(model)
    hetmem.release(model)
    with pytest.raises(ManageError, match="not managed any more"):
        optimizer.step()
    assert same(before, values(model))


class Interrupter(nn.Module):
    """Raises KeyboardInterrupt where it is told to: in forward, or in backward."""

    where = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.where == "forward":
            raise KeyboardInterrupt
        if self.where == "backward":
            x.register_hook(self.interrupt)
        return x

    @staticmethod
    def interrupt(grad: torch.Tensor) -> None:
        raise KeyboardInterrupt


@pytest.mark.parametrize("where", ["forward", "backward", "step"])
def test_an_interrupt_in_a_step_leaves_parameters_readable_and_training_can_go_on(where: str, tmp_path: Path) -> None:
    others = set(threading.enumerate())  # of models that earlier tests dropped
    interrupter = Interrupter()
    plain = nn.Sequential(*mlp(), interrupter, *mlp())
    model = copy.deepcopy(plain)
    budget = hetmem.Budget(device="600KiB", host="1MiB", nvme="64MiB", nvme_dir=tmp_path)
    hetmem.manage(model, budget, device="sim", chunk_bytes="64KiB", sanitize=True)
    optimizer = hetmem.AdamW(model.parameters(), lr=1e-2)
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
    before = values(model)

    def step(module: nn.Module, update: torch.optim.Optimizer) -> None:
        update.zero_grad()
        module(torch.ones(2, 128)).square().sum().backward()
        update.step()

    if where == "step":
        optimizer.register_step_pre_hook(lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
    else:
        Interrupter.where = where
    try:
        with pytest.raises(KeyboardInterrupt):
            step(model, optimizer)
    finally:
        Interrupter.where = ""
    assert same(before, values(model))
    optimizer._optimizer_step_pre_hooks.clear()
    for _ in range(3):
        step(plain, reference)
        step(model, optimizer)
    assert same(values(plain), values(model))
    hetmem.release(model)
    started = {*threading.enumerate()} - others
    assert not [thread.name for thread in started if thread.name.startswith("hetmem")]
    assert not list(tmp_path.iterdir())
    assert same(values(plain), values(model))


def test_staging_for_more_states_is_had_as_the_error_says(tmp_path: Path) -> None:
    """Five roles together, where the least ring has four slots; a slot of host memory less is not enough."""
    chunk = 128 * 128 * 4

    def amsgrad(host: int) -> Any:
        limits = hetmem.Budget(device="8MiB", device_chunks=8 * chunk, host=host, nvme="64MiB", nvme_dir=tmp_path)
        model = hetmem.manage(mlp(layers=24), limits, device="sim", chunk_bytes=chunk)
        assert hetmem.report(model).to_dict()["tiers"]["nvme"]["peak_bytes"] > 0
        return hetmem.optim.offload(torch.optim.Adam, model.parameters(), amsgrad=True)

    with pytest.raises(BudgetError, match="needs 5 at once") as raised:
        amsgrad(16 * chunk)
    found = re.search(r"raise Budget\(host=…\) to ([^,]+), or", str(raised.value))
    assert found is not None
    enough = hetmem.Budget(host=found[1]).limits().host_bytes
    assert enough is not None
    amsgrad(enough)
    with pytest.raises(BudgetError, match="needs 5 at once"):
        amsgrad(enough - chunk)
