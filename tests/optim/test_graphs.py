"""Weights that autograd needs once more when their gradient is there, or that somebody holds."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.engine.harness import (
    assert_same_weights,
    loss_of,
    mlp,
    pair,
    streamed,
    vector_batches,
)
from tests.optim.stories import Twins, on_either, on_the_other, one, overlaps, twins


@on_either
def test_a_parameter_unfrozen_while_gradients_accumulate(overlap: str, placement: str, tmp_path: Path) -> None:
    modules = pair(mlp, placement, tmp_path)
    for module in modules:
        module[2].weight.requires_grad_(False)
    both = twins(modules, overlap=overlap)
    batches = vector_batches(6, 4, 64)
    for step in range(6):
        for module, optimizer in both.sides:
            module[2].weight.requires_grad_(step >= 3)
            for batch in batches[step : step + 2]:
                loss_of(module, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert_same_weights(both.plain, both.managed)


@on_the_other
def test_a_graph_of_the_gradients_does_not_disturb_updates(overlap: str, placement: str, tmp_path: Path) -> None:
    both = twins(pair(mlp, placement, tmp_path), overlap=overlap, max_grad_norm=1e9)
    for step, batch in enumerate(vector_batches(5, 4, 64)):
        for module, optimizer in both.sides:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch's, of the cycle that this makes
                loss_of(module, batch).backward(create_graph=step == 3)
            optimizer.step()
            optimizer.zero_grad()
    both.assert_same()


class Late(nn.Module):
    """A weight whose value is needed when its gradient is there."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.weight = nn.Parameter(torch.randn(64, 64) / 8)

    def frozen(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.weight.detach())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(self.first(x)) @ self.weight


class Frozen(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.weight.detach())


class Recomputed(Late):
    """A block that is computed once more within backward uses a weight whose gradient is complete by then."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Frozen(self.weight)

    def frozen(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.block, x, use_reentrant=False)


def assert_never_of_the_new_weights(both: Twins, error: str) -> None:
    """Either torch's bits, or what says `error`."""
    for batch in vector_batches(5, 4, 64):
        try:
            one(both.managed, batch, both.right)
        except RuntimeError as raised:
            assert error in str(raised)  # noqa: PT017
            assert both.right.overlap.value != "off", raised  # noqa: PT017
            return
        one(both.plain, batch, both.left)
        assert_same_weights(both.plain, both.managed)


@overlaps
def test_a_weight_whose_value_is_needed_after_its_gradient(overlap: str, tmp_path: Path) -> None:
    both = twins(pair(Late, "host", tmp_path), overlap=overlap)
    assert_never_of_the_new_weights(both, "modified by an inplace operation")


@overlaps
def test_a_weight_that_is_used_again_within_backward(overlap: str, tmp_path: Path) -> None:
    assert_never_of_the_new_weights(twins(pair(Recomputed, "host", tmp_path), overlap=overlap), "is used again")


class Backwards(nn.Module):
    """Uses its layers in the opposite order, and keeps a view of each weight while `keeps` says so."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(8))
        self.keeps = True
        self.kept: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in reversed(self.layers):
            x = torch.tanh(layer(x))
            self.kept += [layer.weight.detach()] if self.keeps else []
        return x


@streamed
def test_weights_stay_where_they_are_while_views_of_their_copies_are_held(placement: str, tmp_path: Path) -> None:
    """They traded places in the first step, and what the views had held was released as somebody else's."""
    both = twins(pair(Backwards, placement, tmp_path))
    for batch in vector_batches(4, 4, 32):
        both.train([batch])
        assert_same_weights(both.plain, both.managed)
        for module, _ in both.sides:
            module.keeps = False
            module.kept.clear()
