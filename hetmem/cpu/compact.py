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

Where Numba is missing torch gives the same bits, on one thread: its fused AdamW in float32, and the hash in int64.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch.nn.functional import pad

from hetmem.cpu import loops
from hetmem.cpu.update import COPIES, GRADIENTS, AdamWStep, scalars_of, update_by_torch
from hetmem.cpu.workers import TILE_ELEMENTS, Task, as_array, check_flat, cut, one_torch_thread

_LOW = 0xFFFF_FFFF


def adamw_compact_torch(
    step: AdamWStep,
    keys: Sequence[np.uint32],
    first: int,
    param: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    copy: torch.Tensor | None,
) -> None:
    """`loops.adamw_compact`."""
    with one_torch_thread(), torch.no_grad():
        p, m, v = _element(step, param.float(), grad, exp_avg.float(), exp_avg_sq.float())
        moments, weight = _chances(param.numel(), first, keys)
        rounded = [
            (state, _dither(new, state.dtype, chance))
            for state, new, chance in ((exp_avg, m, moments), (exp_avg_sq, v, moments >> 16), (param, p, weight))
        ]
        _write(rounded)
        if copy is not None:
            copy.copy_(param)


def adamw_8_bit_torch(
    step: AdamWStep,
    keys: Sequence[np.uint32],
    first: int,
    param: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_scales: torch.Tensor,
    roots: torch.Tensor,
    roots_scales: torch.Tensor,
    copy: torch.Tensor | None,
) -> None:
    """`loops.adamw_8_bit`."""
    with one_torch_thread(), torch.no_grad():
        mean, root = _decode(exp_avg, exp_avg_scales), _decode(roots, roots_scales)
        p, m, v = _element(step, param.float(), grad, mean, root.square())
        moments, weight = _chances(param.numel(), first, keys)
        codes, scales = _encode(m, exp_avg.dtype, 127, moments)
        root_codes, root_scales = _encode(v.double().sqrt().float(), roots.dtype, 255, moments >> 16)
        new = _dither(p, param.dtype, weight)
        _write(
            [(exp_avg, codes), (exp_avg_scales, scales), (roots, root_codes), (roots_scales, root_scales), (param, new)]
        )
        if copy is not None:
            copy.copy_(param)


def _write(results: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Nothing is written before everything is computed, which may find no memory."""
    for target, result in results:
        target.copy_(result)


def _element(step: AdamWStep, p: torch.Tensor, *others: torch.Tensor) -> list[torch.Tensor]:
    """`loops.element`: torch's fused kernel rounds the last elements otherwise, so they must not be the last ones."""
    numel = p.numel()
    wide = [pad(tensor, (0, -numel % 16)) for tensor in (p, *others)]
    states = [wide[0].clone(), wide[1], wide[2].clone(), wide[3].clone()]
    update_by_torch(step, *states)
    return [states[index][:numel] for index in (0, 2, 3)]


def _chances(numel: int, first: int, keys: Sequence[np.uint32]) -> tuple[torch.Tensor, torch.Tensor]:
    index = torch.arange(first, first + numel, dtype=torch.int64, device="cpu")
    a, b, c, d = map(int, keys)
    return _mix(index, a, b), _mix(index, c, d)


def _mix(index: torch.Tensor, key: int, other_key: int) -> torch.Tensor:
    """`llvm.mix`; int64 wraps, and the lower 32 bits of a product depend on no others."""
    x = (index + key) & _LOW
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _LOW
    x = x ^ other_key
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _LOW
    return x ^ (x >> 16)


def _dither(x: torch.Tensor, dtype: torch.dtype, chance: torch.Tensor) -> torch.Tensor:
    if dtype is torch.float32:
        return x
    bits = x.view(torch.int32).to(torch.int64) & _LOW
    upper = (bits + (chance & 0xFFFF)) >> 16 << 16
    signed = torch.where(upper >= 1 << 31, upper - (1 << 32), upper).to(torch.int32)
    return torch.where(x.isnan(), torch.nan, signed.view(torch.float32)).to(dtype)


def _decode(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return codes.float() * scales.repeat_interleave(loops.GROUP)[: codes.numel()]


def _encode(
    x: torch.Tensor, dtype: torch.dtype, largest: int, chance: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of `x`."""
    numel = x.numel()
    greatest = pad(x.abs(), (0, -numel % loops.GROUP)).view(-1, loops.GROUP).amax(dim=1)
    scales = torch.where(greatest.isfinite(), greatest / torch.full_like(greatest, largest), torch.nan)
    scale = scales.repeat_interleave(loops.GROUP)[:numel]
    code = (x / scale + (chance & 0xFFFF).float() * 2.0**-16).floor().clamp(max=largest)
    least = torch.where(x > 0, 1.0, 0.0) if largest == 255 else torch.full_like(x, -largest)
    return torch.where(scale > 0, torch.maximum(code, least), 0.0).to(torch.int32).to(dtype), scales


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


# ---- The choice between Numba and torch; they give the same bits. ----

_Kernel = Callable[..., None]


@cache
def _compact_kernel(dtypes: tuple[torch.dtype | None, ...]) -> _Kernel:
    param, grad, exp_avg, exp_avg_sq, copy = dtypes
    for dtype in (param, exp_avg, exp_avg_sq):
        assert dtype in _STATES, f"states are float32 or bfloat16, got {dtype}"
    return _choose(loops.adamw_compact, adamw_compact_torch, [param, grad, exp_avg, exp_avg_sq, copy])


@cache
def _8_bit_kernel(dtypes: tuple[torch.dtype | None, ...]) -> _Kernel:
    param, grad, copy = dtypes
    assert param in _STATES, f"weights are float32 or bfloat16, got {param}"
    moments = [torch.int8, torch.float32, torch.uint8, torch.float32]
    return _choose(loops.adamw_8_bit, adamw_8_bit_torch, [param, grad, *moments, copy])


def _choose(loop: loops.Loop, plain: _Kernel, dtypes: list[torch.dtype | None]) -> _Kernel:
    """The compiled `loop` if it gives the bits of `plain` on a thousand elements of these dtypes, else `plain`."""
    if dtypes[1] not in GRADIENTS or dtypes[-1] not in COPIES:
        return plain
    try:
        with loops.compiling():
            compiled = partial(_run_compiled, loops.compile_loop(loop))
            return compiled if _agree(compiled, plain, dtypes) else plain
    except Exception:  # whatever Numba raises, torch gives the same bits
        return plain


def _run_compiled(loop: loops.Loop, step: AdamWStep, keys: Any, first: int, *tensors: torch.Tensor | None) -> None:
    arrays = (None if tensor is None else as_array(tensor) for tensor in tensors)
    loop(scalars_of(step), keys, np.int64(first), *arrays)


def _agree(compiled: _Kernel, plain: _Kernel, dtypes: list[torch.dtype | None]) -> bool:
    step = AdamWStep(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, step=3, grad_scale=0.3)
    angles = torch.linspace(0, 700, 1000, dtype=torch.float64, device="cpu")
    groups = -(-angles.numel() // GROUP_ELEMENTS)
    tensors: list[torch.Tensor | None] = []
    for shift, dtype in enumerate(dtypes):
        values = angles.add(shift).sin().abs_() if shift > 1 else angles.add(shift).sin()
        if dtype in (torch.int8, torch.uint8):
            values *= 127
        elif len(dtypes) > 5 and shift in (3, 5):
            values = values[:groups]
        tensors.append(None if dtype is None else values.to(dtype))
    expected = [None if tensor is None else tensor.clone() for tensor in tensors]
    keys = _keys(1, 2, 3)
    compiled(step, keys, 2**31 - 500, *tensors)
    plain(step, keys, 2**31 - 500, *expected)
    return all(a is None or b is None or torch.equal(a, b) for a, b in zip(tensors, expected, strict=True))
