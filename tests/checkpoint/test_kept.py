"""With a pattern the newest checkpoints stay, nothing else is deleted, and the newest one is found."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import hetmem
from hetmem.errors import CheckpointError, StoreError
from tests.engine import harness


def names(directory: Path) -> set[str]:
    return {each.name for each in directory.iterdir()}


@pytest.mark.parametrize("wait", [True, False])
def test_the_newest_stay_and_only_files_that_are_checkpoints_of_the_pattern_go(wait: bool, tmp_path: Path) -> None:
    model = harness.manage(harness.mlp(), "host", tmp_path)
    others = {"run-best.safetensors", "run-1.safetensors.bak", "run-0.safetensors", "run-x1.safetensors"}
    for name in ("run-best.safetensors", "run-x1.safetensors", "run-1.safetensors.bak"):
        hetmem.save(tmp_path / name, model)
    save_file({"w": torch.ones(2)}, tmp_path / "run-0.safetensors")  # another program's
    (tmp_path / ".hetmem-00000000-0123456789abcdef").write_bytes(b"of a killed save")
    assert hetmem.latest(tmp_path) == str(tmp_path / "run-1.safetensors.bak")
    for step in (1, 5, 3, 10, 2):
        handle: Any = hetmem.save(
            tmp_path / "run-{step}.safetensors",
            model,
            extra={"step": step},
            keep=3,
            **({} if wait else {"wait": False}),
        )
        if handle is not None:
            handle.wait()
        assert hetmem.latest(tmp_path) == str(tmp_path / f"run-{step}.safetensors")
    assert names(tmp_path) == others | {f"run-{step}.safetensors" for step in (3, 10, 2)}
    assert hetmem.load(hetmem.latest(tmp_path), model) == {"step": 2}


def test_nothing_is_deleted_before_the_new_one_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(2, 2)
    for step in (1, 2):
        hetmem.save(tmp_path / "{step}", model, extra={"step": step}, keep=2)

    def fails(*_: Any) -> None:
        raise OSError(5, os.strerror(5))

    monkeypatch.setattr(os, "replace", fails)
    with pytest.raises(StoreError):
        hetmem.save(tmp_path / "{step}", model, extra={"step": 3}, keep=1)
    assert names(tmp_path) == {"1", "2"}


def test_files_of_other_runs_and_directories_and_a_link_to_the_new_one_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Linear(2, 2)
    for step in (1, 2):
        hetmem.save(tmp_path / f"beta-{step}", model)
    hetmem.save(tmp_path / "{run}-{step}", model, extra={"run": "alpha", "step": 5}, keep=1)
    assert names(tmp_path) == {"alpha-5", "beta-1", "beta-2"}
    (tmp_path / "beta-7").symlink_to("beta-07")
    hetmem.save(tmp_path / "beta-{step}", model, extra={"step": 7}, keep=1)
    assert names(tmp_path) == {"alpha-5", "beta-7", "beta-07"}
    for folder in ("here", "there"):
        (tmp_path / folder).mkdir()
    hetmem.save(tmp_path / "there" / "1", model)
    monkeypatch.chdir(tmp_path / "here")
    handle: Any = hetmem.save("{step}", harness.manage(model, "host", tmp_path), extra={"step": 2}, wait=False, keep=1)
    monkeypatch.chdir(tmp_path / "there")
    handle.wait()
    assert (names(tmp_path / "here"), names(tmp_path / "there")) == ({"2"}, {"1"})


def test_the_newest_is_a_whole_one(tmp_path: Path) -> None:
    assert hetmem.latest(tmp_path) is None
    for name in ("a", "b"):
        hetmem.save(tmp_path / name, nn.Linear(2, 2))
    os.truncate(tmp_path / "b", (tmp_path / "b").stat().st_size - 1)
    (tmp_path / "c").symlink_to(tmp_path / "a")
    assert hetmem.latest(tmp_path) == str(tmp_path / "a")
    with pytest.raises(StoreError, match="cannot read the directory"):
        hetmem.latest(tmp_path / "none")


@pytest.mark.parametrize(
    ("pattern", "extra", "keep", "message"),
    [
        ("run-{step}", None, 3, "has the field {step}, for which extra must have"),
        ("run-{step}", {"step": 1.5}, 3, "must have a number or a text"),
        ("run-{step", {"step": 1}, 3, "is no pattern"),
        ("run-{step:x}", {"step": 1}, 3, "writes step as 'x', by which older files cannot be found"),
        ("run", {"step": 1}, 3, "needs a file name with a field"),
        ("{step}", {"step": "a/b"}, 3, "needs a file name with a field"),
        ("run-{step}", {"step": 1}, 0, "keep must be a whole number above zero"),
    ],
)
def test_a_pattern_that_cannot_be_filled_is_refused(
    pattern: str, extra: Any, keep: Any, message: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=message):
        hetmem.save(tmp_path / pattern, nn.Linear(2, 2), extra=extra, keep=keep)
    assert names(tmp_path) == set()
