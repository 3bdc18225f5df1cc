"""AdamW on states smaller than float32, on the host, as tasks over tiles.

Note "stochastic rounding": states smaller than float32 (bfloat16 moments, moments of 8 bits, bfloat16 weights without a
master) are updated in float32 and then rounded up or down with the probabilities that make the expected value exact.
Rounding to nearest would keep the second moment from ever falling, as b2 = 0.999 takes off a thousandth a step and
bfloat16 has 8 bits (a 256th): v would stay at its greatest value; a weight would lose every change below a 512th of
itself, which is most of them; a first moment of 8 bits would stay at codes below 5.

The random bits are a hash of (key, step, element, which state) without any memory: the same for any number of threads,
tile size or arrangement in chunks, and in a run that continues from a checkpoint. `loops._mix` has Wellons's lowbias32
(2018). 8 bits: Dettmers et al., "8-bit Optimizers via Block-wise Quantization" (2022), with linear codes: -127 to 127
for the first moment, 0 to 255 for the root of the second.
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Callable, Sequence
from functools import cache, partial

import numpy as np
import torch

from hetmem.base.units import round_up
from hetmem.cpu import loops
from hetmem.cpu.adamw import COPIES, GRADIENTS, TRIED_STEP, AdamWStep, scalars_of
from hetmem.cpu.workers import Task, as_array, check_flat, cut, runs_of
from hetmem.errors import ManageError

GROUP_ELEMENTS = loops.GROUP
"""Elements that share a scale; groups start at a parameter's first element."""

_STATES = (torch.float32, torch.bfloat16)


def prepare_small(
    param: torch.Tensor,
    grad: torch.Tensor,
    moments: Sequence[torch.Tensor],
    compute_copy: torch.Tensor | None = None,
    *,
    key: int,
    own: Sequence[slice] | None = None,
) -> Callable[[AdamWStep], list[Task]]:
    """Return a function that makes the tasks of an update on small states for a step; call it once a step. It holds the
    memory.

    With a `key` of the parameter's own (made from a seed and its number), `param` and each moment may be float32 or
    bfloat16, and both moments in 8 bits; what is not float32 is rounded stochastically: see the note. In 8 bits
    `moments` are codes and scales of the first, then of the second. code * scale is the first moment (int8), or the
    root of the second (uint8), with a float32 scale for each GROUP_ELEMENTS. All zeros is the state before the first
    step. `compute_copy` gets the stored `param`. `own`: parts of the elements to update, None = all; each begins and
    ends with a group, at the next one. Equal bits on every CPU. A group of codes with an element that is not
    finite decodes to NaN from then on. Raises `ManageError` if Numba cannot compile the loop.
    """
    flats, numel = (param, grad, *moments, compute_copy), param.numel()
    pers = [GROUP_ELEMENTS if len(moments) == 4 and at in (3, 5) else 1 for at in range(len(flats))]  # per item
    check_flat(param, *(flat for flat, per in zip(flats, pers, strict=True) if per == 1))
    loop = _kernel(tuple([None if flat is None else flat.dtype for flat in flats]))
    arrays = [None if flat is None or not numel else as_array(flat) for flat in flats]
    tiles = [(np.int64(tile.start), cut(arrays, tile, pers)) for tile in runs_of(numel) if own is None]
    for part in own or ():
        tile = slice(round_up(part.start, GROUP_ELEMENTS), min(numel, round_up(part.stop, GROUP_ELEMENTS)))
        if tile.start < tile.stop:
            tiles.append((np.int64(tile.start), cut(arrays, tile, pers)))

    def tasks(step: AdamWStep) -> list[Task]:
        scalars = scalars_of(step)
        return [partial(loop, scalars, _keys(key, step.step, first), first, *tile) for first, tile in tiles]

    return tasks


def check_numba() -> None:
    """Raise `ManageError` if Numba is not installed."""
    if importlib.util.find_spec("numba") is None:
        raise _needs_numba("it is not installed")


def _needs_numba(why: str) -> ManageError:
    return ManageError(
        f"moments= and stochastic_rounding= need Numba, which cannot compile here ({why}): pip install 'numba>=0.61', "
        f"or leave them out"
    )


def _keys(key: int, step: int, first: np.int64 | int) -> tuple[np.uint32, ...]:
    """Return two keys for the moments and two for the weight, with the bits of the index beyond the hash's 32."""
    digest = hashlib.blake2b(f"{key} {step} {int(first) >> 32}".encode(), digest_size=16).digest()
    return tuple(np.frombuffer(digest, np.dtype("<u4")).astype(np.uint32))


_NO_KEYS = (np.uint32(0),) * 4


@cache
def _kernel(dtypes: tuple[torch.dtype | None, ...]) -> loops.Loop:
    """Return the loop as machine code for param, grad, moments (7 in all where they have scales) and copy of `dtypes`.
    Raises `ManageError` if Numba cannot compile it."""
    in_codes, grad, copy = len(dtypes) == 7, dtypes[1], dtypes[-1]
    for dtype in dtypes[:1] if in_codes else (dtypes[0], *dtypes[2:4]):
        assert dtype in _STATES, f"states are float32 or bfloat16, got {dtype}"
    assert grad in GRADIENTS and copy in COPIES, f"gradients and copies are of 16 or 32 bits, got {grad} and {copy}"
    try:
        with loops.compiling():
            compiled = loops.compile_loop(loops.adamw_8_bit if in_codes else loops.adamw)
            nothing = (
                None if dtype is None else as_array(torch.empty(0, dtype=dtype, device="cpu")) for dtype in dtypes
            )
            compiled(scalars_of(TRIED_STEP), _NO_KEYS, np.int64(0), *nothing)
            return compiled
    except Exception as error:
        raise _needs_numba(f"{type(error).__name__}: {error}") from error
