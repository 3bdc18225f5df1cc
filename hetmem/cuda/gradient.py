"""Gradients out: cast, scale, and add or overwrite, in the one pass that writes pinned memory.

It checks and launches; it does not know parameters, optimizers or when a gradient is complete.
"""

from __future__ import annotations

from enum import Enum

import numpy as np
import torch

from hetmem.cuda import reference
from hetmem.cuda.backend import Backend
from hetmem.cuda.checks import NAMES, check_blocks, check_flat, stream_for
from hetmem.cuda.segments import Segments

GRADIENTS = {
    *((source, torch.float32) for source in NAMES),
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float16),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
}


class GradientWrite(Enum):
    """What becomes of the gradient that the destination already holds."""

    OVERWRITE = "overwrite"
    ADD = "add"


def gradient_out(
    backend: Backend,
    segments: Segments,
    source: torch.Tensor,
    destination: torch.Tensor,
    *,
    scale: float = 1.0,
    write: GradientWrite = GradientWrite.OVERWRITE,
    stream: torch.cuda.Stream | None = None,
    blocks: int | None = None,
) -> None:
    """destination = source * scale, or destination + source * scale.

    Computed in float32, each operation rounded; written rounded to nearest, ties to even, subnormals kept, overflow to
    infinity, any NaN as a quiet one. `scale`: 1 / loss-scale, rounded to float32.
    Other arguments and errors as in `hetmem.cuda.cast.cast`; few `blocks` saturate a link to the host.
    """
    if (source.dtype, destination.dtype) not in GRADIENTS:
        known = ", ".join(sorted(f"{NAMES[one]} to {NAMES[other]}" for one, other in GRADIENTS))
        raise ValueError(f"gradient_out: expected {known}, got {source.dtype} to {destination.dtype}")
    check_flat(source, "source", [source.dtype], segments.source_numel)
    check_flat(destination, "destination", [destination.dtype], segments.destination_numel)
    grid = check_blocks(blocks, len(segments.tiles))
    addresses = backend.address(source, "source"), backend.address(destination, "destination")
    if not backend.native:
        with torch.cuda.stream(stream):
            reference.gradient_out(segments, source, destination, scale, write is GradientWrite.ADD)
    elif segments.tiles:
        kernel = f"gradient_{NAMES[source.dtype]}_{NAMES[destination.dtype]}_{write.value}"
        table = backend.address(segments.table, "segments"), np.int64(len(segments.tiles))
        arguments = (*table, *addresses, np.float32(scale))
        backend.launch("gradient.cu", kernel, grid, arguments, stream_for(stream, source, destination))
