"""The answer to "does it fit, and how fast will it be": a `Plan`, as numbers, text and a file."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from hetmem.base.config import Budget
from hetmem.base.whole_files import write_whole
from hetmem.errors import BudgetError, HetmemError
from hetmem.planner.checks import TIERS, TUPLES, expected
from hetmem.planner.decide import Decision
from hetmem.planner.reservation import state_bytes
from hetmem.planner.updating import Updating
from hetmem.schedule.hardware import HardwareProfile
from hetmem.schedule.placement import Capacities
from hetmem.schedule.prefetch import Prefetch
from hetmem.schedule.trace import Tier

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
        from hetmem.planner.text import describe

        return describe(self)


def _size(nbytes: int) -> str:
    """As one writes it in Python."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if nbytes and nbytes % size == 0:
            return f'"{nbytes // size}{unit}"'
    return str(nbytes)


def plan_of(
    decision: Decision,
    capacities: Capacities,
    hardware: HardwareProfile,
    activation_bytes: dict[str, int],
    nvme_directories: tuple[str, ...],
    mixed_precision: str | None,
    profile_name: str | None = None,
    *,
    checkpointing: bool = False,
) -> Plan:
    """The plan that `decision` amounts to. `profile_name`: what `hardware` can be loaded by."""
    workload, best = decision.workload, decision.candidate
    streams = best is not None and best.setting.streamed
    roles = _roles(decision, capacities)
    compute = decision.micro_batches * workload.compute_seconds(hardware.device)
    terms = best.result.terms if best is not None else {"compute": compute}
    peaks = {name: sum(sizes.values()) for name, sizes in roles.items()}
    if best is not None:
        peaks["device"] = best.result.device_peak_bytes
    binding = max(terms, key=lambda name: terms[name]) if best is not None else None
    return Plan(
        model=workload.name,
        hardware=hardware.name,
        parameters=workload.numel,
        rows=workload.rows,
        tokens=workload.tokens,
        micro_batches=decision.micro_batches,
        checkpointing=checkpointing,
        mixed_precision=mixed_precision,
        fits=best is not None,
        capacity_bytes={name: getattr(capacities, f"{name}_bytes") for name in TIERS},
        peak_bytes=peaks,
        role_bytes=roles,
        step_seconds=best.result.seconds if best else None,
        stall_seconds=best.result.stall_seconds if best else None,
        terms=dict(terms),
        binding=binding,
        link_bytes=dict(best.result.bytes) if best else {},
        flops=workload.flops * decision.micro_batches,
        activation_bytes=activation_bytes,
        chunk_waste=best.arrangement.ground.layout.waste if best else 0.0,
        slot_bytes=best.arrangement.ground.staging_slot_bytes if best else 0,
        chunk_bytes=best.setting.chunk_bytes if best else None,
        device_chunks=(best.setting.capacities if best else capacities).device_chunk_bytes,
        home_copies=(best.setting.capacities if best else capacities).home_copies,
        prefetch=asdict(best.setting.prefetch) if best and best.setting.prefetch != Prefetch() else None,
        device_update_share=best.result.device_updates if best else 0.0,
        streamed_update_share=best.result.streamed_updates if best else 0.0,
        streaming=asdict(best.streaming) if best and best.streaming else None,
        profile=json.loads(hardware.to_json()) if streams else None,
        profile_name=profile_name if streams else None,
        optimizer=_optimizer(decision.updating),
        alternatives=tuple(asdict(other) for other in decision.alternatives),
        compute_bound_rows=_compute_bound_rows(terms, workload.rows, compute) if best else None,
        largest_parameters=decision.largest_parameters,
        missing_bytes=dict(decision.missing_bytes),
        reasons=decision.reasons,
        advice=decision.advice,
        nvme_directories=nvme_directories,
    )


def _optimizer(how: Updating) -> dict[str, str]:
    """The options that are not the default ones."""
    options = {"overlap": "forward" if how.trails else "backward"} if how.overlapped else {}
    return {**options, "gradients": "streamed"} if how.streamed_gradients else options


def _roles(decision: Decision, capacities: Capacities) -> dict[str, dict[str, int]]:
    """Bytes by tier and role; of a model that does not fit, what it would need."""
    best = decision.candidate
    if best is None:
        streamed = decision.updating.streamed_gradients
        activations, states = (
            decision.workload.peak_live_bytes,
            state_bytes(decision.workload, streamed_gradients=streamed),
        )
        beyond = max(0, states - capacities.host_bytes) if capacities.nvme_bytes else 0
        on_nvme = {"states": beyond} if beyond else {}
        return {"device": {"activations": activations}, "host": {"states": states - beyond}, "nvme": on_nvme}
    roles = {name: best.arrangement.bytes_by_role(Tier[name.upper()]) for name in TIERS}
    for tier, moved in best.result.moved_bytes.items():
        _move(roles[tier], moved, roles["device"])
    for tier, nbytes in best.result.new_bytes.items():
        roles[tier]["grad"] = roles[tier].get("grad", 0) + nbytes
    if best.result.update_slot_bytes:
        roles["device"][SENT_STATES] = best.result.update_slot_bytes
    homes = sum(roles["device"].values())
    roles["device"]["copies"] = max(0, best.result.chunk_peak_bytes - homes)
    roles["device"]["activations"] = best.result.non_model_peak_bytes
    return roles


def _move(left: dict[str, int], moved: Mapping[str, int], device: dict[str, int]) -> None:
    """Homes that go to the device leave their places behind, which stay reserved."""
    for role, nbytes in moved.items():
        gone = min(nbytes, left.get(role, 0))  # another cut into chunks was rehearsed: a little more may have moved
        left[role] = left.get(role, 0) - gone
        left[KEPT] = left.get(KEPT, 0) + gone
        device[role] = device.get(role, 0) + gone
        if not left[role]:
            del left[role]


def _compute_bound_rows(terms: Mapping[str, float], rows: int, work: float) -> int:
    """`work`, what the device computes, grows with the batch; what moves does not, nor what the thread does beside."""
    others = max(seconds for name, seconds in terms.items() if name != "compute")
    beside = max(0.0, terms["compute"] - work)
    return max(1, math.ceil(rows * max(0.0, others - beside) / work)) if work else rows
