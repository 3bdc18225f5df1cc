"""Decides whether a model can be trained within a budget, and how; says what is missing and what would help.

Searches the settings of a run first, with the simulator as the judge. Plans only what `manage` and `hetmem.AdamW` do:
homes in host memory, then on NVMe, in the order of roles; updates where the states live; the whole model on the device
if it fits, else homes in its idle memory. Then compares the best with other ways to do the same training: changes that
keep the bits, combined where they are faster together. Pure.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import product

from hetmem.base.units import GIB, MIB, format_enough, format_seconds, round_down, round_up
from hetmem.planner.activations import moving
from hetmem.planner.reservation import Arrangement, arrange, check_device, state_bytes
from hetmem.planner.step_program import rehearse
from hetmem.planner.workload import AS_IT_IS, Setting, StepResult, Workload, larger_by
from hetmem.schedule.placement import PAGE_BYTES, Capacities, NoRoom
from hetmem.schedule.trace import Tier

WORTH = 0.9
"""A setting that is not the default is chosen only if its step takes less than this share of the default's seconds: of
two plans for a machine the ratio is known that well (`benchmarks/planned_steps.py`)."""

AS_FAST = 1.01
"""Of two ways whose seconds differ by less than this factor neither is faster."""


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
    """Return `other` if both fit and it is faster by `WORTH`, or as fast with less host memory; else `best`."""
    if isinstance(best, NoRoom) or isinstance(other, NoRoom):
        return best
    is_as_fast = other.result.seconds <= AS_FAST * best.result.seconds
    takes_less = is_as_fast and _host_bytes(other) < _host_bytes(best)
    return other if takes_less or _is_worth(other, best) else best


def _host_bytes(way: Judged) -> int:
    return sum(way.arrangement.bytes_by_role(Tier.HOST).values()) + way.result.loaned_bytes


def _is_worth(other: Judged, best: Judged) -> bool:
    return other.result.seconds < WORTH * best.result.seconds


def first_that_fits(workload: Workload, asked: Setting, *, steps: int = 4) -> Judged | NoRoom:
    """Judge `asked`, then with the model whole on the device, then with it streamed; return the first that fits. If
    none does, return the refusal that misses the fewest bytes on the tier of the first one."""
    refusal = None
    for way in _ways(workload, asked):
        found = judged(workload, way(), steps=steps)
        if isinstance(found, Judged):
            return found
        nearer = refusal is not None and found.tier is refusal.tier and found.missing_bytes < refusal.missing_bytes
        refusal = found if refusal is None or nearer else refusal
    assert refusal is not None
    return refusal


def _ways(workload: Workload, asked: Setting) -> tuple[Callable[[], Setting], ...]:
    """Return what makes `asked`, the same with the model whole on the device, and with it streamed. Each is made only
    where those before it do not fit, as that takes as long as a test for room."""
    return lambda: asked, lambda: whole_device(asked), lambda: not_whole(workload, asked)


def has_room(workload: Workload, setting: Setting) -> bool:
    """Return whether all homes and each single operator have room: a quick test before `judged`."""
    with suppress(NoRoom):
        workload, setting = as_run(workload, setting)
        check_device(workload, arranged(workload, setting), setting.capacities)
        return True
    return False


def as_run(workload: Workload, setting: Setting) -> tuple[Workload, Setting]:
    """Return `workload` and `setting`, or those of a loop, which a model that is whole on the device is run by."""
    if workload.alone is not None:
        loop = replace(setting, micro_batches=setting.micro_batches * workload.micro_batches)
        with suppress(NoRoom):
            if arranged(workload.alone, loop).ground.resident:
                return workload.alone, loop
    return workload, setting


def judged(workload: Workload, setting: Setting, *, steps: int = 4) -> Judged | NoRoom:
    """Rehearse `setting` for `steps` steps (the first two have no trace, and need most); return result or refusal."""
    try:
        run, with_setting = as_run(workload, setting)
        arrangement = arranged(run, with_setting)
        check_device(run, arrangement, setting.capacities)
    except NoRoom as refusal:
        return refusal.with_traceback(None)
    seen = replace(with_setting.within(host_bytes=0, nvme_bytes=0, home_copies=None), chunk_bytes=None)
    result = _rehearsed(run, arrangement.as_rehearsed(arrangement.may_borrow()), seen, steps)
    if arrangement.lent and isinstance(result, NoRoom) and result.tier is not Tier.DEVICE:  # gradients need own homes
        result = _rehearsed(run, arrangement.as_rehearsed(arrangement.left), seen, steps)
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
        cap = min(
            round_down(ground.whole_bytes - 1, GIB if ground.whole_bytes > 16 * GIB else MIB), capacities.device_bytes
        )
        if ground.is_whole and cap > 0:
            return asked.within(device_chunk_bytes=cap)
    return asked


def _on_the_device(best: Judged, asked: Setting) -> Setting | None:
    """Return `asked` with the whole model on the device, beyond its usual share; None if it is there or cannot be."""
    capacities, ground = best.setting.capacities, best.arrangement.ground
    if ground.is_whole or capacities.device_chunk_bytes is not None or ground.whole_bytes > capacities.device_bytes:
        return None
    coded = any(chunk.coded_bytes for chunk in ground.chunks)  # copies take what activations leave
    whole = replace(capacities, device_chunk_bytes=capacities.device_bytes if coded else ground.whole_bytes)
    return replace(asked, capacities=whole, chunk_bytes=ground.staging_slot_bytes)


def _copies(best: Judged, asked: Setting) -> Setting | None:
    """Return `best` with 16-bit copies at home instead of without, or the reverse. None where that is fixed, and with
    homes on NVMe, as copies would push more states there."""
    ground = best.arrangement.ground
    fixed = ground.is_whole or ground.uses_nvme or asked.capacities.home_copies is not None
    if fixed or not best.workload.mixed_precision:
        return None
    return best.setting.within(home_copies=not best.arrangement.homes["compute"])


def arranged(workload: Workload, setting: Setting) -> Arrangement:
    """Return what a run with `setting` reserves. Raises `NoRoom`."""
    how = setting.updating
    sums = setting.micro_batches * workload.micro_batches > 1
    made = arrange(workload, setting.capacities, setting.chunk_bytes, how, sums=sums)
    if how.on_host_only and (made.ground.resident or made.ground.staying):
        nbytes = sum(made.bytes_by_role(Tier.DEVICE).values())
        raise NoRoom("small states are updated by the host alone, and have no room there", Tier.HOST, nbytes)
    return made


# ---- what becomes of the activations of repeated layers ------------------------------------------------------------


def cheapest_mix(traced: Callable[[int], Workload | None], layers: int, asked: Setting) -> tuple[int, Judged] | None:
    """Return how many of the first `layers` to checkpoint for the shortest step, and that step; None where recomputing
    none is as good. `traced(count)`: the workload with the first `count` checkpointed and nothing offloaded; of the
    remaining activations as many are offloaded as must be."""
    best = None
    for count in sorted({layers * part // 4 for part in range(5)}):
        workload = traced(count)
        for setting in dict.fromkeys((asked, whole_device(asked))):
            if workload is not None:
                made = moving(workload, setting.capacities, all_leave=False, by_the_caller=False)
                found = judged(made, setting)
                if isinstance(found, Judged) and (best is None or _is_worth(found, best[1])):
                    best = count, found
        if best is not None and not count and WORTH * best[1].result.seconds <= asked.compute_seconds(best[1].workload):
            return None
    return best if best is not None and best[0] else None


# ---- decisions -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Variant:
    """A change to the user's program for the same training: `advice` for the user, and the `workload` with it (traced
    when called; None: it cannot be done).

    `about`: a lower bound of the workload, without a trace;
    if that does not fit, the variant is not traced. Only the first variant of each `kind` that fits is reported.
    """

    kind: str
    advice: str
    workload: Callable[[], Workload | None]
    micro_batches: int = 1
    about: Callable[[], Workload | None] = lambda: None


@dataclass(frozen=True, slots=True)
class Alternative:
    """A variant that fits: the advice, and the seconds of a step."""

    advice: str
    step_seconds: float


@dataclass(frozen=True, slots=True)
class Decision:
    """The answer for `workload` run as `asked`: the best candidate, or, if that is None, the bytes missing on each tier
    and what to change, cheapest first."""

    workload: Workload
    asked: Setting
    candidate: Judged | None
    largest_parameters: int
    missing_bytes: dict[str, int] = field(default_factory=dict)
    reasons: tuple[str, ...] = ()
    advice: tuple[str, ...] = ()
    state_bytes: int = 0
    """Bytes of all homes of a model that does not fit."""


def decide(workload: Workload, asked: Setting, variants: Sequence[Variant] = ()) -> Decision:
    """Return the fastest way to run `workload` as `asked`, or the missing bytes and which `variants` would fit."""
    best = search(workload, asked)
    if isinstance(best, Judged):
        return Decision(workload, asked, best, largest_parameters(workload, asked, best))
    missing = missing_bytes(workload, asked)
    ways = _ways_out(workload, asked, missing, variants)
    other, text = _other_overlap(asked)
    found = None if "device" in missing else first_that_fits(workload, other)
    if isinstance(found, Judged):
        ways = [f"{text}: then it fits, at {format_seconds(found.result.seconds)} a step", *ways]
    largest = largest_parameters(workload, asked, None)
    states = best.state_bytes or state_bytes(workload, asked.updating)
    return Decision(workload, asked, None, largest, missing, (str(best),), tuple(ways), states)


def _fitting(variants: Sequence[Variant], asked: Setting) -> list[Alternative]:
    """Return the first variant of each kind that fits, the fastest first."""
    found: dict[str, Alternative] = {}
    for variant in variants:
        if any(kind in variant.kind for kind in found):
            continue  # a variant of this kind, or of a part of it, fits already
        setting = replace(asked, micro_batches=variant.micro_batches)
        about = variant.about()
        if about is not None and not has_room(about, setting):
            continue
        workload = variant.workload()
        candidate = None if workload is None else judged(workload, setting)
        if isinstance(candidate, Judged):
            found[variant.kind] = Alternative(variant.advice, candidate.result.seconds)
    return sorted(found.values(), key=lambda alternative: alternative.step_seconds)


def _other_overlap(asked: Setting) -> tuple[Setting, str]:
    """Return `asked` with overlap if it has none, else without, and what to write for that."""
    if asked.updating.overlapped:
        return asked.updated(overlapped=False, into_forward=False), 'make hetmem.AdamW(overlap="off")'
    return asked.updated(overlapped=True), 'make hetmem.AdamW(overlap="backward"), which keeps no gradients at home'


def largest_parameters(workload: Workload, asked: Setting, best: Judged | None) -> int:
    """Return about how many parameters a model of this shape may have: homes, and what a forward saves for backward,
    grow with its layers until they fill the tiers. `best`: how this model fits; None if it does not, nor a larger one.
    """
    if not workload.numel:
        return 0
    capacities = asked.capacities
    ground = best.arrangement.ground if best is not None else None
    padding = 1 / (1 - ground.layout.waste) if ground is not None else 1.0
    widest = max(spec.numel for spec in workload.parameters) * max(workload.compute_itemsizes)
    copies = ground.slot_bytes * (4 + max(chunk.span for chunk in ground.chunks)) if ground is not None else widest
    apart = ground.staging_bytes if ground is not None else 0
    apart += sum(best.arrangement.set_aside) if best is not None else 0
    homes, there = (padding * state_bytes(workload, how) for how in (asked.updating, AS_IT_IS))
    saved, beside = workload.saved_bytes, workload.peak_live_bytes - workload.saved_bytes
    device = max(0, capacities.usable_bytes - beside - copies)
    elsewhere = max(0, capacities.host_bytes + capacities.nvme_bytes - apart)
    if asked.updating.on_host_only:  # then no home may be on the device
        streamed, whole = min(elsewhere / homes, device / max(1, saved)), 0.0
    else:  # what stays on the device keeps its gradients there
        streamed = min((elsewhere / homes + device / there) / (1 + saved / there), device / max(1, saved))
        cast = padding * workload.numel * max(workload.compute_itemsizes) * workload.mixed_precision
        whole = (capacities.usable_bytes - beside) / (there + cast + saved)
    times = max(streamed, whole, 0)
    if best is None:
        return min(int(workload.numel * times), workload.numel)
    lower, upper = 1.0, max(1.0, 1.06 * times)  # chunks are whole, and staging grows: the most may be less, or more
    if upper > 32:  # of a small model there would be millions of layers
        lower = upper = 0.9 * times
    for _ in range(7 if upper > lower else 0):
        middle = max((lower + upper) / 2, 0.97 * upper) if lower == 1.0 else (lower + upper) / 2
        larger = larger_by(workload, middle)
        fits = any(has_room(larger, way()) for way in _ways(larger, asked))
        lower, upper = (middle, upper) if fits else (lower, middle)
    most = int(_LAYERS_DIFFER * workload.numel * lower)
    unit = int(10.0 ** max(0, len(str(most)) - 3))
    return max(workload.numel, most // unit * unit)


_LAYERS_DIFFER = 0.99
"""What is certain of the largest model: its layers fill chunks in another way than those that were counted."""


# ---- what is missing ---------------------------------------------------------------------------------------------


def missing_bytes(workload: Workload, asked: Setting) -> dict[str, int]:
    """Return the bytes to add to each tier so that `workload` fits: the sums of what successive refusals lack."""
    added: dict[str, int] = {}
    for _ in range(24):
        refusal = first_that_fits(workload, _with(asked, added), steps=2)
        if isinstance(refusal, Judged):
            break
        tier = refusal.tier.name.lower()
        added[tier] = added.get(tier, 0) + round_up(refusal.missing_bytes, PAGE_BYTES)
    return added


def _with(asked: Setting, added: Mapping[str, int]) -> Setting:
    """Return `asked` with the bytes of `added` more on each tier."""
    capacities = asked.capacities
    more = {f"{tier}_bytes": getattr(capacities, f"{tier}_bytes") + nbytes for tier, nbytes in added.items()}
    if "device" in added:
        if capacities.device_chunk_bytes is not None:
            more["device_chunk_bytes"] = capacities.device_chunk_bytes + added["device"]
        if capacities.device_bytes:  # an allocator leaves a share of it unused
            share = capacities.device_fragment_bytes / capacities.device_bytes
            more["device_fragment_bytes"] = int(share * more["device_bytes"])
    return asked.within(**more)


def _has(asked: Setting, missing: Mapping[str, int]) -> bool:
    """Return whether the machine has the `missing` bytes beyond what `asked` takes."""
    machine = {"device": asked.hardware.device.memory_bytes, "host": asked.hardware.host.memory_bytes}
    taken = {name: getattr(asked.capacities, f"{name}_bytes") for name in machine}
    return all(taken[name] + missing[name] <= machine[name] for name in machine if name in missing)


def _ways_out(workload: Workload, asked: Setting, missing: Mapping[str, int], variants: Sequence[Variant]) -> list[str]:
    """Return changes that each make `workload` fit, cheapest first: room for homes, and then for what the device lacks.
    Raising the budget comes last, and only where the machine has the memory."""
    homes, device = {tier: n for tier, n in missing.items() if tier != "device"}, missing.get("device", 0)
    rooms: list[tuple[str, Setting]] = []
    if homes and not asked.capacities.nvme_bytes:
        rooms += _with_drive(workload, asked, fits=not device)
    if _has(asked, homes):
        rooms.append((f"raise {_by(homes)}" if homes else "", _with(asked, homes)))
    advice: list[str] = []
    for at, (text, room) in enumerate(rooms):
        found = _fitting(variants, room) if device else []
        ways = [f"{other.advice}: then it fits, at {format_seconds(other.step_seconds)} a step" for other in found]
        if device and _has(asked, {"device": device}):
            ways.append(f"raise {_limit_of_the_device(workload, room)} by {format_enough(device)}")
        ways = ways if device else [""]
        advice += [", and ".join(part for part in (text, way) if part) for way in (ways if at == 0 else ways[:1])]
    return advice


def _with_drive(workload: Workload, asked: Setting, *, fits: bool) -> list[tuple[str, Setting]]:
    """Return what to write for a drive, and `asked` with it; with updates that overlap if they leave a tenth of its
    bytes out, and the model then `fits`, if it should. None if host memory is too small for staging."""
    drive = _with(asked, {"nvme": 2 * state_bytes(workload)})
    found = [(_on_nvme(workload, drive), drive, "Budget(nvme=…, nvme_dir=…)")]
    if workload.trainable and not asked.updating.overlapped:
        less = drive.updated(overlapped=True)
        found.append((_on_nvme(workload, less), less, f'{found[0][2]} and hetmem.AdamW(overlap="backward")'))
    (nbytes, setting, text), other = found[0], found[-1]
    if other[0] < WORTH * nbytes and (not fits or isinstance(first_that_fits(workload, other[1]), Judged)):
        nbytes, setting, text = other
    if math.isinf(nbytes):
        return []
    return [(f"add an NVMe directory with {format_enough(int(nbytes))}: {text}", setting)]


def _on_nvme(workload: Workload, setting: Setting) -> float:
    """Return the bytes of homes on the drive of `setting`; infinity if there is no room for them."""
    with suppress(NoRoom):
        return sum(arranged(workload, setting).bytes_by_role(Tier.NVME).values())
    return math.inf


def _limit_of_the_device(workload: Workload, asked: Setting) -> str:
    """Return what limits the copies on the device, with which `workload` does not fit: the part that chunks may have,
    if a larger part is enough, else the whole, and a part that was asked for with it."""
    if asked.capacities.device_chunk_bytes is None:
        return "Budget(device=…)"
    whole = asked.within(device_chunk_bytes=None)
    alone = isinstance(first_that_fits(workload, whole, steps=2), Judged)
    return "Budget(device_chunks=…)" if alone else "Budget(device=…, device_chunks=…)"


def _by(missing: Mapping[str, int]) -> str:
    return " and ".join(f"Budget({tier}=…) by {format_enough(nbytes)}" for tier, nbytes in missing.items())


# ---- done differently, all together ------------------------------------------------------------------------------


def quicker(workload: Workload, setting: Setting, limit: float) -> Judged | None:
    """Judge `setting` as `first_that_fits` does; None unless a step takes less than `limit` seconds."""
    if setting.compute_seconds(workload) >= limit:
        return None
    found = first_that_fits(workload, setting)
    return found if isinstance(found, Judged) and found.result.seconds < limit else None


def combined(decision: Decision, others: Sequence[tuple[Workload, Capacities | None]]) -> Decision | None:
    """Return `decision` with the fastest combination of changes that keep the bits: one of `others` (the workload with
    other layers checkpointed, and its capacities if they differ), and overlapped updates. None if no combination is
    faster."""
    best, workload, how = decision.candidate, decision.workload, decision.asked.updating
    asked = replace(decision.asked, chunk_bytes=None) if best is None else best.setting
    ways = [how]
    if workload.trainable and not how.overlapped:
        ways.append(replace(how, overlapped=True))
    limit = math.inf if best is None else WORTH * best.result.seconds
    found = None
    for (made, within), updating in product(((workload, None), *others), ways):
        if made is workload and updating == how:
            continue
        setting = replace(asked, capacities=within or asked.capacities, updating=updating)
        candidate = quicker(made, setting, limit)
        if candidate is not None:
            limit, largest = candidate.result.seconds, max(decision.largest_parameters, made.numel)
            found = Decision(made, replace(decision.asked, updating=updating), candidate, largest)
    return found
