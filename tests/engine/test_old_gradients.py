"""Gradients that users keep after they have taken them out of `p.grad`, and tensors of theirs that they put there."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.engine.harness import (
    BATCHES,
    adamws,
    assert_same,
    assert_same_weights,
    both,
    everywhere,
    loss_of,
    manage,
    mlp,
    pair,
    precisions,
    reference,
    streamed,
)


def gradients(module: nn.Module) -> list[Any]:
    return [parameter.grad for parameter in module.parameters()]


def assert_all_same(left: list[Any], right: list[Any]) -> None:
    for index, (expected, got) in enumerate(zip(left, right, strict=True)):
        assert_same(expected, got, f"{index}")


@pytest.mark.each
@everywhere
@precisions
def test_a_gradient_that_is_kept_stays_as_it_is(mixed: torch.dtype | None, placement: str, tmp_path: Path) -> None:
    """As in the surgery of gradients of several losses, which are asked for one after the other."""
    plain, managed = pair(mlp, placement, tmp_path, mixed_precision=mixed)
    optimizers = adamws(plain, managed)
    backward = reference(plain, mixed)
    kept: tuple[list[Any], list[Any]] = [], []
    for batch in BATCHES:
        x = batch[0].to(mixed) if mixed else batch[0]
        for module in (plain, managed):
            module.zero_grad()
        backward(lambda module, x=x: loss_of(module, (x,)))
        loss_of(managed, (x,)).backward()
        for mine, module in zip(kept, (plain, managed), strict=True):
            mine.extend(gradients(module))
        for optimizer in optimizers:
            optimizer.step()
        assert_all_same(*kept)
    assert_same_weights(plain, managed)


@streamed
def test_a_view_of_an_earlier_gradient_is_warned_of_once(placement: str, tmp_path: Path) -> None:
    module = manage(mlp(), placement, tmp_path)
    views = []
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for batch in BATCHES[:3]:
            module.zero_grad()
            loss_of(module, batch).backward()
            views.append([parameter.grad.detach() for parameter in module.parameters()])
    assert len(seen) == 1
    assert re.search(r"a view of an earlier p\.grad of .* a clone", str(seen[0].message))


@pytest.mark.each
@streamed
@pytest.mark.parametrize("overlap", ["off", "backward", "forward"])
def test_gradients_that_nobody_keeps_are_not_copied(overlap: str, placement: str, tmp_path: Path) -> None:
    """The same tensor shows them in every step."""
    plain, managed = pair(mlp, placement, tmp_path)
    optimizer = adamws(plain, managed, overlap=overlap)[1]
    shown: list[list[int]] = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for batch in BATCHES:
            loss_of(managed, batch).backward()
            shown.append([id(parameter.grad) for parameter in managed.parameters()])
            optimizer.step()
            optimizer.zero_grad()
    assert shown[0] == shown[1] == shown[2] == shown[3]


def flat(module: nn.Module) -> torch.Tensor:
    """All gradients are parts of one tensor from now on."""
    parameters = list(module.parameters())
    memory = torch.zeros(sum(parameter.numel() for parameter in parameters))
    for parameter, part in zip(parameters, memory.split([p.numel() for p in parameters]), strict=True):
        parameter.grad = part.view_as(parameter)
    return memory


def one_for_two(module: nn.Module) -> torch.Tensor:
    """Two weights have one gradient, which is the sum of theirs."""
    shared = torch.ones_like(module[0].weight)
    module[0].weight.grad = module[2].weight.grad = shared
    return shared


@pytest.mark.each
@everywhere
@pytest.mark.parametrize("put", [flat, one_for_two], ids=lambda put: put.__name__)
def test_a_backward_adds_to_the_tensor_that_the_user_put_there(put: Any, placement: str, tmp_path: Path) -> None:
    modules = pair(mlp, placement, tmp_path)
    optimizers = adamws(*modules)
    for index in range(2):
        mine = both(modules, put)
        for batch in BATCHES[index : index + 2]:
            both(modules, lambda module, batch=batch: loss_of(module, batch).backward())
            assert_same(*mine, f"{index}")
        for tensor in mine:
            tensor.mul_(0.5)
        for optimizer in optimizers:
            optimizer.step()
        assert_same_weights(*modules, f"{index}")
        for module in modules:
            module.zero_grad()


@everywhere
def test_a_backward_in_sixteen_bits_adds_to_it_in_its_own(placement: str, tmp_path: Path) -> None:
    plain, managed = pair(mlp, placement, tmp_path, mixed_precision=torch.bfloat16)
    backward = reference(plain, torch.bfloat16)
    for module in (plain, managed):
        module[0].weight.grad = torch.ones_like(module[0].weight)
    mine, x = managed[0].weight.grad, BATCHES[0][0].bfloat16()
    backward(lambda module: loss_of(module, (x,)))
    loss_of(managed, (x,)).backward()
    assert managed[0].weight.grad is mine
    assert_same(plain[0].weight.grad, mine, "gradient")


class Tied(nn.Module):
    """An embedding with sparse gradients, and a head over the same weight, whose gradients are dense."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, 64, sparse=True)
        self.ballast = nn.Linear(64, 64)

    def forward(self, tokens: torch.Tensor, *, dense: bool) -> torch.Tensor:
        x = self.ballast(self.embedding(tokens))
        return (x @ self.embedding.weight.detach().t() if not dense else self.embedding.weight).square().mean()


@pytest.mark.each
@everywhere
@pytest.mark.parametrize("order", [(False, True), (True, False), (False, False, True)])
def test_sparse_and_dense_gradients_add_up(order: tuple[bool, ...], placement: str, tmp_path: Path) -> None:
    modules = pair(Tied, placement, tmp_path)
    for dense in order:
        both(modules, lambda module, dense=dense: module(torch.arange(7), dense=dense).backward())
    left, right = (module.embedding.weight.grad for module in modules)
    assert left.layout is right.layout
    assert_same(left.to_dense(), right.to_dense(), "gradient")
