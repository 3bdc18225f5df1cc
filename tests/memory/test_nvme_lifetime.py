"""The NVMe store from its first file to its last: what begins, what ends, and what outlives it."""

from __future__ import annotations

import gc
import os
import signal
import stat
import threading
from pathlib import Path

import pytest

from hetmem.errors import BudgetError, CapacityError, StoreError
from tests.forked import Forks
from tests.memory.left import nothing_left, random_memory
from tests.memory.tested import BLOCK_BYTES, MIB, NvmeStore, nvme_io

__all__ = ["nothing_left"]  # a fixture


def test_close_finishes_what_was_started_and_leaves_neither_threads_nor_files(
    tmp_path: Path, nothing_left: None
) -> None:
    store = NvmeStore([tmp_path, tmp_path], 64 * MIB, request_bytes=BLOCK_BYTES)
    extents = store.reserve_many([2 * MIB, 2 * MIB])
    files = [file for file in Path("/proc/self/fd").iterdir() if file.exists() and str(tmp_path) in os.readlink(file)]
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    futures = [store.write(extent, random_memory(2 * MIB, seed)) for seed, extent in enumerate(extents)]
    store.close()
    assert [future.done() and future.result() for future in futures] == [2 * MIB, 2 * MIB]
    assert not list(tmp_path.iterdir()), "they have no name"
    store.close()
    for operation in (
        lambda: store.reserve(1),
        lambda: store.view(extents[0]),
        lambda: store.read(extents[0], random_memory(BLOCK_BYTES, 0)),
        lambda: store.write(extents[0], random_memory(BLOCK_BYTES, 0)),
    ):
        with pytest.raises(StoreError, match="closed"):
            operation()


def test_views_outlive_the_store(tmp_path: Path, nothing_left: None) -> None:
    store = NvmeStore([tmp_path], MIB)
    _, extent = store.reserve_many([BLOCK_BYTES, BLOCK_BYTES])
    view = store.view(extent)
    source = random_memory(BLOCK_BYTES, 3)
    store.write(extent, source).result()
    store.close()
    del store
    gc.collect()
    assert bytes(view) == bytes(source)
    view[:] = bytes(BLOCK_BYTES)
    assert bytes(view) == bytes(BLOCK_BYTES)


def test_a_store_dropped_without_close_finishes_and_cleans_up(tmp_path: Path, nothing_left: None) -> None:
    threads = set(threading.enumerate())
    store = NvmeStore([tmp_path], 8 * MIB, request_bytes=BLOCK_BYTES)
    extent = store.reserve(2 * MIB)
    view, source = store.view(extent), random_memory(2 * MIB, 1)
    future = store.write(extent, source)
    del store
    assert future.result() == 2 * MIB
    assert bytes(view) == bytes(source)
    for thread in set(threading.enumerate()) - threads:
        thread.join(timeout=30)


def test_kill_leaves_no_file_and_no_blocks_behind(forks: Forks, tmp_path: Path) -> None:
    program = (
        "import os, signal, sys\n"
        "from hetmem.memory.nvme_store import NvmeStore\n"
        "store = NvmeStore([sys.argv[1]], 1 << 24)\n"
        "store.view(store.reserve(1 << 20))[:] = b'x' * (1 << 20)\n"
        "assert os.listdir(sys.argv[1]) == []\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert forks.run(program, str(tmp_path)) == (-signal.SIGKILL, "", "")
    assert os.listdir(tmp_path) == []


def test_an_unclosed_store_does_not_hold_up_the_end_of_the_interpreter(forks: Forks, tmp_path: Path) -> None:
    program = (
        "import sys, warnings\n"
        "warnings.simplefilter('error')\n"
        "from hetmem.memory.host_memory import Mapping\n"
        "from hetmem.memory.nvme_store import NvmeStore\n"
        "store = NvmeStore([sys.argv[1]], 1 << 24, request_bytes=4096)\n"
        "future = store.write(store.reserve(1 << 20), Mapping(1 << 20).buffer(0, 1 << 20))\n"
    )
    assert forks.run(program, str(tmp_path), seconds=60) == (0, "", "")


def test_the_interpreter_ends_although_a_disk_does_not_answer(forks: Forks, tmp_path: Path) -> None:
    program = (
        "import sys, threading\n"
        "from hetmem.memory import nvme_io\n"
        "from hetmem.memory.host_memory import Mapping\n"
        "from hetmem.memory.nvme_store import NvmeStore\n"
        "nvme_io._EXIT_SECONDS = 0.5\n"
        "class Hangs:\n"
        "    def preadv(self, *_):\n"
        "        threading.Event().wait()\n"
        "    pwritev = preadv\n"
        "store = NvmeStore([sys.argv[1]], 1 << 20, io=Hangs())\n"
        "store.write(store.reserve(4096), Mapping(4096).buffer(0, 4096))\n"
    )
    assert forks.run(program, str(tmp_path), seconds=60).returncode == 0


def test_what_is_queued_at_the_end_of_the_interpreter_writes_to_no_other_file(forks: Forks, tmp_path: Path) -> None:
    """Its threads go on while others end: a descriptor that is closed then is the next file's."""
    program = (
        "import atexit, os, sys, threading\n"
        "wrote, go_on = threading.Event(), threading.Event()\n"
        "def save():\n"  # what is registered first is called last
        "    results = [os.open(f'{sys.argv[1]}/{n}', os.O_RDWR | os.O_CREAT) for n in range(8)]\n"
        "    go_on.set()\n"
        "    wrote.wait(30)\n"
        "    print(*(os.fstat(result).st_size for result in results))\n"
        "atexit.register(save)\n"
        "from hetmem.memory import nvme_io\n"
        "from hetmem.memory.host_memory import Mapping\n"
        "from hetmem.memory.nvme_store import NvmeStore\n"
        "nvme_io._EXIT_SECONDS = 0.5\n"
        "class Late:\n"
        "    preadv = staticmethod(os.preadv)\n"
        "    def pwritev(self, *request):\n"
        "        go_on.wait()\n"
        "        try:\n"
        "            return os.pwritev(*request)\n"
        "        finally:\n"
        "            wrote.set()\n"
        "store = NvmeStore([sys.argv[1]], 1 << 24, threads=1, io=Late())\n"
        "future = store.write(store.reserve(4096), Mapping(4096).buffer(0, 4096))\n"
    )
    assert forks.run(program, str(tmp_path), seconds=60) == (0, "0 0 0 0 0 0 0 0\n", "")


def test_unusable_directories_are_named_and_nothing_stays_open(tmp_path: Path, nothing_left: None) -> None:
    (tmp_path / "file").touch()
    for bad in (tmp_path / "missing", tmp_path / "file", Path("/proc")):  # /proc refuses root as well
        with pytest.raises(BudgetError, match=f"{bad}.*Name an existing, writable directory"):
            NvmeStore([tmp_path, tmp_path, bad], MIB)
    assert os.listdir(tmp_path) == ["file"]


def test_without_room_in_the_address_space_nothing_stays_open(
    tmp_path: Path, nothing_left: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(_: int) -> None:
        raise CapacityError("cannot map 4096 bytes")

    monkeypatch.setattr(nvme_io, "Mapping", no_room)
    with pytest.raises(CapacityError, match="cannot map"):
        NvmeStore([tmp_path], MIB)
