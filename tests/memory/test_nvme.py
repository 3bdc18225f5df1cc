"""The NVMe store on a healthy disk: bits, coherence, reservations."""

from __future__ import annotations

import itertools
import os
import random
import stat
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hetmem.errors import BudgetError, CapacityError
from tests.memory.left import nothing_left, open_files, random_memory
from tests.memory.tested import BLOCK_BYTES, MIB, Extent, Mapping, NvmeStore

__all__ = ["nothing_left"]  # a fixture


@pytest.fixture
def store(tmp_path: Path, nothing_left: None) -> Iterator[NvmeStore]:
    made = NvmeStore([tmp_path], 64 * MIB, threads=2, request_bytes=3 * BLOCK_BYTES)
    yield made
    made.close()


@pytest.mark.parametrize("request_blocks", [1, 3, 7])
@pytest.mark.parametrize("blocks", [1, 2, 3, 7, 22])
def test_what_is_written_is_read_bit_for_bit(tmp_path: Path, blocks: int, request_blocks: int) -> None:
    nbytes = blocks * BLOCK_BYTES
    store = NvmeStore([tmp_path], 4 * MIB, threads=3, request_bytes=request_blocks * BLOCK_BYTES)
    before, extent, after = store.reserve_many([BLOCK_BYTES, nbytes, BLOCK_BYTES])
    source, back = random_memory(nbytes, seed=blocks), random_memory(nbytes, seed=99)
    assert store.write(extent, source).result() == nbytes
    assert store.read(extent, back).result() == nbytes
    assert bytes(back) == bytes(source)
    assert bytes(store.view(before)) == bytes(store.view(after)) == bytes(BLOCK_BYTES)
    assert (store.bytes_written, store.bytes_read) == (nbytes, nbytes)
    store.close()


def part(extent: Extent, offset: int) -> Extent:
    """What is behind `offset` bytes of `extent`, which is an extent too."""
    return Extent(extent.file, extent.offset + offset, extent.nbytes - offset)


def test_a_transfer_may_take_a_part_of_the_extent(store: NvmeStore) -> None:
    extent = store.reserve(8 * BLOCK_BYTES)
    source, back = random_memory(4 * BLOCK_BYTES, 1), random_memory(2 * BLOCK_BYTES, 2)
    store.write(part(extent, 3 * BLOCK_BYTES), source).result()
    store.read(part(extent, 4 * BLOCK_BYTES), back).result()
    assert bytes(back) == bytes(source[BLOCK_BYTES : 3 * BLOCK_BYTES])
    assert bytes(store.view(extent)) == bytes(3 * BLOCK_BYTES) + bytes(source) + bytes(BLOCK_BYTES)


def test_views_and_direct_transfers_see_each_others_bytes_both_ways(store: NvmeStore) -> None:
    """Repeated on a page that is cached and dirty: where a stale page cache would show."""
    _, extent = store.reserve_many([BLOCK_BYTES, 5 * BLOCK_BYTES])
    view, back = store.view(extent), Mapping(extent.nbytes).buffer(0, extent.nbytes)
    for seed in range(20):
        source = random_memory(extent.nbytes, seed)
        store.write(extent, source).result()
        assert bytes(view) == bytes(source)
        edited = random.Random(-seed).randbytes(extent.nbytes)
        view[:] = edited
        store.read(extent, back).result()
        assert bytes(back) == edited
        view[BLOCK_BYTES] ^= 255  # one dirty byte between direct writes of other blocks
        store.write(extent, source[: 1 * BLOCK_BYTES]).result()
        store.read(extent, back).result()
        assert bytes(back) == bytes(view)


def test_parallel_random_transfers_agree_with_a_model(tmp_path: Path, nothing_left: None) -> None:
    """Rounds of transfers of disjoint ranges, all in flight at once, against plain bytes in memory."""
    rng = random.Random(20)
    with_two_disks = [tmp_path, tmp_path]
    store = NvmeStore(with_two_disks, 8 * MIB, threads=4, request_bytes=3 * BLOCK_BYTES)
    extents = store.reserve_many([rng.randrange(1, 30 * BLOCK_BYTES) for _ in range(24)])
    model = {extent: bytearray(extent.nbytes) for extent in extents}
    for _ in range(12):
        reads = []
        futures = []
        for extent in extents:
            offset = rng.randrange(extent.nbytes // BLOCK_BYTES) * BLOCK_BYTES
            nbytes = rng.randrange(1, (extent.nbytes - offset) // BLOCK_BYTES + 1) * BLOCK_BYTES
            memory = random_memory(nbytes, rng.randrange(1 << 30))
            action = rng.choice(["read", "write", "view"])
            if action == "read":
                futures.append(store.read(part(extent, offset), memory))
                reads.append((memory, bytes(model[extent][offset : offset + nbytes])))
            elif action == "write":
                futures.append(store.write(part(extent, offset), memory))
                model[extent][offset : offset + nbytes] = memory
            else:
                store.view(extent)[offset : offset + nbytes] = memory
                model[extent][offset : offset + nbytes] = memory
        for future in futures:
            future.result()
        assert all(bytes(memory) == expected for memory, expected in reads)
    assert {extent: bytes(store.view(extent)) for extent in extents} == model
    store.close()


def test_extents_are_disjoint_aligned_zeroed_and_shared_evenly_by_the_disks(tmp_path: Path) -> None:
    store = NvmeStore([tmp_path] * 3, 8 * MIB)
    sizes = [1, 4096, 4097, 100_000, 5, 70_000, 8192, 1]
    extents = store.reserve_many(sizes[:5]) + [store.reserve(size) for size in sizes[5:]]
    assert [extent.nbytes for extent in extents] == [-(-size // 4096) * 4096 for size in sizes]
    assert all(extent.offset % 4096 == 0 for extent in extents)
    assert all(bytes(store.view(extent)) == bytes(extent.nbytes) for extent in extents)
    per_file = [sorted((e.offset, e.offset + e.nbytes) for e in extents if e.file == file) for file in range(3)]
    for ranges in per_file:
        assert ranges[0][0] == 0
        assert all(end == start for (_, end), (start, _) in itertools.pairwise(ranges))  # no gap, no overlap
    assert [extent.file for extent in extents] == [0, 1, 2, 0, 1, 1, 2, 2]
    store.close()


def test_reserved_blocks_are_really_allocated_and_only_those(tmp_path: Path) -> None:
    store = NvmeStore([tmp_path], 1 << 40)
    descriptor = store._files[0].buffered
    assert os.fstat(descriptor).st_blocks == 0
    store.reserve_many([3 * MIB, 1])
    assert os.fstat(descriptor).st_blocks * 512 >= 3 * MIB + 4096
    assert os.fstat(descriptor).st_blocks * 512 < 4 * MIB
    store.close()


def test_capacity_is_exact_and_a_batch_is_all_or_nothing(tmp_path: Path) -> None:
    store = NvmeStore([tmp_path, tmp_path], 10 * BLOCK_BYTES + 1)
    store.reserve_many([BLOCK_BYTES, 6 * BLOCK_BYTES + 1])
    with pytest.raises(CapacityError, match=r"12288 bytes .* 32768 bytes .* 40961 bytes"):
        store.reserve_many([1, 2 * BLOCK_BYTES])
    assert store.reserved_bytes == 8 * BLOCK_BYTES
    last = store.reserve(2 * BLOCK_BYTES)
    assert store.reserved_bytes == 10 * BLOCK_BYTES
    with pytest.raises(CapacityError):
        store.reserve(1)
    assert last.nbytes == len(store.view(last)) == 2 * BLOCK_BYTES
    assert store.reserve_many([]) == []
    store.close()


def test_what_is_lent_keeps_to_the_capacity_and_what_is_reserved_next_is_zeroed(tmp_path: Path) -> None:
    store = NvmeStore([tmp_path], 8 * BLOCK_BYTES)
    store.reserve(BLOCK_BYTES)
    loans = [store.lend(2 * BLOCK_BYTES, leave_bytes=BLOCK_BYTES) for _ in range(4)]
    assert [loan is None for loan in loans] == [False] * 3 + [True]
    assert store.lent_bytes == 6 * BLOCK_BYTES
    sources = [random_memory(2 * BLOCK_BYTES, seed) for seed in range(3)]
    for loan, source in zip(loans, sources, strict=False):
        store.write(loan.extent, source).result()
    assert [bytes(loan.memory) for loan in loans[:3]] == [bytes(source) for source in sources]
    with pytest.raises(CapacityError, match="lent to activations"):
        store.reserve(2 * BLOCK_BYTES)
    assert store.peak_bytes == 7 * BLOCK_BYTES
    loans[2] = loan = None  # the one that lies lowest
    assert bytes(store.view(store.reserve(2 * BLOCK_BYTES))) == bytes(2 * BLOCK_BYTES)
    assert bytes(loans[0].memory) == bytes(sources[0])
    loans.clear()
    assert bytes(store.view(store.reserve(5 * BLOCK_BYTES))) == bytes(5 * BLOCK_BYTES)
    assert (store.reserved_bytes, store.lent_bytes) == (8 * BLOCK_BYTES, 0)
    store.close()


def test_two_thousand_extents_need_a_constant_number_of_mappings_and_descriptors(tmp_path: Path) -> None:
    store = NvmeStore([tmp_path], 2000 * BLOCK_BYTES)
    with open("/proc/self/maps") as maps:
        mappings = len(maps.readlines())
    files = open_files()
    views = [store.view(store.reserve(1)) for _ in range(2000)]
    for number, view in enumerate(views):
        view[0] = number % 251
    assert open_files() - files == Counter()  # others may close theirs meanwhile
    with open("/proc/self/maps") as maps:
        assert len(maps.readlines()) < mappings + 50
    assert [view[0] for view in views] == [number % 251 for number in range(2000)]
    store.close()


def test_the_file_is_private_and_has_no_name(store: NvmeStore, tmp_path: Path) -> None:
    file = store._files[0]
    for descriptor in (file.buffered, file.direct):
        status = os.fstat(descriptor)
        assert stat.S_ISREG(status.st_mode)
        assert stat.S_IMODE(status.st_mode) == 0o600
        assert status.st_nlink == 0
        assert not os.get_inheritable(descriptor)
    assert os.listdir(tmp_path) == []
    descriptors = os.open("/proc/self/fd", os.O_RDONLY)
    with pytest.raises(FileNotFoundError):  # linkat, which could name an unnamed file, finds none
        os.link(str(file.buffered), tmp_path / "name", src_dir_fd=descriptors, follow_symlinks=True)
    os.close(descriptors)


def test_two_stores_in_one_directory_are_independent(tmp_path: Path) -> None:
    stores = [NvmeStore([tmp_path], MIB) for _ in range(2)]
    extents = [store.reserve(BLOCK_BYTES) for store in stores]
    assert extents[0] == extents[1] == Extent(0, 0, BLOCK_BYTES)
    for store, extent, byte in zip(stores, extents, b"ab", strict=True):
        store.view(extent)[:] = bytes([byte]) * BLOCK_BYTES
    stores[0].close()
    assert bytes(stores[1].view(extents[1])) == b"b" * BLOCK_BYTES
    stores[1].close()


@pytest.mark.parametrize(
    "memory",
    [
        Mapping(BLOCK_BYTES).buffer(0, BLOCK_BYTES - 1),
        Mapping(2 * BLOCK_BYTES).buffer(1, BLOCK_BYTES),
        Mapping(BLOCK_BYTES).buffer(0, 0),
        Mapping(2 * BLOCK_BYTES).buffer(0, 2 * BLOCK_BYTES)[::2],
        Mapping(5 * BLOCK_BYTES).buffer(0, 5 * BLOCK_BYTES),
    ],
    ids=["length", "address", "empty", "strided", "longer"],
)
def test_a_transfer_that_does_not_fit_is_refused_before_it_starts(store: NvmeStore, memory: memoryview) -> None:
    _, extent, _ = store.reserve_many([4 * BLOCK_BYTES] * 3)
    for transfer in (store.read, store.write):
        with pytest.raises(ValueError, match=r"memory aligned to|are more than an extent"):
            transfer(extent, memory)
    assert (store.bytes_read, store.bytes_written, store.read_seconds, store.write_seconds) == (0, 0, 0, 0)


def test_read_only_memory_can_be_written_from_and_not_read_into(store: NvmeStore) -> None:
    extent = store.reserve(BLOCK_BYTES)
    memory = random_memory(BLOCK_BYTES, 5).toreadonly()
    store.write(extent, memory).result()
    assert bytes(store.view(extent)) == bytes(memory)
    with pytest.raises(ValueError, match="read-only"):
        store.read(extent, memory)


@pytest.mark.parametrize(
    "extent", [Extent(0, 0, 8192), Extent(1, 0, 4096), Extent(-1, 0, 4096), Extent(0, -4096, 4096)]
)
def test_an_extent_that_was_not_reserved_is_refused(store: NvmeStore, extent: Extent) -> None:
    store.reserve(4096)
    with pytest.raises(ValueError, match="not reserved"):
        store.view(extent)
    with pytest.raises(ValueError, match="not reserved"):
        store.read(extent, Mapping(4096).buffer(0, 4096))


def test_senseless_arguments_are_refused(tmp_path: Path, nothing_left: None) -> None:
    senseless: list[Any] = [[], str(tmp_path), tmp_path]  # a bare path is the usual mistake
    for directories in senseless:
        with pytest.raises(BudgetError, match="sequence of at least one directory"):
            NvmeStore(directories, MIB)
    with pytest.raises(BudgetError, match="capacity"):
        NvmeStore([tmp_path], 0)
    with pytest.raises(BudgetError, match="cannot keep"):
        NvmeStore([tmp_path], 1 << 70)
    store = NvmeStore([tmp_path], MIB)
    for nbytes in (0, -1):
        with pytest.raises(ValueError, match="at least 1 byte"):
            store.reserve_many([1, nbytes])
    assert store.reserved_bytes == 0
    store.close()


def test_the_store_works_where_there_is_neither_o_tmpfile_nor_o_direct(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_open = os.open

    def old_open(path: str, flags: int, *args: int) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(95, "Operation not supported")
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real_open(path, flags, *args)

    monkeypatch.setattr(os, "open", old_open)
    with pytest.warns(RuntimeWarning, match=f"no O_DIRECT in '{tmp_path}'") as warned:
        store = NvmeStore([tmp_path], MIB)
    assert [warning.filename for warning in warned] == [__file__]
    assert store.direct == (False,)
    assert os.listdir(tmp_path) == []
    status = os.fstat(store._files[0].buffered)
    assert (stat.S_IMODE(status.st_mode), status.st_nlink) == (0o600, 0)
    extent, source = store.reserve(5 * BLOCK_BYTES), random_memory(5 * BLOCK_BYTES, 8)
    assert store.write(extent, source).result() == 5 * BLOCK_BYTES
    assert bytes(store.view(extent)) == bytes(source)
    store.close()
