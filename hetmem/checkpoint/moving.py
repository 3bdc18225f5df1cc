"""Tensors to a file and back, block by block on a few threads: as much memory as those blocks take, and no more.

Where a tensor lies in host memory, also a mapped file, its bytes move without a copy. It must not know models.
"""

from __future__ import annotations

import math
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch

from hetmem.checkpoint import layout
from hetmem.checkpoint.disk import OpenFile, read_at, write_at
from hetmem.checkpoint.layout import FileBlock, Stored
from hetmem.errors import CheckpointError
from hetmem.memory import mapping

THREADS = 4
BlockJob = Callable[["_BlockBuffer"], Any]


class _BlockBuffer(threading.local):
    """Memory of a thread for one block at a time. Not from the allocator, which would keep it afterwards."""

    memory: mapping.Mapping | None = None

    def like(self, shape: Iterable[int], dtype: torch.dtype) -> torch.Tensor:
        """Of a block; it holds anything, until the next call."""
        shape = tuple(shape)
        nbytes = math.prod(shape) * dtype.itemsize
        if self.memory is None or self.memory.nbytes < nbytes:
            self.memory = mapping.Mapping(max(nbytes, layout.BLOCK_BYTES))
        return torch.frombuffer(self.memory.buffer(0, nbytes), dtype=dtype).view(shape)


class _RunningJobs:
    """Which jobs run. `end` waits for them however often that is interrupted: what is still moved would go to a
    descriptor, or memory, that belongs to others then. (A thread whose `join` is interrupted seems over.)"""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._running, self._over = 0, False

    def run(self, job: BlockJob, buffer: _BlockBuffer) -> Any:
        """What `job` returns; after the end nothing begins."""
        with self._changed:
            if self._over:
                return None
            self._running += 1
        try:
            return job(buffer)
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    def end(self) -> None:
        """None runs any more. Raises an interrupt that came meanwhile."""
        again: KeyboardInterrupt | None = None
        while True:
            try:
                with self._changed:
                    self._over = True
                    self._changed.wait_for(lambda: not self._running)
                break
            except KeyboardInterrupt as error:
                again = error
        if again is not None:
            raise again


def run(jobs: Iterable[BlockJob]) -> list[Any]:
    """What `jobs` return, in their order. After an error no further one begins; none runs any more at the end."""
    buffer, under_way = _BlockBuffer(), _RunningJobs()
    pool = ThreadPoolExecutor(THREADS, thread_name_prefix="hetmem-checkpoint")
    try:
        return list(pool.map(lambda job: under_way.run(job, buffer), jobs))
    finally:
        try:
            pool.shutdown(cancel_futures=True)
        finally:
            under_way.end()


def _settle(tensors: Iterable[torch.Tensor]) -> None:
    """Let GPUs finish: the threads here use other streams than who computed with `tensors`, or will."""
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        torch.cuda.synchronize(device)


def write_tensors(
    fd: int, path: str, data_start: int, stored: Iterable[Stored], tensors: Mapping[str, torch.Tensor]
) -> dict[str, list[int]]:
    """Write all `stored` ones of `tensors` to their places; returns the CRC-32 of every block of each."""
    stored = list(stored)
    _settle(tensors.values())
    jobs = [
        partial(_write, fd, path, data_start + one.start, tensors[one.name], block)
        for one in stored
        for block in one.blocks()
    ]
    checks = iter(run(jobs))
    return {one.name: [next(checks) for _ in one.blocks()] for one in stored}


@torch.no_grad()
def _write(fd: int, path: str, start: int, tensor: torch.Tensor, block: FileBlock, buffer: _BlockBuffer) -> int:
    piece = tensor.detach()[block.index]
    if not _is_memory(piece):
        piece = buffer.like(piece.shape, piece.dtype).copy_(piece)
    memory = _bytes_of(piece)
    write_at(fd, path, memory, start + block.offset)
    return zlib.crc32(memory)


def check_tensors(file: OpenFile, stored: Iterable[Stored], checks: Mapping[str, list[int]]) -> None:
    """Read `stored` and compare. Raises `StoreError`, and `CheckpointError` with path, offset and bytes of a block that
    is not what was written."""
    run(partial(_read, file, one, block, check, None) for one in stored for block, check in _with_checks(one, checks))


def checksums(file: OpenFile, stored: Stored) -> list[int]:
    """The CRC-32 of every block of a tensor. Raises `StoreError`."""
    return run(partial(_read, file, stored, block, None, None) for block in stored.blocks())


def read_tensors(
    file: OpenFile, targets: Iterable[tuple[Stored, torch.Tensor]], checks: Mapping[str, list[int]] | None = None
) -> None:
    """Fill tensors with what is stored, in place, so that their versions count; elements are cast where dtypes differ.
    Raises as `check_tensors` does, and then has filled some of them; without `checks` nothing is compared."""
    targets = list(targets)
    _settle(tensor for _, tensor in targets)
    try:
        run(
            partial(_read, file, one, block, check, tensor.detach())
            for one, tensor in targets
            for block, check in _with_checks(one, checks)
        )
    finally:
        _settle(tensor for _, tensor in targets)
        for _, tensor in targets:  # bytes that are read in place count none
            if not tensor.is_inference():
                torch.autograd.graph.increment_version(tensor)


def _with_checks(one: Stored, checks: Mapping[str, list[int]] | None) -> Iterator[tuple[FileBlock, int | None]]:
    blocks = one.blocks()
    yield from zip(blocks, [None] * len(blocks) if checks is None else checks[one.name], strict=True)


@torch.no_grad()
def _read(
    file: OpenFile, stored: Stored, block: FileBlock, check: int | None, into: torch.Tensor | None, buffer: _BlockBuffer
) -> int:
    """Read one block; returns its CRC-32, which is `check` if that is given."""
    piece = None if into is None else into[block.index]
    direct = piece is not None and piece.dtype is stored.dtype and _is_memory(piece)
    shape = (block.nbytes // stored.dtype.itemsize,) if piece is None else piece.shape
    source = piece if piece is not None and direct else buffer.like(shape, stored.dtype)
    memory = _bytes_of(source)
    offset = file.data_start + stored.start + block.offset
    read_at(file.fd, file.path, memory, offset)
    found = zlib.crc32(memory)
    if check is not None and found != check:
        raise CheckpointError(
            f"{file.path!r} is damaged: the {block.nbytes} bytes at offset {offset}, of {stored.name}, have the CRC-32 "
            f"{found:08x}, expected {check:08x}"
        )
    if piece is not None and not direct:
        piece.copy_(source)
    return found


def _is_memory(tensor: torch.Tensor) -> bool:
    """Whether its bytes lie in host memory as they do in a file."""
    return tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of `tensor`, contiguous and in host memory."""
    array: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)
