"""How much host memory a process may still take: what the machine has free, and what its control groups leave.

A container, or a job of a batch system, has a limit that the machine's own numbers say nothing of, and a process
that goes beyond it is killed. It knows the files of Linux; where they are not there is no limit.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_UNLIMITED = 1 << 60  # version 1 says no limit by a number near 2 ** 63


def free_host_bytes() -> int:
    """Of the machine, or of a control group of this process, whichever leaves less."""
    import psutil  # costs more than all of hetmem to import, and a budget that is said needs it not

    return min(int(psutil.virtual_memory().available), *left_by_groups())


def left_by_groups(root: Path = Path("/")) -> list[int]:
    """What each control group that limits memory leaves; 2 ** 60 if none does. Files that are read again from the disk
    count as left."""
    return [_UNLIMITED, *(left for folder in _groups(root) if (left := _left(folder)) is not None)]


def _groups(root: Path) -> Iterator[Path]:
    """The folders of this process's groups, of either version, and of those around them."""
    mounted = root / "sys/fs/cgroup"
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top = mounted / "memory" if controllers else mounted
        inside = top / path.lstrip("/")
        yield from (folder for folder in (inside, *inside.parents) if folder == top or top in folder.parents)


def _left(folder: Path) -> int | None:
    """None where there is no limit, or none that can be read: a container sees its own group as the topmost one."""
    names = ("memory.max", "memory.current", "inactive_file")
    if not (folder / names[0]).exists():
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    try:
        limit, used = ((folder / name).read_text().strip() for name in names[:2])
        statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        if limit == "max" or int(limit) >= _UNLIMITED:
            return None
        return max(0, int(limit) - int(used) + int(statistics.get(names[2], 0)))
    except (OSError, ValueError):
        return None
