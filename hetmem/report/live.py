"""Shows the progress of training while it runs: a line of text, and a status file that `hetmem top` reads.

The training process calls `progress(model)`, for instance once a step; that reads a few counters and, at most once a
second, replaces its status file. No thread, no socket. Only the user who trains can read the files. A file goes with
its model, or as the process ends; that of a killed process as the next one is made, or is looked at.
"""

from __future__ import annotations

import json
import os
import stat
import tempfile
import textwrap
import time
from collections import deque
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch

from hetmem.base.json_files import read_json
from hetmem.base.schema import list_of, number, or_null, record, row, table_of, text, whole
from hetmem.base.units import GIB, KIB, MIB, format_seconds, format_size, sparks
from hetmem.base.whole_files import publish, remove_unfinished
from hetmem.engine.runtime import Runtime
from hetmem.errors import printable
from hetmem.intercept import registry

PUBLISH_SECONDS = 1.0
COLUMNS = 79
_REMEMBERED = 60
_watched: WeakKeyDictionary[Runtime, Watch] = WeakKeyDictionary()


def progress(model: torch.nn.Module) -> str:
    """Return one line about `model` since the last call: step time, tokens a second, share of stalls, use of the tiers,
    link speeds, the last step times as bars.

    The line has 79 columns, so that `print(hetmem.progress(model), end="\\r")` redraws it in place. A call costs
    microseconds; at most once a second it writes half a KiB for `hetmem top`. Raises `ManageError` if `model` is not
    managed.
    """
    return line(watch(model, _watched).look())


def watch(model: torch.nn.Module, known: WeakKeyDictionary[Runtime, Watch]) -> Watch:
    """Return the entry of `model` in `known`, made at the first call. Raises `ManageError` if it is not managed."""
    runtime = registry.of_module(model).runtime
    if runtime not in known:
        known[runtime] = Watch(type(model).__name__, runtime)
    return known[runtime]


class Watch:
    """The counters of one runtime when they were last read, and when its status was last published."""

    def __init__(self, name: str, runtime: Runtime) -> None:
        self._name, self._runtime = name, ref(runtime)
        self._at = 0.0
        self._steps, self._stalls, self._tokens = 0, 0.0, 0
        self._links: dict[str, int] = {}
        self._history: deque[float] = deque(maxlen=_REMEMBERED)
        self._published = 0.0
        self._file: Path | None = None

    def look(self) -> dict[str, Any]:
        """Return the status since the last call; publish it at most every `PUBLISH_SECONDS`."""
        runtime = self._runtime()
        assert runtime is not None
        now, statistics, tokens = time.perf_counter(), runtime.statistics, runtime.events.tokens
        runtime.events.read_marks()
        stalls = runtime.events.stall_seconds
        elapsed = max(now - (self._at or runtime.events.began), 1e-9)
        links = {link.value: use.bytes for link, use in runtime.traffic.engine.links().items()}
        steps = statistics.steps - self._steps
        if steps:
            self._history.append(elapsed / steps)
        status = {
            "process": os.getpid(),
            "model": self._name,
            "steps": statistics.steps,
            "step_seconds": elapsed / steps if steps else None,
            "tokens_per_second": (tokens - self._tokens) / elapsed,
            "stall_share": (stalls - self._stalls) / elapsed,
            "tiers": tier_peaks(runtime),
            "links": {link: (nbytes - self._links.get(link, 0)) / elapsed for link, nbytes in links.items()},
            "history": [float(f"{seconds:.3g}") for seconds in self._history],
        }
        self._at, self._steps, self._links, self._tokens = now, statistics.steps, links, tokens
        self._stalls = stalls
        if now - self._published >= PUBLISH_SECONDS:
            self._published = now
            with suppress(OSError):  # training goes on
                self._publish(runtime, status)
        return status

    def _publish(self, runtime: Runtime, status: dict[str, Any]) -> None:
        """Write `status` to a file for `hetmem top`, which goes with `runtime`. Raises OSError."""
        directory = status_directory()
        path = directory / f"{os.getpid()}-{id(runtime):x}.json"
        if path != self._file:
            _remove_ended(directory)
            self._file = path
            runtime.at_end.append(partial(_remove, path))
        publish(path, json.dumps(status))


def tier_peaks(runtime: Runtime) -> dict[str, list[int]]:
    """Return the peak and the capacity in bytes of each tier."""
    memory = runtime.memory
    nvme = memory.store.peak_bytes if memory.store else 0
    return {
        "device": [max(runtime.statistics.device_peak_bytes, runtime.room.chunk_bytes()), memory.device_bytes],
        "host": [memory.host_pool.peak_bytes, memory.host_pool.capacity_bytes],
        "nvme": [nvme, memory.nvme_bytes],
    }


_LINKS = {"host_to_device": "H2D", "device_to_host": "D2H", "nvme_read": "R", "nvme_write": "W"}


def _work(status: dict[str, Any]) -> list[str]:
    """Return texts for the number of steps, the step time, throughput and stalls."""
    waits = "no new step" if status["steps"] else "no step yet"
    took = format_seconds(status["step_seconds"]) if status["step_seconds"] else waits
    tokens = status.get("tokens_per_second", 0.0)
    throughput = [f"{tokens / 1e3:.1f}k tok/s" if tokens >= 1e4 else f"{tokens:.0f} tok/s"] if tokens else []
    return [f"step {status['steps']}", took, *throughput, f"stalls {status['stall_share']:.0%}"]


def line(status: dict[str, Any]) -> str:
    """Show `status` in one line of 79 columns; parts that do not fit are left out."""
    full = [f"{name} {used / capacity:.0%}" for name, (used, capacity) in status["tiers"].items() if capacity]
    speeds = {_LINKS[link]: speed for link, speed in status["links"].items() if speed}
    fastest = max(speeds.values(), default=0.0)
    unit, size = next((each for each in (("GiB", GIB), ("MiB", MIB)) if fastest >= each[1]), ("KiB", KIB))
    moved = [f"{name} {speed / size:.{int(speed < 10 * size)}f}" for name, speed in speeds.items()]
    links = [f"{' '.join(moved)} {unit}/s"] if moved else []
    parts = [*_work(status), *links, sparks(status["history"][-8:]), *full]
    text = ""
    for part in parts:
        if len(text) + len(part) + 2 <= COLUMNS:
            text += f"  {part}" if text and part else part
    return text.ljust(COLUMNS)


# ---- the files -------------------------------------------------------------------------------------------------------


def status_directory() -> Path:
    """Return the directory of the status files of this user's training processes; create it, for this user only.

    Raises PermissionError if others own it or have access to it.
    """
    system = Path(f"/run/user/{os.getuid()}")
    base = system if os.access(system, os.W_OK) else Path(tempfile.gettempdir())
    directory = base / f"hetmem-{os.getuid()}"
    directory.mkdir(mode=0o700, exist_ok=True)
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{directory} is not a directory of this user alone: remove it")
    return directory


def _remove(path: Path) -> None:
    with suppress(OSError):
        path.unlink()


def _remove_ended(directory: Path) -> list[Path]:
    """Remove what ended processes have left in `directory`; return the status files of those that run."""
    remove_unfinished(os.fspath(directory))
    found: list[Path] = []
    for path in sorted(directory.glob("*.json")):
        process = path.name.partition("-")[0]
        if not (process.isascii() and process.isdigit() and len(process) < 10):
            continue
        if _runs(int(process)):
            found.append(path)
        else:
            path.unlink(missing_ok=True)
    return found


_BYTES = whole(0, 10**18)
_RATE = number(0.0, 1e18)
_SECONDS = number(0.0, 1e9, "seconds")
_STATUS = record(
    {
        "process": whole(1, 2**31),
        "model": text(1000),
        "steps": whole(),
        "step_seconds": or_null(_SECONDS),
        "tokens_per_second": _RATE,
        "stall_share": number(0.0, 1e6, "a share"),
        "tiers": record(dict.fromkeys(("device", "host", "nvme"), row(_BYTES, _BYTES))),
        "links": table_of(_RATE, _LINKS),
        "history": list_of(_SECONDS, 0, _REMEMBERED),
    }
)
_MOST_BYTES = 1 << 16


def statuses() -> list[dict[str, Any]]:
    """Return the last status of each training process of this user that still runs; files of others are removed. For a
    file that is no status, or one of another version of hetmem, it has `refused`: why."""
    found: list[dict[str, Any]] = []
    for path in _remove_ended(status_directory()):
        with suppress(OSError):  # removed meanwhile
            found.append(_status(path))
    return found


def _status(path: Path) -> dict[str, Any]:
    """Return the status in the file `path`, or why it is `refused`. Raises OSError."""
    age = time.time() - path.stat().st_mtime
    try:
        status: dict[str, Any] = read_json(path, _MOST_BYTES)
        _STATUS(status)
    except ValueError as error:
        return {"refused": f"{path.name} is no status that this hetmem knows: {error}"}
    return {**status, "age_seconds": age}


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def top() -> str:
    """Return the text that `hetmem top` prints: the status of each training process of this user, in 79 columns."""
    found = statuses()
    blocks = [_refused(status["refused"]) if "refused" in status else _block(status) for status in found]
    if all("refused" in status for status in found):
        blocks.append("No training process of yours reports: call hetmem.progress(model) once a step.")
    return printable("\n\n".join(blocks))


def _refused(why: str) -> str:
    return textwrap.fill(why, COLUMNS, subsequent_indent="  ")


def _block(status: dict[str, Any]) -> str:
    """Return the lines about one process."""
    tiers = [f"{name} {_of(*status['tiers'][name])}" for name in ("device", "host", "nvme") if status["tiers"][name][1]]
    links = [f"{_LINKS[link]} {format_size(speed)}/s" for link, speed in status["links"].items() if speed]
    seen, work = f"{status['age_seconds']:.0f} s ago", "  ".join(_work(status))
    name = str(status["model"])[: max(4, COLUMNS - len(f"{status['process']}  {work}{seen}") - 4)]
    head = f"{status['process']}  {name}  {work}"
    times = _times(status["history"])
    rest = [f"  {line[: COLUMNS - 2]}" for line in ("  ".join(tiers), "  ".join(links), *times) if line]
    return "\n".join([f"{head[: COLUMNS - len(seen) - 2]:{COLUMNS - len(seen)}}{seen}", *rest])


def _times(history: list[float]) -> list[str]:
    """Return the line with the last steps of `history`, as many as it has room for, and the longest of them."""
    if not history:
        return []
    begin, end = "step time ", f" up to {format_seconds(max(history))}"
    shown = history[-(COLUMNS - 2 - len(begin) - len(end)) :]
    return [f"{begin}{sparks(shown)} up to {format_seconds(max(shown))}"]


def _of(used: int, capacity: int) -> str:
    return f"{format_size(used)} ({used / capacity:.0%})"
