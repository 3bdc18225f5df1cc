"""Files of safetensors: replaces one atomically, finds those of a model's weights, and moves tensors to and from them.
A tensor in host memory, also in a mapped file, moves without a copy.

Knows descriptors and errors of disks. Must not know models.
"""

from __future__ import annotations

import errno
import math
import os
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import torch

from hetmem.base import whole_files
from hetmem.base.json_files import check_name, read_json
from hetmem.base.schema import record, table_of, text
from hetmem.base.units import format_size
from hetmem.checkpoint import layout
from hetmem.checkpoint.header import parse_tensors
from hetmem.checkpoint.layout import MAX_HEADER_BYTES, FileBlock, Stored
from hetmem.errors import CheckpointError, StoreError
from hetmem.memory import host_memory
from hetmem.memory.interrupts import HELD_BACK
from hetmem.memory.nvme_io import Move

_INDEX = ".safetensors.index.json"
_INDEX_SHAPE = record({"weight_map": table_of(text(255))}, others=True)
_SHOWN = 5
"""The most names in a message."""


def write_at(fd: int, path: str, memory: memoryview, offset: int) -> None:
    """Write all of `memory` at `offset`. Raises `StoreError` with path, offset and bytes."""
    _move(f"cannot write {memory.nbytes} bytes at offset {offset} of {path!r}", os.pwritev, fd, memory, offset)


def read_at(fd: int, path: str, memory: memoryview, offset: int) -> None:
    """Fill all of `memory` from `offset` on. Raises `StoreError` with path, offset and bytes, also if the file ends."""
    _move(f"cannot read {memory.nbytes} bytes at offset {offset} of {path!r}", os.preadv, fd, memory, offset)


def _move(failure: str, move: Move, fd: int, memory: memoryview, offset: int) -> None:
    done = 0
    try:
        while done < memory.nbytes:
            if not (moved := move(fd, [memory[done:]], offset + done)):
                raise OSError(errno.EIO, "end of file")
            done += moved
    except OSError as error:
        raise _failure(error, failure, done) from error


@contextmanager
def replacing(path: str, nbytes: int) -> Iterator[int]:
    """Yield a descriptor of a new file of `nbytes` that replaces `path` when the block ends without an error.

    The old file stays whole until then, also if the process is killed, the machine loses power or the disk fails; after
    the block the new one is on the disk. `whole_files` says what links at `path` become. Raises `StoreError`.
    """
    with _store_errors(f"cannot write {path!r}"):
        target = whole_files.target_of(path)
        if isinstance(target, int) or not whole_files.is_replaceable(target):
            if os.path.isdir(path):
                raise StoreError(errno.EISDIR, f"cannot write {path!r}: it is a directory; a checkpoint is one file")
            raise StoreError(errno.EINVAL, f"cannot write {path!r}: it is no file that a checkpoint could replace")
        with whole_files.replacing(target) as fd:
            _reserve(fd, path, nbytes)
            yield fd
    with _store_errors(f"{path!r} is the new one, but a power failure may bring the earlier one back"):
        folder = os.open(os.path.dirname(target), os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _reserve(fd: int, path: str, nbytes: int) -> None:
    """Allocate disk blocks for all of the file, so that a full disk is detected before anything is written."""
    free = 0
    try:
        disk = os.fstatvfs(fd)
        free = disk.f_bavail * disk.f_frsize
        # Checked first because a failing fallocate fills the disk, for every process on it, before it fails.
        if nbytes > free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        sizes = f"{nbytes} bytes ({format_size(nbytes)}), {free} ({format_size(free)}) were free"
        raise _failure(error, f"cannot reserve {path!r} of {sizes}") from error


@contextmanager
def _store_errors(failure: str) -> Iterator[None]:
    """Raise OSErrors of the block as a `StoreError` with the text `failure`, but those that are one already."""
    try:
        yield
    except StoreError:
        raise
    except OSError as error:
        raise _failure(error, failure) from error


def _failure(error: OSError, what: str, done: int | None = None) -> StoreError:
    after = "" if done is None else f" after {done} bytes"
    return StoreError(error.errno, f"{what}: {error.strerror or error}{after}")


@dataclass(frozen=True, slots=True, eq=False)
class OpenFile:
    """An open file. `header`: its text, without the length before it; `data_start`: the first byte of the data."""

    fd: int
    path: str
    header: bytes | bytearray
    data_start: int
    data_nbytes: int


@contextmanager
def opened(path: str) -> Iterator[OpenFile]:
    """Open the file at `path` for the block. Raises `StoreError`, and `CheckpointError` for one of another format."""
    try:
        fd = whole_files.open_regular(path)
    except OSError as error:
        raise StoreError(error.errno, f"cannot open the checkpoint {path!r}: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"cannot load {path!r}: {error}") from error
    try:
        nbytes = os.fstat(fd).st_size
        length = bytearray(8)
        if nbytes >= 8:
            read_at(fd, path, memoryview(length), 0)
        header_nbytes = int.from_bytes(length, "little")
        if not 0 < header_nbytes <= min(nbytes - 8, MAX_HEADER_BYTES):
            pickled = length.startswith((b"PK\x03\x04", b"\x80\x02"))
            raise CheckpointError(
                f"{path!r} of {nbytes} bytes is no file of safetensors, or cut off"
                + (
                    ": it looks like one of torch.save. Read it with torch.load(path, weights_only=True) and call "
                    "model.load_state_dict, which writes to a managed model too"
                    if pickled
                    else ""
                )
            )
        header = bytearray(header_nbytes)
        read_at(fd, path, memoryview(header), 8)
        yield OpenFile(fd, path, header, 8 + header_nbytes, nbytes - 8 - header_nbytes)
    finally:
        os.close(fd)


@contextmanager
def named(path: str) -> Iterator[None]:
    """Add `path` to the message of each `CheckpointError` of the block."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"cannot load {path!r}: {error}") from error


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """A tensor in one of the files."""

    file: OpenFile
    stored: Stored


def read_names(path: str, rename: Callable[[str], str | None] | None, stack: ExitStack) -> dict[str, Source]:
    """Return the tensors of all files at `path` by their names after `rename`; files stay open until `stack` closes."""
    found: dict[str, Source] = {}
    names: dict[str, str] = {}
    for each in _files(path):
        file = stack.enter_context(opened(each))
        with named(each):
            tensors = parse_tensors(file.header, file.data_nbytes)
        for name, stored in tensors.items():
            new = name if rename is None else rename(name)
            if new is None:
                continue
            if new in found:
                raise CheckpointError(
                    f"{name} in {each!r} and {names[new]} in {found[new].file.path!r} are both called {new}"
                )
            found[new], names[new] = Source(file, stored), name
    return found


def _files(path: str) -> list[str]:
    if path.endswith(".json"):
        return _indexed(path)
    if not os.path.exists(path):
        raise StoreError(
            errno.ENOENT,
            f"there is no file or directory {path!r}: expected what save_pretrained leaves, or "
            f"huggingface_hub.snapshot_download(name), which returns the directory",
        )
    if not os.path.isdir(path):
        return [path]
    entries = sorted(os.listdir(path))
    indices = [name for name in entries if name.endswith(_INDEX)]
    files = [name for name in entries if name.endswith(".safetensors")]
    if "model.safetensors" in files:
        return [os.path.join(path, "model.safetensors")]
    if len(indices) > 1 or (not indices and len(files) > 1):
        raise CheckpointError(f"{path!r} has more than one model: name one of {', '.join(indices or files)}")
    if indices:
        return _indexed(os.path.join(path, indices[0]))
    if not files:
        raise CheckpointError(
            f"{path!r} has no *.safetensors (it has {', '.join(entries[:_SHOWN]) or 'nothing'}): weights that were "
            f"pickled can run code; load those with torch.load(weights_only=True) and save them as safetensors"
        )
    return [os.path.join(path, files[0])]


def _indexed(path: str) -> list[str]:
    """Return the files that the index at `path` names, which must lie beside it."""
    try:
        index = read_json(path)
        _INDEX_SHAPE(index)
        files = sorted({*index["weight_map"].values()})
        for name in files:
            check_name(name)
    except OSError as error:
        raise CheckpointError(f"cannot read the index {path!r}: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{path!r} is no index of safetensors: {error}") from error
    foreign = [name for name in files if os.path.basename(name) != name or name in ("", ".", "..")]
    if foreign:
        raise CheckpointError(f"{path!r} names {foreign[0]!r}, which is not beside it")
    return [os.path.join(os.path.dirname(path), name) for name in files]


# ---- Tensors to a file and back, block by block on a few threads: as much memory as those blocks take. ----

THREADS = 4
BlockJob = Callable[["BlockBuffer"], Any]


class BlockBuffer(threading.local):
    """A thread's buffer for one block at a time; a mapping, as an allocator would not return the memory."""

    memory: host_memory.Mapping | None = None

    def like(self, shape: Iterable[int], dtype: torch.dtype) -> torch.Tensor:
        """Return the buffer as an uninitialized tensor, valid until the next call."""
        shape = tuple(shape)
        nbytes = math.prod(shape) * dtype.itemsize
        if self.memory is None or self.memory.nbytes < nbytes:
            self.memory = host_memory.Mapping(max(nbytes, layout.BLOCK_BYTES))
        return torch.frombuffer(self.memory.buffer(0, nbytes), dtype=dtype).view(shape)


def run(jobs: Iterable[BlockJob]) -> list[Any]:
    """Run `jobs` on threads and return their results in order. After an error no further job begins, and none runs when
    this returns, however often it is interrupted: a job that went on would use a descriptor or memory that others have
    by then. (A thread whose `join` is interrupted counts as ended.)"""
    buffer, futures, again = BlockBuffer(), list[Future[Any]](), None
    pool = ThreadPoolExecutor(THREADS, thread_name_prefix="hetmem-checkpoint")
    try:
        with HELD_BACK:  # no interrupt between a submit and its append
            for job in jobs:
                futures.append(pool.submit(job, buffer))
        return [future.result() for future in futures]
    finally:
        while True:
            try:
                wait([future for future in futures if not future.cancel()])
                break
            except KeyboardInterrupt as error:
                again = error
        pool.shutdown()
        if again is not None:
            raise again


def _settle(tensors: Iterable[torch.Tensor]) -> None:
    """Synchronize the GPUs of `tensors`: threads here use other streams than those that compute with them."""
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        torch.cuda.synchronize(device)


@contextmanager
def own_stream(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Have this thread read those of `tensors` that are on GPUs in streams of its own in the block, beside compute."""
    with ExitStack() as streams:
        for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
            streams.enter_context(torch.cuda.stream(torch.cuda.Stream(device)))
        yield


def write_tensors(
    fd: int, path: str, data_start: int, stored: Iterable[Stored], tensors: Mapping[str, torch.Tensor]
) -> dict[str, list[int]]:
    """Write all `stored` ones of `tensors` at their offsets; return the CRC-32 of every block of each."""
    stored = list(stored)
    _settle(tensors.values())
    jobs = [
        partial(write_block, fd, path, data_start + one.start, tensors[one.name], block)
        for one in stored
        for block in one.blocks()
    ]
    checks = iter(run(jobs))
    return {one.name: [next(checks) for _ in one.blocks()] for one in stored}


@torch.no_grad()
def write_block(fd: int, path: str, start: int, tensor: torch.Tensor, block: FileBlock, buffer: BlockBuffer) -> int:
    """Write one block of `tensor`, whose data begin at byte `start` of the file; return its CRC-32."""
    piece = tensor.detach()[block.index]
    if not is_memory(piece):
        piece = buffer.like(piece.shape, piece.dtype).copy_(piece)
    memory = _bytes_of(piece)
    write_at(fd, path, memory, start + block.offset)
    return zlib.crc32(memory)


def read_tensors(
    file: OpenFile,
    targets: Iterable[tuple[Stored, torch.Tensor | None]],
    checks: Mapping[str, list[int]] | None = None,
    part: slice = slice(None),
) -> list[int]:
    """Fill tensors in place with stored ones, cast where dtypes differ, and increment their versions; a target of None
    is read only. `part`: of all blocks, in this order, only these. Returns the CRC-32 of each. Raises `StoreError`; and
    `CheckpointError`, with path, offset and bytes, for a block that does not match `checks`. Either leaves some tensors
    filled."""
    targets = list(targets)
    filled = [tensor for _, tensor in targets if tensor is not None]
    _settle(filled)
    try:
        blocks = ((*target, *block) for target in targets for block in _with_checks(target[0], checks))
        return run(
            partial(_read, file, one, block, check, None if tensor is None else tensor.detach())
            for one, tensor, block, check in islice(blocks, part.start, part.stop, part.step)
        )
    finally:
        _settle(filled)
        for tensor in filled:  # reads into their memory do not increment versions
            if not tensor.is_inference():
                torch.autograd.graph.increment_version(tensor)


def _with_checks(one: Stored, checks: Mapping[str, list[int]] | None) -> Iterator[tuple[FileBlock, int | None]]:
    blocks = one.blocks()
    yield from zip(blocks, [None] * len(blocks) if checks is None else checks[one.name], strict=True)


@torch.no_grad()
def _read(
    file: OpenFile, stored: Stored, block: FileBlock, check: int | None, into: torch.Tensor | None, buffer: BlockBuffer
) -> int:
    """Read one block into `into`, if given; return its CRC-32. Raises `CheckpointError` if that is not `check`."""
    piece = None if into is None else into[block.index]
    direct = piece is not None and piece.dtype is stored.dtype and is_memory(piece)
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


def is_memory(tensor: torch.Tensor) -> bool:
    """Return whether the bytes of `tensor` lie in host memory in the order of a file."""
    return tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of `tensor`, contiguous and in host memory."""
    array: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)
