"""Says which chunks' homes move to idle device memory, where the device updates them. Pure.

A run and a plan of it both ask here, step by step, and so choose alike: idle memory of the device is filled with homes
(`choose`), whatever the link is busy with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

WORTH = 0.97
"""What is not done by default has to be this much faster: it has to be told to a run."""

UPDATE_BYTES = 28
"""Traffic of the memory in which a float32 parameter is updated: 16 bytes read, 12 written."""


class Way(Enum):
    """Where a parameter is updated, and where its states live."""

    HOST = "host"
    RESIDENT = "resident"


MARGIN_SHARE = 1 / 16
"""Of the device: stays free beside the most that was ever needed for anything but chunks."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A chunk whose homes may move: what they take of the device, and how much of that lies on NVMe now, in bytes."""

    device_bytes: int
    nvme_bytes: int = 0


def room_bytes(usable_bytes: int, chunk_cap_bytes: int, non_model_bytes: int, home_bytes: int) -> int:
    """Return what is left for copies on a device of `usable_bytes`, beside `home_bytes` of homes and `non_model_bytes`
    of everything else; below zero if these take more. Homes and copies take at most `chunk_cap_bytes`."""
    return min(chunk_cap_bytes, usable_bytes - non_model_bytes) - home_bytes


def idle_bytes(usable_bytes: int, chunk_cap_bytes: int, non_model_bytes: int, chunk_bytes: int) -> int:
    """The bytes that are never used of a device of `usable_bytes`; below zero if that is less than nothing.

    `chunk_cap_bytes`: the most that chunks may take; `non_model_bytes`: the most that everything else has taken at one
    time; `chunk_bytes`: homes that are on the device, and a copy of each chunk: where not all copies fit, nothing is
    idle, as a slot saves more bytes of the link in a step than a home of its size.
    """
    margin = int(MARGIN_SHARE * usable_bytes)
    return room_bytes(usable_bytes, chunk_cap_bytes, non_model_bytes + margin, chunk_bytes)


def choose(candidates: Sequence[Candidate], idle: int) -> list[int]:
    """The numbers of the candidates that move into `idle` bytes, in the order in which they do.

    First those with the greatest part on NVMe, the slowest tier; of equal ones the first given, which should be the
    first used: its gradient arrives last, and a step waits for its update. Whatever does not fit is passed over.
    """
    order = sorted(range(len(candidates)), key=lambda at: -candidates[at].nvme_bytes / candidates[at].device_bytes)
    chosen = []
    for at in order:
        if candidates[at].device_bytes <= idle:
            chosen.append(at)
            idle -= candidates[at].device_bytes
    return chosen
