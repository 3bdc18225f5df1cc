"""A model that is whole on the device and computes in 16 bits: its weights are bound once for a forward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import hetmem
from hetmem import testing
from tests.engine.harness import (
    WIDTH,
    Recipe,
    Tower,
    assert_same,
    assert_same_weights,
    manage,
    pair,
    token_batches,
    train_both,
)
from tests.intercept.test_pointers import Raw


class Awkward(nn.Module):
    """A weight that another module uses too, a part that is checkpointed, a pointer that is read, views that are kept,
    a weight that is saved by itself, and, where `writes`, one that the forward writes to."""

    def __init__(self, *, writes: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm, self.scale = nn.LayerNorm(WIDTH), nn.Parameter(torch.ones(WIDTH))
        self.raw = Raw([])
        self.writes, self.kept = writes, [torch.empty(0)]

    def checkpointed(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.layers[0], self.layers[1]
        assert isinstance(first, nn.Linear)
        return F.linear(F.gelu(second(x)), first.weight.t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.writes:
            with torch.no_grad():
                self.scale.mul_(1.5)
                self.norm.weight.data.add_(0.25)
        x = self.norm(self.layers[0](x)) * self.scale
        x = checkpoint(self.checkpointed, x, use_reentrant=False)
        self.kept[0] = self.layers[3].weight[3:]
        return self.layers[2](self.raw(x)) + x[:, :1] * self.kept[0].sum()


def test_awkward_programs_train_as_torch_does(tmp_path: Path) -> None:
    options: dict[str, Any] = {"sanitize": False, "mixed_precision": torch.bfloat16}
    plain, managed = pair(lambda: Awkward(writes=False), "resident", tmp_path, **options)
    batches = [(torch.randn(rows, WIDTH).bfloat16(),) for rows in (3, 3, 3, 5)]
    train_both(plain, managed, batches, Recipe(steps=6, accumulation=2, mixed=torch.bfloat16))
    assert "Awkward" in testing.of(managed).operators(), "it never happened at once"


def test_what_a_forward_writes_to_weights_goes_home_as_it_does_where_they_move(tmp_path: Path) -> None:
    models = []
    for placement in ("resident", "host"):
        torch.manual_seed(0)
        model = Awkward(writes=True)
        models.append(manage(model, placement, tmp_path, sanitize=False, mixed_precision=torch.bfloat16))
    x = torch.randn(3, WIDTH).bfloat16()
    optimizers = [hetmem.AdamW(model.parameters(), lr=1e-2) for model in models]
    for step in range(4):
        losses = [model(x).float().square().mean() for model in models]
        for loss, optimizer in zip(losses, optimizers, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert_same(*losses, f"step {step}")
        assert_same_weights(*models, f"step {step}")
    assert "Awkward" in testing.of(models[0]).operators()


def one_more_step(managed: nn.Module, batch: tuple[torch.Tensor, ...]) -> list[str]:
    """Its moments."""
    before = len(testing.of(managed).operators())
    managed(*batch).backward()
    return testing.of(managed).operators()[before:]


def test_weights_are_bound_once_for_a_forward_and_held_once_for_a_backward(tmp_path: Path) -> None:
    managed = manage(Tower(), "resident", tmp_path, sanitize=False, mixed_precision=torch.bfloat16)
    seen = [one_more_step(managed, batch) for batch in token_batches(4)]
    assert len(seen[0]) > 10
    assert seen[2:] == [["Tower", "backward"]] * 2
    hetmem.release(managed)


def test_a_graph_holds_copies_for_as_long_as_it_lives(tmp_path: Path) -> None:
    managed = manage(Tower(), "resident", tmp_path, sanitize=False, mixed_precision=torch.bfloat16)
    (batch,) = token_batches(1)
    for _ in range(3):
        managed(*batch).backward()
    kept = managed.embedding.weight.data_ptr(), managed(*batch)
    with torch.no_grad():
        managed(*batch)
    assert testing.of(managed).leased() == [], "what is saved is where a weight is, not its memory"
    kept[1].backward()
    assert testing.of(managed).leased() == []
    hetmem.release(managed)
