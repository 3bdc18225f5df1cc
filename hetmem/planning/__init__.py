"""`hetmem.plan(…)`: from a function that builds a model to a `Plan`, with no memory taken and nothing run.

Traces on `meta`, then asks the pure planner. It moves no data and manages nothing.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch

from hetmem.config import Budget, Limits
from hetmem.plan.hardware import HardwareProfile
from hetmem.plan.placement import Capacities
from hetmem.plan.planner import Variant, decide
from hetmem.plan.workload import Workload
from hetmem.planning.huggingface import hugging_face_call
from hetmem.planning.modeltrace import Builder, Call, checkpointed, divided, trace
from hetmem.planning.plan import Plan, PlanError, plan_of
from hetmem.planning.profiles import known_profiles, load_profile
from hetmem.units import parse_size

__all__ = [
    "Call",
    "Capacities",
    "Plan",
    "PlanError",
    "hugging_face_call",
    "known_profiles",
    "load_profile",
    "plan",
    "plan_within",
]

DEFAULT_HARDWARE = "h100"


def plan(
    build_model: Builder,
    batch: Any,
    budget: Budget | None = None,
    hardware: HardwareProfile | str | os.PathLike[str] | None = None,
    *,
    loss: Callable[[Any], torch.Tensor] | None = None,
    mixed_precision: torch.dtype | None = None,
    chunk_bytes: int | str | None = None,
    micro_batches: int = 1,
) -> Plan:
    """What training the model that `build_model()` builds will take and how long a step will last.

    `batch` is what the model is called with: a tuple, a dict of keywords or one tensor (shapes count, values do not).
    `hardware`: a profile, the name of a shipped one, or the path of one that `hetmem probe` wrote; None: the h100's.
    `budget`: as for `manage`; what it does not say is the memory that `hardware` has. `loss`: from the model's output
    to the scalar that is differentiated (None: its `.loss`, or the output itself). `micro_batches`: how many forwards
    and backwards come before a step. Other keywords as for `manage`. No memory is taken and nothing runs: bytes, and
    seconds by the simulator with the rates of `hardware`.

    Raises `PlanError` if the model cannot be built on `meta` or refuses the batch, `ProfileError` for a bad profile.
    A model that does not fit is no error: `.fits` is False then, and `.missing_bytes` and `.advice` say what to do.
    """
    profile = hardware if isinstance(hardware, HardwareProfile) else load_profile(hardware or DEFAULT_HARDWARE)
    limits = (budget or Budget()).limits()
    call = Call(build_model, batch, loss, mixed_precision)
    return plan_within(
        call,
        capacities_of(limits, profile),
        profile,
        chunk_bytes=None if chunk_bytes is None else parse_size(chunk_bytes, "chunk_bytes"),
        micro_batches=micro_batches,
        nvme_directories=tuple(str(path) for path in limits.nvme_directories),
    )


def plan_within(
    call: Call,
    capacities: Capacities,
    hardware: HardwareProfile,
    *,
    chunk_bytes: int | None = None,
    micro_batches: int = 1,
    nvme_directories: tuple[str, ...] = (),
) -> Plan:
    """As `plan`, within plain bytes: for machines that are not this one."""
    if micro_batches < 1:
        raise PlanError(f"micro_batches must be at least 1, got {micro_batches}")
    workload = trace(call)
    activations = {"as written": workload.peak_live_bytes}
    light = checkpointed(call)
    if light is not None and light.peak_live_bytes < workload.peak_live_bytes:
        activations["with checkpointing"] = light.peak_live_bytes
    decision = decide(
        workload,
        capacities,
        hardware,
        chunk_bytes=chunk_bytes,
        micro_batches=micro_batches,
        variants=list(_variants(call, light, workload, micro_batches)),
    )
    return plan_of(decision, capacities, hardware, activations, nvme_directories)


def capacities_of(limits: Limits, hardware: HardwareProfile) -> Capacities:
    """`limits`, with what they do not say taken from the machine."""
    device, host = limits.device_bytes, limits.host_bytes
    return Capacities(
        hardware.device.memory_bytes if device is None else device,
        hardware.host.memory_bytes if host is None else host,
        limits.nvme_bytes,
        limits.device_chunk_bytes,
        int(hardware.device.allocator_share * (hardware.device.memory_bytes if device is None else device)),
        limits.home_copies,
    )


def _variants(call: Call, light: Workload | None, workload: Workload, micro_batches: int) -> Iterator[Variant]:
    """Ways to need less of the device, the cheapest first."""
    for parts in (2, 4, 8, 16):
        if workload.rows % parts == 0:
            how = f"split the batch into {parts} micro-batches of {workload.rows // parts} and accumulate gradients"
            traced = functools.partial(_trace_part, call, parts)
            yield Variant("divide", how, traced, micro_batches * parts)
    if light is not None:
        how = "checkpoint the activations of every layer (a third more compute)"
        yield Variant("checkpoint", how, lambda: light, micro_batches)


def _trace_part(call: Call, parts: int) -> Workload:
    return trace(divided(call, parts))
