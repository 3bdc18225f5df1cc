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


@pytest.mark.parametrize("at_once", [1, 4, 12])
def test_extents_go_where_room_is_left(tmp_path: Path, at_once: int) -> None:
    """A small disk was filled as fast as the large one beside it, and refused when that had room for all."""
    store = NvmeStore([tmp_path] * 3, 64 * MIB)
    for number, (file, room) in enumerate(zip(store._files, (2 * MIB + BLOCK_BYTES, 100 * MIB, 3 * MIB), strict=True)):
        file.disk, file.disk_room_bytes = number, room
    files = [extent.file for _ in range(12 // at_once) for extent in store.reserve_many([MIB] * at_once)]
    assert [files.count(file) for file in range(3)] == [2, 7, 3]
    assert sorted(files[:6]) == [0, 0, 1, 1, 2, 2], "as long as all have room they share"
    assert store.reserve(200).file == 0, "of what is small there is room for one more"
    store.close()


def test_files_on_one_disk_share_its_room(tmp_path: Path) -> None:
    store = NvmeStore([tmp_path] * 3, 64 * MIB)
    for file, disk, room in zip(store._files, (0, 0, 1), (2 * MIB, 2 * MIB, 100 * MIB), strict=True):
        file.disk, file.disk_room_bytes = disk, room
    files = [extent.file for extent in store.reserve_many([MIB] * 6)]
    assert [files.count(file) for file in range(3)] == [1, 1, 4]
    store.close()


def test_where_no_disk_has_room_by_what_it_had_the_one_with_most_is_asked(tmp_path: Path) -> None:
    """It may have been given some since, and a budget may go beyond the tenth that is left."""
    store = NvmeStore([tmp_path] * 2, 64 * MIB)
    for number, file in enumerate(store._files):
        file.disk, file.disk_room_bytes = number, number * MIB
    files = [extent.file for extent in store.reserve_many([4 * MIB] * 2)]
    assert files == [1, 0]
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
