"""Launchers of the kernels in the `.cu` files, each with the same work in torch, which has the same bits on any device
(a NaN is a NaN of any payload).

Without a GPU or CuPy the launchers run torch's; the tests compare the two. All tensors are flat, on the GPU or in
pinned memory; accesses take 16 bytes where tensors start at multiples of 16. A launcher checks its arguments, raises
ValueError with nothing started, and starts its work on the given stream or else on the current one of the tensors' GPU;
the tensors must stay allocated until it is done.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
import torch

from hetmem.cuda.backend import GROUP_ELEMENTS, NAMES, Backend, blocks_for, check_flat, stream_for

RUN_ELEMENTS, LANES = 4096, 64
"""A run of so many elements has one sum of squares, in so many partial sums; as in squares.cu."""

_TEAM = 8
"""Threads per run; as in squares.cu."""

_PART_ELEMENTS = 1 << 20
"""Elements that torch computes at a time: the temporaries of AdamW take about 80 bytes an element."""

# ---- Casts. ----

CASTS = {(torch.float32, torch.bfloat16), (torch.float32, torch.float16)}
CASTS |= {(narrow, wide) for wide, narrow in CASTS}


def cast(
    backend: Backend,
    source: torch.Tensor,
    destination: torch.Tensor,
    *,
    stream: torch.cuda.Stream | None = None,
) -> None:
    """Copy all of `source` to the start of `destination`, in its dtype: float32 to bfloat16 or float16, or back.

    Rounds to nearest, ties to even; keeps subnormals; overflows to infinity. A NaN becomes a quiet NaN without its
    payload.
    """
    if (source.dtype, destination.dtype) not in CASTS:
        known = ", ".join(sorted(f"{NAMES[one]} to {NAMES[other]}" for one, other in CASTS))
        raise ValueError(f"cast: expected {known}, got {source.dtype} to {destination.dtype}")
    numel = source.numel()
    check_flat(source, "source", [source.dtype], 0)
    check_flat(destination, "destination", [destination.dtype], numel)
    addresses = backend.address(source, "source"), backend.address(destination, "destination")
    if not backend.native:
        with torch.cuda.stream(stream):
            destination[:numel].copy_(source)
    elif numel > 0:
        kernel = f"cast_{NAMES[source.dtype]}_{NAMES[destination.dtype]}"
        grid = blocks_for(-(-numel // GROUP_ELEMENTS))
        backend.launch("cast.cu", kernel, grid, (np.int64(numel), *addresses), stream_for(stream, source, destination))


# ---- Rows of a table. ----

GATHERS = CASTS | {(dtype, dtype) for dtype in NAMES}


def gather_rows(
    backend: Backend,
    table: torch.Tensor,
    indices: torch.Tensor,
    destination: torch.Tensor,
    *,
    stream: torch.cuda.Stream | None = None,
) -> None:
    """Copy the rows of `table` (rows, width) that `indices` (n), of int64, name to `destination` (n, width), cast as by
    `cast`. An index that the table does not have fills its row with NaN and reads nothing: a launcher cannot look at
    indices without waiting for the device."""
    if (table.dtype, destination.dtype) not in GATHERS:
        raise ValueError(f"gather_rows: no kernel for {table.dtype} to {destination.dtype}")
    if table.dim() != 2 or indices.dim() != 1 or destination.shape != (indices.numel(), table.shape[1]):
        raise ValueError(
            f"gather_rows: expected a table (rows, width), indices (n) and a destination (n, width), got "
            f"{tuple(table.shape)}, {tuple(indices.shape)} and {tuple(destination.shape)}"
        )
    tensors = (table, "table", [table.dtype]), (indices, "indices", [torch.int64])
    addresses = []
    for tensor, what, dtypes in (*tensors, (destination, "destination", [destination.dtype])):
        check_flat(tensor.view(-1), what, dtypes, 0)
        addresses.append(backend.address(tensor, what))
    (rows, width), count = table.shape, indices.numel()
    if not backend.native:
        with torch.cuda.stream(stream):
            known = (indices >= 0) & (indices < rows)
            found = table[torch.where(known, indices, 0)] if rows else table.new_zeros(count, width)
            destination.copy_(torch.where(known.unsqueeze(1), found, torch.nan))
    elif count and width:
        kernel = f"gather_{NAMES[table.dtype]}_{NAMES[destination.dtype]}"
        grid = blocks_for(count * -(-width // GROUP_ELEMENTS))
        sizes = np.int64(rows), np.int64(width), np.int64(count)
        backend.launch("gather.cu", kernel, grid, (*sizes, *addresses), stream_for(stream, destination, indices))


# ---- AdamW. ----

SCALARS = ("sign", "decay", "lerp", "beta2", "square", "bias", "eps", "negative_step")
"""The scalars of an update, in order, each rounded once to float32: as `hetmem.cpu` prepares them."""

ADAMS = {
    *((torch.float32, grad, copy) for grad in NAMES for copy in (None, torch.bfloat16, torch.float16)),
    *((dtype, dtype, None) for dtype in (torch.bfloat16, torch.float16)),
}
"""The dtypes of state, gradient and copy (None: no copy) with a kernel."""


def adamw(
    backend: Backend,
    scalars: Sequence[np.float32],
    param: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    compute_copy: torch.Tensor | None = None,
    *,
    tail: int = 0,
) -> None:
    """Update `param`, `exp_avg` and `exp_avg_sq` in place; write `param`, rounded, to `compute_copy` if given.

    Has the bits of the host, `m = fma(lerp, g - m, m)` and so on in float32: see `hetmem.cpu`. The last `tail` elements
    are rounded as torch's kernel on the host rounds those behind its last full vector. See `SCALARS`, and `ADAMS` for
    the dtypes; the moments have that of `param`.
    """
    tensors = {"param": param, "grad": grad, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq, "compute_copy": compute_copy}
    names, numel = _check_adamw(scalars, tensors, tail), param.numel()
    addresses = [np.uint64(0) if flat is None else backend.address(flat, what) for what, flat in tensors.items()]
    if not backend.native:
        torch_adamw(scalars, param, grad, exp_avg, exp_avg_sq, compute_copy, tail)
    elif numel > 0:
        grid = blocks_for(-(-numel // GROUP_ELEMENTS))
        arguments = (np.int64(numel), np.int64(numel - tail), *addresses, *(np.float32(scalar) for scalar in scalars))
        backend.launch("adam.cu", f"adamw_{'_'.join(names)}", grid, arguments, stream_for(None, param, grad))


def _check_adamw(scalars: Sequence[np.float32], tensors: Mapping[str, torch.Tensor | None], tail: int) -> list[str]:
    """Return the names of the dtypes of state, gradient and copy."""
    if len(scalars) != len(SCALARS):
        raise ValueError(f"scalars: expected {len(SCALARS)} ({', '.join(SCALARS)}), got {len(scalars)}")
    given = {what: flat for what, flat in tensors.items() if flat is not None}
    state, grad, copy = (given[what].dtype if what in given else None for what in ("param", "grad", "compute_copy"))
    if (state, grad, copy) not in ADAMS:
        raise ValueError(f"param, grad, compute_copy: there is no kernel for {state}, {grad}, {copy}")
    numel = given["param"].numel()
    for what, flat in given.items():
        check_flat(flat, what, [given["param"].dtype if what.startswith("exp") else flat.dtype], 0)
        if flat.numel() != numel:
            raise ValueError(f"{what}: expected {numel} elements like param, got {flat.numel()}")
    if not 0 <= tail <= numel:
        raise ValueError(f"tail: expected 0 to {numel} elements, got {tail}")
    return ["none" if dtype is None else NAMES[dtype] for dtype in (state, grad, copy)]


def torch_adamw(
    scalars: Sequence[np.float32],
    param: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    compute_copy: torch.Tensor | None,
    tail: int = 0,
) -> None:
    """Compute `adamw` in torch, for checked tensors."""
    sign, decay, lerp, beta2, square, bias, eps, negative_step = map(float, scalars)
    body = param.numel() - tail
    starts = [*range(0, body, _PART_ELEMENTS), *range(body, param.numel(), _PART_ELEMENTS)]
    for start, end in pairwise([*starts, param.numel()]):
        part = slice(start, end)
        g = (sign * grad[part].float()).to(param.dtype).float()
        p, m, v = (state[part].to(g) for state in (param, exp_avg, exp_avg_sq))
        m = _fma(torch.full_like(g, lerp), g - m, m if lerp > 0 else g)
        x = square * g
        v = _fma(x, g, beta2 * v) if start < body else _fma(torch.full_like(v, beta2), v, x * g)
        root = v.double().sqrt().float()  # rounded once; torch's own float32 root is off by a bit on some CPUs
        root = root / torch.full_like(root, bias)  # by a scalar torch multiplies with the rounded reciprocal, in places
        p = p * decay + (negative_step * m) / (root + eps)
        for state, new in ((param, p), (exp_avg, m), (exp_avg_sq, v), (compute_copy, p)):
            if state is not None:
                state[part].copy_(new)


def _fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """Return a * b + c in float32, rounded once.

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


# ---- Sums of squares. ----


def square_sums(backend: Backend, values: torch.Tensor, sums: torch.Tensor) -> None:
    """Write to sums[i] the sum of squares of the i-th RUN_ELEMENTS of `values`; inf or NaN if and only if one of them
    is.

    Added in float64 in the order of squares.cu, which is the host's: see `hetmem.cpu.loops`. `values`: float32,
    bfloat16 or float16. `sums`: float64, one for each run, the last of which may be shorter.
    """
    runs = -(-values.numel() // RUN_ELEMENTS)
    check_flat(values, "values", list(NAMES), 0)
    check_flat(sums, "sums", [torch.float64], runs)
    addresses = backend.address(values, "values"), backend.address(sums, "sums")
    if not backend.native:
        sums[:runs] = torch_square_sums(values)
    elif runs > 0:
        kernel, arguments = f"square_sums_{NAMES[values.dtype]}", (np.int64(values.numel()), *addresses)
        backend.launch("squares.cu", kernel, blocks_for(runs * _TEAM), arguments, stream_for(None, values))


def torch_square_sums(values: torch.Tensor) -> torch.Tensor:
    """Compute `square_sums` in torch, for values of any dtype, in parts: temporaries take half a byte an element."""
    whole = values.numel() // RUN_ELEMENTS * RUN_ELEMENTS
    parts = [*values[:whole].split(16 * _PART_ELEMENTS), torch.nn.functional.pad(values[whole:], (0, RUN_ELEMENTS))]
    sums = []
    for part in parts:
        rows = part[: part.numel() // RUN_ELEMENTS * RUN_ELEMENTS].view(-1, RUN_ELEMENTS // LANES, LANES)
        lanes = torch.zeros(len(rows), LANES, dtype=torch.float64, device=values.device)
        for row in rows.unbind(1):
            lanes += row.double().square()
        sums.append(by_halves(lanes))
    return torch.cat(sums)[: -(-values.numel() // RUN_ELEMENTS)]


def by_halves(numbers: torch.Tensor) -> torch.Tensor:
    """Return the sums over the last dimension, a power of two, by adding its second half to the first repeatedly."""
    while numbers.shape[-1] > 1:
        first, second = numbers.chunk(2, dim=-1)
        numbers = first + second
    return numbers[..., 0]
