"""Reads JSON files that others may have written: plans, profiles, reports, statuses, configurations of models."""

from __future__ import annotations

import json
import math
import os
import stat
from typing import Any

from hetmem.base.schema import shown
from hetmem.base.units import format_size

MOST_BYTES = 64 << 20
"""The most that a file may have: a report of a step with 100,000 entries of each kind has some 20 MiB."""


def read_json(path: str | os.PathLike[str], most_bytes: int = MOST_BYTES) -> Any:
    """Return the value in the JSON file `path`.

    Raises OSError, which names `path`, if it cannot be read, and ValueError, which does not, for what is no regular
    file, has more than `most_bytes`, is no JSON in UTF-8, has NaN or an infinity, or a key twice.
    """
    return parse_json(read_regular(path, most_bytes).decode("utf-8"))


def read_regular(path: str | os.PathLike[str], most_bytes: int) -> bytes:
    """Return the content of the regular file `path`. Raises ValueError for any other kind, as a pipe would be waited
    for, and for one of more than `most_bytes`; OSError if it cannot be read."""
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError("it is no regular file")
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise ValueError(f"it has more than {format_size(most_bytes)}")
    return data


def parse_json(text: str) -> Any:
    """Return the value of `text`. Raises ValueError if it is no JSON, is nested too deeply, has NaN or an infinity, or
    a key twice."""
    try:
        return json.loads(text, object_pairs_hook=_each_once, parse_constant=_refuse_number, parse_float=_finite)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _refuse_number(text: str) -> float:
    raise ValueError(f"{text[:20]} is no number")


def _finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _refuse_number(text)


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in made if keys.count(key) > 1)
        raise ValueError(f"it has the key {shown(twice)} twice in one object")
    return made
