"""Ctrl-C at each line, and errors of each function, of park, unpark and a save in the background: training goes on with
the same bits, and a file is the old or the new one."""

from __future__ import annotations

import contextlib
import copy
import errno
from collections.abc import Callable
from pathlib import Path
from types import CodeType
from typing import Any

import pytest
import torch
from torch import nn

import hetmem
from hetmem.errors import ManageError
from tests.engine import harness
from tests.engine.struck import Raising, Struck, some_of

PARTS = ("hetmem/parking", "hetmem/placing/rehome", "hetmem/engine", "hetmem/checkpoint", "hetmem/base/whole_files")


def within(code: CodeType) -> bool:
    return any(part in code.co_filename for part in PARTS)


class Beside:
    """A model that is struck, and one that is not; both train alike."""

    def __init__(self, placement: str, directory: Path) -> None:
        limits, made = harness.budget(placement, directory), harness.mlp()
        self.models = [harness.manage(copy.deepcopy(made), limits, directory, sanitize=False) for _ in range(2)]
        self.optimizers = [hetmem.AdamW(each.parameters(), lr=1e-2) for each in self.models]
        self.path, self._steps = directory / "c", 0
        self.step()

    @property
    def model(self) -> nn.Module:
        return self.models[1]

    def step(self) -> None:
        losses = []
        self._steps += 1
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            x = torch.randn(4, harness.WIDTH, generator=torch.Generator().manual_seed(self._steps))
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        harness.assert_same(*losses, f"the loss of step {self._steps}")

    def save(self) -> None:
        hetmem.save(self.path, self.model, self.optimizers[1], wait=False)

    def wake(self) -> None:
        with contextlib.suppress(ManageError):  # it is not parked
            hetmem.unpark(self.model)


def park(of: Beside) -> None:
    hetmem.park(of.model)


def unpark(of: Beside) -> None:
    hetmem.unpark(of.model)


def save(of: Beside) -> None:
    of.save()


ACTIONS: dict[str, tuple[Callable[[Beside], None], Callable[[Beside], None]]] = {
    "park": (lambda of: None, park),
    "unpark": (park, unpark),
    "save": (lambda of: None, save),
}


@pytest.mark.each
@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("placement", ["resident", "host"])
def test_an_interrupt_at_any_line_leaves_a_model_that_trains_on(
    placement: str, action: str, tmp_path: Path, all_cases: bool
) -> None:
    of, (before, act) = Beside(placement, tmp_path), ACTIONS[action]
    before(of)
    with Struck(within, "line") as counted:
        act(of)
    of.wake()
    of.step()
    hetmem.save(of.path, of.model, of.optimizers[1])
    came = 0
    for place in some_of(counted.places, 400 if all_cases else 8):
        before(of)
        with Struck(within, "line", place):
            try:
                act(of)
            except KeyboardInterrupt:
                came += 1
        of.wake()
        fresh: Any = harness.mlp()
        hetmem.save(tmp_path / "other", of.model)  # waits for the one behind
        hetmem.load(of.path, fresh)
        of.step()
        assert {each.name for each in tmp_path.iterdir() if each.is_file()} == {"c", "other"}
    assert came
    for mine, other in zip(of.models[0].parameters(), of.models[1].parameters(), strict=True):
        assert torch.equal(mine, other)


ERRORS: list[Callable[[], Exception]] = [
    MemoryError,
    lambda: OSError(errno.ENOSPC, "No space left on device"),
    lambda: torch.OutOfMemoryError("CUDA out of memory."),
    lambda: RuntimeError("can't start new thread"),
]


MAY_FAIL = (
    "parking placing/rehome checkpoint/ base/whole_files engine/homes engine/lent_memory engine/param_views "
    "engine/outgoing memory/chunk memory/host_memory memory/device memory/nvme_store"
).split()
CARRY_OUT = "engine/traffic engine/executor memory/transfer hetmem/optim".split()
"""What carries transfers and updates out, within which there are other tests of errors: `tests/faults`."""


def carries_out(code: CodeType) -> bool:
    return any(part in code.co_filename for part in CARRY_OUT)


def may_fail(code: CodeType) -> bool:
    """Not what ends an object or a generator, whose errors Python only prints."""
    ends = code.co_name.startswith("<") or code.co_name in ("__del__", "give_back")
    return "/hetmem/" in code.co_filename and any(part in code.co_filename for part in MAY_FAIL) and not ends


@pytest.mark.each
@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("placement", ["resident", "host", "nvme"])
def test_an_error_of_any_function_leaves_a_model_that_trains_on(
    placement: str, action: str, tmp_path: Path, all_cases: bool
) -> None:
    of, (before, act) = Beside(placement, tmp_path), ACTIONS[action]
    before(of)
    with Raising(may_fail, carries_out, MemoryError) as counted:
        act(of)
    of.wake()
    raised = 0
    for number, call in enumerate(some_of(counted.calls, 120 if all_cases else 6)):
        before(of)
        try:
            with Raising(may_fail, carries_out, ERRORS[number % len(ERRORS)], call):
                act(of)
        except (MemoryError, OSError, RuntimeError):
            raised += 1
        of.wake()
        with contextlib.suppress(MemoryError, OSError, RuntimeError):  # that of a save, if it has ended since
            hetmem.save(tmp_path / "other", of.model)
        of.step()
        assert {each.name for each in tmp_path.iterdir() if each.is_file()} <= {"c", "other"}
    assert raised
    for mine, other in zip(of.models[0].parameters(), of.models[1].parameters(), strict=True):
        assert torch.equal(mine, other)
