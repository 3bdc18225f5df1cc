"""The file format of checkpoints; docs/checkpoints.md specifies it for other programs.

A file of safetensors: eight bytes with the length of a header in JSON, the header, the tensors in row-major order. Pure
arithmetic and text; it opens no files. `header` reads headers.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from hetmem.base.json_files import has_more_values
from hetmem.base.units import format_size, round_up
from hetmem.errors import CheckpointError
from hetmem.torch_private import is_traceable_wrapper_subclass

VERSION = "1"
OPTIMIZER, EXTRA = "optimizer:", "extra:"
"""The prefixes of names that are no keys of the model's `state_dict`."""
BLOCK_BYTES = 16 << 20
"""The most bytes that are moved and checked at once."""
MAX_HEADER_BYTES = 100_000_000
"""The limit of safetensors itself."""
_HEADER_BYTES, _HEADER_BYTES_EACH = 16 << 20, 4096
_VALUES, _VALUES_EACH = 1 << 20, 64
"""What a header may have, and for each tensor that it names: a reader's memory is bounded by what it is about."""

_NAMES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
}
DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_ALIGNMENT = 4096
MAX_DIMENSIONS = 64
_HEADER_CHECK = '"hetmem.header_crc32":"{}"'
NO_CHECK = "0" * 8
Index = tuple[int | slice, ...]


@dataclass(frozen=True, slots=True)
class FileBlock:
    """The part `tensor[index]` of a stored tensor: `nbytes` from byte `offset` of its data on."""

    index: Index
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a file: its data begin at byte `start` of the data section."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def nbytes(self) -> int:
        """Bytes of its data."""
        return math.prod(self.shape) * self.dtype.itemsize

    def blocks(self) -> list[FileBlock]:
        """Return the parts that are moved and checked separately, in the order of their bytes. They depend on shape and
        dtype alone."""
        return list(_blocks(self.shape, self.nbytes, 0, ()))

    def block_count(self) -> int:
        """Return the number of `blocks`, without making them: a header may say any size."""
        return _count(self.shape, self.nbytes)


def _count(shape: tuple[int, ...], nbytes: int) -> int:
    if nbytes <= BLOCK_BYTES:
        return min(nbytes, 1)
    row = nbytes // shape[0]
    if row > BLOCK_BYTES:
        return shape[0] * _count(shape[1:], row)
    return -(-shape[0] // (BLOCK_BYTES // row))


def _blocks(shape: tuple[int, ...], nbytes: int, offset: int, index: Index) -> Iterator[FileBlock]:
    if nbytes == 0:
        return
    if nbytes <= BLOCK_BYTES:
        yield FileBlock(index, offset, nbytes)
        return
    row = nbytes // shape[0]
    if row > BLOCK_BYTES:
        for number in range(shape[0]):
            yield from _blocks(shape[1:], row, offset + number * row, (*index, number))
        return
    rows = BLOCK_BYTES // row
    for first in range(0, shape[0], rows):
        last = min(first + rows, shape[0])
        yield FileBlock((*index, slice(first, last)), offset + first * row, (last - first) * row)


def arrange(tensors: Mapping[str, torch.Tensor]) -> list[Stored]:
    """Assign offsets to `tensors`, wide elements first, so that each is aligned. Raises `CheckpointError` for a dtype
    or layout that the format does not have."""
    stored, start = [], 0
    for name, tensor in sorted(tensors.items(), key=lambda item: -item[1].itemsize):
        if is_traceable_wrapper_subclass(tensor):
            raise CheckpointError(f"cannot save {name}: a {type(tensor).__name__} is made of several tensors")
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta or tensor.dtype not in _NAMES:
            kind = "on the meta device" if tensor.is_meta else f"{tensor.layout} of {tensor.dtype}"
            raise CheckpointError(f"cannot save {name}: it is {kind}, and a checkpoint has dense tensors with values")
        stored.append(Stored(name, tensor.dtype, tuple(tensor.shape), start))
        start += stored[-1].nbytes
    return stored


def data_nbytes(stored: Iterable[Stored]) -> int:
    """Return the bytes of the data section."""
    return sum(one.nbytes for one in stored)


def most_header_bytes(tensors: int) -> int:
    """Return the most bytes of a header that names so many tensors."""
    return min(_HEADER_BYTES + _HEADER_BYTES_EACH * tensors, MAX_HEADER_BYTES)


def most_values(tensors: int) -> int:
    """Return the most values of each part of a header that names so many tensors."""
    return _VALUES + _VALUES_EACH * tensors


_WAY_OUT = "put large values into extra as tensors, not as lists or arrays"


def header(stored: Iterable[Stored], metadata: Mapping[str, str], checks: Mapping[str, list[int]]) -> bytes:
    """Return the file up to the data; `checks`, the CRC-32 of each tensor's blocks, do not change its length."""
    own = {"hetmem.header_crc32": NO_CHECK, "hetmem.version": VERSION, "format": "pt"}
    digits = {name: "".join(f"{check:08x}" for check in found) for name, found in checks.items()}
    table: dict[str, Any] = {"__metadata__": {**own, **metadata, "hetmem.crc32": json.dumps(digits)}}
    for one in stored:
        offsets = [one.start, one.start + one.nbytes]
        table[one.name] = {"dtype": _NAMES[one.dtype], "shape": list(one.shape), "data_offsets": offsets}
    text = json.dumps(table, separators=(",", ":")).encode("ascii")
    most = most_header_bytes(len(digits)) - _ALIGNMENT
    if len(text) > most:
        raise CheckpointError(
            f"the header would take {len(text)} bytes ({format_size(len(text))}), and may take {most} with "
            f"{len(digits)} tensors: {_WAY_OUT}"
        )
    for name, value in metadata.items():
        if has_more_values(value, most_values(len(digits))):
            raise CheckpointError(f"{name} would have more than {most_values(len(digits))} values: {_WAY_OUT}")
    text = text.ljust(round_up(8 + len(text), _ALIGNMENT) - 8)
    check = f"{zlib.crc32(text):08x}"
    return len(text).to_bytes(8, "little") + with_check(text, NO_CHECK, check)


@contextmanager
def malformed_refused(what: str) -> Iterator[None]:
    """Raise `CheckpointError` with `what` if the block fails because data it reads are malformed."""
    try:
        yield
    except (TypeError, ValueError, LookupError, AttributeError, OverflowError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{what}: {error!r}") from error


def with_check(text: bytes | bytearray, old: str, new: str) -> bytes | bytearray:
    """Return the header `text` with the checksum `new` in the place of `old`."""
    return text.replace(_HEADER_CHECK.format(old).encode(), _HEADER_CHECK.format(new).encode(), 1)
