"""How many rows of a batch fit: what is live grows with them. The judge is a rehearsed step. Pure."""

from __future__ import annotations

import math
from dataclasses import replace

from hetmem.planner.search import Candidate, Setting, first_that_fits
from hetmem.planner.workload import Event, Phase, Workload
from hetmem.schedule.hardware import HardwareProfile

_CLOSE = 0.01
"""Of the rows: so near they are searched."""


def fitting_rows(
    workload: Workload, larger: Workload, most: int, asked: Setting, hardware: HardwareProfile, micro_batches: int
) -> int | None:
    """About the most rows, up to `most`, with which `workload`, which fits, still fits as `asked`.

    `larger` is the same with more rows: what is live is taken to grow evenly with them. None if that shows nothing, as
    the two have as many rows or do not do the same.
    """

    def fits(rows: int) -> bool:  # from the second on a micro-batch finds what the one before it found
        made = _with_rows(workload, larger, rows)
        return isinstance(first_that_fits(made, asked, hardware, min(micro_batches, 2), steps=1), Candidate)

    if not _alike(workload, larger):
        return None
    if most <= workload.rows or fits(most):
        return most
    least, beyond = workload.rows, most
    while beyond - least > max(1, _CLOSE * least):
        rows = min(max(math.isqrt(least * beyond), least + 1), beyond - 1)
        if fits(rows):
            least = rows
        else:
            beyond = rows
    return least


def _alike(workload: Workload, larger: Workload) -> bool:
    """Whether both do the same, with more rows in `larger`."""
    if larger.rows <= workload.rows or len(larger.events) != len(workload.events):
        return False
    return all(
        (one.kind, one.parameters) == (other.kind, other.parameters)
        for one, other in zip(workload.events, larger.events, strict=True)
    )


def _with_rows(workload: Workload, larger: Workload, rows: int) -> Workload:
    """`workload` with as much alive as `rows` rows have; its work stays."""
    factor = (rows - workload.rows) / (larger.rows - workload.rows)

    def grown(one: int, other: int) -> int:
        return max(0, round(one + factor * (other - one)))

    def phase(one: Phase, other: Phase) -> Phase:
        return replace(one, peak_bytes=grown(one.peak_bytes, other.peak_bytes))

    def event(one: Event, other: Event) -> Event:
        live = grown(one.live_bytes, other.live_bytes)
        return replace(
            one, live_bytes=live, during=phase(one.during, other.during), after=phase(one.after, other.after)
        )

    events = tuple(event(one, other) for one, other in zip(workload.events, larger.events, strict=True))
    return replace(workload, events=events, rows=rows)
