"""A report's timeline as Chrome trace events, for Perfetto (ui.perfetto.dev) and chrome://tracing.

One track for the thread that trains, and one for compute where that runs behind it; for the host optimizer's updates,
and for each link, as many as were under way at once; a counter for the bytes of each tier. Knows the dict of a report
only.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from hetmem.report.step import TERM_NAMES

_LINKS = ("host_to_device", "device_to_host", "nvme_read", "nvme_write")
_PROCESS = 1
_TRAINING, _OPTIMIZER, _COMPUTE, _FIRST_LINK = 1, 2, 999, 1000
_LANES_PER_LINK = 100
Event = dict[str, Any]


def trace_text(data: dict[str, Any]) -> str:
    """The trace as JSON; only names of tracks if the report has no timeline."""
    events = [_named("process_name", 0, f"hetmem: {data['model']}")]
    if data["timeline"] is not None:
        events += _events(data["timeline"])
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, allow_nan=False)


def _events(timeline: dict[str, Any]) -> Iterator[Event]:
    yield _named("thread_name", _TRAINING, "Training thread")
    launched = timeline["launched"]
    for what, start, end in launched or timeline["segments"]:
        yield _complete(what, _TRAINING, start, end)
    yield from _moments(timeline)
    compute = _COMPUTE if launched else _TRAINING
    if launched:
        yield _named("thread_name", _COMPUTE, "Compute")
        for what, start, end in timeline["segments"]:
            yield _complete(what, _COMPUTE, start, end)
    stalls = timeline["stalls"]
    for start, end in zip(stalls["from_us"], stalls["until_us"], strict=True):
        yield _complete("stall", compute, start, end)
    faults = timeline["faults"]
    for block, at in zip(faults["block"], faults["at_us"], strict=True):
        name = f"fault: {_label(timeline, block)}"
        yield {"ph": "i", "name": name, "pid": _PROCESS, "tid": _TRAINING, "ts": at, "s": "t"}
    yield from _updates(timeline["updates"])
    yield from _transfers(timeline)
    for tier, memory in timeline["memory"].items():
        for index, at in enumerate(memory["at_us"]):
            values = {role: column[index] for role, column in memory["bytes"].items()}
            yield {"ph": "C", "name": f"{tier} bytes", "pid": _PROCESS, "ts": at, "args": values}


def _moments(timeline: dict[str, Any]) -> Iterator[Event]:
    """An operator lasts until the next one, and no longer than its segment."""
    moments, ends = timeline["moments"], [end for _, _, end in timeline["launched"] or timeline["segments"]]
    at = moments["at_us"]
    for index, operator in enumerate(moments["operator"]):
        following = [end for end in ends if end >= at[index]]
        end = min([*at[index + 1 : index + 2], *following[:1]], default=at[index])
        yield _complete(timeline["operators"][operator], _TRAINING, at[index], end)


def _lane(free_at: list[int], start: int, end: int) -> int:
    """The first lane that is free from `start` on, or a new one: events of one track must nest."""
    lane = next((index for index, free in enumerate(free_at) if free <= start), len(free_at))
    free_at[lane : lane + 1] = [end]
    return lane


def _updates(updates: dict[str, Any]) -> Iterator[Event]:
    """Threads update chunks at the same time."""
    yield _named("thread_name", _OPTIMIZER, "Host optimizer")
    named, free_at = 1, list[int]()
    for start, end, what in sorted(zip(*(updates[key] for key in ("from_us", "until_us", "what")), strict=True)):
        track = _OPTIMIZER + _lane(free_at, start, end)
        if len(free_at) > named:
            named = len(free_at)
            yield _named("thread_name", track, f"Host optimizer {named}")
        yield _complete(what, track, start, end)


def _transfers(timeline: dict[str, Any]) -> Iterator[Event]:
    """Transfers in flight at once go to lanes of their own."""
    moved = timeline["transfers"]
    free_at: dict[int, list[int]] = {}
    columns = zip(*(moved[key] for key in ("from_us", "until_us", "link", "block", "bytes")), strict=True)
    for start, end, link, block, nbytes in sorted(columns):
        lanes = free_at.setdefault(link, [])
        known = len(lanes)
        lane = _lane(lanes, start, end)
        track = _FIRST_LINK + link * _LANES_PER_LINK + lane
        if lane == known:
            yield _named("thread_name", track, f"{TERM_NAMES[_LINKS[link]]} {lane + 1}")
        event = _complete(_label(timeline, block), track, start, end)
        yield {**event, "args": {"bytes": nbytes}}


def _label(timeline: dict[str, Any], block: int) -> str:
    if block < 0:
        return "gradient"
    facts = timeline["blocks"][block]
    return f"{facts['role']} of chunk {facts['chunk']}"


def _named(kind: str, track: int, name: str) -> Event:
    return {"ph": "M", "name": kind, "pid": _PROCESS, "tid": track, "args": {"name": name}}


def _complete(name: str, track: int, start: int, end: int) -> Event:
    return {"ph": "X", "name": name, "pid": _PROCESS, "tid": track, "ts": start, "dur": end - start}
