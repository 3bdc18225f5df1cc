"""Decides whether a model can be trained within a budget, and how; says what is missing and what would help.

`search` judges one workload; here the same training done differently is compared with it: all that is faster together
with the same bits, and smaller states, which change the mathematics. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from hetmem.base.units import format_enough, format_seconds, round_up
from hetmem.planner.reservation import state_bytes
from hetmem.planner.search import (
    Judged,
    Setting,
    arranged,
    first_that_fits,
    judged,
    not_whole,
    search,
    streamed_ways,
    tuning,
    with_streaming,
)
from hetmem.planner.what_if import largest_parameters
from hetmem.planner.workload import Updating, Workload
from hetmem.schedule.hardware import HardwareProfile
from hetmem.schedule.placement import PAGE_BYTES, Capacities, NoRoom
from hetmem.schedule.trace import Tier
from hetmem.schedule.update_split import WORTH


@dataclass(frozen=True, slots=True)
class Variant:
    """The same training done differently by the user: how to say it, and the workload of it (traced when asked for).
    `visible`: gradients are, whatever was asked for.

    Of each `kind` the first one that fits is enough. None: it cannot be done.
    """

    kind: str
    advice: str
    workload: Callable[[], Workload | None]
    micro_batches: int = 1
    visible: bool = False


@dataclass(frozen=True, slots=True)
class Alternative:
    """A variant that fits: what to do, the forwards and backwards of a step, its seconds, and the most bytes on the
    device that are not chunks. `streamed`: the seconds are those with states sent to the device for their update."""

    advice: str
    micro_batches: int
    step_seconds: float
    activation_bytes: int
    streamed: bool = False


@dataclass(frozen=True, slots=True)
class Decision:
    """The best candidate, or (None) what is missing on which tier; and what to change, cheapest first."""

    workload: Workload
    micro_batches: int
    updating: Updating
    candidate: Judged | None
    missing_bytes: dict[str, int]
    reasons: tuple[str, ...]
    advice: tuple[str, ...]
    alternatives: tuple[Alternative, ...]
    largest_parameters: int


def decide(
    workload: Workload,
    capacities: Capacities,
    hardware: HardwareProfile,
    *,
    chunk_bytes: int | None = None,
    micro_batches: int = 1,
    updating: Updating | None = None,
    variants: Sequence[Variant] = (),
) -> Decision:
    """The fastest way to run `workload` within `capacities`, or what is missing.

    `chunk_bytes` fixes the chunk size; None searches. `updating`: as the user's optimizer will. `variants` are compared
    with it: of a workload that fits only those that could be faster, of one that does not all that may need less of the
    device.
    """
    asked = Setting(capacities, chunk_bytes, updating=updating or Updating())
    asked = not_whole(workload, asked) if asked.updating.on_host_only else asked
    best, refusal = search(workload, asked, hardware, micro_batches)
    largest = largest_parameters(workload, asked, best, hardware, micro_batches)
    if best is not None:
        others = _alternatives(variants, asked, hardware, best.result.seconds)
        updated = _updated_otherwise(workload, best, asked, hardware, micro_batches)
        advice = (*tuning(best, asked), *_faster(best, others), *updated)
        return Decision(workload, micro_batches, asked.updating, best, {}, (), advice, others, largest)
    assert refusal is not None
    missing = _missing(workload, asked, hardware, micro_batches)
    ways = _room_for_homes(workload, asked, {k: v for k, v in missing.items() if k != "device"}, hardware)
    device = missing.get("device", 0)
    found = [(text, _alternatives(variants, room, hardware, None) if device else ()) for text, room in ways]
    others = found[0][1] if found else ()
    streamed = None if "device" in missing else _without_gradients(workload, asked, hardware, micro_batches)
    advice = tuple(_ways_out(found, device, may_raise=_has(hardware, asked, {"device": device})))
    if streamed is not None:
        how = _STREAMED[streamed.setting.updating.trails]
        advice = (f"{how}: then it fits, at {format_seconds(streamed.result.seconds)} a step", *advice)
    return Decision(workload, micro_batches, asked.updating, None, missing, (str(refusal),), advice, others, largest)


def _alternatives(
    variants: Sequence[Variant], asked: Setting, hardware: HardwareProfile, seconds: float | None
) -> tuple[Alternative, ...]:
    """The first variant of each kind that fits, the fastest first; none that computes for `seconds` or more."""
    found: dict[str, Alternative] = {}
    for variant in variants:
        if variant.kind in found or (seconds is None and any(kind in variant.kind for kind in found)):
            continue  # what fits with one change needs no second one
        workload = variant.workload()
        if workload is None:
            continue
        least = variant.micro_batches * workload.compute_seconds(hardware.device)
        if seconds is not None and least >= seconds:
            continue
        setting = asked.updated(streamed_gradients=False) if variant.visible else asked
        candidate = judged(workload, setting, hardware, variant.micro_batches)
        if isinstance(candidate, Judged):
            if seconds is not None:  # else the advice is about what fits, and says nothing of how states are updated
                candidate = with_streaming(workload, candidate, hardware, variant.micro_batches)
            result = candidate.result
            found[variant.kind] = Alternative(
                variant.advice,
                variant.micro_batches,
                result.seconds,
                result.non_model_peak_bytes,
                candidate.setting.streamed,
            )
    return tuple(sorted(found.values(), key=lambda alternative: alternative.step_seconds))


def _faster(best: Judged, others: Sequence[Alternative]) -> Iterator[str]:
    """What would be worth doing differently although it fits."""
    for other in others:
        if other.step_seconds < WORTH * best.result.seconds:
            alone = other.streamed and not best.setting.streamed  # else `tuning` says so
            profile = " and give manage the profile of the machine, hardware=…" if alone else ""
            seconds = f"{format_seconds(other.step_seconds)}, not {format_seconds(best.result.seconds)}"
            yield f"{other.advice}{profile}: then a step takes {seconds}"


def _updated_otherwise(
    workload: Workload, best: Judged, asked: Setting, hardware: HardwareProfile, micro_batches: int
) -> Iterator[str]:
    """Whether updates that go on behind the backward would be worth it, and giving up gradients, which leaves host
    memory to what lies on NVMe; by default neither is done."""
    result, seconds = best.result, best.result.seconds
    if result.device_updates == 1:
        return
    if not asked.updating.overlapped and result.terms["update"] > (1 - WORTH) * seconds:
        other = judged(workload, best.setting.updated(overlapped=True), hardware, micro_batches)
        if isinstance(other, Judged) and other.result.seconds < WORTH * seconds:
            seconds = other.result.seconds
            yield (
                f'make hetmem.AdamW(overlap="backward"), which updates during the backward: then a step takes '
                f"{format_seconds(seconds)}, not {format_seconds(result.seconds)}"
            )
    if result.bytes["nvme_read"]:
        found = _without_gradients(workload, asked, hardware, micro_batches)
        if found is not None and found.result.seconds < WORTH * seconds:
            how = _STREAMED[found.setting.updating.trails]
            times = f"{format_seconds(found.result.seconds)}, not {format_seconds(result.seconds)}"
            yield f"{how}: then a step takes {times}"


_STREAMED = [
    f'make hetmem.AdamW(overlap="{overlap}", gradients="streamed"), which keeps no gradients at home'
    for overlap in ("backward", "forward")
]


def _without_gradients(
    workload: Workload, asked: Setting, hardware: HardwareProfile, micro_batches: int
) -> Judged | None:
    """With gradients that live only until their update. They need overlap, and one backward."""
    if asked.updating.streamed_gradients or micro_batches > 1:
        return None
    how = asked.updated(overlapped=True, streamed_gradients=True)
    found = first_that_fits(workload, how, hardware, micro_batches)
    return found if isinstance(found, Judged) else None


# ---- what is missing ---------------------------------------------------------------------------------------------


_EXACT = 0.05
"""Of what is missing: so near to the least that is enough what is named comes."""


def _missing(workload: Workload, asked: Setting, hardware: HardwareProfile, micro_batches: int) -> dict[str, int]:
    """The fewest bytes that make it fit when added to each tier named, of what chunks of several sizes lack."""
    found = [
        _missing_as(workload, setting, hardware, micro_batches, whole=whole)
        for setting in (asked, *streamed_ways(workload, asked))
        for whole in (True, False)
    ]
    added = min((added for added in found if added is not None), key=lambda added: sum(added.values()), default={})

    def part(share: float) -> dict[str, int]:
        return {tier: round_up(int(share * nbytes), PAGE_BYTES) for tier, nbytes in added.items()}

    least, enough, tried = 0.0, 1.0, 1 - _EXACT  # one refusal after the other may have asked for more than both need
    while added and enough - least > _EXACT:
        room = replace(asked, capacities=_larger(asked.capacities, part(tried)))
        if isinstance(first_that_fits(workload, room, hardware, micro_batches, steps=2), Judged):
            enough = tried
        else:
            least = tried
        tried = (least + enough) / 2
    return part(enough)


def _missing_as(
    workload: Workload, asked: Setting, hardware: HardwareProfile, micro_batches: int, *, whole: bool
) -> dict[str, int] | None:
    """The same with one chunk size, of a model that may be `whole` on a larger device or is streamed there too; None
    where nothing was found to be enough."""
    added: dict[str, int] = {}
    for _ in range(24):
        room = replace(asked, capacities=_larger(asked.capacities, added))
        refusal = judged(workload, room if whole else not_whole(workload, room), hardware, micro_batches)
        if not isinstance(refusal, NoRoom):
            return added
        tier = refusal.tier.name.lower()
        added[tier] = added.get(tier, 0) + round_up(refusal.missing_bytes, PAGE_BYTES)
    return None


def _larger(capacities: Capacities, added: dict[str, int]) -> Capacities:
    """`capacities` and so many bytes more of each tier."""
    more = {f"{tier}_bytes": getattr(capacities, f"{tier}_bytes") + nbytes for tier, nbytes in added.items()}
    if "device" in added:
        if capacities.device_chunk_bytes is not None:
            more["device_chunk_bytes"] = capacities.device_chunk_bytes + added["device"]
        if capacities.device_bytes:  # an allocator leaves a share of it unused
            share = capacities.device_fragment_bytes / capacities.device_bytes
            more["device_fragment_bytes"] = int(share * more["device_bytes"])
    return replace(capacities, **more)


def _has(hardware: HardwareProfile, asked: Setting, missing: Mapping[str, int]) -> bool:
    """Whether the machine has so much more than `asked` takes."""
    there = {"device": hardware.device.memory_bytes, "host": hardware.host.memory_bytes}
    taken = {name: getattr(asked.capacities, f"{name}_bytes") for name in there}
    return all(taken[name] + missing.get(name, 0) <= max(there[name], taken[name]) for name in there)


def _ways_out(
    homes: Sequence[tuple[str, Sequence[Alternative]]], device_bytes: int, *, may_raise: bool
) -> Iterator[str]:
    """Changes each of which makes it fit, cheapest first; raising the budget comes last, if it `may_raise`. `homes`:
    ways to have room for homes ("" where that is not missing), each with what then fits on the device, which lacks
    `device_bytes`."""
    for at, (room, others) in enumerate(homes):
        device = [f"{other.advice}: then it fits, at {format_seconds(other.step_seconds)} a step" for other in others]
        if device_bytes and not (device or may_raise):
            continue
        if device_bytes and may_raise:
            device.append(f"raise {_by({'device': device_bytes})}")
        for way in (device if at == 0 else device[:1]) or [""]:
            yield ", and ".join(part for part in (room, way) if part)


def _room_for_homes(
    workload: Workload, asked: Setting, missing: dict[str, int], hardware: HardwareProfile
) -> Iterator[tuple[str, Setting]]:
    """Ways to have the bytes that are `missing` in host memory or on NVMe, and `asked` with them."""
    if missing and asked.capacities.nvme_bytes == 0:
        capacities = replace(asked.capacities, nvme_bytes=2 * state_bytes(workload))
        room = replace(asked, capacities=capacities)
        nbytes = _disk_bytes(workload, room)
        if nbytes is not None:
            yield f"add an NVMe directory with {format_enough(nbytes)}: Budget(nvme=…, nvme_dir=…)", room
    if _has(hardware, asked, missing):
        more = replace(asked, capacities=_larger(asked.capacities, missing))
        yield (f"raise {_by(missing)}" if missing else ""), more


def _by(missing: dict[str, int]) -> str:
    return " and ".join(f"Budget({tier}=…) by {format_enough(nbytes)}" for tier, nbytes in missing.items())


def _disk_bytes(workload: Workload, room: Setting) -> int | None:
    """What lies on NVMe when there is more than enough of it; None if host memory has no room to stage it."""
    try:
        made = arranged(workload, room)
    except NoRoom:
        return None
    sizes = (made.ground.home_bytes(chunk, "grad") for chunk in made.lent)
    homeless = sum(nbytes for nbytes in sizes if nbytes > max(made.set_aside, default=0))
    return sum(made.bytes_by_role(Tier.NVME).values()) + homeless


def combined(
    decision: Decision, capacities: Capacities, hardware: HardwareProfile, light: Workload | None
) -> Decision | None:
    """`decision` with all done that is faster, or fits, together and has the same bits: `light`, where every layer is
    checkpointed, and updates that go on behind the backward. None if it is that already."""
    best, workload, how = decision.candidate, decision.workload, decision.updating
    chunk_bytes = None if best is None else best.setting.chunk_bytes
    asked = Setting(capacities, chunk_bytes, updating=how) if best is None else best.setting
    ways = [how] if how.overlapped or not workload.trainable else [how, replace(how, overlapped=True)]
    if decision.micro_batches == 1 and workload.trainable and (best is None or best.result.bytes["nvme_read"]):
        ways.append(replace(how, overlapped=True, streamed_gradients=True))
    found, limit = None, math.inf if best is None else WORTH * best.result.seconds
    for made in (workload, light) if light is not None else (workload,):
        for updating in ways:
            if made is workload and updating == how:
                continue
            if decision.micro_batches * made.compute_seconds(hardware.device) >= limit:
                continue
            setting = replace(asked, updating=replace(updating, streamed_states=asked.updating.streamed_states))
            candidate = first_that_fits(made, setting, hardware, decision.micro_batches)
            if isinstance(candidate, Judged):
                candidate = with_streaming(made, candidate, hardware, decision.micro_batches)
                if candidate.result.seconds < limit:
                    found, limit = (made, updating, candidate), candidate.result.seconds
    if found is None:
        return None
    made, updating, candidate = found
    largest = max(decision.largest_parameters, made.numel)
    return Decision(made, decision.micro_batches, updating, candidate, {}, (), (), (), largest)


def approximations(
    workload: Workload,
    capacities: Capacities,
    hardware: HardwareProfile,
    micro_batches: int,
    than: Decision,
    adapted: Callable[[], Workload | None],
) -> tuple[Alternative, ...]:
    """Smaller states, and `adapted`, where a few of them are trained: where they fit and `than` does not, or is slower,
    the fastest first. Updates go on behind the backward, which has the same bits."""
    best = than.candidate
    if than.updating.on_host_only or not workload.trainable:
        return ()
    if best is not None and not best.result.bytes["nvme_read"]:
        return ()
    streams = micro_batches == 1
    how = replace(than.updating, overlapped=True, streamed_gradients=streams)
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
    found = []
    for made, updating, advice in choices:
        if made is None:
            continue
        candidate = first_that_fits(made, Setting(capacities, None, updating=updating), hardware, micro_batches)
        if isinstance(candidate, Judged) and (best is None or candidate.result.seconds < best.result.seconds):
            result = candidate.result
            found.append(Alternative(advice, micro_batches, result.seconds, result.non_model_peak_bytes))
    return tuple(sorted(found, key=lambda alternative: alternative.step_seconds))


RANK = 16
"""Of the adapters that are judged where a model has no room, or waits for a drive."""


def in_16_bits(workload: Workload) -> Workload:
    """`workload`, which computes in 16 bits, with weights that are so at home too."""
    parameters = tuple(replace(spec, itemsize=min(2, spec.itemsize)) for spec in workload.parameters)
    return replace(workload, parameters=parameters, mixed_precision=False)
