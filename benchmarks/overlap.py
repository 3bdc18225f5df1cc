"""How well updates hide: steps with each way of overlap beside the longest of compute, optimizer and disk.

    python -m benchmarks.overlap --dir DIRECTORY [--layers 48] [--chunk-mib 4] [--host-bytes 4] [--rounds 7]

The model is a stack of layers on an accelerator that is a clock (`benchmarks.clock`): its compute and its link take
time and no CPU, behind the program, so that the host is free as it is beside a GPU. Compute of a forward and backward
takes as long as the optimizer alone (`--compute` changes that). Each variant trains a copy of the same model. They take
turns within a round, so what else the machine does falls on all of them; the first step of a turn, which pays for what
trails behind the model before, is not counted. T is the median of the others. The terms are measured apart, in the same
rounds, as medians: compute is forward and backward of the plain model; the optimizer is the step of a model whose
states all lie in host memory; the disk carries the bytes that a step of the variant moved, in chunks, both ways at
once, and nothing else. "clipped" means that the norm's limit is below every norm, "limit kept" that it is above.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from math import isqrt
from pathlib import Path
from typing import Any

import torch
from torch import nn

import hetmem
from benchmarks.clock import ClockDevice
from benchmarks.demo_bytes import load_demo
from hetmem.cpu.workers import usable_cores
from hetmem.memory.host_memory import Mapping
from hetmem.memory.nvme_store import NvmeStore


class Layer(torch.autograd.Function):
    """A layer on an accelerator: it asks for `seconds` of compute in forward and for twice that in backward. It uses
    its weight in both; its gradient is `gradient`."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, gradient: torch.Tensor, ask: Any, seconds: float
    ) -> Any:
        ctx.save_for_backward(weight)
        ctx.gradient, ctx.ask, ctx.seconds = gradient, ask, seconds
        y = x + weight[0, 0]
        ask(seconds)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        assert len(ctx.saved_tensors) == 1  # the weight, which must be there
        ctx.ask(2 * ctx.seconds)
        return grads[0], ctx.gradient.detach(), None, None, None  # its own tensor, so that autograd copies nothing


class Stack(nn.Module):
    """`layers` weights of `width` squared elements, each `wait` seconds of `device` in forward."""

    def __init__(self, layers: int, width: int, wait: float, device: ClockDevice) -> None:
        super().__init__()
        self.wait, self.ask = wait, device.compute
        self.layers = nn.ParameterList(nn.Parameter(torch.randn(width, width)) for _ in range(layers))
        self.gradient = torch.randn(width, width) / width

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.layers:
            x = Layer.apply(x, weight, self.gradient, self.ask, self.wait)  # type: ignore[no-untyped-call]
        return x.square().mean()


@dataclass
class Variant:
    """One way to train, the seconds of its steps, and of the disk alone with the bytes of one."""

    name: str
    options: dict[str, Any]
    seconds: list[float] = field(default_factory=list)
    disk_seconds: list[float] = field(default_factory=list)
    model: nn.Module | None = None
    optimizer: torch.optim.Optimizer | None = None


PLACEMENTS = ("host", "all copies", "nvme")
NEVER, ALWAYS = 1e9, 1e-9
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("off", {}),
    ("backward", {"overlap": "backward"}),
    ("forward", {"overlap": "forward"}),
    ("limit kept: off", {"max_grad_norm": NEVER}),
    ("limit kept: backward", {"max_grad_norm": NEVER, "overlap": "backward"}),
    ("limit kept: forward", {"max_grad_norm": NEVER, "overlap": "forward"}),
    ("clipped: off", {"max_grad_norm": ALWAYS}),
    ("clipped: forward", {"max_grad_norm": ALWAYS, "overlap": "forward"}),
]


def timed(work: Callable[[], object]) -> float:
    """Seconds of `work`."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def budget(
    placement: str, parameters: int, directory: Path, chunk_bytes: int, host_bytes: float = 4.0
) -> hetmem.Budget:
    """Homes in host memory, with room on the device for a few copies or for "all copies", or on NVMe behind host memory
    of `host_bytes` a parameter."""
    device = 16 * chunk_bytes if placement != "all copies" else 4 * parameters + 2 * chunk_bytes
    if placement != "nvme":
        return hetmem.Budget(device="4GiB", device_chunks=device, host=f"{40 * parameters}B")
    return hetmem.Budget(
        device="4GiB",
        device_chunks=device,
        host=int(host_bytes * parameters),
        nvme=20 * parameters,
        nvme_dir=directory,
    )


def train(variant: Variant, batch: Sequence[torch.Tensor], steps: int) -> None:
    """`steps` steps behind one that is not counted. What trails behind a step counts in the next one."""
    assert variant.model is not None
    assert variant.optimizer is not None
    for count in range(steps + 1):
        start = time.perf_counter()
        variant.model(*batch).backward()
        variant.optimizer.step()
        variant.optimizer.zero_grad()
        if count:
            variant.seconds.append(time.perf_counter() - start)


def moved_bytes(variant: Variant) -> dict[str, int]:
    """What the last step moved, by link."""
    assert variant.model is not None
    return dict(hetmem.report(variant.model).to_dict()["step"]["bytes"])


class Disk:
    """The store alone, four chunks in flight each way, from as many places of the disk and of memory as `model` uses:
    what is moved to and from a few places only stays in caches, and takes 0.7 to 0.9 of the time."""

    def __init__(self, directory: Path, model: nn.Module, chunk_bytes: int) -> None:
        tiers = hetmem.report(model).to_dict()["tiers"]
        extents = max(8, tiers["nvme"]["used_bytes"] // chunk_bytes)
        buffers = max(8, tiers["host"]["staging_bytes"] // chunk_bytes)
        self._chunk_bytes = chunk_bytes
        self._store = NvmeStore([directory], extents * chunk_bytes)
        memory = Mapping(buffers * chunk_bytes)
        self._extents = deque(self._store.reserve_many([chunk_bytes] * extents))
        self._buffers = deque(memory.buffer(count * chunk_bytes, chunk_bytes) for count in range(buffers))
        for _ in range(max(extents, buffers)):
            self._start("write").result()

    def seconds(self, moved: dict[str, int]) -> float:
        """So many bytes each way at once."""
        return timed(lambda: self._move(*(moved[link] // self._chunk_bytes for link in ("nvme_read", "nvme_write"))))

    def _start(self, verb: str) -> Future[int]:
        """Read into, or write from, the place of memory and of the disk that was used longest ago."""
        for places in (self._extents, self._buffers):
            places.rotate(-1)
        future: Future[int] = getattr(self._store, verb)(self._extents[-1], self._buffers[-1])
        return future

    def _move(self, reads: int, writes: int) -> None:
        flying: dict[str, list[Future[int]]] = {"read": [], "write": []}
        left = {"read": reads, "write": writes}
        while any(left.values()) or any(flying.values()):
            for verb, futures in flying.items():
                while left[verb] and len(futures) < 4:
                    futures.append(self._start(verb))
                    left[verb] -= 1
            for futures in flying.values():
                if futures:
                    futures.pop(0).result()

    def close(self) -> None:
        """Stop its threads."""
        self._store.close()


def demo(args: argparse.Namespace, directory: Path) -> None:
    """The example's model in the example's budget, plain, managed and its optimizer in turns."""
    example = load_demo()
    config = example.GPTConfig()
    batches = example.random_batches(example.read_corpus(config.vocabulary)[0], config.context, "cpu")
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
    disk = Disk(directory, variants[0].model, 4 << 20)
    for round_ in range(args.rounds + 2):
        x, y = next(batches)
        seconds["compute"].append(timed(lambda: plain(x, y).backward()))  # noqa: B023 - called at once
        apart(x, y).backward()
        seconds["optimizer"].append(timed(updates.step))
        updates.zero_grad()
        for variant in variants:
            if round_ < 2:
                variant.seconds.clear()
                variant.disk_seconds.clear()
            train(variant, (x, y), 2)
            variant.disk_seconds.append(disk.seconds(moved_bytes(variant)))
    disk.close()
    terms = {name: statistics.median(each[2:]) for name, each in seconds.items()}
    print("\n## The demo, on a simulated device that computes with the same cores\n")
    table(variants, terms)


def compare(placement: str, args: argparse.Namespace, directory: Path) -> None:
    """All variants with homes in `placement`, in turns."""
    chunk_bytes = args.chunk_mib << 20
    width = isqrt(chunk_bytes // 4)  # a weight fills its chunk
    x = torch.randn(args.rows, width)
    parameters = args.layers * width**2
    device = ClockDevice(args.link)

    def make(place: str, wait: float, options: dict[str, Any]) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = Stack(args.layers, width, wait, device)
        limits = budget(place, parameters, directory, chunk_bytes, args.host_bytes)
        hetmem.manage(model, limits, device=device, chunk_bytes=chunk_bytes)
        return model, hetmem.AdamW(model.parameters(), lr=1e-5, **options)

    alone, updates = make("host", 0.0, {})
    alone(x).backward()
    optimizer = [timed(updates.step) for _ in range(5)]
    wait = args.compute * statistics.median(optimizer) / (3 * args.layers)
    plain = Stack(args.layers, width, wait, device)

    def compute() -> None:
        plain(x).backward()
        plain.zero_grad()
        device.finish()

    variants = [Variant(name, options) for name, options in VARIANTS]
    for variant in variants:
        variant.model, variant.optimizer = make(placement, wait, variant.options)
        train(variant, (x,), 2)
        variant.seconds.clear()
    assert variants[0].model is not None
    disk = Disk(directory, variants[0].model, chunk_bytes)
    apart = {"compute": [timed(compute)], "optimizer": optimizer}
    for _ in range(args.rounds):
        apart["compute"].append(timed(compute))
        apart["optimizer"].append(timed(updates.step))
        for variant in variants:
            train(variant, (x,), 2)
            variant.disk_seconds.append(disk.seconds(moved_bytes(variant)))
    disk.close()
    hetmem.release(alone)
    print(f"\n## Homes on {placement}\n")
    table(variants, {name: statistics.median(each) for name, each in apart.items()})


def table(variants: list[Variant], terms: dict[str, float]) -> None:
    """Print the terms and each variant's steps beside the longest of them; let go of the models."""
    off = statistics.median(variants[0].seconds)
    print("Terms apart: " + ", ".join(f"{name} {seconds * 1e3:.0f} ms" for name, seconds in terms.items()) + "\n")
    print("| overlap | NVMe MiB read, written | disk ms | T / longest term | quartiles | T / T of off |")
    print("|---|---|---|---|---|---|")
    for variant in variants:
        moved, disk = moved_bytes(variant), statistics.median(variant.disk_seconds)
        bound = max(disk, *terms.values())
        low, middle, high = statistics.quantiles(variant.seconds, n=4)
        print(
            f"| {variant.name} | {moved['nvme_read'] >> 20}, {moved['nvme_write'] >> 20} | {disk * 1e3:.0f} "
            f"| {middle / bound:.2f} | {low / bound:.2f}–{high / bound:.2f} | {middle / off:.2f} |"
        )
        assert variant.model is not None
        hetmem.release(variant.model)


def main() -> None:
    """Parse, measure, print Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=None, help="on the disk to measure (a temporary directory)")
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--chunk-mib", type=int, choices=(1, 4, 16, 64), default=4, help="of a chunk and its weight")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--compute", type=float, default=1.0, help="compute, as a multiple of the optimizer's time")
    parser.add_argument("--link", type=float, default=12e9, help="bytes a second of the accelerator's link, each way")
    parser.add_argument("--host-bytes", type=float, default=4.0, help="of host memory a parameter, before NVMe (of 16)")
    parser.add_argument("--only", choices=("demo", *PLACEMENTS), help="of the tables (default: all)")
    args = parser.parse_args()
    machine = f"{usable_cores()} cores, {platform.machine()}, torch {torch.__version__}"
    print(f"{args.layers} layers of {args.chunk_mib} MiB, {args.host_bytes:g} bytes of host a parameter, {machine}")
    with tempfile.TemporaryDirectory(dir=args.dir) as directory:
        if args.only in (None, "demo"):
            demo(args, Path(directory))
        for placement in PLACEMENTS:
            if args.only in (None, placement):
                compare(placement, args, Path(directory))


if __name__ == "__main__":
    main()
