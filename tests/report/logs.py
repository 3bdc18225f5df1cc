"""Logs made by hand for the tests of reports: times are whole seconds or fractions that floats hold exactly."""

from __future__ import annotations

from typing import Any

from tests.report.tested import BlockFacts, CopyChange, Link, Log, MomentSeen, Span, Transfer, Window

TIERS: dict[str, dict[str, Any]] = {
    "device": {"capacity_bytes": 1000, "used_bytes": 500},
    "host": {"capacity_bytes": 1000, "used_bytes": 500},
    "nvme": {"capacity_bytes": 1000, "used_bytes": 300},
}


def fill(log: Log[Any], *entries: tuple[Any, ...]) -> None:
    """Log `entries`, one after the other."""
    for each in entries:
        log.append(each)


def window(**changes: Any) -> Window:
    """A window of a step of eight seconds in which nothing happened, with `changes`."""
    return Window(**{"covers": "step", "start": 100.0, "end": 108.0, **changes})


def read(start: float, end: float, nbytes: int = 100, block: int = 0) -> Transfer:
    return Transfer(Link.NVME_READ, block, start, end, nbytes)


def to_device(start: float, end: float, nbytes: int = 100, block: int = 0) -> Transfer:
    return Transfer(Link.HOST_TO_DEVICE, block, start, end, nbytes)


def moment(at: float, *blocks: int, chunk_bytes: int = 0, non_model_bytes: int = 0, operator: str = "op") -> MomentSeen:
    return MomentSeen(at, operator, blocks, chunk_bytes, non_model_bytes)


def came(at: float, block: int, tier: int = 0) -> CopyChange:
    return CopyChange(at, block, tier, True)


def went(at: float, block: int, tier: int = 0) -> CopyChange:
    return CopyChange(at, block, tier, False)


def forward(start: float, end: float) -> Span:
    return Span("forward", start, end)


def backward(start: float, end: float) -> Span:
    return Span("backward", start, end)


def blocks(count: int, role: str = "param", parameters: tuple[str, ...] = ("weight",)) -> list[BlockFacts]:
    """`count` chunks of 10 bytes, of which a copy takes 16 bytes on the device and 32 in staging."""
    return [BlockFacts(chunk, role, "host", 10, (16, 32), parameters) for chunk in range(count)]
