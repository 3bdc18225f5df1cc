"""How long the parts of the last step took, by the log of what happened, and how fast the links moved something."""

from __future__ import annotations

from collections.abc import Iterable

from hetmem.engine.events import Span
from hetmem.engine.runtime import Runtime
from hetmem.schedule.blocks import Link, in_flight_bytes
from hetmem.schedule.saved import StepPace

_LOOKED_AT = 1000
"""So many of the last transfers are looked at."""


def last_step(runtime: Runtime) -> StepPace | None:
    """Return the times of the last step that is over; None if none is, or if it is not known how fast the links are, as
    where the thread that trains makes the copies."""
    out, back = (_bytes_per_second(runtime, link) for link in (Link.DEVICE_TO_HOST, Link.HOST_TO_DEVICE))
    runtime.events.read_marks()
    step = _last_step(reversed(runtime.events.segments))
    if not (out and back and step):
        return None
    first, last = step[-1].start, step[0].end
    stalls = [stall for stall in runtime.events.stalls if first <= stall.start < last]
    seconds = dict.fromkeys(("forward", "backward", "step"), 0.0)
    for span in step:
        waited = sum(stall.end - stall.start for stall in stalls if span.start <= stall.start < span.end)
        seconds[span.what] += span.end - span.start - waited
    backwards = [span for span in step if span.what == "backward"]
    between = last - max(span.end for span in backwards)
    window = in_flight_bytes(runtime.memory.device_bytes)
    return StepPace(seconds["forward"], seconds["backward"], between, len(backwards), out, back, window)


def _last_step(segments: Iterable[Span]) -> list[Span]:
    """Of `segments`, the last one first, those of the last whole step; none if it had no backward."""
    found: list[Span] = []
    for span in segments:
        if span.what == "step" and found:
            return found if any(each.what == "backward" for each in found) else []
        if span.what == "step" or found:
            found.append(span)
    return []


def _bytes_per_second(runtime: Runtime, link: Link) -> float:
    """As the profile of the machine has it, else as the fastest of the last transfers; 0 if that is not known."""
    engine = runtime.traffic.engine
    if engine.unlimited(link):
        return 0.0
    if runtime.hardware is not None:
        return float(getattr(runtime.hardware, link.value).bytes_per_second)
    last = list(runtime.events.transfers)[-_LOOKED_AT:]  # to which other threads append meanwhile
    seen = [each for each in last if each.link is link and each.end > each.start]
    largest = max((each.nbytes for each in seen), default=0)  # small ones do not show it
    return max((each.nbytes / (each.end - each.start) for each in seen if 2 * each.nbytes >= largest), default=0.0)
