"""Faults for the kernels, each a change of their text, and the check that must see it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tests.cuda.shim import build, texts


@dataclass(frozen=True)
class Mutant:
    """`before` becomes `after` in `file`; `check` of kernel_checks.py must fail on `source` then."""

    file: str
    before: str
    after: str
    source: str
    check: str

    def build(self, flags: tuple[str, ...]) -> Path:
        """`source` with the fault in it, as a library."""
        given = texts()
        text = given[self.file]
        assert text.count(self.before) == 1, f"{self.file} has {text.count(self.before)} times {self.before!r}"
        return build(self.source, flags, given | {self.file: text.replace(self.before, self.after)})


def _in_floats(before: str, after: str, check: str = "cast_numbers") -> Mutant:
    return Mutant("floats.cuh", before, after, "cast.cu", check)


def _in(source: str, before: str, after: str, check: str) -> Mutant:
    return Mutant(source, before, after, source, check)


def _in_codes(before: str, after: str, check: str = "dequantise") -> Mutant:
    return Mutant("dequantise.cu", before, after, "dequantise.cu", check)


WRONG_RESULTS = {
    "bfloat16 rounds ties away": _in_floats("(bits + 0x7FFF + odd) >> 16", "(bits + 0x8000 + 0 * odd) >> 16"),
    "bfloat16 truncates": _in_floats("(bits + 0x7FFF + odd) >> 16", "(bits + 0 * odd) >> 16"),
    "bfloat16 rounds a NaN": _in_floats("is_nan_bits(bits) ? 0x7FC0 : ", ""),
    "float16 rounds ties away": _in_floats("0xFFF + odd", "0x1000 + 0 * odd"),
    "float16 overflows late": _in_floats("(127 + 16) << 23", "(127 + 17) << 23"),
    "float16 forgets the NaN": _in_floats("is_nan_bits(bits) ? 0x7E00 : 0x7C00", "0x7C00"),
    "float16 forgets subnormals": _in_floats("(127 - 14) << 23", "0"),
    "float16 forgets the sign": _in_floats("| (bits >> 16 & 0x8000)", ""),
    "float16 widens infinity to a number": _in_floats("(bits & 0x7C00) == 0x7C00 ? 0x7F800000 : 0", "0"),
    "a vector for every count": _in_floats("return count == GROUP && ", "return ", "cast_layouts"),
    "a tail written whole": _in_floats("if (i < count) __stcs", "__stcs", "cast_layouts"),
    "a tail taken for a group": _in("cast.cu", "(int)min((i64)GROUP, numel - at)", "GROUP", "cast_layouts"),
    "groups left out": _in("cast.cu", "at += step", "at += 2 * step", "cast_layouts"),
    "lerp rounded twice": _in(
        "adam.cu",
        "__fmaf_rn(s.lerp, g - m, s.lerp > 0 ? m : g)",
        "s.lerp * (g - m) + (s.lerp > 0 ? m : g)",
        "adamw_equals_the_host",
    ),
    "lerp from the wrong end": _in("adam.cu", "s.lerp > 0 ? m : g", "m", "adamw_equals_the_host"),
    "v rounded twice": _in(
        "adam.cu", "__fmaf_rn(x, g, s.beta2 * v)", "x * g + s.beta2 * v", "adamw_equals_the_host"
    ),
    "the tail rounded as a vector": _in("adam.cu", "at + i < body", "true", "adamw_equals_the_host"),
    "the tail one element late": _in("adam.cu", "at + i < body", "at + i <= body", "adamw"),
    "the other product of the tail": _in(
        "adam.cu", "__fmaf_rn(s.beta2, v, x * g)", "s.beta2 * v + x * g", "adamw_equals_the_host"
    ),
    "a scaled gradient not rounded": _in("adam.cu", "State::widen(State::round(s.sign * g))", "s.sign * g", "adamw"),
    "a reciprocal for the bias": _in(
        "adam.cu", "__fdiv_rn(__fsqrt_rn(v), s.bias)", "__fsqrt_rn(v) * (1 / s.bias)", "adamw_equals_the_host"
    ),
    "no weight decay": _in("adam.cu", "p * s.decay", "p", "adamw"),
    "maximize forgotten": _in("adam.cu", "State::round(s.sign * g)", "State::round(g)", "adamw"),
    "elements left out": _in("adam.cu", "at += step", "at += 2 * step", "adamw"),
    "lanes of the same thread added in order": _in("squares.cu", "half = GROUP / 2", "half = GROUP / 4", "squares"),
    "a team of half the threads": _in("squares.cu", "other = TEAM / 2", "other = TEAM / 4", "squares"),
    "a square rounded to float32": _in(
        "squares.cu", "(double)x[i], (double)x[i]", "(double)(x[i] * x[i]), 1.0", "squares"
    ),
    "runs left out": _in("squares.cu", "first += step", "first += 2 * step", "squares"),
    "the team's place in its run": _in("squares.cu", "threadIdx.x % WARP / TEAM", "threadIdx.x % TEAM / 2", "squares"),
    "nibbles of nested codes exchanged": _in_codes(
        "(codes >> 4 * (i ^ 1) & 15)] * unit", "(codes >> 4 * i & 15)] * unit"
    ),
    "the scale of the next block": _in_codes("scales + at / MX_BLOCK", "scales + (at + GROUP) / MX_BLOCK"),
    "the level of the piece's blocks": _in_codes(
        "levels[1 + (w.first + at)", "levels[1 + (at)", "dequantise_in_parts"
    ),
    "a row of another matrix": _in_codes("at.row / w.rows * down", "0 * at.row * down"),
    "a tile that goes on in the next row": _in_codes("column = 0, row++", "column = 0"),
    "int8 without 1/127": _in_codes(" * 0.007874015718698502f", ""),
    "a row behind the table": _in("gather.cu", "row >= 0 && row < rows", "row >= 0 && row <= rows", "gather"),
    "the row of another place": _in("gather.cu", "indices[place]", "indices[count - 1 - place]", "gather"),
    "experts not transposed": _in_codes(
        "to + (matrix * w.rows + row) * w.columns + column", "to + (matrix * w.columns + column) * w.rows + row",
        "dequantise_transposed",
    ),
    "nibbles of experts exchanged": _in_codes("4 * (at & 1) & 15", "4 * (~at & 1) & 15", "dequantise_transposed"),
    "an E2M1 subnormal": _in_codes("magnitude < 2 ?", "magnitude < 1 ?"),
    "an exponent of 0": _in_codes("exponent == 0 ? 1 << 22 : ", ""),
}  # fmt: skip
"""Seen by the checks alone."""

BAD_ACCESSES = {
    "a vector at half its alignment": _in_floats("(u64)address & 15", "(u64)address & 7", "cast_layouts"),
    "a tail read whole": _in_floats("i < count ? __ldcs(from + i) : 0", "__ldcs(from + i)", "cast_layouts"),
    "squares read past the end": _in("squares.cu", "min(GROUP, count - start)", "GROUP", "squares"),
    "a sum past the last run": _in("squares.cu", "count > 0 && ", "", "squares"),
    "codes read past the end": _in_codes("if (i < bytes) found", "found", "dequantise_in_parts"),
    "state read past the end": _in("adam.cu", "min((i64)GROUP, numel - at)", "GROUP", "adamw"),
}
"""Seen by the sanitisers: not every wrong access gives a wrong result."""
