"""Writes files atomically: plans, profiles, reports, the status of a run, measurements, kernels."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path


def write_whole(path: Path, content: str | bytes) -> None:
    """Write `content` (text as UTF-8) to `path`, atomically: a reader sees the whole old file or the whole new one, and
    no temporary file is left. A link is followed, and its target replaced; the mode stays. Anything but a regular file
    (a terminal, a pipe) is written to in place. Raises OSError, which names `path`."""
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
    """Return the mode of `path`; None if it does not exist."""
    try:
        return path.stat().st_mode
    except FileNotFoundError:
        return None


def _replace(path: Path, data: bytes, mode: int | None) -> None:
    temporary = path.with_name(f".hetmem-{secrets.token_hex(8)}")  # not from the name: that may have 255 bytes already
    try:
        with open(temporary, "xb") as file:
            if mode is not None:
                os.fchmod(file.fileno(), stat.S_IMODE(mode))
            file.write(data)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
