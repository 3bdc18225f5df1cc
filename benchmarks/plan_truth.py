"""What `hetmem.plan` says against what a run does: peaks of every tier and step time, as a Markdown table.

    python -m benchmarks.plan_truth [--profile probe.json] [--steps 8] [--width 384] [--overlap backward]

Runs on the simulated accelerator with set link speeds. The host update and the disk come from the probe, the latency of
the links is that of the threads that stand for them. A machine that is shared changes its speed by half within minutes,
so two things are measured between the steps of each run: a plain forward and backward, by which compute is calibrated
(one number, that scales all operators), and what hetmem takes of the training thread, on other models (`overheads`).
"""

from __future__ import annotations

import argparse
import gc
import queue
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

import hetmem
from benchmarks.thread_costs import Overheads
from hetmem import planner
from hetmem.base.hardware import HardwareProfile, Rate, ThreadCosts
from hetmem.base.units import MIB
from hetmem.memory.transfer import Finished, Job, ThreadCopier
from hetmem.planner.model import trace
from hetmem.planner.workload import Workload
from hetmem.schedule.blocks import Link
from hetmem.tools.probe import probe

VOCABULARY, TOKENS, ROWS, HEADS = 4096, 128, 4, 8


class Attention(nn.Module):
    """Multi-head attention, of a sequence to itself or to another one."""

    def __init__(self, width: int, *, causal: bool) -> None:
        super().__init__()
        self.query, self.rest, self.out = nn.Linear(width, width), nn.Linear(width, 2 * width), nn.Linear(width, width)
        self.causal = causal

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        """x: [rows, tokens, width], other: [rows, tokens of the other sequence, width]."""
        query = self.query(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        key, value = self.rest(other).unflatten(-1, (2, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return self.out(
            scaled_dot_product_attention(query, key, value, is_causal=self.causal).transpose(1, 2).flatten(2)
        )


class Experts(nn.Module):
    """Four experts that see every token; a softmax over the best two weights them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, 4, bias=False)
        self.up = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(4))
        self.down = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """x: [rows, tokens, width]."""
        best, chosen = self.gate(x).topk(2, dim=-1)
        weights = torch.zeros_like(x[..., :4]).scatter(-1, chosen, best.softmax(-1))
        parts = [weights[..., i, None] * self.down[i](gelu(self.up[i](x))) for i in range(4)]
        return torch.stack(parts).sum(0)


class Block(nn.Module):
    """A pre-norm transformer block, with attention to another sequence if it is `crossed`."""

    def __init__(self, width: int, *, causal: bool = True, crossed: bool = False, experts: bool = False) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3 if crossed else 2))
        self.attention = Attention(width, causal=causal)
        self.cross = Attention(width, causal=False) if crossed else None
        dense = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.mlp = Experts(width) if experts else dense

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        """x, other: [rows, tokens, width]."""
        normed = self.norms[0](x)
        x = x + self.attention(normed, normed)
        if self.cross is not None:
            x = x + self.cross(self.norms[1](x), other)
        return x + self.mlp(self.norms[-1](x))


class Language(nn.Module):
    """Embedding, blocks, head; the loss of the next token. With `encoder` blocks, of one sequence given another."""

    def __init__(self, width: int, blocks: list[Block], encoder: list[Block]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.encoder, self.blocks = nn.ModuleList(encoder), nn.ModuleList(blocks)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """x, y: int64 [rows, tokens]."""
        hidden = self.embedding(x)
        for block in self.encoder:
            hidden = block(hidden)
        other, hidden = (hidden, self.embedding(y)) if self.encoder else (None, hidden)
        for block in self.blocks:
            hidden = block(hidden, other)
        return cross_entropy(self.head(hidden).flatten(0, 1), y.flatten())


def builders(width: int) -> dict[str, Callable[[], nn.Module]]:
    """The three shapes."""
    return {
        "GPT": lambda: Language(width, [Block(width) for _ in range(10)], []),
        "MoE": lambda: Language(width, [Block(width, experts=True) for _ in range(4)], []),
        "encoder-decoder": lambda: Language(
            width, [Block(width, crossed=True) for _ in range(4)], [Block(width, causal=False) for _ in range(4)]
        ),
    }


@dataclass
class Case:
    """One budget: what of the states has room where, and how fast the links are."""

    name: str
    device: float  # shares of the model's parameters, beside what activations need
    host: float  # shares of its states
    link: str | None


CASES = (
    Case("all on the device", 20.0, 2.0, None),
    Case("host, links at 2 GB/s", 0.5, 1.2, "2GB"),
    Case("host and NVMe, links at 2 GB/s", 0.5, 0.6, "2GB"),
)


def calibrated(base: HardwareProfile, work: Workload, seconds: float) -> HardwareProfile:
    """`base` with the device scaled so that a plain forward and backward takes `seconds`."""
    factor = work.compute_seconds(base.device) / seconds
    device = replace(
        base.device,
        bytes_per_second=base.device.bytes_per_second * factor,
        matrix_flops={name: rate * factor for name, rate in base.device.matrix_flops.items()},
        operator_seconds=base.device.operator_seconds / factor,
    )
    return replace(base, device=device)


def handed_over_seconds(rounds: int = 200) -> float:
    """The latency of a link of the simulated device: a thread takes the copy and sleeps for as long as it lasts."""
    done: queue.SimpleQueue[Finished] = queue.SimpleQueue()
    link = Link.DEVICE_TO_HOST
    copier = ThreadCopier({link: 2 * 10**9}, lambda job, start, end: None, done.put)
    start = time.perf_counter()
    for _ in range(rounds):
        copier.start(Job(None, link, lambda: None, 1), ())
    for _ in range(rounds):
        done.get()
    seconds = (time.perf_counter() - start) / rounds
    copier.close()
    return seconds


@dataclass
class Seen:
    """What a run did: its report, the median of its steps, of the plain ones between them, and the steps' spread.
    `costs`: what hetmem took of the training thread meanwhile."""

    report: dict[str, Any]
    step_seconds: float
    plain_seconds: float
    spread: float
    costs: ThreadCosts


def run(build: Callable[[], nn.Module], batch: tuple[Tensor, ...], plan: planner.Plan, case: Case, steps: int) -> Seen:
    """Train, with a plain forward and backward beside each step, and a round of what measures the thread's costs: the
    machine may be shared, and drift hits all. They take turns in going first, as what runs behind an update finds other
    things in the caches."""
    device = hetmem.SimDevice(host_to_device=case.link, device_to_host=case.link)
    plain = build()
    model = hetmem.manage(build(), plan.budget, device=device, chunk_bytes=plan.chunk_bytes)
    optimizer, overheads = hetmem.AdamW(model.parameters(), **plan.optimizer), Overheads()  # type: ignore[arg-type]

    def alone() -> None:
        plain(*batch).backward()

    def managed() -> None:
        model(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    times: dict[Callable[[], None], list[float]] = {alone: [], managed: []}
    for step in range(steps):
        for what in (alone, managed) if step % 2 else (managed, alone):
            start = time.perf_counter()
            what()
            times[what].append(time.perf_counter() - start)
            plain.zero_grad()
        overheads.step()
    report = hetmem.report(model).to_dict()
    hetmem.release(model)
    late = times[managed][4:]
    return Seen(report, median(late), median(times[alone][4:]), max(late) / min(late), overheads.result())


def main() -> None:
    """Plan, run, compare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--profile", help="a file of `hetmem probe`; default: probe now")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--only", help="one of the shapes")
    parser.add_argument("--overlap", default="off", help="of hetmem.AdamW")
    options = parser.parse_args()
    torch.set_num_threads(1)
    how = {"overlap": options.overlap}
    base = planner.load_profile(options.profile) if options.profile else probe()
    print("| shape | budget | tier peaks: plan / run (off) | step: plan / run (off) | run's spread | binds |")
    print("|---|---|---|---|---|---|")
    torch.manual_seed(0)
    batch = tuple(torch.randint(0, VOCABULARY, (ROWS, TOKENS)) for _ in range(2))
    for shape, build in builders(options.width).items():
        if options.only in (None, shape):
            work = trace(planner.TracedCall(build, batch))
            for case in CASES:
                print(row(shape, case, build, batch, work, base, options.steps, how), flush=True)
                gc.collect()


def planned(
    build: Callable[[], nn.Module],
    batch: tuple[Tensor, ...],
    budget: hetmem.Budget,
    hardware: HardwareProfile,
    chunk_bytes: int | None,
    how: dict[str, Any],
) -> planner.Plan:
    """Plan what is asked for, and nothing cheaper that would change the program."""
    limits = budget.limits()
    return planner.plan_within(
        planner.TracedCall(build, batch),
        planner.capacities_of(limits, hardware),
        hardware,
        nvme_directories=tuple(map(str, limits.nvme_directories)),
        chunk_bytes=chunk_bytes,
        compares=False,
        **how,
    )


def row(
    shape: str,
    case: Case,
    build: Callable[[], nn.Module],
    batch: tuple[Tensor, ...],
    work: Workload,
    hardware: HardwareProfile,
    steps: int,
    how: dict[str, str],
) -> str:
    """One line of the table: settings are planned, then run, then judged with the compute seen meanwhile."""
    weights = sum(spec.numel * spec.itemsize for spec in work.parameters)
    with tempfile.TemporaryDirectory() as directory:
        nvme = {"nvme": 8 * weights, "nvme_dir": directory} if case.host < 1 else {}
        device = int(case.device * weights + work.peak_live_bytes)
        budget = hetmem.Budget(device=device, host=int(case.host * 4 * weights), **nvme)
        if case.link is not None:
            link = Rate(float(hetmem.SimDevice(host_to_device=case.link).host_to_device or 0), handed_over_seconds())
            hardware = replace(hardware, host_to_device=link, device_to_host=link)
        plan = planned(build, batch, budget, hardware, None, how)
        if not plan.fits:
            return f"| {shape} | {case.name} | does not fit: {plan.missing_bytes} | | | |"
        seen = run(build, batch, plan, case, steps)
        hardware = replace(calibrated(hardware, work, seen.plain_seconds), thread=seen.costs)
        plan = planned(build, batch, plan.budget, hardware, plan.slot_bytes, how)
    peaks = []
    for tier in ("device", "host", "nvme"):
        expected, got = plan.peak_bytes[tier], seen.report["tiers"][tier]["peak_bytes"]
        if expected or got:
            peaks.append(f"{tier} {expected / MIB:.1f} / {got / MIB:.1f} MiB ({expected / max(got, 1) - 1:+.1%})")
    assert plan.step_seconds is not None
    step = f"{plan.step_seconds:.3f} / {seen.step_seconds:.3f} s ({plan.step_seconds / seen.step_seconds - 1:+.1%})"
    return f"| {shape} | {case.name} | {'; '.join(peaks)} | {step} | {seen.spread:.2f} | {plan.binding} |"


if __name__ == "__main__":
    main()
