"""Gradients out: cast, scale, add or overwrite, and sum the squares, in the one pass that writes pinned memory.

It checks and launches; it does not know parameters, optimizers or when a gradient is complete.
"""

from __future__ import annotations

from enum import Enum

import numpy as np
import torch

from hetmem.cuda import reference
from hetmem.cuda.backend import Backend
from hetmem.cuda.checks import NAMES, check_blocks, check_flat
from hetmem.cuda.segments import Segments

GRADIENTS = {
    *((source, torch.float32) for source in NAMES),
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float16),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
}


class Write(Enum):
    """What becomes of the gradient that the destination already holds."""

    OVERWRITE = "overwrite"
    ADD = "add"


def gradient_out(
    backend: Backend,
    segments: Segments,
    source: torch.Tensor,
    destination: torch.Tensor,
    partials: torch.Tensor,
    *,
    scale: float = 1.0,
    write: Write = Write.OVERWRITE,
    stream: torch.cuda.Stream | None = None,
    blocks: int | None = None,
) -> None:
    """destination = source * scale, or destination + source * scale; and the squares of what was written.

    Computed in float32, each operation rounded; written rounded to nearest, ties to even, subnormals kept, overflow to
    infinity, any NaN as a quiet one. `scale`: 1 / loss-scale, rounded to float32. `partials`: float64 on the device,
    one number per tile of `segments`, overwritten with the sum of squares of the tile's destination; infinite or NaN if
    any element is. Their bits depend on `segments` and the numbers only. Give them, of one run or of many, to
    `sum_partials`. Other arguments and errors as in `hetmem.cuda.cast.cast`; few `blocks` saturate a link to the host.
    """
    if (source.dtype, destination.dtype) not in GRADIENTS:
        known = ", ".join(sorted(f"{NAMES[one]} to {NAMES[other]}" for one, other in GRADIENTS))
        raise ValueError(f"gradient_out: expected {known}, got {source.dtype} to {destination.dtype}")
    check_flat(source, "source", [source.dtype], segments.source_numel)
    check_flat(destination, "destination", [destination.dtype], segments.destination_numel)
    check_flat(partials, "partials", [torch.float64], len(segments.tiles))
    grid = check_blocks(blocks, len(segments.tiles))
    addresses = backend.address(source, "source"), backend.address(destination, "destination")
    if not backend.native:
        with torch.cuda.stream(stream):
            reference.gradient_out(segments, source, destination, partials, scale, write is Write.ADD)
    elif segments.tiles:
        kernel = f"gradient_{NAMES[source.dtype]}_{NAMES[destination.dtype]}_{write.value}"
        table = backend.address(segments.table, "segments"), np.int64(len(segments.tiles))
        arguments = (*table, *addresses, np.float32(scale), backend.address(partials, "partials"))
        backend.launch("gradient.cu", kernel, grid, arguments, stream)


def sum_partials(
    backend: Backend,
    partials: torch.Tensor,
    total: torch.Tensor,
    not_finite: torch.Tensor,
    *,
    stream: torch.cuda.Stream | None = None,
) -> None:
    """total[0] = the sum of the float64 `partials`; not_finite[0] (int32) = 0 if that is a finite number, else 1.

    The order of the additions is fixed by the number of partials. `total` and `not_finite` may be pinned: the host
    reads them after an event. Raises ValueError, with nothing started.
    """
    check_flat(partials, "partials", [torch.float64], 0)
    check_flat(total, "total", [torch.float64], 1)
    check_flat(not_finite, "not_finite", [torch.int32], 1)
    results = backend.address(total, "total"), backend.address(not_finite, "not_finite")
    address = backend.address(partials, "partials")
    if not backend.native:
        with torch.cuda.stream(stream):
            reference.sum_partials(partials, total, not_finite)
    else:
        backend.launch("gradient.cu", "sum_partials", 1, (address, np.int64(partials.numel()), *results), stream)
