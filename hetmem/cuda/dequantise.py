"""Launches the kernels that decode quantised weights, with the same work in torch: the reference for the host's loops.

Formats: see the note "coded weights" in `hetmem.schedule.formats`. A NaN, which no encoder makes, is a NaN of any
payload.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch

from hetmem.cuda.backend import GROUP_ELEMENTS, NAMES, Backend, blocks_for, check_flat, stream_for
from hetmem.schedule.formats import FP8_TILE, MX_BLOCK, NESTED_BLOCK, NF4_BLOCK, Coding

NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""The values of nf4: T; as in dequantise.cu."""

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The values of mxfp4; as in dequantise.cu."""

INT8_UNIT = float(np.float32(1 / 127))
"""What the product of a code of int8 and its scale is multiplied by."""

_KERNELS = {
    "nf4": "nf4",
    "nf4-nested": "nested",
    "mxfp4": "mxfp4",
    "mxfp4-transposed": "transposed",
    "fp8": "fp8",
    "int8": "int8",
    "int8-torchao": "scaled",
}


@cache
def nested_values() -> torch.Tensor:
    """Return D, the 256 values of scales of nf4-nested, ascending: bitsandbytes' signed dynamic map (8-bit
    Approximations for Parallelism in Deep Learning, Dettmers 2015)."""
    values = [0.0, 1.0]
    for exponent in range(7):
        edges = torch.linspace(0.1, 1, 2**exponent + 1, dtype=torch.float32, device="cpu")
        means = 10 ** (exponent - 6) * ((edges[:-1] + edges[1:]) / 2)
        values += [*means.tolist(), *(-means).tolist()]
    return torch.tensor(sorted(values), dtype=torch.float32, device="cpu")


def dequantise(
    backend: Backend,
    coding: Coding,
    coded: torch.Tensor,
    target: torch.Tensor,
    first: int = 0,
    *,
    stream: torch.cuda.Stream | None = None,
) -> None:
    """Decode elements [first, first + target.numel()) of a weight to `target`: float32, bfloat16 or float16.

    `coded`: the bytes of the whole weight, at a multiple of 16. `first`: a multiple of `Coding.unit`.
    """
    codes, scales, nested = parts_of(coding, coded, first, target.numel())
    dequantise_parts(backend, coding, codes, scales, nested, target, first, stream=stream)


Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Codes, scales, and scales of scales, as bytes."""


def parts_of(coding: Coding, coded: torch.Tensor, first: int, numel: int) -> Parts:
    """Return the parts of `coded`, the bytes of a weight, that decoding elements [first, first + numel) needs."""
    check_flat(coded, "coded", [torch.uint8], coding.nbytes)
    codes, scales, size = coding.codes_of(first, numel), coding.scales_of(first, numel), coding.scale_bytes
    start, (begin, nbytes) = coding.scales_span.start, coding.nested_span
    scale_bytes = slice(start + scales.start * size, start + scales.stop * size)
    return coded[codes.start : codes.stop], coded[scale_bytes], coded[begin : begin + nbytes]


def dequantise_parts(
    backend: Backend,
    coding: Coding,
    codes: torch.Tensor,
    scales: torch.Tensor,
    nested: torch.Tensor,
    target: torch.Tensor,
    first: int,
    *,
    stream: torch.cuda.Stream | None = None,
) -> None:
    """Decode as `dequantise` does, from parts that may lie in different places: bytes of codes from that of element
    `first` on, of scales from the number `Coding.scales_before` on, and all of `nested`."""
    numel = target.numel()
    if first % coding.unit or not 0 <= first <= first + numel <= coding.numel:
        raise ValueError(f"first: expected a multiple of {coding.unit} in {coding}, got {first} and {numel} elements")
    check_flat(target, "target", list(NAMES), numel)
    addresses = []
    for part, what in ((codes, "codes"), (scales, "scales"), (nested, "nested")):
        check_flat(part, what, [torch.uint8], 0)
        addresses.append(backend.address(part, what))
    to = backend.address(target, "target")
    if not backend.native:
        with torch.cuda.stream(stream):
            torch_dequantise(coding, codes, scales, nested, target, first)
    elif numel > 0:
        sizes = np.int64(numel), np.int64(first), np.int64(coding.rows), np.int64(coding.columns)
        kernel = f"dequantise_{_KERNELS[coding.format]}_{NAMES[target.dtype]}"
        grid = blocks_for(-(-numel // GROUP_ELEMENTS))
        backend.launch("dequantise.cu", kernel, grid, (*sizes, *addresses, to), stream_for(stream, target, codes))


def torch_dequantise(
    coding: Coding, codes: torch.Tensor, scales: torch.Tensor, nested: torch.Tensor, target: torch.Tensor, first: int
) -> None:
    """Compute `dequantise_parts` in torch."""
    numel = target.numel()
    index = torch.arange(first, first + numel, device=target.device)
    here = index - first
    match coding.format:
        case "nf4" | "nf4-nested":
            values = _table(NF4, target)[_nibbles(codes, numel, high_first=True)]
            if coding.format == "nf4":
                found = scales.view(torch.float32)[here // NF4_BLOCK]
            else:
                block, levels = index // NF4_BLOCK, nested.view(torch.float32)
                units = nested_values().to(target.device)[scales.long()[here // NF4_BLOCK]]
                found = units * levels[1 + block // NESTED_BLOCK] + levels[0]
        case "mxfp4" | "mxfp4-transposed":
            values = _table(E2M1, target)[_nibbles(codes, numel, high_first=False)]
            exponents = scales.int()[here // MX_BLOCK]
            found = torch.where(exponents == 0, 1 << 22, exponents << 23).view(torch.float32)
        case "fp8":
            values = codes[:numel].view(torch.float8_e4m3fn).float()
            row, column = index // coding.columns, index % coding.columns
            down, across = coding.grid
            tile = (row // coding.rows * down + row % coding.rows // FP8_TILE) * across + column // FP8_TILE
            found = scales.view(torch.float32)[tile]
        case _:
            values = codes[:numel].view(torch.int8).float()
            found = scales.view(torch.float32)[index // coding.columns]
    product = values * found
    if coding.format == "mxfp4-transposed":
        product = product.view(-1, coding.columns, coding.rows).transpose(1, 2).flatten()
    target.copy_(product * INT8_UNIT if coding.format == "int8" else product)


def _table(values: tuple[float, ...], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32, device=like.device)


def _nibbles(codes: torch.Tensor, numel: int, *, high_first: bool) -> torch.Tensor:
    """Return `numel` 4-bit codes as indices."""
    both = torch.stack((codes >> 4, codes & 15) if high_first else (codes & 15, codes >> 4), dim=1)
    return both.flatten()[:numel].long()
