"""The budget, options and environment variables that a user sets, and the versions hetmem needs. No other module reads
the environment."""

from __future__ import annotations

import os
import re
import sys
import threading
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from hetmem.base.units import format_size, parse_size
from hetmem.errors import BudgetError, ManageError

VERSION = "0.2.0"
"""The version of hetmem, read by the build of its packages."""

Size = int | str
OverlapName = Literal["off", "backward", "forward"]
ActivationsName = Literal["keep", "offload", "auto"]
Directory = str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class Limits:
    """A budget in bytes; None = the default. `nvme_directories` is empty when there is no NVMe tier."""

    device_bytes: int | None
    host_bytes: int | None
    nvme_bytes: int
    nvme_directories: tuple[Path, ...]
    device_chunk_bytes: int | None
    home_copies: bool | None


@dataclass(frozen=True)
class Budget:
    """The most that hetmem may use of each tier; a hard limit.

    `device`, `host`, `nvme`: an int of bytes or a string ("512MiB" is 2**29 bytes, "20GB" is 20e9). None: for a GPU
    nine tenths of its free memory, for the simulated device a quarter of free host memory; for the host what the
    model can use, at most six tenths of free memory; for NVMe no such tier (or, with `nvme_dir`, nine tenths of the
    free space there). `nvme_dir`: one directory or a list of them, used in turn. `device_chunks`: the part of `device`
    that chunks may take (None: whatever the trace leaves; a model that fits into this part stays on the device).
    `home_copies`: keep 16-bit copies of float32 parameters beside them in host memory (2 bytes a parameter more), so
    that half the bytes cross to the device. None: if the model computes in 16 bits and host memory has room for the
    copies beside gradients and three states, the most that any optimizer of torch's keeps; True: place the copies
    before those, as far as there is room. Raises `BudgetError` (a ValueError) for an invalid size, `device_chunks`
    above `device`, `nvme` without `nvme_dir`, and an `nvme_dir` that is no path. `manage` checks that the directory
    exists, as a plan may be for another machine.
    """

    device: Size | None = None
    host: Size | None = None
    nvme: Size | None = None
    nvme_dir: Directory | Sequence[Directory] | None = None
    device_chunks: Size | None = None
    home_copies: bool | None = None

    def __post_init__(self) -> None:
        self.limits()

    def limits(self) -> Limits:
        """Return this budget in bytes. Raises `BudgetError` for values that are invalid or contradict each other."""
        device = None if self.device is None else parse_size(self.device, "Budget(device=…)")
        host = None if self.host is None else parse_size(self.host, "Budget(host=…)")
        nvme = None if self.nvme is None else parse_size(self.nvme, "Budget(nvme=…)")
        chunks = None if self.device_chunks is None else parse_size(self.device_chunks, "Budget(device_chunks=…)")
        if device is not None and chunks is not None and chunks > device:
            raise BudgetError(
                f"Budget(device_chunks=…) is a part of device: got {format_size(chunks)} of {format_size(device)}"
            )
        if self.home_copies not in (None, True, False):
            raise BudgetError(f"Budget(home_copies=…) must be True, False or None, got {self.home_copies!r}")
        directories = self._directories()
        if nvme and not directories:
            raise BudgetError(
                f"Budget(nvme={self.nvme!r}) needs a directory to put its file in: add nvme_dir='/path/on/the/drive'"
            )
        if nvme is None:
            nvme = sum(dict(map(_free_bytes, directories)).values())
        return Limits(device, host, nvme, directories if nvme else (), chunks, self.home_copies)

    def _directories(self) -> tuple[Path, ...]:
        if self.nvme_dir is None:
            return ()
        named: Any = self.nvme_dir
        directories = list(named) if isinstance(named, Iterable) and not isinstance(named, (str, bytes)) else [named]
        for directory in directories:
            if not isinstance(directory, (str, os.PathLike)) or not os.fspath(directory):
                raise BudgetError(
                    f"Budget(nvme_dir=…) must be the path of a directory, or a list of such, got {self.nvme_dir!r}"
                )
        return tuple(Path(directory) for directory in directories)


def refuse_budget(budget: Any) -> None:
    """Raise `ManageError` unless `budget` is a `Budget` or None."""
    if isinstance(budget, type):
        raise ManageError(f"call it: hetmem.managed(hetmem.Budget(…)) decorates {budget.__name__}, or hetmem.managed()")
    if budget is not None and not isinstance(budget, Budget):
        raise ManageError(f"expected a hetmem.Budget(device=…, host=…, nvme=…), got {budget!r}")


def refuse_activations(activations: Any) -> None:
    """Raise `ManageError` unless `activations` is a value of `manage(activations=…)`."""
    if activations not in get_args(ActivationsName):
        *names, last = map(repr, get_args(ActivationsName))
        raise ManageError(f"activations must be {', '.join(names)} or {last}, got {activations!r}")


def kernel_cache_directory() -> Path | None:
    """Return the directory of compiled kernels: below XDG_CACHE_HOME, by default ~/.cache; None if the user has no
    home directory, as in a container with an arbitrary user id."""
    return _cache_directory("kernels")


def plan_cache_directory() -> Path | None:
    """Return the directory of plans that are kept, beside that of `kernel_cache_directory`; None if there is none."""
    return _cache_directory("plans")


def _cache_directory(name: str) -> Path | None:
    cache = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(cache) if cache else Path.home() / ".cache") / "hetmem" / name
    except RuntimeError:
        return None


def ranks_here() -> int:
    """Return the number of processes that a launcher such as torchrun has started on this machine, by
    LOCAL_WORLD_SIZE; 1 without one."""
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, int(text)) if text.isdigit() else 1


def local_rank() -> int:
    """Return the number of this process on this machine, by LOCAL_RANK of a launcher such as torchrun; 0 without."""
    text = os.environ.get("LOCAL_RANK", "")
    return int(text) if text.isdigit() else 0


def world_size() -> int:
    """Return the number of processes that a launcher such as torchrun has started, by WORLD_SIZE; 1 without one."""
    text = os.environ.get("WORLD_SIZE", "")
    return int(text) if text.isdigit() else 1


def missing_of_launcher() -> list[str]:
    """Return the variables of a launcher such as torchrun that are not set, by which processes find each other."""
    return [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]


def restarts() -> str:
    """Return how often a launcher such as torchrun has started all processes again, by TORCHELASTIC_RESTART_COUNT."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def set_launcher(rank: int, count: int) -> None:
    """Set the variables that torchrun sets for each process, in one that is started as `rank` of `count` here."""
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    os.environ.update({name: str(value) for name, value in names.items()})


def rank_timeout_seconds() -> float | None:
    """Return how many seconds a rank waits for others that give no sign, by HETMEM_RANK_TIMEOUT; None if that is not
    set. Raises `BudgetError` if it is no number of seconds above 0."""
    text = os.environ.get("HETMEM_RANK_TIMEOUT")
    if not text:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise BudgetError(f"HETMEM_RANK_TIMEOUT must be a number of seconds above 0, got {text!r}")
    return seconds


def sets_malloc() -> bool:
    """Return whether the environment sets the size from which on `malloc` maps blocks."""
    return "MALLOC_MMAP_THRESHOLD_" in os.environ or "malloc.mmap_threshold" in os.environ.get("GLIBC_TUNABLES", "")


def logged_parts() -> set[str]:
    """Return the parts of hetmem that HETMEM_LOG names, separated by commas: they log to standard error what they do.
    Raises `BudgetError` for one that logs nothing."""
    parts = {part.strip() for part in os.environ.get("HETMEM_LOG", "").split(",")} - {""}
    if unknown := sorted(parts - {"engine"}):
        raise BudgetError(f"HETMEM_LOG names {', '.join(unknown)}: known is engine")
    return parts


def turn_timeout_seconds() -> float:
    """Return how many seconds a thread waits for its turn with a model: HETMEM_TURN_TIMEOUT, by default half an hour,
    as another thread may save a checkpoint; at most `threading.TIMEOUT_MAX`.

    Raises `BudgetError` if the variable is no number of seconds above 0.
    """
    text = os.environ.get("HETMEM_TURN_TIMEOUT") or "1800"
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise BudgetError(f"HETMEM_TURN_TIMEOUT must be a number of seconds above 0, got {text!r}")
    return min(seconds, threading.TIMEOUT_MAX)


def _free_bytes(directory: Path) -> tuple[object, int]:
    """Return the filesystem of `directory`, and nine tenths of its free bytes; 1 byte if `statvfs` fails, as the store
    then fails with the reason."""
    try:
        status, filesystem = os.statvfs(directory), os.stat(directory).st_dev
    except OSError:
        return directory, 1
    return filesystem, status.f_bavail * status.f_frsize * 9 // 10


_PYTHON = (3, 10)
_TORCH, _NEWEST_TORCH = (2, 11), (2, 13)


def refuse_environment(torch_version: str) -> None:
    """Raise ImportError unless this is Linux, Python >= 3.10 and torch >= 2.11, and warn of a torch that is newer than
    those that were tested; `torch_version`: torch.__version__."""
    if sys.platform != "linux":
        raise ImportError(
            f"hetmem runs on Linux and this is {sys.platform}: use a Linux machine, or WSL 2 or a container on this one"
        )
    if sys.version_info < _PYTHON:
        raise ImportError(f"hetmem needs Python 3.10 or newer, and this is {sys.version.split()[0]}")
    found = re.match(r"(\d+)\.(\d+)", torch_version)
    if found is not None and (int(found[1]), int(found[2])) < _TORCH:
        raise ImportError(f"hetmem needs torch 2.11 or newer, and this is {torch_version}: pip install 'torch>=2.11'")
    if found is not None and (int(found[1]), int(found[2])) > _NEWEST_TORCH:
        warnings.warn(
            f"hetmem was tested with torch 2.11 to 2.13, whose private names it uses, and this is {torch_version}: run "
            f"`hetmem doctor`, or pip install 'torch<2.14'",
            stacklevel=3,
        )
