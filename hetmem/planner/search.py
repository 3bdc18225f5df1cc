"""Searches the settings of a run with the simulator as the judge, and says what is missing if none fits.

Plans only what `manage` and `hetmem.AdamW` do: homes in host memory, then on NVMe, in the order of roles; updates
where the states live; the whole model on the device if it fits, else homes in its idle memory. Pure.
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
"""A setting that is not the default is chosen only if its step takes less than this share of the default's seconds."""


@dataclass(frozen=True, slots=True)
class Judged:
    """One way to run `workload` that fits, with its simulated step."""

    workload: Workload
    setting: Setting
    arrangement: Arrangement
    result: StepResult


def search(workload: Workload, asked: Setting) -> Judged | NoRoom:
    """Return the fastest way to run `workload` as `asked`, or the refusal if none fits.

    Varies one choice after the other, each time from the best so far, so that good combinations are found.
    """
    best = first_that_fits(workload, asked)
    for vary in (_on_the_device, _copies):
        setting = vary(best, asked) if isinstance(best, Judged) else None
        if setting is not None:
            best = faster(best, judged(workload, setting))
    return best


def faster(best: Judged | NoRoom, other: Judged | NoRoom) -> Judged | NoRoom:
    """Return `other` if both fit and it is faster by `WORTH`, else `best`."""
    if isinstance(best, NoRoom) or isinstance(other, NoRoom):
        return best
    return other if _is_worth(other, best) else best


def _is_worth(other: Judged, best: Judged) -> bool:
    return other.result.seconds < WORTH * best.result.seconds


def first_that_fits(workload: Workload, asked: Setting, *, steps: int = 4) -> Judged | NoRoom:
    """Judge `asked`, then with the model whole on the device, then with it streamed; return the first that fits. If
    none does, return the refusal that misses the fewest bytes on the tier of the first one."""
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
    """Return whether all homes and each single operator have room: a quick test before `judged`."""
    with suppress(NoRoom):
        check_device(workload, arranged(workload, setting), setting.capacities)
        return True
    return False


def judged(workload: Workload, setting: Setting, *, steps: int = 4) -> Judged | NoRoom:
    """Rehearse `setting` for `steps` steps (the first two have no trace, and need most); return result or refusal."""
    try:
        arrangement = arranged(workload, setting)
        check_device(workload, arrangement, setting.capacities)
    except NoRoom as refusal:
        return refusal.with_traceback(None)
    seen = replace(setting.within(host_bytes=0, nvme_bytes=0, home_copies=None), chunk_bytes=None)
    result = _rehearsed(workload, arrangement.as_rehearsed(Room(0, 0)), seen, steps)
    if arrangement.lent and isinstance(result, NoRoom) and result.tier is not Tier.DEVICE:  # gradients need own homes
        result = _rehearsed(workload, arrangement.as_rehearsed(arrangement.left), seen, steps)
    return result if isinstance(result, NoRoom) else Judged(workload, setting, arrangement, result)


@functools.lru_cache(maxsize=64)
def _rehearsed(workload: Workload, arrangement: Arrangement, setting: Setting, steps: int) -> StepResult | NoRoom:
    """Call `rehearse`, with a cache: one plan rehearses many equal steps, of budgets that differ in other things."""
    try:
        return rehearse(workload, arrangement, setting, steps)
    except NoRoom as refusal:
        return refusal.with_traceback(None)


# ---- what is varied ----------------------------------------------------------------------------------------------


def whole_device(asked: Setting) -> Setting:
    """Return `asked` with all of the device for chunks, unless it limits them already."""
    if asked.capacities.device_chunk_bytes is not None:
        return asked
    return asked.within(device_chunk_bytes=asked.capacities.device_bytes)


def not_whole(workload: Workload, asked: Setting) -> Setting:
    """Return `asked` with too little room for chunks to hold the whole model, so that it is streamed: for activations
    that do not fit beside it, and for updates that only the host can do."""
    capacities = asked.capacities
    with suppress(NoRoom):
        ground = arrange(workload, capacities, asked.chunk_bytes, asked.updating).ground
        cap = min(ground.whole_bytes - MIB, capacities.device_bytes)
        if ground.resident and cap > 0:
            return asked.within(device_chunk_bytes=cap)
    return asked


def _on_the_device(best: Judged, asked: Setting) -> Setting | None:
    """Return `asked` with the whole model on the device, beyond its usual share; None if it is there or cannot be."""
    capacities, ground = best.setting.capacities, best.arrangement.ground
    if ground.resident or capacities.device_chunk_bytes is not None or ground.whole_bytes > capacities.device_bytes:
        return None
    whole = replace(capacities, device_chunk_bytes=ground.whole_bytes)
    return replace(asked, capacities=whole, chunk_bytes=ground.staging_slot_bytes)


def _copies(best: Judged, asked: Setting) -> Setting | None:
    """Return `best` with 16-bit copies at home instead of without, or the reverse. None where that is fixed, and with
    homes on NVMe, as copies would push more states there."""
    ground = best.arrangement.ground
    said = ground.resident or ground.uses_nvme or asked.capacities.home_copies is not None
    if said or not best.workload.mixed_precision:
        return None
    return best.setting.within(home_copies=not best.arrangement.homes["compute"])


def arranged(workload: Workload, setting: Setting) -> Arrangement:
    """Return what a run with `setting` reserves. Raises `NoRoom`."""
    how = setting.updating
    made = arrange(workload, setting.capacities, setting.chunk_bytes, how)
    if how.on_host_only and (made.ground.resident or made.ground.staying):
        nbytes = sum(made.bytes_by_role(Tier.DEVICE).values())
        raise NoRoom("small states are updated by the host alone, and have no room there", Tier.HOST, nbytes)
    return made


# ---- what becomes of the activations of repeated layers ------------------------------------------------------------


def cheapest_mix(kept: Callable[[int], Workload | None], layers: int, asked: Setting) -> tuple[int, Judged] | None:
    """Return how many of the first `layers` to checkpoint for the shortest step, and that step; None where recomputing
    none is as good. `kept(count)` gives the workload with the first `count` checkpointed and nothing offloaded; of the
    remaining activations as many are offloaded as must be."""
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
