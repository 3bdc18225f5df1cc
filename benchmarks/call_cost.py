"""What hetmem costs the thread that launches operators: calls of Python and C, and thread time, by phase of a step.

    python benchmarks/call_cost.py [--steps 5] [--blocks 16] [--width 32] [--experts]

Calls are those that `sys.setprofile` sees on the thread that trains: they are deterministic, and
`tests/intercept/test_call_counts.py` holds them. Times are thread time, the least of the steps measured. The model is
like Llama: nine weights a block, an embedding, a norm and a head. A second table has the goals: what a use of a weight
takes beside plain torch, by thread time, and what a step of a model that is whole on the device takes. Microseconds are
those of the machine, so each is also given in calls of an empty function and in `torch.neg` of eight elements.

`--experts`: of a mixture of experts in checkpointed blocks, of which as many are used however many there are, the
thread time of a backward, a step beside plain torch's, and the bytes of hetmem's own objects a parameter.
"""

from __future__ import annotations

import argparse
import gc
import platform
import statistics
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import hetmem

VOCABULARY = 64
LINEARS = ("query", "key", "value", "out", "gate", "up", "down")


class Norm(nn.Module):
    """Divides by the root of the mean square."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., width]."""
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class Llama(nn.Module):
    """An embedding, blocks that are computed here (so that each module has one weight), a norm and a head."""

    def __init__(self, blocks: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {"first": Norm(width), "second": Norm(width)}
                | {name: nn.Linear(width, width, bias=False) for name in LINEARS}
            )
            for _ in range(blocks)
        )
        self.norm, self.head = Norm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens: int64 [batch, time]; returns the loss of guessing each of them."""
        x = self.embedding(tokens)
        for block in self.blocks:
            y = block["first"](x)  # type: ignore[index]
            heads = [block[name](y).unflatten(-1, (2, -1)).transpose(1, 2) for name in LINEARS[:3]]  # type: ignore[index]
            attended = F.scaled_dot_product_attention(*heads, is_causal=True)
            x = x + block["out"](attended.transpose(1, 2).flatten(2))  # type: ignore[index]
            y = block["second"](x)  # type: ignore[index]
            x = x + block["down"](F.silu(block["gate"](y)) * block["up"](y))  # type: ignore[index]
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), tokens.flatten())


class Experts(nn.Module):
    """Blocks of many experts each, of which the first few are used, under activation checkpointing."""

    def __init__(self, experts: int, blocks: int = 4, used: int = 4, width: int = 8) -> None:
        super().__init__()
        self.used = used
        self.blocks = nn.ModuleList(
            nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(experts)) for _ in range(blocks)
        )

    def block(self, block: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
        """The sum of those used."""
        for expert in block[: self.used]:
            x = x + torch.tanh(expert(x))
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [rows, width]."""
        for block in self.blocks:
            x = checkpoint(self.block, block, x, use_reentrant=False)
        return x.square().mean()


@dataclass(frozen=True)
class Cost:
    """Of one phase of a step."""

    calls: int
    seconds: float


def counted(act: Callable[[], Any]) -> tuple[Any, int]:
    """What `act` returns, and how many calls of Python and C it made on this thread, and on those that it started."""
    calls = 0

    def see(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    threading.setprofile(see)
    sys.setprofile(see)
    try:
        result = act()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return result, calls


def costs(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor, steps: int = 5) -> dict[str, Cost]:
    """The cost of forward, backward and step, once all is learned."""
    phases: dict[str, Callable[[], Any]] = {}
    loss: torch.Tensor | None = None

    def forward() -> None:
        nonlocal loss
        loss = model(batch)

    def backward() -> None:
        assert loss is not None
        loss.backward()

    phases = {"forward": forward, "backward": backward, "step": optimizer.step}
    for _ in range(4):
        for act in phases.values():
            act()
        optimizer.zero_grad()
    least = dict.fromkeys(phases, float("inf"))
    for _ in range(steps):
        for name, act in phases.items():
            start = time.thread_time()
            act()
            least[name] = min(least[name], time.thread_time() - start)
        optimizer.zero_grad()
    rounds: list[dict[str, int]] = []
    for _ in range(3):  # an update that ends late is ended by the step, in more calls
        rounds.append({name: counted(act)[1] for name, act in phases.items()})
        optimizer.zero_grad()
    calls = min(rounds, key=lambda found: sum(found.values()))
    return {name: Cost(calls[name], least[name]) for name in phases}


def budget_of(model: nn.Module, share: float | None) -> hetmem.Budget:
    """Whole on the device (None), or homes in host memory and room for a `share` of the copies."""
    if share is None:
        return hetmem.Budget(device="256MiB", host="256MiB")
    nbytes = sum(p.numel() * p.itemsize for p in model.parameters())
    return hetmem.Budget(device="256MiB", host="256MiB", device_chunks=int(nbytes * share), home_copies=False)


CHUNK_BYTES = 16384
CELLS: dict[str, dict[str, Any]] = {
    "plain torch": {"plain": True},
    "whole on the device, float32": {"share": None},
    "whole on the device, bfloat16": {"share": None, "mixed": torch.bfloat16},
    "homes on the host, all copies": {"share": 1.5},
    "homes on the host, half of the copies": {"share": 1 / 2},
    "all copies, overlap": {"share": 1.5, "overlap": "backward"},
    "half of the copies, overlap": {"share": 1 / 2, "overlap": "backward"},
}


def cell(name: str, *, blocks: int = 16, width: int = 32, steps: int = 5) -> dict[str, Cost]:
    """The costs of one of `CELLS`."""
    options = dict(CELLS[name])
    torch.manual_seed(0)
    model = Llama(blocks, width)
    batch = torch.randint(0, VOCABULARY, (2, 16))
    if options.pop("plain", False):
        return costs(model, torch.optim.AdamW(model.parameters(), fused=True), batch, steps)
    limits, mixed = budget_of(model, options["share"]), options.get("mixed")
    hetmem.manage(model, limits, device=hetmem.SimDevice(), chunk_bytes=CHUNK_BYTES, mixed_precision=mixed)
    return costs(model, hetmem.AdamW(model.parameters(), overlap=options.get("overlap", "off")), batch, steps)


def managed_experts(experts: int, mixed: torch.dtype | None = None) -> Experts:
    """Build a mixture whose homes are in host memory."""
    torch.manual_seed(0)
    limits = hetmem.Budget(device="256MiB", host="256MiB", device_chunks="4MiB")
    model = Experts(experts)
    return hetmem.manage(model, limits, device=hetmem.SimDevice(), chunk_bytes=CHUNK_BYTES, mixed_precision=mixed)


def checkpointed(experts: int) -> tuple[int, float]:
    """How many parameters, and the thread time of a backward."""
    model = managed_experts(experts, torch.bfloat16)
    count = sum(1 for _ in model.parameters())
    least, x = float("inf"), torch.randn(4, 8)
    for _ in range(4):
        loss = model(x)
        start = time.thread_time()
        loss.backward()
        least = min(least, time.thread_time() - start)
    return count, least


def beside_plain(experts: int, rounds: int) -> tuple[int, float]:
    """How many parameters, and the CPU time of a step beside plain torch's: the median of turns."""
    managed, x = managed_experts(experts), torch.randn(4, 8)
    torch.manual_seed(0)
    plain = Experts(experts)
    optimizers = torch.optim.AdamW(plain.parameters(), fused=True), hetmem.AdamW(managed.parameters())
    ratios: list[float] = []
    for round_ in range(rounds + 2):
        seconds = []
        for model, optimizer in zip((plain, managed), optimizers, strict=True):
            start = time.process_time()
            model(x).backward()
            optimizer.step()
            optimizer.zero_grad()
            seconds.append(time.process_time() - start)
        if round_ >= 2:
            ratios.append(seconds[1] / seconds[0])
    return sum(1 for _ in plain.parameters()), statistics.median(ratios)


def own_bytes(experts: int) -> float:
    """Bytes a parameter that lines of hetmem allocate and hold once a mixture has trained."""
    model = managed_experts(1)
    hetmem.AdamW(model.parameters())  # what is made once for a process
    gc.collect()
    tracemalloc.start()
    model, x = managed_experts(experts), torch.randn(4, 8)
    optimizer = hetmem.AdamW(model.parameters())
    for _ in range(3):
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad()
    gc.collect()
    own = tracemalloc.Filter(True, str(Path(hetmem.__file__).parent / "*"))
    held = tracemalloc.take_snapshot().filter_traces([own]).statistics("filename")
    tracemalloc.stop()
    return sum(each.size for each in held) / sum(1 for _ in model.parameters())


def yardsticks() -> tuple[float, float]:
    """Microseconds of a call of an empty function, and of `torch.neg` of eight elements: the least of several."""

    def empty() -> None:
        """Nothing."""

    def least(act: Callable[[], object]) -> float:
        found = []
        for _ in range(20):
            start = time.thread_time()
            for _ in range(2000):
                act()
            found.append(1e6 * (time.thread_time() - start) / 2000)
        return min(found)

    x = torch.zeros(8)
    return least(empty), least(lambda: torch.neg(x))


class Round(nn.Module):
    """Eight layers, one after the other, again and again."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [rows, 64]."""
        for _ in range(USES // len(self.layers)):
            for layer in self.layers:
                x = layer(x)
        return x.square().mean()


USES = 200
GOALS = {"a use whose copy is there": (2.0, 25, 30), "a use with an eviction": (0.5, 45, 60)}
"""The share of copies that there is room for; microseconds of a use of a weight in forward and backward."""


def of_a_use(share: float | None) -> tuple[float, float]:
    """Microseconds of a use of a weight in forward and in backward: the least of ten. None: plain torch's."""
    torch.manual_seed(0)
    model: nn.Module = Round()
    if share is not None:
        limits = budget_of(model, share)
        hetmem.manage(model, limits, device=hetmem.SimDevice(), chunk_bytes=CHUNK_BYTES)
    x, times = torch.randn(4, 64), []
    for _ in range(15):
        start = time.thread_time()
        loss = model(x)
        between = time.thread_time()
        loss.backward()
        times.append((between - start, time.thread_time() - between))
        model.zero_grad()
    forward, backward = (min(each[which] for each in times[5:]) for which in (0, 1))
    return 1e6 * forward / USES, 1e6 * backward / USES


def print_goals(found: dict[str, dict[str, Cost]]) -> None:
    """Print what was found beside its goal."""
    call, function = yardsticks()
    plain = found["plain torch"]
    alone = of_a_use(None)
    print(f"\nAn empty call takes {call:.3f} us, torch.neg of eight elements {function:.2f} us.\n")
    print("| | found | goal | calls | torch.neg |\n|---|---|---|---|---|")
    for what, (share, *most) in GOALS.items():
        for phase, goal, used, own in zip(("forward", "backward"), most, of_a_use(share), alone, strict=True):
            each = used - own
            print(f"| {what}, {phase} | {each:.1f} us | {goal} us | {each / call:.0f} | {each / function:.0f} |")
    for name in list(CELLS)[1:3]:
        ratio = found[name]["step"].seconds / plain["step"].seconds
        print(f"| step, {name}, beside torch's fused | {ratio:.2f} | 2 | | |")


def print_experts() -> None:
    """Print what mixtures of experts take."""
    print("| | found | goal |\n|---|---|---|")
    seconds = {}
    for experts in (4, 28, 140, 563, 1126, 4504):
        count, seconds[experts] = checkpointed(experts)
        print(f"| backward of {count:,} parameters | {1e3 * seconds[experts]:.1f} ms | |", flush=True)
    print(f"| 18,016 beside 2,252 parameters | {seconds[4504] / seconds[563]:.1f} | 8 |")
    count, ratio = beside_plain(4504, 9)
    print(f"| step of {count:,} parameters beside plain torch | {ratio:.2f} | 1.5 |", flush=True)
    print(f"| bytes of hetmem's objects a parameter, of 2,252 | {own_bytes(563):,.0f} | 2,048 |")


def main() -> None:
    """Print tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--blocks", type=int, default=16)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--experts", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}, 1 thread of torch")
    if arguments.experts:
        print_experts()
        return
    costs_of: dict[str, dict[str, Cost]] = {}
    print("| | forward ms | backward ms | step ms | calls forward | calls backward | calls step |")
    print("|---|---|---|---|---|---|---|")
    for name in CELLS:
        found = costs_of[name] = cell(name, blocks=arguments.blocks, width=arguments.width, steps=arguments.steps)
        times = " | ".join(f"{1e3 * each.seconds:.1f}" for each in found.values())
        print(f"| {name} | {times} | {' | '.join(f'{each.calls:,}' for each in found.values())} |", flush=True)
    print_goals(costs_of)


if __name__ == "__main__":
    main()
