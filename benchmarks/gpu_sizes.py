"""How large a model `benchmarks.gpu` tries: what memory, disk and time there are decides. It measures nothing."""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import psutil

from hetmem.memory.free import free_host_bytes

GIB = 1 << 30
STATE_BYTES = 16
"""Of host memory or disk for each parameter: float32 weight, gradient and two moments."""
_SHARE = 0.8  # of what is free: the rest is the system's, and the program's own
_MEMORY_RATE = 0.5 * GIB  # bytes a second of the whole part; page-locking alone takes half of it, or more
_DISK_RATE = 0.1 * GIB  # three steps write all of it, and read it, at a rate nobody knows yet


@dataclass(frozen=True, slots=True)
class Size:
    """A model of so many parameters, and the budget that holds its states."""

    parameters: float
    host_bytes: int
    nvme_bytes: int


def largest(seconds: float, free_memory_bytes: int, free_disk_bytes: int) -> Size:
    """The largest model of which three steps may be over in `seconds`."""
    host = int(min(_SHARE * free_memory_bytes, _MEMORY_RATE * seconds))
    nvme = int(min(_SHARE * free_disk_bytes, _DISK_RATE * seconds, host / 2))
    return Size(0.85 * (host + nvme) / STATE_BYTES, host, nvme)


def largest_here(seconds: float) -> Size:
    """With what is free on this machine now."""
    return largest(seconds, free_host_bytes(), shutil.disk_usage(disk()).free)


def disk() -> Path:
    """A directory for the benchmark's files: that of temporary files, unless it is in memory."""
    temporary, here = Path(tempfile.gettempdir()), Path(__file__).parents[1]
    return here if _filesystem(temporary) in ("tmpfs", "ramfs") else temporary


def _filesystem(directory: Path) -> str:
    mounts = {Path(mount.mountpoint): mount.fstype for mount in psutil.disk_partitions(all=True)}
    place = Path(os.path.realpath(directory))
    return next((mounts[parent] for parent in (place, *place.parents) if parent in mounts), "unknown")
