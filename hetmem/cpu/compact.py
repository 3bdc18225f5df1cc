"""AdamW on states smaller than float32: bfloat16 moments, moments of 8 bits, bfloat16 weights without a master.

It knows flat tensors, tasks and keys of chance; it must not know parameters or where the memory comes from.

Every element is updated in float32 as in update.py and then rounded by chance: up or down with the probabilities that
make the expected value exact. To the nearest would stop the second moment from ever falling, as b2 = 0.999 takes off a
thousandth a step and bfloat16 keeps 8 bits (a 256th): v would rest at its greatest value; a weight would lose every
change below a 512th of itself, which is most of them; a first moment of 8 bits would rest at codes below 5.

Chance is a hash of (key, step, element, which state) without any memory: the same for any number of threads, tile size
or arrangement in chunks, and in a run that goes on from a checkpoint. `loops.mix` has Wellons's lowbias32 (2018).
8 bits: Dettmers et al., "8-bit Optimizers via Block-wise Quantization" (2022), with linear codes: -127 to 127 for the
first moment, 0 to 255 for the root of the second.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import torch

from hetmem.cpu import loops
from hetmem.cpu.update import COPIES, GRADIENTS, AdamWStep, scalars_of
from hetmem.cpu.workers import TILE_ELEMENTS, Task, as_array, check_flat, cut
from hetmem.errors import ManageError

GROUP_ELEMENTS = loops.GROUP
"""Elements that share a scale; groups start at a parameter's first element."""

_STATES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Codes8Bit:
    """A moment in 8 bits: code * scale is the first moment (int8), or the root of the second (uint8).

    All zeros is the state before the first step.
    """

    codes: torch.Tensor
    """int8 or uint8, as many as the parameter has elements."""
    scales: torch.Tensor
    """float32, one for each GROUP_ELEMENTS."""


def adamw_compact_tasks(
    step: AdamWStep,
    param: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    compute_copy: torch.Tensor | None = None,
    *,
    key: int,
    first: int = 0,
) -> list[Task]:
    """`adamw_tasks` for states of which each may be float32 or bfloat16; what is bfloat16 is rounded by chance.

    `key` is the parameter's own (of a seed and its name, say), and `first` the place in the parameter of element 0 of
    these tensors, which may be a part of it. `compute_copy` gets the stored `param`. Equal bits on every CPU and for
    any cut into parts.
    """
    check_flat(param, grad, exp_avg, exp_avg_sq, compute_copy)
    tensors = (param, grad, exp_avg, exp_avg_sq, compute_copy)
    dtypes = tuple(None if tensor is None else tensor.dtype for tensor in tensors)
    run = _compact_kernel(dtypes)
    return [partial(run, step, _keys(key, step.step, at), at, *cut(tensors, tile)) for at, tile in _tiles(param, first)]


def adamw_8_bit_tasks(
    step: AdamWStep,
    param: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: Codes8Bit,
    exp_avg_sq: Codes8Bit,
    compute_copy: torch.Tensor | None = None,
    *,
    key: int,
    first: int = 0,
) -> list[Task]:
    """`adamw_compact_tasks` with both moments in 8 bits; `param` float32 or bfloat16. `first` must begin a group.

    A group with an element that is not finite decodes to NaN from then on.
    """
    check_flat(param, grad, exp_avg.codes, exp_avg_sq.codes, compute_copy)
    assert first % GROUP_ELEMENTS == 0, f"element {first} does not begin a group of {GROUP_ELEMENTS}"
    dtypes = (param.dtype, grad.dtype, None if compute_copy is None else compute_copy.dtype)
    run = _8_bit_kernel(dtypes)
    tasks: list[Task] = []
    for at, tile in _tiles(param, first):
        groups = slice(tile.start // GROUP_ELEMENTS, -(-tile.stop // GROUP_ELEMENTS))
        m, root = ((moment.codes[tile], moment.scales[groups]) for moment in (exp_avg, exp_avg_sq))
        p, g, copy = cut((param, grad, compute_copy), tile)
        tasks.append(partial(run, step, _keys(key, step.step, at), at, p, g, *m, *root, copy))
    return tasks


def _tiles(param: torch.Tensor, first: int) -> list[tuple[int, slice]]:
    """(place in the parameter, slice) of each tile; they end at multiples of TILE_ELEMENTS of the parameter."""
    last = first + param.numel()
    starts = [first, *range(first // TILE_ELEMENTS * TILE_ELEMENTS + TILE_ELEMENTS, last, TILE_ELEMENTS)]
    ends = [*starts[1:], last]
    return [(start, slice(start - first, end - first)) for start, end in zip(starts, ends, strict=True) if start < end]


def _keys(key: int, step: int, first: int) -> tuple[np.uint32, ...]:
    """Two keys for the moments and two for the weight. The hash takes 32 bits of the index: the others are in here."""
    digest = hashlib.blake2b(f"{key} {step} {first >> 32}".encode(), digest_size=16).digest()
    return tuple(np.frombuffer(digest, np.dtype("<u4")).astype(np.uint32))


@cache
def _compact_kernel(dtypes: tuple[torch.dtype | None, ...]) -> Callable[..., None]:
    param, grad, exp_avg, exp_avg_sq, copy = dtypes
    for dtype in (param, exp_avg, exp_avg_sq):
        assert dtype in _STATES, f"states are float32 or bfloat16, got {dtype}"
    return _compiled(loops.adamw_compact, param, grad, exp_avg, exp_avg_sq, copy)


@cache
def _8_bit_kernel(dtypes: tuple[torch.dtype | None, ...]) -> Callable[..., None]:
    param, grad, copy = dtypes
    assert param in _STATES, f"weights are float32 or bfloat16, got {param}"
    return _compiled(loops.adamw_8_bit, param, grad, torch.int8, torch.float32, torch.uint8, torch.float32, copy)


def _compiled(loop: loops.Loop, *dtypes: torch.dtype | None) -> Callable[..., None]:
    """Return `loop` as machine code, made for tensors of `dtypes`. Raises `ManageError` where Numba cannot make it."""
    grad, copy = dtypes[1], dtypes[-1]
    assert grad in GRADIENTS and copy in COPIES, f"gradients and copies are of 16 or 32 bits, got {grad} and {copy}"
    try:
        with loops.compiling():
            compiled = partial(_run, loops.compile_loop(loop))
            step = AdamWStep(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, step=1)
            nothing = (None if dtype is None else torch.empty(0, dtype=dtype, device="cpu") for dtype in dtypes)
            compiled(step, _keys(0, 1, 0), 0, *nothing)
            return compiled
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        raise ManageError(
            f"moments= and stochastic_rounding= need Numba, which cannot compile here ({why}): pip install "
            f"'numba>=0.61', or leave them out"
        ) from error


def _run(loop: loops.Loop, step: AdamWStep, keys: Any, first: int, *tensors: torch.Tensor | None) -> None:
    arrays = (None if tensor is None else as_array(tensor) for tensor in tensors)
    loop(scalars_of(step), keys, np.int64(first), *arrays)
