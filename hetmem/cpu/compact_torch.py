"""The loops of compact.py once more in torch, with the same bits, for where Numba is missing. On one thread.

It must not know tiles or tasks. The arithmetic is torch's fused AdamW in float32; the hash is done in int64.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch.nn.functional import pad

from hetmem.cpu import loops
from hetmem.cpu.tiles import one_torch_thread
from hetmem.cpu.update import AdamWStep, update_by_torch

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
