"""Host memory in whole pages: bounds, lifetime, and what is and is not resident."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from hetmem.errors import CapacityError
from tests.memory.tested import (
    GIB,
    MIB,
    PAGE_BYTES,
    Mapping,
    SharedMapping,
    address_of,
    cuda_device,
    make_file,
    untouched,
)


def resident_bytes(mapping: Mapping) -> int:
    """Physical bytes of `mapping`: of its pages alone, as the kernel joins neighbours in its own lists."""
    pages = -(-mapping.nbytes // PAGE_BYTES)
    present = (ctypes.c_ubyte * pages)()
    libc = ctypes.CDLL(None, use_errno=True)
    error = libc.mincore(ctypes.c_void_p(mapping.address), ctypes.c_size_t(mapping.nbytes), present)
    assert error == 0, os.strerror(ctypes.get_errno())
    return PAGE_BYTES * sum(bytes(present))


def is_mapped(address: int) -> bool:
    with open("/proc/self/maps") as maps:
        ranges = [tuple(int(part, 16) for part in line.split()[0].split("-")) for line in maps]
    return any(start <= address < end for start, end in ranges)


@pytest.mark.parametrize("nbytes", [1, PAGE_BYTES - 1, PAGE_BYTES, PAGE_BYTES + 1, 5 * MIB + 3])
def test_memory_is_page_aligned_zeroed_and_exactly_as_long_as_asked(nbytes: int) -> None:
    mapping = Mapping(nbytes)
    view = mapping.buffer(0, nbytes)
    assert mapping.nbytes == nbytes == view.nbytes
    assert mapping.address % PAGE_BYTES == 0
    assert address_of(view) == mapping.address
    assert bytes(view) == bytes(nbytes)
    assert not view.readonly


def test_creation_touches_no_memory() -> None:
    mapping = Mapping(8 * GIB)
    view = mapping.buffer(3 * GIB, 1)
    before = resident_bytes(mapping)
    view[0] = 1
    assert before < MIB
    assert resident_bytes(mapping) > before


def test_views_share_the_memory_and_start_at_their_offset() -> None:
    mapping = Mapping(64)
    whole, middle = mapping.buffer(0, 64), mapping.buffer(10, 20)
    middle[:] = bytes(range(20))
    assert bytes(whole) == bytes(10) + bytes(range(20)) + bytes(34)
    assert address_of(middle) == mapping.address + 10
    assert mapping.buffer(64, 0).nbytes == 0


@pytest.mark.parametrize(("offset", "nbytes"), [(-1, 1), (0, -1), (0, 65), (64, 1), (60, 5), (65, 0)])
def test_a_range_outside_the_mapping_is_refused(offset: int, nbytes: int) -> None:
    mapping = Mapping(64)
    with pytest.raises(ValueError, match="64 of the mapping"):
        mapping.buffer(offset, nbytes)


def test_what_is_not_used_of_a_shortened_mapping_takes_no_memory_and_reads_zeros() -> None:
    mapping = Mapping(64 * PAGE_BYTES + 100)
    view = mapping.buffer(0, mapping.nbytes)
    view[:] = b"x" * mapping.nbytes
    before = resident_bytes(mapping)
    mapping.shorten(40 * PAGE_BYTES, 32 * PAGE_BYTES)
    assert before - resident_bytes(mapping) >= 32 * PAGE_BYTES
    assert bytes(view) == b"x" * (32 * PAGE_BYTES) + bytes(32 * PAGE_BYTES + 100)
    with pytest.raises(ValueError, match=f"{40 * PAGE_BYTES} of the mapping"):
        mapping.buffer(40 * PAGE_BYTES, 1)


def test_memory_lives_as_long_as_its_last_view() -> None:
    mapping = Mapping(32 * MIB)
    address = mapping.address
    view = mapping.buffer(MIB, 4)[1:3]
    view[:] = b"ok"
    del mapping
    gc.collect()
    assert is_mapped(address)
    assert bytes(view) == b"ok"
    del view
    gc.collect()
    assert not is_mapped(address)


@pytest.mark.skipif(not os.path.exists("/sys/kernel/mm/transparent_hugepage"), reason="a kernel without huge pages")
def test_a_large_mapping_asks_for_huge_pages() -> None:
    mapping = Mapping(4 * MIB)
    with open("/proc/self/smaps") as maps:
        text = maps.read()
    start = text.index(f"{mapping.address:x}-")
    flags = text[text.index("VmFlags:", start) :].split("\n", 1)[0].split()
    assert "hg" in flags


@pytest.mark.parametrize("nbytes", [0, -1])
def test_an_empty_mapping_is_refused(nbytes: int) -> None:
    with pytest.raises(ValueError, match="at least 1 byte"):
        Mapping(nbytes)


@pytest.mark.parametrize("nbytes", [1 << 60, 1 << 80])
def test_more_than_the_address_space_is_a_capacity_error(nbytes: int) -> None:
    with pytest.raises(CapacityError, match=f"{nbytes} bytes"):
        Mapping(nbytes)


def test_what_was_never_touched_is_told_from_what_a_file_or_a_write_has(tmp_path: Path) -> None:
    """Pages of a file that are not in memory look as untouched ones do, and are no zeros."""
    nbytes = 64 * PAGE_BYTES
    mapping = Mapping(nbytes)
    inside = untouched(mapping.address + 1, nbytes - 2)
    assert inside == range(mapping.address + PAGE_BYTES, mapping.address + nbytes - PAGE_BYTES)
    assert not untouched(mapping.address + 1, PAGE_BYTES)
    mapping.buffer(40 * PAGE_BYTES, 1)[0] = 7
    assert not untouched(mapping.address, nbytes)
    assert len(untouched(mapping.address, 40 * PAGE_BYTES)) == 40 * PAGE_BYTES
    assert resident_bytes(mapping) == PAGE_BYTES

    path = tmp_path / "file"
    path.write_bytes(b"x" * nbytes)
    with path.open("r+b") as file:
        for flags in (mmap.MAP_PRIVATE, mmap.MAP_SHARED):
            pages = mmap.mmap(file.fileno(), nbytes, flags=flags)
            assert not untouched(address_of(memoryview(pages)), nbytes), flags
    shared = mmap.mmap(-1, nbytes)
    assert not untouched(address_of(memoryview(shared)), nbytes)


def test_of_a_mapping_with_a_drive_behind_it_the_memory_alone_is_populated_and_page_locked(tmp_path: Path) -> None:
    locked: list[int] = []

    def register(address: int, nbytes: int, flags: int) -> int:
        locked.append(nbytes)
        return 0

    memory, drive = make_file(), os.open(tmp_path / "drive", os.O_RDWR | os.O_CREAT)
    os.ftruncate(memory, MIB)
    os.ftruncate(drive, 4 * MIB)
    mapping = SharedMapping(memory, 0, MIB, (drive, 4 * MIB))
    mapping.populate()
    cuda_device.PageLocks(SimpleNamespace(cudaHostRegister=register), mapping)
    assert mapping.nbytes == 5 * MIB
    assert sum(locked) == os.fstat(memory).st_blocks * 512 == MIB
    assert not os.fstat(drive).st_blocks
    os.close(memory)
    os.close(drive)
