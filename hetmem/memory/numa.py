"""The NUMA node that a GPU hangs on, the cores of a node, and memory that prefers one: sysfs and one system call.

It knows node and CPU numbers and addresses. Must not know torch, devices or what the memory is for. No libnuma.
"""

from __future__ import annotations

import ctypes
import os
import platform
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
