"""What is planned is what the model is called with, and the user's own tensors stay as they are."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hetmem

BUDGET = hetmem.Budget("1MiB", "8MiB")


class Positioned(nn.Module):
    """All rows share the positions."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(100, 64), nn.Embedding(64, 64)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """tokens: [rows, length], positions: [length]."""
        return (self.words(tokens) + self.places(positions)).sum()


class Masked(nn.Module):
    """Asks in ways of libraries whether its mask leaves anything out, and then makes a table of pairs."""

    def __init__(self, asks: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.words, self.asks = nn.Embedding(100, 64), asks

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """tokens, mask: [rows, length], integers."""
        kept, x = mask.to(device=tokens.device, dtype=torch.bool), self.words(tokens)
        if not self.asks(kept[:, : tokens.shape[1]]):
            x = (kept[:, None, :] & kept[:, :, None]).to(x.dtype) @ x
        return x.sum()


def linear() -> nn.Module:
    return nn.Linear(4, 4)


def total(output: Any) -> Tensor:
    found: Tensor = output.sum()
    return found


@pytest.mark.parametrize("rows", [2, 4, 8])
def test_rows_are_what_tokens_have_and_not_positions(rows: int) -> None:
    tokens, positions = torch.zeros(rows, 64, dtype=torch.long), torch.arange(64)
    assert hetmem.plan(Positioned, (tokens, positions), BUDGET).rows == rows


def test_most_tensors_say_what_rows_are() -> None:
    class Called(nn.Linear):
        def forward(self, mask: Tensor, x: Tensor, y: Tensor) -> Tensor:
            return (super().forward(x) * mask.sum() - y).sum()

    batch = {"mask": torch.ones(16, 16), "x": torch.ones(6, 4), "y": torch.ones(6, 4)}
    assert hetmem.plan(lambda: Called(4, 4), batch, BUDGET).rows == 6


def test_a_mask_is_planned_as_if_it_left_nothing_out() -> None:
    """Shapes count and values do not; what needs them is planned with a real step."""
    tokens, mask = torch.zeros(4, 64, dtype=torch.long), torch.zeros(4, 64, dtype=torch.long)
    batch = {"tokens": tokens, "mask": mask}
    peaks = [
        hetmem.plan(lambda: Masked(torch.all), batch, BUDGET, real=real).peak_bytes["device"] for real in (False, True)
    ]
    assert peaks[1] >= peaks[0] + 4 * 64 * 64 * 4
    with pytest.raises(hetmem.planner.PlanError, match="trace one real step with real=True"):
        hetmem.plan(lambda: Masked(lambda mask: mask.sum() == mask.numel()), batch, BUDGET)


def test_a_batch_that_cannot_be_cut_is_planned_whole() -> None:
    """Four numbers are no four rows to a layer that takes four numbers."""
    plan = hetmem.plan(linear, torch.ones(4), hetmem.Budget("8KiB", "8MiB"), loss=total)
    assert not plan.fits and not any("split" in advice for advice in plan.advice)


@pytest.mark.parametrize("real", [False, True])
def test_inputs_that_ask_for_gradients_are_planned_and_get_none(real: bool) -> None:
    batch = torch.ones(2, 4, requires_grad=True)
    assert hetmem.plan(linear, batch, BUDGET, loss=total, real=real).rows == 2
    assert batch.grad is None and batch.requires_grad


@pytest.mark.parametrize("real", [False, True])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_backward_is_planned_wherever_that_is_asked_for(
    mode: Callable[[], AbstractContextManager[None]], real: bool
) -> None:
    batch = torch.ones(2, 4)
    outside = hetmem.plan(linear, batch, BUDGET, loss=total, real=real)
    with mode():
        assert hetmem.plan(linear, batch, BUDGET, loss=total, real=real) == outside
