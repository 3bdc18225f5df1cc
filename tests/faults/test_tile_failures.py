"""Tiles of an update that fail while others of their chunk have been computed: the chunk is as it
was, and a step that is repeated updates it, or the optimizer says that a checkpoint must be loaded."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hetmem
from hetmem import testing
from hetmem.errors import CheckpointError
from tests.engine.harness import (
    adamws,
    assert_same_states,
    assert_same_weights,
    budget,
    loss_of,
    mlp,
    pair,
    same_bits,
    vector_batches,
)

Task = Callable[[], None]


class BrokenTiles:
    """Has some tiles of each batch of at least two raise, before they have done anything, while it is `broken`."""

    broken: Callable[[int], bool] = staticmethod(lambda place: False)

    def begun(self, begin: Any, pool: Any, tasks: Sequence[Task], after: Callable[[], None] | None = None) -> Any:
        return begin(pool, [self._wrapped(place, task) for place, task in enumerate(tasks)], after)

    def _wrapped(self, place: int, task: Task) -> Task:
        def run() -> None:
            if self.broken(place):
                raise MemoryError(f"of tile {place}")
            task()

        return run


@pytest.fixture
def of_tiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[BrokenTiles]:
    monkeypatch.setattr("hetmem.cpu.workers.TILE_ELEMENTS", 512)
    monkeypatch.setattr("hetmem.cpu.adamw.SHARED_TILE_ELEMENTS", 512)
    monkeypatch.setattr("hetmem.cpu.adamw.most_threads", lambda: 2)
    made = BrokenTiles()
    with testing.around("begin tasks", made.begun):
        yield made


def odd(place: int) -> bool:
    return place % 2 == 1


def every(place: int) -> bool:
    return True


def optimizers(name: str, plain: nn.Module, managed: nn.Module, **options: Any) -> tuple[Any, Any]:
    if name == "adamw":
        return adamws(plain, managed, **options)
    kind = getattr(torch.optim, name)
    left = kind(plain.parameters(), lr=1e-2, foreach=False)
    return left, hetmem.optim.offload(kind, managed.parameters(), lr=1e-2, **options)


def step_at_last(optimizer: Any, of_tiles: BrokenTiles, tries: list[Callable[[int], bool]]) -> int:
    """`step`, repeated with other tiles broken each time, and then with none; how often it has failed."""
    failed, call = 0, optimizer.step
    for of_tiles.broken in [*tries, lambda place: False]:
        with contextlib.suppress(MemoryError):
            failed += 1
            call()
            call = optimizer.synchronize
            call()
            failed -= 1
    return failed


@pytest.mark.each
@pytest.mark.parametrize(("overlap", "at"), [("off", 0), ("off", 1), ("forward", 0)])
@pytest.mark.parametrize(("where", "broken"), [("nvme", odd), ("nvme", every)])
@pytest.mark.parametrize("name", ["adamw", "Adagrad"])
def test_a_chunk_of_which_nothing_was_written_at_home_is_updated_by_the_step_that_is_repeated(
    name: str, where: str, broken: Callable[[int], bool], overlap: str, at: int, tmp_path: Path, of_tiles: BrokenTiles
) -> None:
    plain, managed = pair(mlp, where, tmp_path)
    left, right = optimizers(name, plain, managed, overlap=overlap)
    for number, batch in enumerate(vector_batches(3, 8, 64)):
        for module in (plain, managed):
            loss_of(module, batch).backward()
        left.step()
        failed = step_at_last(right, of_tiles, [broken] if number == at else [])
        assert bool(failed) == (number == at)
        for optimizer in (left, right):
            optimizer.zero_grad()
        assert_same_weights(plain, managed, f"{number}")
        assert_same_states(left, right, f"{number}")
    hetmem.release(managed)


@pytest.mark.each
@pytest.mark.parametrize("name", ["adamw", "Adagrad"])
@pytest.mark.parametrize("overlap", ["off", "backward", "forward"])
@pytest.mark.parametrize("placement", ["host", "states on nvme"])
def test_a_chunk_that_was_half_updated_at_home_is_lost_until_a_checkpoint_is_loaded(
    placement: str, overlap: str, name: str, tmp_path: Path, of_tiles: BrokenTiles
) -> None:
    partly = budget("nvme", tmp_path, host="192KiB", device_chunks="96KiB")
    plain, managed = pair(mlp, placement if placement == "host" else partly, tmp_path)
    left, right = optimizers(name, plain, managed, overlap=overlap)
    first, second = vector_batches(2, 8, 64)
    for module, optimizer in ((plain, left), (managed, right)):
        loss_of(module, first).backward()
        optimizer.step()
        optimizer.zero_grad()
    hetmem.save(tmp_path / "saved", managed, right)
    of_tiles.broken = odd
    with pytest.raises(MemoryError):  # noqa: PT012 - as soon as one is told of
        loss_of(managed, second).backward()
        right.step()
        right.synchronize()
    of_tiles.broken = lambda place: False
    for _ in managed.parameters():  # errors of other chunks
        with contextlib.suppress(MemoryError):
            right.synchronize()
    with pytest.raises(RuntimeError, match="one step further than others: load a checkpoint"):
        right.step()
    with pytest.raises(CheckpointError, match="one step further"):
        hetmem.save(tmp_path / "saved", managed, right)
    hetmem.load(tmp_path / "saved", managed, right)
    right.zero_grad()
    for module, optimizer in ((plain, left), (managed, right)):
        loss_of(module, second).backward()
        optimizer.step()
    assert_same_weights(plain, managed)
    assert_same_states(left, right)
    hetmem.release(managed)


@pytest.mark.parametrize("overlap", ["backward", "forward"])
def test_a_step_that_is_given_up_in_its_backward_leaves_no_chunk_half_updated(
    overlap: str, tmp_path: Path, of_tiles: BrokenTiles
) -> None:
    plain, managed = pair(mlp, "nvme", tmp_path)
    left, right = adamws(plain, managed, overlap=overlap)
    for batch in vector_batches(2, 8, 64):
        for module, optimizer in ((plain, left), (managed, right)):
            loss_of(module, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    before = {name: value.clone() for name, value in plain.state_dict().items()}
    loss_of(plain, batch).backward()
    left.step()
    right.synchronize()
    of_tiles.broken = odd
    with pytest.raises(MemoryError):  # noqa: PT012 - as soon as one is told of
        loss_of(managed, batch).backward()
        right.step()
        right.synchronize()
    of_tiles.broken = lambda place: False
    right.forget_step()
    right.zero_grad()
    after = managed.state_dict()
    new = [name for name, value in plain.state_dict().items() if same_bits(value, after[name])]
    assert new
    for name in after.keys() - new:
        assert same_bits(before[name], after[name])
    hetmem.release(managed)


def half_updated(tmp_path: Path, of_tiles: BrokenTiles) -> tuple[nn.Module, Any, Path]:
    """A model, its optimizer and a checkpoint, after a step that has failed."""
    _, managed = pair(mlp, "host", tmp_path)
    optimizer = hetmem.AdamW(managed.parameters(), lr=1e-2)
    for number, batch in enumerate(vector_batches(2, 8, 64)):
        loss_of(managed, batch).backward()
        if number:
            hetmem.save(tmp_path / "saved", managed, optimizer)
            of_tiles.broken = odd
            with pytest.raises(MemoryError):
                optimizer.step()
            of_tiles.broken = lambda place: False
        else:
            optimizer.step()
            optimizer.zero_grad()
    return managed, optimizer, tmp_path / "saved"


def test_a_half_updated_chunk_is_neither_saved_nor_trained(tmp_path: Path, of_tiles: BrokenTiles) -> None:
    managed, optimizer, saved = half_updated(tmp_path, of_tiles)
    with pytest.raises(CheckpointError, match="one step further"):
        hetmem.save(saved, managed, optimizer)
    optimizer.zero_grad(set_to_none=False)
    (batch,) = vector_batches(1, 8, 64)
    with pytest.raises(RuntimeError, match="load a checkpoint"):
        optimizer.step()
    with pytest.raises(RuntimeError, match="load a checkpoint"):
        loss_of(managed, batch).backward()
    hetmem.load(saved, managed, optimizer)
    loss_of(managed, batch).backward()
    optimizer.step()
    hetmem.save(saved, managed, optimizer)


def test_a_half_updated_chunk_whose_gradients_are_gone_is_told_of_once(tmp_path: Path, of_tiles: BrokenTiles) -> None:
    _, optimizer, _ = half_updated(tmp_path, of_tiles)
    optimizer.zero_grad(set_to_none=False)
    with pytest.raises(RuntimeError, match="load a checkpoint"):
        optimizer.forget_step()
    optimizer.forget_step()
