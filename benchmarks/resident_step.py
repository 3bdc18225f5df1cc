"""What hetmem costs when nothing has to move: a managed training step beside plain torch's, as a ratio in one run.

    python benchmarks/resident_step.py [--layers 12] [--width 256] [--rounds 15] [--threads 1]

Two cases: every home on the device (hetmem stays out of the way), and homes in host memory with a copy of every chunk
on the device (the operators are watched, gradients go home, updated weights come back). Ratios are of wall time and of
the process's CPU time, which other programs on the machine disturb less.
"""

from __future__ import annotations

import argparse
import copy
import gc
import platform
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import hetmem


class Block(nn.Module):
    """One pre-norm transformer block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [batch, time, width]."""
        query, key, value = self.qkv(self.first(x)).unflatten(-1, (3, 8, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(torch.nn.functional.gelu(self.up(self.second(x))))


class GPT(nn.Module):
    """Embedding, blocks, tied head; returns the loss."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, 256, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """x, y: int64 [batch, time]."""
        hidden = self.embedding(x)
        for block in self.blocks:
            hidden = block(hidden)
        return cross_entropy(self.head(hidden).flatten(0, 1), y.flatten())


def stepper(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> Callable[[], None]:
    """One training step of `model`."""

    def step() -> None:
        loss = model(x, x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def main() -> None:
    """Alternate the steppers and print the median ratios as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    plain = GPT(options.layers, options.width)
    states = 16 * sum(parameter.numel() for parameter in plain.parameters())
    x = torch.randint(0, 256, (4, 128))
    steppers = {"plain": stepper(plain, torch.optim.AdamW(plain.parameters(), fused=True), x)}
    for name, budget in {
        "homes on the device": hetmem.Budget(device=4 * states, host=0),
        "homes on the host, all copies on the device": hetmem.Budget(
            device=4 * states, host=2 * states, device_chunks=states - 1
        ),
    }.items():
        model = hetmem.manage(copy.deepcopy(plain), budget, device="sim")
        steppers[name] = stepper(model, hetmem.AdamW(model.parameters()), x)
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in steppers}
    for round_ in range(options.rounds + 3):
        for name, step in steppers.items():
            gc.collect()
            start = time.perf_counter(), time.process_time()
            step()
            if round_ >= 3:
                seconds[name].append((time.perf_counter() - start[0], time.process_time() - start[1]))
    print(f"{options.layers} layers, width {options.width}, batch 4 x 128, {states / 2**20:.0f} MiB of states, fp32,")
    print(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, {platform.machine()}, {options.rounds} rounds\n"
    )
    print("| step | ratio to plain torch | median | min | max |\n|---|---|---|---|---|")
    for name, own in seconds.items():
        for what, which in (("wall", 0), ("CPU", 1)):
            ratios = [a[which] / b[which] for a, b in zip(own, seconds["plain"], strict=True)]
            print(f"| {name} | {what} | {statistics.median(ratios):.3f} | {min(ratios):.3f} | {max(ratios):.3f} |")
    medians = [1e3 * statistics.median(each[which] for each in seconds["plain"]) for which in (0, 1)]
    print(f"\nplain: median {medians[0]:.1f} ms a step, {medians[1]:.1f} of CPU")


if __name__ == "__main__":
    main()
