"""`activations="auto"`: nothing moves where all fits, else what must, and the budget holds in each step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import hetmem
from hetmem import testing
from tests.activations.test_offload import BATCHES, DEVICES, INPUTS, KIB, SAVED, budget, deep, peak
from tests.engine import harness
from tests.engine.harness import train_both


def trained(tmp_path: Path, device_bytes: int, *, steps: int = 4, **options: Any) -> tuple[Any, list[int]]:
    """Steps of `Deep` beside plain torch; the model, and the bytes of activations that each step moved home."""
    plain, managed = deep(tmp_path, limits=budget(device=device_bytes), **{"activations": "auto", **options})
    optimizers, moved = harness.adamws(plain, managed), []
    gradients = sum(p.numel() * 4 for p in plain.parameters())
    for batch in INPUTS[:1] * steps:
        before = testing.of(managed).link_bytes()["device_to_host"]
        train_both(plain, managed, [batch], harness.Recipe(steps=1), optimizers=optimizers)
        moved.append(testing.of(managed).link_bytes()["device_to_host"] - before - gradients)
    return managed, moved


def test_where_all_fits_nothing_moves(tmp_path: Path) -> None:
    _, moved = trained(tmp_path, 8 << 20, steps=2)
    assert moved == [0, 0]


@pytest.mark.each
@pytest.mark.parametrize("sanitize", [True, False], ids=["checked", "traced"])
@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize("size", [512, 1024])
def test_what_must_leave_does_and_the_budget_holds(size: int, name: str, sanitize: bool, tmp_path: Path) -> None:
    managed, moved = trained(tmp_path, size * KIB, device=DEVICES[name](), sanitize=sanitize)
    assert peak(managed) <= size * KIB
    assert moved[-1] == moved[-2] > 0


def test_a_larger_device_moves_less_and_no_more_than_is_missing(tmp_path: Path) -> None:
    """Each saved storage is of one or two `SAVED` bytes: what is moved beyond what is missing is one of each place of
    the step that lacks room, and as much as was held by a forward when the device was full."""
    needed = peak(trained(tmp_path, 8 << 20, steps=1)[0])
    for size in (needed - 2 * SAVED, needed // 2):
        _, moved = trained(tmp_path, size, sanitize=False)
        missing = needed - size
        assert missing - 2 * SAVED <= moved[-1] <= missing + 192 * KIB + 2 * SAVED, (size, missing, moved)


def test_a_larger_batch_is_measured_anew(tmp_path: Path) -> None:
    plain, managed = deep(tmp_path, limits=budget(device=1 << 20), activations="auto", sanitize=False)
    (x,) = BATCHES[0]
    train_both(plain, managed, [(x[:rows],) for rows in (16, 16, 128, 64, 128, 128)])
    assert peak(managed) <= 1 << 20


def test_of_a_model_that_is_whole_on_the_device_activations_leave_and_weights_stay(tmp_path: Path) -> None:
    limits = hetmem.Budget(device="2MiB", host="16MiB")
    plain, managed = deep(tmp_path, limits=limits, activations="auto", chunk_bytes=None, sanitize=False)
    train_both(plain, managed, INPUTS, harness.Recipe(steps=3))
    assert peak(managed) <= 2 << 20
