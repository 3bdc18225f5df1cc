"""The pass that sums up the squares of gradients.

It knows flat tensors and tasks; it must not know what the results are for.

Every tile is summed in float64 in one fixed order (`loops.square_sum`), and the tiles' sums are added exactly and
rounded once (Shewchuk's `math.fsum`). So the result depends neither on threads nor on the CPU's vectors nor on the
order of the gradients, nor on whether the host or a GPU sums them up (`square_sums_on_device`); `sum` would depend on
the version of Python too. Squares of 24-bit numbers are exact in float64 and 2**500 of the greatest would not overflow:
the sum is infinite or NaN if and only if an element is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cache, partial

import numpy as np
import torch

from hetmem.cpu import loops
from hetmem.cpu.adamw import kernels_of
from hetmem.cpu.workers import Array, Task, as_array, check_flat, one_torch_thread, tiles_of
from hetmem.cuda.kernels import RUN_ELEMENTS, by_halves, square_sums, torch_square_sums

_LOOPED = (torch.float32, torch.bfloat16, torch.float16)


def square_sum_tasks(grad: torch.Tensor) -> tuple[list[Task], Array]:
    """Tasks that sum up one tile each, and the float64 array that they write to: one number per task.

    `grad` is flat, on the CPU, and in float32, bfloat16 or float16; in float64 the sum of squares may overflow. The
    tasks may run in any order on any thread, and hold the memory; `total` of the array is the sum once all have run.
    The partial sums belong to the tensor: parts of it summed apart may differ in the last bit.
    """
    check_flat(grad)
    tiles = tiles_of(grad.numel())
    partials = np.zeros(len(tiles))
    loop = _verified_loop(grad.dtype)
    flat = grad.detach()
    if isinstance(loop, str):
        return [partial(_store, _square_sum_torch, partials, i, flat[tile]) for i, tile in enumerate(tiles)], partials
    array = as_array(flat)
    return [partial(_store, loop, partials, i, array[tile]) for i, tile in enumerate(tiles)], partials


def square_sums_on_device(grad: torch.Tensor) -> torch.Tensor:
    """The sums of squares of runs of `grad`, flat on a GPU, there too, on its current stream; see `sums_of_tiles`."""
    sums = torch.empty(-(-grad.numel() // RUN_ELEMENTS), dtype=torch.float64, device=grad.device)
    if grad.dtype in _LOOPED:
        square_sums(kernels_of(grad.device), grad.detach(), sums)
    else:
        sums.copy_(torch_square_sums(grad.detach()))
    return sums


def sums_of_tiles(runs: torch.Tensor) -> Array:
    """What the tasks of `square_sum_tasks` would write, of a tensor whose `runs` were summed up."""
    tiles = -(-runs.numel() // loops.RUNS)
    padded = torch.nn.functional.pad(runs, (0, tiles * loops.RUNS - runs.numel()))
    return by_halves(padded.view(tiles, loops.RUNS)).numpy()


def total(partials: Iterable[Array]) -> float:
    """The exact sum of all numbers in `partials`, rounded once; inf or NaN if one of them is."""
    numbers = [number for array in partials for number in array.tolist()]
    finite = all(map(math.isfinite, numbers))  # fsum refuses some of the others
    return math.fsum(numbers) if finite else max(numbers, key=lambda number: (math.isnan(number), number))


def _store(loop: loops.Loop, results: Array, index: int, *flats: object) -> None:
    results[index] = loop(*flats)


@cache
def _verified_loop(grad: torch.dtype) -> loops.Loop | str:
    """The compiled loop for gradients of this dtype once it has given torch's bits, or why torch must do it."""
    if grad not in _LOOPED:
        return f"no loop for {grad}"
    values = torch.linspace(0, 700, 5500, dtype=torch.float64, device="cpu").sin().to(grad)
    return loops.verified(
        loops.square_sum, lambda compiled: bool(compiled(as_array(values)) == _square_sum_torch(values))
    )


def _square_sum_torch(values: torch.Tensor) -> float:
    """`loops.square_sum` of one tile by torch, with the same bits."""
    with one_torch_thread():
        return float(sums_of_tiles(torch_square_sums(values)).sum())  # of one number, or none
