"""The same GPT trained by several ranks of DistributedDataParallel, FSDP2, DeepSpeed ZeRO-3 and hetmem.

    OMP_WAIT_POLICY=passive python -m benchmarks.peers_ranks [--ranks 2 4] [--rounds 7] [--width 512 --depth 8 …]

The ranks of each library are processes of one thread with a group on gloo; "one process" runs the batches of all ranks
in turn, with one thread too. Rounds are interleaved, and only the processes of one library are at work at a time. A
round is one step of all ranks: "wall" is that of the slowest, "CPU" the time that all threads of all ranks took. Ratios
are of medians within the run. "Memory" is the proportional set size of all ranks after their steps, with gradients,
less what each had after its imports and a warm-up; hetmem's is less what its simulated devices hold then, as they lie
in host memory here.
The C library keeps freed blocks alike in all processes: see `benchmarks.peers`. Without GPUs this compares what the
libraries themselves cost.

`--resume 3`: what the ranks have saved in the end is loaded by so many ranks. A library that is not installed, or that
cannot run here, says why.
"""

from __future__ import annotations

import argparse
import ctypes
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from benchmarks.peers import MALLOC
from benchmarks.trainers import LR, Shape, deepspeed_config

MIB = 1 << 20
WARM_UP = 2


# ---- the libraries ----------------------------------------------------------------------------------------------


@dataclass
class Trainer:
    """A model in training on one rank."""

    step: Callable[[], float]
    """One step over the batches of this rank; its last loss."""
    evaluate: Callable[[], float]
    save: Callable[[str], object]
    load: Callable[[str], object]
    device_bytes: Callable[[], int] = lambda: 0
    """What a simulated device holds in host memory."""


Batches = Sequence[torch.Tensor]


def _by_torch(model: Any, optimizer: Any, batches: Batches, **others: Any) -> Trainer:
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    def step() -> float:
        optimizer.zero_grad()  # not at the end: gradients count where memory is measured
        for batch in batches:
            loss = model(batch) / len(batches)
            loss.backward()
        optimizer.step()
        return float(loss.detach())

    def states() -> dict[str, Any]:
        return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))

    def save(path: str) -> None:
        checkpoint.save(states(), checkpoint_id=path)

    def load(path: str) -> None:
        found = states()
        checkpoint.load(found, checkpoint_id=path)
        set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])

    return Trainer(**{"step": step, "evaluate": _evaluate(model, batches), "save": save, "load": load, **others})


def _evaluate(model: Any, batches: Batches) -> Callable[[], float]:
    @torch.no_grad()
    def evaluate() -> float:
        return float(model(batches[0]))

    return evaluate


def ddp(shape: Shape, batches: Batches) -> Trainer:
    """A replica with all its states on each rank."""
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(shape.model())
    return _by_torch(model, torch.optim.AdamW(model.parameters(), lr=LR, fused=True), batches)


def fsdp2(shape: Shape, batches: Batches) -> Trainer:
    """`fully_shard` of each block; parameters, gradients and optimizer on the host."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    model = shape.model()
    for block in model.blocks:
        fully_shard(block, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
    fully_shard(model, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
    return _by_torch(model, torch.optim.AdamW(model.parameters(), lr=LR, fused=True), batches)


def deepspeed(shape: Shape, batches: Batches) -> Trainer:
    """ZeRO-3 with parameters and optimizer on the host."""
    import deepspeed

    model = shape.model()
    config = deepspeed_config(shape, {"device": "cpu", "pin_memory": False})
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)

    def step() -> float:
        for batch in batches:
            loss = engine(batch)
            engine.backward(loss)
            engine.step()
        return float(loss.detach())

    return Trainer(step, _evaluate(engine, batches), engine.save_checkpoint, engine.load_checkpoint)


def hetmem(shape: Shape, batches: Batches, **adamw: Any) -> Trainer:
    """Homes on the host, once; the device of each rank has room for half of the copies."""
    import hetmem
    from hetmem.testing import Inside

    model = shape.model()
    weights = 4 * sum(parameter.numel() for parameter in model.parameters())
    budget = hetmem.Budget(device=16 * weights, device_chunks=weights // 2, host=6 * weights)
    managed = hetmem.manage(model, budget, device="sim")
    optimizer = hetmem.AdamW(managed.parameters(), lr=LR, **adamw)
    return _by_torch(
        managed,
        optimizer,
        batches,
        save=lambda path: hetmem.save(path, managed, optimizer),
        load=lambda path: hetmem.load(path, managed, optimizer),
        device_bytes=lambda: Inside(managed).memory().held_bytes,
    )


LIBRARIES: dict[str, tuple[str, Callable[[Shape, Batches], Trainer]]] = {
    "ddp": ("DistributedDataParallel, a replica on each rank", ddp),
    "fsdp2": ("FSDP2 with `CPUOffloadPolicy`", fsdp2),
    "deepspeed": ("DeepSpeed ZeRO-3, all on the host", deepspeed),
    "hetmem": ("hetmem, one copy of the model", hetmem),
    "hetmem-overlap": ('hetmem with `overlap="backward"`', partial(hetmem, overlap="backward")),
    "hetmem-alone": ("hetmem in one process, all batches in turn", hetmem),
}
ALONE = "hetmem-alone"


# ---- one rank, in its process -----------------------------------------------------------------------------------


def serve(name: str, shape: Shape, rank: int, count: int, ranks: int, folder: str, pipe: Connection) -> None:
    """Answer "step", "memory", "evaluate", and the path of a checkpoint to save or load, each behind what to do with
    it, until the pipe ends. `ranks`: of how many the batches are that these `count` processes have."""
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(count), LOCAL_WORLD_SIZE=str(count), OMP_NUM_THREADS="1"
    )
    try:
        rendezvous = f"file://{folder}/{name}-{count}"
        torch.distributed.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=count)
        _warm_up(shape)
        before = proportional_bytes()
        batches = [_batch(shape, each) for each in (range(ranks) if count == 1 else [rank])]
        trainer = LIBRARIES[name][1](shape, batches)
        pipe.send({})
        while True:
            asked, path = pipe.recv()
            torch.distributed.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            answer: dict[str, Any] = {}
            if asked == "memory":
                give_back_freed_blocks()
                torch.distributed.barrier()
                answer["bytes"] = proportional_bytes() - before - trainer.device_bytes()
            elif asked in ("step", "evaluate"):
                answer["loss"] = getattr(trainer, asked)()
            else:
                getattr(trainer, asked)(path)
            pipe.send({**answer, "wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu})
    except EOFError:
        os._exit(0)
    except BaseException as error:
        traceback.print_exc()
        pipe.send({"failed": f"{type(error).__name__}: {error}".splitlines()[0][:200]})
        os._exit(1)


def _warm_up(shape: Shape) -> None:
    """Do what takes memory once in a process, whatever trains: imports, threads, buffers of matrix products, compiled
    loops."""
    import hetmem

    replace(shape, depth=1).model()(_batch(shape, 0)).backward()
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    for managed in (False, True):
        if managed:
            hetmem.manage(model, hetmem.Budget(device="1MiB", host="4MiB"), device="sim", group=False)
        optimizer = hetmem.AdamW if managed else partial(torch.optim.AdamW, fused=True)
        step = optimizer(model.parameters(), lr=LR)
        for _ in range(2):
            model(torch.ones(2, 64)).sum().backward()
            step.step()
            step.zero_grad()
    hetmem.release(model)
    give_back_freed_blocks()


def give_back_freed_blocks() -> None:
    """Have the C library give freed activations back, as if they had been a GPU's."""
    ctypes.CDLL(None).malloc_trim(0)


def _batch(shape: Shape, rank: int) -> torch.Tensor:
    torch.manual_seed(rank)
    return torch.randint(0, shape.vocabulary, (shape.batch, shape.context))


def proportional_bytes() -> int:
    """Return the proportional set size of this process: pages that n processes share count 1/n."""
    with open("/proc/self/smaps_rollup") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


# ---- all of them -------------------------------------------------------------------------------------------------


class RefusedError(Exception):
    """A library cannot do what it was asked for."""


class Group:
    """The processes of one library."""

    def __init__(self, name: str, shape: Shape, ranks: int, folder: str) -> None:
        self.count = 1 if name == ALONE else ranks
        context = multiprocessing.get_context("spawn")
        pipes = [context.Pipe() for _ in range(self.count)]
        self.pipes = [pipe for pipe, _ in pipes]
        self.processes = [
            context.Process(target=serve, args=(name, shape, rank, self.count, ranks, folder, end), daemon=True)
            for rank, (_, end) in enumerate(pipes)
        ]
        for process, (_, end) in zip(self.processes, pipes, strict=True):
            process.start()
            end.close()

    def begin(self) -> None:
        """Wait until all are built. Raises `RefusedError`."""
        self._hear()

    def ask(self, what: str, path: str = "") -> list[dict[str, Any]]:
        """Return the answer of each process. Raises `RefusedError`."""
        for pipe in self.pipes:
            pipe.send((what, path))
        return self._hear()

    def _hear(self) -> list[dict[str, Any]]:
        try:
            answers = [pipe.recv() for pipe in self.pipes]
        except EOFError:
            raise RefusedError("a process has ended") from None
        for answer in answers:
            if "failed" in answer:
                raise RefusedError(answer["failed"])
        return answers

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


Steps = list[list[dict[str, Any]]]


def compare(names: list[str], shape: Shape, count: int, rounds: int, resume: int) -> None:
    """Print a table of `rounds` steps of `count` ranks by each library; of what they save another one of `resume` ranks
    that load it."""
    failed: dict[str, str] = {}
    found: dict[str, Steps] = {name: [] for name in names}
    memory, saved = dict[str, int](), dict[str, str]()
    with tempfile.TemporaryDirectory() as folder:
        groups = {name: Group(name, shape, count, folder) for name in names}
        try:
            for name, group in groups.items():
                _try(group.begin, name, failed)
            for number in range(WARM_UP + rounds):
                for name, group in groups.items():
                    figures = _try(partial(group.ask, "step"), name, failed)
                    if number >= WARM_UP and figures:
                        found[name].append(figures)
            for name, group in groups.items():
                memory[name] = sum(each["bytes"] for each in _try(partial(group.ask, "memory"), name, failed))
            for name in [name for name in names if resume and name != ALONE and name not in failed]:
                told = _try(partial(_resumed, name, groups[name], shape, resume, folder), name, failed)
                saved[name] = told or failed.pop(name)
        finally:
            for group in groups.values():
                group.close()
    print("\n".join(table(names, count, rounds, found, memory, failed)))
    if resume:
        print(f"\n| what {resume} ranks do with the checkpoint of {count} | |\n|---|---|")
        print("\n".join(f"| {LIBRARIES[name][0]} | {text} |" for name, text in saved.items()))
    sys.stdout.flush()


def _try(act: Callable[[], Any], name: str, failed: dict[str, str]) -> Any:
    """Return what `act` does; nothing, if `name` has failed, or fails now."""
    if name in failed:
        return []
    try:
        return act()
    except RefusedError as error:
        failed[name] = str(error)
        return []


def _resumed(name: str, group: Group, shape: Shape, resume: int, folder: str) -> str:
    path = os.path.join(folder, f"checkpoint-{name}")
    seconds = max(each["wall"] for each in group.ask("save", path))
    loss = group.ask("evaluate")[0]["loss"]
    files = [Path(path)] if os.path.isfile(path) else [each for each in Path(path).rglob("*") if each.is_file()]
    others = Group(name, shape, resume, folder)
    try:
        others.begin()
        load = max(each["wall"] for each in others.ask("load", path))
        equal = "the same loss" if others.ask("evaluate")[0]["loss"] == loss else "another loss"
        others.ask("step")
    finally:
        others.close()
    mib = sum(each.stat().st_size for each in files) / MIB
    return f"{equal}, then a step; {mib:.0f} MiB in {len(files)} files, saved in {seconds:.2f} s, loaded in {load:.2f}"


def table(
    names: list[str], count: int, rounds: int, found: dict[str, Steps], memory: dict[str, int], failed: dict[str, str]
) -> list[str]:
    """Markdown: ratios to FSDP2, or else to the first of `names` that has not failed."""
    there = [name for name in names if name not in failed]
    wall = {name: [max(each["wall"] for each in step) for step in found[name]] for name in there}
    cpu = {name: [sum(each["cpu"] for each in step) for step in found[name]] for name in there}
    beside = "fsdp2" if "fsdp2" in there else there[0]
    lines = [f"\n{count} ranks, {rounds} rounds, load {os.getloadavg()[0]:.1f}; ratios to {beside}\n"]
    lines.append(f"| {'':44} | wall | rounds | CPU | seconds | memory |\n|---|---|---|---|---|---|")
    for name in names:
        if name in failed:
            lines.append(f"| {LIBRARIES[name][0]:44} | {failed[name]} | | | | |")
            continue
        ratios = [one / other for one, other in zip(wall[name], wall[beside], strict=True)]
        lines.append(
            f"| {LIBRARIES[name][0]:44} | {statistics.median(wall[name]) / statistics.median(wall[beside]):.2f} "
            f"| {min(ratios):.2f} to {max(ratios):.2f} "
            f"| {statistics.median(cpu[name]) / statistics.median(cpu[beside]):.2f} "
            f"| {statistics.median(wall[name]):.2f} "
            f"| {memory[name] / MIB:.0f} MiB, {memory[name] / memory[beside]:.2f} |"
        )
    if {"hetmem", ALONE} <= {*there}:
        ratios = sorted(one / other for one, other in zip(wall["hetmem"], wall[ALONE], strict=True))
        lines.append(
            f"\n{count} ranks take {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}) of the time of"
            f" one process, and {memory['hetmem'] / memory[ALONE]:.2f} of its memory."
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", default=",".join(LIBRARIES))
    parser.add_argument("--resume", type=int, default=0)
    for name in ("width", "depth", "vocabulary", "batch", "context"):
        parser.add_argument(f"--{name}", type=int, default=getattr(Shape(), name))
    asked = parser.parse_args()
    names = asked.only.split(",")
    if unknown := set(names) - set(LIBRARIES):
        parser.error(f"--only takes {', '.join(LIBRARIES)}, got {', '.join(unknown)}")
    os.environ.update({name: value for name, value in MALLOC.items() if name not in os.environ})
    shape = Shape(asked.width, asked.depth, asked.vocabulary, asked.batch, asked.context)
    for count in asked.ranks:
        compare(names, shape, count, asked.rounds, asked.resume)


if __name__ == "__main__":
    main()
