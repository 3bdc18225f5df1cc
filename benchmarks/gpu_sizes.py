"""How large a model `benchmarks.gpu` tries: what memory, disk and time there are decides."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import psutil

from hetmem.errors import HetmemError
from hetmem.memory.free_memory import free_host_bytes
from hetmem.memory.mapping import Mapping
from hetmem.memory.nvme_store import NvmeStore

GIB = 1 << 30
STATE_BYTES = 12
"""Of host memory or disk for each parameter: float32 weight and two moments. Gradients are streamed: with homes of
their own a GPU with more memory than the host would hold all that fits here, and nothing would leave it."""
_SHARE = 0.8  # of what is free: the rest is the system's, and the program's own
_MEMORY_RATE = 0.5 * GIB  # bytes a second of the whole part; page-locking alone takes half of it, or more
_DISK_PASSES = 14  # it is filled, and three steps read it and write it, which may take half of the time
_DISK_RATE = 1.4 * GIB  # bytes a second, where it could not be measured


@dataclass(frozen=True, slots=True)
class Size:
    """A model of so many parameters, and the budget that holds its states."""

    parameters: float
    host_bytes: int
    nvme_bytes: int


def largest(seconds: float, free_memory_bytes: int, free_disk_bytes: int, disk_rate: float = _DISK_RATE) -> Size:
    """The largest model of which three steps may be over in `seconds`, on a disk of `disk_rate` bytes a second."""
    host = int(min(_SHARE * free_memory_bytes, _MEMORY_RATE * seconds))
    nvme = int(min(_SHARE * free_disk_bytes, disk_rate * seconds / _DISK_PASSES, host / 2))
    return Size(0.85 * (host + nvme) / STATE_BYTES, host, nvme)


def largest_here(seconds: float) -> Size:
    """With what is free on this machine now."""
    start = time.perf_counter()
    rate = measured_rate(disk())
    left = seconds - (time.perf_counter() - start)
    return largest(left, free_host_bytes(), shutil.disk_usage(disk()).free, rate)


def measured_rate(directory: Path, nbytes: int = GIB) -> float:
    """Bytes a second of `nbytes` written to `directory` and read again, as hetmem does it; a guess where it cannot."""
    parts = 16
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a filesystem without O_DIRECT, which is slower
            store = NvmeStore([directory], nbytes)
        try:
            memory, extents = Mapping(nbytes), store.reserve_many([nbytes // parts] * parts)
            buffers = [memory.buffer(at * (nbytes // parts), nbytes // parts) for at in range(parts)]
            start = time.perf_counter()
            for move in (store.write, store.read):
                for future in [move(extent, buffer) for extent, buffer in zip(extents, buffers, strict=True)]:
                    future.result()
            return 2 * nbytes / (time.perf_counter() - start)
        finally:
            store.close()
    except (HetmemError, OSError):
        return _DISK_RATE


def disk() -> Path:
    """A directory for the benchmark's files: that of temporary files, unless it is in memory."""
    temporary, here = Path(tempfile.gettempdir()), Path(__file__).parents[1]
    return here if _filesystem(temporary) in ("tmpfs", "ramfs") else temporary


def _filesystem(directory: Path) -> str:
    mounts = {Path(mount.mountpoint): mount.fstype for mount in psutil.disk_partitions(all=True)}
    place = Path(os.path.realpath(directory))
    return next((mounts[parent] for parent in (place, *place.parents) if parent in mounts), "unknown")
