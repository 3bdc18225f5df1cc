"""Gradients that are asked for by parameter: `torch.autograd.grad`, and `backward` with `inputs`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW

import hetmem
from hetmem import Budget
from tests.engine.harness import (
    BATCHES,
    CHUNK,
    WIDTH,
    assert_same,
    assert_same_weights,
    everywhere,
    manage,
    mlp,
    offloaded,
    pair,
    precisions,
)

Asks = Callable[[nn.Module, list[torch.Tensor]], Any]


def loss_of(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = module(x).float().square().mean()
    return loss


def of_one_forward(module: nn.Module, xs: list[torch.Tensor]) -> Any:
    return torch.autograd.grad(loss_of(module, xs[0]), list(module.parameters()))


def beside_an_input(module: nn.Module, xs: list[torch.Tensor]) -> Any:
    x = xs[0].clone().requires_grad_()
    wanted = (module[2].weight, x, module[0].bias, module[2].weight)
    return torch.autograd.grad(loss_of(module, x), wanted)


def of_some_that_are_not_used(module: nn.Module, xs: list[torch.Tensor]) -> Any:
    return torch.autograd.grad(loss_of(module[:2], xs[0]), list(module.parameters()), allow_unused=True)


def with_inputs(module: nn.Module, xs: list[torch.Tensor]) -> Any:
    """What is not named gets no gradient."""
    loss_of(module, xs[0]).backward(inputs=[module[0].weight, module[4].bias])
    return [parameter.grad for parameter in module.parameters()]


def batched(module: nn.Module, xs: list[torch.Tensor]) -> Any:
    out = module(xs[0])[0, :3]
    return torch.autograd.grad(out, list(module.parameters()), torch.eye(3, dtype=out.dtype), is_grads_batched=True)


def left_to_backward(module: nn.Module, xs: list[torch.Tensor]) -> Any:
    """Afterwards gradients arrive as ever."""
    loss = loss_of(module, xs[0])
    found = torch.autograd.grad(loss, list(module.parameters()), retain_graph=True)
    loss.backward()
    return [*found, *(parameter.grad for parameter in module.parameters())]


ASKS: tuple[Asks, ...] = (
    of_one_forward,
    beside_an_input,
    of_some_that_are_not_used,
    with_inputs,
    batched,
    left_to_backward,
)


def twin_of(plain: nn.Module, mixed: torch.dtype | None) -> nn.Module:
    twin = copy.deepcopy(plain)
    return twin if mixed is None else twin.to(mixed)


def assert_all_same(expected: Any, got: Any) -> None:
    """In the dtype of the parameters, which are float32."""
    for index, (one, other) in enumerate(zip(expected, got, strict=True)):
        assert_same(None if one is None else one.to(torch.float32), other, f"{index}")


@pytest.mark.each
@offloaded
@precisions
@pytest.mark.parametrize("asks", ASKS, ids=lambda asks: asks.__name__)
def test_gradients_that_are_asked_for_are_those_of_torch(
    asks: Asks, mixed: torch.dtype | None, placement: str, tmp_path: Path
) -> None:
    plain, managed = pair(mlp, placement, tmp_path, mixed_precision=mixed)
    xs = [batch[0].to(mixed) if mixed else batch[0] for batch in BATCHES]
    for _ in range(2):
        got = asks(managed, xs)
        got = [each.float() if each is not None and each.shape == xs[0].shape else each for each in got]
        assert_all_same(asks(twin_of(plain, mixed), xs), got)
        managed.zero_grad()


def test_weights_in_float32_beside_sixteen_bits_are_found_too(tmp_path: Path) -> None:
    """Those beside running statistics, in a model that is whole on the device, once a forward is not measured."""

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH))

    _, managed = pair(build, "resident", tmp_path, mixed_precision=torch.bfloat16, sanitize=False)
    weights = list(managed.parameters())
    for (x,) in BATCHES:
        loss = loss_of(managed, x)
        found = torch.autograd.grad(loss, weights, retain_graph=True)
        loss.backward(inputs=weights)
        for grad, weight in zip(found, weights, strict=True):
            assert_same(grad, weight.grad, "gradient")
        managed.zero_grad()


def test_a_penalty_adds_to_the_gradients_of_working_weights_in_sixteen_bits(tmp_path: Path) -> None:
    """A norm saves its weight itself: its gradient comes from the first backward's graph and from the forward."""
    plain, managed = pair(
        lambda: nn.LayerNorm(WIDTH), "resident", tmp_path, mixed_precision=torch.bfloat16, sanitize=False
    )
    for (x,) in BATCHES:
        found = []
        for module in (twin_of(plain, torch.bfloat16), managed):
            inputs = x.to(torch.bfloat16).requires_grad_()
            out = module(inputs).float().tanh()
            (grad,) = torch.autograd.grad(out.square().sum(), inputs, create_graph=True)
            (out.sum() + grad.float().square().sum()).backward()
            found.append([parameter.grad for parameter in module.parameters()])
        assert_all_same(*found)
        managed.zero_grad()


@pytest.mark.each
@offloaded
@precisions
def test_those_of_several_forwards_are_added_up(mixed: torch.dtype | None, placement: str, tmp_path: Path) -> None:
    """In 16 bits each forward's becomes float32 first, as those that `backward` adds up."""
    plain, managed = pair(mlp, placement, tmp_path, mixed_precision=mixed)
    xs = [batch[0].to(mixed) if mixed else batch[0] for batch in BATCHES[:2]]
    got = torch.autograd.grad(sum(loss_of(managed, x) for x in xs), list(managed.parameters()))
    twin = twin_of(plain, mixed)
    each = [torch.autograd.grad(loss_of(twin, x), list(twin.parameters())) for x in xs]
    assert_all_same([one.float() + other.float() for one, other in zip(*each, strict=True)], got)


@pytest.mark.each
@offloaded
@precisions
def test_they_may_be_differentiated_again(mixed: torch.dtype | None, placement: str, tmp_path: Path) -> None:
    plain, managed = pair(mlp, placement, tmp_path, mixed_precision=mixed)
    x = BATCHES[0][0].to(mixed) if mixed else BATCHES[0][0]
    found = []
    for module in (twin_of(plain, mixed), managed):
        grads = torch.autograd.grad(loss_of(module, x), list(module.parameters()), create_graph=True)
        sum(grad.float().square().sum() for grad in grads).backward()
        found.append([parameter.grad for parameter in module.parameters()])
    assert_all_same(*found)


def penalised(module: nn.Module, batch: torch.Tensor, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """A step of a critic with a penalty on the gradient of its input (Gulrajani et al. 2017), of which that on the
    gradient's gradient is a part."""
    x = batch.clone().requires_grad_()
    loss = loss_of(module, x)
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    (second,) = torch.autograd.grad(grad.float().square().sum(), x, create_graph=True)
    penalty = loss + (grad.norm(dim=1) - 1).square().mean() + second.square().mean()
    penalty.backward()
    optimizer.step()
    optimizer.zero_grad()
    return [loss, grad, second, penalty]


@pytest.mark.parametrize("overlap", ["off", "backward", "forward"])
def test_a_graph_of_a_gradient_keeps_no_weights_on_the_device(overlap: str, tmp_path: Path) -> None:
    """Nodes that are made in a backward save weights too: eight chunks of them, where the device has room for three."""
    plain = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(8)])
    limits = Budget(device="64MiB", host="64MiB", device_chunks=3 * CHUNK)
    managed = manage(copy.deepcopy(plain), limits, tmp_path)
    sides = [
        (plain, AdamW(plain.parameters(), fused=True)),
        (managed, hetmem.AdamW(managed.parameters(), overlap=overlap)),
    ]
    for (batch,) in BATCHES:
        assert_all_same(*(penalised(module, batch, optimizer) for module, optimizer in sides))
    assert_same_weights(plain, managed)


@everywhere
def test_what_is_not_used_is_the_error_of_torch(placement: str, tmp_path: Path) -> None:
    _, managed = pair(mlp, placement, tmp_path, mixed_precision=torch.bfloat16)
    loss = loss_of(managed[:2], torch.ones(1, WIDTH))
    with pytest.raises(RuntimeError, match="allow_unused=True"):
        torch.autograd.grad(loss, list(managed.parameters()))
