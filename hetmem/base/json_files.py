"""Reads JSON that others may have written: plans, profiles, reports, statuses, configurations of models, checkpoints.

The grammar of JSON alone, in UTF-8 without a byte order mark, each key once, in bounded memory: an empty list takes 3
bytes of text and 64 of memory, so values are counted before any is made.
"""

from __future__ import annotations

import json
import math
import os
from typing import Any

from hetmem.base.schema import shown
from hetmem.base.whole_files import read_regular

MOST_BYTES = 64 << 20
"""The most that a file may have: a report of a step with 100,000 entries of each kind has some 20 MiB."""
MOST_VALUES = 8 << 20
"""The most values that a file may have, keys aside: such a report has some 3 million."""


def read_json(path: str | os.PathLike[str], most_bytes: int = MOST_BYTES) -> Any:
    """Return the value in the JSON file `path`.

    Raises OSError, which names `path`, if it cannot be read, and ValueError, which does not, for what is no regular
    file, has more than `most_bytes`, is no JSON in UTF-8, has NaN or an infinity, or a key twice.
    """
    return parse_json(read_regular(path, most_bytes).decode("utf-8"))


def parse_json(text: str, most_values: int = MOST_VALUES) -> Any:
    """Return the value of `text`. Raises ValueError if it is no JSON, is nested too deeply, has more than
    `most_values`, NaN or an infinity, a key twice, or a key that `check_name` refuses."""
    return _parse(text, most_values, {"parse_constant": _refuse_number, "parse_float": _finite})


def parse_any_numbers(text: str, most_values: int = MOST_VALUES) -> Any:
    """Return the value of `text` as `parse_json` does, and NaN and infinities as Python writes them."""
    return _parse(text, most_values, {})


def _parse(text: str, most_values: int, hooks: dict[str, Any]) -> Any:
    if has_more_values(text, most_values):
        raise ValueError(f"it has more than {most_values} values")
    try:
        return json.loads(text, object_pairs_hook=each_once, **hooks)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def has_more_values(text: str, most: int) -> bool:
    """Return whether the JSON `text` has more than `most` values, keys aside. Takes the memory of two copies of it."""
    if _count(text) < most:  # with commas and brackets in strings
        return False
    bare = text.replace("\\\\", "").replace('\\"', "")
    if bare.count('"') > 4 * most:  # a string has two, and is a key or a value
        return True
    return _count("".join(bare.split('"')[::2])) >= most


def _count(text: str) -> int:
    return text.count(",") + text.count("[") + text.count("{")


def _refuse_number(text: str) -> float:
    raise ValueError(f"{text[:20]} is no number")


def _finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _refuse_number(text)


def each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return `pairs` as a dict. Raises ValueError for a key that comes twice or that `check_name` refuses."""
    made: dict[str, Any] = {}
    for key, value in pairs:
        if key in made:
            raise ValueError(f"it has the key {shown(key)} twice in one object")
        check_name(key)
        made[key] = value
    return made


def check_name(name: str) -> None:
    """Raise ValueError if `name` has a NUL or a lone surrogate, which neither files nor other programs take."""
    if "\0" in name or not (name.isascii() or all(not "\ud800" <= letter <= "\udfff" for letter in name)):
        raise ValueError(f"the name {shown(name)} has a NUL or a lone surrogate")
