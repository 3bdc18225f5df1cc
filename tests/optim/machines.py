"""Machines for tests of where updates run."""

from __future__ import annotations

from hetmem.schedule.hardware import DeviceProfile, HardwareProfile, HostProfile, Rate

GB = 1e9
SLOW_HOST = HardwareProfile(
    "a host that is slow beside its links",
    DeviceProfile(10**9, 1000 * GB, {"float32": 1e12}),
    HostProfile(10**10, 2, 1000 * GB, 0.001 * GB),
    Rate(100 * GB),
    Rate(100 * GB),
    Rate(1 * GB),
    Rate(1 * GB),
    200 * GB,
)
