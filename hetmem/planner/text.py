"""A plan as people read it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

from hetmem.base.units import format_seconds, format_size
from hetmem.planner.checks import TIERS
from hetmem.planner.plan import Plan
from hetmem.schedule.prefetch import Prefetch

_RESOURCES = {
    "compute": "compute",
    "host_to_device": "host to device",
    "device_to_host": "device to host",
    "update": "optimizer update",
    "nvme_read": "NVMe read",
    "nvme_write": "NVMe write",
}


def describe(plan: Plan) -> str:
    """The whole plan as plain text, one figure a line."""
    return "\n".join([*_head(plan), "", *_tiers(plan), "", *(_time(plan) if plan.fits else _refusal(plan))])


def count(number: float) -> str:
    """`number` as people say it: 70.6 B."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number:.0f}"


def _head(plan: Plan) -> Iterator[str]:
    precision = "16-bit compute" if plan.mixed_precision else "full precision"
    size, batch = f"{count(plan.parameters)} parameters", f"{plan.tokens} tokens a batch"
    batch += ", every layer checkpointed" if plan.checkpointing else ""
    yield f"{plan.model}: {size}, {precision}, {batch}, {plan.hardware}"
    yield "fits" if plan.fits else "DOES NOT FIT"


def _tiers(plan: Plan) -> Iterator[str]:
    yield f"{'tier':8}{'peak':>12}{'budget':>12}   of which"
    for tier in TIERS:
        there = plan.role_bytes[tier].items()
        roles = ", ".join(f"{role} {format_size(nbytes)}" for role, nbytes in there if nbytes)
        if sum(nbytes for _, nbytes in there) > plan.peak_bytes[tier]:
            roles += " (the most of each, at different moments)"
        peak, capacity = format_size(plan.peak_bytes[tier]), format_size(plan.capacity_bytes[tier])
        yield f"{tier:8}{peak:>12} {capacity:>11}   {roles}".rstrip()
    others = [f"{how} {format_size(nbytes)}" for how, nbytes in plan.activation_bytes.items()]
    yield f"activations: {', '.join(others)}"


def _time(plan: Plan) -> Iterator[str]:
    assert plan.step_seconds is not None and plan.tokens_per_second is not None and plan.overlap is not None
    speed = f"{plan.tokens_per_second:.1f} tokens/s, {plan.flops / plan.step_seconds / 1e12:.1f} TFLOP/s"
    yield f"step: {format_seconds(plan.step_seconds)}, {speed}; overlap {plan.overlap:.2f}"
    for name, seconds in plan.terms.items():
        mark = "  <- binds" if name == plan.binding else ""
        yield f"  {_RESOURCES.get(name, name):22}{format_seconds(seconds):>12}{mark}"
    yield f"chunks: {format_size(plan.slot_bytes)} at home, {plan.chunk_waste:.1%} unused"
    if any(plan.link_bytes.values()):
        ahead = plan.prefetch or asdict(Prefetch())
        yield f"prefetch: {ahead['uses_ahead']} uses ahead, {ahead['in_flight']} copies in flight on each tier"
    yield f"optimizer: {_updates(plan)}"
    if plan.streaming is not None:
        sent, alone = (format_seconds(plan.streaming[name]) for name in ("step_seconds", "host_step_seconds"))
        how = f"states of {plan.streaming['share']:.0%} of the parameters sent to the device for their update"
        yield f"judged both: {how}: {sent} a step; updated by the host: {alone}"
    yield f"compute binds from a batch of about {plan.compute_bound_rows} (now {plan.rows})"
    yield f"the largest model of this shape would have about {count(plan.largest_parameters)} parameters"
    for other in plan.alternatives:
        how, memory = f"{format_seconds(other['step_seconds'])} a step", format_size(other["activation_bytes"])
        how += ", states sent to the device for their update" if other.get("streamed") else ""
        yield f"judged too: {other['advice']}: {how}, {memory} of activations"
    yield from (f"do: {advice}" for advice in plan.advice)
    if plan.checkpointing:
        yield "do: have the model checkpoint every layer (of transformers: model.gradient_checkpointing_enable())"
    yield f"write: {plan.decorator}"
    if plan.optimizer:
        yield f"write: {plan.constructor}"


def _updates(plan: Plan) -> str:
    """Where the parameters are updated."""
    there, sent = plan.device_update_share, plan.streamed_update_share
    streamed = f"{sent:.0%} there with their states sent for it, " if sent else ""
    return f"{there:.0%} of the parameters are updated on the device, {streamed}{1 - there - sent:.0%} by the host"


def _refusal(plan: Plan) -> Iterator[str]:
    missing = " and ".join(f"{format_size(nbytes)} on {tier}" for tier, nbytes in plan.missing_bytes.items())
    yield f"missing: {missing}"
    yield from (f"because {reason}" for reason in plan.reasons)
    yield from (f"{'cheapest' if at == 0 else 'or'}: {advice}" for at, advice in enumerate(plan.advice))
    if plan.largest_parameters < plan.parameters:
        yield f"what fits has about {count(plan.largest_parameters)} parameters of this shape"
