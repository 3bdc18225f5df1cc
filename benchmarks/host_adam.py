"""The host AdamW against torch's fused one and against the same memory traffic without arithmetic.

    python benchmarks/host_adam.py [--elements 16777216] [--rounds 9] [--threads 1 2]

Every element takes 28 bytes of traffic: it reads fp32 p, m, v and a bf16 gradient, and writes fp32 p, m, v and a bf16
copy. Contenders take turns within a round, so what else the machine does falls on all of them; the table gives medians
over the rounds. "torch fused + casts" casts the gradient into a buffer, updates, and casts the copy out of p.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import numba
import numpy as np
import torch

from hetmem.optim.kernels import TILE_ELEMENTS, AdamWStep, adamw, kernel_name
from hetmem.optim.workers import WorkerPool

BYTES_PER_ELEMENT = 14 + 14
STEP = AdamWStep(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, step=10)


@numba.njit(nogil=True)
def traffic(param: np.ndarray, grad: np.ndarray, exp_avg: np.ndarray, exp_avg_sq: np.ndarray, copy: np.ndarray) -> None:
    """What `adamw` reads and writes; all arrays hold integers of the tensors' widths."""
    for i in range(param.size):
        copy[i] = grad[i]
        param[i], exp_avg[i], exp_avg_sq[i] = exp_avg[i], exp_avg_sq[i], param[i]


def as_integers(tensor: torch.Tensor) -> np.ndarray:
    return tensor.view(torch.int32 if tensor.itemsize == 4 else torch.int16).numpy()


def make_tensors(elements: int) -> list[torch.Tensor]:
    """p, g, m, v and the copy."""
    param, grad, exp_avg, exp_avg_sq = (torch.randn(elements) for _ in range(4))
    return [param, grad.bfloat16(), exp_avg, exp_avg_sq.square(), torch.empty(elements, dtype=torch.bfloat16)]


def contenders(elements: int, pool: WorkerPool) -> dict[str, Callable[[], None]]:
    """Each makes one update; all own their memory and have run once, so nothing is compiled or first touched later."""
    tensors = make_tensors(elements)
    param, grad, exp_avg, exp_avg_sq, copy = make_tensors(elements)
    wide = grad.float()
    arrays = [as_integers(tensor) for tensor in make_tensors(elements)]
    tiles = [slice(start, start + TILE_ELEMENTS) for start in range(0, elements, TILE_ELEMENTS)]
    traffic_tasks = [partial(traffic, *(array[tile] for array in arrays)) for tile in tiles]

    def torch_update() -> None:
        torch._fused_adamw_(
            [param], [wide], [exp_avg], [exp_avg_sq], [], [torch.tensor(float(STEP.step))],
            lr=STEP.lr, beta1=STEP.beta1, beta2=STEP.beta2, weight_decay=STEP.weight_decay, eps=STEP.eps,
            amsgrad=False, maximize=False,
        )  # fmt: skip

    def torch_update_with_casts() -> None:
        wide.copy_(grad)
        torch_update()
        copy.copy_(param)

    made: dict[str, Callable[[], None]] = {
        "same traffic, no arithmetic": lambda: pool.run(traffic_tasks),
        "hetmem, gradient and copy in bf16": lambda: adamw(pool, STEP, *tensors),
        "torch fused + casts": torch_update_with_casts,
        "torch fused alone (28 B too: fp32 gradient, no copy)": torch_update,
    }
    for run in made.values():
        run()
    return made


def measure(runs: dict[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    """Seconds of every contender in every round."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def table(threads: int, elements: int, seconds: dict[str, list[float]]) -> Sequence[str]:
    limit = statistics.median(next(iter(seconds.values())))
    lines = [f"| {threads} thread(s) | of the limit | GB/s | ms (min, median, max) |", "|---|---|---|---|"]
    for name, samples in seconds.items():
        median = statistics.median(samples)
        rate = BYTES_PER_ELEMENT * elements / median / 1e9
        spread = ", ".join(f"{1e3 * value:.1f}" for value in (min(samples), median, max(samples)))
        lines.append(f"| {name} | {limit / median:.2f} | {rate:.1f} | {spread} |")
    return [*lines, ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=16 << 20)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    options = parser.parse_args()
    cpu = torch.backends.cpu.get_cpu_capability()
    print(f"{platform.machine()} {cpu}, {os.cpu_count()} cores, torch {torch.__version__}, numba {numba.__version__}; ")
    print(f"{options.elements / 2**20:.0f} Mi elements, {options.rounds} rounds, kernel: {kernel_name()}\n")
    for threads in options.threads:
        torch.set_num_threads(threads)
        pool = WorkerPool(threads)
        print(*table(threads, options.elements, measure(contenders(options.elements, pool), options.rounds)), sep="\n")
        pool.close()


if __name__ == "__main__":
    main()
