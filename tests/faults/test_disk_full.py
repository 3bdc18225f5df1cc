"""A disk without room says so when space is reserved, and is given back what a failed reservation took."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hetmem.base.config import Budget
from hetmem.base.units import MIB
from hetmem.errors import StoreError
from hetmem.memory.nvme_store import BLOCK_BYTES, NvmeStore


def test_a_disk_without_room_says_so_at_reservation_and_is_not_filled_to_find_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = NvmeStore([tmp_path], 4 << 40)
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    if free > 3 << 40:
        pytest.skip("the disk has room for the test's 3 TiB")
    store.reserve(BLOCK_BYTES)
    allocated: list[int] = []
    monkeypatch.setattr(os, "posix_fallocate", lambda _, __, nbytes: allocated.append(nbytes))
    with pytest.raises(StoreError) as caught:
        store.reserve_many([BLOCK_BYTES, 3 << 40])
    monkeypatch.undo()
    assert allocated == []
    assert caught.value.errno == errno.ENOSPC
    for part in (str(tmp_path), str((3 << 40) + BLOCK_BYTES), "were free", "are missing"):
        assert part in str(caught.value)
    assert store.reserved_bytes == BLOCK_BYTES
    assert store.reserve(1).offset == BLOCK_BYTES
    store.close()


def test_a_reservation_that_fails_half_way_takes_no_blocks_on_any_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failing fallocate keeps what it got: without care the user's disk would stay full."""
    store = NvmeStore([tmp_path, tmp_path], 8 * MIB)
    kept = store.reserve_many([BLOCK_BYTES, BLOCK_BYTES])
    for extent in kept:
        store.view(extent)[:] = b"k" * BLOCK_BYTES
    descriptors = [file.buffered for file in store._files]
    for descriptor in descriptors:
        os.fsync(descriptor)
    blocks = [os.fstat(descriptor).st_blocks for descriptor in descriptors]
    real = os.posix_fallocate

    def full(fd: int, offset: int, nbytes: int) -> None:
        real(fd, offset, nbytes // 2 if fd == descriptors[1] else nbytes)
        if fd == descriptors[1]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(StoreError, match=f"cannot reserve {2 * MIB} bytes .* No space left"):
        store.reserve_many([MIB, MIB, MIB, MIB])
    monkeypatch.undo()
    assert [os.fstat(descriptor).st_blocks for descriptor in descriptors] == blocks
    assert store.reserved_bytes == 2 * BLOCK_BYTES
    assert [bytes(store.view(extent)) for extent in kept] == [b"k" * BLOCK_BYTES] * 2
    extents = store.reserve_many([MIB, MIB])
    assert [(extent.file, extent.offset) for extent in extents] == [(1, BLOCK_BYTES), (0, BLOCK_BYTES)]
    assert all(bytes(store.view(extent)) == bytes(MIB) for extent in extents)
    store.close()


def test_what_is_refused_for_another_reason_is_not_said_to_lack_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def over_quota(*_: object) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    store = NvmeStore([tmp_path], MIB)
    monkeypatch.setattr(os, "posix_fallocate", over_quota)
    with pytest.raises(StoreError, match=r"quota exceeded; [0-9]+ bytes \(.*\) were free\. Free disk space"):
        store.reserve(BLOCK_BYTES)
    store.close()


def test_what_is_free_on_a_disk_counts_once_for_several_directories_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status = os.statvfs(tmp_path)
    monkeypatch.setattr(os, "statvfs", lambda _: status)
    (other := tmp_path / "other").mkdir()
    nine_tenths = status.f_bavail * status.f_frsize * 9 // 10
    assert Budget(nvme_dir=tmp_path).limits().nvme_bytes == nine_tenths
    assert Budget(nvme_dir=[tmp_path, other]).limits().nvme_bytes == nine_tenths
    assert Budget(nvme_dir=[tmp_path, tmp_path / "missing"]).limits().nvme_bytes == nine_tenths + 1

    real = os.stat

    def another_disk(path: object, **options: Any) -> Any:
        return SimpleNamespace(st_dev=-1) if path == other else real(path, **options)

    monkeypatch.setattr(os, "stat", another_disk)
    assert Budget(nvme_dir=[tmp_path, other]).limits().nvme_bytes == 2 * nine_tenths
