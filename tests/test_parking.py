"""A parked model has nothing on the device, is readable, refuses to compute, and trains on with the same bits."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hetmem
from hetmem import testing
from hetmem.errors import BudgetError, DeviceOutOfMemoryError, ManageError
from tests.engine import harness

PLACES: dict[str, dict[str, Any]] = {
    "whole": {"device": "16MiB", "host": "16MiB"},
    "idle memory filled": {"device": "6MiB", "host": "16MiB"},
    "third": {"device": "700KiB", "host": "16MiB"},
    "nvme": {"device": "700KiB", "host": "2MiB", "nvme": "16MiB"},
    "some stay": {"device": "4MiB", "host": "4200KiB"},
    "on the drive": {"device": "16MiB", "host": "1MiB", "nvme": "16MiB"},
}


def build() -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(160, 160), nn.BatchNorm1d(160), nn.GELU()) for _ in range(6)]
    return nn.Sequential(*blocks, nn.Linear(160, 3))


def managed(place: str, directory: Path, **options: Any) -> nn.Module:
    drive = {"nvme_dir": directory} if "nvme" in PLACES[place] else {}
    limits = hetmem.Budget(**PLACES[place], **drive)
    return hetmem.manage(build(), limits, device=harness.DEVICE(), chunk_bytes="128KiB", **options)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> float:
    batch = torch.randn(8, 160, generator=torch.Generator().manual_seed(number))
    loss = model(batch).float().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def state(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    states = [each for entry in optimizer.state_dict()["state"].values() for each in entry.values()]
    return [each.clone() for each in (*model.state_dict().values(), *states) if isinstance(each, torch.Tensor)]


def homes(model: nn.Module) -> list[dict[str, str]]:
    return [{r: tier for r, tier in chunk.homes.items() if r != "grad"} for chunk in testing.of(model).chunks()]


@pytest.mark.each
@pytest.mark.parametrize("overlap", ["off", "backward", "forward"])
@pytest.mark.parametrize("mixed", [None, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("place", PLACES)
def test_training_goes_on_with_the_bits_of_a_run_without(place: str, mixed: Any, overlap: Any, tmp_path: Path) -> None:
    runs = [managed(place, tmp_path, mixed_precision=mixed) for _ in range(2)]
    left, right = (hetmem.AdamW(model.parameters(), lr=1e-2, overlap=overlap) for model in runs)
    for number in range(5):
        losses = step(runs[0], left, number), step(runs[1], right, number)
        assert losses[0] == losses[1], f"step {number}"
        right.synchronize()
        before, expected = homes(runs[1]), state(runs[0], left)
        free = testing.of(runs[1]).memory().host_free_bytes
        with hetmem.parked(runs[1]):
            facts = testing.of(runs[1]).memory()
            assert (facts.device_home_bytes, facts.held_bytes) == (0, 0), facts
            assert all("device" not in chunk.homes.values() for chunk in testing.of(runs[1]).chunks())
            assert all(map(torch.equal, state(runs[1], right), expected))
        assert homes(runs[1]) == before
        assert testing.of(runs[1]).memory().host_free_bytes == free, "what was lent is given back"
    assert all(map(torch.equal, state(runs[1], right), state(runs[0], left)))


def test_it_computes_nothing_and_says_so(tmp_path: Path) -> None:
    model, other = (managed("whole", tmp_path) for _ in range(2))
    optimizer = hetmem.AdamW(model.parameters(), lr=1e-2)
    with pytest.raises(ManageError, match="Sequential is not parked"):
        hetmem.unpark(model)
    step(model, optimizer, 0)
    hetmem.park([model, other])
    for compute in (lambda: model(torch.ones(2, 160)), optimizer.step):
        with pytest.raises(ManageError, match=r"parked model.*hetmem\.unpark"):
            compute()
    with pytest.raises(ManageError, match="parked already"):
        hetmem.park(model)
    plain = build()
    plain(torch.ones(2, 160)).sum().backward()
    assert all(parameter.grad is not None for parameter in plain.parameters()), "other models compute meanwhile"
    hetmem.unpark([model, other])
    with pytest.raises(ZeroDivisionError), hetmem.parked(model):
        _ = 1 / 0
    step(model, optimizer, 1)
    told = hetmem.report(model)
    facts = told.to_dict()["between_steps"]
    assert facts["parks"] == 2
    assert min(facts["park_seconds"], facts["wake_seconds"]) > 0
    assert "parked 2 times: " in str(told)
    with pytest.raises(ManageError, match="not managed"):  # with nothing parked
        hetmem.park([model, nn.Linear(2, 2)])
    step(model, optimizer, 2)


@pytest.mark.parametrize("place", ["third", "idle memory filled", "some stay"])
def test_a_backward_comes_afterwards_or_a_graph_that_holds_the_device_is_refused(place: str, tmp_path: Path) -> None:
    left, right = (managed(place, tmp_path) for _ in range(2))
    optimizers = [hetmem.AdamW(each.parameters(), lr=1e-2) for each in (left, right)]
    for number in range(3):
        step(left, optimizers[0], number)
        step(right, optimizers[1], number)
    losses = [model(torch.ones(8, 160)).square().mean() for model in (left, right)]
    if place == "third":  # graphs hold no memory of weights
        with hetmem.parked(right), pytest.raises(ManageError, match=r"a backward of a parked model"):
            (losses[1] * 2).backward(retain_graph=True)
    else:
        with pytest.raises(ManageError, match=r"run the backward|waits for its backward"):
            hetmem.park(right)
    for loss, optimizer in zip(losses, optimizers, strict=True):
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(map(torch.equal, state(left, optimizers[0]), state(right, optimizers[1])))


def test_what_holds_the_device_is_named_and_nothing_is_parked(tmp_path: Path) -> None:
    model = managed("whole", tmp_path)
    optimizer = hetmem.AdamW(model.parameters(), lr=1e-2)
    step(model, optimizer, 0)
    found: list[str] = []

    def within(*_: object) -> None:
        with pytest.raises(ManageError, match="between steps"):
            hetmem.park(model)
        found.append("refused")

    handle = model[0].register_forward_hook(within)
    model(torch.ones(8, 160))
    handle.remove()
    assert found
    kept = next(model.parameters()).data
    with pytest.raises(ManageError, match=r"0\.0\.weight cannot leave the device: the program"):
        hetmem.park(model)
    del kept
    with hetmem.parked(model):
        pass
    step(model, optimizer, 1)


def test_homes_without_room_in_host_memory_stay_and_the_missing_bytes_are_told(tmp_path: Path) -> None:
    limits = hetmem.Budget(device="16MiB", host="1MiB")
    model = hetmem.manage(build(), limits, device=harness.DEVICE(), chunk_bytes="128KiB")
    optimizer = hetmem.AdamW(model.parameters(), lr=1e-2)
    step(model, optimizer, 0)
    before = homes(model)
    with pytest.raises(BudgetError, match=r"homes on the device take .* raise Budget\(host=…\) by"):
        hetmem.park(model)
    assert homes(model) == before
    step(model, optimizer, 1)


@pytest.mark.parametrize("place", ["whole", "third"])
def test_a_checkpoint_is_saved_and_loaded_meanwhile(place: str, tmp_path: Path) -> None:
    model, fresh = (managed(place, tmp_path) for _ in range(2))
    optimizers = [hetmem.AdamW(each.parameters(), lr=1e-2) for each in (model, fresh)]
    step(model, optimizers[0], 0)
    with hetmem.parked([model, fresh]):
        hetmem.save(tmp_path / "run.safetensors", model, optimizers[0])
        hetmem.load(tmp_path / "run.safetensors", fresh, optimizers[1])
        assert testing.of(fresh).memory().device_home_bytes == 0
    for number in (1, 2):
        assert step(model, optimizers[0], number) == step(fresh, optimizers[1], number)
    assert all(map(torch.equal, state(model, optimizers[0]), state(fresh, optimizers[1])))


def test_memory_that_parking_takes_may_be_touched_before(tmp_path: Path) -> None:
    model = managed("whole", tmp_path)
    optimizer = hetmem.AdamW(model.parameters(), lr=1e-2)
    step(model, optimizer, 0)
    before, free = homes(model), testing.of(model).memory().host_free_bytes
    hetmem.park(model, prepare=True)
    assert homes(model) == before
    assert testing.of(model).memory().host_free_bytes == free
    step(model, optimizer, 1)
    with hetmem.parked(model):
        values = state(model, optimizer)
        with pytest.raises(ManageError, match="is parked already"):
            hetmem.park(model, prepare=True)
        assert all(map(torch.equal, values, state(model, optimizer)))
    step(model, optimizer, 2)


def test_memory_is_prepared_beside_gradients_that_wait_for_their_step(tmp_path: Path) -> None:
    found = []
    for prepares in (False, True):
        model = managed("some stay", tmp_path, mixed_precision=torch.bfloat16)
        optimizer = hetmem.AdamW(model.parameters(), lr=1e-2, overlap="backward", max_grad_norm=1.0)
        for number in range(3):
            batch = torch.randn(8, 160, generator=torch.Generator().manual_seed(number))
            model(batch).float().square().mean().backward()
            if prepares:
                hetmem.park(model, prepare=True)
            optimizer.step()
            optimizer.zero_grad()
        found.append(state(model, optimizer))
    assert all(map(torch.equal, *found))


def test_hundreds_of_cycles_beside_another_owner_of_the_device_change_no_bit(tmp_path: Path, all_cases: bool) -> None:
    """Another program takes all of the device between steps."""
    left, right = (managed("whole", tmp_path) for _ in range(2))
    optimizers = [hetmem.AdamW(each.parameters(), lr=1e-2) for each in (left, right)]
    free: set[int] = set()
    for number in range(200 if all_cases else 12):
        step(left, optimizers[0], number)
        step(right, optimizers[1], number)
        with hetmem.parked(right):
            taken = torch.full((16 << 18,), float(number))  # the 16 MiB of the budget
            free.add(testing.of(right).memory().host_free_bytes)
        assert bool((taken == number).all())
    assert len(free) == 1, "memory is flat"
    assert all(map(torch.equal, state(left, optimizers[0]), state(right, optimizers[1])))


def nbytes_of(model: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


def test_parking_and_waking_take_as_long_as_the_link_once_host_memory_is_ready(tmp_path: Path) -> None:
    """Each byte crosses once, each way."""
    device = hetmem.SimDevice(host_to_device="40MB", device_to_host="40MB")
    model = hetmem.manage(build(), hetmem.Budget(**PLACES["whole"]), device=device, chunk_bytes="128KiB")
    optimizer = hetmem.AdamW(model.parameters(), lr=1e-2)
    step(model, optimizer, 0)
    hetmem.park(model, prepare=True)
    nbytes, told = [testing.of(model).link_bytes()], [hetmem.report(model).to_dict()["between_steps"]]
    for _ in range(3):
        with hetmem.parked(model):
            pass
        nbytes.append(testing.of(model).link_bytes())
        told.append(hetmem.report(model).to_dict()["between_steps"])
    for link, seconds in (("device_to_host", "park_seconds"), ("host_to_device", "wake_seconds")):
        moved = nbytes[1][link] - nbytes[0][link]
        assert (
            3 * nbytes_of(model) <= moved <= sum(sum(chunk.home_bytes.values()) for chunk in testing.of(model).chunks())
        )
        took = min(after[seconds] - before[seconds] for before, after in itertools.pairwise(told))
        assert moved / 40e6 <= took <= moved / 40e6 + 0.05, link


def test_optimizers_may_be_given_with_their_models(tmp_path: Path) -> None:
    model, other = (managed("whole", tmp_path) for _ in range(2))
    optimizer = hetmem.AdamW(model.parameters(), lr=1e-2)
    step(model, optimizer, 0)
    with hetmem.parked([model, optimizer, other]):
        assert testing.of(model).memory().device_home_bytes == testing.of(other).memory().device_home_bytes == 0
    step(model, optimizer, 1)
    with pytest.raises(ManageError, match=r"states of torch\.optim\.\S*SGD are not hetmem's"):
        hetmem.park([model, torch.optim.SGD(other.parameters(), lr=0.1)])
    step(model, optimizer, 2)


def test_of_several_models_all_wake_or_none_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = [managed("whole", tmp_path) for _ in range(2)]
    optimizer = hetmem.AdamW(models[0].parameters(), lr=1e-2)
    step(models[0], optimizer, 0)
    hetmem.park(models)
    expected, owner, left = state(models[0], optimizer), type(harness.DEVICE()), [len(homes(models[0])) * 3 + 1]
    allocate = owner.allocate

    def refuse(device: Any, nbytes: int) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise torch.OutOfMemoryError("others have it")
        return allocate(device, nbytes)

    monkeypatch.setattr(owner, "allocate", refuse)
    with pytest.raises(DeviceOutOfMemoryError, match="stays parked"):
        hetmem.unpark(models)
    assert left[0] < 0
    monkeypatch.undo()
    assert [testing.of(model).memory().device_home_bytes for model in models] == [0, 0]
    assert all(map(torch.equal, state(models[0], optimizer), expected))
    hetmem.unpark(models)
    step(models[0], optimizer, 1)
