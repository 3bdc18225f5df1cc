"""Selects the part of the event log that a report shows: the last whole training step, or the last forward if there is
none; and finds the resource that binds it: the terms of its time, how well they overlap, and what to change. Also the
activations that moved in it, and the history of all steps, or forwards. Pure: it knows nothing of chunks.

Note "terms": a step takes at least the longest of {compute, launching, host to device, device to host, host optimizer,
NVMe read, NVMe write}, and their sum if nothing overlaps. Compute is the time of forward and backward on the device
without the stalls in it. Launching, on a device that computes asynchronously, is the time that the training thread
takes to launch both, without its waits. Where the device has caught up with the thread, compute lasts as long as
launching does: if that is more than half of compute, launching binds. The host optimizer is the time in which tiles of
updates ran or waited for a worker; a link's term is the union of the intervals in which a transfer was in flight on it,
clipped to the step (for NVMe a transfer begins when it is requested).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from itertools import chain, pairwise
from math import inf
from typing import Any

from hetmem.base.units import format_seconds, format_size
from hetmem.engine.events import (
    ON_DEVICE,
    ON_HOST,
    ON_NVME,
    REMEMBERED,
    CopyChange,
    EventLog,
    Fault,
    Held,
    MomentSeen,
    SavedMove,
    Span,
    Stall,
    Transfer,
)
from hetmem.schedule.blocks import Link

Interval = tuple[float, float]

TRAINING = ("forward", "backward")
"""The segments in which the model computes."""


@dataclass(frozen=True, slots=True)
class Window:
    """Log entries that touch [start, end] (seconds of the log's clock), oldest first.

    `covers` is "step" or "forward"; `whole`: it is a whole step, or a whole forward of a model that is not trained.
    Segments and stalls are the device's; `launched` and `host_waits` the host's: see note "asynchronous compute" in
    `engine.events`. `copies` and `saved` reach beyond `end`, so that the state at `start` follows from the present one.
    `forgotten` names the kinds of entries whose beginning the log has lost.
    """

    covers: str
    start: float
    end: float
    forgotten: tuple[str, ...] = ()
    whole: bool = True
    segments: list[Span] = field(default_factory=list)
    moments: list[MomentSeen] = field(default_factory=list)
    transfers: list[Transfer] = field(default_factory=list)
    copies: list[CopyChange] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    stalls: list[Stall] = field(default_factory=list)
    updates: list[Span] = field(default_factory=list)
    launched: list[Span] = field(default_factory=list)
    host_waits: list[Span] = field(default_factory=list)
    caught_up: list[Span] = field(default_factory=list)
    saved: list[SavedMove] = field(default_factory=list)

    def spent(self, entries: Iterable[Span | Stall | Transfer]) -> list[Interval]:
        """Return the time of `entries` within the window, as disjoint intervals."""
        return union(clip(((each.start, each.end) for each in entries), self.start, self.end))


def last_window(events: EventLog) -> Window | None:
    """Return the last whole step of `events`; without one, all from the last forward on; None if nothing ran."""
    ends, forward, end, running = deque[float](maxlen=2), -inf, 0.0, events.running()
    for span in events.segments:
        end = span.end
        if span.what == "step":
            ends.append(end)
        elif span.what == "forward":
            forward = span.start
    if len(ends) == 2:
        return _window(events, "step", ends[0], ends[1], [], whole=True)
    if running is not None:
        end = events.now()
        forward = running[1] if running[0] == "forward" else forward
    if forward == -inf:
        return None
    unended = [] if running is None else [Span(*running, end)]
    return _window(events, "forward", forward, end, unended, whole=only_infers(events) and running is None)


def only_infers(events: EventLog) -> bool:
    """Return whether all forwards of the log are inference: no backward can follow."""
    return bool(len(events.forwards)) and not any(each.trains for each in events.forwards)


def history(events: EventLog) -> dict[str, Any]:
    """Return the last steps, or forwards in inference, as columns: seconds from the end of the one before, stalls of
    compute in them, and the tokens of their inputs."""
    of = "forward" if only_infers(events) else "step"
    steps = [*pairwise(events.ended[of].last(REMEMBERED + 1))]
    return {
        "of": of,
        "seconds": [end.at - start.at for start, end in steps],
        "stall_seconds": [end.stall_seconds - start.stall_seconds for start, end in steps],
        "tokens": [end.tokens - start.tokens for start, end in steps],
    }


_LOGS = [log.name for log in fields(Window) if log.default_factory is list]
_REACHING_ON = ("copies", "saved")


def _window(events: EventLog, covers: str, start: float, end: float, unended: list[Span], *, whole: bool) -> Window:
    logs, forgotten = dict[str, list[Any]](), list[str]()
    for kind in _LOGS:
        entries = getattr(events, kind)
        if kind != "segments" and entries.lost and getattr(entries[0], "start", getattr(entries[0], "at", 0.0)) > start:
            forgotten.append(kind)
        logs[kind] = _touching(entries, start, inf if kind in _REACHING_ON else end)
    logs["segments"] += _touching(unended, start, end)
    return Window(covers, start, end, forgotten=tuple(forgotten), whole=whole, **logs)


def _touching(entries: Iterable[Any], start: float, end: float) -> list[Any]:
    """Return those of `entries`, which are spans or points of time, that touch [start, end]; one is made at a time."""
    left = iter(entries)
    first = next(left, None)
    if hasattr(first, "end"):
        return [each for each in chain([first], left) if each.end > start and each.start < end]
    return [each for each in chain([first], left) if each is not None and start <= each.at < end]


# ---- intervals -------------------------------------------------------------------------------------------------------


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union of `intervals` as disjoint intervals in order; empty ones are left out."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        elif end > start:
            merged.append((start, end))
    return merged


def clip(intervals: Iterable[Interval], start: float, end: float) -> list[Interval]:
    """Return the parts of `intervals` within [start, end]."""
    return [(max(low, start), min(high, end)) for low, high in intervals if high > start and low < end]


def length(disjoint: Iterable[Interval]) -> float:
    """Return the total length of disjoint intervals."""
    return sum(end - start for start, end in disjoint)


def overlap(disjoint: list[Interval], start: float, end: float) -> float:
    """Return the length of [start, end] that the intervals of a `union` cover. O(log n + overlapping)."""
    index = max(0, bisect_left(disjoint, (start, start)) - 1)
    covered = 0.0
    while index < len(disjoint) and disjoint[index][0] < end:
        low, high = disjoint[index]
        covered += max(0.0, min(high, end) - max(low, start))
        index += 1
    return covered


def without(disjoint: list[Interval], taken: list[Interval]) -> list[Interval]:
    """Return the parts of one `union` that another does not cover. O(n + m)."""
    left: list[Interval] = []
    first = 0
    for start, end in disjoint:
        while first < len(taken) and taken[first][1] <= start:
            first += 1
        at = first
        while at < len(taken) and taken[at][0] < end:
            if taken[at][0] > start:
                left.append((start, taken[at][0]))
            start = max(start, taken[at][1])
            at += 1
        if start < end:
            left.append((start, end))
    return left


# ---- what binds ------------------------------------------------------------------------------------------------------

TERM_NAMES = {
    "compute": "Compute",
    "launching": "Launching",
    "host_to_device": "Host to device",
    "device_to_host": "Device to host",
    "host_optimizer": "Host optimizer",
    "nvme_read": "NVMe read",
    "nvme_write": "NVMe write",
}
GOOD_OVERLAP = 0.9
LAUNCH_BOUND = 0.5
"""Launching binds if the device has caught up with the training thread for more than this share of compute."""
SECONDS_PER_DAY = 86400
TIERS = {"device": ON_DEVICE, "host": ON_HOST, "nvme": ON_NVME}


def step_section(window: Window, tiers: dict[str, dict[str, Any]], tokens: int = 0) -> dict[str, Any]:
    """Return the `step` section of a report. `window` covers a whole step, or a whole forward of inference, of `tokens`
    tokens; `tiers` is the section of that name."""
    seconds = window.end - window.start
    busy = busy_intervals(window)
    terms = {term: length(intervals) for term, intervals in busy.items()}
    binding = max(terms, key=lambda term: terms[term])
    caught_up = terms["compute"] - length(without(busy["compute"], window.spent(window.caught_up)))
    if binding == "compute" and caught_up > LAUNCH_BOUND * terms["compute"]:
        binding = "launching"
    moved = {link.value: 0 for link in Link}
    for transfer in window.transfers:
        if window.start <= transfer.start < window.end:  # writes that a step requests may end after it
            moved[transfer.link.value] += transfer.nbytes
    section = {
        "of": window.covers,
        "seconds": seconds,
        "tokens": tokens,
        "tokens_per_second": tokens / seconds if seconds else 0.0,
        "terms": terms,
        "binding": binding,
        "overlap": terms[binding] / seconds if seconds else 0.0,
        "exposed_seconds": {term: length(without(intervals, busy[binding])) for term, intervals in busy.items()},
        "bytes": moved,
        "stall_seconds": length(window.spent(window.stalls)),
        "host_wait_seconds": length(_waits(window)),
        "caught_up_seconds": caught_up,
        "faults": len(window.faults),
        "moments": len(window.moments),
        "moments_by_segment": _by_segment(window),
        "nvme_written_bytes_per_day": round(moved["nvme_write"] / seconds * SECONDS_PER_DAY) if seconds else 0,
    }
    section["sentence"] = sentence(section, tiers)
    return section


def _by_segment(window: Window) -> dict[str, int]:
    """Return how many moments each kind of segment had, as the host launched them."""
    spans = sorted(window.launched or window.segments, key=lambda span: span.start)
    begins = [span.start for span in spans]
    found = Counter(spans[at].what for moment in window.moments if (at := bisect_right(begins, moment.at) - 1) >= 0)
    return dict(found)


def busy_intervals(window: Window) -> dict[str, list[Interval]]:
    """Return when the resource of each term was busy, as disjoint intervals within the window. See Note "terms"."""
    computed = window.spent(span for span in window.segments if span.what in TRAINING)
    launched = window.spent(span for span in window.launched if span.what in TRAINING)
    crossed = {link.value: window.spent(t for t in window.transfers if t.link is link) for link in Link}
    return {
        "compute": without(computed, window.spent(window.stalls)),
        **({"launching": without(launched, _waits(window))} if window.launched else {}),
        "host_to_device": crossed["host_to_device"],
        "device_to_host": crossed["device_to_host"],
        "host_optimizer": window.spent(window.updates),
        "nvme_read": crossed["nvme_read"],
        "nvme_write": crossed["nvme_write"],
    }


def _waits(window: Window) -> list[Interval]:
    """Return when the training thread waited: on a synchronous device, its stalls."""
    return window.spent(window.host_waits if window.launched else window.stalls)


def sentence(step: dict[str, Any], tiers: dict[str, dict[str, Any]]) -> str:
    """Return a text on what binds this step, how far it is from the bound, and what to change."""
    binding, seconds, exposed = step["binding"], step["seconds"], step["exposed_seconds"]
    term = step["terms"][binding]
    of, on_inference = step["of"], step["of"] == "forward"
    text = f"{TERM_NAMES[binding]} binds: {format_seconds(term)} of a {of} of {format_seconds(seconds)}."
    if binding == "launching":
        caught_up = format_seconds(step["caught_up_seconds"])
        return f"{text} For {caught_up} the device waited for the thread that launches. {_advice(binding, tiers)}"
    advice = _inference_advice if on_inference else _advice
    if step["overlap"] >= GOOD_OVERLAP:
        return f"{text} {advice(binding, tiers)}"
    longest = max(exposed, key=lambda name: exposed[name])
    rest = seconds - term
    if exposed[longest] < 0.25 * rest:
        waited = step["stall_seconds"] if binding == "compute" and step["stall_seconds"] >= 0.25 * rest else 0
        text = f"{text} The other {format_seconds(rest)} are neither compute, nor transfers, nor updates"
        return f"{text}; for {format_seconds(waited)} the training thread waited." if waited else f"{text}."
    apart = exposed[longest] >= GOOD_OVERLAP * step["terms"][longest] and tiers["host"]["used_bytes"]
    updating = {binding, longest} - {"compute"} <= _UPDATING and "compute" in (binding, longest)
    return (
        f"{text} The other {format_seconds(rest)} are not hidden behind it: {_inside(TERM_NAMES[longest])} alone takes "
        f"{format_seconds(exposed[longest])} of them. {_OVERLAP if apart and updating else advice(longest, tiers)}"
    )


_UPDATING = {"host_optimizer", "nvme_read", "nvme_write"}
"""The terms of updates, which run in `step()`, or behind the backward with `overlap="backward"`."""

_OVERLAP = 'hetmem.AdamW(overlap="backward") updates while the backward goes on, unless it clips or scales the loss.'


def _inside(name: str) -> str:
    """Return the name of a term as written within a sentence."""
    return name if name.startswith("NVMe") else name[0].lower() + name[1:]


def _inference_advice(binding: str, tiers: dict[str, dict[str, Any]]) -> str:
    """Return advice for inference: each forward fetches each weight once, whatever its number of tokens."""
    homes = sum(tiers["host"]["homes"].get(role, 0) for role in ("compute", "param"))
    frozen = " model.requires_grad_(False) before manage leaves out the room for training." if homes else ""
    if binding == "host_to_device":
        return (
            f"More sequences a forward use each weight that crosses for more tokens; a larger Budget(device=…) keeps "
            f"more of the {format_size(homes)} in host memory on the device; mixed_precision halves their bytes."
            f"{frozen}"
        )
    if binding.startswith("nvme"):
        return (
            f"Budget(host=…) raised by {format_size(tiers['nvme']['used_bytes'])} would leave nothing on NVMe; more "
            f"sequences a forward use each weight that is read for more tokens."
        )
    return (
        f"Memory is not the limit: a faster device or a smaller dtype would shorten it; more sequences share a forward."
        f"{frozen}"
    )


def _advice(binding: str, tiers: dict[str, dict[str, Any]]) -> str:
    on_nvme = tiers["nvme"]["used_bytes"]
    if binding.startswith("nvme"):
        return (
            f"Budget(host=…) raised by {format_size(on_nvme)} would leave nothing on NVMe; a second directory in "
            f"nvme_dir adds its bandwidth; more micro-batches per step move the same bytes less often."
        )
    if binding == "launching":
        return (
            "Compile the blocks (block.compile(), one graph each) and there is less to launch; a larger batch gives "
            "each launch more to do."
        )
    if binding == "host_optimizer":
        return "More CPU cores would shorten it; more micro-batches per step run it less often."
    if binding == "host_to_device":
        return (
            "A larger Budget(device=…) or fewer activations keep more chunks on the device; mixed_precision with "
            "Budget(home_copies=True) halves their bytes; a larger batch uses each of them longer."
        )
    if binding == "device_to_host":
        return (
            "Gradients cross this link once per backward: a larger batch, with fewer backwards, crosses it less often."
        )
    return "Memory is not the limit: a faster device, a smaller dtype or less recomputation would shorten it."


# ---- activations -----------------------------------------------------------------------------------------------------


def activations_section(window: Window, held: Held) -> dict[str, Any] | None:
    """Return the `activations` section of a report; None if none were saved. `held`: bytes now, by sets of tiers."""
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
    forward = length(window.spent(span for span in window.segments if span.what == "forward"))
    section = {"bytes": moved, "peak_bytes": peaks, "away_peak_bytes": away, "forward_seconds": forward}
    section["sentence"] = _moved_sentence(moved, away, forward)
    return section


def held_over_time(window: Window, held: Held, tiers: int, without: int = 0) -> list[tuple[float, int]]:
    """Return the bytes on any of `tiers` and on none of `without`, at the start of `window` and after each move."""

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
    """Return the link over which `move` brought bytes to a tier that they were not on; None if to none."""
    came = move.after & ~move.before
    if not move.before or not came:
        return None
    if came & ON_DEVICE:
        return Link.HOST_TO_DEVICE
    if came & ON_NVME:
        return Link.NVME_WRITE
    return Link.DEVICE_TO_HOST if move.before & ON_DEVICE else Link.NVME_READ


def _moved_sentence(moved: dict[str, int], away: int, forward_seconds: float) -> str:
    """Return a text on the bytes that moved, and on the cost of keeping or recomputing them instead."""
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
