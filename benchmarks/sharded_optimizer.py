"""The optimizer's part of a step over `fully_shard`, weights in host memory: torch's AdamW, its fused one, hetmem's,
and what of that is left behind the backward with overlap, beside the time of backward and step together.

    python benchmarks/sharded_optimizer.py [--ranks 2] [--width 1024] [--layers 8] [--rows 2] [--rounds 15]

Ranks of gloo on this machine, each with one thread of torch, as torchrun starts them. All step the same gradients
on models of their own, and take turns within a round, so what else the machine does falls on all of them; the slowest
rank counts. A ratio is the median over the rounds of (hetmem / other) within a round, behind it the quartiles.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

import hetmem


def build(width: int, layers: int, mesh: Any) -> nn.Module:
    """Layers of a transformer's shapes: matrices, biases, norms."""
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        for _ in range(layers)
    ]
    model = nn.Sequential(*blocks)
    for block in (*blocks, model):
        fully_shard(block, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
    return model


def measure(rank: int, arguments: argparse.Namespace, folder: str) -> None:
    """What one rank does; rank 0 prints."""
    os.environ["LOCAL_WORLD_SIZE"] = str(arguments.ranks)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=arguments.ranks)
    mesh = init_device_mesh("cpu", (arguments.ranks,))
    made: dict[str, Any] = {
        "torch": lambda params: torch.optim.AdamW(params, lr=1e-4),
        "torch fused": lambda params: torch.optim.AdamW(params, lr=1e-4, fused=True),
        "hetmem": lambda params: hetmem.AdamW(params, lr=1e-4, budget=hetmem.Budget(host="8GiB")),
        "overlap": lambda params: hetmem.AdamW(params, lr=1e-4, overlap="backward", budget=hetmem.Budget(host="8GiB")),
    }
    contenders = {}
    for name, make in made.items():
        model = build(arguments.width, arguments.layers, mesh)
        contenders[name] = model, make(model.parameters())
    numel = sum(parameter.numel() for parameter in model.parameters())
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    both: dict[str, list[float]] = {name: [] for name in contenders}
    for round_ in range(arguments.rounds + 2):  # two that make states and compile
        for name, (model, optimizer) in contenders.items():
            generator = torch.Generator().manual_seed(round_)
            loss = model(torch.randn(arguments.rows, arguments.width, generator=generator)).square().mean()
            dist.barrier()
            backward_began = time.perf_counter()
            loss.backward()
            began = time.perf_counter()
            optimizer.step()
            ended = time.perf_counter()
            taken = torch.tensor([ended - began, ended - backward_began])
            dist.all_reduce(taken, dist.ReduceOp.MAX)
            seconds[name].append(float(taken[0]))
            both[name].append(float(taken[1]))
            optimizer.zero_grad()
    if rank == 0:
        print(
            f"{numel / 1e6:.1f} M parameters, {arguments.ranks} ranks, {os.cpu_count()} CPUs, torch {torch.__version__}"
        )
        for name, taken_ in seconds.items():
            together = statistics.median(both[name][2:]) * 1e3
            print(f"{name:12} {statistics.median(taken_[2:]) * 1e3:8.1f} ms, with the backward {together:8.1f} ms")
        for ours, name in (("hetmem", "torch"), ("hetmem", "torch fused"), ("overlap", "hetmem")):
            for what, of in (("step", seconds), ("backward and step", both)):
                ratios = [one / other for one, other in zip(of[ours][2:], of[name][2:], strict=True)]
                low, middle, high = statistics.quantiles(ratios, n=4)
                print(f"{ours} / {name}, {what}: {middle:.2f} ({low:.2f} to {high:.2f})")
    same = zip(*(model.parameters() for model, _ in (contenders["torch fused"], contenders["hetmem"])), strict=True)
    assert all(torch.equal(one.to_local(), other.to_local()) for one, other in same), "the bits differ"
    dist.destroy_process_group()


def main() -> None:
    """Start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("ranks", 2), ("width", 1024), ("layers", 8), ("rows", 2), ("rounds", 15)):
        parser.add_argument(f"--{name}", type=int, default=default)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(measure, (arguments, folder), nprocs=arguments.ranks)


if __name__ == "__main__":
    main()
