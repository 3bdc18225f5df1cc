"""Block-wise quantisation of optimizer state: codes of 8 or 16 bits and one float32 scale for each 256 elements.

It checks and launches; it does not know which moment it holds. Format and NaN policy: see `Format` and quantise.cu.
Block-wise scales: Dettmers et al., "8-bit Optimizers via Block-wise Quantization" (2022); the codes here are linear.
"""

from __future__ import annotations

from enum import Enum

import numpy as np
import torch

from hetmem.cuda import reference
from hetmem.cuda.backend import GROUP_ELEMENTS, THREADS, Backend
from hetmem.cuda.checks import check_aligned, check_blocks, check_flat, stream_for
from hetmem.cuda.reference import BLOCK_ELEMENTS

_PER_GRID_BLOCK = THREADS * GROUP_ELEMENTS


class Format(Enum):
    """How the elements of a block are coded: code = x / scale, scale = the greatest magnitude / the largest code."""

    SNORM8 = "snorm8"
    """int8, -127 … 127: a first moment."""
    UNORM8 = "unorm8"
    """uint8, 0 … 255, for numbers >= 0, such as a second moment: what is above 0 never becomes 0."""
    UNORM16 = "unorm16"
    """uint16, 0 … 65535, likewise."""
    E4M3 = "e4m3"
    """float8_e4m3fn, saturating at 448."""

    @property
    def dtype(self) -> torch.dtype:
        """Of the codes."""
        return {
            Format.SNORM8: torch.int8,
            Format.UNORM8: torch.uint8,
            Format.UNORM16: torch.uint16,
            Format.E4M3: torch.float8_e4m3fn,
        }[self]


def scales_numel(numel: int) -> int:
    """How many scales `numel` elements have."""
    return -(-numel // BLOCK_ELEMENTS)


def quantise(
    backend: Backend,
    form: Format,
    source: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    *,
    stream: torch.cuda.Stream | None = None,
    blocks: int | None = None,
) -> None:
    """Code the float32 `source` into `codes` (of `form.dtype`, as many) and `scales` (float32, one per block).

    Rounds to nearest, ties to even. A block with a NaN or an infinity decodes to NaN throughout; numbers below 0 count
    as 0 in the unorm formats; a block whose scale underflows decodes to 0. Flat tensors on the GPU or in pinned memory;
    `source` and `codes` start at multiples of 16 bytes. Starts the work on `stream` (None: torch's current one); all
    tensors must stay until it has passed. Raises ValueError, with nothing started.
    """
    _launch(backend, f"quantise_{form.value}", form, source, codes, scales, stream, blocks)


def dequantise(
    backend: Backend,
    form: Format,
    codes: torch.Tensor,
    scales: torch.Tensor,
    destination: torch.Tensor,
    *,
    stream: torch.cuda.Stream | None = None,
    blocks: int | None = None,
) -> None:
    """Write code * scale, rounded to float32, to `destination`. Everything else as in `quantise`."""
    _launch(backend, f"dequantise_{form.value}", form, destination, codes, scales, stream, blocks)


def _launch(
    backend: Backend,
    kernel: str,
    form: Format,
    values: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    stream: torch.cuda.Stream | None,
    blocks: int | None,
) -> None:
    numel = values.numel()
    check_flat(values, "values", [torch.float32], 0)
    check_flat(codes, "codes", [form.dtype], numel)
    check_flat(scales, "scales", [torch.float32], scales_numel(numel))
    check_aligned(values, "values", 16)
    check_aligned(codes, "codes", 16)
    grid = check_blocks(blocks, -(-numel // _PER_GRID_BLOCK))
    wide, narrow, factors = (
        backend.address(tensor, what) for tensor, what in ((values, "values"), (codes, "codes"), (scales, "scales"))
    )
    into = kernel.startswith("quantise")
    if not backend.native:
        with torch.cuda.stream(stream):
            (reference.quantise if into else reference.dequantise)(form.value, values, codes, scales)
    elif numel > 0:
        arguments = (wide, narrow, factors) if into else (narrow, factors, wide)
        backend.launch("quantise.cu", kernel, grid, (np.int64(numel), *arguments), stream_for(stream, values, codes))
