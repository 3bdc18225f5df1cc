"""A model that leaves the device home by home, and where a copy of one fails."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import hetmem
from hetmem import testing
from tests.engine.harness import Recipe, Tower, adamws, pair, token_batches, train_both

ROOM = hetmem.Budget(device="2400KiB", host="8MiB")
"""Whole on the device, with as much again for a small batch."""


def build() -> Tower:
    return Tower(width=64, depth=4)


@pytest.mark.parametrize("call", [0, 3, 7, 19])
def test_a_copy_home_that_fails_is_made_again_with_the_gradients_so_far(call: int, tmp_path: Path) -> None:
    """One that is not dense needs memory to be copied. The operator that needed the room is tried again."""
    plain, managed = pair(build, ROOM, tmp_path)
    optimizers = adamws(plain, managed)
    recipe = Recipe(steps=1, accumulation=2)
    with testing.failing("move a home", lambda: torch.OutOfMemoryError("no memory to copy from"), call) as failed:
        train_both(plain, managed, token_batches(2), recipe, optimizers=optimizers)
        train_both(plain, managed, [*token_batches(1), *token_batches(1, rows=40)], recipe, optimizers=optimizers)
    assert failed()
    assert not testing.of(managed).memory().resident


def test_homes_of_gradients_that_came_to_be_on_the_device_are_counted_as_such_that_may_leave_it(tmp_path: Path) -> None:
    """The count of them came to zero before they had gone, and then nothing seemed to be there that could go."""
    plain, managed = pair(build, ROOM, tmp_path)
    optimizers = adamws(plain, managed)
    train_both(plain, managed, token_batches(2), Recipe(steps=2), optimizers=optimizers)
    inside = testing.of(managed)
    assert inside.leave_device()
    train_both(plain, managed, token_batches(2), Recipe(steps=2), optimizers=optimizers)
    while before := inside.memory().device_home_bytes:
        assert inside.memory().moved_bytes == before
        inside.make_room(1)
        assert inside.memory().device_home_bytes < before
    train_both(plain, managed, token_batches(2), Recipe(steps=2), optimizers=optimizers)
