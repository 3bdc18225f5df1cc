"""Weights that autograd needs once more when their gradient is there, or that somebody holds."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hetmem
from tests.optim.stories import OVERLAPS, adamw, one
from tests.runtime.harness import (
    STREAMED,
    assert_same_states,
    assert_same_weights,
    loss_of,
    mlp,
    pair,
    vector_batches,
)


@pytest.mark.parametrize("placement", STREAMED)
@pytest.mark.parametrize("overlap", OVERLAPS)
def test_a_parameter_unfrozen_while_gradients_accumulate(overlap: str, placement: str, tmp_path: Path) -> None:
    plain, managed = pair(mlp, placement, tmp_path)
    left = adamw(plain.parameters())
    right = hetmem.AdamW(managed.parameters(), lr=1e-2, overlap=overlap)
    for module in (plain, managed):
        module[2].weight.requires_grad_(False)
    batches = vector_batches(6, 4, 64)
    for step in range(6):
        if step == 3:
            for module in (plain, managed):
                module[2].weight.requires_grad_(True)
        for module, optimizer in ((plain, left), (managed, right)):
            for batch in batches[step : step + 2]:
                loss_of(module, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert_same_weights(plain, managed)


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_a_weight_whose_value_is_needed_after_its_gradient(overlap: str, tmp_path: Path) -> None:
    """Either torch's bits or an error; never the new weights."""

    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(64, 64)
            self.weight = nn.Parameter(torch.randn(64, 64) / 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            x = torch.tanh(x @ self.weight.detach())
            return x @ self.weight

    plain, managed = pair(Late, "host", tmp_path)
    left = adamw(plain.parameters())
    right = hetmem.AdamW(managed.parameters(), lr=1e-2, overlap=overlap)
    for batch in vector_batches(5, 4, 64):
        try:
            one(managed, batch, right)
        except RuntimeError as error:
            assert "modified by an inplace operation" in str(error)  # noqa: PT017
            return
        one(plain, batch, left)
        assert_same_weights(plain, managed)


@pytest.mark.parametrize("placement", STREAMED)
@pytest.mark.parametrize("overlap", OVERLAPS)
def test_a_graph_of_the_gradients_does_not_disturb_updates(overlap: str, placement: str, tmp_path: Path) -> None:
    plain, managed = pair(mlp, placement, tmp_path)
    left = adamw(plain.parameters())
    right = hetmem.AdamW(managed.parameters(), lr=1e-2, overlap=overlap, max_grad_norm=1e9)
    for step, batch in enumerate(vector_batches(5, 4, 64)):
        for module, optimizer in ((plain, left), (managed, right)):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch's, of the cycle that this makes
                loss_of(module, batch).backward(create_graph=step == 3)
            optimizer.step()
            optimizer.zero_grad()
    assert_same_weights(plain, managed)
    assert_same_states(left, right)


class Frozen(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.weight.detach())


class Recomputed(nn.Module):
    """A block that is computed once more within backward uses a weight whose gradient is complete by then."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.weight = nn.Parameter(torch.randn(64, 64) / 8)
        self.block = Frozen(self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.block, self.first(x), use_reentrant=False) @ self.weight


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_a_weight_that_is_used_again_within_backward(overlap: str, tmp_path: Path) -> None:
    """Either torch's bits or an error; never the new weights."""
    plain, managed = pair(Recomputed, "host", tmp_path)
    left, right = adamw(plain.parameters()), hetmem.AdamW(managed.parameters(), lr=1e-2, overlap=overlap)
    for batch in vector_batches(5, 4, 64):
        try:
            one(managed, batch, right)
        except RuntimeError as error:
            assert "overlap" in str(error)  # noqa: PT017
            return
        one(plain, batch, left)
        assert_same_weights(plain, managed)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x) * self.scale


@pytest.mark.parametrize("placement", STREAMED)
def test_states_of_a_single_number_are_undone_and_made_again(placement: str, tmp_path: Path) -> None:
    """They look like a step count."""
    plain, managed = pair(Scaled, placement, tmp_path)
    left = adamw(plain.parameters())
    right = hetmem.AdamW(managed.parameters(), lr=1e-2, overlap="speculative", max_grad_norm=1e-2)
    for batch in vector_batches(5, 4, 64):
        loss_of(managed, batch).backward()
        right.step()
        right.zero_grad()
        loss_of(plain, batch).backward()
        for parameter in plain.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(1e-2 / (right.grad_norm + 1e-6))
        left.step()
        left.zero_grad()
        assert_same_states(left, right)
    assert_same_weights(plain, managed)


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


@pytest.mark.parametrize("placement", STREAMED)
def test_weights_stay_where_they_are_while_views_of_their_copies_are_held(placement: str, tmp_path: Path) -> None:
    """They traded places in the first step, and what the views had held was released as somebody else's."""
    plain, managed = pair(Backwards, placement, tmp_path)
    left, right = adamw(plain.parameters()), hetmem.AdamW(managed.parameters(), lr=1e-2)
    for batch in vector_batches(4, 4, 32):
        one(plain, batch, left)
        one(managed, batch, right)
        assert_same_weights(plain, managed)
        for module in (plain, managed):
            module.keeps = False
            module.kept.clear()
