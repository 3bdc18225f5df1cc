"""How large a model of the same shape could be: layers are added until a rehearsed step does not fit. Pure.

The trace of the larger model is that of the model itself with the events of one layer repeated. Layers are found by the
names of parameters (`blocks.3.mlp.weight`), their events by the parameters that they use.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hetmem.planner.reservation import state_bytes
from hetmem.planner.search import Judged, Setting, first_that_fits
from hetmem.planner.workload import Event, Kind, Workload
from hetmem.schedule.hardware import HardwareProfile
from hetmem.schedule.layout import ParameterSpec

_LEAST = 3  # a layer between two others shows what one more is


@dataclass(frozen=True, slots=True)
class Stack:
    """Layers that are alike: `layers[i]` are the numbers of the parameters of the i-th, in the same order."""

    layers: tuple[tuple[int, ...], ...]


def stacks(parameters: Sequence[ParameterSpec]) -> list[Stack]:
    """Every run of at least three layers whose parameters have the same names and sizes, but for one number."""
    groups: dict[str, dict[int, dict[str, int]]] = defaultdict(lambda: defaultdict(dict))
    for number, spec in enumerate(parameters):
        for match in re.finditer(r"(?<![^.])\d+(?=\.)", spec.name):
            groups[spec.name[: match.start()]][int(match.group())][spec.name[match.end() :]] = number
    found: list[Stack] = []
    taken: set[int] = set()
    for prefix in sorted(groups, key=len):
        layers = [members for _, members in sorted(groups[prefix].items())]
        shapes = [{name: parameters[number].numel for name, number in members.items()} for members in layers]
        numbers = {number for members in layers for number in members.values()}
        if len(layers) >= _LEAST and all(shape == shapes[0] for shape in shapes) and not numbers & taken:
            found.append(Stack(tuple(tuple(members[name] for name in layers[0]) for members in layers)))
            taken |= numbers
    return found


def grown(workload: Workload, stack: Stack, more: int) -> Workload | None:
    """`workload` with `more` layers behind the last but one of `stack`; None if its events do not show what a layer is.

    The new parameters come last, layer by layer.
    """
    below, like, above = stack.layers[-3:]
    forward = _between(workload.events, like, above, Kind.FORWARD)
    backward = _between(workload.events, like, below, Kind.BACKWARD)
    if forward is None or backward is None:
        return None
    events, first = workload.events, len(workload.parameters)
    width, kept = len(like), events[forward.stop].live_bytes - events[forward.start].live_bytes
    new = [tuple(range(first + width * at, first + width * (at + 1))) for at in range(more)]
    row = [below, like, *new, above]

    def shifted(part: Sequence[Event], at: int) -> list[Event]:
        """`part`, of the layer `like`, as that of `row[at]`."""
        near = zip((below, like, above), row[at - 1 : at + 2], strict=True)
        numbers = {old: now for layer, other in near for old, now in zip(layer, other, strict=True)}
        return [_raised(_moved(event, numbers), (at - 1) * kept) for event in part]

    going, coming = events[forward.start : forward.stop], events[backward.start : backward.stop]
    gone = dict(zip(like, row[-2], strict=True))  # what `like` left in use, the last new layer leaves
    made = [*events[: forward.stop], *(event for at in range(more) for event in shifted(going, at + 2))]
    for event in events[forward.stop : backward.start]:
        let_go = tuple(gone.get(number, number) for number in event.let_go)
        made.append(_raised(replace(event, let_go=let_go), more * kept))
    for at in reversed(range(1, more + 2)):
        made += shifted(coming, at)
    made += events[backward.stop :]
    copies = list(like) * more
    return replace(
        workload,
        parameters=(*workload.parameters, *(workload.parameters[number] for number in copies)),
        trainable=workload.trainable | {first + at for at, number in enumerate(copies) if number in workload.trainable},
        compute_itemsizes=(*workload.compute_itemsizes, *(workload.compute_itemsizes[number] for number in copies)),
        events=tuple(made),
    )


def _between(events: Sequence[Event], layer: Sequence[int], following: Sequence[int], kind: Kind) -> range | None:
    """The events from the first one behind `kind` that uses `layer` to the first that uses `following`."""
    begins = next((at for at, event in enumerate(events) if event.kind is kind), len(events))
    start, stop = (
        next((at for at in range(begins, len(events)) if set(events[at].parameters) & set(wanted)), None)
        for wanted in (layer, following)
    )
    return range(start, stop) if start is not None and stop is not None and start < stop else None


def _moved(event: Event, numbers: Mapping[int, int]) -> Event:
    """`event` of the parameters with other `numbers`."""
    parameters, held, let_go = (
        tuple(numbers.get(old, old) for old in olds) for olds in (event.parameters, event.held, event.let_go)
    )
    return replace(event, parameters=parameters, held=held, let_go=let_go)


def _raised(event: Event, nbytes: int) -> Event:
    """`event` with `nbytes` more alive that are not parameters."""
    during, after = (replace(phase, peak_bytes=phase.peak_bytes + nbytes) for phase in (event.during, event.after))
    return replace(event, live_bytes=event.live_bytes + nbytes, during=during, after=after)


_MOST_EVENTS = 12_000
"""A model of more is not rehearsed to see whether it fits: that would take longer than the rest of a plan."""

_CLOSE = 0.01
"""Of the layers: so near it is searched."""


def largest_parameters(
    workload: Workload,
    asked: Setting,
    best: Judged | None,
    hardware: HardwareProfile,
    micro_batches: int = 1,
) -> int:
    """Parameters of the largest model of this shape (more layers of the same) that fits as `asked`; `best` is how this
    one does. An estimate where no layers repeat, where so many fit that nobody tried, or where even these do not (then
    never more than this one has).
    """
    if not workload.numel:
        return 0
    estimate = _estimated(workload, asked, best)
    if best is None:
        return min(estimate, workload.numel)
    sizes = [spec.numel for spec in workload.parameters]
    found = [stack for stack in stacks(workload.parameters) if any(sizes[number] for number in stack.layers[0])]
    if not found:
        return estimate
    deepest = max(len(stack.layers) for stack in found)

    def larger(more: int) -> Workload | None:
        made: Workload | None = workload
        for stack in found:
            if made is not None:
                made = grown(made, stack, round(more * len(stack.layers) / deepest))
        return made

    def fits(made: Workload) -> bool:  # from the second on a micro-batch finds what the one before it found
        return isinstance(first_that_fits(made, asked, hardware, min(micro_batches, 2), steps=1), Judged)

    one = larger(1)
    if one is None:
        return estimate
    most = (_MOST_EVENTS - len(workload.events)) // max(1, len(one.events) - len(workload.events))
    wanted = int((estimate - workload.numel) / (one.numel - workload.numel))
    least, beyond, largest = 0, 0, workload
    at = min(most, max(1, wanted))
    while not beyond or beyond - least > max(1, _CLOSE * (least + deepest)):
        made = larger(at)
        if at > most or made is None:
            return max(estimate, largest.numel)
        if fits(made):
            least, largest = at, made
        else:
            beyond = at
        at = (least + beyond) // 2 if beyond else least + max(1, (least + deepest) // 8)
    return largest.numel


def _estimated(workload: Workload, asked: Setting, best: Judged | None) -> int:
    """As if all that a model takes grew with its layers: homes, and what the forward leaves for the backward."""
    capacities, streamed = asked.capacities, asked.updating.streamed_gradients
    ground = best.arrangement.ground if best is not None else None
    padding = 1 / (1 - ground.layout.waste) if ground is not None else 1.02
    homes = state_bytes(workload, streamed_gradients=streamed) * padding
    staging = ground.staging_slots * ground.staging_slot_bytes if ground is not None else 0
    room = max(capacities.host_bytes + capacities.nvme_bytes - staging, 0)
    widest = 4 * max(spec.numel for spec in workload.parameters) * max(workload.compute_itemsizes)
    device = max(capacities.device_bytes - min(widest, capacities.device_bytes // 2), 0)
    scale = min(room / homes, device / max(1, workload.peak_live_bytes))
    copies = sum(spec.numel for spec in workload.parameters) * max(workload.compute_itemsizes) * padding
    there = state_bytes(workload) * padding + copies * workload.mixed_precision
    return int(workload.numel * max(scale, capacities.device_bytes / (there + workload.peak_live_bytes)))
