"""What reading ahead of the device hides, as Markdown tables: python -m benchmarks.read_ahead [--dir DIRECTORY]

Weights live on NVMe and pass through host staging, or in host memory: forwards alone, and forwards with their backward,
of 96 blocks that four operators use in a row, on the simulator with the figures of a shipped profile. A cell is the
time of a pass over the least there can be, which is the longer one of compute and of the reads that were made, and how
many blocks it read. The numbers are the same on every machine.

With `--dir` a model of 24 linear layers (16 MiB each) computes forwards under `no_grad` on the simulated accelerator
instead, with room for six, from host memory over a link of 1 GB/s and from NVMe in that directory: the median of nine
against a plain forward in the same process.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
from torch import nn

import hetmem
from benchmarks.replay import go_through, gpt
from hetmem.planner import load_profile
from hetmem.planner.simulator import SimulatedTraffic
from hetmem.schedule.blocks import Block
from hetmem.schedule.trace import Tier, UseSequence

BLOCKS, BLOCK_BYTES, OPERATORS, PASSES = 96, 64 << 20, 4, 4
SLOTS = ((12, 4), (12, 24), (48, 8), (48, 24), (12, 0), (48, 0))
"""Of the device, and of staging; without staging homes are in host memory."""
COMPUTE = (0.3, 1.0, 2.0)
"""Of a block, in times what reading it takes, or copying it from host memory."""


def simulate(slots: tuple[int, int], compute: float, *, backward: bool) -> tuple[float, int]:
    """Seconds of the last of some passes over the least there can be, and the blocks that it read."""
    hardware = load_profile("h100")
    device, staging = slots
    traffic = SimulatedTraffic({Tier.DEVICE: device, Tier.HOST: staging}, hardware)
    for block in range(BLOCKS):
        traffic.add(Block(f"block {block}", Tier.NVME if staging else Tier.HOST), BLOCK_BYTES)
    uses = gpt(BLOCKS, operators=OPERATORS, tied=False, straddling=False).uses
    half = len(uses) // 2
    segments = (uses[:half], uses[half:]) if backward else (uses[:half],)
    known = [UseSequence(segment + segments[at - 1] * backward) for at, segment in enumerate(segments)]
    link = traffic.nvme_read if staging else traffic.host_to_device
    read_seconds = link.rate.seconds(BLOCK_BYTES)
    operator_seconds = compute * read_seconds / OPERATORS
    began, read_before = 0.0, 0
    for _ in range(PASSES):
        began, read_before = traffic.now, link.load.bytes
        for segment, coming in zip(segments, known, strict=True):
            go_through(traffic, segment, coming, operator_seconds, scan=not backward)
    reads = (link.load.bytes - read_before) // BLOCK_BYTES
    least = max(reads * read_seconds, operator_seconds * sum(map(len, segments)))
    return (traffic.now - began) / least, reads


def table(*, backward: bool) -> str:
    """A row for each number of slots, and for how long a block is computed with."""
    lines = [
        f"### {'Forward and backward' if backward else 'Forward'} through {BLOCKS} blocks",
        "",
        "| slots of the device | of staging | compute / read | time over the least |",
        "|---:|---:|---:|---:|",
    ]
    for slots in SLOTS:
        for compute in COMPUTE:
            times, reads = simulate(slots, compute, backward=backward)
            lines.append(f"| {slots[0]} | {slots[1]} | {compute} | {times:.2f} ({reads} reads) |")
    return "\n".join([*lines, ""])


def measure(directory: Path) -> str:
    """A row for weights in host memory, and one for weights on NVMe."""
    torch.set_num_threads(1)  # the other core copies and reads
    size, x = 2048, torch.randn(256, 2048)
    lines = ["| weights | plain forward | managed | managed / plain |", "|---|---:|---:|---:|"]
    with tempfile.TemporaryDirectory(dir=directory) as nvme, torch.no_grad():
        for name, device, budget in (
            ("host memory, 1 GB/s", hetmem.SimDevice(host_to_device="1GB"), hetmem.Budget("100MiB", "2GiB")),
            ("NVMe", hetmem.SimDevice(), hetmem.Budget("100MiB", "100MiB", "2GiB", nvme)),
        ):
            model = nn.Sequential(*(nn.Linear(size, size) for _ in range(24)))
            plain = _seconds(model, x)
            managed = _seconds(hetmem.manage(model, budget, device=device, chunk_bytes="17MiB"), x)
            lines.append(f"| {name} | {plain * 1e3:.0f} ms | {managed * 1e3:.0f} ms | {managed / plain:.2f} |")
            hetmem.release(model)
    return "\n".join([*lines, ""])


def _seconds(model: nn.Module, x: torch.Tensor) -> float:
    """Of a forward: the median of nine, after three that learn."""
    times = []
    for _ in range(12):
        began = time.perf_counter()
        model(x)
        times.append(time.perf_counter() - began)
    return median(times[3:])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dir", type=Path, help="measure forwards on this machine, with a store there")
    arguments = parser.parse_args()
    if arguments.dir is not None:
        print(measure(arguments.dir))
        return
    print(table(backward=False))
    print(table(backward=True))


if __name__ == "__main__":
    main()
