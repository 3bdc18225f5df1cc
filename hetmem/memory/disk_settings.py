"""How to ask a disk: request size and threads, as `hetmem probe` measured them for it, else defaults that were good.

Knows samples, directories and one small file in the cache. Must not know stores. A cache file that is missing, old,
broken or of another machine is as good as none: nothing here fails because of one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hetmem.base.config import cache_directory
from hetmem.base.units import MIB, format_size
from hetmem.base.whole_files import write_whole
from hetmem.schedule.hardware import DiskSample

_VERSION = 1
_GOOD_ENOUGH = 0.95  # of the best rate: then larger requests, which cost less of the cores, and more of them: when the
# cores are busy a thread comes late to ask for the next one, and the disk shall have something to do meanwhile
_MOST_BYTES, _MOST_THREADS = 64 * MIB, 32


@dataclass(frozen=True, slots=True)
class Requests:
    """At most `threads` requests at once, of at most `nbytes` each."""

    nbytes: int
    threads: int

    def __str__(self) -> str:
        return f"{self.threads} x {format_size(self.nbytes)}"


@dataclass(frozen=True, slots=True)
class DiskSettings:
    """How to ask one disk in either direction, and where that is known from: "measured", "default" or "given"."""

    read: Requests
    write: Requests
    source: str

    def __str__(self) -> str:
        return f"reads {self.read}, writes {self.write} ({self.source})"


DEFAULT = DiskSettings(Requests(16 * MIB, 4), Requests(16 * MIB, 4), "default")
"""Measured: benchmarks/results/nvme.md."""


def settings_for(directory: str) -> DiskSettings:
    """What was measured for the disk of `directory`, or the default."""
    try:
        disk = _load()[_disk_of(directory)]
        return DiskSettings(_requests(disk["read"]), _requests(disk["write"]), "measured")
    except (OSError, ValueError, KeyError, TypeError, RuntimeError):
        return DEFAULT


def remember(directory: str, samples: Sequence[DiskSample]) -> tuple[DiskSettings, Path | None]:
    """Keep the best of `samples` for the disk of `directory`: the settings, and the file they are in (None: none)."""
    found = DiskSettings(
        _best(samples, lambda sample: sample.read_bytes_per_second),
        _best(samples, lambda sample: sample.write_bytes_per_second),
        "measured",
    )
    try:
        try:
            disks = _load()
        except (OSError, ValueError, KeyError, TypeError):
            disks = {}
        disks[_disk_of(directory)] = {"read": asdict(found.read), "write": asdict(found.write)}
        return found, _save(disks)
    except (OSError, RuntimeError):  # a read-only home: the measurement is still worth showing
        return found, None


def _best(samples: Sequence[DiskSample], rate: Callable[[DiskSample], float]) -> Requests:
    enough = _GOOD_ENOUGH * max(map(rate, samples))
    best = max((s for s in samples if rate(s) >= enough), key=lambda s: (s.block_bytes, s.depth))
    return Requests(best.block_bytes, best.depth)


def _disk_of(directory: str) -> str:
    """The disk and the filesystem: numbers of devices are given anew at every start, names of disks nearly so."""
    device = os.stat(directory).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    name = Path(f"/sys/dev/block/{number}").resolve().name  # the number itself where there is no block device
    return f"{name} {number} {os.statvfs(directory).f_fsid:x}"


def _path() -> Path:
    return cache_directory() / "disks.json"


def _load() -> dict[str, Any]:
    """All that was measured, by disk; raises whatever a broken file makes it raise."""
    content = json.loads(_path().read_text())
    if content["version"] != _VERSION:
        raise ValueError("another version")
    return dict(content["disks"])


def _save(disks: dict[str, Any]) -> Path:
    path = _path()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps({"version": _VERSION, "disks": disks}, indent=2))
    return path


def _requests(data: Any) -> Requests:
    nbytes, threads = data["nbytes"], data["threads"]
    for value, most in ((nbytes, _MOST_BYTES), (threads, _MOST_THREADS)):
        if type(value) is not int or not 0 < value <= most:
            raise ValueError("not what was kept")
    if nbytes % 4096:
        raise ValueError("not whole blocks")
    return Requests(nbytes, threads)
