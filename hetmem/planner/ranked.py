"""Plans of several ranks, which share the homes in the host memory of each machine: the peaks of a rank and a machine,
the bytes that host memory reads and writes in a step and that the network carries, and which other tool is better."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from hetmem.base.hardware import HardwareProfile
from hetmem.base.units import format_seconds, format_size
from hetmem.errors import printable
from hetmem.planner.plan import MARGIN_SHARE, Plan, PlanError
from hetmem.planner.wording import count, wrapped

_UPDATE_TRAFFIC = 7
"""AdamW reads parameter, gradient and two moments, and writes all but the gradient."""
_NAMES = {
    "compute": "compute",
    "host_to_device": "host to device",
    "device_to_host": "device to host",
    "host_memory": "host memory",
    "update": "optimizer update",
    "nvme_read": "NVMe read",
    "nvme_write": "NVMe write",
    "network": "network",
}
_OF_A_DRIVE = ("nvme_read", "nvme_write")
_WHOLE = 4
"""Up to so many machines each gets the sums of all others whole, as in hetmem.ranks.machines."""
_NOT_YET = {
    "moments": "float32",
    "stochastic_rounding": False,
    "activations": "keep",
    "accumulate": False,
    "tokens": None,
    "inference": False,
    "new_tokens": None,
}
"""What a group of ranks does not do yet, or a plan of one does not know, and the values that it takes."""


@dataclass(frozen=True, repr=False)
class RanksPlan:
    """The predicted step of `ranks` ranks on each of `machines` machines over one model. Bytes and seconds.

    `rank`: the plan of one of them as if it were alone, with all homes in host memory, but states on NVMe that it has
    no room for; its `budget` is that of the group: `device` of each rank, `host` and `nvme` of a machine. `peak_bytes`:
    "device" of each rank, "host" and "nvme" of a machine.
    `host_bytes`: what host memory reads and writes in a step. `network_bytes`: what a machine gets from the others in a
    step, beside its backwards. `terms`: the busy seconds of each resource of a rank, and of the host's memory, the
    drive and the network, which the ranks of a machine share; `binding` names the largest. `compute_bound_tokens`:
    about the tokens (or rows) of a rank's batch from which on compute binds. `better`: a sentence that names a tool for
    models whose states fit the GPUs; "" for this one.
    """

    ranks: int
    rank: Plan
    fits: bool
    peak_bytes: dict[str, int]
    host_bytes: int
    terms: dict[str, float]
    binding: str | None
    step_seconds: float | None
    compute_bound_tokens: int | None
    better: str
    machines: int = 1
    network_bytes: int = 0

    def __str__(self) -> str:
        rank = self.rank
        if not self.fits or self.step_seconds is None or self.binding is None:
            told = [f"{self.ranks} ranks, with all homes in host memory, as each alone would be:\n{rank}"]
            return "\n".join(told + ([wrapped(_DIVIDED)] if self.machines > 1 else []))
        kind = "rows" if rank.tokens == rank.rows else "tokens"
        lines = [
            f"{rank.model}: {count(rank.parameters)} parameters, {self.ranks} ranks{self._places()}, "
            f"{rank.tokens} {kind} a batch each, {rank.hardware}",
            f"peaks: {format_size(self.peak_bytes['device'])} on the device of each rank, "
            f"{format_size(self.peak_bytes['host'])} of the machine's host memory{self._drive()}, which they share",
            f"step: {format_seconds(self.step_seconds)}, {self._speed(kind)} in all; {_NAMES[self.binding]} binds",
            "terms: " + ", ".join(f"{_NAMES[name]} {format_seconds(seconds)}" for name, seconds in self.terms.items()),
            f"host memory reads and writes {format_size(self.host_bytes)} in a step: weights for each rank, sums of "
            f"gradients, updates",
            f"compute binds from about {self.compute_bound_tokens} {kind} a rank on",
        ]
        if self.network_bytes:
            lines.append(
                f"each machine gets {format_size(self.network_bytes)} of the others' sums in a step, beside its "
                f"backwards, all but the last chunk"
            )
        lines += [self.better] if self.better else []
        arguments = ", ".join(rank.keywords)
        code = ["", f"model = hetmem.manage(model, {arguments})", rank.constructor]
        nodes = f"--nnodes={self.machines} " if self.machines > 1 else ""
        run = f"# torchrun {nodes}--nproc-per-node={self.ranks} train.py"
        return printable("\n".join([*map(wrapped, lines), *code, run]))

    __repr__ = __str__

    def _drive(self) -> str:
        nbytes = self.peak_bytes["nvme"]
        return f" and {format_size(nbytes)} of its NVMe" if nbytes else ""

    def _places(self) -> str:
        return f" on each of {self.machines} machines" if self.machines > 1 else ""

    def _speed(self, kind: str) -> str:
        assert self.step_seconds is not None
        tokens = self.machines * self.ranks * self.rank.tokens * self.rank.micro_batches
        return f"{count(tokens / self.step_seconds)} {kind}/s"


def refuse_options(options: dict[str, Any], *, frozen: object, nvme_directories: int) -> None:
    """Raise `PlanError` for options that a group of ranks does not have yet."""
    asked = [f"{name}={options[name]!r}" for name, value in _NOT_YET.items() if options.get(name, value) != value]
    asked += ["frozen="] * (frozen is not None) + ["several NVMe directories"] * (nvme_directories > 1)
    if asked:
        raise PlanError(f"a plan of several ranks does not have {', '.join(asked)} yet: see docs/ranks.md")


def of_ranks(
    rank: Plan, hardware: HardwareProfile, ranks: int, machines: int = 1, network: float | None = None
) -> RanksPlan:
    """Return the plan of `ranks` ranks on each of `machines`, of which each alone would run as `rank`, with all homes
    in host memory. `network`: bytes a second that a machine gets."""
    for name, number in (("ranks", ranks), ("machines", machines)):
        if type(number) is not int or number < 1:
            raise PlanError(f"{name} must be a whole number of at least 1, got {number!r}")
    if (network is None) != (machines == 1):
        raise PlanError("a plan of several machines needs network=, the bytes a second that each gets, and none of one")
    peaks = {tier: rank.peak_bytes[tier] for tier in ("device", "host", "nvme")}
    if not rank.fits or rank.step_seconds is None:
        return RanksPlan(ranks, rank, False, peaks, 0, {}, None, None, None, "", machines)
    link_in, out = (rank.link_bytes.get(name, 0) for name in ("host_to_device", "device_to_host"))
    once = out // rank.micro_batches  # the gradients of one backward; all but the first of a step are added
    sums = once * (2 * ranks * rank.micro_batches - 1)
    moments = sum(rank.role_bytes[tier].get("exp_avg", 0) for tier in ("host", "nvme"))
    updates = moments * _UPDATE_TRAFFIC
    updates += sum(rank.link_bytes.get(name, 0) for name in _OF_A_DRIVE)  # to and from staging
    updates += rank.role_bytes["host"].get("compute", 0)
    host, rate = ranks * link_in + sums, hardware.host.ranks_traffic_bytes_per_second
    uses = {name: name not in _OF_A_DRIVE or rank.peak_bytes["nvme"] > 0 for name in _NAMES if name != "network"}
    terms = {name: rank.terms.get(name, 0.0) for name, used in uses.items() if used}
    sent = 0
    if network is not None:
        others = machines - 1
        parts = others if machines <= _WHOLE else 2 * others / machines
        sent = math.ceil(parts * rank.role_bytes["host"].get("grad", 0)) * rank.micro_batches
        terms["network"] = sent / network
    if ranks > 1:  # what is added comes to the device before
        terms["host_to_device"] += once / hardware.host_to_device.bytes_per_second
    terms["host_memory"] = (host + updates) / rate
    behind = max(terms.get(name, 0.0) for name in ("update", *_OF_A_DRIVE))
    if rank.optimizer.get("overlap"):
        passes = seconds = max(rank.step_seconds, *terms.values())
    else:
        passes = max(rank.step_seconds - behind, terms["host_to_device"], host / rate)
        seconds = passes + max(behind, updates / rate)
    seconds += max(0.0, terms.get("network", 0.0) - passes / 2)  # backwards take half of the passes at least
    longest = max(value for name, value in terms.items() if name != "compute")
    bound = math.ceil(rank.tokens * longest / terms["compute"]) if terms["compute"] else None
    return RanksPlan(
        ranks,
        rank,
        True,
        peaks,
        host + updates,
        terms,
        max(terms, key=lambda name: terms[name]),
        seconds,
        bound,
        _better(rank, ranks),
        machines,
        sent,
    )


_DIVIDED = (
    "Each machine keeps a whole copy of the states. Where one has no room for it they have to be divided among the "
    "machines: fully_shard with hetmem.AdamW(budget=…), as hetmem plan --optimizer-only --ranks … --machines … plans it"
)


def _better(rank: Plan, ranks: int) -> str:
    """Return the sentence about a tool that keeps all states on the GPUs, if these have room."""
    homes = sum(nbytes for role, nbytes in rank.role_bytes["host"].items() if role != "staging")
    beside, room = rank.role_bytes["device"].get("activations", 0), rank.capacity_bytes["device"]
    if (1 + MARGIN_SHARE) * (homes + beside) <= room:
        return (
            "A replica with all its states fits each GPU: DistributedDataParallel is the better tool, as nothing has "
            "to cross a link but gradients"
        )
    if (1 + MARGIN_SHARE) * (homes / ranks + beside + rank.slot_bytes) <= room:
        return (
            f"The states fit the {ranks} GPUs together: FSDP2 (fully_shard) is the better tool, as weights come from "
            f"other GPUs and not from host memory"
        )
    return ""
