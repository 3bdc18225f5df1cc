"""Decides whether a model can be trained within a budget, and how; says what is missing and what would help.

First what a run can be told to do is searched, with the simulator as the judge. Only what `manage` and `hetmem.AdamW`
do today is planned: homes in host memory, then on NVMe, in the order of roles; the update where the states live;
everything on the device if it fits there, or what a step leaves room for. Then the same training done differently is
compared with it: all that is faster together with the same bits, and smaller states, which change the mathematics.
Pure.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import product

from hetmem.base.units import MIB, format_enough, format_seconds, round_up
from hetmem.planner.activations import moving
from hetmem.planner.reservation import Arrangement, arrange, check_device, state_bytes
from hetmem.planner.step_program import rehearse
from hetmem.planner.workload import Setting, StepResult, Updating, Workload
from hetmem.schedule.blocks import Link
from hetmem.schedule.placement import PAGE_BYTES, Capacities, NoRoom, Room
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


# ---- decisions -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Variant:
    """The same training done differently by the user: how to say it, and the workload of it (traced when asked for).
    `visible`: gradients are, whatever was asked for. `about`: less than that workload will take, without a trace; what
    does not fit even so is not traced.

    Of each `kind` the first one that fits is enough. None: it cannot be done.
    """

    kind: str
    advice: str
    workload: Callable[[], Workload | None]
    micro_batches: int = 1
    visible: bool = False
    about: Callable[[], Workload | None] = lambda: None


@dataclass(frozen=True, slots=True)
class Alternative:
    """A variant that fits: what to do, and the seconds of a step."""

    advice: str
    step_seconds: float


@dataclass(frozen=True, slots=True)
class Decision:
    """What was `asked` of `workload`: the best candidate, or (None) what is missing on which tier, and what to change,
    cheapest first."""

    workload: Workload
    asked: Setting
    candidate: Judged | None
    largest_parameters: int
    missing_bytes: dict[str, int] = field(default_factory=dict)
    reasons: tuple[str, ...] = ()
    advice: tuple[str, ...] = ()
    state_bytes: int = 0
    """Of all homes, where the model does not fit."""


def decide(workload: Workload, asked: Setting, variants: Sequence[Variant] = ()) -> Decision:
    """The fastest way to run `workload` within what is `asked`; or what is missing, and which `variants` would fit."""
    best = search(workload, asked)
    if isinstance(best, Judged):
        return Decision(workload, asked, best, largest_parameters(workload, asked, best))
    missing = _missing(workload, asked)
    ways = _ways_out(workload, asked, missing, variants)
    streamed = None if "device" in missing else _without_gradients(workload, asked)
    if isinstance(streamed, Judged):
        ways = [f"{_STREAMED}: then it fits, at {format_seconds(streamed.result.seconds)} a step", *ways]
    largest = largest_parameters(workload, asked, None)
    states = best.state_bytes or state_bytes(workload, asked.updating)
    return Decision(workload, asked, None, largest, missing, (str(best),), tuple(ways), states)


def _fitting(variants: Sequence[Variant], asked: Setting) -> list[Alternative]:
    """The first variant of each kind that fits, the fastest first."""
    found: dict[str, Alternative] = {}
    for variant in variants:
        if any(kind in variant.kind for kind in found):
            continue  # what fits with one change needs no second one
        setting = replace(asked, micro_batches=variant.micro_batches)
        setting = setting.updated(streamed_gradients=False) if variant.visible else setting
        about = variant.about()
        if about is not None and not has_room(about, setting):
            continue
        workload = variant.workload()
        candidate = None if workload is None else judged(workload, setting)
        if isinstance(candidate, Judged):
            found[variant.kind] = Alternative(variant.advice, candidate.result.seconds)
    return sorted(found.values(), key=lambda alternative: alternative.step_seconds)


_STREAMED = 'make hetmem.AdamW(overlap="backward", gradients="streamed"), which keeps no gradients at home'


def _without_gradients(workload: Workload, asked: Setting) -> Judged | NoRoom | None:
    """With gradients that live only until their update. They need overlap, and one backward."""
    if asked.updating.streamed_gradients or asked.micro_batches > 1:
        return None
    return first_that_fits(workload, asked.updated(overlapped=True, trails=False, streamed_gradients=True))


def largest_parameters(workload: Workload, asked: Setting, best: Judged | None) -> int:
    """About as many parameters as a model of this shape may have: homes, and what a forward leaves for the backward,
    grow with its layers until they fill the tiers. `best` is how this one fits; if it does not, a larger one does not.
    """
    if not workload.numel:
        return 0
    capacities = asked.capacities
    ground = best.arrangement.ground if best is not None else None
    padding = 1 / (1 - ground.layout.waste) if ground is not None else 1.0
    widest = max(spec.numel for spec in workload.parameters) * max(workload.compute_itemsizes)
    copies = ground.slot_bytes * (4 + max(chunk.span for chunk in ground.chunks)) if ground is not None else widest
    staging = ground.staging_slots * ground.staging_slot_bytes if ground is not None else 0
    homes = padding * state_bytes(workload, asked.updating)
    kept, beside = workload.kept_bytes, workload.peak_live_bytes - workload.kept_bytes
    device = max(0, capacities.usable_bytes - beside - copies)
    elsewhere = max(0, capacities.host_bytes + capacities.nvme_bytes - staging)
    streamed = min((elsewhere + device) / max(1.0, homes + kept), device / max(1, kept))
    cast = padding * workload.numel * max(workload.compute_itemsizes) * workload.mixed_precision
    whole = (capacities.usable_bytes - beside) / max(1.0, homes + cast + kept)
    found = int(workload.numel * max(streamed, whole, 0))
    return found if best is not None else min(found, workload.numel)


# ---- what is missing ---------------------------------------------------------------------------------------------


def _missing(workload: Workload, asked: Setting) -> dict[str, int]:
    """Bytes that make it fit when added to each tier named: what one refusal after the other asks for."""
    added: dict[str, int] = {}
    for _ in range(24):
        refusal = first_that_fits(workload, _with(asked, added), steps=2)
        if isinstance(refusal, Judged):
            break
        tier = refusal.tier.name.lower()
        added[tier] = added.get(tier, 0) + round_up(refusal.missing_bytes, PAGE_BYTES)
    return added


def _with(asked: Setting, added: Mapping[str, int]) -> Setting:
    """`asked` with so many bytes more of each tier."""
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
    """Whether the machine has so much more than `asked` takes."""
    there = {"device": asked.hardware.device.memory_bytes, "host": asked.hardware.host.memory_bytes}
    taken = {name: getattr(asked.capacities, f"{name}_bytes") for name in there}
    return all(taken[name] + missing[name] <= there[name] for name in there if name in missing)


def _ways_out(workload: Workload, asked: Setting, missing: Mapping[str, int], variants: Sequence[Variant]) -> list[str]:
    """Changes each of which makes it fit, cheapest first: room for homes, and for what the device lacks then; raising
    the budget comes last, where the machine has so much."""
    homes, device = {tier: n for tier, n in missing.items() if tier != "device"}, missing.get("device", 0)
    rooms: list[tuple[str, Setting]] = []
    if homes and not asked.capacities.nvme_bytes:
        drive = _with(asked, {"nvme": 2 * state_bytes(workload)})
        with suppress(NoRoom):  # of host memory to stage it
            nbytes = sum(arranged(workload, drive).bytes_by_role(Tier.NVME).values())
            rooms.append((f"add an NVMe directory with {format_enough(nbytes)}: Budget(nvme=…, nvme_dir=…)", drive))
    if _has(asked, homes):
        rooms.append((f"raise {_by(homes)}" if homes else "", _with(asked, homes)))
    advice: list[str] = []
    for at, (text, room) in enumerate(rooms):
        found = _fitting(variants, room) if device else []
        ways = [f"{other.advice}: then it fits, at {format_seconds(other.step_seconds)} a step" for other in found]
        if device and _has(asked, {"device": device}):
            ways.append(f"raise {_by({'device': device})}")
        ways = ways if device else [""]
        advice += [", and ".join(part for part in (text, way) if part) for way in (ways if at == 0 else ways[:1])]
    return advice


def _by(missing: Mapping[str, int]) -> str:
    return " and ".join(f"Budget({tier}=…) by {format_enough(nbytes)}" for tier, nbytes in missing.items())


# ---- done differently, all together ------------------------------------------------------------------------------


def _quicker(workload: Workload, setting: Setting, limit: float) -> Judged | None:
    """`setting`, or what fits where that does not, if a step takes less than `limit` seconds."""
    if setting.compute_seconds(workload) >= limit:
        return None
    found = first_that_fits(workload, setting)
    return found if isinstance(found, Judged) and found.result.seconds < limit else None


def combined(decision: Decision, others: Sequence[tuple[Workload, Capacities | None]]) -> Decision | None:
    """`decision` with all done that is faster, or fits, together and has the same bits: one of `others`, where other
    layers are checkpointed, within what is said with it, and updates that go on behind the backward. None if it is
    that already."""
    best, workload, how = decision.candidate, decision.workload, decision.asked.updating
    asked = replace(decision.asked, chunk_bytes=None) if best is None else best.setting
    ways = [how]
    if asked.micro_batches == 1 and workload.trainable and (best is None or best.result.bytes["nvme_read"]):
        ways.append(replace(how, overlapped=True, streamed_gradients=True))
    if workload.trainable and not how.overlapped:
        ways.append(replace(how, overlapped=True))
    limit = math.inf if best is None else WORTH * best.result.seconds
    busiest = 0.0 if best is None else max(best.result.terms[link.value] for link in Link)
    found = None
    for (made, within), updating in product(((workload, None), *others), ways):
        if made is workload and updating == how:
            continue
        if made is workload and limit < busiest and not updating.streamed_gradients:
            continue  # what was found with streamed ones is shorter than to move these gradients
        setting = replace(asked, capacities=within or asked.capacities, updating=updating)
        candidate = _quicker(made, setting, limit)
        if candidate is not None:
            limit, largest = candidate.result.seconds, max(decision.largest_parameters, made.numel)
            found = Decision(made, replace(decision.asked, updating=updating), candidate, largest)
    return found


def approximations(
    workload: Workload, capacities: Capacities, than: Decision, adapted: Callable[[], Workload | None]
) -> tuple[Alternative, ...]:
    """Smaller states, and `adapted`, where a few of them are trained: where they fit and `than` does not, or is slower,
    the fastest first. Updates go on behind the backward, which has the same bits."""
    best, updating = than.candidate, than.asked.updating
    if updating.on_host_only or not workload.trainable:
        return ()
    if best is not None and not best.result.bytes["nvme_read"]:
        return ()
    streams = than.asked.micro_batches == 1
    how = replace(updating, overlapped=True, streamed_gradients=streams)
    kept = ', overlap="backward"' + (', gradients="streamed"' if streams else "")
    choices: list[tuple[Workload | None, Updating, str]] = [
        (workload, replace(how, moments=kind), f"hetmem.AdamW(moments={said}{kept}) (--moments {kind})")
        for kind, said in (("bfloat16", "torch.bfloat16"), ("8bit", '"8bit"'))
    ]
    choices.append((adapted(), how, f"adapters of rank {RANK} beside frozen weights in bfloat16 (--lora {RANK})"))
    if workload.mixed_precision and workload.dtype == "bfloat16":
        rounded = replace(how, stochastic_rounding=True)
        weights = "weights in bfloat16 (model.bfloat16(), no mixed_precision)"
        advice = f"{weights} and hetmem.AdamW(stochastic_rounding=True{kept}) (--stochastic-rounding)"
        choices.append((in_16_bits(workload), rounded, advice))
    found, limit = [], math.inf if best is None else best.result.seconds
    for made, updating, advice in choices:
        setting = replace(than.asked, capacities=capacities, chunk_bytes=None, updating=updating)
        candidate = None if made is None else _quicker(made, setting, limit)
        if candidate is not None:
            found.append(Alternative(advice, candidate.result.seconds))
    return tuple(sorted(found, key=lambda alternative: alternative.step_seconds))


RANK = 16
"""Of the adapters that are judged where a model has no room, or waits for a drive."""


def in_16_bits(workload: Workload) -> Workload:
    """`workload`, which computes in 16 bits, with weights that are so at home too."""
    parameters = tuple(replace(spec, itemsize=min(2, spec.itemsize)) for spec in workload.parameters)
    return replace(workload, parameters=parameters, mixed_precision=False)
