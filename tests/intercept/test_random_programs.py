"""Programs that a seed makes up give the bits of plain torch, or an error that the documentation allows.

A seed draws a model, dtypes, a budget, a device, a disk, an optimizer and a list of operations, and the program runs on
a plain model and on a managed one side by side. To hunt: `pytest tests/intercept/test_random_programs.py --programs
1000:3000` runs the seeds from 1000 on. A seed that fails prints its program; `run(replace(program, operations=…))`
shrinks it.
"""

from __future__ import annotations

import copy
import re
import time
import traceback
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

import hetmem
from hetmem import testing
from hetmem.errors import BudgetError, CapacityError, DeviceOutOfMemoryError, ManageError, StoreError
from tests.engine.harness import assert_same, assert_same_grads, assert_same_weights
from tests.engine.operations import Side
from tests.engine.parts import WRITTEN_IN_FORWARD
from tests.engine.programs import WITHIN, Program, drawn
from tests.engine.sides import Managed, Plain
from tests.faults.disk import EIO, FaultyDisk, once

REPEATED = (
    "forward evaluate step read_weights read_gradients save copied again write load add_group hyper freeze keep "
    "write_states squeeze squeezed average to_file from_file dropped struck_step"
).split()
"""What is simply repeated after an error of a disk; everything else that fails then is given up on both sides."""


_SAYS_SO = "overlap=|last step was not cleared|modified by an inplace operation"


class RefusedError(Exception):
    """Something the documentation allows to be refused was."""


class Duel:
    """Both sides of one program, an operation at a time."""

    def __init__(self, program: Program, directory: Path, disk: FaultyDisk) -> None:
        self.program, self.disk = program, disk
        self.plain, self.managed = Plain(program), Managed(program, directory)
        self._later: list[tuple[str, Any, Any]] = []

    def run(self) -> None:
        for number, (name, seed) in enumerate(self.program.operations):
            if not (self.program.early and self.plain.arrived and name not in WITHIN):
                self.act(f"{number} {name}", name, seed)
                if Random(seed).random() < self.program.compared and not self._weights_may_be_new():
                    self.compare(f"after {number} {name}")
        if not self._weights_may_be_new():
            self.compare("at the end")
        with suppress(StoreError) if self.program.disk == "failing" else nullcontext():
            hetmem.release(self.managed.module)
        if not self._weights_may_be_new():
            assert_same_weights(self.plain.module, self.managed.module, "released")

    def act(self, what: str, name: str, seed: int) -> None:
        on_new_weights = name.startswith("forward") and self._weights_may_be_new()
        if on_new_weights and any(kind in WRITTEN_IN_FORWARD for kind, _ in self.program.parts):
            return None  # what it writes depends on how far the updates are
        left, error = _outcome(self.plain, name, seed)
        if isinstance(error, StoreError):  # of what hetmem read ahead: a backward of any model on its thread raises it
            self.disk.fault = _fast
            return self._give_up(error)
        before = [buffer.clone() for buffer in self.managed.module.buffers()]
        may_fail = self.program.disk == "failing" and (name == "step" or not self.program.early)
        if may_fail and Random(seed).random() < 0.3:
            self.disk.fault = once(Random(seed).randrange(12), EIO)
        right, other = _outcome(self.managed, name, seed)
        while isinstance(other, StoreError) and self.program.disk == "failing":
            self.disk.fault = _fast
            if name not in REPEATED:
                return self._give_up(other)
            for buffer, value in zip(self.managed.module.buffers(), before, strict=True):
                buffer.data.copy_(value)  # counts no version: a graph may have saved what the forward found
            right, other = _outcome(self.managed, name, seed)
        if type(error) is not type(other):
            self._judge(name, other)
            raise AssertionError(f"{what}: plain torch ended with {error!r}, hetmem with {other!r}") from other
        if str(error).split(":")[0] != str(other).split(":")[0]:  # what follows names a tensor, or its parameter
            raise AssertionError(f"{what}: plain torch ended with {error!r}, hetmem with {other!r}") from other
        if on_new_weights:
            self._copy_buffers()
        elif error is None:
            self._later.append((what, left, right))
        if not self._weights_may_be_new():
            for where, expected, got in self._later:
                _assert_equal(expected, got, where)
            self._later.clear()

    def _give_up(self, error: StoreError) -> None:
        """A backward failed: its gradients are dropped."""
        if self.program.early:
            raise RefusedError("a backward that updates failed") from error
        self._copy_buffers()
        for side in (self.plain, self.managed):
            side.skip(Random())

    def _copy_buffers(self) -> None:
        for mine, its in zip(self.plain.module.buffers(), self.managed.module.buffers(), strict=True):
            its.copy_(mine)

    def compare(self, what: str) -> None:
        """Everything there is."""
        if self.program.disk == "failing":
            with suppress(StoreError):  # a write that trails
                self.managed.module.state_dict(), self.managed.optimizer.state_dict()
            self.disk.fault = _fast
        assert_same_weights(self.plain.module, self.managed.module, what)
        if not self.program.uses_up:
            assert_same_grads(self.plain.module, self.managed.module, what)
        _assert_same_states(self.plain.optimizer, self.managed.optimizer, what)

    def _weights_may_be_new(self) -> bool:
        return self.program.early and self.plain.arrived

    def _judge(self, name: str, error: Exception | None) -> None:
        """Whether `error` is one that the documentation allows: no room, or changes after an update has begun."""
        if isinstance(error, DeviceOutOfMemoryError) or (
            isinstance(error, BudgetError)
            and (name in ("add_group", "again") or _lacks_host_memory(self.program, error))
        ):
            raise RefusedError(str(error)) from error
        if self.program.activations != "keep" and isinstance(error, CapacityError):  # they take host memory, too
            raise RefusedError(str(error)) from error
        if self.program.early and isinstance(error, (RuntimeError, ManageError)) and re.search(_SAYS_SO, str(error)):
            raise RefusedError(str(error)) from error


def _lacks_host_memory(program: Program, error: BaseException | None) -> bool:
    """Gradients that updates consume and that wait for the last backward of several parameters, of which only then is
    known how many do, gradients of parameters that no optimizer has yet, and weights that were frozen at `manage`."""
    if not isinstance(error, BudgetError):
        return False
    late = program.early or program.groups > 1
    return (late and "place for grad of" in str(error)) or "call it before weights are frozen" in str(error)


def _outcome(side: Side, name: str, seed: int) -> tuple[Any, Exception | None]:
    torch.manual_seed(seed)
    try:
        return getattr(side, name)(Random(seed)), None
    except Exception as error:
        raised: BaseException | None = error
        while raised is not None:  # the frames of plain torch's own would keep its tensors while hetmem runs
            traceback.clear_frames(raised.__traceback__)
            raised = raised.__cause__ or raised.__context__
        return None, error


def _assert_equal(left: Any, right: Any, what: str) -> None:
    if isinstance(left, (list, tuple)):
        assert len(left) == len(right)
        for number, pair in enumerate(zip(left, right, strict=True)):
            _assert_equal(*pair, f"{what}[{number}]")
    else:
        assert_same(left, right, what)


def _assert_same_states(plain: torch.optim.Optimizer, managed: torch.optim.Optimizer, what: str) -> None:
    """Adagrad of torch has states of what it never updated."""
    left, right = (copy.deepcopy(optimizer.state_dict()["state"]) for optimizer in (plain, managed))
    for index in left.keys() - right.keys():
        assert left[index]["step"] == 0, f"{what}: no state of {index}"
        del left[index]
    for index in left:
        assert left[index].keys() == right[index].keys()
        for name, value in left[index].items():
            if isinstance(value, torch.Tensor):
                assert_same(value, right[index][name], f"{what} state {name} of {index}")


def _fast(_: str, __: int, nbytes: int) -> int:
    return nbytes


def _slow(verb: str, offset: int, nbytes: int) -> int:
    time.sleep((offset // 4096 + len(verb)) % 5 * 0.001)
    return nbytes


def run(program: Program, directory: Path) -> str | None:
    """Run `program`, with more memory as long as it needs that; why it ended early, if it did so as it may."""
    with pytest.MonkeyPatch.context() as patch:
        disk = FaultyDisk()
        disk.fault = _slow if program.disk == "slow" else _fast
        disk.used_by(patch, threads=2)
        try:
            Duel(program, directory, disk).run()
        except RefusedError as refused:
            if isinstance(refused.__cause__, DeviceOutOfMemoryError):
                larger = replace(program, room=program.room * 1.7)
            elif _lacks_host_memory(program, refused.__cause__):
                larger = replace(program, staging=program.staging * 1.7)
            else:
                return str(refused)
        else:
            return None
    assert max(program.room, program.staging) < 1000, "no memory is enough"
    return run(larger, directory)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    first, _, last = metafunc.config.getoption("--programs").partition(":")
    if "seed" in metafunc.fixturenames:
        metafunc.parametrize("seed", range(int(first), int(last)))


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_random_program_gives_the_bits_of_torch(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mha, "get_fastpath_enabled", lambda: False)  # see docs/limits.md
    program = drawn(seed)
    if program.activations != "keep":
        monkeypatch.setattr(testing.saved, "LEAST_BYTES", 1)
    print(program)
    run(program, tmp_path)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_gradients_on_nvme_move_behind_the_passes_of_a_skipped_step_that_read_them(tmp_path: Path) -> None:
    """A step that a loss scale skips; the backward behind it, of a graph that is retained, adds to its gradients."""
    program = drawn(1017)
    run(replace(program, sanitize=False, operations=program.operations[2:6]), tmp_path)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_a_recomputation_writes_to_memory_that_others_share_stays(tmp_path: Path) -> None:
    """Weights get other memory between two forwards and their backward, whose first recomputation writes to one."""
    program = drawn(9200022)
    operations = (*program.operations[13:17],)
    assert [name for name, _ in operations] == ["forward", "forward", "shared", "backward"]
    run(replace(program, placement="host", device="sim", activations="keep", operations=operations), tmp_path)
