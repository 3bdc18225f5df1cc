"""What the machine has: NUMA nodes, their cores, memory that prefers a node, and the host memory that is left.

Knows files of Linux, node and CPU numbers and addresses; where these files are not, there is one node and no limit. A
container, or a job of a batch system, has a limit that the machine's own numbers say nothing of, and a process that
goes beyond it is killed. Must not know torch, devices or what the memory is for. No libnuma.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Iterator
from pathlib import Path

SYSFS = Path("/sys")

_MBIND = {"x86_64": 237, "aarch64": 235, "riscv64": 235}
_MPOL_PREFERRED = 1  # the node first, the others when it is full: less local is better than not at all
_NODE_BITS = 1024


def node_of(pci_address: str, sysfs: Path | None = None) -> int | None:
    """The node of the device at "domain:bus:device.function" (hexadecimal); None where there is but one node with
    cores, or the firmware does not say."""
    sysfs = sysfs or SYSFS
    if len(list((sysfs / "devices/system/node").glob("node[0-9]*"))) < 2:
        return None
    try:
        node = int((sysfs / "bus/pci/devices" / pci_address.lower() / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def cores_of(node: int, sysfs: Path | None = None) -> tuple[int, ...]:
    """The CPU numbers of `node` that this process may run on, ascending; none if the system does not say."""
    try:
        text = ((sysfs or SYSFS) / "devices/system/node" / f"node{node}" / "cpulist").read_text()
    except OSError:
        return ()
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    return tuple(sorted(cpu for cpu in _numbers(text) if cpu in allowed))


def prefer(address: int, nbytes: int, node: int) -> bool:
    """Let pages of [address, address + nbytes) that are not touched yet come from `node`. `address` starts a page.

    False, with nothing changed, where the system refuses (a container may) or has no such call.
    """
    number = _MBIND.get(platform.machine())
    if number is None or os.name != "posix" or not 0 <= node < _NODE_BITS:
        return False
    words = (ctypes.c_ulong * (_NODE_BITS // 64))()
    words[node // 64] = 1 << node % 64
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    syscall.restype = ctypes.c_long
    result: int = syscall(
        ctypes.c_long(number),
        ctypes.c_void_p(address),
        ctypes.c_ulong(nbytes),
        ctypes.c_long(_MPOL_PREFERRED),
        words,
        ctypes.c_ulong(_NODE_BITS + 1),  # the kernel takes one bit less than it is told
        ctypes.c_ulong(0),
    )
    return result == 0


def _numbers(text: str) -> list[int]:
    """Of a list such as "0-3,8,10-11"."""
    found: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found.extend(range(int(first), int(last or first) + 1))
    return found


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
