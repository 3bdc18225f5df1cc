"""Which way bytes take between host memory and one GPU, as `hetmem probe` measured it there: a small file per user.

It reads and writes that file and knows what is best where nothing was measured. It measures nothing and moves nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from hetmem.base.config import cache_directory
from hetmem.base.whole_files import write_whole

VERSION = 1
UNMEASURED = "not measured on this GPU: run `hetmem probe`"


class Way(str, Enum):
    """Who moves the bytes."""

    COPY_ENGINE = "copy engine"
    """The copy engine; a cast is a pass of its own on the device."""
    KERNEL = "kernel"
    """A kernel that reads or writes page-locked host memory itself while it casts and adds."""


@dataclass(frozen=True, slots=True)
class Ways:
    """How weights come in and gradients leave. `blocks`: the grid of kernels that reach into host memory; few fill a
    link, and the others of the device stay free for compute. `source`: where this comes from.

    The defaults are for GPUs that nobody measured: reports of an H100 have a kernel read host memory at two thirds of
    the copy engine's rate and write it at the same.
    """

    weights: Way = Way.COPY_ENGINE
    gradients: Way = Way.KERNEL
    blocks: int = 32
    source: str = UNMEASURED


def ways_file() -> Path:
    """Where measurements are kept. Raises FileNotFoundError where this user has no home."""
    return cache_directory() / "ways.json"


def load_ways(device_name: str, driver: str, path: Path | None = None) -> Ways:
    """What was measured for a GPU called `device_name` under `driver`, else the defaults. Never raises for a file that
    is not there or not one of ours: it is a cache."""
    found = _read(path).get(_key(device_name, driver))
    try:
        known: Mapping[str, Any] = dict(found or {})
        return Ways(Way(known["weights"]), Way(known["gradients"]), max(1, int(known["blocks"])), str(known["source"]))
    except (KeyError, TypeError, ValueError, OverflowError):
        return Ways()


def save_ways(ways: Ways, device_name: str, driver: str, path: Path | None = None) -> Path:
    """Keep `ways` for that GPU and driver; other entries stay. The file is whole or as it was. Raises OSError."""
    path = path or ways_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    entries = {**_read(path), _key(device_name, driver): asdict(ways)}
    write_whole(path, json.dumps({"version": VERSION, "entries": entries}, indent=2))
    return path


def _key(device_name: str, driver: str) -> str:
    return f"{device_name}, driver {driver}"


def _read(path: Path | None) -> dict[str, Any]:
    """The entries of the file; none if it cannot be read or is of another version."""
    try:
        data = json.loads((path or ways_file()).read_text(encoding="utf-8"))
        return dict(data["entries"]) if data["version"] == VERSION else {}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}
