"""Searches what a run can be told to do, with the simulator as the judge, and says what is missing if nothing fits.

Only what `manage` and `hetmem.AdamW` do today is planned: homes in host memory, then on NVMe, in the order of roles;
the update where the states live; everything on the device if it fits there, or what a step leaves room for. Pure.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

from hetmem.base.units import MIB
from hetmem.planner.activations import moving
from hetmem.planner.reservation import Arrangement, arrange, check_device
from hetmem.planner.step_program import rehearse
from hetmem.planner.workload import Setting, StepResult, Workload
from hetmem.schedule.placement import NoRoom, Room
from hetmem.schedule.trace import Tier

WORTH = 0.97
"""What is not done by default has to be this much faster: it has to be told to a run."""


@dataclass(frozen=True, slots=True)
class Judged:
    """One way to run `workload`, judged."""

    workload: Workload
    setting: Setting
    arrangement: Arrangement
    result: StepResult


def search(workload: Workload, asked: Setting) -> Judged | NoRoom:
    """The best candidate, or why even `asked` as it is was refused.

    One thing after the other is varied, each time from the best so far, so that what goes well together is found.
    """
    best = first_that_fits(workload, asked)
    for vary in (_on_the_device, _copies):
        setting = vary(best, asked) if isinstance(best, Judged) else None
        if setting is not None:
            best = faster(best, judged(workload, setting))
    return best


def faster(best: Judged | NoRoom, other: Judged | NoRoom) -> Judged | NoRoom:
    """`best`, unless `other` is worth doing in its place."""
    if isinstance(best, NoRoom) or isinstance(other, NoRoom):
        return best
    return other if _is_worth(other, best) else best


def _is_worth(other: Judged, best: Judged) -> bool:
    return other.result.seconds < WORTH * best.result.seconds


def first_that_fits(workload: Workload, asked: Setting, *, steps: int = 4) -> Judged | NoRoom:
    """`asked`, or what fits where that does not: all on the device, or not all. If none does, the refusal that misses
    least on the tier of the first one."""
    refusal = None
    for way in (lambda: asked, lambda: whole_device(asked), lambda: not_whole(workload, asked)):
        found = judged(workload, way(), steps=steps)
        if isinstance(found, Judged):
            return found
        nearer = refusal is not None and found.tier is refusal.tier and found.missing_bytes < refusal.missing_bytes
        refusal = found if refusal is None or nearer else refusal
    assert refusal is not None
    return refusal


def has_room(workload: Workload, setting: Setting) -> bool:
    """Whether homes have places and each operator has room on the device, which is the quick part of `judged`."""
    with suppress(NoRoom):
        check_device(workload, arranged(workload, setting), setting.capacities)
        return True
    return False


def judged(workload: Workload, setting: Setting, *, steps: int = 4) -> Judged | NoRoom:
    """One candidate, rehearsed for `steps` steps (the first two know no trace, and need most), or its refusal."""
    try:
        arrangement = arranged(workload, setting)
        check_device(workload, arrangement, setting.capacities)
    except NoRoom as refusal:
        return refusal.with_traceback(None)
    seen = replace(setting.within(host_bytes=0, nvme_bytes=0, home_copies=None), chunk_bytes=None)
    result = _rehearsed(workload, arrangement.as_rehearsed(Room(0, 0)), seen, steps)
    if arrangement.lent and isinstance(result, NoRoom) and result.tier is not Tier.DEVICE:  # gradients ask for homes
        result = _rehearsed(workload, arrangement.as_rehearsed(arrangement.left), seen, steps)
    return result if isinstance(result, NoRoom) else Judged(workload, setting, arrangement, result)


@functools.lru_cache(maxsize=64)
def _rehearsed(workload: Workload, arrangement: Arrangement, setting: Setting, steps: int) -> StepResult | NoRoom:
    """One plan asks for many steps twice, in budgets that come to the same."""
    try:
        return rehearse(workload, arrangement, setting, steps)
    except NoRoom as refusal:
        return refusal.with_traceback(None)


# ---- what is varied ----------------------------------------------------------------------------------------------


def whole_device(asked: Setting) -> Setting:
    """`asked`, with all of the device for chunks if nothing else is said."""
    if asked.capacities.device_chunk_bytes is not None:
        return asked
    return asked.within(device_chunk_bytes=asked.capacities.device_bytes)


def not_whole(workload: Workload, asked: Setting) -> Setting:
    """`asked`, but that a model which would be whole on the device is streamed to it: activations have no room beside
    it, or the host alone makes its updates."""
    capacities = asked.capacities
    with suppress(NoRoom):
        ground = arrange(workload, capacities, asked.chunk_bytes, asked.updating).ground
        cap = min(ground.whole_bytes - MIB, capacities.device_bytes)
        if ground.resident and cap > 0:
            return asked.within(device_chunk_bytes=cap)
    return asked


def _on_the_device(best: Judged, asked: Setting) -> Setting | None:
    """The whole model stays there, though that takes more than the usual share of it."""
    capacities, ground = best.setting.capacities, best.arrangement.ground
    if ground.resident or capacities.device_chunk_bytes is not None or ground.whole_bytes > capacities.device_bytes:
        return None
    whole = replace(capacities, device_chunk_bytes=ground.whole_bytes)
    return replace(asked, capacities=whole, chunk_bytes=ground.staging_slot_bytes)


def _copies(best: Judged, asked: Setting) -> Setting | None:
    """16-bit copies at home, or none of them; beside states on NVMe they would drive others there."""
    ground = best.arrangement.ground
    said = ground.resident or ground.uses_nvme or asked.capacities.home_copies is not None
    if said or not best.workload.mixed_precision:
        return None
    return best.setting.within(home_copies=not best.arrangement.homes["compute"])


def arranged(workload: Workload, setting: Setting) -> Arrangement:
    """What a run as told by `setting` reserves."""
    how = setting.updating
    made = arrange(workload, setting.capacities, setting.chunk_bytes, how)
    if how.on_host_only and (made.ground.resident or made.ground.staying):
        nbytes = sum(made.bytes_by_role(Tier.DEVICE).values())
        raise NoRoom("small states are updated by the host alone, and have no room there", Tier.HOST, nbytes)
    return made


# ---- what becomes of the activations of repeated layers ------------------------------------------------------------


def cheapest_mix(kept: Callable[[int], Workload | None], layers: int, asked: Setting) -> tuple[int, Judged] | None:
    """How many of the layers, the first ones, are checkpointed where a step is the shortest, and that step; None where
    recomputing none is as good. `kept(count)` is the workload with the first `count` of `layers` checkpointed, and
    nothing moved; of what remains as much moves as must."""
    best = None
    for count in sorted({layers * part // 4 for part in range(5)}):
        workload = kept(count)
        for setting in dict.fromkeys((asked, whole_device(asked))):
            if workload is not None:
                made = moving(workload, setting.capacities, all_leave=False, by_the_caller=False)
                found = judged(made, setting)
                if isinstance(found, Judged) and (best is None or _is_worth(found, best[1])):
                    best = count, found
        if best is not None and not count and WORTH * best[1].result.seconds <= asked.compute_seconds(best[1].workload):
            return None
    return best if best is not None and best[0] else None
