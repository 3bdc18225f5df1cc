"""A disk that fails when it is told to, and the training that it is to fail in."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import nn

from hetmem import testing
from hetmem.errors import StoreError
from hetmem.memory.nvme_store import BLOCK_BYTES, NvmeStore

Fault = Callable[[str, int, int], int]
"""Asked before each system call: verb, offset, bytes. It may raise, wait, or return how many bytes are moved."""


class FaultyDisk:
    """The store's system calls, with `fault` asked first where the disk itself is (not the page cache)."""

    def __init__(self) -> None:
        self.fault: Fault = healthy
        self.calls: list[tuple[str, int, int]] = []
        self.stores: list[NvmeStore] = []
        self.tells_late_seconds = 0.0
        """For how long a read that has taken what was there is still not over."""

    def preadv(self, fd: int, buffers: list[memoryview], offset: int, /) -> int:
        moved = self._move("read", os.preadv, fd, buffers, offset)
        time.sleep(self.tells_late_seconds)
        return moved

    def pwritev(self, fd: int, buffers: list[memoryview], offset: int, /) -> int:
        return self._move("write", os.pwritev, fd, buffers, offset)

    def _move(self, verb: str, call: Callable[..., int], fd: int, buffers: list[memoryview], offset: int) -> int:
        (memory,) = buffers
        nbytes = len(memory)
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            self.calls.append((verb, offset, nbytes))
            nbytes = self.fault(verb, offset, nbytes)
        if not nbytes:
            return 0
        if nbytes % BLOCK_BYTES:  # a short transfer that ends within a block
            fd = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
            try:
                return call(fd, [memory[:nbytes]], offset)
            finally:
                os.close(fd)
        return call(fd, [memory[:nbytes]], offset)

    def used_by(self, monkeypatch: pytest.MonkeyPatch, **options: int) -> None:
        """Models managed, and optimizers made, from now on keep their NVMe tier on this disk."""

        def make(directories: list[Path], nbytes: int) -> NvmeStore:
            self.stores.append(NvmeStore(directories, nbytes, io=self, **options))
            return self.stores[-1]

        for module in ("placing.build", "optim.state_memory"):
            monkeypatch.setattr(f"hetmem.{module}.NvmeStore", make)


def healthy(_: str, __: int, nbytes: int) -> int:
    """Everything is moved."""
    return nbytes


def fails(number: int) -> Fault:
    """Every call fails with `number`."""

    def fault(_: str, __: int, ___: int) -> int:
        raise OSError(number, os.strerror(number))

    return fault


def ends(_: str, __: int, ___: int) -> int:
    """The file is shorter than it should be."""
    return 0


def breaks(_: str, __: int, ___: int) -> int:
    """A bug in a worker thread."""
    raise RuntimeError("a bug in a worker thread")


def once(number: int, fault: Fault) -> Fault:
    """`fault` at the call number `number` from now on, and no other."""
    calls = iter(range(1 << 30))

    def counted(verb: str, offset: int, nbytes: int) -> int:
        return fault(verb, offset, nbytes) if next(calls) == number else nbytes

    return counted


EIO = fails(errno.EIO)
ENOSPC = fails(errno.ENOSPC)


def settle(*modules: nn.Module) -> None:
    """What is read ahead or written behind for `modules` is over, and the error of it, if it failed, was told."""
    for module in modules:
        with contextlib.suppress(StoreError):
            testing.of(module).wait_idle()
