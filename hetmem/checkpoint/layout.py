"""The file format of checkpoints; docs/checkpoints.md specifies it for other programs.

A file of safetensors: eight bytes with the length of a header in JSON, the header, the tensors in row-major order. Pure
arithmetic and text; it opens no files.
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
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_ALIGNMENT = 4096
_MAX_DIMENSIONS = 64
_HEADER_CHECK = '"hetmem.header_crc32":"{}"'
_NO_CHECK = "0" * 8
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


def header(stored: Iterable[Stored], metadata: Mapping[str, str], checks: Mapping[str, list[int]]) -> bytes:
    """Return the file up to the data; `checks`, the CRC-32 of each tensor's blocks, do not change its length."""
    own = {"hetmem.header_crc32": _NO_CHECK, "hetmem.version": VERSION, "format": "pt"}
    digits = {name: "".join(f"{check:08x}" for check in found) for name, found in checks.items()}
    table: dict[str, Any] = {"__metadata__": {**own, **metadata, "hetmem.crc32": json.dumps(digits)}}
    for one in stored:
        offsets = [one.start, one.start + one.nbytes]
        table[one.name] = {"dtype": _NAMES[one.dtype], "shape": list(one.shape), "data_offsets": offsets}
    text = json.dumps(table, separators=(",", ":")).encode("ascii")
    if len(text) > MAX_HEADER_BYTES - _ALIGNMENT:
        raise CheckpointError(
            f"the header would take {len(text)} bytes ({format_size(len(text))}), the format allows "
            f"{MAX_HEADER_BYTES}: put large values into extra as tensors, not as lists or arrays"
        )
    text = text.ljust(round_up(8 + len(text), _ALIGNMENT) - 8)
    check = f"{zlib.crc32(text):08x}"
    text = _with_check(text, _NO_CHECK, check)
    return len(text).to_bytes(8, "little") + text


@dataclass(frozen=True, slots=True)
class Header:
    """The content of a file's header: tensors by name, values by name, and the CRC-32 of every tensor's blocks."""

    stored: dict[str, Stored]
    values: dict[str, Any]
    checks: dict[str, list[int]]


def parse(text: bytes, data_nbytes: int) -> Header:
    """Parse the header `text` (without its length) of a file with `data_nbytes` behind it.

    Raises `CheckpointError` if it is not that of a checkpoint of this version, or damaged.
    """
    with malformed_refused("its header is not that of a checkpoint"):
        table = json.loads(text)
        metadata = table.pop("__metadata__", {})
        if "hetmem.version" not in metadata:
            raise CheckpointError(
                "it is a file of tensors that hetmem.save did not write: hetmem.load_weights reads weights from it"
            )
        if metadata["hetmem.version"] != VERSION:
            raise CheckpointError(
                f"it has version {metadata['hetmem.version']!r} of the format, and this hetmem reads version {VERSION}"
            )
        _check_header(text, metadata["hetmem.header_crc32"])
        values = {name: json.loads(metadata[f"hetmem.{name}"]) for name in ("tied", "objects", "extra")}
        if "hetmem.optimizer" in metadata:
            values["optimizer"] = json.loads(metadata["hetmem.optimizer"])
        stored = _tensors(table, data_nbytes)
        digits = json.loads(metadata["hetmem.crc32"])
        checks = {
            name: [int(found[at : at + 8], 16) for at in range(0, len(found), 8)] for name, found in digits.items()
        }
    if {name: len(one.blocks()) for name, one in stored.items()} != {name: len(one) for name, one in checks.items()}:
        raise CheckpointError("its header has not one checksum for each block of each tensor")
    return Header(stored, values, checks)


def parse_tensors(text: bytes, data_nbytes: int) -> dict[str, Stored]:
    """Parse the header `text` of any file of safetensors: its tensors by name; of a checkpoint, the model's alone.

    Raises `CheckpointError` if it is not such a header.
    """
    with malformed_refused("its header is not that of a checkpoint"):
        table = json.loads(text)
        checkpoint = "hetmem.version" in table.pop("__metadata__", {})
        stored = _tensors(table, data_nbytes)
    return {name: one for name, one in stored.items() if not (checkpoint and name.startswith((OPTIMIZER, EXTRA)))}


@contextmanager
def malformed_refused(what: str) -> Iterator[None]:
    """Raise `CheckpointError` with `what` if the block fails because data it reads are malformed."""
    try:
        yield
    except (TypeError, ValueError, LookupError, AttributeError, OverflowError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{what}: {error!r}") from error


def _tensors(table: Mapping[str, Any], data_nbytes: int) -> dict[str, Stored]:
    stored = {name: _stored(name, entry) for name, entry in table.items()}
    _check_offsets(stored.values(), data_nbytes)
    return stored


def _with_check(text: bytes, old: str, new: str) -> bytes:
    return text.replace(_HEADER_CHECK.format(old).encode(), _HEADER_CHECK.format(new).encode(), 1)


def _check_header(text: bytes, check: str) -> None:
    blank = _with_check(text, check, _NO_CHECK)
    if f"{zlib.crc32(blank):08x}" != check:
        raise CheckpointError(f"its header is damaged: CRC-32 {zlib.crc32(blank):08x}, expected {check}")


def _stored(name: str, entry: dict[str, Any]) -> Stored:
    shape = tuple(entry["shape"])
    if len(shape) > _MAX_DIMENSIONS:
        raise ValueError(f"{name} has {len(shape)} dimensions")
    if not all(isinstance(size, int) and size >= 0 for size in shape):
        raise ValueError(f"{name} has the shape {shape}")
    if entry["dtype"] not in _DTYPES:
        raise CheckpointError(f"{name} has elements of {entry['dtype']}, which torch does not have")
    stored = Stored(name, _DTYPES[entry["dtype"]], shape, entry["data_offsets"][0])
    if [stored.start, stored.start + stored.nbytes] != entry["data_offsets"]:
        raise ValueError(f"{name} of {stored.nbytes} bytes lies at {entry['data_offsets']}")
    return stored


def _check_offsets(stored: Iterable[Stored], data_nbytes: int) -> None:
    """Raise `CheckpointError` unless every byte of the data belongs to one tensor."""
    end = 0
    for one in sorted(stored, key=lambda one: (one.start, one.nbytes)):
        if one.start != end:
            raise CheckpointError(
                f"its header is damaged: {one.name} begins at byte {one.start} of the data, not {end}"
            )
        end += one.nbytes
    if end != data_nbytes:
        raise CheckpointError(f"it is cut off or too long: {data_nbytes} bytes of data, its header says {end}")
