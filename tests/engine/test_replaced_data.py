"""`p.data = tensor`: the parameter has other values, and whoever holds what it was before keeps that, as in torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hetmem import testing
from hetmem.errors import ManageError
from tests.engine.harness import (
    BATCHES,
    PLACEMENTS,
    WIDTH,
    adamws,
    assert_same,
    assert_same_grads,
    assert_same_weights,
    both,
    everywhere,
    loss_of,
    mlp,
    pair,
    precisions,
    reference,
    streamed,
    vector_batches,
)

# ---- between forwards --------------------------------------------------------------------------------------------


def exchanged_for_averages(module: nn.Module) -> list[torch.Tensor]:
    """As exponential averages are evaluated: the weights are put away, and come back."""
    averages = [p.detach() * 0.5 for p in module.parameters()]
    away = [p.data for p in module.parameters()]
    for parameter, average in zip(module.parameters(), averages, strict=True):
        parameter.data = average
    with torch.no_grad():
        output = module(*BATCHES[1])
    for parameter, value in zip(module.parameters(), away, strict=True):
        parameter.data = value
    return [output, *averages]


def exchanged(module: Any) -> list[torch.Tensor]:
    """Two weights of one model."""
    module[0].weight.data, module[4].weight.data = module[4].weight.data, module[0].weight.data
    return []


def state_dict_kept(module: nn.Module) -> list[torch.Tensor]:
    kept = module.state_dict()
    for parameter in module.parameters():
        parameter.data = parameter.data * 0.5
    with torch.no_grad():
        return [module(*BATCHES[1]), *kept.values()]


def kept_by_a_graph(module: Any) -> list[torch.Tensor]:
    weight = module[2].weight
    cubes = weight.pow(3).sum()
    weight.data = weight.data * 2
    with torch.no_grad():
        output = module(*BATCHES[1])
    return [output, *torch.autograd.grad(cubes, weight)]


def turned(module: Any) -> list[torch.Tensor]:
    """Another view of the same memory."""
    module[2].weight.data = module[2].weight.data.t()
    return []


WAYS = (exchanged_for_averages, exchanged, state_dict_kept, kept_by_a_graph, turned)


@pytest.mark.each
@everywhere
@precisions
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_what_data_was_before_stays_with_who_holds_it(
    way: Callable[[nn.Module], list[torch.Tensor]], mixed: torch.dtype | None, placement: str, tmp_path: Path
) -> None:
    modules = pair(mlp, placement, tmp_path, mixed_precision=mixed)
    plain = modules[0]
    backward = reference(plain, mixed)
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in modules]
    for batch in vector_batches(2, 4, WIDTH, dtype=mixed):
        found = both(modules, way)
        for index, (left, right) in enumerate(zip(*found, strict=True)):
            if mixed is None or left.shape != BATCHES[1][0].shape:  # the plain one computes in float32
                assert_same(left, right, f"tensor {index}")
        assert_same(backward(lambda module, batch=batch: loss_of(module, batch)), _step(modules[1], batch), "loss")
        assert_same_grads(*modules)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert_same_weights(*modules)


def _step(module: nn.Module, batch: Any) -> torch.Tensor:
    loss = loss_of(module, batch)
    loss.backward()
    return loss


@everywhere
def test_two_models_may_exchange_their_weights(placement: str, tmp_path: Path) -> None:
    """Back and forth, as they do where the average is a model of its own."""
    (tmp_path / "other").mkdir()
    models = pair(mlp, placement, tmp_path)
    others = pair(lambda: mlp(), placement, tmp_path / "other")
    with torch.no_grad():
        for other in others:
            other[2].weight.mul_(2)
    for _ in range(2):
        for model, other in zip(models, others, strict=True):
            for left, right in zip(model.parameters(), other.parameters(), strict=True):
                left.data, right.data = right.data, left.data
        with torch.no_grad():
            for sides in (models, others):
                assert_same(*both(sides, lambda module: module(*BATCHES[0])), "output")
    assert_same_weights(*models)
    assert_same_weights(*others)


@streamed
@pytest.mark.parametrize("first", [True, False], ids=["its first forward", "a later one"])
def test_a_forward_within_the_backward_of_another_model_has_the_new_values(
    first: bool, placement: str, tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    found = []
    for model, other in zip(pair(mlp, placement, tmp_path), pair(mlp, placement, tmp_path / "other"), strict=True):
        if not first:
            other(*BATCHES[0])
        other[2].weight.data = other[2].weight.data * 2
        outputs: list[torch.Tensor] = []
        x = BATCHES[0][0].clone().requires_grad_()
        x.register_hook(lambda grad, other=other, outputs=outputs: outputs.append(other(grad).detach()))
        model(x).sum().backward()
        found.append([*outputs, other(*BATCHES[0]).detach(), other[2].weight.detach()])
    for left, right in zip(*found, strict=True):
        assert_same(left, right, "tensor")


@streamed
def test_new_values_behind_a_backward_of_a_graph_that_no_forward_has_made_are_used(
    placement: str, tmp_path: Path
) -> None:
    """A penalty on weights, behind a step that had no gradients."""
    modules = pair(mlp, placement, tmp_path)
    for module, optimizer in zip(modules, adamws(*modules), strict=True):
        optimizer.step()
        sum(p.square().sum() for p in module.parameters()).backward()
        module[2].weight.data = module[2].weight.data * 2
    assert_same(*both(modules, lambda module: module(*BATCHES[0])), "output")


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_part_of_it_is_refused(placement: str, tmp_path: Path) -> None:
    """It begins where the home does, and was taken for that."""
    _, managed = pair(mlp, placement, tmp_path)
    whole = managed[2].weight.data
    managed[2].weight.data = whole[:32]
    with pytest.raises(ManageError, match=r"2.weight was .*64, 64.* and is .*32, 64"):
        managed(*BATCHES[0])
    managed[2].weight.data = whole
    managed(*BATCHES[0])


@everywhere
@testing.around("give a home away", lambda *_: False)
def test_where_the_old_values_cannot_be_kept_that_is_said(placement: str, tmp_path: Path) -> None:
    plain, managed = pair(mlp, placement, tmp_path)
    kept, new = managed[0].weight.data, torch.ones(WIDTH, WIDTH)
    managed[0].weight.data = new
    with pytest.raises(ManageError, match=r"0.weight.data was set to another tensor, .* keep a clone"):
        managed(*BATCHES[0])
    assert_same(plain[0].weight.detach(), kept, "what is held")
    del kept
    plain[0].weight.data = new
    with torch.no_grad():
        assert_same(*both((plain, managed), lambda module: module(*BATCHES[0])), "output")


@everywhere
@testing.around("give a home away", lambda *_: False)
def test_a_storage_that_was_given_other_memory_needs_none_for_who_holds_it(placement: str, tmp_path: Path) -> None:
    """Before torch 2.13 memory that others share cannot be exchanged."""
    plain, managed = pair(mlp, placement, tmp_path)
    held = managed[0].weight.detach()
    for module in (plain, managed):
        for parameter in module.parameters():
            parameter.data.share_memory_()
    assert held.is_shared()
    for sides in ((plain, managed), (plain, managed)):
        with torch.no_grad():
            assert_same(*both(sides, lambda module: module(*BATCHES[0])), "output")
            for module in sides:
                module[0].weight.mul_(2)
    assert_same(held * 4, managed[0].weight.detach(), "what is held has memory of its own")


# ---- between a forward and its backward ----------------------------------------------------------------------------


def assert_refused_once(modules: tuple[Any, Any], losses: list[torch.Tensor], says: str) -> None:
    """The managed model's backward is an error that `says` so, and the next step is that of plain torch."""
    losses[0].backward()
    with pytest.raises(RuntimeError, match=says):
        losses[1].backward()
    for module in modules:
        module.zero_grad()
    assert_same(*both(modules, lambda module: _step(module, BATCHES[1])), "loss")
    assert_same_grads(*modules)


@streamed
def test_weights_that_a_swap_for_another_forward_took_from_a_graph_are_an_error(placement: str, tmp_path: Path) -> None:
    """The backward had computed with the average, which was the last that came home."""
    modules = pair(mlp, placement, tmp_path)
    for module in modules:
        _step(module, BATCHES[0])
    losses = both(modules, lambda module: loss_of(module, BATCHES[0]))
    both(modules, exchanged_for_averages)
    assert_refused_once(modules, losses, r"weight.data was set .* before another forward")


@streamed
def test_weights_that_move_with_their_values_are_no_change_under_a_graph(placement: str, tmp_path: Path) -> None:
    """As `share_memory_` moves them."""
    modules = pair(mlp, placement, tmp_path)
    losses = both(modules, lambda module: loss_of(module, BATCHES[0]))
    for module in modules:
        for parameter in module.parameters():
            parameter.data = parameter.detach().clone()
        module(*BATCHES[1])
    for loss in losses:
        loss.backward()
    assert_same_grads(*modules)


class Scaled(nn.Module):
    """Of the product autograd saves the parameter itself, and uses what its data is in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.tanh() * self.scale


@streamed
@pytest.mark.parametrize("way", ["set", "set for a forward", "set and set back"])
def test_a_backward_uses_what_the_data_of_a_saved_parameter_is_by_then(
    way: str, placement: str, tmp_path: Path
) -> None:
    modules = pair(lambda: nn.Sequential(mlp(), Scaled(), Scaled()), placement, tmp_path)
    for module in modules:
        loss = loss_of(module, BATCHES[0])
        before = module[1].scale.data
        module[1].scale.data = before * 0.5
        if way != "set":
            module(*BATCHES[1])
        if way == "set and set back":
            module[1].scale.data = before
        loss.backward()
    assert_same_grads(*modules)
    assert_same(*both(modules, lambda module: _step(module, BATCHES[1])), "loss")
