"""The pass that sums the squares of gradients.

It knows flat tensors and tasks; it must not know what the results are for.

Squares are summed in float64 in one fixed order, run by run (`loops.square_sums`) and tile by tile, and the tiles' sums
are added exactly and rounded once (Shewchuk's `math.fsum`). So the result depends neither on threads, nor on the CPU's
vectors, nor on the order of the gradients, nor on whether the host or a GPU sums; `sum` would depend on the version of
Python too. Squares of 24-bit numbers are exact in float64 and 2**500 of the greatest would not overflow: the sum is
infinite or NaN if and only if an element is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any

import torch

from hetmem.cpu import loops
from hetmem.cpu.adamw import kernels_of
from hetmem.cpu.workers import TILE_ELEMENTS, Task, as_array, check_flat, one_torch_thread, tiles_of
from hetmem.cuda.kernels import RUN_ELEMENTS, by_halves, square_sums, torch_square_sums

_LOOPED = (torch.float32, torch.bfloat16, torch.float16)
_RUNS = TILE_ELEMENTS // RUN_ELEMENTS


def square_sum_tasks(
    grad: torch.Tensor, sums: torch.Tensor | None = None, wanted: Callable[[int], bool] | None = None
) -> tuple[list[Task], torch.Tensor]:
    """Return tasks that sum one tile each, and the float64 tensor that they write to: one number for each run.

    `grad` is flat, and in float32, bfloat16 or float16; in float64 the sum of squares may overflow. The tasks may run
    in any order on any thread, and hold the memory; `total` of the tensor is the sum once all have run. A GPU sums at
    once, on its current stream, and leaves no tasks. Parts of the tensor summed apart may differ in the last bit.
    `sums`: the tensor to write to; `wanted`: which tiles, by number; both for `grad` in host memory.
    """
    grad = grad.detach()
    if sums is None:
        sums = torch.empty(-(-grad.numel() // RUN_ELEMENTS), dtype=torch.float64, device=grad.device)
    if not grad.is_cpu:
        if grad.dtype in _LOOPED:
            square_sums(kernels_of(grad.device), grad, sums)
        else:
            sums.copy_(torch_square_sums(grad))
        return [], sums
    check_flat(grad)
    loop = _verified_loop(grad.dtype)
    function: Any = _by_torch if isinstance(loop, str) else loop
    values, results = (grad, sums) if isinstance(loop, str) else (as_array(grad), sums.numpy())
    tiles = [
        (tile, slice(at * _RUNS, (at + 1) * _RUNS))
        for at, tile in enumerate(tiles_of(grad.numel()))
        if wanted is None or wanted(at)
    ]
    return [partial(function, values[tile], results[runs]) for tile, runs in tiles], sums


def sums_nbytes(elements: int, tensors: int) -> int:
    """Return the bytes of the sums of `square_sum_tasks` for so many `tensors`, of `elements` in all."""
    return 8 * (elements // RUN_ELEMENTS + tensors)


def sums_where_it_is(grad: torch.Tensor) -> torch.Tensor | None:
    """Return the sums of `square_sum_tasks` of `grad`, at once: on a GPU behind the compute that was launched before;
    None if it has no kernel for that, which torch's operators would be slower than the way home."""
    if not (grad.is_cpu or (kernels_of(grad.device).native and grad.dtype in _LOOPED)):
        return None
    tasks, sums = square_sum_tasks(grad)
    for task in tasks:
        task()
    return sums


def total(sums: Iterable[torch.Tensor]) -> float:
    """Return the sum of all results in `sums`; inf or NaN if an element of a gradient is. Waits for a GPU once."""
    given = sorted(sums, key=lambda one: one.is_cpu)
    on_device = [one for one in given if not one.is_cpu]
    arrived = torch.cat(on_device).cpu().split([one.numel() for one in on_device]) if on_device else ()
    return exact_sum(sums_of_tiles([*arrived, *given[len(on_device) :]]))


def exact_sum(numbers: Iterable[float]) -> float:
    """Return the sum of `numbers`, rounded once; inf or NaN if one of them is."""
    numbers = [*numbers]
    finite = all(map(math.isfinite, numbers))  # fsum raises for some infinite sums
    return math.fsum(numbers) if finite else max(numbers, key=lambda number: (math.isnan(number), number))


def sums_of_tiles(sums: Iterable[torch.Tensor]) -> list[float]:
    """Return the sum of each tile of tensors in host memory whose runs have the `sums`."""
    padded = [part for runs in sums for part in (runs, runs.new_zeros(-runs.numel() % _RUNS))]
    return by_halves(torch.cat(padded).view(-1, _RUNS)).tolist() if padded else []


@cache
def _verified_loop(grad: torch.dtype) -> loops.Loop | str:
    """Return the compiled loop for gradients of this dtype once it has given torch's bits, or why torch must do it."""
    if grad not in _LOOPED:
        return f"no loop for {grad}"
    values = torch.linspace(0, 700, 5500, dtype=torch.float64, device="cpu").sin().to(grad)
    expected, found = torch.zeros(2, 2, dtype=torch.float64, device="cpu")
    _by_torch(values, expected)

    def gives_torchs_bits(compiled: loops.Loop) -> bool:
        compiled(as_array(values), found.numpy())
        return torch.equal(found, expected)

    return loops.verified(loops.square_sums, gives_torchs_bits)


def _by_torch(values: torch.Tensor, sums: torch.Tensor) -> None:
    """Compute `loops.square_sums` of one tile in torch, with the same bits."""
    with one_torch_thread():
        sums.copy_(torch_square_sums(values))
