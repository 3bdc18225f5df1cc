"""Checkpoints and hooks of the user see what autograd saves in hetmem's place: weights among it stay on the device."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.engine.harness import (
    CHUNK,
    WIDTH,
    Recipe,
    assert_same,
    assert_trains_alike,
    budget,
    everywhere,
    loss_of,
    manage,
    pair,
    precisions,
    streamed,
    train_both,
    vector_batches,
)
from tests.engine.parts import OfOwnFunction, Scale

BATCHES = vector_batches(3, 4, WIDTH)


class Normed(nn.Module):
    """A frozen norm, whose weight autograd saves as it is, within a checkpoint."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.part = nn.Sequential(nn.LayerNorm(WIDTH).requires_grad_(False), nn.Linear(WIDTH, WIDTH))
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.part, self.first(x), use_reentrant=self.reentrant)


@pytest.mark.each
@everywhere
@precisions
@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_a_frozen_norm_is_recomputed_and_differentiated_on_the_device(
    placement: str, mixed: torch.dtype | None, reentrant: bool, tmp_path: Path
) -> None:
    assert_trains_alike(partial(Normed, reentrant), placement, tmp_path, mixed)


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))


def kept() -> AbstractContextManager[None]:
    """Hooks that keep the very tensor they are given."""
    return saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)


class Around(nn.Module):
    """The user's hooks are around a part of the forward."""

    def __init__(self, hooks: Callable[[], AbstractContextManager[None]]) -> None:
        super().__init__()
        self.layers, self.hooks = layers(), hooks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self.hooks():
            x = self.layers[1](self.layers[0](x))
        return self.layers[2](x)


@pytest.mark.each
@everywhere
@precisions
@pytest.mark.parametrize("hooks", [kept, save_on_cpu])
def test_hooks_of_the_user_around_a_part_change_no_bit(
    placement: str, mixed: torch.dtype | None, hooks: Callable[[], AbstractContextManager[None]], tmp_path: Path
) -> None:
    assert_trains_alike(partial(Around, hooks), placement, tmp_path, mixed)


@pytest.mark.parametrize("hooks", [kept, save_on_cpu])
def test_hooks_of_the_user_within_a_forward_that_binds_all_weights_at_once_change_no_bit(
    hooks: Callable[[], AbstractContextManager[None]], tmp_path: Path
) -> None:
    """As every forward of a model that is whole on the device does, where nothing checks operators."""
    mixed = torch.bfloat16
    modules = pair(partial(Around, hooks), "resident", tmp_path, mixed_precision=mixed, sanitize=False)
    train_both(*modules, vector_batches(5, 4, WIDTH, dtype=mixed), Recipe(mixed=mixed))


@pytest.mark.each
@streamed
@precisions
def test_hooks_of_the_user_around_the_model_change_no_bit(
    placement: str, mixed: torch.dtype | None, tmp_path: Path
) -> None:
    modules = pair(layers, placement, tmp_path, mixed_precision=mixed)
    with kept():
        train_both(*modules, vector_batches(3, 4, WIDTH, dtype=mixed), Recipe(mixed=mixed))


class AgainByFunction(nn.Module):
    """A function of this module's, not a module, is computed again in the backward of the older checkpoint."""

    def __init__(self, kept_within: bool) -> None:
        super().__init__()
        self.layer, self.kept_within = nn.Linear(WIDTH, WIDTH), kept_within

    def function(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(torch.sin(x), self.layer.weight, self.layer.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with kept() if self.kept_within else nullcontext():
            return checkpoint(self.function, x, use_reentrant=True)  # type: ignore[no-any-return]


@pytest.mark.each
@streamed
@precisions
@pytest.mark.parametrize("inside", [False, True], ids=["around the model", "within"])
def test_hooks_of_the_user_around_a_function_that_is_computed_again_change_no_bit(
    inside: bool, placement: str, mixed: torch.dtype | None, tmp_path: Path
) -> None:
    modules = pair(partial(AgainByFunction, inside), placement, tmp_path, mixed_precision=mixed)
    batches = [(x.requires_grad_(),) for (x,) in vector_batches(3, 4, WIDTH, dtype=mixed)]
    with nullcontext() if inside else kept():
        train_both(*modules, batches, Recipe(steps=3, mixed=mixed))


class OfScale(nn.Module):
    """A function of the user's saves a weight, between two layers."""

    def __init__(self, hooks: Callable[[], AbstractContextManager[None]], reentrant: bool | None) -> None:
        super().__init__()
        self.layers, self.hooks, self.reentrant = layers(), hooks, reentrant
        self.weight = nn.Parameter(torch.ones(WIDTH) + torch.randn(WIDTH) / 8)

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = Scale.apply(x, self.weight)
        return y

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x)
        with self.hooks():
            x = self.scaled(x) if self.reentrant is None else checkpoint(self.scaled, x, use_reentrant=self.reentrant)
            x = self.layers[1](x)
        return self.layers[2](x)


@pytest.mark.each
@streamed
@precisions
@pytest.mark.parametrize("hooks", [kept, save_on_cpu])
@pytest.mark.parametrize("inside", [True, False], ids=["within", "around the model"])
@pytest.mark.parametrize("reentrant", [None, False, True], ids=["no checkpoint", "non-reentrant", "reentrant"])
def test_hooks_of_the_user_see_what_a_function_of_the_user_saves(
    reentrant: bool | None,
    inside: bool,
    hooks: Callable[[], AbstractContextManager[None]],
    placement: str,
    mixed: torch.dtype | None,
    tmp_path: Path,
) -> None:
    within, around = (hooks, nullcontext) if inside else (nullcontext, hooks)
    modules = pair(partial(OfScale, within, reentrant), placement, tmp_path, mixed_precision=mixed, sanitize=True)
    refused = reentrant and inside and mixed is not None  # see docs/limits.md
    with around(), pytest.raises(RuntimeError, match="setStorage") if refused else nullcontext():
        train_both(*modules, vector_batches(3, 4, WIDTH, dtype=mixed), Recipe(steps=3, mixed=mixed))
    assert all(parameter.isfinite().all() for parameter in modules[1].parameters())


def computed_again(module: nn.Module, batch: tuple[torch.Tensor]) -> torch.Tensor:
    """By a checkpoint of the older kind, whose backward has another one within it."""
    output: torch.Tensor = checkpoint(module, *batch, use_reentrant=True)  # type: ignore[no-untyped-call]
    return output.float().square().mean()


class ComputedAgain(nn.Module):
    """`part` behind such a checkpoint."""

    def __init__(self, part: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.part = part()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.part, x, use_reentrant=True)  # type: ignore[no-any-return]


@pytest.mark.each
@streamed
@precisions
@pytest.mark.parametrize("part", [partial(AgainByFunction, False), partial(OfOwnFunction, WIDTH)], ids=["again", "own"])
@pytest.mark.parametrize("within", [True, False], ids=["within", "around the model"])
def test_hooks_of_the_user_around_a_backward_within_a_backward_change_no_bit(
    within: bool, part: Callable[[], nn.Module], placement: str, mixed: torch.dtype | None, tmp_path: Path
) -> None:
    modules = pair(partial(ComputedAgain, part) if within else part, placement, tmp_path, mixed_precision=mixed)
    batches = [(x.requires_grad_(),) for (x,) in vector_batches(3, 4, WIDTH, dtype=mixed)]
    with kept():
        train_both(*modules, batches, Recipe(steps=3, mixed=mixed), loss=loss_of if within else computed_again)


@streamed
def test_hooks_of_the_user_see_the_weights_as_parameters_that_are_equal(placement: str, tmp_path: Path) -> None:
    seen: list[list[torch.Tensor]] = []
    for module in pair(layers, placement, tmp_path):
        found: list[torch.Tensor] = []
        with saved_tensors_hooks(lambda tensor, found=found: found.append(tensor) or tensor, lambda tensor: tensor):
            loss_of(module, BATCHES[0]).backward()
        seen.append(found)
    assert len(seen[0]) == len(seen[1])
    for left, right in zip(*seen, strict=True):
        assert (type(left), left.requires_grad) == (type(right), right.requires_grad)
        assert_same(left, right, "saved")


@pytest.mark.parametrize("frozen", [True, False])
def test_a_managed_model_within_another_saves_its_weights_itself(frozen: bool, tmp_path: Path) -> None:
    """As a teacher does that its student asks: neither is a part of the other."""

    class Student(nn.Module):
        def __init__(self, teacher: nn.Module) -> None:
            super().__init__()
            self.layer, self.ask = nn.Linear(WIDTH, WIDTH), [teacher]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.layer(x)
            return x + self.ask[0](x)

    def teacher() -> nn.Module:
        return layers().requires_grad_(not frozen)

    teachers = pair(teacher, "host", tmp_path)
    students = [Student(teachers[0]), Student(teachers[1])]
    students[1].load_state_dict(students[0].state_dict())
    manage(students[1], "host", tmp_path)
    train_both(*students, BATCHES)
    for left, right in zip(*(model.parameters() for model in teachers), strict=True):
        assert_same(left.grad, right.grad, "gradient of the teacher")


def _halve(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


@pytest.mark.each
@everywhere
@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_a_hook_of_the_user_edits_a_gradient_at_home_within_a_checkpoint(
    placement: str, reentrant: bool, tmp_path: Path
) -> None:
    modules = pair(partial(Normed, reentrant), placement, tmp_path)
    for module in modules:
        module.part[1].weight.register_post_accumulate_grad_hook(_halve)
    train_both(*modules, BATCHES)


class Neighbours(nn.Module):
    """A layer of a graph network: autograd saves the sparse matrix of its edges beside weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.edges = torch.randn(4, 4).tril().to_sparse()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (self.first, self.second):
            x = torch.tanh(torch.sparse.mm(self.edges, layer(x)))
        return x


@everywhere
def test_a_sparse_matrix_is_saved_as_it_is(placement: str, tmp_path: Path) -> None:
    assert_trains_alike(Neighbours, placement, tmp_path)


def many() -> nn.Module:
    """Layers and products whose weights do not fit on the device at once."""
    return nn.Sequential(*(OfTurned() if number % 3 else nn.Linear(WIDTH, WIDTH, bias=False) for number in range(9)))


class OfTurned(nn.Module):
    """Autograd saves a view of its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.t()


@pytest.mark.each
@precisions
@pytest.mark.parametrize("hooks", [kept, save_on_cpu])
@pytest.mark.parametrize("offloaded", ["host", "nvme"])
def test_weights_that_hooks_of_the_user_keep_take_nothing_of_the_device(
    offloaded: str, hooks: Callable[[], AbstractContextManager[None]], mixed: torch.dtype | None, tmp_path: Path
) -> None:
    """Nine weights in the room of three."""
    room = 3 * CHUNK // (1 if mixed is None else 2)
    limits = budget(offloaded, tmp_path, device_chunks=room)
    modules = pair(many, limits, tmp_path, mixed_precision=mixed)
    with hooks():
        train_both(*modules, vector_batches(3, 4, WIDTH, dtype=mixed), Recipe(mixed=mixed))


class KeepsOnItsContext(torch.autograd.Function):
    """`ctx.w = w`, which torch advises against."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.x, ctx.w = x, w
        return x @ w.t()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return gradients[0] @ ctx.w, gradients[0].t() @ ctx.x


class OfKept(OfTurned):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return KeepsOnItsContext.apply(x, self.weight)  # type: ignore[no-any-return]


@streamed
@precisions
def test_a_function_that_keeps_weights_on_its_context_finds_them(
    placement: str, mixed: torch.dtype | None, tmp_path: Path
) -> None:
    """Nine weights in the room of three."""
    limits = budget(placement, tmp_path, device_chunks=3 * CHUNK // (1 if mixed is None else 2))
    modules = pair(lambda: nn.Sequential(*(OfKept() for _ in range(9))), limits, tmp_path, mixed_precision=mixed)
    train_both(*modules, vector_batches(3, 4, WIDTH, dtype=mixed), Recipe(mixed=mixed))
