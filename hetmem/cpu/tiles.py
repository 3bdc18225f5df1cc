"""What all host kernels share: flat tensors as numpy arrays, the tiles of a pass, and one thread for torch's part.

It must not know what a kernel computes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import torch

TILE_ELEMENTS = 512 * 1024
"""Elements of one task: a few hundred microseconds, and what torch's kernels leave in the cache between two passes."""

Array = np.ndarray[Any, Any]
Task = Callable[[], None]


def check_flat(first: torch.Tensor, *others: torch.Tensor | None) -> None:
    """Assert that all are flat, of one length and in host memory."""
    for tensor in (first, *others):
        if tensor is not None:
            assert tensor.device.type == "cpu", f"host memory only, got {tensor.device}"
            assert tensor.stride() == (1,), f"flat memory only, got {tuple(tensor.shape)}, strides {tensor.stride()}"
            assert tensor.numel() == first.numel(), f"{tensor.numel()} elements beside {first.numel()} parameters"


def tiles_of(numel: int) -> list[slice]:
    """`numel` elements in slices of TILE_ELEMENTS."""
    return [slice(start, min(start + TILE_ELEMENTS, numel)) for start in range(0, numel, TILE_ELEMENTS)]


def cut(whole: tuple[Any, ...], part: slice) -> tuple[Any, ...]:
    """`part` of each tensor or array; None stays None."""
    return tuple(None if memory is None else memory[part] for memory in whole)


def as_array(tensor: torch.Tensor) -> Array:
    """The memory of `tensor` as the loops see it: a bfloat16 as uint16, a float16 as int16."""
    tensor = tensor.detach()
    if tensor.dtype is torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(np.uint16)
    return tensor.view(torch.int16).numpy() if tensor.dtype is torch.float16 else tensor.numpy()


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Let torch's operators use no thread but this one.

    `torch.set_num_threads` is for the whole process: threads that start later (autograd's, say) take over the number.
    OpenMP's own setting belongs to the calling thread, and torch asks for it whenever it shares out work.
    """
    threads = torch.get_num_threads()  # also lets torch set up this thread, which would undo the next line later
    _set_openmp_threads()(1)
    try:
        yield
    finally:
        _set_openmp_threads()(threads)


@cache
def _set_openmp_threads() -> Callable[[int], object]:
    """`omp_set_num_threads` of the OpenMP that torch has loaded; nothing where torch was built without one."""
    try:
        setter = ctypes.CDLL(None).omp_set_num_threads
    except (AttributeError, OSError):
        return lambda threads: None
    setter.argtypes, setter.restype = [ctypes.c_int], None
    found: Callable[[int], object] = setter
    return found
