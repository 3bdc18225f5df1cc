"""Ctrl-C in the middle of hetmem's own work: in its step, while it waits, in a model within another."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hetmem
from hetmem.engine.executor import Carrier
from hetmem.engine.gradient_copies import Homeward
from hetmem.engine.param_views import Bindings
from hetmem.engine.runtime import Runtime
from hetmem.engine.traffic import Traffic
from hetmem.memory.chunk import Chunk
from hetmem.memory.transfer import TransferEngine
from hetmem.optim.update_queue import Updates
from hetmem.schedule.residency import Residency
from tests.runtime.harness import (
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

WITHIN: list[tuple[type, str]] = [
    (Residency, "acquire"),
    (Residency, "release"),
    (Residency, "done"),
    (Carrier, "_carry_out"),
    (Carrier, "_note"),
    (Bindings, "bind"),
    (Bindings, "unbind"),
    (Homeward, "_arrived"),
    (Traffic, "begin_update"),
    (Traffic, "end_update"),
    (Updates, "_run"),
    (Updates, "_close"),
    (Runtime, "_moment"),
    (TransferEngine, "take"),
]
calls_within = pytest.mark.parametrize(
    "within", WITHIN, ids=lambda within: f"{within[0].__name__}.{within[1].strip('_')}"
)
_WARM = 2
"""Steps before the first interrupt."""
_DENSE = 2
"""So many calls are struck one by one, and then one of ever more."""
_PATIENCE_SECONDS = 60.0


class Struck:
    """Ctrl-C at the call number `at` of what it is around, before or after that."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: type, name: str, *, before: bool) -> None:
        self.at, self.calls = -1, 0
        original = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            if before and self.calls == self.at:
                signal.raise_signal(signal.SIGINT)
            result = original(*args, **kwargs)
            if not before and self.calls == self.at:
                signal.raise_signal(signal.SIGINT)
            return result

        monkeypatch.setattr(owner, name, call)

    @contextmanager
    def later(self, calls: int) -> Iterator[None]:
        self.at, self.calls = calls, 0
        try:
            yield
        finally:
            self.at = -1


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


@pytest.mark.pairs
@calls_within
@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
@everywhere
def test_training_goes_on_with_the_same_bits(
    within: tuple[type, str], before: bool, placement: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    struck = Struck(monkeypatch, *within, before=before)
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


@pytest.mark.pairs
@pytest.mark.parametrize(
    "within", [(Residency, "done"), (Carrier, "_carry_out"), (Bindings, "unbind"), (TransferEngine, "take")]
)
@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
@streamed
def test_training_goes_on_with_a_model_within_that_has_a_budget_of_its_own(
    within: tuple[type, str], before: bool, placement: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    struck = Struck(monkeypatch, *within, before=before)
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
    overlap: str, placement: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    struck = Struck(monkeypatch, Homeward, "send", before=False)
    model = manage(mlp(), placement, tmp_path)
    optimizer = hetmem.AdamW(model.parameters(), overlap=overlap)
    for batch in BATCHES[:2]:
        assert not train_on(model, optimizer, batch, 0)
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


@streamed
@pytest.mark.parametrize("at", [0, 1])
def test_an_update_that_an_interrupt_kept_out_of_the_queue_is_made_by_the_next_step(
    at: int, placement: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It came while the step waited for a copy on the device that was under way: random program 4073."""
    plain, managed = pair(mlp, placement, tmp_path)
    left, right = adamws(plain, managed)
    device_copy, begun = Traffic.device_copy, list[Chunk]()

    def interrupted(traffic: Traffic, chunk: Chunk) -> torch.Tensor | None:
        if sys._getframe(1).f_code.co_name == "begin_update":
            begun.append(chunk)
            if len(begun) == at + 1:
                raise KeyboardInterrupt
        return device_copy(traffic, chunk)

    monkeypatch.setattr(Traffic, "device_copy", interrupted)
    for batch in BATCHES:
        loss_of(plain, batch).backward()
        left.step()
        loss_of(managed, batch).backward()
        begun.clear()
        with pytest.raises(KeyboardInterrupt):
            right.step()
        right.step()
        assert_same_weights(plain, managed)
        assert_same_states(left, right)
        left.zero_grad()
        right.zero_grad()
