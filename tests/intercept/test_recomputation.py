"""What a checkpoint computes once more within a backward finds weights and inputs as it did in the forward."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential, set_checkpoint_early_stop

import hetmem
from tests.engine.harness import (
    WIDTH,
    assert_same,
    assert_same_weights,
    assert_trains_alike,
    loss_of,
    offloaded,
    pair,
    precisions,
    streamed,
    train_both,
    vector_batches,
)


class Again(torch.autograd.Function):
    """A checkpoint of the user's own: it computes `function` once more in its backward."""

    @staticmethod
    def forward(ctx: Any, function: Callable[..., torch.Tensor], *args: torch.Tensor) -> torch.Tensor:
        ctx.function = function
        ctx.save_for_backward(*args)
        with torch.no_grad():
            return function(*args)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        args = [arg.detach().requires_grad_(arg.requires_grad) for arg in ctx.saved_tensors]
        with torch.enable_grad():
            output = ctx.function(*args)
        torch.autograd.backward(output, grad)
        return None, *(arg.grad for arg in args)


non_reentrant: Callable[..., torch.Tensor] = partial(checkpoint, use_reentrant=False)


def late(function: Callable[..., torch.Tensor], *args: torch.Tensor) -> torch.Tensor:
    """Without an early stop, as `checkpoint` has it by default."""
    with set_checkpoint_early_stop(False):
        return non_reentrant(function, *args)


def nested(function: Callable[..., torch.Tensor], *args: torch.Tensor) -> torch.Tensor:
    return non_reentrant(partial(non_reentrant, function), *args)


WAYS: dict[str, Callable[..., torch.Tensor]] = {
    "reentrant": partial(checkpoint, use_reentrant=True),
    "non-reentrant": non_reentrant,
    "late": late,
    "nested": nested,
    "of the user": Again.apply,
}
ways = pytest.mark.parametrize("way", WAYS)


class Bare(nn.Module):
    """Checkpoints of functions, one of them `times` in turn, that use weights without the modules that they belong
    to, and not at first."""

    def __init__(self, way: Callable[..., torch.Tensor], times: int = 2) -> None:
        super().__init__()
        self.times = times
        self.first, self.second, self.third = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.gain = nn.Parameter(torch.full((WIDTH,), 1.1))
        self.way = way

    def part(self, x: torch.Tensor) -> torch.Tensor:
        x = F.layer_norm(torch.sin(x), (WIDTH,), self.norm.weight, self.norm.bias)
        return torch.tanh(F.linear(x, self.second.weight)) * self.gain

    def other(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(torch.cos(x), self.third.weight) @ self.third.weight * self.third.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for _ in range(self.times):
            x = self.way(self.part, x)
        return self.way(self.other, x)


@pytest.mark.each
@offloaded
@precisions
@ways
def test_a_function_finds_weights_where_the_forward_did(
    way: str, mixed: torch.dtype | None, placement: str, tmp_path: Path
) -> None:
    # A backward within the backward gives a gradient of its own: hetmem adds those in float32, plain copies in 16 bits.
    times = 1 if mixed is not None and way in ("reentrant", "of the user") else 2
    assert_trains_alike(partial(Bare, WAYS[way], times), placement, tmp_path, mixed)


class Turned(nn.Module):
    """A layer with an input beside the activations that is a float32 tensor, as the cosines of positions are."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return self.layer((x * table).to(x.dtype))


class Positions(nn.Module):
    def __init__(self, way: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.first, self.turned, self.way = nn.Linear(WIDTH, WIDTH), Turned(), way
        self.table = [torch.arange(WIDTH).cos()]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.way(self.turned, self.first(x), self.table[0])


@pytest.mark.each
@streamed
@precisions
@ways
def test_a_module_gets_the_inputs_that_the_forward_gave_it(
    way: str, mixed: torch.dtype | None, placement: str, tmp_path: Path
) -> None:
    """Only what the user hands to the model itself is cast."""
    assert_trains_alike(partial(Positions, WAYS[way]), placement, tmp_path, mixed)


def layers() -> nn.Sequential:
    parts = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Tanh()) for _ in range(4)]
    return nn.Sequential(*parts)


@pytest.mark.each
@offloaded
@precisions
@pytest.mark.parametrize("way", ["reentrant", "non-reentrant", "nested"])
@pytest.mark.parametrize("parts", [1, 2], ids=["whole", "in parts"])
def test_a_checkpoint_around_the_model_changes_no_bit(
    way: str, parts: int, mixed: torch.dtype | None, placement: str, tmp_path: Path
) -> None:
    def loss(module: nn.Module, batch: tuple[torch.Tensor]) -> torch.Tensor:
        (x,) = batch
        x = x.clone().requires_grad_()
        if parts == 1:
            output = WAYS[way](module, x)
        else:
            output = checkpoint_sequential(module, parts, x, use_reentrant=way == "reentrant")
        return output.float().square().mean()

    assert_trains_alike(layers, placement, tmp_path, mixed, loss=loss)


@pytest.mark.each
@streamed
@pytest.mark.parametrize("way", ["reentrant", "non-reentrant"])
def test_a_checkpoint_around_the_model_casts_inputs_again(way: str, placement: str, tmp_path: Path) -> None:
    _, managed = pair(layers, placement, tmp_path, mixed_precision=torch.bfloat16)
    gradients = []
    for call in (lambda module, x: module(x), WAYS[way]):
        x = vector_batches(1, 4, WIDTH)[0][0].requires_grad_()
        call(managed, x).float().square().mean().backward()
        gradients.append([x.grad, *(p.grad.clone() for p in managed.parameters() if p.grad is not None)])
        managed.zero_grad()
    assert all(torch.equal(left, right) for left, right in zip(*gradients, strict=True))


class Derived(nn.Module):
    """A forward that differentiates, through a checkpoint, as those of forces do."""

    def __init__(self, way: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.bare, self.last = Bare(way), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = self.bare(x).square().sum()
            (energy * 0.5).backward(retain_graph=False)
        assert x.grad is not None
        return self.last(x.grad)


@pytest.mark.each
@offloaded
@ways
def test_a_backward_within_a_forward_finds_weights(way: str, placement: str, tmp_path: Path) -> None:
    assert_trains_alike(partial(Derived, WAYS[way]), placement, tmp_path)


@pytest.mark.each
@offloaded
@precisions
@ways
def test_hooks_of_the_user_find_parameters_at_home(
    way: str, mixed: torch.dtype | None, placement: str, tmp_path: Path
) -> None:
    """Also where a checkpoint runs a backward of its own: an optimizer may step there."""
    modules = pair(partial(Bare, WAYS[way]), placement, tmp_path, mixed_precision=mixed)
    places: list[tuple[int, int]] = []

    def step(parameter: torch.Tensor, home: int) -> None:
        places.append((parameter.data_ptr(), home))
        assert parameter.grad is not None
        with torch.no_grad():
            parameter.sub_(parameter.grad, alpha=0.1)
        parameter.grad = None

    for module in modules if mixed is None else modules[1:]:
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(partial(step, home=parameter.data_ptr()))
        for batch in vector_batches(2, 4, WIDTH):
            loss_of(module, batch).backward()
    assert places
    assert all(place == home for place, home in places)
    if mixed is None:
        assert_same_weights(*modules)


@pytest.mark.each
@streamed
@ways
def test_a_recomputation_that_raises_leaves_a_model_that_trains_on(way: str, placement: str, tmp_path: Path) -> None:
    modules = pair(partial(Bare, WAYS[way]), placement, tmp_path)
    batches = vector_batches(3, 4, WIDTH)
    optimizers = train_both(*modules, batches)
    for module in modules:
        part, calls = module.part, []

        def fails(x: torch.Tensor, part: Callable[..., torch.Tensor] = part, calls: Any = calls) -> torch.Tensor:
            calls.append(0)
            if len(calls) == 2:
                raise KeyError("again")
            return part(x)

        module.part = fails
        with pytest.raises(KeyError):
            loss_of(module, batches[0]).backward()
        del module.part
        module.zero_grad()
    assert_same_weights(*modules)
    train_both(*modules, batches, optimizers=optimizers)


class Leaning(nn.Module):
    """A layer that computes with the weight of another one too, and notes whether either is its model's parameter."""

    def __init__(self, other: nn.Linear) -> None:
        super().__init__()
        self.weight, self.others = nn.Parameter(torch.eye(WIDTH)), [other]
        self.own: set[nn.Parameter] = set()
        self.seen: list[tuple[bool, bool]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        other = self.others[0].weight
        self.seen += ((self.weight in self.own, other in self.own),)
        return torch.tanh(F.linear(F.linear(x, self.weight), other))


class Leant(nn.Module):
    def __init__(self, way: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.way = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), way
        self.leaning = Leaning(self.last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.way(self.leaning, self.first(x)))


@pytest.mark.parametrize("way", ["reentrant", "non-reentrant"])
def test_a_recomputation_has_working_weights_in_what_it_calls_alone(way: str, tmp_path: Path) -> None:
    """It costs what it uses, not what there is; what else it uses gets the bits of the forward all the same."""
    modules = pair(partial(Leant, WAYS[way]), "host", tmp_path)
    batches = vector_batches(3, 4, WIDTH)
    train_both(*modules, batches)
    assert_same_weights(*modules)
    leaning = modules[1].leaning
    leaning.own, leaning.seen = {*modules[1].parameters()}, []
    loss_of(modules[1], batches[0]).backward()
    assert {*leaning.seen} == {(False, False), (False, True)}
    assert modules[1].last.weight in leaning.own


def test_a_function_finds_weights_that_evaluations_have_released() -> None:
    """Of a model that is whole on the device, between a forward and its backward."""
    budget, device = hetmem.Budget(device="64MiB", host="64MiB"), hetmem.SimDevice()
    model = hetmem.manage(Bare(non_reentrant), budget, device=device, mixed_precision=torch.bfloat16)
    x = torch.randn(4, WIDTH)

    def gradients(evaluations: int) -> torch.Tensor:
        loss = loss_of(model, (x,))
        for _ in range(evaluations):
            with torch.no_grad():
                model(x)
        loss.backward()
        found = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        model.zero_grad()
        return found

    expected = [gradients(0) for _ in range(6)][-1]
    for _ in range(3):
        assert_same(expected, gradients(2), "gradients")
