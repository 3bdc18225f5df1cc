"""A model whole on the device is updated in one call of torch's kernel, with the bits that torch has."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hetmem
from hetmem import testing, torch_private
from hetmem.memory.chunk import Role
from hetmem.optim.update_pass import Passes
from hetmem.schedule.trace import Tier
from tests.engine.harness import assert_same_states, assert_same_weights, loss_of, mlp, pair, precisions, vector_batches

KERNEL, BEGIN_UPDATE = torch._fused_adamw_, Passes.begin_update
Side = tuple[nn.Module, torch.optim.Optimizer]


def nothing(side: Side) -> None:
    """Nobody has touched anything."""


def other_data(side: Side) -> None:
    weight = side[0].get_parameter("2.weight")
    weight.data = weight.detach().clone().mul_(2)


def written(side: Side) -> None:
    with torch.no_grad():
        side[0].get_parameter("0.bias").add_(1)


def without_a_gradient(side: Side) -> None:
    side[0].get_parameter("2.weight").grad = None


def turned_gradient(side: Side) -> None:
    """Of which torch's kernel takes no note."""
    weight = side[0].get_parameter("2.weight")
    if isinstance(side[1], hetmem.AdamW):
        weight.grad = weight.grad.t().contiguous().t()


def other_state(side: Side) -> None:
    state = side[1].state[side[0].get_parameter("2.weight")]
    state["exp_avg"] = torch.ones_like(state["exp_avg"])


def counted_back(side: Side) -> None:
    """Those that are not the first of what is updated together."""
    for name in ("0.bias", "2.weight", "2.bias"):
        side[1].state[side[0].get_parameter(name)]["step"].fill_(1 + (name != "2.weight"))


def no_state(side: Side) -> None:
    side[1].state[side[0].get_parameter("0.weight")] = {}


def loaded(side: Side) -> None:
    side[1].load_state_dict(side[1].state_dict())


def other_rate(side: Side) -> None:
    side[1].param_groups[0]["lr"], side[1].param_groups[1]["betas"] = torch.tensor(3e-2), (0.8, 0.9)


ACTS = [
    nothing, other_data, written, without_a_gradient, turned_gradient, other_state, counted_back, no_state, loaded,
    other_rate,
]  # fmt: skip


def optimizers(plain: nn.Module, managed: nn.Module, **options: Any) -> tuple[Side, Side]:
    """Over two groups."""

    def groups(module: nn.Module) -> Any:
        first, *rest = module.parameters()
        return [{"params": [first], "lr": 1e-2}, {"params": rest, "weight_decay": 0.3}]

    fused = torch.optim.AdamW(groups(plain), maximize=True, fused=True)
    return (plain, fused), (managed, hetmem.AdamW(groups(managed), maximize=True, **options))


@pytest.mark.each
@pytest.mark.parametrize("act", ACTS, ids=lambda act: act.__name__)
@pytest.mark.parametrize("placement", ["resident", "host"])
def test_a_step_has_the_bits_of_torch_whatever_was_done_before_it(
    act: Callable[[Side], None], placement: str, tmp_path: Path
) -> None:
    """What is kept from step to step is what it was, or made anew."""
    sides = optimizers(*pair(mlp, placement, tmp_path, chunk_bytes=1 << 16))
    for index, batch in enumerate(vector_batches(5, 8, 64)):
        for module, optimizer in sides:
            loss_of(module, batch).backward()
            if index in (2, 3):
                act((module, optimizer))
            optimizer.step()
            optimizer.zero_grad()
        assert_same_weights(sides[0][0], sides[1][0], f"{index}")
    assert_same_states(sides[0][1], sides[1][1])


def test_a_group_that_is_added_later_may_share_a_chunk_with_others(tmp_path: Path) -> None:
    """It has no states in its first step, and the others have."""
    sides = []
    for module in pair(lambda: nn.Linear(32, 32), "resident", tmp_path):
        kind = hetmem.AdamW if sides else partial(torch.optim.AdamW, fused=True)
        sides.append((module, kind([module.weight], lr=1e-2)))
    for index, batch in enumerate(vector_batches(4, 8, 32)):
        for module, optimizer in sides:
            loss_of(module, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            if index == 1:
                optimizer.add_param_group({"params": [module.bias]})
    assert_same_weights(sides[0][0], sides[1][0])
    assert_same_states(sides[0][1], sides[1][1])


@pytest.mark.each
@precisions
@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 1e-3}, {"loss_scale": 8.0}], ids=["", "clipped", "scaled"])
def test_it_is_one_call_for_each_group(
    options: dict[str, Any], mixed: torch.dtype | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the bits of a model in host memory."""
    _, managed = pair(mlp, "resident", tmp_path, mixed_precision=mixed)
    _, on_host = pair(mlp, "host", tmp_path, mixed_precision=mixed)
    whole, chunks = (optimizers(mlp(), module, **options)[1] for module in (managed, on_host))
    calls: list[int] = []
    for index, (x,) in enumerate(vector_batches(4, 8, 64)):
        for module, optimizer in (whole, chunks):
            scale = optimizer.scale
            scale(loss_of(module, (x if mixed is None else x.to(mixed),))).backward()
        with monkeypatch.context() as patch:
            patch.setattr(torch_private, "fused_adamw", lambda *args, **more: (calls.append(1), KERNEL(*args, **more)))
            whole[1].step()
        chunks[1].step()
        for _, optimizer in (whole, chunks):
            optimizer.zero_grad()
        assert_same_weights(managed, on_host, f"{index}")
        assert len(calls) == 2 or index == 0
        calls.clear()
    assert_same_states(whole[1], chunks[1])


def test_it_is_made_once_where_the_step_of_another_model_fails_and_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both models have one optimizer."""
    pairs = [pair(mlp, placement, tmp_path) for placement in ("resident", "host")]
    plain, managed = (nn.ModuleList(modules) for modules in zip(*pairs, strict=True))
    left = torch.optim.AdamW([{"params": module.parameters()} for module in plain], lr=1e-2, fused=True)
    right = hetmem.AdamW([{"params": module.parameters()} for module in managed], lr=1e-2)
    for index, batch in enumerate(vector_batches(4, 8, 64)):
        for modules in (plain, managed):
            torch.stack([loss_of(module, batch) for module in modules]).sum().backward()
        left.step()
        if index in (0, 2):  # without states, and with them
            with monkeypatch.context() as patch:
                patch.setattr(Passes, "begin_update", _fails_in_host_memory)
                with pytest.raises(torch.OutOfMemoryError):
                    right.step()
        right.step()
        for optimizer in (left, right):
            optimizer.zero_grad()
        assert_same_weights(plain, managed, f"{index}")


def test_a_step_that_fails_in_its_first_group_is_repeated_and_in_a_later_one_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first is the one with the largest parameter, which needs the most room."""
    (plain, left), (managed, right) = optimizers(*pair(mlp, "resident", tmp_path))
    for index, batch in enumerate(vector_batches(4, 8, 64)):
        for module in (plain, managed):
            loss_of(module, batch).backward()
        if index == 2:
            with monkeypatch.context() as patch:
                patch.setattr(torch_private, "fused_adamw", _in_turn(_has_no_memory))
                with pytest.raises(torch.OutOfMemoryError):
                    right.step()
            assert not right.half_stepped
        if index == 3:
            with monkeypatch.context() as patch:
                patch.setattr(torch_private, "fused_adamw", _in_turn(KERNEL, _has_no_memory))
                with pytest.raises(torch.OutOfMemoryError):
                    right.step()
            assert right.half_stepped
            for call in (right.step, right.step, right.forget_step):
                with pytest.raises(RuntimeError, match=r"failed when some .* load a checkpoint"):
                    call()
            assert not right.half_stepped
            return
        for optimizer in (left, right):
            optimizer.step()
            optimizer.zero_grad()
        assert_same_weights(plain, managed, f"{index}")


def _in_turn(*functions: Callable[..., Any]) -> Callable[..., Any]:
    left = iter(functions)
    return lambda *args, **options: next(left)(*args, **options)


def _has_no_memory(*args: Any, **options: Any) -> None:
    raise torch.OutOfMemoryError("none")


def _fails_in_host_memory(passes: Passes, update: Any, scale: float) -> Any:
    if update.chunk.homes[Role.PARAM].tier is Tier.HOST:
        raise torch.OutOfMemoryError("none")
    return BEGIN_UPDATE(passes, update, scale)


@precisions
@pytest.mark.parametrize("overlap", ["backward", "forward"])
def test_nothing_of_it_is_updated_before_the_step_nor_behind_it(
    overlap: Any, mixed: torch.dtype | None, tmp_path: Path
) -> None:
    """So gradients may be edited between a backward and its step."""
    sides = optimizers(*pair(mlp, "resident", tmp_path, mixed_precision=mixed), overlap=overlap)
    managed = sides[1][0]
    reference = optimizers(*pair(mlp, "resident", tmp_path, mixed_precision=mixed))[1]
    for index, (x,) in enumerate(vector_batches(4, 8, 64)):
        for module, optimizer in (sides[1], reference):
            loss_of(module, (x if mixed is None else x.to(mixed),)).backward()
            assert not testing.updates_begun(managed)
            for parameter in module.parameters():
                assert parameter.grad is not None
                parameter.grad.mul_(0.5)
            optimizer.step()
            assert all(parameter.grad is not None for parameter in module.parameters())
            optimizer.zero_grad()
        assert_same_weights(reference[0], managed, f"{index}")


def test_a_state_that_was_put_in_the_place_of_one_is_at_home_after_the_step(tmp_path: Path) -> None:
    """Else its memory would be beside the budget, and beside a home that is stale."""
    _, managed = pair(mlp, "resident", tmp_path, sanitize=False)
    optimizer = hetmem.AdamW(managed.parameters())
    for step in range(4):
        managed(torch.ones(3, 64)).square().mean().backward()
        put = []
        for weight in managed.parameters() if step == 3 else ():
            optimizer.state[weight]["exp_avg"] = torch.ones_like(weight)
            put.append(weakref.ref(optimizer.state[weight]["exp_avg"]))
        optimizer.step()
    gc.collect()
    assert [tensor() for tensor in put] == [None] * 6
