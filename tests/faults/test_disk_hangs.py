"""A disk that does not answer: nobody waits for ever, the error says what for, and its memory is left alone."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import hetmem
from hetmem.base.units import MIB
from hetmem.errors import BudgetError, StoreError
from hetmem.memory.device import SimDevice
from hetmem.memory.mapping import Mapping
from hetmem.memory.nvme_store import BLOCK_BYTES, NvmeStore
from hetmem.memory.transfer import TransferEngine
from tests.engine.harness import (
    adamws,
    assert_same_states,
    assert_same_weights,
    loss_of,
    mlp,
    pair,
    vector_batches,
)
from tests.faults.disk import EIO, FaultyDisk
from tests.forked import Forks

SHORT_SECONDS = 0.02


class Hang:
    """A fault: one call of `verb` begins, moves nothing and does not come back until `answer` is set."""

    def __init__(self, verb: str) -> None:
        self.verb = verb
        self.offset = -1
        self.began, self.answer = threading.Event(), threading.Event()
        self._first = threading.Semaphore(1)

    def __call__(self, verb: str, offset: int, nbytes: int) -> int:
        if verb == self.verb and self._first.acquire(blocking=False):
            self.offset = offset
            self.began.set()
            assert self.answer.wait(60)
        return nbytes


@pytest.fixture
def disk() -> FaultyDisk:
    return FaultyDisk()


@pytest.fixture(params=["read", "write"])
def hang(disk: FaultyDisk, request: pytest.FixtureRequest) -> Iterator[Hang]:
    disk.fault = made = Hang(request.param)
    yield made
    made.answer.set()


@contextmanager
def impatient(store: NvmeStore, hang: Hang) -> Iterator[None]:
    """Within it, what hangs has hung for too long. Nothing else that is asked of the disk may be slow meanwhile."""
    assert hang.began.wait(30)
    patient, store.timeout_seconds = store.timeout_seconds, SHORT_SECONDS
    yield
    store.timeout_seconds = patient


def train_while_the_disk_hangs(directory: Path, disk: FaultyDisk, hang: Hang, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two backwards fail because of `hang`; every step has the bits of a run on a disk that answers."""
    disk.used_by(monkeypatch, threads=2, request_bytes=2 * BLOCK_BYTES)
    plain, managed = pair(mlp, "nvme", directory)
    left, right = adamws(plain, managed)
    (store,) = disk.stores
    for index, batch in enumerate(vector_batches(4, 8, 64)):
        if index == 2:
            disk.fault = hang
            store.timeout_seconds = 1.0
            for _ in range(2):
                with pytest.raises(StoreError, match=f"cannot {hang.verb} .*no answer for"):
                    loss_of(managed, batch).backward()
                right.zero_grad()
            store.timeout_seconds = 120
            hang.answer.set()
        for module, optimizer in ((plain, left), (managed, right)):
            loss_of(module, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert_same_weights(plain, managed)
        assert_same_states(left, right)
    hetmem.release(managed)


def start(engine: TransferEngine, verb: str, store: NvmeStore, tag: str) -> None:
    extent = store.reserve(BLOCK_BYTES)
    (engine.read if verb == "read" else engine.write)(tag, extent, Mapping(extent.nbytes).buffer(0, extent.nbytes))


def test_waiting_ends_with_an_error_that_says_for_what(tmp_path: Path, disk: FaultyDisk, hang: Hang) -> None:
    store = NvmeStore([tmp_path], MIB, threads=1, io=disk)
    engine = TransferEngine(SimDevice().copier, store)
    store.reserve(3 * BLOCK_BYTES)
    start(engine, hang.verb, store, "hangs")
    with impatient(store, hang):
        for _ in range(2):  # as often as somebody waits
            with pytest.raises(StoreError) as caught:
                engine.take(wait=True)
            assert caught.value.errno == errno.ETIMEDOUT
            where = f"cannot {hang.verb} {BLOCK_BYTES} bytes at offset {3 * BLOCK_BYTES} "
            for part in (where, str(tmp_path), "limit is 0.02", "HETMEM_NVME_TIMEOUT", " seconds"):
                assert part in str(caught.value)
        assert engine.take(wait=False) is None  # not over: its memory may still be touched
    hang.answer.set()
    finished = engine.take(wait=True)
    assert finished is not None
    assert (finished.tag, finished.error) == ("hangs", None)
    engine.close()
    store.close()


def test_what_the_disk_does_answer_is_reported_first(tmp_path: Path, disk: FaultyDisk, hang: Hang) -> None:
    store = NvmeStore([tmp_path], MIB, threads=2, io=disk)
    engine = TransferEngine(SimDevice().copier, store)
    start(engine, hang.verb, store, "hangs")
    assert hang.began.wait(30)
    start(engine, hang.verb, store, "answered")
    finished = engine.take(wait=True)
    assert finished is not None
    assert finished.tag == "answered"
    with impatient(store, hang), pytest.raises(StoreError, match="no answer for"):
        engine.take(wait=True)
    hang.answer.set()
    engine.close()
    store.close()


def test_waiting_in_a_queue_is_not_hanging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the time since the system was asked counts: a long queue on a slow disk is no fault."""
    clock = 0.0
    monkeypatch.setattr("hetmem.memory.nvme_requests.time.perf_counter", lambda: clock)
    disk, go_on = FaultyDisk(), threading.Semaphore(0)
    began = threading.Semaphore(0)

    def one_by_one(_: str, __: int, nbytes: int) -> int:
        began.release()
        assert go_on.acquire(timeout=30)
        return nbytes

    disk.fault = one_by_one
    store = NvmeStore([tmp_path], MIB, threads=1, request_bytes=BLOCK_BYTES, timeout_seconds=10, io=disk)
    extent = store.reserve(3 * BLOCK_BYTES)
    future = store.write(extent, Mapping(extent.nbytes).buffer(0, extent.nbytes))
    for _ in range(3):
        assert began.acquire(timeout=30)
        clock += 9
        assert store.patience_seconds() == 1
        go_on.release()
    future.result(timeout=30)
    clock += 100
    assert store.patience_seconds() == 10
    store.close()


def test_closing_does_not_wait_for_ever_either(tmp_path: Path, disk: FaultyDisk, hang: Hang) -> None:
    store = NvmeStore([tmp_path], MIB, threads=1, io=disk)
    extent = store.reserve(BLOCK_BYTES)
    view, memory = store.view(extent), Mapping(BLOCK_BYTES).buffer(0, BLOCK_BYTES)
    memory[:] = b"m" * BLOCK_BYTES
    if hang.verb == "read":
        view[:] = b"v" * BLOCK_BYTES
    descriptors = {store._files[0].buffered, store._files[0].direct}
    future = (store.read if hang.verb == "read" else store.write)(extent, memory)
    with impatient(store, hang), pytest.raises(StoreError, match="no answer for"):
        store.close()
    for descriptor in descriptors:
        os.fstat(descriptor)  # open, for what still uses it: another file would get the number
    hang.answer.set()
    assert future.result(timeout=30) == BLOCK_BYTES
    assert bytes(view) == bytes(memory) == (b"v" if hang.verb == "read" else b"m") * BLOCK_BYTES
    store.close()
    for descriptor in descriptors:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)


class CacheHangs(FaultyDisk):
    """The disk fails, and the page cache, which is asked next, does not answer until it is to."""

    def __init__(self) -> None:
        super().__init__()
        self.fault = EIO
        self.asked, self.answer = threading.Event(), threading.Event()

    def pwritev(self, fd: int, buffers: list[memoryview], offset: int, /) -> int:
        moved = super().pwritev(fd, buffers, offset)
        self.asked.set()
        assert self.answer.wait(60)
        return moved


def test_a_page_cache_that_takes_no_failed_write_is_not_waited_for_either(tmp_path: Path) -> None:
    disk = CacheHangs()
    store = NvmeStore([tmp_path], MIB, threads=1, io=disk, timeout_seconds=SHORT_SECONDS)
    future = store.write(store.reserve(BLOCK_BYTES), Mapping(BLOCK_BYTES).buffer(0, BLOCK_BYTES))
    assert disk.asked.wait(30)
    time.sleep(2 * SHORT_SECONDS)
    with pytest.raises(StoreError, match=f"cannot write {BLOCK_BYTES} bytes at offset 0 .*no answer for"):
        store.patience_seconds()
    assert not future.done()
    disk.answer.set()
    with pytest.raises(StoreError, match="only the page cache has all of it"):
        future.result(timeout=30)
    store.close()


def test_looks_behind_pages_that_hang_are_not_waited_for_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = NvmeStore([tmp_path], MIB, timeout_seconds=SHORT_SECONDS)
    extent, answer, read = store.reserve(64 * BLOCK_BYTES), threading.Event(), os.preadv

    def hangs(fd: int, buffers: list[memoryview], offset: int) -> int:
        assert answer.wait(60)
        return read(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", hangs)
    store.cache_pages(extent, range(0, 64 * BLOCK_BYTES, BLOCK_BYTES))  # as many as would take every thread
    look = store.look(extent, 0)
    time.sleep(2 * SHORT_SECONDS)
    for waits in (store.patience_seconds, lambda: look.first(1), store.close):
        with pytest.raises(StoreError, match=f"cannot read {BLOCK_BYTES} bytes at offset .*no answer for"):
            waits()
    answer.set()
    store.timeout_seconds = 60
    assert look.first(1) == b"\0"
    store.close()


def test_the_interpreter_ends_although_the_disk_hangs(forks: Forks, tmp_path: Path) -> None:
    program = (
        "import os, sys, threading\n"
        "from hetmem.memory.mapping import Mapping\n"
        "from hetmem.memory.nvme_store import NvmeStore\n"
        "class Hangs:\n"
        "    def preadv(self, *_):\n"
        "        threading.Event().wait()\n"
        "    pwritev = preadv\n"
        "store = NvmeStore([sys.argv[1]], 1 << 20, io=Hangs(), timeout_seconds=0.1)\n"
        "store.write(store.reserve(4096), Mapping(4096).buffer(0, 4096))\n"
        "store.close()\n"
    )
    done = forks.run(program, str(tmp_path), seconds=60)
    assert done.returncode == 1, done.stderr
    assert "cannot write 4096 bytes at offset 0" in done.stderr


# The backward that failed is told once more of the same disk when autograd forgets it, where nobody can be told.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_training_gets_the_error_and_goes_on_with_the_same_bits_once_the_disk_answers(
    tmp_path: Path, disk: FaultyDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it hangs, nothing else is put into the memory of the request: what it brings at last would destroy that."""
    train_while_the_disk_hangs(tmp_path, disk, Hang("read"), monkeypatch)


@pytest.mark.parametrize("text", ["", "0.5", "7200"])
def test_the_timeout_is_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("HETMEM_NVME_TIMEOUT", text)
    store = NvmeStore([tmp_path], MIB)
    assert store.timeout_seconds == float(text or 120)
    store.close()


def test_who_would_wait_for_ever_can(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than a thread is allowed to say."""
    monkeypatch.setenv("HETMEM_NVME_TIMEOUT", "1e12")
    store = NvmeStore([tmp_path], MIB)
    engine = TransferEngine(SimDevice().copier, store)
    start(engine, "read", store, "read")
    finished = engine.take(wait=True)
    assert finished is not None and finished.error is None
    assert store.look(store.reserve(BLOCK_BYTES), 0).first(1) == b"\0"
    engine.close()
    store.close()


@pytest.mark.parametrize("text", ["soon", "0", "-1", "inf", "nan"])
def test_a_senseless_timeout_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("HETMEM_NVME_TIMEOUT", text)
    with pytest.raises(BudgetError, match=f"seconds above 0, got '{text}'"):
        NvmeStore([tmp_path], MIB)
