"""A file of safetensors, opened: where its header and its data are. Must not know what either means."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from hetmem.checkpoint.disk import read_at
from hetmem.checkpoint.layout import MAX_HEADER_BYTES
from hetmem.errors import CheckpointError, StoreError


@dataclass(frozen=True, slots=True)
class OpenFile:
    """`header`: its text, without the length before it. The data, `data_nbytes`, begin at byte `data_start`."""

    fd: int
    path: str
    header: bytes
    data_start: int
    data_nbytes: int


@contextmanager
def opened(path: str) -> Iterator[OpenFile]:
    """The file at `path`, until the block ends. Raises `StoreError`, and `CheckpointError` for what is no such file."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise StoreError(error.errno, f"cannot open the checkpoint {path!r}: {error.strerror}") from error
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
        text = bytearray(header_nbytes)
        read_at(fd, path, memoryview(text), 8)
        yield OpenFile(fd, path, bytes(text), 8 + header_nbytes, nbytes - 8 - header_nbytes)
    finally:
        os.close(fd)


@contextmanager
def named(path: str) -> Iterator[None]:
    """What is found to be wrong with the file at `path` in the block is said with its name."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"cannot load {path!r}: {error}") from error
