"""A step that failed is repeated with the same gradients: every chunk is updated once, and the bits are those of a run
that nothing disturbed."""

from __future__ import annotations

from pathlib import Path

import pytest

import hetmem
from hetmem.errors import StoreError
from tests.faults.disk import EIO, ENOSPC, FaultyDisk, once
from tests.faults.test_disk_hangs import Hang, train_while_the_disk_hangs
from tests.faults.training import Training
from tests.runtime.harness import loss_of


@pytest.fixture
def training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Training:
    return Training(FaultyDisk(), tmp_path, monkeypatch)


@pytest.mark.parametrize("call", range(0, 66, 6))
@pytest.mark.parametrize("fault", [EIO, ENOSPC], ids=["EIO", "full"])
def test_a_step_that_is_repeated_after_a_fault_updates_every_chunk_once(
    training: Training, fault: object, call: int
) -> None:
    batch = next(training.batches)
    for module in (training.plain, training.managed):
        loss_of(module, batch).backward()
    training.left.step()
    training.disk.fault = once(call, fault)  # type: ignore[arg-type]
    try:
        training.right.step()
    except StoreError:
        training.right.step()
    else:  # it was a write of states, which trail behind the step
        with pytest.raises(StoreError):
            training.right.synchronize()
    training.assert_same()
    for optimizer in (training.left, training.right):
        optimizer.zero_grad()
    training.both()
    training.assert_same()
    hetmem.release(training.managed)


# The backward that failed is told once more of the same disk when autograd forgets it, where nobody can be told.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_write_that_hangs_in_backward_leaves_no_staging_slot_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_while_the_disk_hangs(tmp_path, FaultyDisk(), Hang("write"), monkeypatch)
