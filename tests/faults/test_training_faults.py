"""Training on a disk that fails: the loop is told at once and where, nothing is lost, and it can go on."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import hetmem
from hetmem import testing
from hetmem.errors import StoreError
from tests.engine.harness import loss_of, mlp, pair, same_bits, vector_batches
from tests.faults.disk import BLOCK_BYTES, EIO, ENOSPC, FaultyDisk, breaks, ends, healthy, once
from tests.faults.training import CHUNK_BYTES, REQUEST_BYTES, WHERE, Training, tensors
from tests.forked import Forks
from tests.optim.stories import one
from tests.pairs import some

FAULTS = {"EIO": EIO, "full": ENOSPC, "end of file": ends, "exception": breaks}


def cases(calls: range) -> list[Any]:
    """An error at every third of `calls`, each other fault at one of them; at more of them with `--all-cases`."""
    others = [some([(name, call) for call in calls[1::5]], 4) for name in list(FAULTS)[1:]]
    return sum(others, some([("EIO", call) for call in calls], 3))


@pytest.fixture
def training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Training:
    return Training(FaultyDisk(), tmp_path, monkeypatch)


@pytest.mark.parametrize(("fault", "call"), cases(range(0, 21, 2)))
def test_a_fault_in_forward_or_backward_is_raised_there_and_repeating_them_gives_the_same_bits(
    training: Training, fault: str, call: int
) -> None:
    batch = next(training.batches)
    before = training.homes()
    training.disk.fault = once(call, FAULTS[fault])
    with pytest.raises(StoreError) as caught:
        loss_of(training.managed, batch).backward()
    assert training.where.search(str(caught.value))
    assert fault != "exception" or isinstance(caught.value.__cause__, RuntimeError)
    for (name, left), (_, right) in zip(before, training.homes(), strict=True):
        assert same_bits(left, right), f"{name} has changed"
    training.right.zero_grad()
    for module, optimizer in ((training.plain, training.left), (training.managed, training.right)):
        loss_of(module, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    training.assert_same()
    training.both()
    training.assert_same()
    hetmem.release(training.managed)


@pytest.mark.parametrize(("fault", "call"), cases(range(0, 71, 5)))
def test_a_fault_in_the_step_is_raised_there_and_the_roles_of_a_chunk_are_all_before_or_all_after_it(
    training: Training, fault: str, call: int
) -> None:
    """Who catches the error and saves a checkpoint saves moments and the count of steps that belong to the weights."""
    batch = next(training.batches)
    for module in (training.plain, training.managed):
        loss_of(module, batch).backward()
    before = training.homes()
    training.left.step()
    after = tensors(training.plain, training.left)
    training.disk.fault = once(call, FAULTS[fault])
    with pytest.raises(StoreError) as caught:
        training.step_to_the_end()
    assert training.where.search(str(caught.value))
    now = training.homes()
    for start, parameter in enumerate(training.managed.parameters()):
        updated = training.right.state[parameter]["step"].item() == 2
        for role in range(3 * start, 3 * start + 3):
            name, expected = (after if updated else before)[role]
            assert same_bits(now[role][1], expected), f"step {1 + updated}, but {name} is not of it"
    training.right.zero_grad()
    loss_of(training.managed, batch).backward()  # everything can be read
    hetmem.release(training.managed)


def test_writes_that_fail_midway_leave_homes_whole(training: Training) -> None:
    """A chunk is two requests; the second one fails in every write, and the first one is on disk already."""
    batch = next(training.batches)
    loss_of(training.plain, batch).backward()
    loss_of(training.managed, batch).backward()
    before = training.homes()
    training.left.step()
    after = tensors(training.plain, training.left)

    def full(verb: str, offset: int, nbytes: int) -> int:
        return ENOSPC(verb, offset, nbytes) if verb == "write" and offset % CHUNK_BYTES else nbytes

    training.disk.fault = full
    with pytest.raises(StoreError, match=os.strerror(errno.ENOSPC) + ".*only the page cache has all of it"):
        training.right.step()
    training.disk.fault = healthy
    for _ in range(20):  # each write that has failed meanwhile is told of once
        with contextlib.suppress(StoreError):
            training.right.synchronize()
            break
    for (name, old), (_, new), (_, now) in zip(before, after, training.homes(), strict=True):
        assert same_bits(now, old) or same_bits(now, new), f"{name} is neither before nor after"
    for _ in range(8):  # each write that failed is told of once; what is not on the disk yet is still in memory
        with contextlib.suppress(StoreError):
            loss_of(training.managed, batch)
            break
    hetmem.release(training.managed)
    for (name, old), (_, new), (_, now) in zip(before, after, tensors(training.managed, training.right), strict=True):
        assert same_bits(now, old) or same_bits(now, new), f"{name} is neither before nor after"


def test_a_release_after_writes_that_failed_tells_of_one_and_has_released_the_model_whole(training: Training) -> None:
    batch = next(training.batches)
    loss_of(training.plain, batch).backward()
    loss_of(training.managed, batch).backward()
    before = training.homes()
    training.left.step()
    after = tensors(training.plain, training.left)
    training.disk.fault = lambda verb, offset, nbytes: ENOSPC(verb, offset, nbytes) if verb == "write" else nbytes
    with pytest.raises(StoreError):
        training.right.step()
    training.settle()
    with pytest.raises(StoreError):
        hetmem.release(training.managed)
    for name, parameter in training.managed.named_parameters():
        (old,), (new,) = ([value for what, value in side if what == name] for side in (before, after))
        assert same_bits(parameter, old) or same_bits(parameter, new), f"{name} is neither before nor after"
    loss_of(training.managed, batch).backward()  # an ordinary model


@pytest.mark.parametrize("limit", [1000, BLOCK_BYTES, REQUEST_BYTES - 1])
def test_short_reads_and_writes_change_nothing(training: Training, limit: int) -> None:
    training.disk.fault = lambda _, __, nbytes: min(nbytes, limit)
    for _ in range(2):
        training.both()
        training.assert_same()
    hetmem.release(training.managed)


def test_every_byte_of_weights_and_states_is_written_once_a_step_and_of_gradients_at_most_once(
    training: Training,
) -> None:
    """Also the report's bytes per day: those of a step, at its rate."""
    training.both()
    training.right.synchronize()
    (store,) = training.disk.stores
    training.disk.calls.clear()
    written = store.bytes_written
    training.both()
    training.right.synchronize()
    homes = sum(-(-parameter.numel() // 4096) * CHUNK_BYTES for parameter in training.managed.parameters())
    times: dict[int, int] = {}
    for verb, offset, nbytes in training.disk.calls:
        if verb == "write":
            for block in range(offset, offset + nbytes, BLOCK_BYTES):
                times[block] = times.get(block, 0) + 1
    assert set(times.values()) == {1}
    assert 3 * homes <= len(times) * BLOCK_BYTES <= 4 * homes
    assert store.bytes_written - written == len(times) * BLOCK_BYTES
    step = hetmem.report(training.managed).to_dict()["step"]
    assert step["bytes"]["nvme_write"] == store.bytes_written - written
    assert step["nvme_written_bytes_per_day"] == round(step["bytes"]["nvme_write"] / step["seconds"] * 86400)
    hetmem.release(training.managed)


TRAIN = """
import os, signal, sys
from pathlib import Path
import torch, hetmem
from tests.engine.harness import loss_of, manage, mlp, vector_batches
torch.manual_seed(0)
model = manage(mlp(), "nvme", Path(sys.argv[1]))
optimizer = hetmem.AdamW(model.parameters())
for _ in range(3):
    for batch in vector_batches(1, 8, 64):
        loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
held = 0
for descriptor in map(int, os.listdir("/proc/self/fd")):
    try:
        status = os.fstat(descriptor)
    except OSError:
        continue  # it listed them
    held += 512 * status.st_blocks * (not status.st_nlink)
print(held, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_training_leaves_no_file_and_no_blocks_and_a_new_one_starts(forks: Forks, tmp_path: Path) -> None:
    killed = forks.run(TRAIN, str(tmp_path))
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert int(killed.stdout) >= 3 * CHUNK_BYTES, "bytes on the disk in files without a name"
    assert os.listdir(tmp_path) == []
    _, managed = pair(mlp, "nvme", tmp_path)
    one(managed, vector_batches(1, 8, 64)[0], hetmem.AdamW(managed.parameters()))


@pytest.mark.parametrize("call", some(range(24), 3))
def test_what_was_added_up_before_a_fault_in_backward_stays_in_the_gradients(training: Training, call: int) -> None:
    first, second = next(training.batches), next(training.batches)
    expected: list[list[torch.Tensor]] = []
    for batch in (first, second):
        loss_of(training.plain, batch).backward()
        expected.append([parameter.grad.clone() for parameter in training.plain.parameters()])
    loss_of(training.managed, first).backward()
    training.settle()
    loss = loss_of(training.managed, second)
    training.disk.fault = once(call, EIO)
    with contextlib.suppress(StoreError):
        loss.backward()
    training.disk.fault = healthy
    for before, after, parameter in zip(*expected, training.managed.parameters(), strict=True):
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, before) or torch.equal(parameter.grad, after)


def test_gradients_are_whole_when_the_error_of_a_write_comes(training: Training) -> None:
    """Another one was still being written: who read it met half of it, and what he wrote to it was overwritten."""
    first, second = next(training.batches), next(training.batches)
    loss_of(training.managed, first).backward()
    for batch in (first, second):
        loss_of(training.plain, batch).backward()
    loss = loss_of(training.managed, second)
    training.settle()
    all_have_arrived, failed = threading.Event(), threading.Event()
    writes = iter(range(1 << 30))

    def at_the_end(original: Any, *args: Any) -> None:
        all_have_arrived.set()
        original(*args)

    def fault(verb: str, offset: int, nbytes: int) -> int:
        if verb != "write":
            return nbytes
        number = next(writes)
        if number >= 8:  # those before make room for what arrives
            assert all_have_arrived.wait(30)
        if number == 9:  # others come late
            failed.set()
            return EIO(verb, offset, nbytes)
        if failed.is_set():
            time.sleep(0.05)
        return nbytes

    training.disk.fault = fault
    with testing.around("wait until written", at_the_end), pytest.raises(StoreError, match="cannot write"):
        loss.backward()
    training.disk.fault = healthy
    for left, right in zip(training.plain.parameters(), training.managed.parameters(), strict=True):
        assert right.grad is not None and torch.equal(left.grad, right.grad)


@pytest.mark.parametrize("goes_on", [False, True], ids=["step", "next batch"])
@pytest.mark.parametrize("overlap", ["backward", "forward"])
def test_what_is_refused_after_a_backward_that_the_disk_has_ended_names_the_disk(
    overlap: str, goes_on: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program drops the gradients, as it would in torch. It was told to clip and to schedule in another way."""
    disk = FaultyDisk()
    disk.used_by(monkeypatch, threads=2, request_bytes=REQUEST_BYTES)
    _, managed = pair(mlp, "nvme", tmp_path)
    optimizer = hetmem.AdamW(managed.parameters(), lr=1e-2, overlap=overlap)
    batches = vector_batches(4, 8, 64)
    for batch in batches[:2]:
        one(managed, batch, optimizer)
    optimizer.synchronize()
    loss = loss_of(managed, batches[2])
    disk.fault = once(20, EIO)
    with pytest.raises(StoreError):
        loss.backward()
    disk.fault = healthy
    optimizer.zero_grad()
    failed = rf"StoreError: \[Errno 5\] {WHERE.format(re.escape(str(tmp_path)))}: Input/output error"
    says = rf"the backward of this step has ended with .*{failed}.*forget_step\(\) and zero_grad\(\).*: 4\.bias"
    for _ in range(2):
        with pytest.raises(RuntimeError, match=says):
            loss_of(managed, batches[3]).backward() if goes_on else optimizer.step()
    optimizer.forget_step()
    optimizer.zero_grad()
    one(managed, batches[3], optimizer)
    hetmem.release(managed)
