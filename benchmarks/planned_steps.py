"""What `hetmem.plan` says of the steps that were measured on an H100 on 2026-11-26, from what was measured beside them.

    python -m benchmarks.planned_steps

Rates are those of that run, costs of the thread those of its probe. What a thread loses beside updates follows from the
rows of the host's AdamW with 1 and 16 threads, as that version's workers ran on all CPUs but one. No number is taken
from a step. One measured row is left out: updates that overlap and leave gradients visible are no more.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial, reduce
from operator import getitem
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.gpu.models import GPT, Llama, sizes_of
from hetmem.base.config import Budget
from hetmem.base.hardware import HardwareProfile
from hetmem.planner import TracedCall, capacities_of, load_profile, plan_within

FOLDER = Path(__file__).parent / "results" / "gpu-NVIDIA-H100-80GB-HBM3-2026-11-26"
_LAYERS, _ONE_THREAD, _ALL_THREADS = 8, "host AdamW, 1 threads", "host AdamW, 16 threads"


def lines(stage: str) -> dict[str, Any]:
    """The lines of a stage by name."""
    read = (json.loads(line) for line in (FOLDER / f"{stage}.jsonl").read_text().splitlines() if line)
    return {line["name"]: line for line in read if "name" in line}


def hardware() -> HardwareProfile:
    """The machine of that run."""
    figures = load_profile("h100").to_dict()
    probed = json.loads((FOLDER / "profile.json").read_text())
    figures["thread"] = probed["thread"]
    figures["host"]["memory_bytes"] = probed["host"]["memory_bytes"]
    figures["host"]["copy_bytes_per_second"] = probed["host"]["copy_bytes_per_second"]
    for name, rate in json.loads((FOLDER / "rates.json").read_text()).items():
        *groups, last = name.split(".")
        place = reduce(getitem, groups, figures)
        if last in place:
            place[last] = rate
    made, links = HardwareProfile.from_dict(figures), lines("links")
    one, every = 1e9 * links[_ONE_THREAD]["value"], made.host.update_bytes_per_second
    beside = made.host.cores * one / every
    return replace(made, host=replace(made.host, update_core_bytes_per_second=one, beside_updates=beside))


@dataclass(frozen=True)
class Row:
    """A measured step, and its plan, in seconds."""

    name: str
    measured: float
    planned: float

    @property
    def ratio(self) -> float:
        """How many times as long as planned the step took."""
        return self.measured / self.planned


def rows() -> Iterator[Row]:
    """Yield the measured steps with what is planned now."""
    machine, streamed = hardware(), lines("streamed")
    count = sum(sizes_of(partial(Llama, _LAYERS)))
    device = machine.device.memory_bytes * 9 // 10
    for name, share in (("half", 0.5), ("all", 1.2), ("a tenth", 0.1), ("an eighth", 0.125)):
        for checkpointing in (False, True):
            for overlap in ("backward", "off"):
                written = ", overlap backward, gradients streamed" if overlap == "backward" else ", overlap off"
                of = " copies" if name == "all" else " of the copies"
                case = f"{name}{of}{', checkpointed' if checkpointing else ''}{written}: step"
                if case not in streamed:
                    continue
                host = (18 if overlap == "backward" else 20) * count + (64 << 20)
                chunks = int(share * 2 * count)
                budget = Budget(device=device, device_chunks=chunks, host=host, home_copies=True)
                build = partial(Llama, _LAYERS, checkpointing=checkpointing)
                planned = _planned(TracedCall(build, _tokens(4, 2048), None, torch.bfloat16), budget, machine, overlap)
                yield Row(case.removesuffix(": step"), streamed[case]["value"] / 1e3, planned)
    large = lines("largest")
    host = large["11 B: to build"]["details"]["host"]
    call = TracedCall(partial(GPT, 4096, 55, 50304, checkpointing=True), _tokens(8, 1024), None, torch.bfloat16)
    measured = large["11 B: later steps"]["value"]
    yield Row("11 B, checkpointed, overlap backward", measured, _planned(call, Budget(host=host), machine, "backward"))


def _tokens(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.int64, device="meta")


def _planned(call: TracedCall, budget: Budget, machine: HardwareProfile, overlap: Any) -> float:
    plan = plan_within(call, capacities_of(budget.limits(), machine), machine, compares=False, overlap=overlap)
    assert plan.step_seconds is not None
    return plan.step_seconds


def main() -> None:
    """Print the rows, and how far apart they are."""
    print("| step | planned | measured | measured / planned |")
    print("|---|---|---|---|")
    found = []
    for row in rows():
        found.append(row.ratio)
        print(f"| {row.name} | {row.planned:.3f} s | {row.measured:.3f} s | {row.ratio:.2f} |", flush=True)
    middle = median(found)
    print(
        f"\n{min(found):.2f} to {max(found):.2f}, median {middle:.2f}; from there {min(found) / middle - 1:+.0%} to "
        f"{max(found) / middle - 1:+.0%}"
    )


if __name__ == "__main__":
    main()
