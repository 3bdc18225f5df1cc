"""Turns a window of the log into columns of numbers: the `timeline` section of a report.

Times are whole microseconds from the start of the window. It knows the log and the facts of the blocks; not torch, nor
the runtime.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hetmem.engine.events import Held
from hetmem.report.step import TIERS, Window, held_over_time, overlap, union
from hetmem.schedule.blocks import Link

LINKS = tuple(Link)
_INTO_TIER = (Link.HOST_TO_DEVICE, Link.NVME_READ)


@dataclass(frozen=True, slots=True)
class BlockFacts:
    """One block (a role of a chunk) in a report. `tier_bytes`: the bytes of a copy on the device and in staging."""

    chunk: int
    role: str
    home: str
    bytes: int
    tier_bytes: tuple[int, int]
    parameters: tuple[str, ...]


Column = list[Any]
Present = tuple[frozenset[int], frozenset[int]]


def timeline_section(
    window: Window, blocks: Sequence[BlockFacts], present: Present, held: Held | None = None
) -> dict[str, Any]:
    """Return the section. `present`: the blocks with a copy on the device, and in staging, now; `held`: the bytes of
    saved activations now, by sets of tiers."""
    clock = Clock(window.start, window.end)
    copies = _copies(window, present)
    return {
        "covers": window.covers,
        "seconds": window.end - window.start,
        "segments": [[span.what, clock(span.start), clock(span.end)] for span in window.segments],
        "launched": [[span.what, clock(span.start), clock(span.end)] for span in window.launched],
        **_moment_columns(window, clock),
        "memory": _memory(window, blocks, copies, held or {}, clock),
        "blocks": _blocks(window, blocks),
        "copies": _copy_columns(copies, window, clock),
        "transfers": {
            "link": [LINKS.index(moved.link) for moved in window.transfers],
            "bytes": [moved.nbytes for moved in window.transfers],
            **_columns(window.transfers, "block", clock),
        },
        "stalls": _columns(window.stalls, "block", clock),
        "faults": {
            "block": [fault.block for fault in window.faults],
            "at_us": [clock(fault.at) for fault in window.faults],
        },
        "updates": _columns(window.updates, "what", clock),
    }


def _moment_columns(window: Window, clock: Clock) -> dict[str, Any]:
    operators = {name: index for index, name in enumerate(dict.fromkeys(moment.operator for moment in window.moments))}
    return {
        "operators": list(operators),
        "moments": {
            "at_us": [clock(moment.at) for moment in window.moments],
            "operator": [operators[moment.operator] for moment in window.moments],
            "blocks": [list(moment.blocks) for moment in window.moments],
        },
    }


def _columns(entries: Sequence[Any], of: str, clock: Clock) -> dict[str, Column]:
    """Return the attribute `of` of `entries`, and their start and end, as columns."""
    return {
        of: [getattr(each, of) for each in entries],
        "from_us": [clock(each.start) for each in entries],
        "until_us": [clock(each.end) for each in entries],
    }


class Clock:
    """Converts seconds of the log to whole microseconds from the start of a window, clipped to it."""

    def __init__(self, start: float, end: float) -> None:
        self._start, self._end = start, end

    def __call__(self, at: float) -> int:
        return int((min(max(at, self._start), self._end) - self._start) * 1e6)


@dataclass(slots=True)
class _Copy:
    block: int
    tier: int
    since: float
    until: float


def _copies(window: Window, present: Present) -> list[_Copy]:
    """Return the copies in the window, with their times; those at its start by undoing later changes of `present`."""
    at_start = {(tier, block) for tier in (0, 1) for block in present[tier]}
    for change in reversed(window.copies):
        if change.present:
            at_start.discard((change.tier, change.block))
        else:
            at_start.add((change.tier, change.block))
    since = dict.fromkeys(at_start, window.start)
    copies = []
    for change in window.copies:
        if change.at >= window.end:
            break
        key = (change.tier, change.block)
        if change.present:
            since.setdefault(key, change.at)
        elif key in since:
            copies.append(_Copy(change.block, change.tier, since.pop(key), change.at))
    copies += [_Copy(block, tier, began, window.end) for (tier, block), began in since.items()]
    return sorted(copies, key=lambda copy: (copy.since, copy.tier, copy.block))


def _copy_columns(copies: list[_Copy], window: Window, clock: Clock) -> dict[str, Column]:
    """Return copies as columns. `valid_us`: the end of the transfer that filled the copy, or `from_us` without one."""
    ends: dict[tuple[int, int], list[float]] = defaultdict(list)
    for transfer in window.transfers:
        if transfer.link in _INTO_TIER:
            ends[_INTO_TIER.index(transfer.link), transfer.block].append(transfer.end)
    valid = []
    for copy in copies:
        known = sorted(ends.get((copy.tier, copy.block), ()))
        at = bisect_left(known, copy.since)
        filled = at < len(known) and known[at] <= copy.until and copy.since > window.start
        valid.append(clock(known[at] if filled else copy.since))
    return {
        "block": [copy.block for copy in copies],
        "tier": [copy.tier for copy in copies],
        "from_us": [clock(copy.since) for copy in copies],
        "valid_us": valid,
        "until_us": [clock(copy.until) for copy in copies],
    }


def _memory(
    window: Window, blocks: Sequence[BlockFacts], copies: list[_Copy], held: Held, clock: Clock
) -> dict[str, Any]:
    """Return step functions of bytes: of copies by role on device and host, of activations that move, and of everything
    else on the device."""
    sections = {}
    for tier, name in enumerate(("device", "host", "nvme") if window.saved else ("device", "host")):
        changes: list[tuple[float, str, int]] = []
        for copy in copies:
            if copy.tier == tier:
                nbytes = blocks[copy.block].tier_bytes[tier]
                changes.append((copy.since, blocks[copy.block].role, nbytes))
                changes.append((copy.until, blocks[copy.block].role, -nbytes))
        roles = list(dict.fromkeys(role for _, role, _ in sorted(changes)))
        if name == "device":
            changes += _non_model_changes(window)
            roles.append("non_model")
        if window.saved:
            changes += _saved_changes(held_over_time(window, held, TIERS[name]))
            roles.append("activations")
        steps = _steps(changes, roles, window.start, clock)
        if name == "device" and window.saved:  # a moment's bytes include saved activations
            steps = [(at, (*others, max(0, all_of - saved), saved)) for at, (*others, all_of, saved) in steps]
        sections[name] = {
            "at_us": [at for at, _ in steps],
            "bytes": {role: [values[index] for _, values in steps] for index, role in enumerate(roles)},
        }
    return sections


def _saved_changes(points: list[tuple[float, int]]) -> list[tuple[float, str, int]]:
    before = [0, *(nbytes for _, nbytes in points)]
    return [(at, "activations", nbytes - last) for (at, nbytes), last in zip(points, before, strict=False)]


def _non_model_changes(window: Window) -> list[tuple[float, str, int]]:
    """Return changes of bytes beside chunks: a moment's until the next one of its segment, else the least of all."""
    stays = min((moment.non_model_bytes for moment in window.moments), default=0)
    points = [(moment.at, moment.non_model_bytes) for moment in window.moments]
    points += [(segment.end, stays) for segment in window.segments]
    changes, before = [(window.start, "non_model", stays)], stays
    for at, nbytes in sorted(points, key=lambda point: point[0]):
        changes.append((at, "non_model", nbytes - before))
        before = nbytes
    return changes


def _steps(
    changes: list[tuple[float, str, int]], roles: list[str], start: float, clock: Clock
) -> list[tuple[int, tuple[int, ...]]]:
    """Return running sums of `changes` per role, one entry for each microsecond with a change."""
    sums = dict.fromkeys(roles, 0)
    points = [(clock(start), tuple(sums.values()))]
    for at, role, nbytes in sorted(changes):
        sums[role] += nbytes
        point = (clock(at), tuple(sums.values()))
        if points[-1][0] == point[0]:
            points[-1] = point
        else:
            points.append(point)
    return points


def _blocks(window: Window, blocks: Sequence[BlockFacts]) -> list[dict[str, Any]]:
    """Return each block's facts with the bytes fetched and the seconds stalled for it in the window.

    Stalls of no block within a chunk's update count for its weights."""
    stalled = union((stall.start, stall.end) for stall in window.stalls if stall.block < 0)
    waited: dict[int, float] = defaultdict(float)
    for stall in window.stalls:
        if stall.block >= 0:
            waited[stall.block] += stall.end - stall.start
    weights = {f"chunk {facts.chunk}": index for index, facts in enumerate(blocks) if facts.role == "param"}
    for update in window.updates:
        if update.what in weights:
            waited[weights[update.what]] += overlap(stalled, update.start, update.end)
    fetched: dict[int, int] = defaultdict(int)
    for transfer in window.transfers:
        if transfer.link in _INTO_TIER:
            fetched[transfer.block] += transfer.nbytes
    entries = []
    for index, facts in enumerate(blocks):
        entry = asdict(facts)
        del entry["tier_bytes"]
        entry["parameters"] = list(facts.parameters)
        entry["fetched_bytes"], entry["stall_seconds"] = fetched[index], waited[index]
        entries.append(entry)
    return entries
