"""What commands print, and the files that they are asked to write."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from hetmem.base.whole_files import target_of
from hetmem.errors import HetmemError, printable


def say(text: object, *, end: str = "\n", to_stderr: bool = False) -> None:
    """Print `text` without what a terminal would act on: names in it may come from a file."""
    print(printable(str(text)), end=end, file=sys.stderr if to_stderr else sys.stdout, flush=True)


def check_output(path: str | None) -> None:
    """Refuse an output file that cannot be written, before minutes of work for it. Raises `HetmemError` or OSError."""
    if path is None or isinstance(target_of(path), int):
        return
    file, directory = Path(path), Path(os.path.realpath(path)).parent
    if not file.parent.is_dir():
        raise HetmemError(f"cannot write {path}: there is no directory {file.parent}")
    if file.is_dir():
        raise HetmemError(f"cannot write {path}: it is a directory, name a file in it")
    if (file.is_file() or not file.exists()) and not os.access(directory, os.W_OK):
        raise HetmemError(f"cannot write {path}: nothing may be written in {directory}")
