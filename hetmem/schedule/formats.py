"""The formats of quantised weights, and where codes and scales of a weight lie: sizes only.

Note "coded weights": a coded weight is one run of bytes: its codes, in the order of its elements, and then its scales.
Both begin at multiples of 16 bytes, as does the end. Arithmetic is in float32, rounded once to the dtype of the result.

    nf4         T[c] * s, s float32 for 64 elements; the high nibble first (QLoRA, Dettmers et al. 2023)
    nf4-nested  the same with s = D[q] * a + offset, q uint8 for 64 elements, a float32 for 256 q, one float32 offset
    mxfp4       E2M1[c] * 2 ** (e - 127), e uint8 for 32 elements; the low nibble first (OCP MX 1.0)
    fp8         E4M3[c] * s, s float32 for 128 x 128 elements of a matrix (DeepSeek-V3, 2024)
    int8        (c * s) * float32(1 / 127), s float32 for a row (bitsandbytes)
    mxfp4-transposed  mxfp4 of each matrix with its dimensions exchanged: of experts that are multiplied along rows
    int8-torchao  c * s, s float32 for a row: of weights that torchao has quantised, which keep these scales

T and D are bitsandbytes' tables (see `hetmem.cuda.dequantise`). Blocks of nf4 and mxfp4 are of consecutive elements, so
the last one of a weight may be shorter.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hetmem.base.units import round_up

FORMATS = ("nf4", "nf4-nested", "mxfp4", "fp8", "int8")
"""Those that users may choose."""
ALL_FORMATS = (*FORMATS, "mxfp4-transposed", "int8-torchao")

NF4_BLOCK, MX_BLOCK, NESTED_BLOCK, FP8_TILE = 64, 32, 256, 128
"""Elements of nf4, of mxfp4, scales of nf4-nested and rows or columns of fp8 that share a scale."""

PIECE_ELEMENTS = 16384
"""Weights are decoded in parts that begin at multiples of this, at whole bytes and blocks; see `Coding.unit`."""

CODED_PIECE_ELEMENTS = 1024 * PIECE_ELEMENTS
"""Elements that a GPU decodes at once: 8 to 16 MiB of codes."""

_ALIGNMENT_BYTES = 16
_ROW_AT_LEAST = 64


class ByteRange(NamedTuple):
    """Bytes [start, start + nbytes) of a coded weight."""

    start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Coding:
    """How a weight is coded: `matrices` of `rows` times `columns` elements, in `format`, one of `ALL_FORMATS`."""

    format: str
    matrices: int
    rows: int
    columns: int

    @staticmethod
    def of(name: str, shape: Sequence[int]) -> Coding:
        """Return the coding of a weight of `shape`. A row is its last dimension or, where that is short, as of the
        kernel of a convolution, as many of its last ones as give 64 elements."""
        assert name in ALL_FORMATS, name
        sizes = list(shape) or [1]
        columns = sizes.pop()
        if name == "mxfp4-transposed":
            return Coding(name, math.prod(sizes[:-1]), sizes[-1], columns)
        while columns < _ROW_AT_LEAST and sizes:
            columns *= sizes.pop()
        rows = sizes.pop() if sizes else 1
        return Coding(name, math.prod(sizes), rows, columns)

    @property
    def numel(self) -> int:
        """Elements of the weight."""
        return self.matrices * self.rows * self.columns

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return 8 if self.format in ("fp8", "int8", "int8-torchao") else 4

    @property
    def public_format(self) -> str:
        """The one of `FORMATS` with the same sizes."""
        return self.format.removesuffix("-torchao").removesuffix("-transposed")

    @property
    def unit(self) -> int:
        """Elements are decoded in parts that begin at multiples of this."""
        return self.rows * self.columns if self.format == "mxfp4-transposed" else PIECE_ELEMENTS

    def parts(self, most: int) -> Iterator[slice]:
        """Yield the weight in parts that can be decoded alone, of `most` elements, or of one `unit` if that is more."""
        size = max(1, most // self.unit) * self.unit if self.numel else 1
        for start in range(0, self.numel, size):
            yield slice(start, min(start + size, self.numel))

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of the scales of a matrix, for fp8."""
        return -(-self.rows // FP8_TILE), -(-self.columns // FP8_TILE)

    @property
    def row_bytes(self) -> int:
        """Bytes of the codes and scales of a row, where each has float32 scales of its own, and all rows begin at whole
        words of 4 bytes; 0 where rows share what decodes them."""
        apart = self.columns % (NF4_BLOCK if self.format == "nf4" else 4) == 0
        if self.format not in ("nf4", "int8", "int8-torchao") or not apart:
            return 0
        row = Coding(self.format, 1, 1, self.columns)
        return row.codes_span.nbytes + row.scales_span.nbytes

    @property
    def scales(self) -> int:
        """How many scales there are, of the first level."""
        match self.format:
            case "mxfp4" | "mxfp4-transposed":
                return -(-self.numel // MX_BLOCK)
            case "fp8":
                return self.matrices * math.prod(self.grid)
            case "int8" | "int8-torchao":
                return self.matrices * self.rows
        return -(-self.numel // NF4_BLOCK)

    def scales_of(self, first: int, numel: int) -> range:
        """Return the numbers of the scales that decoding elements [first, first + numel) needs: all of them for
        formats whose blocks are not runs of elements."""
        if self.bits == 8:
            return range(self.scales)
        block = MX_BLOCK if self.public_format == "mxfp4" else NF4_BLOCK
        return range(first // block, -(-(first + numel) // block))

    def codes_of(self, first: int, numel: int) -> range:
        """Return the numbers of the bytes that hold the codes of elements [first, first + numel)."""
        return range(first * self.bits // 8, -(-(first + numel) * self.bits // 8))

    @property
    def scale_bytes(self) -> int:
        """Bytes of a scale of the first level."""
        return 1 if self.public_format in ("mxfp4", "nf4-nested") else 4

    @property
    def nested(self) -> int:
        """How many float32 follow the scales: of nf4-nested the offset, and a scale for 256 scales; else none."""
        return 1 + -(-self.scales // NESTED_BLOCK) if self.format == "nf4-nested" else 0

    @property
    def codes_span(self) -> ByteRange:
        """Where the codes lie."""
        return ByteRange(0, -(-self.numel * self.bits // 8))

    @property
    def scales_span(self) -> ByteRange:
        """Where the scales lie."""
        return ByteRange(round_up(self.codes_span.nbytes, _ALIGNMENT_BYTES), self.scales * self.scale_bytes)

    @property
    def nested_span(self) -> ByteRange:
        """Where the offset and the scales of scales lie."""
        start, nbytes = self.scales_span
        return ByteRange(round_up(start + nbytes, 4), 4 * self.nested)

    @property
    def nbytes(self) -> int:
        """Bytes of the coded weight."""
        start, nbytes = self.nested_span
        return round_up(start + nbytes, _ALIGNMENT_BYTES)
