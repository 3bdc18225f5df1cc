"""What `hetmem.plan_ranks` says against what ranks on simulated devices do: peaks and step time, as a Markdown table.

    python -m benchmarks.planned_ranks [--ranks 2 4] [--link 100MB] [--steps 8] [--profile probe.json]

Each rank is a process of one thread, with links of its own of the given rate, which bind; compute, for which the ranks
share the cores of this machine, is small beside them. On a simulated device the host adds gradients: the planned step
is the one without the bytes that a GPU reads to add them, which a plan of ranks counts.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import replace
from statistics import median
from typing import Any

import torch

import hetmem
from benchmarks.plan_truth import VOCABULARY, builders, calibrated, handed_over_seconds
from hetmem import planner
from hetmem.base.hardware import Rate
from hetmem.planner.model import trace
from hetmem.testing import ranks
from hetmem.tools.probe import probe

WIDTH, ROWS, TOKENS = 256, 1, 32


def batch(rank: int) -> tuple[torch.Tensor, ...]:
    made = torch.Generator().manual_seed(rank)
    return tuple(torch.randint(0, VOCABULARY, (ROWS, TOKENS), generator=made) for _ in range(2))


def plain_seconds() -> float:
    """A forward and backward of the model without hetmem."""
    model, times = builders(WIDTH)["GPT"](), []
    for _ in range(6):
        start = time.perf_counter()
        model(*batch(0)).backward()
        times.append(time.perf_counter() - start)
    return median(times[2:])


def run(
    rank: int, budget: dict[str, Any], chunk_bytes: int, link: str, options: dict[str, Any], steps: int
) -> tuple[dict[str, int], float, float]:
    """The peaks of a rank, the median of its steps, and the longest of them divided by the shortest."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    device = hetmem.SimDevice(host_to_device=link, device_to_host=link)
    model = hetmem.manage(builders(WIDTH)["GPT"](), hetmem.Budget(**budget), device=device, chunk_bytes=chunk_bytes)
    optimizer = hetmem.AdamW(model.parameters(), **options)
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        model(*batch(rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - start)
    found = hetmem.report(model).to_dict()["tiers"]
    hetmem.release(model)
    return {tier: found[tier]["peak_bytes"] for tier in found}, median(times[3:]), max(times[3:]) / min(times[3:])


def row(count: int, on_nvme: bool, overlap: Any, link: str, steps: int, base: Any) -> str:
    """One line of the table."""
    build, kind = builders(WIDTH)["GPT"], "states on NVMe" if on_nvme else "host"
    work = trace(planner.TracedCall(build, batch(0)))
    weights = sum(spec.numel * spec.itemsize for spec in work.parameters)
    rate = Rate(float(hetmem.SimDevice(host_to_device=link).host_to_device or 0), handed_over_seconds())
    hardware = replace(calibrated(base, work, plain_seconds()), host_to_device=rate, device_to_host=rate)
    with tempfile.TemporaryDirectory() as folder:
        drive: dict[str, Any] = {"nvme": 8 * weights, "nvme_dir": folder} if on_nvme else {}
        host = (5 if on_nvme else 7) * weights
        budget = hetmem.Budget(device=int(0.6 * weights + 2 * work.peak_live_bytes), host=int(host), **drive)
        plan = hetmem.plan_ranks(build, batch(0), count, budget, hardware, chunk_bytes="1MiB", overlap=overlap)
        rank = plan.rank
        if not plan.fits or rank.step_seconds is None:
            return f"| {count} | {kind} | {overlap} | does not fit: {rank.missing_bytes} | | |"
        given: dict[str, Any] = {
            **rank.budget_bytes,
            "device_chunks": rank.device_chunks,
            "home_copies": rank.home_copies,
        }
        given |= {"nvme_dir": folder} if on_nvme else {"nvme": None}
        found = ranks(count, run, given, rank.chunk_bytes or 1 << 20, link, rank.optimizer, steps, seconds=600)
    seconds = max(seconds for _, seconds, _ in found)
    peaks = "; ".join(
        f"{tier} {plan.peak_bytes[tier]} / {found[0][0][tier]}"
        for tier in ("device", "host", "nvme")
        if found[0][0][tier]
    )
    off = rank.step_seconds / seconds - 1
    step = f"{rank.step_seconds:.3f} / {seconds:.3f} s ({off:+.1%})"
    return f"| {count} | {kind} | {overlap} | {peaks} | {step} | {max(spread for *_, spread in found):.2f} |"


def main() -> None:
    """Plan, run, compare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--link", default="100MB", help="bytes a second of each direction of each rank")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--profile", help="a file of `hetmem probe`; default: probe now")
    options = parser.parse_args()
    torch.set_num_threads(1)
    base = planner.load_profile(options.profile) if options.profile else probe()
    print(
        "| ranks | homes | overlap | peaks: plan / run | step: plan / run (off) | spread |\n|---|---|---|---|---|---|"
    )
    for on_nvme in (False, True):
        for overlap in ("off", "backward", "forward")[: 2 if on_nvme else 3]:
            for count in options.ranks:
                print(row(count, on_nvme, overlap, options.link, options.steps, base), flush=True)


if __name__ == "__main__":
    main()
