"""A model that leaves the device home by home, and where a copy of one fails."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

import hetmem
from hetmem.engine import rehome
from hetmem.intercept import registry
from tests.runtime.harness import Recipe, Tower, adamws, pair, token_batches, train_both

ROOM = hetmem.Budget(device="2400KiB", host="8MiB")
"""Whole on the device, with as much again for a small batch."""


def build() -> Tower:
    return Tower(width=64, depth=4)


@pytest.mark.parametrize("call", [0, 3, 7, 19])
def test_a_copy_home_that_fails_is_made_again_with_the_gradients_so_far(
    call: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is not dense needs memory to be copied. The operator that needed the room is tried again."""
    copy_home, calls = rehome._copy, itertools.count()

    def no_memory_once(target: torch.Tensor, source: torch.Tensor) -> None:
        if next(calls) == call:
            raise torch.OutOfMemoryError("no memory to copy from")
        copy_home(target, source)

    monkeypatch.setattr(rehome, "_copy", no_memory_once)
    plain, managed = pair(build, ROOM, tmp_path)
    optimizers = adamws(plain, managed)
    recipe = Recipe(steps=1, accumulation=2)
    train_both(plain, managed, token_batches(2), recipe, optimizers=optimizers)
    train_both(plain, managed, [*token_batches(1), *token_batches(1, rows=40)], recipe, optimizers=optimizers)
    assert next(calls) > call, "no copy has failed"
    assert not registry.of_module(managed).runtime.memory.resident


def test_homes_of_gradients_that_came_to_be_on_the_device_are_counted_as_such_that_may_leave_it(tmp_path: Path) -> None:
    """The count of them came to zero before they had gone, and then nothing seemed to be there that could go."""
    plain, managed = pair(build, ROOM, tmp_path)
    optimizers = adamws(plain, managed)
    train_both(plain, managed, token_batches(2), Recipe(steps=2), optimizers=optimizers)
    runtime = registry.of_module(managed).runtime
    memory, room = runtime.memory, runtime.room
    assert room._leave_device(0)
    train_both(plain, managed, token_batches(2), Recipe(steps=2), optimizers=optimizers)
    while memory.device_home_bytes:
        before = memory.device_home_bytes
        assert memory.moved_bytes == before
        room._let_homes_go(memory.room_bytes(0) - room._all_slots * memory.device_pool.slot_bytes + 1)
        assert memory.device_home_bytes < before
    train_both(plain, managed, token_batches(2), Recipe(steps=2), optimizers=optimizers)
