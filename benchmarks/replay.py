"""Fetches of each policy relative to the offline optimum: python benchmarks/replay.py [TRACE.json ...]

A trace is the device's part of one training step, a list of {"blocks": [...], "non_model_bytes": int} in order; it is
repeated. Without files, steps of a GPT are made up: forward through n blocks and backward again. Every row replays
`Residency` itself. `immediate` answers a fetch at once; `delay k` answers it k uses later, or when a use has to wait
for it. `renewed` says that every block is rewritten between two steps, so that what survives on the device has to be
fetched anew, once. Those numbers are counts, and the same on every machine.

With `--speed` the simulator runs steps of 1024 blocks instead, and the processor time that events take is printed, of
each cell the best of three runs. 1100 slots need no eviction on the device; staging on NVMe always does.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.optimum import fewest_bytes
from hetmem.planner import load_profile
from hetmem.planner.simulator import SimulatedTraffic
from hetmem.schedule.blocks import FIFO, LRU, Block, Command, CopyState, Drop, EvictionPolicy, Fetch, NextUse, Write
from hetmem.schedule.residency import Residency
from hetmem.schedule.trace import Schedule, Tier, UseSequence

STEPS = 10
SHARES = (0.1, 0.2, 0.3, 0.5, 0.7, 0.9)
DELAYS = (0, 1, 4)


@dataclass(frozen=True)
class Trace:
    """One step: the blocks of each use, and the bytes that are not for chunks meanwhile."""

    name: str
    uses: tuple[tuple[int, ...], ...]
    non_model_bytes: tuple[int, ...]

    @property
    def blocks(self) -> int:
        """How many blocks there are, numbered from 0."""
        return max(block for use in self.uses for block in use) + 1


@dataclass
class Replay:
    """A residency, and the commands it is still owed an answer to."""

    residency: Residency
    delay: int
    stalls: int = 0
    _clock: int = 0
    _pending: deque[tuple[int, Fetch | Write]] = field(default_factory=deque)

    def carry_out(self, commands: Sequence[Command]) -> None:
        """Note `commands`, and answer what is due."""
        due = self._clock + self.delay
        self._pending.extend((due, command) for command in commands if not isinstance(command, Drop))
        while self._pending and self._pending[0][0] <= self._clock:
            self._answer()

    def _answer(self) -> None:
        _, command = self._pending.popleft()
        self.carry_out(self.residency.done(command))

    def use(self, blocks: tuple[int, ...]) -> None:
        """All of `blocks` at once on the device."""
        self.residency.reach(blocks, Tier.DEVICE)
        for block in blocks:
            self.stalls += self.residency.state(block, Tier.DEVICE) is not CopyState.VALID
            self.carry_out(self.residency.acquire(block, Tier.DEVICE))
            while self.residency.state(block, Tier.DEVICE) is not CopyState.VALID:
                self._answer()
        for block in blocks:
            self.carry_out(self.residency.release(block, Tier.DEVICE))
        self._clock += 1
        self.carry_out([])

    def drain(self) -> None:
        """Answer everything."""
        while self._pending:
            self._answer()

    def renew(self, blocks: int) -> None:
        """The homes of all blocks are rewritten, and what is on the device is fetched anew."""
        self.drain()
        for block in range(blocks):
            if self.residency.state(block, Tier.DEVICE) is not None:
                self.carry_out(self.residency.invalidate(block, Tier.DEVICE))
                self.carry_out(self.residency.prefetch([block], Tier.DEVICE))
        self.drain()


def replay(
    trace: Trace, limits: Sequence[int], policy: EvictionPolicy, *, delay: int, renewed: bool, steps: int = STEPS
) -> tuple[int, int]:
    """Fetches, and uses that had to wait, of `steps` steps from an empty device with `limits[i]` slots at use `i`."""
    run = Replay(Residency({Tier.DEVICE: max(limits)}, policy), delay)
    residency = run.residency
    for block in range(trace.blocks):
        residency.add(Block(f"block {block}", Tier.HOST))
    planned = isinstance(policy, NextUse)
    for step in range(steps):
        if step and renewed:
            if planned:
                run.carry_out(residency.expect({Tier.DEVICE: Schedule(trace.uses, barrier=0)}))
            run.renew(trace.blocks)
        if planned:
            barrier = len(trace.uses) if renewed else None
            run.carry_out(residency.expect({Tier.DEVICE: Schedule(trace.uses, barrier=barrier)}))
        for blocks, slots in zip(trace.uses, limits, strict=True):
            run.carry_out(residency.limit(Tier.DEVICE, slots))
            run.use(blocks)
    return residency.counts.fetches[Tier.DEVICE], run.stalls


def optimum(trace: Trace, limits: Sequence[int], *, renewed: bool, steps: int = STEPS) -> int:
    """The fewest fetches for the same steps. A renewed block is another block in every step."""
    shift = trace.blocks if renewed else 0
    uses = [tuple(block + step * shift for block in blocks) for step in range(steps) for blocks in trace.uses]
    return fewest_bytes(uses, dict.fromkeys((block for use in uses for block in use), 1), list(limits) * steps)


def gpt(layers: int, *, operators: int, tied: bool, straddling: bool, activation_bytes: int = 0) -> Trace:
    """A step through `layers` blocks, each used by `operators` in a row, and backward again.

    `tied`: block 0 (the embedding) is also the head. `straddling`: the last operator of a layer needs its neighbour
    as well, as a parameter group that does not end with its chunk does. `activation_bytes`: what forward leaves on
    the device for backward, in all; slots are scarcer in the middle of the step then.
    """
    forward: list[tuple[int, ...]] = []
    for layer in range(layers):
        forward += [(layer,)] * operators
        if straddling and layer + 1 < layers:
            forward.append((layer, layer + 1))
    if tied:
        forward.append((0,))
    uses = (*forward, *reversed(forward))
    kind = f"{layers} blocks × {operators}" + ", tied" * tied + ", straddling" * straddling
    kind += ", activations" * (activation_bytes > 0)
    depth = [min(at, len(uses) - 1 - at) for at in range(len(uses))]
    return Trace(kind, uses, tuple(activation_bytes * at // max(depth) for at in depth))


def load(path: Path) -> Trace:
    """A trace saved as JSON; blocks are renumbered from 0 in order of first use."""
    moments = json.loads(path.read_text())
    numbers = {block: number for number, block in enumerate(dict.fromkeys(b for m in moments for b in m["blocks"]))}
    return Trace(
        path.stem,
        tuple(tuple(numbers[block] for block in moment["blocks"]) for moment in moments),
        tuple(moment["non_model_bytes"] for moment in moments),
    )


def slots_per_use(trace: Trace, slots: int, slot_bytes: int) -> list[int]:
    """Slots beside the non-model bytes, when there are `slots` at their peak; never fewer than a use needs."""
    peak = max(trace.non_model_bytes)
    free = [min(trace.blocks, slots + (peak - nbytes) // slot_bytes) for nbytes in trace.non_model_bytes]
    return [max(count, len(set(blocks))) for count, blocks in zip(free, trace.uses, strict=True)]


def table(trace: Trace, slot_bytes: int) -> str:
    """A Markdown table: fetches relative to the optimum, one row per share of the blocks that has a slot."""
    columns: list[tuple[str, EvictionPolicy, int]] = [
        (f"NextUse, {f'delay {delay}' if delay else 'immediate'}", NextUse(), delay) for delay in DELAYS
    ]
    columns += [("LRU", LRU(), 0), ("FIFO", FIFO(), 0)]
    lines = [
        f"### {trace.name} ({len(trace.uses)} uses a step, {STEPS} steps)",
        "",
        "| slots | weights | optimum, fetches a step | " + " | ".join(name for name, _, _ in columns) + " |",
        "|---:|---|---:|" + "---:|" * len(columns),
    ]
    widest = max(len(set(blocks)) for blocks in trace.uses)
    for share in SHARES:
        slots = max(widest, round(share * trace.blocks))
        limits = slots_per_use(trace, slots, slot_bytes)
        for renewed in (False, True):
            least = optimum(trace, limits, renewed=renewed)
            cells = []
            for _, policy, delay in columns:
                fetches, stalls = replay(trace, limits, policy, delay=delay, renewed=renewed)
                cells.append(f"{fetches / least:.3f} ({stalls / STEPS:.1f} waits)")
            kind = "renewed" if renewed else "kept"
            lines.append(f"| {slots} ({share:.0%}) | {kind} | {least / STEPS:.1f} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, ""])


SPEED_BLOCKS, SPEED_OPERATORS = 1024, 4
SPEED_CELLS = (
    (1100, False, 1),
    (480, False, 1),
    (30, False, 1),
    (480, False, 2),
    (1100, True, 1),
    (480, True, 1),
    (30, True, 1),
    (480, True, 2),
)
"""Slots of the device, whether homes are on NVMe, and the span of every third block."""


@dataclass(frozen=True)
class Speed:
    """How fast decisions were made in the simulator, per operator."""

    seconds_per_operator: float
    fetches: int
    evictions: int


def go_through(
    traffic: SimulatedTraffic,
    segment: Sequence[tuple[int, ...]],
    coming: UseSequence,
    seconds: float,
    *,
    scan: bool = False,
) -> None:
    """The uses of `segment`, with which `coming` begins, on the device, each for `seconds`; staging has no others."""
    schedules = {Tier.DEVICE: Schedule(coming, segment=len(segment), scan=scan), Tier.HOST: Schedule()}
    traffic.execute(traffic.residency.expect(schedules))
    for blocks in segment:
        traffic.poll()
        traffic.residency.reach(blocks, Tier.DEVICE)
        for block in blocks:
            traffic.acquire(block, Tier.DEVICE)
        traffic.now += seconds
        for block in blocks:
            traffic.release(block, Tier.DEVICE)


def simulate(trace: Trace, slots: int, *, nvme: bool, span: int = 1, steps: int = 3) -> Speed:
    """`steps` steps of `trace` on the simulator, with `slots` slots of the device and a little compute per operator.

    `nvme`: homes are there, and each block passes through staging. Every third block has a span of `span`.
    """
    seconds, size = 1e-3, 64 << 20
    hardware = load_profile("h100")
    traffic = SimulatedTraffic({Tier.DEVICE: slots, Tier.HOST: 48 * nvme}, hardware)
    for block in range(trace.blocks):
        home = Tier.NVME if nvme else Tier.HOST
        traffic.add(Block(f"block {block}", home, span if block % 3 == 0 else 1), size)
    half = len(trace.uses) // 2
    segments = (trace.uses[:half], trace.uses[half:])
    began = 0.0
    known: dict[int, UseSequence] = {}  # as `TraceBook` keeps them
    for step in range(steps):
        if step == 1:
            began = time.process_time()
        for now, later in (segments, segments[::-1]):
            if id(now) not in known:
                known[id(now)] = UseSequence(now + later)
            go_through(traffic, now, known[id(now)], seconds)
    spent = time.process_time() - began
    operators = (steps - 1) * len(trace.uses)
    counts = traffic.residency.counts
    fetches, evictions = sum(counts.fetches.values()), sum(counts.evictions.values())
    return Speed(spent / operators, fetches, evictions)


def speeds() -> str:
    """A Markdown table: the simulator's speed with more or less of the blocks on the device."""
    trace = gpt(SPEED_BLOCKS, operators=SPEED_OPERATORS, tied=True, straddling=True)
    lines = [
        f"### Speed: {trace.name} ({len(trace.uses)} uses a step)",
        "",
        "| slots | homes | spans | µs an operator | fetches | evictions |",
        "|---:|---|---|---:|---:|---:|",
    ]
    for slots, nvme, span in SPEED_CELLS:
        runs = [simulate(trace, slots, nvme=nvme, span=span) for _ in range(3)]
        speed = min(runs, key=lambda run: run.seconds_per_operator)
        lines.append(
            f"| {slots} | {'NVMe' if nvme else 'host'} | {'1' if span == 1 else f'1, 1, {span}'} | "
            f"{speed.seconds_per_operator * 1e6:.1f} | {speed.fetches} | "
            f"{speed.evictions} |"
        )
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("traces", nargs="*", type=Path)
    parser.add_argument("--slot-bytes", type=int, default=64 << 20, help="bytes of a slot on the device")
    parser.add_argument("--speed", action="store_true", help="time the simulator instead")
    arguments = parser.parse_args()
    if arguments.speed:
        print(speeds())
        return
    traces = [load(path) for path in arguments.traces] or [
        gpt(24, operators=1, tied=False, straddling=False),
        gpt(24, operators=4, tied=True, straddling=True),
        gpt(24, operators=4, tied=True, straddling=True, activation_bytes=8 * arguments.slot_bytes),
        gpt(96, operators=4, tied=True, straddling=True),
    ]
    for trace in traces:
        print(table(trace, arguments.slot_bytes))


if __name__ == "__main__":
    main()
