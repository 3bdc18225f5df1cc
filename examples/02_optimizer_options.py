"""What `hetmem.AdamW` can do beside torch's: clipping, overlap with the backward, and smaller moments.

    python examples/02_optimizer_options.py

The same small model trains three times, each time on a device that holds a fifth of its weights. A table compares the
loss, the bytes that a parameter takes at home, the bytes that it takes across the link in a step, and how many passes
over chunks began within the backward: none where updates wait for the norm of all gradients. Needs no GPU and takes
some seconds.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import hetmem

STEPS, WIDTH, LAYERS, ROWS = 8, 256, 24, 16
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BUDGET = hetmem.Budget(
    device="16MiB" if DEVICE == "cpu" else None,  # of a GPU cuBLAS alone takes twice as much
    device_chunks="1280KiB",
    host="64MiB",
)
VARIANTS: dict[str, dict[str, Any]] = {
    "as torch": {},
    "clipped, overlapped": {"max_grad_norm": 0.4, "overlap": "backward"},
    "8 bit, overlapped": {"moments": "8bit", "overlap": "backward"},
}


@dataclass(frozen=True)
class Result:
    """One training: `losses` of each step, `largest_norm` of the gradients (None if nobody asked), and the report."""

    losses: list[float]
    largest_norm: float | None
    report: dict[str, Any]


class Teacher:
    """Batches to learn from: random rows, and what a small fixed network makes of them. The same ones each time."""

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(1)
        self._weight = torch.randn(WIDTH, WIDTH, generator=self._generator) / WIDTH**0.5

    def batch(self) -> tuple[Tensor, Tensor]:
        """Inputs and targets, both float32 [ROWS, WIDTH]."""
        x = torch.randn(ROWS, WIDTH, generator=self._generator)
        return x, torch.tanh(x @ self._weight)


class Residual(nn.Module):
    """One layer whose output is added to its input: [rows, WIDTH] to the same."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x)) / LAYERS**0.5


def build() -> nn.Sequential:
    """The same model each time: layers of 257 KiB."""
    torch.manual_seed(0)
    return nn.Sequential(*(Residual() for _ in range(LAYERS)))


def train(options: dict[str, Any], steps: int) -> Result:
    """Train with `hetmem.AdamW(**options)`: the usual loop."""
    model = hetmem.manage(build(), BUDGET)
    optimizer = hetmem.AdamW(model.parameters(), lr=1e-3, **options)
    teacher, losses, norms = Teacher(), [], []
    for _ in range(steps):
        x, y = (tensor.to(DEVICE) for tensor in teacher.batch())
        loss = mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if optimizer.grad_norm is not None:
            norms.append(optimizer.grad_norm)
    report = hetmem.report(model).to_dict()
    hetmem.release(model)
    return Result(losses, max(norms, default=None), report)


def early_passes(report: dict[str, Any]) -> tuple[int, int]:
    """How many passes over chunks began within the backward of the last step, and how many there were."""
    timeline = report["timeline"]
    ((start, end),) = [(start, end) for name, start, end in timeline["segments"] if name == "backward"]
    began = timeline["updates"]["from_us"]
    return sum(start <= at < end for at in began), len(began)


def row(name: str, result: Result) -> list[str]:
    """What the table says of one training."""
    step = result.report["step"]
    return [
        name,
        f"{result.losses[0]:.4f} → {result.losses[-1]:.4f}",
        "-" if result.largest_norm is None else f"{result.largest_norm:.2f}",
        f"{result.report['bytes_per_parameter']:.1f}",
        f"{step['bytes']['host_to_device'] / result.report['parameters']:.1f}",
        "{} of {}".format(*early_passes(result.report)),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Train each variant and print the table. The exit code is 0."""
    parser = argparse.ArgumentParser(description="Options of hetmem.AdamW, side by side.")
    parser.add_argument(
        "--steps", type=int, default=STEPS, help="optimizer steps of each training (default %(default)s)"
    )
    steps = parser.parse_args(arguments).steps
    if steps < 2:
        parser.error(f"--steps must be at least 2, as a report shows a whole step, got {steps}")
    table = Table("variant", "loss", "norm", "at home", "to device", "early", title="hetmem.AdamW, side by side")
    for name, options in VARIANTS.items():
        table.add_row(*row(name, train(options, steps)))
    console = Console()
    console.print(table)
    console.print("norm: the largest of the gradients; at home, to device: bytes per parameter")
    console.print("early: passes over chunks that began in the last backward, of all in that step")
    return 0


if __name__ == "__main__":
    sys.exit(main())
