"""Without O_DIRECT: through the page cache, which is left as it was found, and the user is told."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path

import pytest

from hetmem.errors import StoreError
from tests.memory.pages import cached_blocks
from tests.memory.tested import BLOCK_BYTES, MIB, Mapping, NvmeStore, examine, nvme_io


@pytest.fixture(autouse=True)
def no_direct(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvme_io, "_open_direct", lambda fd: fd)


@pytest.fixture
def store(tmp_path: Path) -> NvmeStore:
    with pytest.warns(RuntimeWarning, match="no O_DIRECT"):
        return NvmeStore([tmp_path], 8 * MIB, threads=2, request_bytes=MIB)


def random_memory(nbytes: int, seed: int) -> memoryview:
    view = Mapping(nbytes).buffer(0, nbytes)
    view[:] = random.Random(seed).randbytes(nbytes)
    return view


def test_transfers_leave_nothing_in_the_page_cache(store: NvmeStore, tmp_path: Path) -> None:
    control, extent = store.reserve_many([MIB, 3 * MIB])
    descriptor = store._files[0].buffered
    os.pwrite(descriptor, bytes(MIB), control.offset)
    assert len(cached_blocks(store, control)) == MIB // BLOCK_BYTES
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, control.offset, control.nbytes, os.POSIX_FADV_DONTNEED)
    if cached_blocks(store, control):
        pytest.skip("this filesystem is the page cache")
    source, back = random_memory(3 * MIB, 1), random_memory(3 * MIB, 2)
    for transfer, memory in ((store.write, source), (store.read, back)):
        for _ in range(5):  # on a busy machine the system keeps what was just written, of one write in fifty
            transfer(extent, memory).result()
            if not cached_blocks(store, extent):
                break
        assert not cached_blocks(store, extent)
    assert bytes(back) == bytes(source)
    store.close()


def test_views_and_transfers_see_each_others_bytes_both_ways(store: NvmeStore) -> None:
    extent = store.reserve(2 * MIB)
    view, back = store.view(extent), random_memory(2 * MIB, 0)
    for seed in range(5):
        source = random_memory(2 * MIB, seed)
        store.write(extent, source).result()
        assert bytes(view) == bytes(source)
        view[seed * BLOCK_BYTES] ^= 255
        store.read(extent, back).result()
        assert bytes(back) == bytes(view)
    store.close()


def test_what_cannot_be_written_out_fails_the_transfer_that_wrote_it(
    store: NvmeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page cache takes everything at once; without waiting for the disk its errors would be lost."""
    extent = store.reserve(MIB)

    def broken(_: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", broken)
        with pytest.raises(StoreError, match=f"cannot write {MIB} bytes at offset 0 .*{tmp_path}.*Input/output error"):
            store.write(extent, random_memory(MIB, 1)).result()
        store.read(extent, random_memory(MIB, 2)).result()
    assert store.write(extent, random_memory(MIB, 1)).result() == MIB
    store.close()


def test_the_warning_names_the_line_of_the_user(tmp_path: Path) -> None:
    with pytest.warns(RuntimeWarning, match=f"no O_DIRECT in '{tmp_path}', '{tmp_path}'") as warned:
        store = NvmeStore([tmp_path, tmp_path], MIB)
    assert [warning.filename for warning in warned] == [__file__]
    assert store.direct == (False, False)
    store.close()


def test_the_doctor_says_so_without_a_warning(tmp_path: Path) -> None:
    drive = examine(str(tmp_path))[-1]
    assert "buffered I/O" in drive.found
    assert "ext4 or xfs" in drive.advice
