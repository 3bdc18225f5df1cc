"""Optimizers of torch and ours, their options, schedulers, closures and checkpoints: interchangeable, bit for bit."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hetmem
from hetmem import testing
from hetmem.errors import ManageError, StoreError
from tests.engine.harness import (
    BATCHES,
    Recipe,
    Tower,
    adamws,
    assert_same,
    assert_same_states,
    assert_same_weights,
    everywhere,
    loss_of,
    manage,
    mlp,
    offloaded,
    pair,
    token_batches,
    train_both,
)


@pytest.mark.each
@offloaded
@pytest.mark.parametrize("name", ["SGD", "AdamW", "AdamW fused", "Adagrad", "RMSprop", "Adam foreach"])
def test_optimizers_of_torch_train_managed_parameters(name: str, placement: str, tmp_path: Path) -> None:
    """The fused ones do not count versions: a device copy must not survive their step."""
    modules = pair(mlp, placement, tmp_path)
    make: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
        "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
        "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2),
        "AdamW fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
        "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
        "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3),
        "Adam foreach": lambda p: torch.optim.Adam(p, lr=1e-2, foreach=True),
    }
    optimizers = tuple(make[name](module.parameters()) for module in modules)
    train_both(*modules, BATCHES, Recipe(steps=4, accumulation=2, clip=1e-4), optimizers=optimizers)


@pytest.mark.parametrize("times", [1, 3])
def test_a_drive_that_fails_behind_a_step_of_torch_makes_no_error_of_it(times: int, tmp_path: Path) -> None:
    """All is updated: who repeats the step would do so twice. What fails is a read ahead that counts no more."""
    plain, managed = pair(mlp, "nvme", tmp_path)
    calls = count(1)

    def fail_first(written: Callable[..., None], *args: Any, **options: Any) -> None:
        if next(calls) % (times + 1):
            raise StoreError(5, "cannot read")
        written(*args, **options)

    optimizers = [torch.optim.AdamW(module.parameters(), lr=1e-2, fused=True) for module in (plain, managed)]
    for batch in BATCHES:
        for module, optimizer in zip((plain, managed), optimizers, strict=True):
            loss_of(module, batch).backward()
            with testing.around("home written", fail_first):
                optimizer.step()
            optimizer.zero_grad()
    assert_same_weights(plain, managed)
    assert next(calls) > len(BATCHES)
    for_good = testing.failing("home written", lambda: StoreError(5, "for good"), times=1 << 30)
    with for_good:
        optimizers[1].step()
        with pytest.raises(StoreError, match="for good"):
            managed(*BATCHES[0])


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 5),
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=8),
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_change_the_rate_and_the_momenta(name: str, tmp_path: Path) -> None:
    modules = pair(mlp, "nvme", tmp_path)
    optimizers = adamws(*modules)
    schedulers = [SCHEDULERS[name](optimizer) for optimizer in optimizers]
    for _ in range(4):
        train_both(*modules, BATCHES, Recipe(steps=1), optimizers=optimizers)
        for scheduler in schedulers:
            scheduler.step()
        assert optimizers[0].param_groups[0]["lr"] == optimizers[1].param_groups[0]["lr"]
        assert optimizers[0].param_groups[0]["betas"] == optimizers[1].param_groups[0]["betas"]


@everywhere
def test_a_closure_is_called_with_gradients_enabled(placement: str, tmp_path: Path) -> None:
    modules = pair(mlp, placement, tmp_path)
    optimizers = adamws(*modules)
    for batch in BATCHES:
        losses = []
        for module, optimizer in zip(modules, optimizers, strict=True):

            def closure(module: Any = module, optimizer: Any = optimizer, batch: Any = batch) -> torch.Tensor:
                optimizer.zero_grad()
                loss = loss_of(module, batch)
                loss.backward()
                return loss

            losses.append(optimizer.step(closure))
        assert_same(*losses, "loss of the closure")
        assert_same_weights(*modules)


@everywhere
def test_hooks_of_the_optimizer_fire(placement: str, tmp_path: Path) -> None:
    module = manage(mlp(), placement, tmp_path)
    optimizer = hetmem.AdamW(module.parameters())
    log: list[str] = []
    optimizer.register_step_pre_hook(lambda *args: log.append("pre"))
    optimizer.register_step_post_hook(lambda *args: log.append("post"))
    loss_of(module, BATCHES[0]).backward()
    optimizer.step()
    assert log == ["pre", "post"]


def _doubled(optimizer: torch.optim.Optimizer, given: dict[str, Any]) -> dict[str, Any]:
    state = {number: {**saved, "exp_avg": saved["exp_avg"] * 2} for number, saved in given["state"].items()}
    return {**given, "state": state}


def _halve(optimizer: torch.optim.Optimizer) -> None:
    for state in optimizer.state.values():
        state["exp_avg_sq"].mul_(0.5)


@everywhere
def test_hooks_of_loading_see_states_and_change_them(placement: str, tmp_path: Path) -> None:
    """They found None in their place, and what they changed was not loaded."""
    modules = pair(mlp, placement, tmp_path)
    optimizers = train_both(*modules, BATCHES)
    for optimizer in optimizers:
        optimizer.register_load_state_dict_pre_hook(_doubled)
        optimizer.register_load_state_dict_post_hook(_halve)
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert_same_states(*optimizers)
    train_both(*modules, BATCHES, optimizers=optimizers)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.NAdam, torch.optim.Adagrad])
def test_a_checkpoint_without_options_of_today_loads_and_one_with_steps_as_numbers_is_refused(
    kind: Any, tmp_path: Path
) -> None:
    """As older versions of torch saved them."""
    modules = pair(mlp, "host", tmp_path)
    plain, managed = modules
    if kind is torch.optim.AdamW:
        optimizers = adamws(plain, managed)
    else:
        right = hetmem.optim.offload(kind, managed.parameters(), lr=1e-2)
        optimizers = kind(plain.parameters(), lr=1e-2, foreach=False), right
    train_both(*modules, BATCHES, optimizers=optimizers)
    for optimizer in optimizers:
        old = copy.deepcopy(optimizer.state_dict())
        for group in old["param_groups"]:
            del group["maximize"]
        optimizer.load_state_dict(old)
    train_both(*modules, BATCHES, optimizers=optimizers)
    older = copy.deepcopy(old)
    for state in older["state"].values():
        state["step"] = int(state["step"])
    with pytest.raises(ManageError, match="is a number in this checkpoint"):
        optimizer.load_state_dict(older)
    train_both(*modules, BATCHES, optimizers=optimizers)


@everywhere
def test_groups_may_be_added_and_their_options_changed_later(placement: str, tmp_path: Path) -> None:
    modules = pair(mlp, placement, tmp_path)
    optimizers = adamws(modules[0][0], modules[1][0])
    train_both(*modules, BATCHES, optimizers=optimizers)
    for module, optimizer in zip(modules, optimizers, strict=True):
        optimizer.add_param_group({"params": list(module[2].parameters()), "lr": 3e-2, "weight_decay": 0.5})
        optimizer.param_groups[0]["weight_decay"] = 0.2
        optimizer.param_groups[0]["eps"] = 1e-5
    train_both(*modules, BATCHES, optimizers=optimizers)


@pytest.mark.each
@everywhere
@pytest.mark.parametrize("maximize", [True, False])
def test_other_options_of_adamw_equal_torch(placement: str, maximize: bool, tmp_path: Path) -> None:
    modules = pair(mlp, placement, tmp_path)
    options: dict[str, Any] = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.0, "maximize": maximize}
    optimizers = (
        torch.optim.AdamW(modules[0].parameters(), fused=True, **options),
        hetmem.AdamW(modules[1].parameters(), **options),
    )
    train_both(*modules, BATCHES, optimizers=optimizers)


def saved(value: Any) -> Any:
    """`value` through torch.save and torch.load as a checkpoint does it."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.each
@everywhere
@pytest.mark.parametrize("into", ["plain", "managed"])
@pytest.mark.parametrize("fresh", [True, False], ids=["into a new optimizer", "into one that has stepped"])
def test_checkpoints_interchange_with_torch_and_resume_bitwise(
    placement: str, into: str, fresh: bool, tmp_path: Path
) -> None:
    """A plain and a managed run; each is resumed from the other's state_dict and goes on with the same bits."""
    modules = pair(Tower, placement, tmp_path)
    optimizers = train_both(*modules, token_batches(3))
    source = 1 if into == "plain" else 0
    weights, states = saved(modules[source].state_dict()), saved(optimizers[source].state_dict())
    torch.manual_seed(7)
    resumed = Tower()
    if into == "plain":
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(resumed.parameters(), lr=0.5, fused=True)
    else:
        manage(resumed, placement, tmp_path)
        optimizer = hetmem.AdamW(resumed.parameters(), lr=0.5)
    if not fresh:
        resumed(*token_batches(1)[0]).backward()
        optimizer.step()
        optimizer.zero_grad()
    resumed.load_state_dict(weights)
    optimizer.load_state_dict(states)
    train_both(modules[0], resumed, token_batches(3, seed=5), optimizers=(optimizers[0], optimizer))


@everywhere
def test_saved_states_are_snapshots_after_deepcopy_and_readable_in_place(placement: str, tmp_path: Path) -> None:
    modules = pair(mlp, placement, tmp_path)
    left, right = train_both(*modules, BATCHES)
    kept = copy.deepcopy(right.state_dict())
    for name in ("exp_avg", "exp_avg_sq"):
        weight = modules[1][2].weight
        assert_same(left.state[modules[0][2].weight][name], right.state[weight][name], name)
        right.state[weight][name].mul_(0.5)
        left.state[modules[0][2].weight][name].mul_(0.5)
    train_both(*modules, BATCHES, optimizers=(left, right))
    left.load_state_dict(copy.deepcopy(kept) | {"param_groups": left.state_dict()["param_groups"]})
    right.load_state_dict(kept)
    assert_same_states(left, right)
    train_both(*modules, BATCHES, optimizers=(left, right))


@everywhere
def test_the_optimizer_can_be_pickled_as_a_state(placement: str, tmp_path: Path) -> None:
    modules = pair(mlp, placement, tmp_path)
    _, right = train_both(*modules, BATCHES)
    loaded = pickle.loads(pickle.dumps(right.state_dict()))
    assert_same(loaded["state"][0]["exp_avg"], right.state[modules[1][0].weight]["exp_avg"], "exp_avg")


@everywhere
def test_a_copy_of_the_optimizer_has_its_states_and_steps_no_copy_of_the_model(placement: str, tmp_path: Path) -> None:
    modules = pair(mlp, placement, tmp_path)
    _, right = train_both(*modules, BATCHES)
    model, copied = copy.deepcopy((modules[1], right))
    assert_same_states(right, copied)
    model(*BATCHES[0]).sum().backward()
    with pytest.raises(ManageError, match="is a copy, as this is"):
        copied.step()
    ordinary = torch.optim.AdamW(model.parameters())
    ordinary.load_state_dict(copied.state_dict())
    ordinary.step()
    modules[1](*BATCHES[0]).sum().backward()
    right.step()
    assert_same_weights(model, modules[1])


def test_a_parameter_that_is_not_managed_is_refused_by_adamw(tmp_path: Path) -> None:
    managed = manage(mlp(), "host", tmp_path)
    with pytest.raises(ManageError, match="not managed"):
        hetmem.AdamW([*managed.parameters(), nn.Parameter(torch.ones(3))])


KINDS: dict[str, Callable[..., tuple[torch.optim.Optimizer, torch.optim.Optimizer]]] = {
    "AdamW": adamws,
    "NAdam": lambda plain, managed, **options: (
        torch.optim.NAdam(plain.parameters(), lr=1e-2, foreach=False),
        hetmem.optim.offload(torch.optim.NAdam, managed.parameters(), lr=1e-2, **options),
    ),
    "SGD": lambda plain, managed, **options: (
        torch.optim.SGD(plain.parameters(), lr=1e-2, momentum=0.9),
        hetmem.optim.offload(torch.optim.SGD, managed.parameters(), lr=1e-2, momentum=0.9),
    ),
}


@pytest.mark.each
@everywhere
@pytest.mark.parametrize("kind", ["AdamW", "NAdam"])
def test_incomplete_states_are_refused_by_name_before_anything_is_updated(
    kind: str, placement: str, tmp_path: Path
) -> None:
    """What was missing began at zero. Torch raises KeyError."""
    modules = pair(mlp, placement, tmp_path)
    optimizers = train_both(*modules, BATCHES, optimizers=KINDS[kind](*modules))
    for name in [*optimizers[0].state[modules[0][2].weight]]:
        error = rf"the state of 2\.weight has .*, but no {name}: it is damaged"
        damaged = copy.deepcopy(optimizers[0].state_dict())
        del damaged["state"][2][name]
        with pytest.raises(ManageError, match=error):
            optimizers[1].load_state_dict(damaged)
        kept = [optimizer.state[module[2].weight] for module, optimizer in zip(modules, optimizers, strict=True)]
        values = [state.pop(name) for state in kept]
        for module in modules:
            loss_of(module, BATCHES[0]).backward()
        with pytest.raises(KeyError, match=name):
            optimizers[0].step()
        with pytest.raises(ManageError, match=error + ".* No parameter is updated yet"):
            optimizers[1].step()
        assert_same_weights(*modules)
        for state, value, optimizer in zip(kept, values, optimizers, strict=True):
            state[name] = value
            optimizer.step()
            optimizer.zero_grad()
        assert_same_weights(*modules)
        assert_same_states(*optimizers)


@pytest.mark.parametrize("overlap", ["backward", "forward"])
def test_an_incomplete_state_is_refused_in_the_step_after_other_updates_have_begun(
    overlap: str, tmp_path: Path
) -> None:
    modules = pair(mlp, "host", tmp_path)
    optimizers = train_both(*modules, BATCHES, optimizers=adamws(*modules, overlap=overlap))
    state = optimizers[1].state[modules[1][2].weight]
    kept = state.pop("exp_avg")
    for module in modules:
        loss_of(module, BATCHES[0]).backward()
    with pytest.raises(ManageError, match=r"2\.weight has .*, but no exp_avg: .* Updated already: .*4\.weight"):
        optimizers[1].step()
    state["exp_avg"] = kept
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    assert_same_weights(*modules)
    train_both(*modules, BATCHES, optimizers=optimizers)


def test_states_that_torch_steps_from_are_accepted(tmp_path: Path) -> None:
    """SGD begins a momentum that is missing anew; an empty entry is none; one of a frozen weight is not read."""
    modules = pair(mlp, "host", tmp_path)
    optimizers = train_both(*modules, BATCHES, optimizers=KINDS["SGD"](*modules))
    for module, optimizer in zip(modules, optimizers, strict=True):
        del optimizer.state[module[2].weight]["momentum_buffer"]
    train_both(*modules, BATCHES, optimizers=optimizers)
    for module in modules:
        module[4].weight.requires_grad_(False)
    optimizers = train_both(*modules, BATCHES)
    saved = copy.deepcopy(optimizers[0].state_dict())
    saved["state"] |= {2: {}, 4: {"step": torch.zeros(())}}
    for optimizer in optimizers:
        optimizer.load_state_dict(copy.deepcopy(saved))
    train_both(*modules, BATCHES, optimizers=optimizers)


def test_a_state_of_another_shape_is_no_number_for_all_elements(tmp_path: Path) -> None:
    modules = pair(mlp, "host", tmp_path)
    optimizers = train_both(*modules, BATCHES)
    optimizers[1].state[modules[1][2].weight]["exp_avg"] = torch.zeros(1)
    modules[1](*BATCHES[0]).sum().backward()
    with pytest.raises(ManageError, match=r"exp_avg of 2\.weight is \(1,\) in optimizer.state, expected \(64, 64\)"):
        optimizers[1].step()
    assert_same_weights(*modules)
