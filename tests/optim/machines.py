"""Machines for tests of where updates run."""

from __future__ import annotations

from dataclasses import replace

from hetmem.base.hardware import DeviceProfile, HardwareProfile, HostProfile, Rate

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

BALANCED = replace(
    SLOW_HOST,
    host=replace(SLOW_HOST.host, update_bytes_per_second=7e6),
    host_to_device=Rate(8e6),
    device_to_host=Rate(8e6),
    both_ways_bytes_per_second=100e6,
)
"""Cores of 7 bytes and a link of 8 bytes a microsecond."""

FAST_HOST = replace(SLOW_HOST, host=replace(SLOW_HOST.host, update_bytes_per_second=1000 * GB))
