"""Saving and loading between a backward that updates and its step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hetmem
from hetmem.errors import CheckpointError, HetmemError
from tests.checkpoint.models import Run, start
from tests.engine.harness import assert_same_states, assert_same_weights, streamed, token_batches

OVERLAPS: dict[str, dict[str, Any]] = {
    "backward": {"overlap": "backward"},
    "forward": {"overlap": "forward"},
}


def trained(directory: Path, placement: str, options: dict[str, Any]) -> Run:
    """After a backward that has begun the third step."""
    run = start(directory, placement, lambda module: hetmem.AdamW(module.parameters(), lr=1e-2, **options))
    run.steps(0, 2)
    backward(run)
    return run


def backward(run: Run) -> None:
    torch.manual_seed(2)
    run.module(*token_batches(3)[2]).backward()


def foreign(directory: Path, kind: str) -> Path:
    """A checkpoint whose states are of another kind than those of `hetmem.AdamW`."""

    def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
        if kind == "8bit":
            return hetmem.AdamW(module.parameters(), moments="8bit")
        return torch.optim.AdamW(module.parameters(), amsgrad=True)

    run = start(directory, "host" if kind == "8bit" else "plain", optimizer_of, seed=1)
    run.steps(0, 1)
    run.save(directory / kind)
    return directory / kind


SAYS = {"8bit": "make it with moments= as the one that was saved", "amsgrad": "has no amsgrad"}
"""A part of the refusal, by what the checkpoint is of."""


@pytest.mark.each
@streamed
@pytest.mark.parametrize("options", OVERLAPS.values(), ids=OVERLAPS)
@pytest.mark.parametrize("kind", ["8bit", "amsgrad"])
def test_a_step_that_has_begun_goes_on_after_a_load_that_is_refused(
    kind: str, options: dict[str, Any], placement: str, tmp_path: Path
) -> None:
    """It was given up, and made a second time in `step`."""
    path = foreign(tmp_path, kind)
    left, right = (trained(tmp_path, placement, options) for _ in range(2))
    assert right.optimizer.half_stepped  # type: ignore[attr-defined]
    with pytest.raises((HetmemError, ValueError), match=SAYS[kind]):
        hetmem.load(path, right.module, right.optimizer)
    for run in (left, right):
        run.optimizer.step()
    assert_same_weights(left.module, right.module)
    assert_same_states(left.optimizer, right.optimizer)


@pytest.mark.each
@streamed
@pytest.mark.parametrize("options", OVERLAPS.values(), ids=OVERLAPS)
@pytest.mark.parametrize("use", [hetmem.save, hetmem.load, hetmem.load_weights])
def test_the_model_alone_is_neither_saved_nor_loaded_in_a_step_that_has_begun(
    use: Callable[..., Any], options: dict[str, Any], placement: str, tmp_path: Path
) -> None:
    run = trained(tmp_path, placement, options)
    run.optimizer.step()
    run.optimizer.zero_grad()
    hetmem.save(tmp_path / "c", run.module)
    saved = (tmp_path / "c").read_bytes()
    backward(run)
    run.optimizer.synchronize()  # type: ignore[attr-defined]
    with pytest.raises(CheckpointError, match=r"some weights are one step further than others: .*step\(\)"):
        use(tmp_path / "c", run.module)
    assert (tmp_path / "c").read_bytes() == saved
    run.optimizer.step()
    run.optimizer.zero_grad()
    use(tmp_path / "c", run.module)


def test_a_step_of_another_optimizer_is_not_loaded_over(tmp_path: Path) -> None:
    run = trained(tmp_path, "host", OVERLAPS["backward"])
    run.optimizer.step()
    run.optimizer.zero_grad()
    own = torch.optim.SGD(run.module.parameters(), lr=1.0)
    hetmem.save(tmp_path / "c", run.module, own)
    backward(run)
    with pytest.raises(CheckpointError, match=r"load it with that optimizer too, or call its forget_step\(\)"):
        hetmem.load(tmp_path / "c", run.module, own)
    run.optimizer.forget_step()  # type: ignore[attr-defined]
    hetmem.load(tmp_path / "c", run.module, own)
