"""AdamW on states smaller than float32: bfloat16 moments, moments of 8 bits, bfloat16 weights without a master.

It knows flat tensors, tasks and keys of chance; it must not know parameters or where the memory comes from.

Every element is updated in float32 as in adamw.py and then rounded by chance: up or down with the probabilities that
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
import importlib.util
from collections.abc import Callable, Sequence
from functools import cache, partial

import numpy as np
import torch

from hetmem.cpu import loops
from hetmem.cpu.adamw import COPIES, GRADIENTS, AdamWStep, scalars_of
from hetmem.cpu.workers import Task, as_array, check_flat, tiles_of
from hetmem.errors import ManageError

GROUP_ELEMENTS = loops.GROUP
"""Elements that share a scale; groups start at a parameter's first element."""

_STATES = (torch.float32, torch.bfloat16)


def check_numba() -> None:
    """Raise `ManageError` where Numba is not installed."""
    if importlib.util.find_spec("numba") is None:
        raise _needs_numba("it is not installed")


def _needs_numba(why: str) -> ManageError:
    return ManageError(
        f"moments= and stochastic_rounding= need Numba, which cannot compile here ({why}): pip install 'numba>=0.61', "
        f"or leave them out"
    )


def adamw_compact_tasks(
    step: AdamWStep,
    param: torch.Tensor,
    grad: torch.Tensor,
    moments: Sequence[torch.Tensor],
    compute_copy: torch.Tensor | None = None,
    *,
    key: int,
) -> list[Task]:
    """`adamw_tasks` for states of which each may be float32 or bfloat16, or for moments in 8 bits; what is not float32
    is rounded by chance.

    `moments`: the first and the second; in 8 bits codes and scales of the one, then of the other. code * scale is the
    first moment (int8), or the root of the second (uint8), with a float32 scale for each GROUP_ELEMENTS. All zeros is
    the state before the first step.

    `key` is the parameter's own (of a seed and its name, say). `compute_copy` gets the stored `param`. Equal bits on
    every CPU. A group of 8-bit codes with an element that is not finite decodes to NaN from then on.
    """
    flats = [param, grad, *moments, compute_copy]
    pers = [GROUP_ELEMENTS if len(moments) == 4 and at in (3, 5) else 1 for at in range(len(flats))]  # elements for one
    check_flat(param, *(flat for flat, per in zip(flats, pers, strict=True) if per == 1))
    run = _kernel(tuple(None if flat is None else flat.dtype for flat in flats))
    tasks: list[Task] = []
    for tile in tiles_of(param.numel()):
        ends = [slice(tile.start // per, -(-tile.stop // per)) for per in pers]
        parts = (None if flat is None else flat[end] for flat, end in zip(flats, ends, strict=True))
        tasks.append(partial(run, step, key, tile.start, *parts))
    return tasks


def _keys(key: int, step: int, first: int) -> tuple[np.uint32, ...]:
    """Two keys for the moments and two for the weight. The hash takes 32 bits of the index: the others are in here."""
    digest = hashlib.blake2b(f"{key} {step} {first >> 32}".encode(), digest_size=16).digest()
    return tuple(np.frombuffer(digest, np.dtype("<u4")).astype(np.uint32))


@cache
def _kernel(dtypes: tuple[torch.dtype | None, ...]) -> Callable[..., None]:
    """Return the loop as machine code for param, grad, moments (7 in all where they have scales) and copy of `dtypes`.
    Raises `ManageError` where Numba cannot make it."""
    in_codes, grad, copy = len(dtypes) == 7, dtypes[1], dtypes[-1]
    for dtype in dtypes[:1] if in_codes else (dtypes[0], *dtypes[2:4]):
        assert dtype in _STATES, f"states are float32 or bfloat16, got {dtype}"
    assert grad in GRADIENTS and copy in COPIES, f"gradients and copies are of 16 or 32 bits, got {grad} and {copy}"
    try:
        with loops.compiling():
            compiled = partial(_run, loops.compile_loop(loops.adamw_8_bit if in_codes else loops.adamw_compact))
            step = AdamWStep(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, step=1)
            nothing = (None if dtype is None else torch.empty(0, dtype=dtype, device="cpu") for dtype in dtypes)
            compiled(step, 0, 0, *nothing)
            return compiled
    except Exception as error:
        raise _needs_numba(f"{type(error).__name__}: {error}") from error


def _run(loop: loops.Loop, step: AdamWStep, key: int, first: int, *tensors: torch.Tensor | None) -> None:
    """Run `loop` on a tile whose first element is the parameter's element `first`."""
    arrays = (None if tensor is None else as_array(tensor) for tensor in tensors)
    loop(scalars_of(step), _keys(key, step.step, first), np.int64(first), *arrays)
