"""The NVMe store keeps its disks busy: extents in turn, threads for each, and every transfer shared out to them."""

from __future__ import annotations

import itertools
import os
import threading
from pathlib import Path

import pytest

from tests.memory.tested import BLOCK_BYTES, MIB, Mapping, NvmeStore


@pytest.mark.parametrize("chunks", [1, 2, 3, 4, 5, 8, 12])
@pytest.mark.parametrize("disks", [2, 3, 4])
def test_the_roles_of_a_chunk_and_its_neighbours_lie_on_different_disks(
    tmp_path: Path, chunks: int, disks: int
) -> None:
    """Else a chunk that training waits for has one disk, while the others have nothing to do."""
    store = NvmeStore([tmp_path] * disks, 64 * MIB)
    roles = [[extent.file for extent in store.reserve_many([MIB] * chunks)] for _ in range(3)]
    for files in zip(*roles, strict=True):
        assert len(set(files)) >= 2
    for files in roles:
        assert all(left != right for left, right in itertools.pairwise(files))
    every = [file for files in roles for file in files]
    assert max(map(every.count, range(disks))) - min(map(every.count, range(disks))) <= 1
    store.close()


def test_every_disk_has_threads_of_its_own(tmp_path: Path) -> None:
    """A disk that is slow, or hangs, keeps no other one from being read."""
    waits, go_on = threading.Event(), threading.Event()

    class OneHangs:
        @staticmethod
        def preadv(fd: int, buffers: list[memoryview], offset: int, /) -> int:
            if fd == slow:
                waits.set()
                assert go_on.wait(30)
            return os.preadv(fd, buffers, offset)

        pwritev = os.pwritev

    store = NvmeStore([tmp_path] * 2, MIB, threads=1, io=OneHangs())
    slow = store._files[0].direct
    extents = store.reserve_many([BLOCK_BYTES] * 2)
    memory = [Mapping(BLOCK_BYTES).buffer(0, BLOCK_BYTES) for _ in range(2)]
    hanging = store.read(extents[0], memory[0])
    assert waits.wait(30)
    assert store.read(extents[1], memory[1]).result(timeout=30) == BLOCK_BYTES
    assert not hanging.done()
    go_on.set()
    assert hanging.result(timeout=30) == BLOCK_BYTES
    store.close()


@pytest.mark.parametrize(
    ("nbytes", "requests"),
    [(2 * MIB, [2]), (3 * MIB, [1, 2]), (8 * MIB, [2] * 4), (20 * MIB, [5] * 4), (64 * MIB, [8] * 8)],
)
def test_a_transfer_is_shared_out_to_all_threads_in_requests_that_are_worth_it(
    tmp_path: Path, nbytes: int, requests: list[int]
) -> None:
    sizes = []

    class Counts:
        @staticmethod
        def preadv(fd: int, buffers: list[memoryview], offset: int, /) -> int:
            sizes.append(len(buffers[0]) // MIB)
            return os.preadv(fd, buffers, offset)

        pwritev = os.pwritev

    store = NvmeStore([tmp_path], nbytes, threads=4, request_bytes=8 * MIB, io=Counts())
    store.read(store.reserve(nbytes), Mapping(nbytes).buffer(0, nbytes)).result()
    assert sorted(sizes) == requests
    store.close()
