"""Parses the header of a file of safetensors, which may be hostile, and checks all of it.

The table of tensors is parsed one entry at a time, so that it takes the memory of the tensors that it names; the rest,
in JSON within text, has a bounded number of values. Pure; `layout` writes headers.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from hetmem.base.json_files import check_name, each_once, parse_any_numbers
from hetmem.base.schema import (
    SchemaError,
    Shape,
    anything,
    expected,
    list_of,
    record,
    row,
    shown,
    table_of,
    text,
    whole,
)
from hetmem.checkpoint import layout
from hetmem.checkpoint.layout import EXTRA, MAX_HEADER_BYTES, NO_CHECK, OPTIMIZER, VERSION, Stored, with_check
from hetmem.errors import CheckpointError

_METADATA = "__metadata__"
_SPACE = re.compile(r"[ \t\n\r]*")
_DECODER = json.JSONDecoder(object_pairs_hook=each_once)
_ENTRY_CHARACTERS = 4096
"""The most that the entry of a tensor may have: one of 64 dimensions takes 1,400."""
_ANY_TEXT = text(MAX_HEADER_BYTES)
_NAMES = list_of(_ANY_TEXT)
_T = TypeVar("_T")

_ENTRY = record(
    {
        "dtype": text(),
        "shape": list_of(whole(), most=layout.MAX_DIMENSIONS),
        "data_offsets": row(whole(), whole()),
    }
)


def _digits(value: Any) -> None:
    """Allow the CRC-32 of any number of blocks."""
    if type(value) is not str or len(value) % 8 or not re.fullmatch("[0-9a-f]*", value):
        raise expected("eight hexadecimal digits for each block", value)


_VALUES: dict[str, Shape] = {
    "tied": table_of(_ANY_TEXT),
    "crc32": table_of(_digits),
    "codings": table_of(record({"format": text(), "shape": list_of(whole(), most=layout.MAX_DIMENSIONS)})),
    "objects": table_of(anything),
    "extra": anything,
    "optimizer": record(
        {
            "groups": list_of(record({"params": _NAMES, "options": anything})),
            "state": table_of(anything),
            "others": anything,
            "defaults": _NAMES,
            "strides": table_of(list_of(whole())),
            "beside": anything,
        }
    ),
}
"""The shapes of what `__metadata__` has as text in JSON; `anything` is encoded by `contents.Encoder`."""


@dataclass(frozen=True, slots=True)
class Header:
    """The content of a file's header: tensors by name, values by name, and the CRC-32 of every tensor's blocks."""

    stored: dict[str, Stored]
    values: dict[str, Any]
    checks: dict[str, list[int]]


def parse(data: bytes | bytearray, data_nbytes: int) -> Header:
    """Parse the header `data` (without its length) of a file with `data_nbytes` behind it.

    Raises `CheckpointError`, with the key, if it is not that of a checkpoint of this version, or damaged.
    """
    try:
        stored, metadata = _table(data)
        version = metadata.get("hetmem.version")
        if version is None:
            raise CheckpointError(
                "it is a file of tensors that hetmem.save did not write: hetmem.load_weights reads weights from it"
            )
        if version != VERSION:
            raise CheckpointError(
                f"it has version {shown(version)} of the format, and this hetmem reads version {VERSION}"
            )
        _check_sum(data, metadata.get("hetmem.header_crc32", ""))
        _check_offsets(stored.values(), data_nbytes)
        values = {name: _value(name, metadata, len(stored)) for name in _VALUES if _is_there(name, metadata)}
        digits = values.pop("crc32")
        if {name: one.block_count() for name, one in stored.items()} != {
            name: len(found) // 8 for name, found in digits.items()
        }:
            raise CheckpointError("its header has not one checksum for each block of each tensor")
        _check_names(stored, values)
    except SchemaError as error:
        raise CheckpointError(f"its header is not that of a checkpoint: {error}") from error
    checks = {name: [int(found[at : at + 8], 16) for at in range(0, len(found), 8)] for name, found in digits.items()}
    return Header(stored, values, checks)


def parse_tensors(data: bytes | bytearray, data_nbytes: int) -> dict[str, Stored]:
    """Parse the header `data` of any file of safetensors: its tensors by name; of a checkpoint, the model's alone.

    Raises `CheckpointError`, with the key, if it is not such a header.
    """
    stored, metadata = _table(data)
    _check_offsets(stored.values(), data_nbytes)
    reserved = (OPTIMIZER, EXTRA) if "hetmem.version" in metadata else ()
    return {name: one for name, one in stored.items() if not name.startswith(reserved)}


def _is_there(name: str, metadata: Mapping[str, str]) -> bool:
    """Return whether `metadata` has `hetmem.<name>`. Raises `SchemaError` if it should."""
    if f"hetmem.{name}" in metadata:
        return True
    if name in ("optimizer", "codings"):
        return False
    raise SchemaError("is missing").within(f"hetmem.{name}")


def _value(name: str, metadata: Mapping[str, str], tensors: int) -> Any:
    try:
        value = parse_any_numbers(metadata[f"hetmem.{name}"], layout.most_values(tensors))
        _VALUES[name](value)
    except SchemaError as error:
        raise error.within(f"hetmem.{name}") from None
    except ValueError as error:
        raise SchemaError(f"is not understood: {error}").within(f"hetmem.{name}") from None
    return value


def _check_names(stored: Mapping[str, Stored], values: Mapping[str, Any]) -> None:
    """Raise `SchemaError` for a name that means two things, or a tied tensor of which there is none."""
    tied, objects = values["tied"], values["objects"]
    for what, names, others in (("tied", tied, {*stored}), ("objects", objects, {*stored, *tied})):
        for name in names:
            if name in others or name.startswith((OPTIMIZER, EXTRA)):
                problem = SchemaError("is the name of something else in the file, too")
                raise problem.within(name).within(f"hetmem.{what}")
    for name, first in tied.items():
        if first not in stored or first.startswith((OPTIMIZER, EXTRA)):
            raise expected("a tensor of the model in the file", first).within(name).within("hetmem.tied")


# ---- the table of tensors --------------------------------------------------------------------------------------------


def _table(data: bytes | bytearray) -> tuple[dict[str, Stored], dict[str, str]]:
    """Return the tensors and the metadata of the header `data`. Raises `CheckpointError`."""
    if len(data) > layout.most_header_bytes(named := data.count(b'"data_offsets"')):
        raise CheckpointError(
            f"its header has {len(data)} bytes and names {named} tensors: one of so many has at most "
            f"{layout.most_header_bytes(named)}"
        )
    metadata: dict[str, str] = {}

    def read(name: str, text: str, at: int) -> tuple[Stored | None, int]:
        if name != _METADATA:
            return _entry(name, text, at)
        found, at = _object(text, at, lambda _, text, at: _string(text, at))
        metadata.update(found)
        return None, at

    try:
        text = data.decode("utf-8")
        found, at = _object(text, 0, read)
        if _skip(text, at) < len(text):
            raise ValueError(f"something follows its end, at character {at}")
    except ValueError as error:
        raise CheckpointError(f"its header is not that of a checkpoint: {error}") from error
    return {name: one for name, one in found.items() if one is not None}, metadata


def _object(text: str, at: int, read: Callable[[str, str, int], tuple[_T, int]]) -> tuple[dict[str, _T], int]:
    """Return the JSON object that begins at `at`, with the values that `read` returns for a key, the text and a place
    in it, and the place behind it. Raises ValueError."""
    made: dict[str, _T] = {}
    at = _skip(text, _expect(text, at, "{"))
    if text.startswith("}", at):
        return made, at + 1
    while True:
        key, at = _string(text, at)
        check_name(key)
        if key in made:
            raise ValueError(f"it has the key {shown(key)} twice")
        made[key], at = read(key, text, _skip(text, _expect(text, at, ":")))
        at = _skip(text, at)
        if text.startswith("}", at):
            return made, at + 1
        at = _expect(text, at, ",")


def _skip(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    assert found is not None
    return found.end()


def _expect(text: str, at: int, letter: str) -> int:
    at = _skip(text, at)
    if not text.startswith(letter, at):
        raise ValueError(f"expected {letter!r} at character {at}, got {text[at : at + 1]!r}")
    return at + 1


def _string(text: str, at: int) -> tuple[str, int]:
    at = _expect(text, at, '"') - 1
    value, at = _DECODER.raw_decode(text, at)
    return str(value), at


def _entry(name: str, text: str, at: int) -> tuple[Stored, int]:
    """Return the tensor whose entry begins at `at`, and the place behind that. Raises ValueError."""
    end = text.find("}", at, at + _ENTRY_CHARACTERS) + 1
    try:
        if not text.startswith("{", at) or not end:
            raise expected("an object with dtype, shape and data_offsets", text[at : at + 100])
        entry = _DECODER.decode(text[at:end])
        _ENTRY(entry)
        if entry["dtype"] not in layout.DTYPES:
            raise SchemaError(f"has elements of {shown(entry['dtype'])}, which torch does not have")
        stored = Stored(name, layout.DTYPES[entry["dtype"]], tuple(entry["shape"]), entry["data_offsets"][0])
        if entry["data_offsets"][1] != stored.start + stored.nbytes:
            raise SchemaError(f"of {stored.nbytes} bytes lies at {entry['data_offsets']}")
    except SchemaError as error:
        raise error.within(name) from None
    except (ValueError, RecursionError) as error:
        raise SchemaError(f"is not understood: {error}").within(name) from None
    return stored, end


def _check_sum(data: bytes | bytearray, check: str) -> None:
    try:
        _digits(check)
    except SchemaError as error:
        raise error.within("hetmem.header_crc32") from None
    found = f"{zlib.crc32(with_check(data, check, NO_CHECK)):08x}"
    if found != check:
        raise CheckpointError(f"its header is damaged: CRC-32 {found}, expected {shown(check)}")


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
