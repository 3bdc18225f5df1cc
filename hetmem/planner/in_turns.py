"""Makes the workload of a step whose micro-batches pass each layer in turns, as `hetmem.accumulate` runs them, from
that of one micro-batch.

A forward and a backward are stretches between borders. Of each stretch all micro-batches come in their order, while the
others keep what they had at their border. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from hetmem.planner.workload import Event, Kind, Workload
from hetmem.schedule.saved import SavedInterval
from hetmem.schedule.trace import NEVER


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Events `first` to `end` of one micro-batch, as the one of that `number` runs them. `beside_bytes`: what the other
    ones keep meanwhile."""

    number: int
    first: int
    end: int
    beside_bytes: int


def in_turns(workload: Workload, count: int) -> Workload:
    """Return `count` micro-batches of `workload`, traced with borders, as one forward and one backward."""
    if count == 1:
        return workload
    events = list[Event]()
    at: list[dict[int, int]] = [{} for _ in range(count)]
    stretches = [*_stretches(workload, count)]
    for each in stretches:
        for index in range(each.first, each.end):
            at[each.number][index] = len(events)
            events.append(_as_of(workload.events, index, each, count))
    ticks, saved = _ticks(workload, stretches, at)
    beside = max(stretches, key=lambda each: _peak(workload, each) + each.beside_bytes).beside_bytes
    others = count - 1
    return replace(
        workload,
        events=_let_go_once(events),
        at_peak=((f"kept by {others} other micro-batch{'es' * (others > 1)}", beside), *workload.at_peak),
        logits_bytes=workload.logits_bytes + others * workload.kept_logits_bytes,
        saved=saved,
        ticks=ticks,
        recomputed_flops=count * workload.recomputed_flops,
        micro_batches=count,
        alone=workload,
    )


def _peak(workload: Workload, stretch: _Stretch) -> int:
    return max(event.peak_bytes for event in workload.events[stretch.first : stretch.end])


def _stretches(workload: Workload, count: int) -> Iterator[_Stretch]:
    """Yield the stretches in their order."""
    events = workload.events
    cuts = [at for at, event in enumerate(events) if event.kind in (Kind.BORDER, Kind.BACKWARD)]
    firsts, ends = [0, *cuts], [*cuts, len(events)]
    common = workload.buffer_bytes
    for first, end in zip(firsts, ends, strict=True):
        before = max(0, events[first].live_bytes - common)
        after = max(0, events[min(end, len(events) - 1)].live_bytes - common)
        for number in range(count):
            yield _Stretch(number, first, end, number * after + (count - 1 - number) * before)


def _as_of(events: Sequence[Event], index: int, stretch: _Stretch, count: int) -> Event:
    """Return the event `index` in `stretch`: a forward and a backward begin once, and end once."""
    event, number = events[index].resized(lambda nbytes: nbytes + stretch.beside_bytes), stretch.number
    begins_again = event.kind in (Kind.FORWARD, Kind.BACKWARD) and number > 0
    goes_on = event.kind is Kind.END and number < count - 1
    return replace(event, kind=Kind.BORDER) if begins_again or goes_on else event


def _let_go_once(events: Sequence[Event]) -> tuple[Event, ...]:
    """Return `events` in which a parameter is let go when the last micro-batch that holds it does so."""
    holders: dict[int, int] = {}
    found = []
    for event in events:
        gone = []
        for parameter in event.let_go:
            holders[parameter] = holders.get(parameter, 1) - 1
            if holders[parameter] <= 0:
                gone.append(parameter)
        for parameter in event.held:
            holders[parameter] = holders.get(parameter, 0) + 1
        found.append(replace(event, let_go=tuple(gone)) if len(gone) < len(event.let_go) else event)
    return tuple(found)


def _ticks(
    workload: Workload, stretches: Sequence[_Stretch], at: Sequence[dict[int, int]]
) -> tuple[tuple[tuple[int, int], ...], tuple[SavedInterval, ...]]:
    """Return the clock of saved tensors, and the tensors on it, in the order in which they are saved."""
    of_event: dict[int, list[int]] = {}
    for tick, (event, _) in enumerate(workload.ticks):
        of_event.setdefault(event, []).append(tick)
    made = list[tuple[int, int]]()
    new: list[dict[int, int]] = [{NEVER: NEVER} for _ in at]
    for each in stretches:
        for event in range(each.first, each.end):
            for tick in of_event.get(event, ()):
                new[each.number][tick] = len(made)
                made.append((at[each.number][event], workload.ticks[tick][1] + each.beside_bytes))
    saved = [
        SavedInterval(one.nbytes, clock[one.saved_at], clock[one.free_at], clock[one.used_at])
        for clock in new
        for one in workload.saved
    ]
    return tuple(made), tuple(sorted(saved, key=lambda one: one.saved_at))
