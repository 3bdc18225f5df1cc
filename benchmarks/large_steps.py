"""Steps of many micro-batches, layer by layer, beside a loop: bytes, seconds on a clock, calls of Python.

    python -m benchmarks.large_steps [--micro-batches 8] [--layers 24] [--link-times 3]

Bytes are those of a steady step of a stack of layers with room for a third of the copies, float32 and with 16-bit
compute: of weights to the device, of gradients from it, at m micro-batches against one. Seconds are those on an
accelerator that is a clock (`benchmarks.clock`), whose link takes `--link-times` as long for all weights as one
micro-batch computes; the longest of compute and of each link is what a step cannot be shorter than. Gradients leave on
a link as fast as the one inward, and, in a second row, on one that is fast enough for them. Calls are those that
`sys.setprofile` sees on all threads of a micro-batch, forward and backward, for each block more that a model has:
they are deterministic.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import hetmem
from benchmarks.call_cost import Norm, counted
from benchmarks.clock import ClockDevice
from benchmarks.overlap import Layer

KIB = 1 << 10
WIDTH = 32
VOCABULARY = 64


class Block(nn.Module):
    """Two norms and seven linear layers, as Llama has them: [rows, tokens, width] to the same."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = Norm(width), Norm(width)
        self.query, self.key, self.value, self.out, self.gate, self.up, self.down = (
            nn.Linear(width, width, bias=False) for _ in range(7)
        )

    def forward(self, x: Tensor) -> Tensor:
        """x: [rows, tokens, width]."""
        y = self.first(x)
        heads = [linear(y).unflatten(-1, (2, -1)).transpose(1, 2) for linear in (self.query, self.key, self.value)]
        x = x + self.out(F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))
        y = self.second(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """An embedding, blocks, a norm and a head: tokens [rows, tokens] to the loss of guessing each of them."""

    def __init__(self, blocks: int, *, saves: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(blocks))
        self.norm, self.head, self.saves = Norm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False), saves

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens: int64 [rows, tokens]."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.saves else block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), tokens.flatten())


Step = Callable[[nn.Module, list[Any]], object]


def loop(model: nn.Module, batches: list[Any]) -> None:
    """One micro-batch after the other."""
    for batch in batches:
        (model(batch) / len(batches)).backward()


def managed(model: nn.Module, share: float, chunk_bytes: int, device: Any = "sim", **options: Any) -> Any:
    """`model` with room for a `share` of its copies, and its optimizer."""
    mixed = options.pop("mixed_precision", None)
    copies = int(share * sum(p.numel() * (2 if mixed else 4) for p in model.parameters()))
    budget = hetmem.Budget(device="1GiB", host="1GiB", device_chunks=copies, home_copies=False)
    hetmem.manage(model, budget, device=device, chunk_bytes=chunk_bytes, mixed_precision=mixed)
    return hetmem.AdamW(model.parameters(), **options)


# ---- bytes -------------------------------------------------------------------------------------------------------


def moved(count: int, step: Step, **options: Any) -> tuple[int, int]:
    """The bytes of a steady step of `count` micro-batches to the device and from it."""
    torch.manual_seed(0)
    model = Llama(16, saves=True)
    optimizer = managed(model, 1 / 3, 32 * KIB, **options)
    seen = (0, 0)
    for _ in range(4):
        before = seen
        step(model, [torch.randint(VOCABULARY, (2, 16)) for _ in range(count)])
        optimizer.step()
        optimizer.zero_grad()
        links = hetmem.report(model).to_dict()["links"]
        seen = links["host_to_device"]["bytes"], links["device_to_host"]["bytes"]
    hetmem.release(model)
    return seen[0] - before[0], seen[1] - before[1]


def print_bytes(count: int) -> None:
    """Of a step against one of a single micro-batch."""
    print(f"| bytes at m = {count} against m = 1 | weights in | gradients out |\n|---|---|---|")
    for name, options in (("float32", {}), ("bfloat16", {"mixed_precision": torch.bfloat16})):
        for overlap in ("off", "backward"):
            alone = moved(1, loop, overlap=overlap, **options)
            for way, step in (("loop", loop), ("hetmem.accumulate", hetmem.accumulate)):
                found = moved(count, step, overlap=overlap, **options)
                ratios = " | ".join(f"{now / one:.2f}" for now, one in zip(found, alone, strict=True))
                print(f"| {way}, {name}, overlap {overlap} | {ratios} |", flush=True)


# ---- seconds -----------------------------------------------------------------------------------------------------


class Clock(ClockDevice):
    """A clock whose link outward is `outward` times as fast as the one inward."""

    def __init__(self, bytes_per_second: float, outward: float) -> None:
        super().__init__(bytes_per_second)
        self._outward, self.bytes = outward, [0, 0]

    def copy_in(self, target: Tensor, source: Tensor) -> None:
        """Counted."""
        self.bytes[0] += source.nbytes
        super().copy_in(target, source)

    def gradient_out(self, target: Tensor, arrived: Tensor, *, add: bool) -> None:
        """Counted, and so much faster."""
        super().gradient_out(target, arrived, add=add)
        self.bytes[1] += arrived.nbytes
        self._moved.nbytes -= int(arrived.nbytes * (1 - 1 / self._outward))


class Waiting(nn.Module):
    """A weight, and so many seconds of compute in forward and twice that in backward."""

    def __init__(self, width: int, seconds: float, device: Clock) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width))
        self.seconds, self.ask = seconds, device.compute
        self.gradient = torch.randn(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """x: any."""
        return Layer.apply(x, self.weight, self.gradient, self.ask, self.seconds)  # type: ignore[no-untyped-call,no-any-return]


class Stack(nn.Module):
    """Layers of a weight each."""

    def __init__(self, layers: int, width: int, seconds: float, device: Clock) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Waiting(width, seconds, device) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        """x: any; returns a scalar."""
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def timed(count: int, step: Step, layers: int, times: float, outward: float, rounds: int) -> tuple[float, float]:
    """The seconds of a step of `count` micro-batches, and the longest of its terms."""
    width, seconds = 256, 4e-3
    weights = 4 * width**2 * layers
    device = Clock(weights / (times * 3 * seconds * layers), outward)
    model = Stack(layers, width, seconds, device)
    optimizer = managed(model, 1 / 4, 4 * width**2, device)
    batches, found = [torch.randn(4) for _ in range(count)], []
    for _ in range(rounds + 2):
        device.bytes = [0, 0]
        start = time.perf_counter()
        step(model, batches)
        device.finish()
        found.append(time.perf_counter() - start)
        optimizer.step()
        optimizer.zero_grad()
    rate = device._bytes_per_second
    terms = [3 * seconds * layers * count, device.bytes[0] / rate, device.bytes[1] / rate / outward]
    hetmem.release(model)
    return statistics.median(found[2:]), max(terms)


def print_seconds(count: int, layers: int, times: float) -> None:
    """Of forwards and backwards, without the update."""
    print(
        f"\n| forwards and backwards of m = {count}, link {times:g} times a micro-batch | step | against the longest |"
    )
    print("|---|---|---|")
    for outward in (1.0, 2.0 * count):
        for way, step in (("loop", loop), ("hetmem.accumulate", hetmem.accumulate)):
            seconds, longest = timed(count, step, layers, times, outward, 3)
            how = "as fast outward" if outward == 1 else f"{outward:g} times as fast outward"
            print(f"| {way}, {how} | {1e3 * seconds:.0f} ms | {seconds / longest:.2f} |", flush=True)


# ---- calls -------------------------------------------------------------------------------------------------------


def calls(blocks: int, count: int, step: Step, share: float) -> int:
    """The calls of Python and C, on all threads, of a steady step of `count` micro-batches without its update."""
    torch.manual_seed(0)
    model = Llama(blocks)
    optimizer = managed(model, share, 16 * KIB)
    batches = [torch.randint(VOCABULARY, (2, 16)) for _ in range(count)]
    for _ in range(4):
        step(model, batches)
        optimizer.step()
        optimizer.zero_grad()
    _, found = counted(lambda: step(model, batches))
    hetmem.release(model)
    return found


def print_calls(count: int) -> None:
    """Of a micro-batch and block, beside a forward and backward of a single one."""
    print("\n| calls a micro-batch and block | one alone | hetmem.accumulate | |\n|---|---|---|---|")
    for name, share in (("all copies", 1.5), ("half of the copies", 0.5)):
        one = (calls(16, 1, loop, share) - calls(8, 1, loop, share)) / 8
        turns = calls(16, count, hetmem.accumulate, share) - calls(8, count, hetmem.accumulate, share)
        turns /= 8 * count
        print(f"| {name} | {one:.0f} | {turns:.0f} | {turns / one:.2f} |", flush=True)


def main() -> None:
    """Print all tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--link-times", type=float, default=3.0)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    print_bytes(asked.micro_batches)
    print_seconds(asked.micro_batches, asked.layers, asked.link_times)
    print_calls(asked.micro_batches)


if __name__ == "__main__":
    main()
