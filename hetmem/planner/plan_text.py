"""A plan as text of at most 80 columns: what fits, what a step waits for, what to change, and a block to paste.

Computes nothing but shares and sums.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hetmem.base.units import format_seconds, format_size

MARGIN_SHARE = 0.05
"""Of the planned peak of a tier: so much more a run is given."""
TIERS = ("device", "host", "nvme")
_WIDTH = 80
_SHOWN = 4
"""Kinds of tensors at the peak that are named."""
_LOGITS_SHARE = 0.25
"""Of what is on the device beside chunks: from there on logits are told of."""
_FULL_WRITES = 600
"""A drive is rated for, by the makers of common ones."""
_DAY = 86400

_RESOURCES = {
    "compute": "compute",
    "host_to_device": "host to device",
    "device_to_host": "device to host",
    "update": "optimizer update",
    "nvme_read": "NVMe read",
    "nvme_write": "NVMe write",
}


@dataclass(frozen=True, repr=False)
class Figures:
    """What a `planner.plan.Plan` says; that tells what each of them is."""

    model: str
    hardware: str
    parameters: int
    rows: int
    tokens: int
    micro_batches: int
    checkpointing: bool
    mixed_precision: str | None
    fits: bool
    capacity_bytes: dict[str, int]
    budget_bytes: dict[str, int]
    peak_bytes: dict[str, int]
    role_bytes: dict[str, dict[str, int]]
    step_seconds: float | None
    stall_seconds: float | None
    terms: dict[str, float]
    binding: str | None
    link_bytes: dict[str, int]
    flops: int
    activations: str
    activation_bytes: dict[str, int]
    activation_choices: tuple[dict[str, Any], ...]
    layers: dict[str, Any] | None
    chunk_waste: float
    slot_bytes: int
    chunk_bytes: int | None
    device_chunks: int | None
    home_copies: bool | None
    device_update_share: float
    streamed_update_share: float
    streaming: dict[str, float] | None
    profile: dict[str, Any] | None
    profile_name: str | None
    optimizer: dict[str, Any]
    alternatives: tuple[dict[str, Any], ...]
    approximations: tuple[dict[str, Any], ...]
    combined: dict[str, Any] | None
    inference: bool
    setup: tuple[str, ...]
    at_peak: tuple[dict[str, Any], ...]
    peak_operator: str
    logits_bytes: int
    compute_bound_rows: int | None
    largest_parameters: int
    missing_bytes: dict[str, int]
    reasons: tuple[str, ...]
    advice: tuple[str, ...]
    nvme_directories: tuple[str, ...]


def line(plan: Figures) -> str:
    """`plan` in one line: whether it fits, how fast it is, what binds, and the peak of each tier."""
    if not plan.fits or plan.step_seconds is None or plan.binding is None:
        missing = ", ".join(f"{tier} {format_size(nbytes)}" for tier, nbytes in plan.missing_bytes.items() if nbytes)
        return f"<Plan of {plan.model}: does not fit; missing: {missing or 'see str()'}>"
    peaks = ", ".join(f"{tier} {format_size(nbytes)}" for tier, nbytes in plan.peak_bytes.items() if nbytes)
    binds = _RESOURCES.get(plan.binding, plan.binding)
    return f"<Plan of {plan.model}: {format_seconds(plan.step_seconds)} a step, {binds} binds; peak: {peaks}>"


def text(plan: Figures, best: Figures, code: str, *, is_to_be_saved: bool) -> str:
    """The whole of `plan`, one figure a line, and the `code` of `best`, which holds if that plan `is_to_be_saved`."""
    parts = [*_head(plan), "", *_tiers(plan), "", *(_time(plan) if plan.fits else _refusal(plan))]
    return "\n".join([*parts, *_choices(plan), *_block(plan, best, code, is_to_be_saved)])


def _wrapped(text: str, indent: str = "  ") -> str:
    return textwrap.fill(text, _WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _count(number: float) -> str:
    """`number` as people say it: 70.6 B."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number:.0f}"


def _head(plan: Figures) -> Iterator[str]:
    precision = "16-bit compute" if plan.mixed_precision else "as its weights are"
    kind = "rows" if plan.tokens == plan.rows else "tokens"
    size, batch = f"{_count(plan.parameters)} parameters", f"{plan.tokens} {kind} a batch"
    batch += ", every layer checkpointed" if plan.checkpointing else ""
    batch += ", inference" if plan.inference else ""
    yield _wrapped(f"{plan.model}: {size}, {precision}, {batch}, {plan.hardware}")
    yield "fits" if plan.fits else "DOES NOT FIT"


def _tiers(plan: Figures) -> Iterator[str]:
    yield f"{'tier':7}{'peak':>11}{'budget':>12}   of which"
    for tier in TIERS:
        there = plan.role_bytes[tier].items()
        roles = ", ".join(f"{role} {format_size(nbytes)}" for role, nbytes in there if nbytes)
        if sum(nbytes for _, nbytes in there) > plan.peak_bytes[tier]:
            roles += " (the most of each, at different moments)"
        peak, budget = format_size(plan.peak_bytes[tier]), format_size(plan.budget_bytes[tier])
        yield _wrapped(f"{tier:7}{peak:>11} {budget:>11}   {roles}".rstrip(), " " * 33)
    if plan.fits:
        limits = ", ".join(f"{tier} {format_size(plan.capacity_bytes[tier])}" for tier in TIERS)
        margin = f"{MARGIN_SHARE:.0%} more, on the device what must stay free too"
        back = ""
        if plan.budget_bytes["host"] and not plan.peak_bytes["host"]:
            back = "; host memory is for the model to move to if a later batch needs the device"
        yield _wrapped(f"budget: the peak and {margin}{back}; planned within {limits}")
    others = [f"{how} {format_size(nbytes)}" for how, nbytes in plan.activation_bytes.items()]
    yield _wrapped(f"activations: {', '.join(others)}")
    for each in plan.activation_choices:
        seconds = each["step_seconds"]
        how = "does not fit" if seconds is None else f"{format_seconds(seconds)} a step"
        moved = f"{format_size(each['moved_bytes'])} moved"
        moved += f", {format_size(each['nvme_bytes'])} of it to NVMe" if each["nvme_bytes"] else ""
        most = f"batches or sequences up to {each['times']:.2f} times as large fit: {each['rows']:,} rows"
        most += f", or a sequence of {each['sequence']:,}" if plan.tokens > plan.rows else ""
        yield _wrapped(f"activations={each['choice']}: {how}, {moved}, {format_size(each['kept_bytes'])} kept; {most}")
    largest = ", ".join(f"{each['what']} {format_size(each['bytes'])}" for each in plan.at_peak[:_SHOWN])
    if largest:
        yield _wrapped(f"most at {plan.peak_operator}: {largest}")
    if not plan.inference and plan.logits_bytes > _LOGITS_SHARE * max(plan.activation_bytes.values(), default=0):
        yield _wrapped(
            f"logits and their gradients are {format_size(plan.logits_bytes)} of that: a loss that is computed in "
            f"chunks of tokens avoids them (torch.nn.functional.linear_cross_entropy, from torch 2.13)"
        )


def _time(plan: Figures) -> Iterator[str]:
    seconds = plan.step_seconds
    assert seconds is not None
    kind = "rows" if plan.tokens == plan.rows else "tokens"
    speed = f"{plan.tokens * plan.micro_batches / seconds:.1f} {kind}/s, {plan.flops / seconds / 1e12:.1f} TFLOP/s"
    yield f"step: {format_seconds(seconds)}, {speed}; overlap {max(plan.terms.values()) / seconds:.2f}"
    for name, busy in plan.terms.items():
        mark = "  <- binds" if name == plan.binding else ""
        yield f"  {_RESOURCES.get(name, name):22}{format_seconds(busy):>12}{mark}"
    yield f"chunks: {format_size(plan.slot_bytes)} at home, {plan.chunk_waste:.1%} unused"
    if not plan.inference:
        yield _wrapped(f"optimizer: {_updates(plan)}")
    if plan.streaming is not None:
        sent, alone = (format_seconds(plan.streaming[name]) for name in ("step_seconds", "host_step_seconds"))
        how = f"states of {plan.streaming['share']:.0%} of the parameters sent to the device for their update"
        yield _wrapped(f"judged both: {how}: {sent} a step; updated by the host: {alone}")
    if plan.link_bytes.get("nvme_write"):
        yield _wrapped(_wear(plan))
    yield f"compute binds from a batch of about {plan.compute_bound_rows} (now {plan.rows})"
    yield f"the largest model of this shape would have about {_count(plan.largest_parameters)} parameters"
    for other in plan.alternatives:
        if any(advice.startswith(other["advice"] + ": ") for advice in plan.advice):
            continue  # it is faster, and said below
        how, memory = f"{format_seconds(other['step_seconds'])} a step", format_size(other["activation_bytes"])
        how += ", states sent to the device for their update" if other.get("streamed") else ""
        yield _wrapped(f"judged too: {other['advice']}: {how}, {memory} of activations")
    yield from (_wrapped(f"do: {advice}") for advice in plan.advice)


def _updates(plan: Figures) -> str:
    """Where the parameters are updated."""
    there, sent = plan.device_update_share, plan.streamed_update_share
    streamed = f"{sent:.0%} there with their states sent for it, " if sent else ""
    return f"{there:.0%} of the parameters are updated on the device, {streamed}{1 - there - sent:.0%} by the host"


def _wear(plan: Figures) -> str:
    """How long a drive of the planned size lasts."""
    return (
        f"NVMe: {format_size(plan.link_bytes['nvme_write'])} written a step, {format_size(_daily_bytes(plan))} a day; "
        f"a drive of {format_size(plan.capacity_bytes['nvme'])} that is rated for {_FULL_WRITES} full writes lasts "
        f"{_life(plan)}"
    )


def _daily_bytes(plan: Figures) -> float:
    assert plan.step_seconds is not None
    written: float = plan.link_bytes["nvme_write"] / plan.step_seconds * _DAY
    return written


def _life(plan: Figures) -> str:
    days = _FULL_WRITES * plan.capacity_bytes["nvme"] / _daily_bytes(plan)
    return f"{days:.1f} days" if days < 10 else f"{days:.0f} days"


def _refusal(plan: Figures) -> Iterator[str]:
    missing = " and ".join(f"{format_size(nbytes)} on {tier}" for tier, nbytes in plan.missing_bytes.items())
    yield f"missing: {missing}"
    yield from (_wrapped(f"because {reason}") for reason in plan.reasons)
    yield from (_wrapped(f"{'cheapest' if at == 0 else 'or'}: {advice}") for at, advice in enumerate(plan.advice))
    if plan.largest_parameters < plan.parameters:
        yield f"what fits has about {_count(plan.largest_parameters)} parameters of this shape"


def _choices(plan: Figures) -> Iterator[str]:
    """What changes the mathematics, and is the user's to choose."""
    if plan.approximations:
        yield "changes the mathematics:"
    for other in plan.approximations:
        yield _wrapped(f"  {other['advice']}: {format_seconds(other['step_seconds'])} a step", "    ")


def _block(plan: Figures, best: Figures, code: str, is_to_be_saved: bool) -> Iterator[str]:
    if not best.fits:
        return
    assert best.step_seconds is not None
    how = f"{format_seconds(best.step_seconds)} a step"
    if plan.combined is not None and best.link_bytes.get("nvme_write"):
        how += f", a drive lasts {_life(best)}"
    if plan.combined is not None:
        peaks = ", ".join(f"{tier} {format_size(best.peak_bytes[tier])}" for tier in TIERS if best.peak_bytes[tier])
        how += f", all with the same bits; peaks {peaks}"
    yield ""
    if best.layers is not None:
        said = best.layers
        which = f"checkpoint the first {said['recomputed']} of the {said['count']} layers"
        moved, kept = format_size(said["moved_bytes"]), format_size(said["kept_bytes"])
        yield _wrapped(f"by layer: {which}; of what autograd saves then {moved} move and {kept} stay")
    yield _wrapped(f"paste ({how}):")
    yield textwrap.indent(code, "    ")
    if is_to_be_saved:
        yield _wrapped(
            'do: save it with -o plan.json and give plan="plan.json" in place of all else: keywords cannot say it all'
        )
