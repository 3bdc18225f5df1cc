"""What hetmem costs the thread that launches operators: calls of Python and C, and thread time, by phase of a step.

    python benchmarks/call_cost.py [--steps 5] [--blocks 16] [--width 32] [--checkpointed]

Calls are those that `sys.setprofile` sees on the thread that trains: they are deterministic, and
`tests/intercept/test_call_counts.py` holds them. Times are thread time, the least of the steps measured. The model is
like Llama: nine weights a block, an embedding, a norm and a head.

`--checkpointed`: the time of a backward of a mixture of experts in blocks that are checkpointed, with ever more experts
of which as many are used; it must not grow with those that are not.
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
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
    """What `act` returns, and how many calls of Python and C it made on this thread."""
    calls = 0

    def see(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(see)
    try:
        result = act()
    finally:
        sys.setprofile(None)
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
    calls = {name: counted(act)[1] for name, act in phases.items()}
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
    "homes on the host, a third of the copies": {"share": 1 / 3},
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
    return costs(model, hetmem.AdamW(model.parameters()), batch, steps)


def checkpointed(experts: int) -> tuple[int, float]:
    """How many parameters, and the thread time of a backward."""
    torch.manual_seed(0)
    model = Experts(experts)
    count = sum(1 for _ in model.parameters())
    hetmem.manage(
        model,
        hetmem.Budget(device="256MiB", host="256MiB", device_chunks="4MiB"),
        device=hetmem.SimDevice(),
        chunk_bytes=CHUNK_BYTES,
        mixed_precision=torch.bfloat16,
    )
    least, x = float("inf"), torch.randn(4, 8)
    for _ in range(4):
        loss = model(x)
        start = time.thread_time()
        loss.backward()
        least = min(least, time.thread_time() - start)
    return count, least


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--blocks", type=int, default=16)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--checkpointed", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}, 1 thread of torch")
    if arguments.checkpointed:
        for experts in (4, 28, 140, 563, 1126, 4504):
            count, seconds = checkpointed(experts)
            print(f"| {count:,} parameters | {1e3 * seconds:.1f} ms |")
        return
    print("| | forward ms | backward ms | step ms | calls forward | calls backward | calls step |")
    print("|---|---|---|---|---|---|---|")
    for name in CELLS:
        found = cell(name, blocks=arguments.blocks, width=arguments.width, steps=arguments.steps)
        times = " | ".join(f"{1e3 * each.seconds:.1f}" for each in found.values())
        print(f"| {name} | {times} | {' | '.join(f'{each.calls:,}' for each in found.values())} |", flush=True)


if __name__ == "__main__":
    main()
