"""What compilers make for tests, kept in the user's cache by what it was made of."""

from __future__ import annotations

import atexit
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path


def _folder() -> Path:
    """The cache; a directory of this process where there is none."""
    try:
        found = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hetmem-tests"
        found.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # RuntimeError: no home
        found = Path(tempfile.mkdtemp(prefix="hetmem-tests-"))
        atexit.register(shutil.rmtree, found, ignore_errors=True)
    return found


FOLDER = _folder()  # before any test sets another cache


@cache
def version_of(compiler: str) -> str:
    return subprocess.run([compiler, "--version"], check=True, capture_output=True, text=True).stdout


def kept(name: str, made_of: object, make: Callable[[Path], None]) -> Path:
    """The file that `make` writes to the path it is given, made once for all that have this name and representation of
    `made_of`. It is whole or absent, whoever makes it at the same time."""
    path = FOLDER / f"{hashlib.sha256(repr(made_of).encode()).hexdigest()[:24]}-{name}"
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=FOLDER) as work:
            make(Path(work) / name)
            os.replace(Path(work) / name, path)
    return path


def run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
