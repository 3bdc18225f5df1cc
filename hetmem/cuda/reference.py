"""AdamW and sums of squares once more in torch: on any device the same bits (a NaN is a NaN of any payload).

The tests compare the kernels with these; without a GPU or CuPy the launchers run them. Tensors may lie on different
devices; the work is done where the source is, and may wait for the host. They do not check their arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch

RUN_ELEMENTS, LANES = 4096, 64
"""Elements whose squares are summed up together, in so many lanes; squares.cu says the same."""

PART_ELEMENTS = 1 << 20
"""What AdamW computes at a time: its temporaries take some 80 bytes an element."""


def adamw(
    scalars: Sequence[np.float32],
    param: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    compute_copy: torch.Tensor | None,
    tail: int = 0,
) -> None:
    """`hetmem.cuda.adam.adamw`."""
    sign, decay, lerp, beta2, square, bias, eps, negative_step = map(float, scalars)
    body = param.numel() - tail
    starts = [*range(0, body, PART_ELEMENTS), *range(body, param.numel(), PART_ELEMENTS)]
    for start, end in pairwise([*starts, param.numel()]):
        part = slice(start, end)
        g = (sign * grad[part].float()).to(param.dtype).float()
        p, m, v = (state[part].to(g) for state in (param, exp_avg, exp_avg_sq))
        m = _fma(torch.full_like(g, lerp), g - m, m if lerp > 0 else g)
        x = square * g
        v = _fma(x, g, beta2 * v) if start < body else _fma(torch.full_like(v, beta2), v, x * g)
        root = v.double().sqrt().float()  # rounded once; torch's own float32 root is off by a bit on some CPUs
        p = p * decay + (negative_step * m) / (_over(root, bias) + eps)
        for state, new in ((param, p), (exp_avg, m), (exp_avg_sq, v), (compute_copy, p)):
            if state is not None:
                state[part].copy_(new)


def _over(x: torch.Tensor, divisor: float) -> torch.Tensor:
    """x / divisor, rounded once: by a scalar torch multiplies with the rounded reciprocal on some devices."""
    return x / torch.full_like(x, divisor)


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


def square_sums(values: torch.Tensor) -> torch.Tensor:
    """`hetmem.cuda.squares.square_sums`, of values of any dtype: the sums, where `values` are. In parts, as temporaries
    take half a byte an element."""
    whole = values.numel() // RUN_ELEMENTS * RUN_ELEMENTS
    parts = [*values[:whole].split(16 * PART_ELEMENTS), torch.nn.functional.pad(values[whole:], (0, RUN_ELEMENTS))]
    sums = []
    for part in parts:
        rows = part[: part.numel() // RUN_ELEMENTS * RUN_ELEMENTS].view(-1, RUN_ELEMENTS // LANES, LANES)
        lanes = torch.zeros(len(rows), LANES, dtype=torch.float64, device=values.device)
        for row in rows.unbind(1):
            lanes += row.double().square()
        sums.append(by_halves(lanes))
    return torch.cat(sums)[: -(-values.numel() // RUN_ELEMENTS)]


def by_halves(numbers: torch.Tensor) -> torch.Tensor:
    """The sums over the last dimension, of a power of two: the second half is added to the first, and so on."""
    while numbers.shape[-1] > 1:
        first, second = numbers.chunk(2, dim=-1)
        numbers = first + second
    return numbers[..., 0]
