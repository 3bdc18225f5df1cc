"""Files that are whole or as they were: reports, the status of a run, what was measured, compiled kernels."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def write_whole(path: Path, content: str | bytes) -> None:
    """Make `content` (text as UTF-8) that of `path`: at every time there is the whole old file or the whole new one,
    and nothing else is left beside it. Raises OSError."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with open(temporary, "xb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
