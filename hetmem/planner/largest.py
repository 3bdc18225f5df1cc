"""How large a model of the same shape could be: layers are added until it does not fit any more.

The judge is a rehearsed step, as for everything else that a plan says. Pure.
"""

from __future__ import annotations

from hetmem.planner.growth import grown, stacks
from hetmem.planner.reservation import state_bytes
from hetmem.planner.search import Candidate, Setting, first_that_fits
from hetmem.planner.workload import Workload
from hetmem.schedule.hardware import HardwareProfile

_MOST_EVENTS = 12_000
"""A model of more is not rehearsed to see whether it fits: that would take longer than the rest of a plan."""

_CLOSE = 0.01
"""Of the layers: so near it is searched."""


def largest_parameters(
    workload: Workload,
    asked: Setting,
    best: Candidate | None,
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
        return isinstance(first_that_fits(made, asked, hardware, min(micro_batches, 2), steps=1), Candidate)

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


def _estimated(workload: Workload, asked: Setting, best: Candidate | None) -> int:
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
