"""The NVMe store on a disk that fails, stops short or hangs: no silent loss, and it stays usable."""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import random
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from pathlib import Path

import pytest

from hetmem.base.units import MIB, round_down
from hetmem.errors import StoreError
from hetmem.memory.host_memory import Mapping
from hetmem.memory.nvme_store import BLOCK_BYTES, NvmeStore

REQUEST_BYTES = 2 * BLOCK_BYTES
EXTENT_BYTES = 5 * REQUEST_BYTES


def random_memory(nbytes: int, seed: int) -> memoryview:
    view = Mapping(nbytes).buffer(0, nbytes)
    view[:] = random.Random(seed).randbytes(nbytes)
    return view


class FaultyDisk:
    """The system calls, with a `fault(offset, nbytes)` asked first: it may raise, or return the bytes to move.

    Refuses what O_DIRECT refuses, so that a store which retries on unaligned memory is found out on any filesystem.
    """

    def __init__(self) -> None:
        self.fault: Callable[[int, int], int] = lambda _, nbytes: nbytes
        self.offsets: list[int] = []

    def preadv(self, fd: int, buffers: list[memoryview], offset: int, /) -> int:
        return self._move(os.preadv, fd, buffers, offset)

    def pwritev(self, fd: int, buffers: list[memoryview], offset: int, /) -> int:
        return self._move(os.pwritev, fd, buffers, offset)

    def _move(self, call: Callable[..., int], fd: int, buffers: list[memoryview], offset: int) -> int:
        (memory,) = buffers
        self.offsets.append(offset)
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT and (offset % BLOCK_BYTES or len(memory) % BLOCK_BYTES):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        nbytes = self.fault(offset, len(memory))
        if not nbytes:
            return 0
        cached = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)  # a transfer of any length
        try:
            return call(cached, [memory[:nbytes]], offset)
        finally:
            os.close(cached)


@pytest.fixture
def disk() -> FaultyDisk:
    return FaultyDisk()


@pytest.fixture(params=[1, 3], ids=["1thread", "3threads"])
def store(tmp_path: Path, disk: FaultyDisk, request: pytest.FixtureRequest) -> Iterator[NvmeStore]:
    made = NvmeStore([tmp_path], MIB, threads=request.param, request_bytes=REQUEST_BYTES, io=disk)
    yield made
    made.close()


def failing_at(position: int, number: int) -> Callable[[int, int], int]:
    def fault(offset: int, nbytes: int) -> int:
        if offset == position:
            raise OSError(number, os.strerror(number))
        return nbytes

    return fault


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("failing_request", range(5))
def test_an_error_in_any_request_fails_the_future_and_says_where(
    store: NvmeStore, disk: FaultyDisk, tmp_path: Path, failing_request: int, number: int
) -> None:
    _, extent = store.reserve_many([BLOCK_BYTES, EXTENT_BYTES])
    position = extent.offset + failing_request * REQUEST_BYTES
    for transfer, verb in ((store.read, "read"), (store.write, "write")):
        disk.fault = failing_at(position, number)
        memory = random_memory(EXTENT_BYTES, 1)
        with pytest.raises(StoreError) as caught:
            transfer(extent, memory).result()
        assert caught.value.errno == number
        for part in (f"cannot {verb} {REQUEST_BYTES} bytes", f"offset {position} ", str(tmp_path), "after 0 bytes"):
            assert part in str(caught.value)
        assert os.strerror(number) in str(caught.value)


def test_a_failure_leaves_the_store_and_its_other_extents_usable(store: NvmeStore, disk: FaultyDisk) -> None:
    first, second = store.reserve_many([EXTENT_BYTES, EXTENT_BYTES])
    source, back = random_memory(EXTENT_BYTES, 1), random_memory(EXTENT_BYTES, 2)
    healthy = disk.fault
    disk.fault = failing_at(REQUEST_BYTES, errno.EIO)
    failed = store.write(first, source)
    assert store.write(second, source).result() == EXTENT_BYTES
    assert isinstance(failed.exception(), StoreError)
    assert bytes(store.view(second)) == bytes(source)
    disk.fault = healthy
    assert store.write(first, source).result() == EXTENT_BYTES
    assert store.read(first, back).result() == EXTENT_BYTES
    assert bytes(back) == bytes(source)
    assert store.reserve(BLOCK_BYTES).offset == 2 * EXTENT_BYTES


def test_no_request_is_issued_after_a_failure(tmp_path: Path, disk: FaultyDisk) -> None:
    store = NvmeStore([tmp_path], MIB, threads=1, request_bytes=REQUEST_BYTES, io=disk)
    extent = store.reserve(EXTENT_BYTES)
    disk.fault = failing_at(REQUEST_BYTES, errno.EIO)
    assert store.read(extent, random_memory(EXTENT_BYTES, 0)).exception() is not None
    assert disk.offsets == [0, REQUEST_BYTES]
    assert store.bytes_read == REQUEST_BYTES
    store.close()


def test_after_a_failed_write_views_see_all_of_it_or_the_error_says_that_they_do_not(
    store: NvmeStore, disk: FaultyDisk
) -> None:
    """A home that is partly new would be weights that never were, and look like any other."""
    extent = store.reserve(EXTENT_BYTES)
    view, source = store.view(extent), random_memory(EXTENT_BYTES, 1)
    disk.fault = failing_at(REQUEST_BYTES, errno.ENOSPC)  # where the disk is asked; the page cache is asked from 0 on
    with pytest.raises(StoreError, match=r"No space left.*only the page cache has all of it") as caught:
        store.write(extent, source).result()
    assert caught.value.errno == errno.ENOSPC
    assert bytes(view) == bytes(source)

    def read_only(_: int, __: int) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    disk.fault = read_only
    with pytest.raises(StoreError, match=r"Read-only.*a part of it is old"):
        store.write(extent, random_memory(EXTENT_BYTES, 2)).result()
    disk.fault = lambda _, nbytes: nbytes
    assert store.write(extent, source).result() == EXTENT_BYTES


def test_a_failed_future_waits_until_no_request_touches_the_memory(tmp_path: Path, disk: FaultyDisk) -> None:
    """Otherwise the memory would be reused while the disk still writes into it."""
    store = NvmeStore([tmp_path], MIB, threads=2, request_bytes=REQUEST_BYTES, io=disk)
    extent = store.reserve(2 * REQUEST_BYTES)
    first_runs, second_failed, go_on = threading.Event(), threading.Event(), threading.Event()

    def fault(offset: int, nbytes: int) -> int:
        if offset == 0:
            first_runs.set()
            assert go_on.wait(30)
            return nbytes
        assert first_runs.wait(30)
        second_failed.set()
        raise OSError(errno.EIO, "broken")

    disk.fault = fault
    future = store.read(extent, random_memory(2 * REQUEST_BYTES, 0))
    assert second_failed.wait(30)
    assert not wait([future], timeout=0.05).done
    assert not future.cancel()
    go_on.set()
    assert isinstance(future.exception(timeout=30), StoreError)
    store.close()


def test_a_future_resolves_only_when_its_slowest_request_is_done(tmp_path: Path, disk: FaultyDisk) -> None:
    """TensorNVMe reported reads done before they were."""
    store = NvmeStore([tmp_path], MIB, threads=2, request_bytes=REQUEST_BYTES, io=disk)
    extent = store.reserve(EXTENT_BYTES)
    source, back = random_memory(EXTENT_BYTES, 1), random_memory(EXTENT_BYTES, 2)
    store.write(extent, source).result()
    hung, go_on, others = threading.Event(), threading.Event(), threading.Semaphore(0)

    def fault(offset: int, nbytes: int) -> int:
        if offset == 0:
            hung.set()
            assert go_on.wait(30)
        else:
            others.release()
        return nbytes

    disk.fault = fault
    future = store.read(extent, back)
    assert hung.wait(30)
    assert all(others.acquire(timeout=30) for _ in range(4))
    assert not wait([future], timeout=0.05).done
    go_on.set()
    assert future.result(timeout=30) == EXTENT_BYTES
    assert bytes(back) == bytes(source)
    store.close()


def test_a_read_does_not_queue_behind_writes_that_hang(tmp_path: Path, disk: FaultyDisk) -> None:
    store = NvmeStore([tmp_path], MIB, threads=1, request_bytes=REQUEST_BYTES, io=disk)
    written, read = store.reserve_many([EXTENT_BYTES, EXTENT_BYTES])
    go_on = threading.Event()

    def fault(offset: int, nbytes: int) -> int:
        assert offset >= read.offset or go_on.wait(30)
        return nbytes

    disk.fault = fault
    write = store.write(written, random_memory(EXTENT_BYTES, 1))
    assert store.read(read, random_memory(EXTENT_BYTES, 2)).result(timeout=30) == EXTENT_BYTES
    assert not write.done()
    go_on.set()
    assert write.result(timeout=30) == EXTENT_BYTES
    store.close()


def test_close_waits_for_a_transfer_that_hangs(tmp_path: Path, disk: FaultyDisk) -> None:
    store = NvmeStore([tmp_path], MIB, threads=1, request_bytes=REQUEST_BYTES, io=disk)
    extent = store.reserve(EXTENT_BYTES)
    go_on = threading.Event()

    def fault(_: int, nbytes: int) -> int:
        assert go_on.wait(30)
        return nbytes

    disk.fault = fault
    future = store.write(extent, random_memory(EXTENT_BYTES, 1))
    closer = threading.Thread(target=store.close)
    closer.start()
    closer.join(timeout=0.05)
    assert closer.is_alive()
    assert not future.done()
    go_on.set()
    closer.join(timeout=30)
    assert future.result(timeout=0) == EXTENT_BYTES


@pytest.mark.parametrize("limit", [1, 1000, BLOCK_BYTES, BLOCK_BYTES + 1, REQUEST_BYTES - 1])
def test_short_transfers_go_on_where_they_stopped(store: NvmeStore, disk: FaultyDisk, limit: int) -> None:
    nbytes = BLOCK_BYTES if limit == 1 else EXTENT_BYTES
    _, extent = store.reserve_many([BLOCK_BYTES, nbytes])
    source, back = random_memory(nbytes, 1), random_memory(nbytes, 2)
    disk.fault = lambda _, wanted: min(limit, wanted)
    assert store.write(extent, source).result() == nbytes
    assert bytes(store.view(extent)) == bytes(source)
    assert store.read(extent, back).result() == nbytes
    assert bytes(back) == bytes(source)
    assert (store.bytes_read, store.bytes_written) == (nbytes, nbytes)


@pytest.mark.parametrize("limit", [1000, BLOCK_BYTES])
def test_an_error_after_a_short_transfer_tells_how_far_it_came(store: NvmeStore, disk: FaultyDisk, limit: int) -> None:
    extent = store.reserve(EXTENT_BYTES)

    def fault(offset: int, nbytes: int) -> int:
        if offset == limit:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return min(limit, nbytes) if offset == 0 else nbytes

    disk.fault = fault
    with pytest.raises(StoreError, match=f"{REQUEST_BYTES} bytes at offset 0 .* after {limit} bytes"):
        store.write(extent, random_memory(EXTENT_BYTES, 0)).result()


def test_no_progress_is_an_error_and_not_an_endless_loop(store: NvmeStore, disk: FaultyDisk) -> None:
    extent = store.reserve(EXTENT_BYTES)
    disk.fault = lambda offset, nbytes: 0 if offset == REQUEST_BYTES else nbytes
    for transfer in (store.read, store.write):
        with pytest.raises(StoreError, match="end of file after 0 bytes"):
            transfer(extent, random_memory(EXTENT_BYTES, 0)).result()


@pytest.mark.parametrize("kept_bytes", [0, BLOCK_BYTES, REQUEST_BYTES + 1000])
def test_a_file_cut_short_by_someone_else_is_an_error_and_never_a_short_read(tmp_path: Path, kept_bytes: int) -> None:
    store = NvmeStore([tmp_path], MIB, threads=1, request_bytes=REQUEST_BYTES)
    extent = store.reserve(EXTENT_BYTES)
    os.ftruncate(store._files[0].buffered, kept_bytes)
    start = round_down(kept_bytes, REQUEST_BYTES)
    with pytest.raises(StoreError, match=f"offset {start} .* end of file after {kept_bytes - start} bytes"):
        store.read(extent, random_memory(EXTENT_BYTES, 0)).result()
    assert store.bytes_read == start
    store.close()


def test_an_exception_in_a_thread_reaches_the_one_who_waits_and_says_where(
    store: NvmeStore, disk: FaultyDisk, tmp_path: Path
) -> None:
    _, extent = store.reserve_many([BLOCK_BYTES, EXTENT_BYTES])

    def fault(_: int, __: int) -> int:
        raise RuntimeError("a bug")

    disk.fault = fault
    with pytest.raises(StoreError) as caught:
        store.read(extent, random_memory(EXTENT_BYTES, 0)).result(timeout=30)
    assert isinstance(caught.value.__cause__, RuntimeError)
    for part in (f"cannot read {REQUEST_BYTES} bytes at offset {BLOCK_BYTES} ", str(tmp_path), "RuntimeError('a bug')"):
        assert part in str(caught.value)


def test_a_failure_keeps_neither_the_transfer_nor_the_memory_alive(tmp_path: Path, disk: FaultyDisk) -> None:
    store = NvmeStore([tmp_path], MIB, threads=1, request_bytes=REQUEST_BYTES, io=disk)
    extent = store.reserve(EXTENT_BYTES)
    disk.fault = failing_at(0, errno.EIO)
    gc.collect()
    gc.disable()
    try:
        future = store.read(extent, random_memory(EXTENT_BYTES, 0))
        assert future.exception(timeout=30) is not None
        store.close()
        gone = weakref.ref(future)
        del future
        assert gone() is None
    finally:
        gc.enable()


def test_the_link_is_busy_while_transfers_overlap_and_not_in_between(
    tmp_path: Path, disk: FaultyDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = 0.0
    monkeypatch.setattr("hetmem.memory.nvme_io.time.perf_counter", lambda: clock)
    store = NvmeStore([tmp_path], MIB, threads=2, request_bytes=REQUEST_BYTES, io=disk)
    extents = store.reserve_many([REQUEST_BYTES, REQUEST_BYTES])
    go_on = {extent.offset: threading.Event() for extent in extents}

    def fault(offset: int, nbytes: int) -> int:
        assert go_on[offset].wait(30)
        return nbytes

    disk.fault = fault
    first = store.read(extents[0], random_memory(REQUEST_BYTES, 0))
    clock = 1.0
    second = store.read(extents[1], random_memory(REQUEST_BYTES, 0))
    clock = 3.0
    go_on[extents[0].offset].set()
    first.result(timeout=30)
    clock = 4.0
    assert store.read_seconds == 4.0  # still busy with the second
    go_on[extents[1].offset].set()
    second.result(timeout=30)
    clock = 10.0
    store.read(extents[0], random_memory(REQUEST_BYTES, 0)).result(timeout=30)
    assert store.read_seconds == 4.0
    assert store.write_seconds == 0.0
    store.close()
