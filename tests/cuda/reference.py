"""AdamW as the kernel computes it, in torch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch


def torch_adamw(
    scalars: Sequence[np.float32],
    param: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    compute_copy: torch.Tensor | None,
    tail: int = 0,
) -> None:
    """Update as `hetmem.cuda.kernels.adamw` does."""
    sign, decay, lerp, beta2, square, bias, eps, negative_step = map(float, scalars)
    body = param.numel() - tail
    for part in (slice(0, body), slice(body, param.numel())):
        g = (sign * grad[part].float()).to(param.dtype).float()
        p, m, v = (state[part].to(g) for state in (param, exp_avg, exp_avg_sq))
        m = _fma(torch.full_like(g, lerp), g - m, m if lerp > 0 else g)
        x = square * g
        v = _fma(x, g, beta2 * v) if part.stop == body else _fma(torch.full_like(v, beta2), v, x * g)
        root = v.double().sqrt().float()  # rounded once; torch's own float32 root is off by a bit on some CPUs
        root = root / torch.full_like(root, bias)  # by a scalar torch multiplies with the rounded reciprocal, in places
        p = p * decay + (negative_step * m) / (root + eps)
        for state, new in ((param, p), (exp_avg, m), (exp_avg_sq, v), (compute_copy, p)):
            if state is not None:
                state[part].copy_(new)


def _fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """a * b + c in float32, rounded once.

    In float64 the product is exact; the sum is rounded to odd there (Boldo and Melquiond, 2008), so that rounding it
    once more to float32 gives the correctly rounded result.
    """
    product, addend = a.double() * b.double(), c.double()
    total = product + addend
    virtual = total - product
    error = (product - (total - virtual)) + (addend - virtual)  # Knuth's two-sum: total + error is exact
    bits = total.view(torch.int64)
    inexact = (error != 0) & total.isfinite() & (bits & 1 == 0)
    away = (error > 0) == (total > 0)  # the exact sum lies further from zero than total
    return torch.where(inexact, bits + torch.where(away, 1, -1), bits).view(torch.float64).float()
