"""Whether 16-bit copies are what their float32 values round to: one pass that reads both and writes nothing.

It knows flat tensors and tasks; it must not know what the copies are for.
"""

from __future__ import annotations

from functools import cache, partial

import numpy as np
import torch

from hetmem.optim.kernels import loops
from hetmem.optim.kernels.tiles import Array, Task, as_array, check_flat, one_torch_thread, tiles_of

_LOOPED = (torch.bfloat16, torch.float16)


def compare_tasks(values: torch.Tensor, copy: torch.Tensor) -> tuple[list[Task], Array]:
    """Tasks that compare one tile each, and the array that they write to: not zero where a tile of `copy` is not
    `values.to(copy.dtype)`. Both are flat and on the CPU; NaNs of different payloads may count as different.

    The tasks may run in any order on any thread, and hold the memory. Compiles on first use.
    """
    check_flat(values, copy)
    tiles = tiles_of(values.numel())
    found = np.zeros(len(tiles), np.uint32)
    loop = _verified_loop(values.dtype, copy.dtype)
    compare = _compare_by_torch if isinstance(loop, str) else loop
    one, other = (values.detach(), copy.detach()) if isinstance(loop, str) else (as_array(values), as_array(copy))
    return [partial(_store, compare, one[tile], other[tile], found, i) for i, tile in enumerate(tiles)], found


def _store(loop: loops.Loop, values: object, copy: object, found: Array, index: int) -> None:
    found[index] = loop(values, copy)


def _compare_by_torch(values: torch.Tensor, copy: torch.Tensor) -> int:
    with one_torch_thread():
        return int(not torch.equal(values.to(copy.dtype).view(torch.uint8), copy.view(torch.uint8)))


@cache
def _verified_loop(values: torch.dtype, copy: torch.dtype) -> loops.Loop | str:
    """The compiled loop for these dtypes once it has told what torch tells, or why torch must do it."""
    if values is not torch.float32 or copy not in _LOOPED:
        return f"no loop for {values}, {copy}"
    try:
        with loops.compiling():
            loop = loops.compile_loop(loops.compare)
            sines = torch.linspace(0, 700, 1000, dtype=torch.float64, device="cpu").sin().float()
            same, other = sines.to(copy), sines.to(copy)
            other[517] = -other[517]
            right = loop(as_array(sines), as_array(same)) == 0 and loop(as_array(sines), as_array(other)) != 0
            return loop if right else "the compiled loop rounds differently"
    except Exception as error:  # whatever Numba raises, torch tells the same
        return f"{type(error).__name__}: {error}"
