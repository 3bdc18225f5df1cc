"""Casts between float32 and a 16-bit format: the runs of a chunk in one launch.

It checks and launches; it does not know whose elements these are.
"""

from __future__ import annotations

import numpy as np
import torch

from hetmem.cuda import reference
from hetmem.cuda.backend import Backend
from hetmem.cuda.checks import NAMES, check_blocks, check_flat, stream_for
from hetmem.cuda.segments import Segments

CASTS = {
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float16),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float32),
}


def cast(
    backend: Backend,
    segments: Segments,
    source: torch.Tensor,
    destination: torch.Tensor,
    *,
    stream: torch.cuda.Stream | None = None,
    blocks: int | None = None,
) -> None:
    """Copy the runs of `segments` from `source` to `destination` in the other's dtype. Starts the work and returns.

    Rounds to nearest, ties to even; keeps subnormals; overflows to infinity. A NaN becomes a quiet NaN without its
    payload. Flat tensors on the GPU or in pinned memory; float32 to bfloat16 or float16, or back. Bases that are
    multiples of 16 bytes, with runs alike in `source` and `destination` modulo 8 elements, move 16 bytes an access.
    On `stream` (None: torch's current one); both tensors must stay until it has passed. `blocks`: the grid.
    Raises ValueError, with nothing started.
    """
    if (source.dtype, destination.dtype) not in CASTS:
        known = ", ".join(sorted(f"{NAMES[one]} to {NAMES[other]}" for one, other in CASTS))
        raise ValueError(f"cast: expected {known}, got {source.dtype} to {destination.dtype}")
    check_flat(source, "source", [source.dtype], segments.source_numel)
    check_flat(destination, "destination", [destination.dtype], segments.destination_numel)
    grid = check_blocks(blocks, len(segments.tiles))
    addresses = backend.address(source, "source"), backend.address(destination, "destination")
    if not backend.native:
        with torch.cuda.stream(stream):
            reference.cast(segments, source, destination)
    elif segments.tiles:
        kernel = f"cast_{NAMES[source.dtype]}_{NAMES[destination.dtype]}"
        table, there = backend.address(segments.table, "segments"), stream_for(stream, source, destination)
        backend.launch("cast.cu", kernel, grid, (table, np.int64(len(segments.tiles)), *addresses), there)
