"""Gradients that updates consume, in mixed precision: 16 bits from arrival to update, float32 where that is not exact.

What the program sees of one is its shape: whatever computes with it raises.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hetmem
from hetmem import testing
from hetmem.errors import BudgetError
from tests.engine.harness import (
    CHUNK,
    WIDTH,
    adamws,
    assert_same,
    assert_same_weights,
    loss_of,
    pair,
    reference,
    streamed,
    vector_batches,
)
from tests.optim.test_consumed_gradients import STREAMED, train_apart

HALVES = pytest.mark.parametrize("mixed", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
BF16 = torch.bfloat16
DOWN, UP = (WIDTH, WIDTH // 4), (WIDTH // 4, WIDTH)


def tower(count: int = 8) -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(count)])


def batches(count: int, mixed: torch.dtype = BF16) -> list[Any]:
    return vector_batches(count, 4, WIDTH, dtype=mixed)


@HALVES
def test_two_bytes_of_a_gradient_leave_the_device_and_two_are_set_aside(mixed: torch.dtype, tmp_path: Path) -> None:
    plain, managed = pair(tower, "host", tmp_path, mixed_precision=mixed)
    optimizers = adamws(plain, managed, **STREAMED)
    inside = testing.of(managed)
    sizes = sorted(chunk.home_bytes["param"] for chunk in inside.chunks())
    assert inside.memory().spare_bytes == sum(sizes[-6:]) // 2
    before = inside.link_bytes()["device_to_host"]
    train_apart(plain, managed, optimizers, batches(3, mixed), mixed)
    numel = sum(parameter.numel() for parameter in managed.parameters())
    assert inside.link_bytes()["device_to_host"] - before == 3 * 2 * numel


class Unused(nn.Module):
    """Small layers in one chunk, which waits until the step for the gradient of one that no batch uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.unused = (nn.Linear(*shape, bias=False) for shape in (DOWN, UP, DOWN))
        self.layers = tower(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(self.second(self.first(x)))


def waiting(directory: Path) -> tuple[Any, Any, Any]:
    """Models, one of them managed, and their optimizers, after a backward that has not begun that chunk's update."""
    plain, managed = pair(Unused, "host", directory, mixed_precision=BF16)
    optimizers = adamws(plain, managed, **STREAMED)
    (batch,) = batches(1)
    reference(plain, BF16)(lambda module: loss_of(module, batch))
    loss_of(managed, batch).backward()
    assert not {"first.weight", "second.weight"} & set(testing.updates_begun(managed))
    return plain, managed, optimizers


def test_a_gradient_that_waits_for_its_step_has_its_shape_and_is_stepped(tmp_path: Path) -> None:
    plain, managed, optimizers = waiting(tmp_path)
    expected, got = ([module.first.weight.grad, module.second.weight.grad] for module in (plain, managed))
    for theirs, ours in zip(expected, got, strict=True):
        assert (ours.dtype, ours.shape, ours.device) == (torch.float32, theirs.shape, theirs.device)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    assert_same_weights(plain, managed)


def test_a_model_that_is_released_has_gradients_that_wait_as_ordinary_tensors(tmp_path: Path) -> None:
    plain, managed, _ = waiting(tmp_path)
    hetmem.release(managed)
    for name in ("first.weight", "second.weight"):
        gradients = [module.get_parameter(name).grad for module in (plain, managed)]
        assert_same(*gradients, "a gradient")  # type: ignore[misc]


USES = {
    "clone": lambda grad: grad.clone(),
    "norm": lambda grad: torch.nn.utils.get_total_norm([grad]),
    "add": lambda grad: grad.add_(1.0),
    "data": lambda grad: grad.data.mul_(0.5),
    "view": lambda grad: grad.view(-1).fill_(0.0),
    "element": lambda grad: grad.__setitem__(0, 1.0),
    "foreach": lambda grad: torch._foreach_mul_([grad], 0.5),
    "out": lambda grad: torch.mul(grad, 0.5, out=grad),
}


@pytest.mark.parametrize("use", USES)
def test_a_use_of_it_is_refused_where_it_is_made_and_the_step_goes_on(use: str, tmp_path: Path) -> None:
    plain, managed, optimizers = waiting(tmp_path)
    gradient = managed.get_parameter("first.weight").grad
    with pytest.raises(RuntimeError, match=r"the gradient of first.weight, which only its update reads"):
        USES[use](gradient)
    for optimizer in optimizers:
        optimizer.step()
    assert_same_weights(plain, managed)


def test_a_step_that_is_left_out_zeroes_it(tmp_path: Path) -> None:
    _, managed, (_, optimizer) = waiting(tmp_path)
    optimizer.forget_step()
    optimizer.zero_grad(set_to_none=False)
    hetmem.release(managed)
    gradients = [managed.get_parameter(f"{name}.weight").grad for name in ("first", "second")]
    assert not any(gradient.any() for gradient in gradients if gradient is not None)


def two(placement: Any, directory: Path, build: Any = tower, **options: Any) -> tuple[list[Any], list[Any]]:
    """The same model managed twice, and optimizers of it: with visible gradients, and with ones that it consumes."""
    models = [pair(build, placement, directory, mixed_precision=BF16, **options)[1] for _ in range(2)]
    made = [hetmem.AdamW(models[0].parameters(), lr=1e-2), hetmem.AdamW(models[1].parameters(), lr=1e-2, **STREAMED)]
    return models, made


def step(optimizers: list[Any]) -> None:
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


@streamed
def test_a_hook_of_the_program_finds_and_changes_gradients_in_float32(placement: str, tmp_path: Path) -> None:
    models, optimizers = two(placement, tmp_path)
    seen: list[torch.Tensor] = []

    def third(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        seen.append(parameter.grad.div_(3.0).clone())

    for model in models:
        model.get_parameter("1.weight").register_post_accumulate_grad_hook(third)
    for batch in batches(2):
        for model in models:
            loss_of(model, batch).backward()
        step(optimizers)
        assert_same_weights(*models)
    assert [one.dtype for one in seen] == [torch.float32] * 4
    assert_same(seen[2], seen[3], "what the hook saw")


def test_once_one_gradient_of_a_chunk_has_all_its_bits_the_others_are_ordinary_tensors(tmp_path: Path) -> None:
    models, optimizers = two("host", tmp_path, Unused)
    for model in models:
        model.get_parameter("first.weight").register_post_accumulate_grad_hook(lambda parameter: None)
        loss_of(model, batches(1)[0]).backward()
    before, after = (model.get_parameter("second.weight").grad for model in models)
    assert type(after) is torch.Tensor
    assert_same(before, after, "a gradient that arrived before")
    step(optimizers)
    assert_same_weights(*models)


def forwards(model: nn.Module, batch: Any) -> torch.Tensor:
    """The loss of two forwards, which have a gradient each: their sum has more than 16 bits."""
    (x,) = batch
    return model(x).float().square().mean() + 0.01 * model(-3 * x).float().exp().mean()


@streamed
def test_a_second_gradient_is_added_in_float32(placement: str, tmp_path: Path) -> None:
    models, optimizers = two(placement, tmp_path)
    for batch in batches(3):
        for model in models:
            forwards(model, batch).backward()
        step(optimizers)
        assert_same_weights(*models)


def test_a_gradient_of_the_weight_at_home_is_kept_in_float32(tmp_path: Path) -> None:
    """A loss that uses a weight outside of the forward makes one, which is no sum of 16 bits."""
    models, optimizers = two("host", tmp_path, lambda: tower(3))
    for model in models:
        (model.get_parameter("2.weight") * 0.1234567).square().sum().backward()
    step(optimizers)
    assert_same_weights(*models)


def test_a_sum_that_has_no_room_is_an_error_and_leaves_what_was_there(tmp_path: Path) -> None:
    """Host memory has room for 12 bytes of a parameter and what is set aside, and for no gradient in float32."""
    host = 8 * 3 * CHUNK + 6 * CHUNK // 2
    room = hetmem.Budget(device="1MiB", host=host, device_chunks=8 * CHUNK, home_copies=False)
    _, model = pair(tower, room, tmp_path, mixed_precision=BF16)
    optimizer = hetmem.AdamW(model.parameters(), lr=1e-2, **STREAMED)
    weights = [parameter.clone() for parameter in model.parameters()]
    set_aside, (x,) = testing.of(model).memory().spare_bytes, batches(1)[0]
    with pytest.raises(BudgetError):
        (model(x) + model[-1](-3 * x)).float().square().mean().backward()
    assert [parameter.grad is not None for parameter in model.parameters()].count(True) == 1
    optimizer.forget_step()
    optimizer.zero_grad()
    for before, parameter in zip(weights, model.parameters(), strict=True):
        assert_same(before, parameter.clone(), "a weight")
    loss_of(model, batches(1)[0]).backward()
    optimizer.step()
    assert not any(torch.equal(before, after) for before, after in zip(weights, model.parameters(), strict=True))
    optimizer.synchronize()
    assert testing.of(model).memory().spare_bytes == set_aside
