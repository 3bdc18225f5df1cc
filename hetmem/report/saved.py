"""What the command line does with saved reports: show one in another format, compare two."""

from __future__ import annotations

import os
from pathlib import Path

from hetmem.report.files import load, save
from hetmem.report.text import comparison, table

PathLike = str | os.PathLike[str]


def show(path: PathLike) -> str:
    """The report saved at `path` (".json") as a text table. Raises ValueError if it is none."""
    return table(load(path))


def render(path: PathLike, out: PathLike) -> None:
    """Write the report saved at `path` (".json") to `out`, in the format that its ending names.

    Raises ValueError if `path` is no report or `out` has another ending than ".json", ".html" or ".trace.json".
    """
    save(load(path), Path(out))


def compare(path_a: PathLike, path_b: PathLike) -> str:
    """Two saved reports side by side, with the change from the first to the second. Raises ValueError as `render`."""
    a, b = load(path_a), load(path_b)
    names = [Path(path).name for path in (path_a, path_b)]
    if names[0] == names[1]:
        names = [os.fspath(path) for path in (path_a, path_b)]
    return comparison(names[0], a, names[1], b)
