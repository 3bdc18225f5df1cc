"""Encodes weights in host memory, in parts that give the same bytes on any number of threads.

Codes and scales are those that bitsandbytes (nf4, int8) and torchao (mxfp4) make on the CPU; those of fp8 are absmax /
448. See the note "coded weights" in `hetmem.schedule.formats`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial

import torch

from hetmem.cpu.workers import Task, one_torch_thread
from hetmem.cuda.dequantise import INT8_UNIT, NF4, nested_values, parts_of
from hetmem.schedule.formats import FP8_TILE, MX_BLOCK, NESTED_BLOCK, NF4_BLOCK, PIECE_ELEMENTS, Coding

_TASK_ELEMENTS = 16 * PIECE_ELEMENTS
_LEAST = 1e-38
"""A block of nf4 whose elements are all below this has the codes of zeros, as bitsandbytes gives it."""
_E4M3_MOST = 448.0
_E2M1_MOST_EXPONENT = 2


class NotFiniteError(ValueError):
    """Says that a weight has an infinity or NaN, for which no format has a code."""


def in_turn(tasks: Sequence[Task]) -> None:
    """Run `tasks` on this thread."""
    for task in tasks:
        task()


def encode(
    coding: Coding, values: torch.Tensor, coded: torch.Tensor, run: Callable[[Sequence[Task]], None] = in_turn
) -> None:
    """Encode the flat `values`, of float32, bfloat16 or float16, to the bytes `coded`. `run` runs tasks, in any order
    and on any threads. Raises `NotFiniteError` for an infinity or NaN; some of `coded` may have been written then."""
    assert values.numel() == coding.numel, f"{values.numel()} elements for {coding}"
    coded[: coding.nbytes].zero_()  # between the parts too
    codes, scales, nested = parts_of(coding, coded, 0, coding.numel)
    if coding.bits == 8:
        run(_by_rows(coding, values, codes, scales.view(torch.float32)))
        return
    kind, absmax, size = _nf4, scales, 4
    if coding.format == "mxfp4-transposed":
        run(_turned(coding, values, codes, scales))
        return
    if coding.format == "mxfp4":
        kind, size = _mxfp4, 1
    elif coding.format == "nf4-nested":
        absmax = torch.empty(4 * coding.scales, dtype=torch.uint8, device="cpu")
    tasks: list[Task] = []
    for at in range(0, coding.numel, _TASK_ELEMENTS):
        part = values[at : at + _TASK_ELEMENTS]
        own, found = coding.codes_of(at, part.numel()), coding.scales_of(at, part.numel())
        here = absmax[found.start * size : found.stop * size]
        tasks.append(partial(_alone, kind, part, codes[own.start : own.stop], here))
    run(tasks)
    if coding.nested:
        _alone(_nest, absmax.view(torch.float32), scales, nested.view(torch.float32))


def _turned(coding: Coding, values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> list[Task]:
    """Return tasks that encode matrices with their dimensions exchanged, one each."""
    matrices = values.view(coding.matrices, coding.rows, coding.columns).transpose(1, 2)
    parts = zip(matrices, codes.chunk(coding.matrices), scales.chunk(coding.matrices), strict=True)
    return [partial(_alone, _mxfp4_of_matrix, *part) for part in parts]


def _by_rows(coding: Coding, values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> list[Task]:
    shape = coding.matrices, coding.rows, coding.columns
    matrices, own = values.view(shape), codes.view(shape)
    at_once = max(1, _TASK_ELEMENTS // coding.columns // FP8_TILE) * FP8_TILE
    tiles = scales.view(coding.matrices, *(coding.grid if coding.format == "fp8" else (coding.rows,)))
    made: list[Task] = []
    for number in range(coding.matrices):
        for row in range(0, coding.rows, at_once):
            rows = slice(row, row + at_once)
            if coding.format == "fp8":
                here = tiles[number, row // FP8_TILE : -(-rows.stop // FP8_TILE)]
                made.append(partial(_alone, _fp8, matrices[number, rows], own[number, rows], here))
            else:
                kind = _int8 if coding.format == "int8" else _int8_torchao
                made.append(partial(_alone, kind, matrices[number, rows], own[number, rows], tiles[number, rows]))
    return made


_Part = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]


def _alone(kind: _Part, values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
    """Encode one part, and check that its scales are finite, as they are if and only if its elements are."""
    with one_torch_thread(), torch.no_grad():
        kind(values.float(), codes, scales)


def _check(absmax: torch.Tensor) -> None:
    if not absmax.isfinite().all():
        raise NotFiniteError("an element is infinite or NaN")


def _blocks(values: torch.Tensor, size: int) -> torch.Tensor:
    """Return rows of `size` elements; the last one is filled up with zeros."""
    return torch.nn.functional.pad(values, (0, -values.numel() % size)).view(-1, size)


def _pack(codes: torch.Tensor, target: torch.Tensor, first: int, second: int) -> None:
    """Write pairs of 4-bit codes, the first shifted by `first` bits, the second by `second`."""
    pairs = codes.flatten()[: 2 * target.numel()].view(-1, 2)
    target.copy_(pairs[:, 0] << first | pairs[:, 1] << second)


@cache
def _nf4_bounds() -> torch.Tensor:
    table = torch.tensor(NF4, dtype=torch.float32, device="cpu")
    return (table[:-1] + table[1:]) / 2


def _nf4(values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
    blocks = _blocks(values, NF4_BLOCK)
    absmax = blocks.abs().amax(1)
    _check(absmax)
    scales.view(torch.float32).copy_(absmax)
    scaled = (blocks * (1.0 / absmax.clamp(min=_LEAST)).unsqueeze(1)).clamp(-1, 1)
    found = torch.bucketize(scaled, _nf4_bounds(), out_int32=True).to(torch.uint8).flatten()
    found[values.numel() :] = 0
    _pack(found, codes, 4, 0)


def _mxfp4(values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
    blocks = _blocks(values, MX_BLOCK)
    absmax = blocks.abs().amax(1)
    _check(absmax)
    exponents = ((absmax.view(torch.int32) >> 23) - _E2M1_MOST_EXPONENT).clamp(min=0)
    scales.copy_(exponents)
    units = torch.where(exponents == 0, 1 << 22, exponents << 23).view(torch.float32)
    scaled = blocks / units.unsqueeze(1)
    size = scaled.abs()
    found = scaled.view(torch.int32) >> 31 & 8
    for number, bound in enumerate((0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)):  # a tie goes to the even code
        found += size >= bound if number % 2 else size > bound
    found = found.flatten()
    found[values.numel() :] = 0
    _pack(found, codes, 0, 4)


def _mxfp4_of_matrix(values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
    _mxfp4(values.flatten(), codes, scales)


def _fp8(values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
    rows, columns = values.shape
    tiles = torch.nn.functional.pad(values, (0, -columns % FP8_TILE, 0, -rows % FP8_TILE))
    tiles = tiles.view(scales.shape[0], FP8_TILE, scales.shape[1], FP8_TILE)
    absmax = tiles.abs().amax((1, 3))
    _check(absmax)
    unit = absmax / _E4M3_MOST
    scales.copy_(torch.where(unit > 0, unit, 1.0))
    scaled = (tiles / scales[:, None, :, None]).clamp(-_E4M3_MOST, _E4M3_MOST).to(torch.float8_e4m3fn)
    whole = scaled.view(torch.uint8).view(scales.shape[0] * FP8_TILE, -1)
    codes.copy_(whole[:rows, :columns])


def _int8(values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
    absmax = values.abs().amax(1)
    _check(absmax)
    scales.copy_(absmax)
    factors = torch.where(absmax > 0, 127.0 / absmax, 0.0)
    codes.view(torch.int8).copy_((values * factors.unsqueeze(1)).round().clamp(-127, 127))


def _int8_torchao(values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
    _int8(values, codes, scales)
    scales.mul_(INT8_UNIT)


@cache
def _nested_bounds() -> torch.Tensor:
    values = nested_values()
    return (values[:-1] + values[1:]) / 2


def _nest(absmax: torch.Tensor, codes: torch.Tensor, levels: torch.Tensor) -> None:
    """Encode the scales of nf4 themselves: `levels` gets their mean, and a scale for each 256 of them."""
    levels[0] = absmax.double().mean().float()
    blocks = _blocks(absmax - levels[0], NESTED_BLOCK)
    most = blocks.abs().amax(1)
    levels[1:].copy_(most)
    scaled = (blocks * (1.0 / most.clamp(min=_LEAST)).unsqueeze(1)).clamp(-1, 1)
    codes.copy_(torch.bucketize(scaled, _nested_bounds(), out_int32=True).flatten()[: absmax.numel()])
