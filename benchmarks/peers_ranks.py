"""The same GPT trained by several ranks of DistributedDataParallel, FSDP2 with `CPUOffloadPolicy`, and hetmem.

    OMP_WAIT_POLICY=passive python -m benchmarks.peers_ranks [--ranks 2 4] [--rounds 7] [--width 512 --depth 8 …]

The ranks of each library are processes of one thread with a group on gloo. Rounds are interleaved, and only the ranks
of one library are at work at a time. A round is one step of all ranks: "wall" is that of the slowest, "CPU" the time
that all threads of all ranks took. Ratios are of medians within the run. "Memory" is the proportional set size of all
ranks after their steps, less what each had after its imports; hetmem's is less its simulated devices too, which lie in
host memory here. Without GPUs this compares what the libraries themselves cost.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch

from benchmarks.trainers import LR, Shape, Step

MIB = 1 << 20
WARM_UP = 2


# ---- the libraries ----------------------------------------------------------------------------------------------


def ddp(shape: Shape, rank: int) -> tuple[Step, Callable[[], int]]:
    """A replica with all its states on each rank."""
    from torch.nn.parallel import DistributedDataParallel

    from benchmarks.gpu.models import training_step

    model = DistributedDataParallel(shape.model())
    return training_step(model, torch.optim.AdamW(model.parameters(), lr=LR, fused=True), _batch(shape, rank)), _none


def fsdp2(shape: Shape, rank: int) -> tuple[Step, Callable[[], int]]:
    """`fully_shard` of each block; parameters, gradients and optimizer on the host."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    from benchmarks.gpu.models import training_step

    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    model = shape.model()
    for block in model.blocks:
        fully_shard(block, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
    fully_shard(model, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
    return training_step(model, torch.optim.AdamW(model.parameters(), lr=LR, fused=True), _batch(shape, rank)), _none


def hetmem(shape: Shape, rank: int, **adamw: Any) -> tuple[Step, Callable[[], int]]:
    """Homes on the host, once; the device of each rank has room for half of the copies."""
    import hetmem
    from benchmarks.gpu.models import training_step

    model = shape.model()
    weights = 4 * sum(parameter.numel() for parameter in model.parameters())
    budget = hetmem.Budget(device=16 * weights, device_chunks=weights // 2, host=6 * weights)
    managed = hetmem.manage(model, budget, device="sim")
    step = training_step(managed, hetmem.AdamW(managed.parameters(), lr=LR, **adamw), _batch(shape, rank))
    return step, lambda: int(hetmem.report(managed).to_dict()["tiers"]["device"]["peak_bytes"])


def _none() -> int:
    return 0


def _batch(shape: Shape, rank: int) -> torch.Tensor:
    torch.manual_seed(rank)
    return torch.randint(0, shape.vocabulary, (shape.batch, shape.context))


LIBRARIES: dict[str, tuple[str, Callable[[Shape, int], tuple[Step, Callable[[], int]]]]] = {
    "ddp": ("DistributedDataParallel, a replica on each rank", ddp),
    "fsdp2": ("FSDP2 with `CPUOffloadPolicy`", fsdp2),
    "hetmem": ("hetmem, one copy of the model", hetmem),
    "hetmem-overlap": ('hetmem with `overlap="backward"`', partial(hetmem, overlap="backward")),
}


# ---- one rank, in its process -----------------------------------------------------------------------------------


def serve(name: str, shape: Shape, rank: int, count: int, folder: str, pipe: Connection) -> None:
    """Answer "step" with the figures of one, and "memory" with bytes, until the pipe ends."""
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(count), LOCAL_WORLD_SIZE=str(count), OMP_NUM_THREADS="1"
    )
    try:
        torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/{name}", rank=rank, world_size=count)
        import hetmem  # noqa: F401 - what all libraries are less

        warm = torch.nn.Linear(8, 8)
        warm(torch.ones(2, 8)).sum().backward()
        before = proportional_bytes()
        step, of_device = LIBRARIES[name][1](shape, rank)
        pipe.send({})
        while True:
            asked = pipe.recv()
            if asked == "memory":
                pipe.send({"bytes": proportional_bytes() - before - of_device()})
                continue
            torch.distributed.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            loss = float(step())
            pipe.send({"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu, "loss": loss})
    except EOFError:
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def proportional_bytes() -> int:
    """Return the proportional set size of this process: pages that n processes share count 1/n."""
    with open("/proc/self/smaps_rollup") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


# ---- all of them -------------------------------------------------------------------------------------------------


class Group:
    """The ranks of one library."""

    def __init__(self, name: str, shape: Shape, count: int, folder: str) -> None:
        context = multiprocessing.get_context("spawn")
        pipes = [context.Pipe() for _ in range(count)]
        self.pipes = [pipe for pipe, _ in pipes]
        self.processes = [
            context.Process(target=serve, args=(name, shape, rank, count, folder, end), daemon=True)
            for rank, (_, end) in enumerate(pipes)
        ]
        for process, (_, end) in zip(self.processes, pipes, strict=True):
            process.start()
            end.close()
        for pipe in self.pipes:
            pipe.recv()

    def ask(self, what: str) -> list[dict[str, Any]]:
        for pipe in self.pipes:
            pipe.send(what)
        return [pipe.recv() for pipe in self.pipes]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


def compare(names: list[str], shape: Shape, count: int, rounds: int) -> None:
    """Print a table of `rounds` steps of `count` ranks by each library."""
    groups: dict[str, Group] = {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            for name in names:
                groups[name] = Group(name, shape, count, folder)
            found: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in names}
            for number in range(WARM_UP + rounds):
                for name, group in groups.items():
                    figures = group.ask("step")
                    if number >= WARM_UP:
                        found[name].append(figures)
            memory = {name: sum(each["bytes"] for each in group.ask("memory")) for name, group in groups.items()}
        finally:
            for group in groups.values():
                group.close()
    wall = {name: [max(each["wall"] for each in step) for step in steps] for name, steps in found.items()}
    cpu = {name: [sum(each["cpu"] for each in step) for step in steps] for name, steps in found.items()}
    beside = "fsdp2" if "fsdp2" in names else names[0]
    print(f"\n{count} ranks, {rounds} rounds, load {os.getloadavg()[0]:.1f}; ratios to {beside}\n")
    print(f"| {'':44} | wall | rounds | CPU | memory |\n|---|---|---|---|---|")
    for name in names:
        ratios = [one / other for one, other in zip(wall[name], wall[beside], strict=True)]
        print(
            f"| {LIBRARIES[name][0]:44} | {statistics.median(wall[name]) / statistics.median(wall[beside]):.2f} "
            f"| {min(ratios):.2f} to {max(ratios):.2f} "
            f"| {statistics.median(cpu[name]) / statistics.median(cpu[beside]):.2f} "
            f"| {memory[name] / MIB:.0f} MiB, {memory[name] / memory[beside]:.2f} |"
        )
        sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", default=",".join(LIBRARIES))
    for name in ("width", "depth", "vocabulary", "batch", "context"):
        parser.add_argument(f"--{name}", type=int, default=getattr(Shape(), name))
    asked = parser.parse_args()
    names = asked.only.split(",")
    if unknown := set(names) - set(LIBRARIES):
        parser.error(f"--only takes {', '.join(LIBRARIES)}, got {', '.join(unknown)}")
    shape = Shape(asked.width, asked.depth, asked.vocabulary, asked.batch, asked.context)
    for count in asked.ranks:
        compare(names, shape, count, asked.rounds)


if __name__ == "__main__":
    main()
