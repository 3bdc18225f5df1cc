"""The links between tiers, and what is counted of each: the same names where transfers are made and where simulated."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

GRADIENTS_IN_FLIGHT = 4
"""On their way home before the thread that trains waits for one."""

SMALL_BYTES = 1 << 20
"""Below this, handing a copy to a thread costs more than the copy."""


class Link(Enum):
    """A direction between two tiers."""

    HOST_TO_DEVICE = "host_to_device"
    DEVICE_TO_HOST = "device_to_host"
    NVME_READ = "nvme_read"
    NVME_WRITE = "nvme_write"

    __hash__ = object.__hash__  # each is one object: that of `Enum` is Python, and asked for several times a copy


@dataclass(slots=True)
class LinkUse:
    """Bytes that crossed a link and the seconds it was busy."""

    bytes: int = 0
    seconds: float = 0.0
