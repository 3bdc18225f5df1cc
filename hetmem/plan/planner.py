"""Searches what a run can be told to do, with the simulator as the judge, and says what is missing if nothing fits.

Only what `manage` and `hetmem.AdamW` do today is planned: homes in host memory, then on NVMe, in the order of roles;
the update on the host; everything on the device if it fits there, or what a step leaves room for. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from hetmem.plan.arrangement import Arrangement, arrange, check_device, state_bytes
from hetmem.plan.hardware import HardwareProfile
from hetmem.plan.layout import PAGE_ELEMENTS
from hetmem.plan.placement import Capacities, NoRoom
from hetmem.plan.rehearsal import StepResult, rehearse
from hetmem.plan.trace import Tier
from hetmem.plan.workload import Workload
from hetmem.units import format_size, round_up

MAXIMUM_SLOTS = 192
"""Models of more slots are rehearsed with proportionally larger chunks: a decision costs time with each copy it weighs,
and what crosses the links hardly depends on how finely it is cut."""

_WORTH = 0.97
"""A setting other than the default one has to be this much faster."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to run, judged. `simulated` is what was rehearsed: `arrangement`, or a coarser cut of it."""

    capacities: Capacities
    chunk_bytes: int | None
    arrangement: Arrangement
    simulated: Arrangement
    result: StepResult


@dataclass(frozen=True, slots=True)
class Variant:
    """The same training done differently by the user: how to say it, and the workload of it (traced when asked for).

    Of each `kind` the first one that fits is enough.
    """

    kind: str
    advice: str
    workload: Callable[[], Workload]
    micro_batches: int = 1


@dataclass(frozen=True, slots=True)
class Decision:
    """The best candidate, or (None) what is missing on which tier; and what to change, cheapest first."""

    workload: Workload
    micro_batches: int
    candidate: Candidate | None
    missing_bytes: dict[str, int]
    reasons: tuple[str, ...]
    advice: tuple[str, ...]
    largest_parameters: int


def decide(
    workload: Workload,
    capacities: Capacities,
    hardware: HardwareProfile,
    *,
    chunk_bytes: int | None = None,
    micro_batches: int = 1,
    variants: Sequence[Variant] = (),
) -> Decision:
    """The fastest way to run `workload` within `capacities`, or what is missing.

    `chunk_bytes` fixes the chunk size; None searches. `variants` are tried only if nothing fits.
    """
    best, refusal = search(workload, capacities, hardware, chunk_bytes, micro_batches)
    largest = _largest(workload, capacities, best)
    if best is not None:
        return Decision(workload, micro_batches, best, {}, (), _tuning(best, capacities), largest)
    assert refusal is not None
    missing = _missing(workload, capacities, hardware, chunk_bytes, micro_batches)
    advice = list(_advice(workload, capacities, hardware, missing, chunk_bytes, variants))
    return Decision(workload, micro_batches, None, missing, (str(refusal),), tuple(advice), largest)


def search(
    workload: Workload, capacities: Capacities, hardware: HardwareProfile, chunk_bytes: int | None, micro_batches: int
) -> tuple[Candidate | None, NoRoom | None]:
    """The best candidate, or why even the default one is refused."""
    best: Candidate | None = None
    refusal: NoRoom | None = None
    for room, size in _settings(workload, capacities, chunk_bytes):
        found = _judged(workload, room, hardware, size, micro_batches)
        if isinstance(found, NoRoom):
            refusal = refusal or found
        elif best is None or found.result.seconds < _WORTH * best.result.seconds:
            best = found
    return best, refusal


def judge(
    workload: Workload,
    capacities: Capacities,
    hardware: HardwareProfile,
    chunk_bytes: int | None,
    micro_batches: int,
    *,
    steps: int = 4,
) -> Candidate:
    """One candidate, rehearsed for `steps` steps; the first two know no trace, and need most. Raises `NoRoom`."""
    arrangement = arrange(workload, capacities, chunk_bytes)
    simulated = _coarser(workload, capacities, arrangement)
    check_device(workload, simulated, capacities)
    result = rehearse(workload, simulated, capacities, hardware, micro_batches=micro_batches, steps=steps)
    return Candidate(capacities, chunk_bytes, arrangement, simulated, result)


def _judged(
    workload: Workload,
    capacities: Capacities,
    hardware: HardwareProfile,
    chunk_bytes: int | None,
    micro_batches: int,
    *,
    steps: int = 4,
) -> Candidate | NoRoom:
    """`judge` with the refusal as a value."""
    try:
        return judge(workload, capacities, hardware, chunk_bytes, micro_batches, steps=steps)
    except NoRoom as refusal:
        return refusal


def _settings(
    workload: Workload, capacities: Capacities, chunk_bytes: int | None
) -> Iterator[tuple[Capacities, int | None]]:
    """What to try, the default first: then everything on the device, 16-bit copies at home (or none of them), and other
    chunk sizes."""
    yield capacities, chunk_bytes
    try:
        default = arrange(workload, capacities, chunk_bytes)
    except NoRoom as error:
        yield from ((capacities, size) for size in _smaller(workload, error) if chunk_bytes is None)
        return
    if default.ground.resident:
        return
    if capacities.device_chunk_bytes is None and default.ground.whole_bytes <= capacities.device_bytes:
        yield replace(capacities, device_chunk_bytes=default.ground.whole_bytes), default.ground.staging_slot_bytes
    if capacities.home_copies is None and workload.mixed_precision:
        yield replace(capacities, home_copies=not default.homes["compute"]), chunk_bytes
    if chunk_bytes is None:
        page = PAGE_ELEMENTS * default.ground.itemsize
        for factor in (0.5, 2.0):
            yield capacities, max(page, int(default.ground.staging_slot_bytes * factor) // page * page)


def _smaller(workload: Workload, error: NoRoom) -> Iterator[int]:
    """Smaller chunks, where the largest one with its neighbours did not fit."""
    if error.tier is Tier.DEVICE:
        itemsize = max(spec.itemsize for spec in workload.parameters)
        size = round_up(max(spec.numel for spec in workload.parameters), PAGE_ELEMENTS) * itemsize
        yield from (round_up(size // parts, PAGE_ELEMENTS * itemsize) for parts in (1, 4, 16))


def _coarser(workload: Workload, capacities: Capacities, arrangement: Arrangement) -> Arrangement:
    """`arrangement`, or one with larger chunks if it has too many to be rehearsed quickly."""
    total = sum(chunk.span for chunk in arrangement.ground.chunks)
    factor = math.ceil(total / MAXIMUM_SLOTS)
    if factor == 1:
        return arrangement
    try:
        return arrange(workload, capacities, factor * arrangement.ground.staging_slot_bytes)
    except NoRoom:  # there is little of some tier: then larger chunks have no place
        return arrangement


# ---- what is missing ---------------------------------------------------------------------------------------------


def _missing(
    workload: Workload, capacities: Capacities, hardware: HardwareProfile, chunk_bytes: int | None, micro_batches: int
) -> dict[str, int]:
    """Bytes that make it fit when added to each tier named."""
    added: dict[str, int] = {}
    room = capacities
    for _ in range(24):
        refusal = _judged(workload, room, hardware, chunk_bytes, micro_batches, steps=2)
        if not isinstance(refusal, NoRoom):
            return added
        more = refusal.missing_bytes
        tier = refusal.tier.name.lower()
        added[tier] = added.get(tier, 0) + more
        field = f"{tier}_bytes"
        room = replace(room, **{field: getattr(room, field) + more})
        if refusal.tier is Tier.DEVICE and room.device_chunk_bytes is not None:
            room = replace(room, device_chunk_bytes=room.device_chunk_bytes + more)
    return added


def _advice(
    workload: Workload,
    capacities: Capacities,
    hardware: HardwareProfile,
    missing: dict[str, int],
    chunk_bytes: int | None,
    variants: Sequence[Variant],
) -> Iterator[str]:
    """Changes that were judged to make it fit, cheapest first; raising the budget comes last."""
    if "device" in missing:
        tried: set[str] = set()
        for variant in variants:
            if variant.kind in tried:
                continue
            found = _judged(variant.workload(), capacities, hardware, chunk_bytes, variant.micro_batches)
            if isinstance(found, NoRoom):
                continue
            tried.add(variant.kind)
            yield f"{variant.advice}: then it fits, at {found.result.seconds:.1f} s a step"
    for tier in ("nvme", "host"):
        nbytes = missing.get(tier, 0)
        if nbytes and capacities.nvme_bytes == 0:
            room = replace(capacities, nvme_bytes=2 * state_bytes(workload))
            yield f"add an NVMe directory with {format_size(_disk_bytes(workload, room))}: Budget(nvme=…, nvme_dir=…)"
        if nbytes:
            yield f"raise Budget({tier}=…) by {format_size(nbytes)}"
    if "device" in missing:
        yield f"raise Budget(device=…) by {format_size(missing['device'])}"


def _disk_bytes(workload: Workload, room: Capacities) -> int:
    """What lies on NVMe when there is more than enough of it."""
    try:
        return sum(arrange(workload, room).bytes_by_role(Tier.NVME).values())
    except NoRoom:
        return state_bytes(workload)


def _tuning(best: Candidate, asked: Capacities) -> tuple[str, ...]:
    """What the plan sets that is not the default."""
    advice = []
    if best.capacities.device_chunk_bytes != asked.device_chunk_bytes:
        size = best.capacities.device_chunk_bytes
        advice.append(f"set Budget(device_chunks={size}): then the whole model stays on the device")
    if best.capacities.home_copies is not asked.home_copies:
        advice.append(f"set Budget(home_copies={best.capacities.home_copies})")
    if best.chunk_bytes is not None:
        advice.append(f"set chunk_bytes={best.chunk_bytes}")
    return tuple(advice)


def _largest(workload: Workload, capacities: Capacities, best: Candidate | None) -> int:
    """Parameters of the largest model of this shape (more layers of the same) that would fit; an estimate.

    Homes grow with the layers, and so does what the forward leaves on the device for the backward.
    """
    padding = 1 / (1 - best.arrangement.ground.layout.waste) if best is not None else 1.02
    homes = state_bytes(workload) * padding
    staging = (
        best.arrangement.ground.staging_slots * best.arrangement.ground.staging_slot_bytes if best is not None else 0
    )
    room = max(capacities.host_bytes + capacities.nvme_bytes - staging, 0)
    widest = 4 * max(spec.numel for spec in workload.parameters) * max(workload.compute_itemsizes)
    device = max(capacities.device_bytes - min(widest, capacities.device_bytes // 2), 0)
    scale = min(room / homes, device / max(1, workload.peak_live_bytes))
    whole = capacities.device_bytes / (homes + workload.peak_live_bytes)
    return int(workload.numel * (scale if workload.mixed_precision else max(scale, whole)))
