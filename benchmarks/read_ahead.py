"""What reading ahead of the device hides of the disk, as a Markdown table: python -m benchmarks.read_ahead

Weights live on NVMe and pass through host staging, or in host memory: forwards alone, and forwards with their backward,
of 96 blocks that four operators use in a row, on the simulator with the figures of a shipped profile. A cell is the
time of a pass over the least there can be, which is the longer one of compute and of the reads that were made, and how
many blocks it read. "On demand" fetches nothing ahead. The numbers are the same on every machine.
"""

from __future__ import annotations

from benchmarks.replay import gpt
from hetmem.plan.copies import Block
from hetmem.plan.prefetch import FARTHER, Prefetch
from hetmem.plan.simulator import SimulatedTraffic
from hetmem.plan.trace import Schedule, Tier, Uses
from hetmem.planning import load_profile

BLOCKS, BLOCK_BYTES, OPERATORS, PASSES = 96, 64 << 20, 4, 4
SLOTS = ((12, 4), (12, 24), (48, 8), (48, 24), (12, 0), (48, 0))
"""Of the device, and of staging; without staging homes are in host memory."""
COMPUTE = (0.3, 1.0, 2.0)
"""Of a block, in times what reading it takes, or copying it from host memory."""
SETTINGS = (("on demand", Prefetch(0, 2)), ("ahead", Prefetch()), ("farther ahead", FARTHER))


def simulate(slots: tuple[int, int], compute: float, prefetch: Prefetch, *, backward: bool) -> tuple[float, int]:
    """Seconds of the last of some passes over the least there can be, and the blocks that it read."""
    hardware = load_profile("h100")
    device, staging = slots
    traffic = SimulatedTraffic({Tier.DEVICE: device, Tier.HOST: staging}, hardware, prefetch=prefetch)
    for block in range(BLOCKS):
        traffic.add(Block(f"block {block}", Tier.NVME if staging else Tier.HOST), BLOCK_BYTES)
    uses = gpt(BLOCKS, operators=OPERATORS, tied=False, straddling=False).uses
    half = len(uses) // 2
    segments = (uses[:half], uses[half:]) if backward else (uses[:half],)
    known = [Uses(segment + segments[at - 1] * backward) for at, segment in enumerate(segments)]
    link = traffic.nvme_read if staging else traffic.host_to_device
    read_seconds = link.rate.seconds(BLOCK_BYTES)
    operator_seconds = compute * read_seconds / OPERATORS
    began, read_before = 0.0, 0
    for _ in range(PASSES):
        began, read_before = traffic.now, link.load.bytes
        for segment, coming in zip(segments, known, strict=True):
            traffic.execute(traffic.residency.expect(Tier.DEVICE, Schedule(coming, segment=len(segment))))
            traffic.execute(traffic.residency.expect(Tier.HOST, Schedule()))
            for blocks in segment:
                traffic.poll()
                traffic.residency.reach(blocks, Tier.DEVICE)
                for block in blocks:
                    traffic.acquire(block, Tier.DEVICE)
                traffic.now += operator_seconds
                for block in blocks:
                    traffic.release(block, Tier.DEVICE)
    reads = (link.load.bytes - read_before) // BLOCK_BYTES
    least = max(reads * read_seconds, operator_seconds * sum(map(len, segments)))
    return (traffic.now - began) / least, reads


def table(*, backward: bool) -> str:
    """A row for each number of slots, and for how long a block is computed with."""
    lines = [
        f"### {'Forward and backward' if backward else 'Forward'} through {BLOCKS} blocks",
        "",
        "| slots of the device | of staging | compute / read | " + " | ".join(name for name, _ in SETTINGS) + " |",
        "|---:|---:|---:|" + "---:|" * len(SETTINGS),
    ]
    for slots in SLOTS:
        for compute in COMPUTE:
            found = [simulate(slots, compute, prefetch, backward=backward) for _, prefetch in SETTINGS]
            cells = " | ".join(f"{times:.2f} ({reads} reads)" for times, reads in found)
            lines.append(f"| {slots[0]} | {slots[1]} | {compute} | {cells} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    print(table(backward=False))
    print(table(backward=True))
