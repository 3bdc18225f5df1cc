"""What the command line does with saved reports: show one in another format, compare two."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from hetmem.report.files import load, save
from hetmem.report.text import comparison, table

PathLike = str | os.PathLike[str]

_DAMAGED = (LookupError, TypeError, AttributeError, ArithmeticError)
"""What is raised for a report of which a part is cut off or changed."""


def show(path: PathLike) -> str:
    """The report saved at `path` (".json") as a text table. Raises ValueError if it is none."""
    return table(_whole(path))


def render(path: PathLike, out: PathLike) -> None:
    """Write the report saved at `path` (".json") to `out`, in the format that its ending names.

    Raises ValueError if `path` is no report or `out` has another ending than ".json", ".html" or ".trace.json".
    """
    data = _whole(path)
    try:
        save(data, Path(out))
    except _DAMAGED as error:  # the timeline, which only these have
        raise _no_report(path, error) from error


def compare(path_a: PathLike, path_b: PathLike) -> str:
    """Two saved reports side by side, with the change from the first to the second. Raises ValueError as `render`."""
    a, b = _whole(path_a), _whole(path_b)
    names = [Path(path).name for path in (path_a, path_b)]
    if names[0] == names[1]:
        names = [os.fspath(path) for path in (path_a, path_b)]
    return comparison(names[0], a, names[1], b)


def _whole(path: PathLike) -> dict[str, Any]:
    """The report saved at `path`, of which everything can be shown. Raises ValueError."""
    data = load(path)
    try:
        table(data)
        comparison("", data, "", data)
    except (*_DAMAGED, ValueError) as error:
        raise _no_report(path, error) from error
    return data


def _no_report(path: PathLike, error: Exception) -> ValueError:
    return ValueError(
        f"{os.fspath(path)} is not a whole report ({type(error).__name__}: {error}): save one with "
        f"hetmem.report(model).save('run.json')"
    )
