"""The budget that a plan asks a run to have: what it takes and a margin, and nothing lies elsewhere for that. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from hetmem.base.units import GIB, MIB, round_up
from hetmem.planner.checks import MARGIN_SHARE
from hetmem.planner.reservation import Arrangement, arrange
from hetmem.planner.search import Judged, Setting, arranged, judged
from hetmem.planner.workload import Workload
from hetmem.schedule.hardware import HardwareProfile
from hetmem.schedule.placement import Capacities, NoRoom
from hetmem.schedule.update_split import MARGIN_SHARE as IDLE_SHARE


def needed(
    workload: Workload, best: Judged, hardware: HardwareProfile, micro_batches: int, peaks: Mapping[str, int]
) -> tuple[Capacities, int | None]:
    """What a run is to be given so that it does as `best` in no more memory than that takes and a margin, and the chunk
    size that it has to be told then."""
    ground, capacities = best.arrangement.ground, best.setting.capacities
    host = max(peaks["host"], ground.state_bytes if ground.resident else 0)
    unused = MARGIN_SHARE + IDLE_SHARE + capacities.device_fragment_bytes / max(1, capacities.device_bytes)
    device = min(capacities.device_bytes, _rounded(peaks["device"] / (1 - unused)))
    nvme = min(capacities.nvme_bytes, _rounded((1 + MARGIN_SHARE) * peaks["nvme"]))
    host = min(capacities.host_bytes, _rounded((1 + MARGIN_SHARE) * host))
    for at_most in (device, capacities.device_bytes):
        smaller = replace(capacities, device_bytes=at_most, host_bytes=host, nvme_bytes=nvme)
        share = capacities.device_fragment_bytes / max(1, capacities.device_bytes)
        smaller = replace(smaller, device_fragment_bytes=int(share * at_most))
        if capacities.device_chunk_bytes is not None:
            smaller = replace(smaller, device_chunk_bytes=min(at_most, capacities.device_chunk_bytes))
        told = replace(smaller, home_copies=bool(best.arrangement.homes.get("compute")))
        if ground.resident:
            told = replace(smaller, device_chunk_bytes=min(at_most, round_up(ground.whole_bytes, MIB)))
        for given, chunk_bytes in (
            (smaller, best.setting.chunk_bytes),
            (told, best.setting.chunk_bytes),
            (told, ground.staging_slot_bytes),
        ):
            setting = replace(best.setting, capacities=given, chunk_bytes=chunk_bytes)
            try:
                same = _lies_as(arranged(workload, setting), best.arrangement)
                same = same and _stays_as(workload, given, chunk_bytes) == ground.staying
            except NoRoom:
                continue
            if same and (
                at_most == capacities.device_bytes or _runs_as(workload, setting, best, hardware, micro_batches)
            ):
                return given, chunk_bytes
    return capacities, best.setting.chunk_bytes


def _rounded(nbytes: float) -> int:
    """As people write it, and not below."""
    return round_up(math.ceil(nbytes), GIB if nbytes >= _MANY_GIB else MIB)


_MANY_GIB = 16 * GIB


def _stays_as(workload: Workload, capacities: Capacities, chunk_bytes: int | None) -> frozenset[int]:
    """The chunks that a run puts on the device, which knows nothing yet of an optimizer that keeps less."""
    try:
        ground = arrange(workload, capacities, chunk_bytes).ground
    except NoRoom:
        return frozenset()
    return ground.staying


def _lies_as(one: Arrangement, other: Arrangement) -> bool:
    """Whether all homes are the same."""
    a, b = one.ground, other.ground
    return a.layout == b.layout and a.resident == b.resident and one.homes == other.homes


def _runs_as(workload: Workload, setting: Setting, best: Judged, hardware: HardwareProfile, micro_batches: int) -> bool:
    """Whether a step as `setting` says is as fast as `best`, and updates as much on the device."""
    if best.arrangement.ground.resident:
        return best.result.device_peak_bytes <= setting.capacities.device_bytes
    found = judged(workload, setting, hardware, micro_batches)
    if not isinstance(found, Judged) or found.result.seconds > _AS_FAST * best.result.seconds:
        return False
    one, other = found.result, best.result
    moved = one.moved_bytes == other.moved_bytes and one.new_bytes == other.new_bytes
    return moved and (one.streamed_updates, one.update_slot_bytes) == (other.streamed_updates, other.update_slot_bytes)


_AS_FAST = 1.01
"""Of a step's time: what a budget without more than is needed may cost."""
