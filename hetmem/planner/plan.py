"""The answer to "does it fit, and how fast will it be": a `Plan`, as numbers, text and a file."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from hetmem.base.config import Budget
from hetmem.base.units import format_seconds, format_size
from hetmem.base.whole_files import write_whole
from hetmem.errors import BudgetError, HetmemError
from hetmem.planner.checks import TIERS, TUPLES, expected
from hetmem.schedule.prefetch import Prefetch

PLAN_VERSION = 4
KEPT = "kept for homes on the device"
"""The role of places that homes have left, and go back to when the device needs its memory."""
SENT_STATES = "states sent for their update"
"""The role of the slots on the device that states are brought to."""


class PlanError(HetmemError, ValueError):
    """A model cannot be planned, or a plan cannot be read; the message says why and what to do."""


@dataclass(frozen=True)
class Plan:
    """What a managed run will do. Bytes and seconds; the dicts' keys are the tiers, roles and resources by name.

    `fits`: whether the run stays within the budget. `peak_bytes[tier]`, `role_bytes[tier][role]`: the most each tier
    holds (`activations` are everything on the device that is not chunks). `terms`: the busy seconds of each resource in
    a step; `binding` is the largest of them, and `step_seconds` is what the simulator reaches (None if it does not
    fit). `compute_bound_rows`: about the batch from which on compute binds, whether or not it fits.
    `missing_bytes[tier]`: what would make it fit. `mixed_precision` is what was asked for, the name of a dtype or None,
    and so is `checkpointing` of every repeated layer, which the model has to do by itself. `chunk_bytes`,
    `device_chunks`, `home_copies` and `prefetch` are what `manage(plan=…)` sets; None where the default is as good.
    `device_update_share`: the part of the parameters that is updated on the device, where it lives;
    `streamed_update_share`: that whose states are sent there for it. `streaming`: how that compares, whichever was
    taken: the `share` that would be sent, `step_seconds` with it and `host_step_seconds` without; None where nothing
    would be sent. `profile`: where states are sent, what the run has to know of the machine for it, as of
    `HardwareProfile.to_dict`; `profile_name`: the shipped profile or the file that it came from, None if neither.
    `optimizer`: the options that `hetmem.AdamW` is to be made with, beside torch's; those not named are the default
    ones. `alternatives`: the same training done differently, where that fits: `advice`, `micro_batches`, `step_seconds`
    and `activation_bytes` of each, the fastest first.
    """

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
    peak_bytes: dict[str, int]
    role_bytes: dict[str, dict[str, int]]
    step_seconds: float | None
    stall_seconds: float | None
    terms: dict[str, float]
    binding: str | None
    link_bytes: dict[str, int]
    flops: int
    activation_bytes: dict[str, int]
    chunk_waste: float
    slot_bytes: int
    chunk_bytes: int | None
    device_chunks: int | None
    home_copies: bool | None
    prefetch: dict[str, int] | None
    device_update_share: float
    streamed_update_share: float
    streaming: dict[str, float] | None
    profile: dict[str, Any] | None
    profile_name: str | None
    optimizer: dict[str, str]
    alternatives: tuple[dict[str, Any], ...]
    compute_bound_rows: int | None
    largest_parameters: int
    missing_bytes: dict[str, int]
    reasons: tuple[str, ...]
    advice: tuple[str, ...]
    nvme_directories: tuple[str, ...]

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens (or rows) of a step by its seconds."""
        return self.tokens * self.micro_batches / self.step_seconds if self.step_seconds else None

    @property
    def overlap(self) -> float | None:
        """The largest term by the step's seconds: 1 if everything else is hidden behind it."""
        return max(self.terms.values()) / self.step_seconds if self.step_seconds else None

    @property
    def budget(self) -> Budget:
        """The budget to run with. Raises `BudgetError` if the plan uses NVMe and names no directory."""
        return self.budget_in(*self.nvme_directories)

    @property
    def decorator(self) -> str:
        """What to write before a model's class so that its instances run as planned, as Python.

        Where keywords cannot say it all (a prefetch distance, a profile without a file), it names the plan's own file.
        """
        if self.prefetch is not None or (self.profile is not None and self.profile_name is None):
            return '@hetmem.managed(plan="plan.json")'
        keywords = {
            "mixed_precision": f"torch.{self.mixed_precision}" if self.mixed_precision else None,
            "chunk_bytes": None if self.chunk_bytes is None else _size(self.chunk_bytes),
            "hardware": json.dumps(self.profile_name) if self.profile is not None else None,
        }
        said = [f"{name}={value}" for name, value in keywords.items() if value is not None]
        return f"@hetmem.managed({', '.join([self._budget_as_written(), *said])})"

    @property
    def constructor(self) -> str:
        """How to make the optimizer so that a run does as planned, as Python."""
        options = (f", {name}={json.dumps(value)}" for name, value in self.optimizer.items())
        return f"optimizer = hetmem.AdamW(model.parameters(){''.join(options)})"

    def _budget_as_written(self) -> str:
        capacity = self.capacity_bytes
        said = {"device": _size(capacity["device"]), "host": _size(capacity["host"])}
        if capacity["nvme"]:
            directories = [*self.nvme_directories] or ["/path/on/the/drive"]
            said |= {"nvme": _size(capacity["nvme"]), "nvme_dir": json.dumps(directories)}
        if self.device_chunks is not None:
            said["device_chunks"] = _size(self.device_chunks)
        if self.home_copies is not None:
            said["home_copies"] = str(self.home_copies)
        return f"hetmem.Budget({', '.join(f'{name}={value}' for name, value in said.items())})"

    @property
    def prediction(self) -> dict[str, Any]:
        """What the report of a run by this plan shows beside what it measured: the machine and the batch it is for, the
        seconds of a step and of each term by the report's names, and the peak of each tier in bytes."""
        terms = {"host_optimizer" if name == "update" else name: seconds for name, seconds in self.terms.items()}
        return {
            "hardware": self.hardware,
            "rows": self.rows,
            "micro_batches": self.micro_batches,
            "step_seconds": self.step_seconds,
            "terms": terms,
            "peak_bytes": dict(self.peak_bytes),
        }

    def with_nvme(self, *nvme_directories: str | os.PathLike[str]) -> Plan:
        """The same plan, with its files in `nvme_directories`: a plan knows no directories of other machines."""
        return replace(self, nvme_directories=tuple(os.fspath(path) for path in nvme_directories))

    def budget_in(self, *nvme_directories: str | os.PathLike[str]) -> Budget:
        """The budget to run with, NVMe in `nvme_directories`."""
        capacity, directories = self.capacity_bytes, list(nvme_directories)
        if capacity["nvme"] and not directories:
            raise BudgetError("the plan uses NVMe: say where with plan.with_nvme('/path/on/the/drive')")
        nvme = capacity["nvme"] or None
        return Budget(
            capacity["device"],
            capacity["host"],
            nvme,
            directories if nvme else None,
            device_chunks=self.device_chunks,
            home_copies=self.home_copies,
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, lists and dicts, with a version."""
        return {"version": PLAN_VERSION, **json.loads(json.dumps(asdict(self)))}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to `path` as JSON. The file appears whole or not at all; raises OSError with the old one as it
        was."""
        write_whole(Path(path), json.dumps(self.to_dict(), indent=2) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """The plan that `save` wrote. Raises `PlanError` naming the field that is wrong."""
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise PlanError(f"{os.fspath(path)} is no plan: {error}") from error
        return cls.from_dict(data)

    @classmethod
    def from_dict(cls, data: Any) -> Plan:
        """The plan that `to_dict` gave."""
        if not isinstance(data, Mapping) or data.get("version") != PLAN_VERSION:
            got = data.get("version") if isinstance(data, Mapping) else data
            raise PlanError(
                f"plan: version: expected {PLAN_VERSION}, got {got!r}: another hetmem made it; plan again with this one"
            )
        names = [spec.name for spec in fields(cls)]
        for name in names:
            if name not in data:
                raise PlanError(f"plan: {name} is missing")
            if (wanted := expected(name, data[name])) is not None:
                raise PlanError(f"plan: {name}: expected {wanted}, got {data[name]!r}")
        if data["fits"] and not (data["step_seconds"] and data["terms"] and data["binding"] in data["terms"]):
            raise PlanError("plan: one that fits has step_seconds, terms, and the longest of them as binding")
        values: dict[str, Any] = {name: tuple(data[name]) if name in TUPLES else data[name] for name in names}
        return cls(**values)

    def __str__(self) -> str:
        return _describe(self)


def _size(nbytes: int) -> str:
    """As one writes it in Python."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if nbytes and nbytes % size == 0:
            return f'"{nbytes // size}{unit}"'
    return str(nbytes)


# ---- as text --------------------------------------------------------------------------------------------------

_RESOURCES = {
    "compute": "compute",
    "host_to_device": "host to device",
    "device_to_host": "device to host",
    "update": "optimizer update",
    "nvme_read": "NVMe read",
    "nvme_write": "NVMe write",
}


def _describe(plan: Plan) -> str:
    """The whole plan as plain text, one figure a line."""
    return "\n".join([*_head(plan), "", *_tiers(plan), "", *(_time(plan) if plan.fits else _refusal(plan))])


def _count(number: float) -> str:
    """`number` as people say it: 70.6 B."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number:.0f}"


def _head(plan: Plan) -> Iterator[str]:
    precision = "16-bit compute" if plan.mixed_precision else "full precision"
    size, batch = f"{_count(plan.parameters)} parameters", f"{plan.tokens} tokens a batch"
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
    yield f"the largest model of this shape would have about {_count(plan.largest_parameters)} parameters"
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
        yield f"what fits has about {_count(plan.largest_parameters)} parameters of this shape"
