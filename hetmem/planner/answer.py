"""Turns a decision into a `Plan`, and compares what may become of activations.

A plan has sums by role and tier, the options a program passes, and the budget of a run: the peaks and a margin, chosen
so that every home lies where it was planned. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import product
from typing import Any

from hetmem.base.units import GIB, MIB, round_up
from hetmem.planner.decide import (
    AS_FAST,
    Decision,
    Judged,
    arranged,
    as_run,
    first_that_fits,
    has_room,
    judged,
    not_whole,
)
from hetmem.planner.model import TracedCall
from hetmem.planner.plan import KEPT, LOANED, MARGIN_SHARE, Plan
from hetmem.planner.plan_shape import TIERS
from hetmem.planner.reservation import arrange, ground_of
from hetmem.planner.workload import Setting, Updating, Workload, resized
from hetmem.schedule.placement import MARGIN_SHARE as IDLE_SHARE
from hetmem.schedule.placement import Capacities, NoRoom
from hetmem.schedule.trace import Tier

_TIMES = 64.0
"""The search for the largest batch that fits ends at so many times the batch, and at that fraction of it."""


def activation_choices(
    ways: Mapping[str, tuple[Workload, str]],
    moved: Callable[[Workload, str], Workload],
    asked: Setting,
) -> tuple[dict[str, Any], ...]:
    """Return for each of `ways` (a workload, and the value of `manage(activations=…)`) its `choice`, the seconds of a
    step (None if it does not fit), the bytes that move, and how many `times` as large a batch or sequence fits."""
    found = []
    for choice, (base, how) in ways.items():
        workload = moved(base, how)
        best = first_that_fits(workload, asked, steps=2)
        lower, upper = 1 / _TIMES, _TIMES

        def fits(factor: float, base: Workload = base, how: str = how) -> bool:
            larger = resized(base, lambda nbytes: int(factor * nbytes))
            made = moved(larger, how)
            return any(has_room(made, setting) for setting in dict.fromkeys((asked, not_whole(made, asked))))

        for _ in range(12):
            middle = math.sqrt(lower * upper)
            lower, upper = (middle, upper) if fits(middle) else (lower, middle)
        found.append(
            {
                "choice": choice,
                "step_seconds": best.result.seconds if isinstance(best, Judged) else None,
                **moved_and_kept(workload),
                "nvme_bytes": best.arrangement.spilled_bytes if isinstance(best, Judged) else 0,
                "times": lower,
                "rows": int(base.rows * lower),
                "sequence": int(base.tokens / base.rows * lower),
            }
        )
    return tuple(found)


def other_order(workload: Workload, asked: Setting) -> dict[str, Any]:
    """Return `Plan.other_order` for `workload`, the micro-batches of a step in the other order."""
    found = first_that_fits(workload, asked)
    if not isinstance(found, Judged):
        return {"step_seconds": None, "device_peak_bytes": 0, "link_bytes": {}}
    result = found.result
    peak, links = result.device_peak_bytes, dict(result.bytes)
    return {"step_seconds": result.seconds, "device_peak_bytes": peak, "link_bytes": links}


def compute_bound_micro_batches(one: Judged, other: Judged) -> int | None:
    """Return about how many micro-batches that take turns make compute bind, from two numbers of them; None if as many
    as there may be would not: gradients and activations on a link grow as compute does."""
    counts = one.workload.micro_batches, other.workload.micro_batches
    grows, least = {}, 1.0
    for name in one.result.terms:
        first, second = one.result.terms[name], other.result.terms[name]
        grows[name] = (second - first) / (counts[1] - counts[0])
    for name, slope in grows.items():
        fixed = (
            one.result.terms[name] - slope * counts[0] - (one.result.terms["compute"] - grows["compute"] * counts[0])
        )
        if name != "compute" and fixed > 0:
            if slope >= grows["compute"]:
                return None
            least = max(least, fixed / (grows["compute"] - slope))
        elif slope > grows["compute"]:
            return None
    return math.ceil(least)


def moved_and_kept(workload: Workload) -> dict[str, int]:
    """Return the bytes that autograd saves: those that are offloaded, and those that stay on the device."""
    moves = sum(move.nbytes for move in workload.moves)
    return {"moved_bytes": moves, "kept_bytes": sum(each.nbytes for each in workload.saved) - moves}


def plan_of(
    decision: Decision,
    call: TracedCall,
    activation_bytes: dict[str, int],
    nvme_directories: tuple[str, ...],
    *,
    checkpointing: bool = False,
    inference: bool = False,
    activations: str = "keep",
    layers: dict[str, Any] | None = None,
) -> Plan:
    """Return `decision` about `call` as a `Plan`."""
    workload, best, asked = decision.workload, decision.candidate, decision.asked
    count, capacities = asked.micro_batches * workload.micro_batches, asked.capacities
    roles = _roles(decision)
    peaks = {name: sum(sizes.values()) for name, sizes in roles.items()}
    terms = {"compute": asked.compute_seconds(workload)}
    given, chunk_bytes, binding, bound_rows = capacities, None, None, None
    if best is not None:
        bound_rows = _compute_bound_rows(best.result.terms, workload.rows, terms["compute"])
        terms, peaks["device"] = best.result.terms, best.result.device_peak_bytes
        binding = max(terms, key=lambda name: terms[name])
        given, chunk_bytes = needed(best, peaks)
    return Plan(
        model=workload.name,
        hardware=asked.hardware.name,
        parameters=workload.numel,
        rows=workload.rows,
        tokens=workload.tokens,
        micro_batches=count,
        accumulate=workload.micro_batches > 1,
        other_order=None,
        checkpointing=checkpointing,
        mixed_precision=None if call.mixed_precision is None else str(call.mixed_precision).removeprefix("torch."),
        frozen=call.frozen if call.frozen is None or isinstance(call.frozen, str) else {**call.frozen},
        fits=best is not None,
        capacity_bytes={name: getattr(capacities, f"{name}_bytes") for name in TIERS},
        budget_bytes={name: getattr(given, f"{name}_bytes") for name in TIERS},
        peak_bytes=peaks,
        role_bytes=roles,
        step_seconds=best.result.seconds if best else None,
        stall_seconds=best.result.stall_seconds if best else None,
        terms=dict(terms),
        binding=binding,
        link_bytes=dict(best.result.bytes) if best else {},
        flops=workload.flops * asked.micro_batches,
        recomputed_flops=workload.recomputed_flops * asked.micro_batches,
        activations=activations,
        activation_bytes=activation_bytes,
        activation_choices=(),
        layers=layers,
        chunk_waste=best.arrangement.ground.layout.waste if best else 0.0,
        slot_bytes=best.arrangement.ground.staging_slot_bytes if best else 0,
        chunk_bytes=chunk_bytes,
        device_chunks=given.device_chunk_bytes,
        home_copies=given.home_copies,
        device_update_share=best.result.device_updates if best else 0.0,
        optimizer=_optimizer(asked.updating),
        approximations=(),
        changes=(),
        as_asked="",
        combined=None,
        inference=inference,
        generation=None,
        between_steps=None if best is None or inference else _between_steps(best, roles["device"]),
        loss="chunked" if call.loss == "chunked" else None,
        setup=call.setup,
        at_peak=tuple({"what": what, "bytes": nbytes} for what, nbytes in workload.at_peak),
        peak_operator=workload.peak_operator,
        logits_bytes=workload.logits_bytes,
        compute_bound_rows=bound_rows,
        compute_bound_micro_batches=None,
        largest_parameters=decision.largest_parameters,
        missing_bytes=dict(decision.missing_bytes),
        reasons=decision.reasons,
        advice=decision.advice,
        nvme_directories=nvme_directories,
    )


_NOT_SAVED = ("compute", "grad", "activations", "staging")
_NOT_PARKED = ("copies", "activations")


def _between_steps(best: Judged, on_device: Mapping[str, int]) -> dict[str, Any]:
    """Return `Plan.between_steps` of a run that has the homes `on_device` there."""
    hardware, tiers = best.setting.hardware, (Tier.DEVICE, Tier.HOST, Tier.NVME)
    homes = [item for tier in tiers for item in best.arrangement.bytes_by_role(tier).items()]
    saved = sum(nbytes for role, nbytes in homes if role not in _NOT_SAVED)
    parked = sum(nbytes for role, nbytes in on_device.items() if role not in _NOT_PARKED)
    seconds = hardware.nvme_write.seconds(saved)
    return {
        "saved_bytes": saved,
        "save_seconds": seconds,
        "hides": seconds <= best.result.seconds,
        "parked_bytes": parked,
        "park_seconds": hardware.device_to_host.seconds(parked) if parked else 0.0,
        "wake_seconds": hardware.host_to_device.seconds(parked) if parked else 0.0,
    }


def _optimizer(how: Updating) -> dict[str, Any]:
    """Return the options of `hetmem.AdamW` that are not the default ones."""
    options: dict[str, Any] = {"overlap": "forward" if how.into_forward else "backward"} if how.overlapped else {}
    options |= {"max_grad_norm": how.max_grad_norm} if how.max_grad_norm is not None else {}
    options |= {"loss_scale": how.loss_scale} if how.loss_scale is not None else {}
    options |= {"moments": how.moments} if how.moments != "float32" else {}
    return options | ({"stochastic_rounding": True} if how.stochastic_rounding else {})


def _roles(decision: Decision) -> dict[str, dict[str, int]]:
    """Return bytes by tier and role; for a model that does not fit, those it would need."""
    best, capacities = decision.candidate, decision.asked.capacities
    if best is None:
        activations, states = decision.workload.peak_live_bytes, decision.state_bytes
        beyond = max(0, states - capacities.host_bytes) if capacities.nvme_bytes else 0
        on_nvme = {"states": beyond} if beyond else {}
        return {"device": {"activations": activations}, "host": {"states": states - beyond}, "nvme": on_nvme}
    roles = {name: best.arrangement.bytes_by_role(Tier[name.upper()]) for name in TIERS}
    for tier, moved in best.result.moved_bytes.items():
        _move(roles[tier], moved, roles["device"])
    for tier, nbytes in best.result.new_bytes.items():
        roles[tier]["grad"] = roles[tier].get("grad", 0) + nbytes
    if best.result.loaned_bytes:
        roles["host"][LOANED] = best.result.loaned_bytes
    homes = sum(roles["device"].values())
    roles["device"]["copies"] = max(0, best.result.chunk_peak_bytes - homes)
    roles["device"]["activations"] = best.result.non_model_peak_bytes
    return roles


def _move(left: dict[str, int], moved: Mapping[str, int], device: dict[str, int]) -> None:
    """Count `moved` homes under `device`, and the memory they leave in `left`, which stays reserved, under `KEPT`."""
    for role, nbytes in moved.items():
        gone = min(nbytes, left.get(role, 0))  # homes that gradients got during the run are in `new_bytes`
        left[role] = left.get(role, 0) - gone
        left[KEPT] = left.get(KEPT, 0) + gone
        device[role] = device.get(role, 0) + gone
        if not left[role]:
            del left[role]


def _compute_bound_rows(terms: Mapping[str, float], rows: int, work: float) -> int:
    """Return the batch from which on compute binds: `work` seconds of compute grow with it, all the rest does not."""
    others = max(seconds for name, seconds in terms.items() if name != "compute")
    beside = max(0.0, terms["compute"] - work)
    return max(1, math.ceil(rows * max(0.0, others - beside) / work)) if work else rows


def needed(best: Judged, peaks: Mapping[str, int]) -> tuple[Capacities, int | None]:
    """Return the smallest capacities with a margin in which a run does the same as `best`, and the chunk size to pass
    with them (None: the default is right)."""
    workload, setting = as_run(best.workload, best.setting)
    best = replace(best, workload=workload, setting=setting)
    ground, capacities = best.arrangement.ground, setting.capacities
    share = capacities.device_fragment_bytes / max(1, capacities.device_bytes)
    device = min(capacities.device_bytes, _rounded(peaks["device"] / (1 - MARGIN_SHARE - IDLE_SHARE - share)))
    rooms = [(max(peaks["host"], ground.state_bytes if ground.is_whole else 0), peaks["nvme"])]
    with suppress(NoRoom):  # `manage` places homes before it knows of an optimizer with smaller states
        usual = arrange(best.workload, capacities, best.setting.chunk_bytes)
        host, nvme = (sum(usual.bytes_by_role(tier).values()) for tier in (Tier.HOST, Tier.NVME))
        rooms.append((max(host, rooms[0][0]), max(nvme, rooms[0][1])))
    spare = 2 * max(ground.home_bytes(chunk.index, "param") for chunk in ground.chunks)  # too little for a chunk
    for at_most, (host, nvme) in product((device, capacities.device_bytes), rooms):
        smaller = replace(
            capacities,
            device_bytes=at_most,
            host_bytes=min(capacities.host_bytes, _rounded((1 + MARGIN_SHARE) * host)),
            nvme_bytes=min(capacities.nvme_bytes, _rounded((1 + MARGIN_SHARE) * nvme + spare * (nvme > 0))),
            device_fragment_bytes=int(share * at_most),
        )
        if capacities.device_chunk_bytes is not None:
            smaller = replace(smaller, device_chunk_bytes=min(at_most, capacities.device_chunk_bytes))
        explicit = replace(smaller, home_copies=bool(best.arrangement.homes.get("compute")))
        if ground.is_whole:
            cap = at_most if ground.in_codes else round_up(ground.whole_bytes, MIB)
            explicit = replace(smaller, device_chunk_bytes=min(at_most, cap))
        for given, chunk_bytes in ((smaller, best.setting.chunk_bytes), (explicit, ground.staging_slot_bytes)):
            if _does_as(replace(best.setting, capacities=given, chunk_bytes=chunk_bytes), best):
                return given, chunk_bytes
    return capacities, best.setting.chunk_bytes


def _rounded(nbytes: float) -> int:
    """Return `nbytes` rounded up to whole MiB, or whole GiB from `_MANY_GIB` on."""
    return round_up(math.ceil(nbytes), GIB if nbytes >= _MANY_GIB else MIB)


_MANY_GIB = 16 * GIB


def _does_as(setting: Setting, best: Judged) -> bool:
    """Return whether a run with `setting` has the homes and the updates on the device of `best`, and is as fast."""
    workload, ground = best.workload, best.arrangement.ground
    try:
        made = arranged(workload, setting)
        usual = ground_of(workload, setting.capacities, setting.chunk_bytes)  # before the optimizer is known
        if ground.uses_nvme:
            arrange(workload, setting.capacities, setting.chunk_bytes)  # which has to have room on the drive
    except NoRoom:
        return False
    if made.homes != best.arrangement.homes or made.ground.layout != ground.layout:
        return False
    if (usual.layout, usual.staging_slots) != (ground.layout, made.ground.staging_slots):
        return False
    same_at_once = ground.staying or ground.uses_nvme or ground.copied  # what comes home gets no 16-bit copy there
    if same_at_once and usual.staying != ground.staying:
        return False
    if ground.resident:
        return best.result.device_peak_bytes <= setting.capacities.device_bytes
    found = judged(workload, setting)
    if not isinstance(found, Judged) or found.result.seconds > AS_FAST * best.result.seconds:
        return False
    one, other = found.result, best.result
    return one.moved_bytes == other.moved_bytes and one.new_bytes == other.new_bytes
