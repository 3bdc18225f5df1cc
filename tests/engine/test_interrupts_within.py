"""Ctrl-C in the middle of hetmem's own work: in its step, while it waits, in a model within another."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hetmem
from hetmem import testing
from tests.engine import harness
from tests.engine.harness import (
    BATCHES,
    WIDTH,
    adamws,
    assert_same_grads,
    assert_same_states,
    assert_same_weights,
    everywhere,
    loss_of,
    manage,
    mlp,
    pair,
    streamed,
)

WITHIN = [
    "lease a copy",
    "release a copy",
    "copy done",
    "carry out",
    "note an end",
    "bind",
    "unbind",
    "gradient is home",
    "begin an update",
    "end an update",
    "run updates",
    "close an update",
    "use of a weight",
    "take an end",
]
_WARM = 2
"""Steps before the first interrupt."""
_DENSE = 2
"""So many calls are struck one by one, and then one of ever more."""
_PATIENCE_SECONDS = 60.0


class Struck:
    """Ctrl-C at the call number `at` of what runs at `point`, before or after that."""

    def __init__(self, point: str, *, before: bool) -> None:
        self._point, self._before = point, before
        self._at = self._calls = 0

    def _call(self, original: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
        self._calls += 1
        if self._before and self._calls == self._at:
            signal.raise_signal(signal.SIGINT)
        result = original(*args, **keywords)
        if not self._before and self._calls == self._at:
            signal.raise_signal(signal.SIGINT)
        return result

    @contextmanager
    def later(self, calls: int) -> Iterator[None]:
        self._at, self._calls = calls, 0
        with testing.around(self._point, self._call):
            yield


@contextmanager
def patience() -> Iterator[None]:
    """What hangs is interrupted, which nobody within expects."""
    main = threading.main_thread().ident
    assert main is not None
    timer = threading.Timer(_PATIENCE_SECONDS, lambda: signal.pthread_kill(main, signal.SIGINT))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def train_on(module: nn.Module, optimizer: hetmem.AdamW, batch: Any, steps: int) -> bool:
    """A training step of somebody who goes on after an interrupt; whether there was one. It comes once."""
    try:
        optimizer.zero_grad()
        loss_of(module, batch).backward()
        optimizer.step()
    except KeyboardInterrupt:
        updated = [int(state["step"]) == steps for state in optimizer.state.values()]
        if optimizer.half_stepped:
            optimizer.step()
        elif not all(updated):
            assert not any(updated), "it says that nothing of a step is done"
            optimizer.zero_grad()
            loss_of(module, batch).backward()
            optimizer.step()
        return True
    return False


def goes_on(struck: Struck, roots: tuple[nn.Module, nn.Module], pairs: list[tuple[nn.Module, nn.Module]]) -> None:
    """Train `roots`, which consist of `pairs`, with an interrupt at one call after the other, until there are no more
    calls in a step."""
    parameters = [
        [parameter for module in side for parameter in module.parameters()] for side in zip(*pairs, strict=True)
    ]
    left = torch.optim.AdamW(parameters[0], lr=1e-2, fused=True)
    right = hetmem.AdamW(parameters[1], lr=1e-2)
    at, interrupted = 0, True
    steps = 0
    while interrupted:
        batch, steps = BATCHES[steps % len(BATCHES)], steps + 1
        left.zero_grad()
        loss_of(roots[0], batch).backward()
        left.step()
        if steps <= _WARM:
            train_on(roots[1], right, batch, steps)
            continue
        at += 1 + at // _DENSE
        with struck.later(at):
            interrupted = train_on(roots[1], right, batch, steps)
        for plain, managed in pairs:
            assert_same_grads(plain, managed, f"call {at}")
            assert_same_weights(plain, managed, f"call {at}")
        assert_same_states(left, right, f"call {at}")


@pytest.mark.each
@pytest.mark.parametrize("within", WITHIN)
@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
@everywhere
def test_training_goes_on_with_the_same_bits(within: str, before: bool, placement: str, tmp_path: Path) -> None:
    struck = Struck(within, before=before)
    modules = pair(mlp, placement, tmp_path)
    with patience():
        goes_on(struck, modules, [modules])
        hetmem.release(modules[1])
    assert_same_weights(*modules, "released")


class Student(nn.Module):
    """Asks a teacher, which is no part of it."""

    def __init__(self, teacher: nn.Module) -> None:
        super().__init__()
        self.first, self.ask, self.last = nn.Linear(WIDTH, WIDTH), [teacher], nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        x = self.last(x + self.ask[0](x))
        return x


@pytest.mark.each
@pytest.mark.parametrize("within", ["copy done", "carry out", "unbind", "take an end"])
@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
@streamed
def test_training_goes_on_with_a_model_within_that_has_a_budget_of_its_own(
    within: str, before: bool, placement: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where homes are in host memory with the steps of users, which are not all measured: gradients go another way."""
    if placement == "host":
        monkeypatch.setattr(harness, "SANITIZE", False)
    struck = Struck(within, before=before)
    teachers = pair(mlp, placement, tmp_path)
    students = [Student(teachers[0]), Student(teachers[1])]
    students[1].load_state_dict(students[0].state_dict())
    manage(students[1], "host" if placement == "nvme" else "nvme", tmp_path)
    with patience():
        goes_on(struck, (students[0], students[1]), [(students[0], students[1]), teachers])
        for model in (students[1], teachers[1]):
            hetmem.release(model)


@pytest.mark.parametrize("overlap", ["backward", "forward"])
@streamed
def test_a_backward_that_updates_and_is_interrupted_says_how_to_go_on(
    overlap: str, placement: str, tmp_path: Path
) -> None:
    struck = Struck("send a gradient", before=False)
    model = manage(mlp(), placement, tmp_path)
    optimizer = hetmem.AdamW(model.parameters(), overlap=overlap)
    for batch in BATCHES[:2]:
        assert not train_on(model, optimizer, batch, 0)
        optimizer.zero_grad()
    with patience():
        with struck.later(4), pytest.raises(KeyboardInterrupt):  # of six gradients
            loss_of(model, BATCHES[2]).backward()
        optimizer.zero_grad()
        with pytest.raises(RuntimeError, match="forget_step"):
            loss_of(model, BATCHES[2]).backward()
        optimizer.forget_step()
        for batch in BATCHES:
            assert not train_on(model, optimizer, batch, 0)
        hetmem.release(model)


@pytest.mark.parametrize(("at", "placement"), [(0, "host"), (0, "nvme"), (1, "nvme")])
def test_an_update_that_an_interrupt_kept_out_of_the_queue_is_made_by_the_next_step(
    at: int, placement: str, tmp_path: Path
) -> None:
    """It came while the step dropped copies on the device, or waited for one that was under way. Updates of homes in
    host memory begin together."""
    plain, managed = pair(mlp, placement, tmp_path)
    left, right = adamws(plain, managed)
    updates = waits = 0

    def begin(original: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
        nonlocal updates, waits
        updates, waits = updates + 1, 0
        return original(*args, **keywords)

    def interrupted(original: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
        nonlocal waits
        waits += 1
        if (updates, waits) == (at + 1, 1):
            raise KeyboardInterrupt
        return original(*args, **keywords)

    for batch in BATCHES:
        loss_of(plain, batch).backward()
        left.step()
        loss_of(managed, batch).backward()
        updates = 0
        with (
            testing.around("begin an update", begin),
            testing.around("device copy", interrupted),
            testing.around("copies are stale", interrupted),
            pytest.raises(KeyboardInterrupt),
        ):
            right.step()
        right.step()
        assert_same_weights(plain, managed)
        assert_same_states(left, right)
        left.zero_grad()
        right.zero_grad()
