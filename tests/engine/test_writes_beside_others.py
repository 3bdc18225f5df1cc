"""Writes that torch counts beside writes that it does not, to parameters of one chunk: each counts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.engine.harness import (
    WIDTH,
    Recipe,
    adamws,
    assert_same_weights,
    budget,
    everywhere,
    loss_of,
    mlp,
    pair,
    token_batches,
    train_both,
    vector_batches,
)
from tests.engine.test_share import MIXED, build, chunks_of, room

CHUNK = 1 << 16
"""Bytes of one that has all parameters of `mlp`."""


def counted_first(module: nn.Module) -> None:
    for part in (module[0], module[2], module[4]):
        with torch.no_grad():
            part.weight.mul_(1.5)
        part.bias.data.mul_(0.5)


def counted_last(module: nn.Module) -> None:
    for part in (module[0], module[2], module[4]):
        part.weight.data.mul_(1.5)
        with torch.no_grad():
            part.bias.mul_(0.5)


def replaced(module: nn.Module) -> None:
    module[2].bias.data = module[2].bias.data * 2
    module[0].weight.data.mul_(1.5)


writes = pytest.mark.parametrize("write", [counted_first, counted_last, replaced], ids=lambda write: write.__name__)
KINDS = pytest.mark.parametrize(
    ("mixed", "home_copies"),
    [(None, None), (torch.bfloat16, False), (torch.bfloat16, True)],
    ids=["fp32", "bf16", "bf16 with copies at home"],
)


def trained(
    modules: tuple[nn.Module, nn.Module], mixed: torch.dtype | None, write: Callable[[nn.Module], None]
) -> None:
    """Steps with writes between them."""
    optimizers = None
    for _ in range(3):
        batches = vector_batches(2, 4, WIDTH, dtype=mixed)
        optimizers = train_both(*modules, batches, Recipe(steps=2, mixed=mixed), optimizers=optimizers)
        for module in modules:
            write(module)
        assert_same_weights(*modules)


@pytest.mark.each
@everywhere
@KINDS
@writes
def test_each_of_two_writes_to_one_chunk_reaches_the_next_forward(
    write: Callable[[nn.Module], None],
    mixed: torch.dtype | None,
    home_copies: bool | None,
    placement: str,
    tmp_path: Path,
) -> None:
    """With copies in 16 bits at home, that of the other parameter stayed what it was."""
    changes = {"host": 6 * CHUNK} if placement == "nvme" else {}
    limits = budget(placement, tmp_path, home_copies=home_copies, **changes)
    trained(pair(mlp, limits, tmp_path, mixed_precision=mixed, chunk_bytes=CHUNK), mixed, write)


@MIXED
def test_so_does_each_where_homes_have_moved_to_the_device(mixed: torch.dtype | None, tmp_path: Path) -> None:
    plain, managed = pair(build, room("host", mixed, tmp_path), tmp_path, mixed_precision=mixed)
    optimizers, moved = None, 0
    for _ in range(3):
        recipe = Recipe(steps=3, mixed=mixed)
        optimizers = train_both(plain, managed, token_batches(3), recipe, optimizers=optimizers)
        own, written = (dict(module.named_parameters()) for module in (managed, plain))
        for chunk in chunks_of(managed):
            moved += chunk.moved and len(chunk.parameters) > 1
            for index, name in enumerate(chunk.parameters):
                for parameter in (own[name], written[name]):
                    (parameter.data if index else parameter.detach()).mul_(1.5)
        assert_same_weights(plain, managed)
    assert moved > 0


def test_a_step_refuses_a_weight_that_was_written_beside_one_that_nobody_updates(tmp_path: Path) -> None:
    """Between a backward that updates and its step."""
    plain, managed = pair(mlp, "host", tmp_path, chunk_bytes=CHUNK)
    for module in (plain, managed):
        module[0].bias.requires_grad_(False)
    _, optimizer = adamws(plain, managed, overlap="backward")
    for batch in vector_batches(3, 4, WIDTH):
        optimizer.zero_grad()
        loss_of(managed, batch).backward()
        optimizer.step()
    optimizer.zero_grad()
    loss_of(managed, batch).backward()
    with torch.no_grad():
        managed[0].bias.mul_(2)
        with pytest.raises(RuntimeError, match="after its update had begun"):
            managed[2].weight.mul_(2)
    torch.autograd.graph.increment_version(managed[2].weight)  # as code that torch asks nothing of
    with pytest.raises(RuntimeError, match=r"weights, gradients or hyper-parameters of .* changed after their update"):
        optimizer.step()
