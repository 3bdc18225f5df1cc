"""Files that are whole or as they were: plans, profiles, reports, the status of a run, what was measured, kernels."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path


def write_whole(path: Path, content: str | bytes) -> None:
    """Make `content` (text as UTF-8) that of `path`: at every time there is the whole old file or the whole new one,
    and nothing else is left beside it. The file that a link leads to is replaced, not the link, and keeps its mode;
    what is no ordinary file (a terminal, a pipe) is written to. Raises OSError, which names `path`."""
    data = content.encode() if isinstance(content, str) else content
    try:
        mode = _mode_of(path)
        if mode is not None and not stat.S_ISREG(mode):
            path.write_bytes(data)
        else:
            _replace(Path(os.path.realpath(path)), data, mode)
    except OSError as error:
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error


def _mode_of(path: Path) -> int | None:
    """None: there is nothing."""
    try:
        return path.stat().st_mode
    except FileNotFoundError:
        return None


def _replace(path: Path, data: bytes, mode: int | None) -> None:
    temporary = path.with_name(f".hetmem-{secrets.token_hex(8)}")  # names of 255 bytes leave no room for more
    try:
        with open(temporary, "xb") as file:
            if mode is not None:
                os.fchmod(file.fileno(), stat.S_IMODE(mode))
            file.write(data)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
