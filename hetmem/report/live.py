"""A look at training while it runs: one line of text, and a small file that `hetmem top` reads in another terminal.

The training process calls `progress(model)` when it likes, say once a step; that reads a few counters and, at most once
a second, replaces its status file. No thread, no socket. Only the user who trains can read the files.
"""

from __future__ import annotations

import json
import os
import stat
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch

from hetmem.base.units import format_seconds, format_size
from hetmem.engine.runtime import Runtime
from hetmem.intercept import registry
from hetmem.report.files import write_atomically
from hetmem.report.step import TERM_NAMES
from hetmem.report.text import grid

PUBLISH_SECONDS = 1.0
_watched: WeakKeyDictionary[Runtime, _Watch] = WeakKeyDictionary()


def progress(model: torch.nn.Module) -> str:
    """One line of what `model` did since the last call: step time, share of stalls, bytes on each tier, link speeds.

    Costs microseconds, and at most once a second a write of half a KiB, which `hetmem top` reads. Raises `ManageError`
    if it is not managed.
    """
    runtime = registry.of_module(model).runtime
    watch = _watched.get(runtime)
    if watch is None:
        watch = _watched[runtime] = _Watch(type(model).__name__)
    return _line(watch.look(runtime))


class _Watch:
    """The counters at the last look at one runtime, and when its status was published."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._at = 0.0
        self._steps, self._stalls = 0, 0.0
        self._links: dict[str, int] = {}
        self._published = 0.0

    def look(self, runtime: Runtime) -> dict[str, Any]:
        """The status since the last look; published if the last time is long ago."""
        now, statistics = time.perf_counter(), runtime.statistics
        began = self._at or runtime.events.began
        elapsed = max(now - began, 1e-9)
        links = {link.value: use.bytes for link, use in runtime.traffic.engine.links().items()}
        steps = statistics.steps - self._steps
        status = {
            "process": os.getpid(),
            "model": self._name,
            "steps": statistics.steps,
            "step_seconds": elapsed / steps if steps else None,
            "stall_share": (statistics.stall_seconds - self._stalls) / elapsed,
            "tiers": _tiers(runtime),
            "links": {link: (nbytes - self._links.get(link, 0)) / elapsed for link, nbytes in links.items()},
        }
        self._at, self._steps, self._stalls, self._links = now, statistics.steps, statistics.stall_seconds, links
        if now - self._published >= PUBLISH_SECONDS:
            self._published = now
            _publish(status, f"{os.getpid()}-{id(runtime):x}.json")
        return status


def _tiers(runtime: Runtime) -> dict[str, list[int]]:
    """Used and allowed bytes."""
    memory = runtime.memory
    nvme = memory.store.reserved_bytes if memory.store else 0
    return {
        "device": [runtime.room.chunk_bytes(), memory.device_bytes],
        "host": [memory.host_pool.reserved_bytes, memory.host_pool.capacity_bytes],
        "nvme": [nvme, memory.nvme_bytes],
    }


def _line(status: dict[str, Any]) -> str:
    took = format_seconds(status["step_seconds"]) if status["step_seconds"] else "no step yet"
    tiers = "  ".join(f"{name} {_of(*sizes)}" for name, sizes in status["tiers"].items() if sizes[1])
    links = "  ".join(f"{_short(link)} {format_size(speed)}/s" for link, speed in status["links"].items() if speed)
    line = f"step {status['steps']}  {took}  stalls {status['stall_share']:.0%}  {tiers}  {links}"
    return line.rstrip()


def _of(used: int, capacity: int) -> str:
    return f"{format_size(used)} ({used / capacity:.0%})" if capacity else "-"


def _short(link: str) -> str:
    return {"host_to_device": "H2D", "device_to_host": "D2H"}.get(link, TERM_NAMES[link])


# ---- the files -------------------------------------------------------------------------------------------------------


def status_directory() -> Path:
    """Where this user's training processes leave their status; made if need be, for this user only.

    Raises PermissionError if somebody else has made it.
    """
    system = Path(f"/run/user/{os.getuid()}")
    base = system if os.access(system, os.W_OK) else Path(tempfile.gettempdir())
    directory = base / f"hetmem-{os.getuid()}"
    directory.mkdir(mode=0o700, exist_ok=True)
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{directory} is not a directory of this user alone: remove it")
    return directory


def _publish(status: dict[str, Any], name: str) -> None:
    """Leave `status` for `hetmem top`. Training goes on where that cannot be done: nobody depends on it."""
    try:
        write_atomically(status_directory() / name, json.dumps(status))
    except OSError:
        return


def statuses() -> list[dict[str, Any]]:
    """The last status of each training process of this user that still runs; files of others are removed."""
    found = []
    for path in sorted(status_directory().glob("*.json")):
        try:
            process = int(path.name.partition("-")[0])
            status = dict(json.loads(path.read_text(encoding="utf-8")))
            age = time.time() - path.stat().st_mtime
        except (OSError, TypeError, ValueError):
            continue  # gone meanwhile, or nobody's status
        if _runs(process):
            found.append({**status, "age_seconds": age})
        else:
            path.unlink(missing_ok=True)
    return found


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def top() -> str:
    """What every training process of this user does, as a table: what `hetmem top` prints again and again."""
    return _top(statuses())


def _row(status: dict[str, Any]) -> list[str]:
    took = format_seconds(status["step_seconds"]) if status["step_seconds"] else "-"
    tiers = [_of(*status["tiers"][tier]) for tier in ("device", "host", "nvme")]
    age = f"{status['age_seconds']:.0f} s ago"
    row = [str(status["process"]), str(status["model"]), str(status["steps"]), took, f"{status['stall_share']:.0%}"]
    return [*row, *tiers, age]


def _top(found: Iterable[dict[str, Any]]) -> str:
    rows = []
    for status in found:
        with suppress(KeyError, TypeError, ValueError):  # of another version of hetmem
            rows.append(_row(status))
    if not rows:
        return "No training process of yours reports: call hetmem.progress(model) once a step."
    return grid(
        ["pid", "model", "steps", "step", "stalls", "device", "host", "NVMe", "seen"], rows, left=(1,), width=120
    )
