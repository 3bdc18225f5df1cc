"""Rows of an embedding read where they lie, in pinned memory: only what a batch touches crosses the link.

It checks and launches; it does not know modules or batches.
"""

from __future__ import annotations

import numpy as np
import torch

from hetmem.cuda import reference
from hetmem.cuda.backend import GROUP_ELEMENTS, THREADS, Backend
from hetmem.cuda.cast import CASTS
from hetmem.cuda.checks import NAMES, check_blocks, check_flat, stream_for

GATHERS = CASTS | {(dtype, dtype) for dtype in NAMES}
_PART = THREADS * GROUP_ELEMENTS


def gather_rows(
    backend: Backend,
    table: torch.Tensor,
    indices: torch.Tensor,
    destination: torch.Tensor,
    *,
    stream: torch.cuda.Stream | None = None,
    blocks: int | None = None,
) -> None:
    """destination[i] = table[indices[i]], cast as by `hetmem.cuda.cast.cast` if the dtypes differ.

    `table`: rows x width, in pinned memory or on the GPU, float32, bfloat16 or float16. `indices`: int64, 1-D.
    `destination`: as many rows of the same width. An index below 0 or past the last row fills its row with NaN and
    reads nothing: launchers cannot look at indices without waiting for the device. A width that is a multiple of 8 and
    tensors at multiples of 16 bytes move 16 bytes an access. Starts the work on `stream` (None: torch's current one);
    all tensors must stay until it has passed. Raises ValueError, with nothing started.
    """
    if (table.dtype, destination.dtype) not in GATHERS:
        known = ", ".join(sorted(f"{NAMES[one]} to {NAMES[other]}" for one, other in GATHERS))
        raise ValueError(f"gather_rows: expected {known}, got {table.dtype} to {destination.dtype}")
    if table.dim() != 2 or indices.dim() != 1 or destination.shape != (indices.numel(), table.shape[1]):
        raise ValueError(
            "gather_rows: expected a table (rows, width), indices (n) and a destination (n, width), "
            f"got {tuple(table.shape)}, {tuple(indices.shape)} and {tuple(destination.shape)}"
        )
    check_flat(table, "table", [table.dtype], 0)
    check_flat(indices, "indices", [torch.int64], 0)
    check_flat(destination, "destination", [destination.dtype], 0)
    rows, width = table.shape
    count = indices.numel()
    grid = check_blocks(blocks, count * -(-width // _PART))
    tensors = ((table, "table"), (indices, "indices"), (destination, "destination"))
    source, which, place = (backend.address(tensor, what) for tensor, what in tensors)
    if not backend.native:
        with torch.cuda.stream(stream):
            reference.gather_rows(table, indices, destination)
    elif grid > 0:
        kernel = f"gather_{NAMES[table.dtype]}_{NAMES[destination.dtype]}"
        arguments = (source, np.int64(rows), np.int64(width), which, np.int64(count), place)
        backend.launch("gather.cu", kernel, grid, arguments, stream_for(stream, destination, indices))
