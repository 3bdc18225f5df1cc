"""Optimizers with `budget=`: parameters that nobody manages, their states in host memory and on NVMe.

The reference is torch's own optimizer over a copy of the model, in every bit of weights and states.
"""

from __future__ import annotations

import copy
import errno
import gc
import os
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hetmem
from hetmem import testing
from hetmem.errors import BudgetError, ManageError, StoreError
from tests.engine.harness import assert_same_states, assert_same_weights
from tests.faults.disk import EIO, FaultyDisk, healthy, once

PLACES = ("host", "nvme")
places = pytest.mark.parametrize("place", PLACES)


def build() -> nn.Sequential:
    """Weights of 600 KiB: a frozen layer, one that is not used, one in channels_last, odd sizes, nothing."""
    torch.manual_seed(0)
    conv = nn.Conv2d(3, 7, 3, padding=1).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    model = nn.Sequential(conv, nn.Flatten(), nn.Linear(7 * 64, 301), nn.Tanh(), nn.Linear(301, 33), nn.Linear(33, 33))
    model[5].requires_grad_(False)
    model.register_parameter("unused", nn.Parameter(torch.ones(5)))
    model.register_parameter("nothing", nn.Parameter(torch.ones(0, 3)))
    return model


def budget(place: str, directory: Path) -> hetmem.Budget:
    """Room for all states (1.2 MB), or for a third of them."""
    return hetmem.Budget(host="64MiB") if place == "host" else _third(directory)


def _third(directory: Path) -> hetmem.Budget:
    return hetmem.Budget(host="410KB", nvme="8MiB", nvme_dir=directory)


def losses(model: nn.Module, step: int) -> Any:
    """A thousandth in every other step, so that a limit of norms clips some."""
    generator = torch.Generator().manual_seed(step)
    dtype = next(model.parameters()).dtype
    return (
        model(torch.randn(4, 3, 8, 8, generator=generator).to(dtype)).square().mean() * (1.0, 1e-3)[step % 2]
        + model.nothing.sum()
    )


def train(model: nn.Module, optimizer: Any, steps: range, *, then: Callable[[int], None] = lambda _: None) -> None:
    for step in steps:
        losses(model, 2 * step).backward()
        losses(model, 2 * step + 1).backward()
        then(step)
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)


def groups(model: nn.Module) -> list[dict[str, Any]]:
    weights = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    return [{"params": weights, "weight_decay": 0.1}, {"params": others, "lr": 3e-3, "betas": (0.8, 0.99)}]


@pytest.mark.each
@places
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_twenty_steps_have_the_bits_of_torchs_fused_adamw(place: str, dtype: torch.dtype, tmp_path: Path) -> None:
    plain, ours = build().to(dtype), build().to(dtype)
    left = torch.optim.AdamW(groups(plain), lr=1e-2, fused=True)
    right: Any = hetmem.AdamW(groups(ours), lr=1e-2, budget=budget(place, tmp_path))
    schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(each, 20) for each in (left, right)]
    for model, optimizer, schedule in zip((plain, ours), (left, right), schedules, strict=True):
        clip = lambda _, model=model: nn.utils.clip_grad_norm_(model.parameters(), 0.05)  # noqa: E731
        for step in range(20):
            train(model, optimizer, range(step, step + 1), then=clip)
            schedule.step()
    assert_same_weights(plain, ours)
    assert_same_states(left, right)
    used = right.memory_bytes()
    assert used["host"] <= (410_000 if place == "nvme" else 64 << 20), "a budget is a hard limit"
    assert (used["nvme"] > 0) == (place == "nvme")


@places
@pytest.mark.parametrize(
    ("kind", "options"),
    [(torch.optim.SGD, {"momentum": 0.9, "lr": 0.1}), (torch.optim.SGD, {"lr": 0.1}), (torch.optim.NAdam, {})],
)
def test_other_optimizers_have_the_bits_of_torchs_own(
    kind: Any, options: dict[str, Any], place: str, tmp_path: Path
) -> None:
    plain, ours = build(), build()
    left = kind(plain.parameters(), foreach=False, **options)
    right: Any = hetmem.optim.offload(kind, ours.parameters(), budget=budget(place, tmp_path), **options)
    for model, optimizer in ((plain, left), (ours, right)):
        train(model, optimizer, range(4))
    assert_same_weights(plain, ours)
    assert_same_states(left, right)


@places
def test_updates_in_the_backward_have_the_bits_of_torch(place: str, tmp_path: Path) -> None:
    """Also of gradients that are zeroed rather than removed, options that change between steps, and a parameter that
    has a gradient only once. On NVMe several parameters share a piece."""
    plain, ours = build(), build()
    left = torch.optim.AdamW(groups(plain), lr=1e-2, fused=True)
    least = hetmem.Budget(host="132KiB", nvme="8MiB", nvme_dir=tmp_path)
    room = least if place == "nvme" else budget(place, tmp_path)
    right: Any = hetmem.AdamW(groups(ours), lr=1e-2, overlap="backward", budget=room)
    before = ours[4].weight.detach().clone()

    def wait_for_an_update(*_: object) -> None:
        until = time.perf_counter() + 30
        while torch.equal(ours[4].weight, before):
            assert time.perf_counter() < until, "updates begin in the backward"
            time.sleep(1e-3)
        time.sleep(0.02)  # for what should not have begun

    ours[2].register_full_backward_hook(wait_for_an_update)
    for step in range(6):
        for model in (plain, ours):
            before.copy_(ours[4].weight.detach())
            (losses(model, step) + model.unused.sum() * (step == 3)).backward()
        for optimizer in (left, right):
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            optimizer.param_groups[0]["lr"] *= 0.9
    assert_same_weights(plain, ours)
    assert_same_states(left, right)


def test_a_gradient_that_has_been_used_is_not_used_again_nor_changed(tmp_path: Path) -> None:
    ours = build()
    right: Any = hetmem.AdamW(ours.parameters(), overlap="backward", budget=budget("host", tmp_path))
    saved = copy.deepcopy(right.state_dict())
    losses(ours, 0).backward()
    with pytest.raises(RuntimeError, match=r"has updated some parameters already: call step\(\) before saving"):
        right.state_dict()
    with pytest.raises(RuntimeError, match=r"has updated parameter \d already: call step\(\) after each backward"):
        losses(ours, 1).backward()
    right.load_state_dict(saved)
    right.zero_grad()
    losses(ours, 0).backward()
    nn.utils.clip_grad_norm_(ours.parameters(), 1e-3)
    with pytest.raises(RuntimeError, match=r"parameter \d has another gradient or other options: clip gradients"):
        right.step()


def test_a_drive_that_fails_in_the_backward_is_told_by_the_step_which_then_does_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, ours, disk = build(), build(), FaultyDisk()
    disk.used_by(monkeypatch)
    left = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
    right: Any = hetmem.AdamW(ours.parameters(), lr=1e-2, overlap="backward", budget=_third(tmp_path))
    for step in range(12):
        fails = once(7 * step, EIO)

        def slow(verb: str, offset: int, nbytes: int, fails: Any = fails) -> int:
            time.sleep(0.001)  # so updates are under way when the backward ends
            return int(fails(verb, offset, nbytes))

        disk.fault = slow
        for model in (plain, ours):
            losses(model, step).backward()
        left.step()
        with pytest.raises(StoreError):
            right.step()
        right.step()
        for optimizer in (left, right):
            optimizer.zero_grad()
        assert_same_weights(plain, ours)
        assert_same_states(left, right)


def test_clipping_and_scaling_have_the_bits_of_gradients_that_were_clipped(tmp_path: Path) -> None:
    plain, ours = build(), build()
    left = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
    right: Any = hetmem.AdamW(
        ours.parameters(), lr=1e-2, max_grad_norm=0.05, loss_scale=1024.0, budget=_third(tmp_path)
    )
    clipped = set()
    for step in range(6):
        losses(plain, step).backward()
        right.scale(losses(ours, step)).backward()
        right.step()
        gradients = [p.grad for p in plain.parameters() if p.grad is not None]
        assert right.grad_norm == pytest.approx(testing.norm([each.flatten() for each in gradients]), rel=1e-14)
        factor = min(1.0, 0.05 / (right.grad_norm + 1e-6))
        clipped.add(factor < 1)
        for gradient in gradients:
            gradient.mul_(factor)
        left.step()
        for optimizer in (left, right):
            optimizer.zero_grad()
    assert clipped == {True, False}
    assert_same_weights(plain, ours)
    before = [p.detach().clone() for p in ours.parameters()]
    losses(ours, 0).backward()
    ours[2].weight.grad[0, 0] = torch.inf
    right.step()
    assert right.loss_scale.skipped == 1
    assert all(map(torch.equal, before, ours.parameters())), "a step with an infinite gradient changes nothing"


@places
def test_states_go_from_torch_to_hetmem_and_back(place: str, tmp_path: Path) -> None:
    plain, ours = build(), build()
    left = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
    train(plain, left, range(3))
    ours.load_state_dict(plain.state_dict())
    right: Any = hetmem.AdamW(ours.parameters(), budget=budget(place, tmp_path))
    torch.save(left.state_dict(), tmp_path / "states")
    right.load_state_dict(torch.load(tmp_path / "states"))
    assert right.param_groups[0]["lr"] == 1e-2
    for model, optimizer in ((plain, left), (ours, right)):
        train(model, optimizer, range(3, 6))
    assert_same_weights(plain, ours)
    assert_same_states(left, right)
    torch.save(right.state_dict(), tmp_path / "ours")
    left.load_state_dict(torch.load(tmp_path / "ours"))
    for model, optimizer in ((plain, left), (ours, right)):
        train(model, optimizer, range(6, 8))
    assert_same_weights(plain, ours)


@places
def test_what_the_program_does_to_states_counts(place: str, tmp_path: Path) -> None:
    """Writes in place, tensors put in their place, and entries that are removed: as with torch's own."""
    plain, ours = build(), build()
    left = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
    right: Any = hetmem.AdamW(ours.parameters(), lr=1e-2, budget=budget(place, tmp_path))
    for model, optimizer in ((plain, left), (ours, right)):
        train(model, optimizer, range(2))
        entries = [optimizer.state[p] for p in model.parameters() if p in optimizer.state]
        entries[0]["exp_avg"].mul_(0.5)
        entries[1]["exp_avg_sq"] = entries[1]["exp_avg_sq"] * 2
        del optimizer.state[model[2].weight]
        train(model, optimizer, range(2, 4))
    assert_same_weights(plain, ours)
    assert_same_states(left, right)


def test_parameters_may_come_and_move_before_the_first_step(tmp_path: Path) -> None:
    """Frameworks make the optimizer first, and then put other parameters, or weights, in their places."""
    ours = build()
    right: Any = hetmem.AdamW([ours[0].weight], lr=1e-2, budget=budget("host", tmp_path))
    right.param_groups[0]["params"] = list(ours.parameters())
    right.add_param_group({"params": [extra := nn.Parameter(torch.ones(4))], "lr": 1e-3})
    ours.double()
    plain = copy.deepcopy(ours)
    left = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
    for model, optimizer in ((plain, left), (ours, right)):
        train(model, optimizer, range(2))
    assert_same_weights(plain, ours)
    ours.float()
    losses(ours, 0).backward()
    with pytest.raises(ManageError, match=r"parameter 0 was \(5,\) in torch.float64 on cpu .* move the model"):
        right.step()
    assert torch.equal(extra, torch.ones(4))


def test_a_step_that_a_drive_has_broken_off_is_repeated_with_every_piece_updated_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each transfer of a step in turn."""
    plain, ours, disk = build(), build(), FaultyDisk()
    disk.used_by(monkeypatch)
    left = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
    right: Any = hetmem.AdamW(ours.parameters(), lr=1e-2, max_grad_norm=1e9, budget=_third(tmp_path))
    at, fails = 0, True
    while fails:
        for model in (plain, ours):
            losses(model, at).backward()
        left.step()
        disk.fault, fails = once(at, EIO), False
        try:
            right.step()
        except StoreError:
            fails, at = True, at + 9
            right.step()
        for optimizer in (left, right):
            optimizer.zero_grad()
        assert_same_weights(plain, ours)
        assert_same_states(left, right)
    assert at > 90


def test_a_step_that_has_failed_is_not_mixed_with_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, disk = build(), FaultyDisk()
    disk.used_by(monkeypatch)
    right: Any = hetmem.AdamW(ours.parameters(), lr=1e-2, budget=_third(tmp_path))
    train(ours, right, range(1))
    saved = copy.deepcopy(right.state_dict())
    losses(ours, 0).backward()
    disk.fault = lambda verb, _, nbytes: EIO(verb, _, nbytes) if verb == "write" else nbytes
    for _ in range(2):
        with pytest.raises(StoreError):
            right.step()
    with pytest.raises(RuntimeError, match="call it again before saving"):
        right.state_dict()
    disk.fault = healthy
    losses(ours, 1).backward()
    with pytest.raises(RuntimeError, match=r"failed after it had updated some .* parameter \d has another gradient"):
        right.step()
    right.load_state_dict(saved)
    right.step()


def test_a_full_disk_is_seen_when_the_optimizer_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(StoreError, match=r"cannot reserve .* No space left on device.* Free disk space or lower"):
        hetmem.AdamW(build().parameters(), budget=_third(tmp_path))


@pytest.mark.parametrize("overlap", ["off", "backward"])
def test_its_memory_ends_with_it(overlap: str, tmp_path: Path) -> None:
    ours = build()
    right: Any = hetmem.AdamW(ours.parameters(), overlap=overlap, budget=_third(tmp_path))
    losses(ours, 0).backward()
    right.step()
    gone = weakref.ref(right)
    del right
    gc.collect()
    assert gone() is None
    assert not list(tmp_path.iterdir())
    losses(ours, 1).backward()  # nobody is told of it any more


WRONG: dict[str, tuple[Callable[[nn.Module, Path], Any], type[Exception], str]] = {
    "no room": (lambda m, _: {"budget": hetmem.Budget(host="100KiB")}, BudgetError, r"hetmem.AdamW has no room: its "),
    "no room on either": (
        lambda m, path: {"budget": hetmem.Budget(host="200KiB", nvme="64KiB", nvme_dir=path)},
        BudgetError,
        r"Budget\(nvme=…\) 64\.00 KiB, so .* are missing",
    ),
    "a device's budget": (
        lambda m, _: {"budget": hetmem.Budget(device="1MiB", host="64MiB")},
        BudgetError,
        r"Budget\(device=…\) is for hetmem\.manage",
    ),
    "no directory": (
        lambda m, path: {"budget": hetmem.Budget(nvme="1MiB", nvme_dir=path / "none")},
        BudgetError,
        "is no directory: name an existing, writable",
    ),
    "no budget": (lambda m, _: {"budget": "100GiB"}, ManageError, r"expected a hetmem\.Budget\(.*'100GiB'"),
    "fused": (
        lambda m, _: {"budget": hetmem.Budget(), "fused": True},
        TypeError,
        "unexpected keyword argument 'fused'",
    ),
    "overlap": (
        lambda m, _: {"budget": hetmem.Budget(), "overlap": "forward"},
        ManageError,
        "overlap='forward' is for managed models",
    ),
    "overlap with a norm": (
        lambda m, _: {"budget": hetmem.Budget(), "overlap": "backward", "max_grad_norm": 1.0},
        ManageError,
        "max_grad_norm= needs all gradients before the first update",
    ),
    "overlap with a scale": (
        lambda m, _: {"budget": hetmem.Budget(), "overlap": "backward", "loss_scale": "dynamic"},
        ManageError,
        "loss_scale= needs all gradients before the first update",
    ),
    "moments": (
        lambda m, _: {"budget": hetmem.Budget(), "moments": "8bit"},
        ManageError,
        "moments= is for managed models",
    ),
    "lr": (lambda m, _: {"budget": hetmem.Budget(), "lr": -1.0}, ValueError, "Invalid learning rate: -1.0"),
    "max_grad_norm": (
        lambda m, _: {"budget": hetmem.Budget(), "max_grad_norm": 0},
        ValueError,
        "max_grad_norm must be a positive number",
    ),
    "without a budget": (lambda m, _: {}, ManageError, r"not managed: call hetmem\.manage.* or, .* give it budget="),
}


@pytest.mark.parametrize(("options", "error", "match"), WRONG.values(), ids=WRONG)
def test_what_cannot_be_meant_is_refused_when_the_optimizer_is_made(
    options: Callable[[nn.Module, Path], Any], error: type[Exception], match: str, tmp_path: Path
) -> None:
    model = build()
    with pytest.raises(error, match=match):
        hetmem.AdamW(model.parameters(), **options(model, tmp_path))


PARAMETERS: dict[str, tuple[Callable[[], Any], str]] = {
    "meta": (lambda: torch.empty(3, device="meta"), "parameter 0 is on the meta device"),
    "gaps": (lambda: torch.ones(4, 6)[:, :3], r"has strides \(6, 1\): its elements must lie without gaps"),
    "complex": (lambda: torch.ones(3, dtype=torch.complex64), "cannot update parameter 0 of dtype torch.complex64"),
}


@pytest.mark.parametrize(("make", "match"), PARAMETERS.values(), ids=PARAMETERS)
def test_a_parameter_that_it_cannot_update_is_refused(make: Callable[[], Any], match: str) -> None:
    with pytest.raises(ManageError, match=match):
        hetmem.AdamW([nn.Parameter(make())], budget=hetmem.Budget(host="1MiB"))


def test_managed_parameters_need_no_budget_of_their_own() -> None:
    managed = hetmem.manage(nn.Linear(8, 8), hetmem.Budget(device="1MiB", host="1MiB"), device="sim")
    with pytest.raises(ManageError, match=r"hetmem.AdamW got weight, which is managed, with budget="):
        hetmem.AdamW([*nn.Linear(2, 2).parameters(), *managed.parameters()], budget=hetmem.Budget(host="1MiB"))
    with pytest.raises(ManageError, match="not managed"):
        hetmem.AdamW([*managed.parameters(), *nn.Linear(2, 2).parameters()])


def test_states_and_gradients_of_another_kind_are_refused_with_nothing_changed(tmp_path: Path) -> None:
    ours = build()
    right: Any = hetmem.AdamW(ours.parameters(), budget=_third(tmp_path))
    train(ours, right, range(1))
    before = copy.deepcopy(right.state_dict())
    sgd = torch.optim.SGD(ours.parameters(), lr=0.1, momentum=0.9)
    train(ours, sgd, range(1))
    for wrong, match in (
        (sgd.state_dict(), "momentum_buffer of parameter 1.* is no state of this optimizer"),
        ({**before, "state": {2: {k: v for k, v in before["state"][2].items() if k != "step"}}}, "but no step"),
        ({**before, "state": {2: {**before["state"][2], "exp_avg": torch.ones(2)}}}, r"is \(2,\) in this checkpoint"),
    ):
        with pytest.raises(ManageError, match=match):
            right.load_state_dict(wrong)
    after = right.state_dict()
    for number, entry in before["state"].items():
        assert all(torch.equal(value, after["state"][number][name]) for name, value in entry.items())
    losses(ours, 0).backward()
    del right.state[ours[2].bias]["exp_avg"]
    with pytest.raises(ManageError, match="the state of parameter 5 has step, exp_avg_sq, but no exp_avg"):
        right.step()
    with pytest.raises(ManageError, match=r"cannot be copied or pickled"):
        copy.deepcopy(right)
