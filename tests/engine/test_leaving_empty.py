"""Chunks that hold nothing, once parameters lie in order of use, leave the device with the others."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import hetmem
from hetmem import testing
from tests.engine.harness import adamws, pair, train_both, vector_batches


class OutOfOrder(nn.Module):
    """Three chunks in the order of registration, two in that of use."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(rows, 32) / 8 for rows in (75, 75, 50, 50))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x @ self.weights[number].t() for number in (0, 2, 1, 3)], 1)


def test_a_chunk_that_was_emptied_leaves_the_device_too(tmp_path: Path) -> None:
    plain, managed = pair(OutOfOrder, hetmem.Budget(device="16MiB", host="8MiB"), tmp_path)
    inside, optimizers = testing.of(managed), adamws(plain, managed)
    assert [len(chunk.parameters) for chunk in inside.chunks()] == [1, 2, 1]
    inside.make_room(0)
    train_both(plain, managed, vector_batches(2, 4, 32), optimizers=optimizers)
    assert [len(chunk.parameters) for chunk in inside.chunks()] == [2, 2, 0]
    inside.make_room()
    assert inside.homes() == {"host"}
    train_both(plain, managed, vector_batches(2, 4, 32), optimizers=optimizers)
