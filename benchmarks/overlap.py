"""How well updates hide: steps with each way of overlap beside the longest of compute, optimizer and disk.

    python -m benchmarks.overlap --dir DIRECTORY [--layers 48] [--width 1024] [--rounds 7]

The model is a stack of layers whose accelerator is a clock: each waits, without using the CPU, as long as an
accelerator would compute it, so that the host is free as it is beside a GPU. The waits of a forward and backward
together take as long as the optimizer alone (`--compute` changes that). Each variant trains a copy of the same model;
they take turns within a round, so what else the machine does falls on all of them. T is the median of a variant's
steps. The terms are measured apart: compute is forward and backward of the plain model; the optimizer is the step of a
model whose states all lie in host memory; the disk carries the bytes that a step moved, in chunks, both ways at once,
and nothing else. "clipped" means that the norm's limit is below every norm, "limit kept" that it is above.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

import hetmem
from benchmarks.demo_bytes import load_demo
from hetmem.memory.mapping import Mapping
from hetmem.memory.nvme import NvmeStore
from hetmem.optim.workers import usable_cores

CHUNK_BYTES = 4 << 20


class Layer(torch.autograd.Function):
    """A layer on an accelerator: it takes `seconds` in forward and twice that in backward, and no CPU. It uses its
    weight in both; the gradient is `gradient`, which autograd copies."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, gradient: torch.Tensor, seconds: float) -> Any:
        ctx.save_for_backward(weight)
        ctx.gradient, ctx.seconds = gradient, seconds
        time.sleep(seconds)
        return x + weight[0, 0]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (weight,) = ctx.saved_tensors
        time.sleep(2 * ctx.seconds)
        return grads[0] + weight[0, 0], ctx.gradient, None, None


class Stack(nn.Module):
    """`layers` weights of `width` squared elements, each `wait` seconds in forward."""

    def __init__(self, layers: int, width: int, wait: float) -> None:
        super().__init__()
        self.wait = wait
        self.layers = nn.ParameterList(nn.Parameter(torch.randn(width, width)) for _ in range(layers))
        self.gradient = torch.randn(width, width) / width

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.layers:
            x = Layer.apply(x, weight, self.gradient, self.wait)  # type: ignore[no-untyped-call]
        return x.square().mean()


@dataclass
class Variant:
    """One way to train, and the seconds of its steps."""

    name: str
    options: dict[str, Any]
    seconds: list[float] = field(default_factory=list)
    model: nn.Module | None = None
    optimizer: torch.optim.Optimizer | None = None


NEVER, ALWAYS = 1e9, 1e-9
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("off", {}),
    ("backward", {"overlap": "backward"}),
    ("backward, streamed gradients", {"overlap": "backward", "gradients": "streamed"}),
    ("forward", {"overlap": "forward"}),
    ("limit kept: off", {"max_grad_norm": NEVER}),
    ("limit kept: backward", {"max_grad_norm": NEVER, "overlap": "backward"}),
    ("limit kept: speculative", {"max_grad_norm": NEVER, "overlap": "speculative"}),
    ("limit kept: forward", {"max_grad_norm": NEVER, "overlap": "forward"}),
    ("clipped: off", {"max_grad_norm": ALWAYS}),
    ("clipped: speculative", {"max_grad_norm": ALWAYS, "overlap": "speculative"}),
    ("clipped: forward", {"max_grad_norm": ALWAYS, "overlap": "forward"}),
]


def timed(work: Callable[[], object]) -> float:
    """Seconds of `work`."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def budget(placement: str, parameters: int, directory: Path) -> hetmem.Budget:
    """Everything but a few chunks in host memory, or all states on NVMe behind host memory for a quarter of them."""
    device = f"{16 * CHUNK_BYTES}B"
    if placement == "host":
        return hetmem.Budget(device="4GiB", device_chunks=device, host=f"{40 * parameters}B")
    return hetmem.Budget(
        device="4GiB", device_chunks=device, host=f"{4 * parameters}B", nvme=f"{20 * parameters}B", nvme_dir=directory
    )


def train(variant: Variant, batch: Sequence[torch.Tensor], steps: int) -> None:
    """`steps` steps, of which each is measured from its forward to the next one's: what trails counts there."""
    assert variant.model is not None
    assert variant.optimizer is not None
    start = time.perf_counter()
    for _ in range(steps):
        variant.model(*batch).backward()
        variant.optimizer.step()
        variant.optimizer.zero_grad()
        end = time.perf_counter()
        variant.seconds.append(end - start)
        start = end


def disk_seconds(directory: Path, read_bytes: int, written_bytes: int) -> float:
    """The store alone: so many bytes each way at once, four chunks in flight each way."""
    if not read_bytes + written_bytes:
        return 0.0
    chunks = 8
    store = NvmeStore([directory], chunks * CHUNK_BYTES)
    memory = Mapping(chunks * CHUNK_BYTES)
    extents = store.reserve_many([CHUNK_BYTES] * chunks)
    for extent in extents:
        store.write(extent, memory.buffer(0, CHUNK_BYTES)).result()

    def move() -> None:
        flying: dict[str, list[Any]] = {"read": [], "write": []}
        left = {"read": read_bytes // CHUNK_BYTES, "write": written_bytes // CHUNK_BYTES}
        count = 0
        while any(left.values()) or any(flying.values()):
            for verb, half in (("read", 0), ("write", 4)):
                while left[verb] and len(flying[verb]) < 4:
                    place = half + count % 4
                    count += 1
                    buffer = memory.buffer(place * CHUNK_BYTES, CHUNK_BYTES)
                    flying[verb].append(getattr(store, verb)(extents[place], buffer))
                    left[verb] -= 1
            for futures in flying.values():
                if futures:
                    futures.pop(0).result()

    seconds = min(timed(move) for _ in range(3))
    store.close()
    return seconds


def demo(args: argparse.Namespace, directory: Path) -> None:
    """The example's model in the example's budget, plain, managed and its optimizer in turns."""
    example = load_demo()
    batches = example.random_batches(example.read_corpus(), example.GPTConfig().context, "cpu")
    limits = hetmem.Budget(device="18MiB", host="96MiB", nvme="1GiB", nvme_dir=directory)
    roomy = hetmem.Budget(device="18MiB", host="1GiB")
    seconds: dict[str, list[float]] = {"compute": [], "optimizer": []}
    options = {"off": {}, "backward": {"overlap": "backward"}, "forward": {"overlap": "forward"}}
    plain = example.GPT(example.GPTConfig())
    apart = hetmem.manage(example.GPT(example.GPTConfig()), roomy, device="sim")
    updates = hetmem.AdamW(apart.parameters(), **example.ADAMW)
    variants = [Variant(name, each) for name, each in options.items()]
    for variant in variants:
        variant.model = hetmem.manage(example.GPT(example.GPTConfig()), limits, device="sim")
        variant.optimizer = hetmem.AdamW(variant.model.parameters(), **example.ADAMW, **variant.options)
    for round_ in range(args.rounds + 2):
        x, y = next(batches)
        seconds["compute"].append(timed(lambda: plain(x, y).backward()))  # noqa: B023 - called at once
        apart(x, y).backward()
        seconds["optimizer"].append(timed(updates.step))
        updates.zero_grad()
        for variant in variants:
            if round_ < 2:
                variant.seconds.clear()
            train(variant, (x, y), 2)
    assert variants[0].model is not None
    moved = hetmem.report(variants[0].model).to_dict()["step"]["bytes"]
    terms = {name: statistics.median(each[2:]) for name, each in seconds.items()}
    terms["disk"] = disk_seconds(directory, moved["nvme_read"], moved["nvme_write"])
    print("\n## The demo, on a simulated device that computes with the same cores\n")
    table(variants, terms, moved)


def compare(placement: str, args: argparse.Namespace, directory: Path) -> None:
    """All variants with homes in `placement`, in turns."""
    x = torch.randn(args.rows, args.width)
    parameters = args.layers * args.width**2

    def make(options: dict[str, Any], wait: float) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = Stack(args.layers, args.width, wait)
        hetmem.manage(model, budget(placement, parameters, directory), device="sim", chunk_bytes=CHUNK_BYTES)
        return model, hetmem.AdamW(model.parameters(), lr=1e-5, **options)

    alone = Stack(args.layers, args.width, 0.0)
    hetmem.manage(alone, budget("host", parameters, directory), device="sim", chunk_bytes=CHUNK_BYTES)
    updates = hetmem.AdamW(alone.parameters())
    alone(x).backward()
    optimizer_seconds = statistics.median(timed(updates.step) for _ in range(args.rounds))
    hetmem.release(alone)
    wait = args.compute * optimizer_seconds / (3 * args.layers)
    plain = Stack(args.layers, args.width, wait)
    compute_seconds = statistics.median(timed(lambda: plain(x).backward()) for _ in range(args.rounds))
    variants = [Variant(name, options) for name, options in VARIANTS]
    for variant in variants:
        variant.model, variant.optimizer = make(variant.options, wait)
        train(variant, (x,), 3)
        variant.seconds.clear()
    for _ in range(args.rounds):
        for variant in variants:
            train(variant, (x,), 2)
    assert variants[0].model is not None
    moved = hetmem.report(variants[0].model).to_dict()["step"]["bytes"]
    disk = disk_seconds(directory, moved["nvme_read"], moved["nvme_write"])
    terms = {"compute": compute_seconds, "optimizer": optimizer_seconds, "disk": disk}
    print(f"\n## Homes on {placement}\n")
    table(variants, terms, moved)


def table(variants: list[Variant], terms: dict[str, float], moved: dict[str, int]) -> None:
    """Print the terms and each variant's steps beside the longest of them; let go of the models."""
    bound = max(terms.values())
    off = statistics.median(variants[0].seconds)
    print("Terms apart: " + ", ".join(f"{name} {seconds * 1e3:.0f} ms" for name, seconds in terms.items()))
    print(f"NVMe of a step: {moved['nvme_read'] >> 20} MiB read, {moved['nvme_write'] >> 20} MiB written\n")
    print("| overlap | T / longest term | quartiles | T / T of off |\n|---|---|---|---|")
    for variant in variants:
        low, middle, high = statistics.quantiles(variant.seconds, n=4)
        print(f"| {variant.name} | {middle / bound:.2f} | {low / bound:.2f}–{high / bound:.2f} | {middle / off:.2f} |")
        assert variant.model is not None
        hetmem.release(variant.model)


def main() -> None:
    """Parse, measure, print Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=None, help="on the disk to measure (a temporary directory)")
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--compute", type=float, default=1.0, help="compute, as a multiple of the optimizer's time")
    parser.add_argument("--demo-only", action="store_true", help="only the example's model")
    args = parser.parse_args()
    machine = f"{usable_cores()} cores, {platform.machine()}, torch {torch.__version__}"
    print(f"{args.layers} layers of {args.width}², {machine}")
    with tempfile.TemporaryDirectory(dir=args.dir) as directory:
        demo(args, Path(directory))
        for placement in ("host", "nvme"):
            if not args.demo_only:
                compare(placement, args, Path(directory))


if __name__ == "__main__":
    main()
