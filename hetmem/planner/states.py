"""Planning an optimizer over unmanaged parameters: the bytes of its states on each tier, and the time of an
update, of a rank of `fully_shard` or of one process. Allocates and runs nothing."""

from __future__ import annotations

import os
import textwrap
from dataclasses import dataclass, replace

import torch

from hetmem.base.config import Budget, refuse_budget
from hetmem.base.hardware import HardwareProfile
from hetmem.base.units import MIB, format_seconds, format_size, round_up
from hetmem.optim.adamw import AdamWRule
from hetmem.optim.shards import Shard
from hetmem.optim.state_memory import Placed, divided, place
from hetmem.planner.model import Builder, build
from hetmem.planner.plan import PlanError
from hetmem.planner.profiles import profile_of
from hetmem.planner.wording import as_source, count, wrapped

_UPDATE_TRAFFIC = 7
"""AdamW reads parameter, gradient and two moments, and writes all but the gradient."""
_TIERS = {"host": "in host memory", "nvme": "on NVMe"}


@dataclass(frozen=True, repr=False)
class OptimizerPlan:
    """The predicted states and updates of `hetmem.AdamW(…, budget=…)`: bytes and seconds, of the rank with most.

    `parameters` of the model that are trained, and `rank_parameters` of that rank. `state_bytes[tier]`: the states on
    "host" and "nvme"; `slots_bytes`: of host memory, through which parameters, gradients and states pass.
    `budget_bytes[tier]`: what a rank's `Budget` is to have; `missing_bytes`: to add to its `host` so that it `fits`.
    `link_bytes`: what a step moves, by link. `terms`: the busy seconds of each resource of a step; they overlap, so
    `step_seconds` is the longest one. With `overlap="backward"` a backward of that length hides nearly all of it.
    """

    model: str
    hardware: str
    parameters: int
    ranks: int
    machines: int
    offloaded: bool
    rank_parameters: int
    fits: bool
    state_bytes: dict[str, int]
    slots_bytes: int
    budget_bytes: dict[str, int]
    missing_bytes: int
    link_bytes: dict[str, int]
    terms: dict[str, float]
    step_seconds: float

    def __str__(self) -> str:
        where = f"{self.ranks} ranks" if self.ranks > 1 else "one process"
        where += f" on {self.machines} machines" if self.machines > 1 else ""
        lines = [
            f"optimizer of {self.model}, {count(self.parameters)} parameters, {where}, {self.hardware}",
            f"{count(self.rank_parameters)} of them {'in host memory' if self.offloaded else 'on the GPU'} of a rank",
            "",
            "states   " + ", ".join(f"{format_size(self.state_bytes[tier])} {name}" for tier, name in _TIERS.items()),
        ]
        if self.slots_bytes:
            lines.append(f"passing  {format_size(self.slots_bytes)} of host memory, for what comes and goes in a step")
        if not self.fits:
            lacking = f"does not fit: {format_size(self.missing_bytes)} of host memory are missing"
            return "\n".join([*lines, "", lacking + (" on each rank" if self.ranks > 1 else "")])
        terms = ", ".join(f"{what} {format_seconds(seconds)}" for what, seconds in self.terms.items() if seconds)
        hidden = 'beside a backward at least as long, overlap="backward" hides nearly all of it'
        lines += [
            wrapped(f"step     {format_seconds(self.step_seconds)} ({terms}); {hidden}", " " * 9),
            "",
            "budget = hetmem.Budget(",
            textwrap.indent(",\n".join(self._arguments()), "    ") + ",",
            ")  # of each rank" if self.ranks > 1 else ")",
            "optimizer = hetmem.AdamW(model.parameters(), budget=budget)",
        ]
        return "\n".join(lines)

    __repr__ = __str__

    def _arguments(self) -> list[str]:
        found = [f"host={as_source(self.budget_bytes['host'])}"]
        if self.budget_bytes["nvme"]:
            found += [f"nvme={as_source(self.budget_bytes['nvme'])}", 'nvme_dir="/path/on/the/drive"']
        return found


def plan_optimizer(
    build_model: Builder,
    budget: Budget | None = None,
    *,
    hardware: HardwareProfile | str | os.PathLike[str] | None = None,
    ranks: int = 1,
    machines: int = 1,
    offloaded: bool = False,
) -> OptimizerPlan:
    """Plan `hetmem.AdamW(model.parameters(), budget=budget)` for the model that `build_model()` returns.

    `hardware` is as for `hetmem.plan`. `budget` is a rank's: a `host` that it leaves open is the rank's share of the
    memory that the machine has. Parameters are
    divided among `ranks` as `fully_shard` divides them, on as many `machines`; they are in host memory if `offloaded`
    (`CPUOffloadPolicy`), else on a GPU. Raises `PlanError` for a model that cannot be built on the meta device, or
    numbers of ranks that do not go together, and `ProfileError` for a bad profile.
    """
    refuse_budget(budget)
    profile = profile_of(hardware)
    for name, number in (("ranks", ranks), ("machines", machines)):
        if type(number) is not int or number < 1:
            raise PlanError(f"{name} must be a whole number of at least 1, got {number!r}")
    if ranks % machines:
        raise PlanError(f"{ranks} ranks cannot be divided among {machines} machines: give a multiple")
    limits = (budget or Budget()).limits()
    beside = ranks // machines
    host = profile.host.memory_bytes // beside if limits.host_bytes is None else limits.host_bytes
    model = build(build_model)
    trained = [p for p in model.parameters() if p.requires_grad]
    device = torch.device("cpu" if offloaded else "cuda")
    rule, group = AdamWRule(None, None), torch.optim.AdamW([torch.zeros(1)]).defaults
    shards = [_Part(parameter, ranks, device) for parameter in trained]

    def placed_in(host: int) -> tuple[Placed, dict[str, int]]:
        blocks = divided([(each, rule.roles(group, each.dtype)) for each in shards], host)
        placed = place(blocks, [], (0, 0), host, limits.nvme_bytes)
        away = sum(block.nbytes for block, there in zip(blocks, placed.on_nvme, strict=True) if there)
        return placed, {"host": sum(block.nbytes for block in blocks) - away, "nvme": away}

    placed, on = placed_in(host)
    if not on["nvme"]:
        enough, missing = 0, on["host"] + placed.slots_bytes
        while missing:  # within a smaller budget blocks are smaller, and more of them end in a page
            enough = round_up(enough + missing, MIB)
            within, at = placed_in(enough)
            missing = within.missing_bytes
        if not placed.missing_bytes:
            host, placed, on = enough, within, at
        else:
            placed = replace(placed, missing_bytes=enough - host)
    numel = sum(each.numel for each in shards)
    moved = sum(each.numel * each.dtype.itemsize for each in shards)
    links = {
        "device to host": 0 if offloaded else 2 * moved,
        "host to device": 0 if offloaded else moved,
        "NVMe read": on["nvme"],
        "NVMe write": on["nvme"],
    }
    terms = {
        "host update": beside * _UPDATE_TRAFFIC * moved / profile.host.update_bytes_per_second,
        "device link": _both(
            (profile.device_to_host.bytes_per_second, links["device to host"]),
            (profile.host_to_device.bytes_per_second, links["host to device"]),
            profile.both_ways_bytes_per_second,
        ),
        "drive": beside
        * _both(
            (profile.nvme_read.bytes_per_second, on["nvme"]),
            (profile.nvme_write.bytes_per_second, on["nvme"]),
            profile.nvme_both_ways_bytes_per_second,
        ),
    }
    return OptimizerPlan(
        model=type(model).__name__,
        hardware=profile.name,
        parameters=sum(parameter.numel() for parameter in trained),
        ranks=ranks,
        machines=machines,
        offloaded=offloaded,
        rank_parameters=numel,
        fits=not placed.missing_bytes,
        state_bytes=on,
        slots_bytes=placed.slots_bytes,
        budget_bytes={
            "host": host + placed.missing_bytes,
            "nvme": round_up(on["nvme"], MIB),
        },
        missing_bytes=placed.missing_bytes,
        link_bytes=links,
        terms=terms,
        step_seconds=max(terms.values()),
    )


class _Part(Shard):
    """What the first rank of `ranks` has of a parameter that `fully_shard` divides by its first dimension."""

    __slots__ = ()

    def __init__(self, parameter: torch.Tensor, ranks: int, device: torch.device) -> None:
        rows = parameter.shape[0] if parameter.dim() else 1
        self.numel = -(-rows // ranks) * (parameter.numel() // max(1, rows))
        self.dtype, self.device = parameter.dtype, device


def _both(one: tuple[float, int], other: tuple[float, int], both_ways: float) -> float:
    """Return the seconds of bytes in both directions at once, each by its rate, and the sum by `both_ways` if that was
    measured."""
    together = (one[1] + other[1]) / both_ways if both_ways else 0.0
    return max(one[1] / one[0], other[1] / other[0], together)
