"""How well moving activations hides: a step whose activations leave the device, beside its longest term.

    python -m benchmarks.activations [--layers 32] [--milliseconds 20] [--share 0.9] [--steps 5]

The model is a stack of layers on an accelerator that is a clock (`benchmarks.clock`): its compute and its link take
time and no CPU. Each layer saves one storage, and its backward takes as long as its forward, or twice that. The link is
as fast as to take `--share` of the forward's compute for all that is saved, each way; so out takes that share of the
forward, and back of a backward as long as the forward. The device has room for a quarter of the activations. The
longest term is compute, which is known. Steps of a model that keeps all take turns with it: what these take above
compute is the machine's. The first steps learn and are not counted.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from torch import nn

import hetmem
from benchmarks.clock import ClockDevice

MIB = 1 << 20


class Clock(ClockDevice):
    """A `ClockDevice` that moves no bytes of activations either."""

    def gradient_out(self, target: torch.Tensor, arrived: torch.Tensor, *, add: bool) -> None:
        """Nothing but the time, of activations."""
        if arrived.dtype is torch.uint8:
            self._moved.nbytes += arrived.nbytes
        else:
            super().gradient_out(target, arrived, add=add)


class Layer(torch.autograd.Function):
    """A layer that saves its input: `seconds` of compute in forward, and `backward_seconds` in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, ask: Any, seconds: float, backward: float) -> Any:
        """Compute."""
        ctx.save_for_backward(x)
        ctx.ask, ctx.seconds, ctx.gradient = ask, backward, torch.zeros_like(weight)
        y = torch.empty_like(x)
        ask(seconds)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """Compute, with the input there."""
        (x,) = ctx.saved_tensors
        ctx.ask(ctx.seconds)
        return torch.empty_like(x), ctx.gradient, None, None, None


class Stack(nn.Module):
    """`layers` layers on `device`."""

    def __init__(self, layers: int, seconds: float, backward_seconds: float, device: Clock) -> None:
        super().__init__()
        self.ask, self.seconds, self.backward_seconds = device.compute, seconds, backward_seconds
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(64, 64)) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of no loss that means anything."""
        for weight in self.weights:
            x = Layer.apply(x, weight, self.ask, self.seconds, self.backward_seconds)  # type: ignore[no-untyped-call]
        return x[:1].sum()


class Run:
    """A managed `Stack` that takes steps on a clock of its own."""

    def __init__(self, how: str, layers: int, seconds: float, backward: float, share: float) -> None:
        self.nbytes = layers * MIB
        self._device = Clock(MIB / (share * seconds))
        self.model = Stack(layers, seconds, backward * seconds, self._device)
        room = 2 * self.nbytes if how == "keep" else self.nbytes // 4
        budget = hetmem.Budget(device=room, device_chunks=MIB, host=f"{2 * layers + 64}MiB")
        hetmem.manage(self.model, budget, device=self._device, activations=how)  # type: ignore[arg-type]
        self._optimizer = hetmem.AdamW(self.model.parameters())
        self._x = torch.zeros(MIB // 4).requires_grad_()

    def step(self) -> float:
        """The seconds of a forward and backward."""
        start = time.perf_counter()
        self.model(self._x).backward()
        self._device.finish()
        seconds = time.perf_counter() - start
        self._optimizer.step()
        self._optimizer.zero_grad()
        return seconds


def ratio(how: str, layers: int, seconds: float, backward: float, share: float, steps: int) -> tuple[list[float], str]:
    """Steps beside compute, kept and moved in turns, and what moved."""
    kept, moved = (Run(each, layers, seconds, backward, share) for each in ("keep", how))
    for _ in range(3):
        kept.step()
        moved.step()
    compute = layers * seconds * (1 + backward)
    found = [(kept.step() / compute, moved.step() / compute) for _ in range(steps)]
    saved = hetmem.report(moved.model).to_dict()["activations"]["bytes"]["device_to_host"] / moved.nbytes
    return [statistics.median(column) for column in zip(*found, strict=True)], f"{saved:.0%} of activations moved"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--milliseconds", type=float, default=20.0, help="of a layer's forward")
    parser.add_argument("--share", type=float, default=0.9, help="of the forward that moving all once takes")
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    for how in ("auto", "offload"):
        for backward in (1.0, 2.0):
            seconds = options.milliseconds / 1e3
            (kept, step), moved = ratio(how, options.layers, seconds, backward, options.share, options.steps)
            print(
                f"{how:8} backward {backward:g} x forward: {step:.3f} of compute, kept {kept:.3f}; {moved}", flush=True
            )


if __name__ == "__main__":
    main()
