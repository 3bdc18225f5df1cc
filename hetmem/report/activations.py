"""Activations that moved, in the window of a report: bytes over links, what each tier held, and what else would cost.

Knows the log and the window; not torch, not the runtime.
"""

from __future__ import annotations

from typing import Any

from hetmem.base.units import format_seconds, format_size
from hetmem.engine.events import ON_DEVICE, ON_HOST, ON_NVME, Held, SavedMove
from hetmem.report.intervals import length, union
from hetmem.report.window import Window
from hetmem.schedule.blocks import Link

TIERS = {"device": ON_DEVICE, "host": ON_HOST, "nvme": ON_NVME}


def activations_section(window: Window, held: Held) -> dict[str, Any] | None:
    """The `activations` section of a report; `held`: what each set of tiers holds now. None if none were saved."""
    seen = [move for move in window.saved if move.at < window.end]
    if not seen:
        return None
    moved = {link.value: 0 for link in Link}
    for move in seen:
        link = _link(move)
        if link is not None:
            moved[link.value] += move.nbytes
    peaks = {tier: max(nbytes for _, nbytes in held_over_time(window, held, bit)) for tier, bit in TIERS.items()}
    away = max(nbytes for _, nbytes in held_over_time(window, held, ON_HOST | ON_NVME, without=ON_DEVICE))
    forward = length(union((span.start, span.end) for span in window.segments if span.what == "forward"))
    section = {"bytes": moved, "peak_bytes": peaks, "away_peak_bytes": away, "forward_seconds": forward}
    section["sentence"] = _sentence(moved, away, forward)
    return section


def held_over_time(window: Window, held: Held, tiers: int, without: int = 0) -> list[tuple[float, int]]:
    """The bytes that lie on any of `tiers`, and on none of `without`: at the begin of `window`, and after each move."""

    def lies(on: int) -> bool:
        return bool(on & tiers) and not on & without

    changes = [(m.at, m.nbytes * (lies(m.after) - lies(m.before))) for m in window.saved]
    now = sum(nbytes for on, nbytes in held.items() if lies(on)) - sum(change for _, change in changes)
    points = [(window.start, now)]
    for at, change in changes:
        if at >= window.end:
            break
        now += change
        if change:
            points.append((at, now))
    return points


def _link(move: SavedMove) -> Link | None:
    """Over which link the bytes came to a tier that they were not on; None if they came to none."""
    came = move.after & ~move.before
    if not move.before or not came:
        return None
    if came & ON_DEVICE:
        return Link.HOST_TO_DEVICE
    if came & ON_NVME:
        return Link.NVME_WRITE
    return Link.DEVICE_TO_HOST if move.before & ON_DEVICE else Link.NVME_READ


def _sentence(moved: dict[str, int], away: int, forward_seconds: float) -> str:
    """What moved, and what keeping it and computing it again would come to."""
    out, back = moved["device_to_host"], moved["host_to_device"]
    if not out:
        return "All activations stayed on the device."
    disk = moved["nvme_write"]
    through = f" ({format_size(disk)} of them on to NVMe)" if disk else ""
    again = f", or about {format_seconds(forward_seconds)} of computing the forward again" if forward_seconds else ""
    return (
        f"Activations: {format_size(out)} left the device{through} and {format_size(back)} came back. Without moving "
        f"them a step needs {format_size(away)} more of the device{again} (activation checkpointing)."
    )
