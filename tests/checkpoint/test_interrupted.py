"""Ctrl-C, and errors that are no disk's, while a checkpoint is saved or loaded."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hetmem
from hetmem.errors import CheckpointError
from tests.checkpoint.models import OptimizerOf, Run, start
from tests.engine.harness import everywhere, same_bits

PARTLY = "model and optimizer are partly loaded now: load again, this or another checkpoint, before using it"
CLIPPED: dict[str, Any] = {"lr": 1e-2, "max_grad_norm": 1e-2}


def trained(directory: Path, placement: str = "host", seed: int = 0) -> Run:
    run = start(directory, placement, lambda module: hetmem.AdamW(module.parameters(), lr=1e-2), seed=seed)
    run.steps(0, 2)
    return run


def assert_same_run(left: Run, right: Run) -> None:
    for mine, theirs in zip(left.module.state_dict().values(), right.module.state_dict().values(), strict=True):
        assert same_bits(mine, theirs)
    states = [run.optimizer.state_dict()["state"] for run in (left, right)]
    assert states[0].keys() == states[1].keys()
    for number, state in states[0].items():
        assert all(same_bits(value, states[1][number][name]) for name, value in state.items())


# ---- what is left of a load that is broken off -----------------------------------------------------------------------


@everywhere
def test_an_interrupt_of_a_load_says_what_it_leaves(
    placement: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At any read: nothing has changed, or the message says that the model is partly loaded, and a load mends that."""
    source = trained(tmp_path, placement, seed=1)
    source.save(tmp_path / "c")
    run, before = trained(tmp_path, placement), trained(tmp_path, placement)
    real, reads, at = os.preadv, 0, -1

    def read(*arguments: Any) -> int:
        nonlocal reads
        if not threading.current_thread().name.startswith("hetmem-checkpoint"):
            return real(*arguments)  # the drive's
        reads += 1
        if reads - 1 == at:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(os, "preadv", read)
    hetmem.load(tmp_path / "c", trained(tmp_path, placement).module)
    weights_once, reads = reads, 0
    other = trained(tmp_path, placement)
    hetmem.load(tmp_path / "c", other.module, other.optimizer)
    total, said = reads, 0
    for number in (0, weights_once // 2, total - 1):
        at, reads = number, 0
        with pytest.raises(KeyboardInterrupt) as caught:
            hetmem.load(tmp_path / "c", run.module, run.optimizer)
        at = -1
        if not str(caught.value):
            assert_same_run(run, before)
        else:
            assert str(caught.value) == PARTLY
            said += 1
    assert said == 1
    hetmem.load(tmp_path / "c", run.module, run.optimizer)
    assert_same_run(run, source)


def test_an_interrupt_between_the_optimizer_and_its_states_says_so(tmp_path: Path) -> None:
    """Step counts were new then, and moments old."""
    trained(tmp_path, seed=1).save(tmp_path / "c")
    run = trained(tmp_path)

    def interrupt(optimizer: object) -> None:
        raise KeyboardInterrupt

    run.optimizer.register_load_state_dict_post_hook(interrupt)
    with pytest.raises(KeyboardInterrupt, match=PARTLY):
        hetmem.load(tmp_path / "c", run.module, run.optimizer)


class Stubborn(nn.Linear):
    def get_extra_state(self) -> Any:
        return {"calls": 1}

    def set_extra_state(self, state: Any) -> None:
        raise LookupError


def test_a_module_that_refuses_its_extra_state_leaves_a_model_that_is_said_to_be_partly_loaded(tmp_path: Path) -> None:
    hetmem.save(tmp_path / "c", Stubborn(2, 2))
    with pytest.raises(CheckpointError, match=rf"LookupError\(\); {PARTLY}") as caught:
        hetmem.load(tmp_path / "c", Stubborn(2, 2))
    assert isinstance(caught.value.__cause__, LookupError)


def test_weights_whose_load_is_interrupted_are_said_to_be_partly_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = nn.Linear(2, 2)
    hetmem.save(tmp_path / "c", module)

    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("hetmem.checkpoint.weights.read_tensors", interrupt)
    with pytest.raises(KeyboardInterrupt, match="the model is partly loaded now"):
        hetmem.load_weights(tmp_path / "c", module)


# ---- what is still under way -----------------------------------------------------------------------------------------


def test_nothing_is_written_behind_a_save_that_was_interrupted_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow write went on with a number of a file that was closed, and so into the file that was opened next."""
    busy, written, real = threading.Event(), threading.Event(), os.pwritev

    def slow(*arguments: Any) -> int:
        busy.set()
        time.sleep(1.0)
        done = real(*arguments)
        written.set()
        return done

    def press() -> None:
        assert busy.wait(30.0)
        for _ in range(2):
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGINT)

    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setattr(os, "pwritev", slow)
    presses = threading.Thread(target=press)
    presses.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            hetmem.save(tmp_path / "c", nn.Linear(2, 2, bias=False))
        assert written.is_set()
    finally:
        presses.join()
        signal.signal(signal.SIGINT, handler)
    assert not any(thread.name.startswith("hetmem-checkpoint") for thread in threading.enumerate())
    assert not list(tmp_path.iterdir())


# ---- loads where tensors take no writes ------------------------------------------------------------------------------

OPTIMIZERS: dict[str, OptimizerOf] = {
    "hetmem": lambda module: hetmem.AdamW(module.parameters(), lr=1e-2),
    "a rate in a tensor": lambda module: hetmem.AdamW(module.parameters(), lr=torch.tensor(1e-2)),
    "torch": lambda module: torch.optim.AdamW(module.parameters(), lr=1e-2),
}


@pytest.mark.parametrize("optimizer_of", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_what_is_loaded_in_inference_mode_trains_on(optimizer_of: OptimizerOf, tmp_path: Path) -> None:
    """Step counts took no writes any more."""
    left, right = (start(tmp_path, "host", optimizer_of, seed=seed) for seed in (0, 1))
    left.steps(0, 2)
    left.save(tmp_path / "c")
    expected = left.steps(2, 4)
    with torch.inference_mode():
        right.load(tmp_path / "c")
    assert right.steps(2, 4) == expected
    assert_same_run(left, right)
