"""What hetmem needs of the machine and of torch, told in one sentence at import."""

from __future__ import annotations

import re
import sys

_PYTHON = (3, 10)
_TORCH = (2, 11)


def refuse_environment(torch_version: str) -> None:
    """Raise ImportError unless this is Linux, Python >= 3.10 and torch >= 2.11; `torch_version` as torch says it."""
    if sys.platform != "linux":
        raise ImportError(
            f"hetmem runs on Linux and this is {sys.platform}: use a Linux machine, or WSL 2 or a container on this one"
        )
    if sys.version_info < _PYTHON:
        raise ImportError(f"hetmem needs Python 3.10 or newer, and this is {sys.version.split()[0]}")
    found = re.match(r"(\d+)\.(\d+)", torch_version)
    if found is not None and (int(found[1]), int(found[2])) < _TORCH:
        raise ImportError(f"hetmem needs torch 2.11 or newer, and this is {torch_version}: pip install 'torch>=2.11'")
