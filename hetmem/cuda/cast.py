"""Casts between float32 and a 16-bit format.

It checks and launches; it does not know whose elements these are.
"""

from __future__ import annotations

import numpy as np
import torch

from hetmem.cuda.backend import GROUP_ELEMENTS, NAMES, Backend, blocks_for, check_flat, stream_for

CASTS = {
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float16),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float32),
}


def cast(
    backend: Backend,
    source: torch.Tensor,
    destination: torch.Tensor,
    *,
    stream: torch.cuda.Stream | None = None,
) -> None:
    """Copy all of `source` to `destination`, which is as long, in its dtype. Starts the work and returns.

    Rounds to nearest, ties to even; keeps subnormals; overflows to infinity. A NaN becomes a quiet NaN without its
    payload. Flat tensors on the GPU or in pinned memory; float32 to bfloat16 or float16, or back; 16 bytes an access
    where both start at multiples of 16. On `stream` (None: torch's current one); both tensors must stay until it has
    passed. Raises ValueError, with nothing started.
    """
    if (source.dtype, destination.dtype) not in CASTS:
        known = ", ".join(sorted(f"{NAMES[one]} to {NAMES[other]}" for one, other in CASTS))
        raise ValueError(f"cast: expected {known}, got {source.dtype} to {destination.dtype}")
    numel = source.numel()
    check_flat(source, "source", [source.dtype], 0)
    check_flat(destination, "destination", [destination.dtype], numel)
    grid = blocks_for(-(-numel // GROUP_ELEMENTS))
    addresses = backend.address(source, "source"), backend.address(destination, "destination")
    if not backend.native:
        with torch.cuda.stream(stream):
            destination[:numel].copy_(source)
    elif numel > 0:
        kernel = f"cast_{NAMES[source.dtype]}_{NAMES[destination.dtype]}"
        backend.launch("cast.cu", kernel, grid, (np.int64(numel), *addresses), stream_for(stream, source, destination))
