"""The host's passes against the same memory traffic without arithmetic, against torch and against DeepSpeed.

    python benchmarks/host_adam.py [--elements 16777216] [--rounds 15] [--threads 1 2]

An update takes 28 bytes of traffic an element: it reads fp32 p, m, v and a bf16 gradient, and writes fp32 p, m, v and
a bf16 copy. "+ casts" means: cast the gradient into a buffer, update, cast the copy out of p. Contenders take turns
within a round, so what else the machine does falls on all of them. "of the limit" is the median over the rounds of
(limit / contender) within a round, behind it the quartiles; "of minima" compares the fastest rounds of both, which is
the steadier number on a machine that others use too. The norm's limit reads the same bytes and does nothing.
DeepSpeed's row needs `pip install deepspeed`, g++ and ninja.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable
from functools import partial

import numba
import numpy as np
import torch

from hetmem.cpu import (
    GROUP_ELEMENTS,
    TILE_ELEMENTS,
    AdamWStep,
    adamw_tasks,
    kernel_name,
    prepare_small,
    square_sum_tasks,
)
from hetmem.cpu.workers import WorkerPool

BYTES_PER_ELEMENT = 14 + 14
STEP = AdamWStep(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, step=10, grad_scale=0.5)
Runs = dict[str, Callable[[], object]]


@numba.njit(nogil=True)
def traffic(param: np.ndarray, grad: np.ndarray, exp_avg: np.ndarray, exp_avg_sq: np.ndarray, copy: np.ndarray) -> None:
    """What `adamw` reads and writes; all arrays hold integers of the tensors' widths."""
    for i in range(param.size):
        copy[i] = grad[i]
        param[i], exp_avg[i], exp_avg_sq[i] = exp_avg[i], exp_avg_sq[i], param[i]


@numba.njit(nogil=True)
def read(words: np.ndarray, results: np.ndarray, index: int) -> None:
    """What the norm reads, as int64."""
    mixed = np.int64(0)
    for i in range(words.size):
        mixed ^= words[i]
    results[index] = mixed


def as_integers(tensor: torch.Tensor) -> np.ndarray:
    return tensor.view(torch.int32 if tensor.itemsize == 4 else torch.int16).numpy()


def tiles_of(numel: int) -> list[slice]:
    return [slice(start, start + TILE_ELEMENTS) for start in range(0, numel, TILE_ELEMENTS)]


def make_tensors(elements: int) -> list[torch.Tensor]:
    """p, g, m, v and the copy."""
    param, grad, exp_avg, exp_avg_sq = (torch.randn(elements) for _ in range(4))
    return [param, grad.bfloat16(), exp_avg, exp_avg_sq.square(), torch.empty(elements, dtype=torch.bfloat16)]


def updates(elements: int, pool: WorkerPool) -> Runs:
    """Each makes one update. The first is the limit."""
    arrays = [as_integers(tensor) for tensor in make_tensors(elements)]
    tasks = [partial(traffic, *(array[tile] for array in arrays)) for tile in tiles_of(elements)]
    tensors = make_tensors(elements)
    return {
        "same traffic, no arithmetic": lambda: pool.run(tasks),
        "hetmem": lambda: pool.run(adamw_tasks(STEP, *tensors)),
        **torch_updates(elements),
        **deepspeed_update(elements),
    }


def torch_updates(elements: int) -> Runs:
    param, grad, exp_avg, exp_avg_sq, copy = make_tensors(elements)
    wide = grad.float()
    plain = torch.nn.Parameter(param)
    plain.grad = wide
    optimizer = torch.optim.AdamW([plain], lr=STEP.lr, weight_decay=STEP.weight_decay, foreach=False)

    def fused() -> None:
        torch._fused_adamw_(
            [param], [wide], [exp_avg], [exp_avg_sq], [], [torch.tensor(float(STEP.step))],
            lr=STEP.lr, beta1=STEP.beta1, beta2=STEP.beta2, weight_decay=STEP.weight_decay, eps=STEP.eps,
            amsgrad=False, maximize=False,
        )  # fmt: skip

    return {
        "torch fused + casts": with_casts(fused, wide, grad, copy, param),
        "torch plain + casts": with_casts(optimizer.step, wide, grad, copy, param),
    }


def with_casts(
    update: Callable[[], object], wide: torch.Tensor, grad: torch.Tensor, copy: torch.Tensor, param: torch.Tensor
) -> Callable[[], None]:
    def run() -> None:
        wide.copy_(grad)
        update()
        copy.copy_(param)

    return run


def deepspeed_update(elements: int) -> Runs:
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam
    except ImportError:
        print("DeepSpeed is not installed.")
        return {}
    param, grad, _, _, copy = make_tensors(elements)
    parameter = torch.nn.Parameter(param)
    parameter.grad = grad.float()
    optimizer = DeepSpeedCPUAdam([parameter], lr=STEP.lr, weight_decay=STEP.weight_decay, adamw_mode=True)
    return {"DeepSpeed CPU Adam + casts": with_casts(optimizer.step, parameter.grad, grad, copy, param)}


def small_states(elements: int, pool: WorkerPool) -> Runs:
    """The same step on small states; they move fewer bytes than the limit they are compared with."""
    whole = make_tensors(elements)
    runs: Runs = {"fp32 states": lambda: pool.run(adamw_tasks(STEP, *whole))}
    for name, weight in (("fp32 weights", torch.float32), ("bf16 weights", torch.bfloat16)):
        p, grad, m, v, copy = make_tensors(elements)
        small = (p.to(weight), grad, [m.bfloat16(), v.bfloat16()], copy if weight is torch.float32 else None)
        runs[f"{name}, bf16 moments"] = lambda small=small: pool.run(prepare_small(*small, key=1)(STEP))
        scales = [torch.zeros(-(-elements // GROUP_ELEMENTS)) for _ in range(2)]
        codes = [torch.zeros(elements, dtype=dtype) for dtype in (torch.int8, torch.uint8)]
        coded = (p.to(weight), grad, [codes[0], scales[0], codes[1], scales[1]], small[3])
        runs[f"{name}, 8-bit moments"] = lambda coded=coded: pool.run(prepare_small(*coded, key=1)(STEP))
    return runs


def norms(elements: int, dtype: torch.dtype, pool: WorkerPool) -> Runs:
    grad = torch.randn(elements).to(dtype)
    words, width = grad.view(torch.int64).numpy(), 8 // grad.itemsize
    tiles = [slice(tile.start // width, tile.stop // width) for tile in tiles_of(elements)]
    results = np.zeros(len(tiles), np.int64)
    tasks = [partial(read, words[tile], results, index) for index, tile in enumerate(tiles)]
    return {
        f"read {dtype}": lambda: pool.run(tasks),
        "hetmem: sum of squares in fp64, and whether finite": lambda: pool.run(square_sum_tasks(grad)[0]),
        "torch: norm and isfinite().all()": lambda: (torch.linalg.vector_norm(grad), grad.isfinite().all()),
    }


def measure(runs: Runs, rounds: int) -> dict[str, list[float]]:
    """Seconds of every contender in every round, after one run that compiles and touches all memory."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    for _ in range(rounds):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def table(title: str, nbytes: int, seconds: dict[str, list[float]]) -> str:
    limits = next(iter(seconds.values()))
    lines = [f"| {title} | of the limit (quartiles) | of minima | GB/s | ms (min, median, max) |", "|---" * 5 + "|"]
    for name, samples in seconds.items():
        ratios = [limit / sample for limit, sample in zip(limits, samples, strict=True)]
        low, median, high = statistics.quantiles(ratios, n=4)
        spread = ", ".join(f"{1e3 * value:.1f}" for value in (min(samples), statistics.median(samples), max(samples)))
        rate = nbytes / statistics.median(samples) / 1e9
        best = min(limits) / min(samples)
        lines.append(f"| {name} | {median:.2f} ({low:.2f} to {high:.2f}) | {best:.2f} | {rate:.1f} | {spread} |")
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=16 << 20)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    options = parser.parse_args()
    elements, rounds = options.elements, options.rounds
    cpu = torch.backends.cpu.get_cpu_capability()
    print(f"{platform.machine()} {cpu}, {os.cpu_count()} cores, torch {torch.__version__}, numba {numba.__version__}; ")
    print(f"{elements / 2**20:.0f} Mi elements, {rounds} rounds, kernel: {kernel_name()}\n")
    for threads in options.threads:
        torch.set_num_threads(threads)
        pool = WorkerPool(threads)
        title = f"{threads} thread(s)"
        print(table(f"update, {title}", BYTES_PER_ELEMENT * elements, measure(updates(elements, pool), rounds)))
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            found = measure(norms(elements, dtype, pool), rounds)
            print(table(f"norm, {title}", dtype.itemsize * elements, found))
        found = measure(small_states(elements, pool), rounds)
        print(table(f"small states, {title}: of fp32's time", BYTES_PER_ELEMENT * elements, found))
        pool.close()


if __name__ == "__main__":
    main()
