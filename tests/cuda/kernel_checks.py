"""What the kernels must do, as checks that take a place to run: g++ on the CPU, a sanitised build, or a GPU.

Each runs launchers and compares with torch, and sees that nothing beside the destination was written.
"""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import numpy as np
import torch

from hetmem.cpu import TILE_ELEMENTS, AdamWStep, square_sum_tasks
from hetmem.cpu import adamw as update
from hetmem.cuda import backend
from hetmem.cuda.dequantise import dequantise, dequantise_parts, torch_dequantise
from hetmem.cuda.kernels import (
    ADAMS,
    CASTS,
    GATHERS,
    adamw,
    cast,
    gather_rows,
    square_sums,
    torch_adamw,
    torch_square_sums,
)
from hetmem.schedule.formats import ALL_FORMATS, ByteRange, Coding
from tests.cuda.vectors import HALVES, WIDE, Place, assert_same, numbers, ordinary

# ---- Casts. ----


def check_cast_numbers(place: Place) -> None:
    for source_dtype, dtype in sorted(CASTS, key=str):
        data = numbers(source_dtype, place.thorough)
        source, destination = place.buffer(data), place.buffer(torch.zeros(data.numel(), dtype=dtype))
        cast(place.backend, source.view, destination.view)
        place.synchronize()
        assert_same(destination.result(), data.to(dtype), f"{source_dtype} to {dtype}")


def check_cast_layouts(place: Place) -> None:
    for source_dtype, dtype in sorted(CASTS, key=str):
        for numel in (0, 1, 7, 8, 9, 2047, 2049, 3 * 2048 + 13):
            for source_shift, shift in ((0, 0), (1, 0), (2, 4), (4, 2), (5, 5)):
                data = ordinary(numel, source_dtype)
                source = place.buffer(data, source_shift)
                destination = place.buffer(torch.full((numel,), 7.0, dtype=dtype), shift)
                with mock.patch.object(backend, "MOST_BLOCKS", 2):
                    cast(place.backend, source.view, destination.view)
                place.synchronize()
                assert_same(destination.result(), data.to(dtype), f"{numel}, {source_dtype} to {dtype}")


# ---- Sums of squares. ----


def check_squares(place: Place) -> None:
    for dtype in (WIDE, *HALVES):
        for numel, shift in ((0, 0), (1, 0), (4095, 1), (4096, 0), (4097, 3), (9 * 4096 + 77, 0), (70 * 4096 - 5, 8)):
            data = ordinary(numel, dtype)
            source, sums = place.buffer(data, shift), place.buffer(torch.zeros(-(-numel // 4096), dtype=torch.float64))
            with mock.patch.object(backend, "MOST_BLOCKS", 1):
                square_sums(place.backend, source.view, sums.view)
            place.synchronize()
            assert_same(sums.result(), torch_square_sums(data), f"{dtype}, {numel}")


def check_squares_tell_what_is_not_finite(place: Place) -> None:
    for dtype in (WIDE, *HALVES):
        great = 2.0 ** (15 if dtype == torch.float16 else 127)
        data = torch.full((8 * 4096 + 9,), great, dtype=dtype)
        data[4096 + 63], data[2 * 4096 + 64], data[-1] = torch.inf, torch.nan, -torch.inf
        source, sums = place.buffer(data), place.buffer(torch.zeros(9, dtype=torch.float64))
        square_sums(place.backend, source.view, sums.view)
        place.synchronize()
        assert sums.result().isfinite().nonzero().flatten().tolist() == [0, 3, 4, 5, 6, 7], dtype
        assert sums.result().isnan().nonzero().flatten().tolist() == [2], dtype
        assert sums.result()[0] == 4096 * great**2


def check_squares_equal_the_host(place: Place) -> None:
    for dtype in (WIDE, *HALVES):
        data = ordinary(2 * TILE_ELEMENTS + 12345, dtype)
        source, sums = place.buffer(data), place.buffer(torch.zeros(260, dtype=torch.float64))
        square_sums(place.backend, source.view, sums.view)
        place.synchronize()
        tasks, expected = square_sum_tasks(data)
        for task in tasks:
            task()
        assert_same(sums.result(), expected, f"{dtype}")


# ---- AdamW. ----

STEPS = {
    "first": AdamWStep(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, step=1),
    "late, scaled, to maximize": AdamWStep(3e-4, 0.9, 0.95, 1e-8, 0.1, step=1000, maximize=True, grad_scale=0.37),
    "from the other end": AdamWStep(lr=0.1, beta1=0.3, beta2=0.5, eps=1e-3, weight_decay=0.0, step=7),
}


def check_adamw(place: Place) -> None:
    for name, step in STEPS.items():
        for kind in sorted(ADAMS, key=str):
            for numel, tail, shifts in (
                (2048 + 8, 8, (0, 0, 0, 0, 0)),
                (1 + 3 * 2048, 5, (1, 2, 3, 0, 5)),
                (5, 5, (0,) * 5),
                (4099, 0, (0,) * 5),
                (0, 0, (0,) * 5),
            ):
                run_adamw(place, update.scalars_of(step), numel, tail, kind, shifts, f"{name}, {kind}, {numel}")


def run_adamw(
    place: Place,
    scalars: tuple[object, ...],
    numel: int,
    tail: int,
    kind: tuple[torch.dtype, torch.dtype, torch.dtype | None],
    shifts: tuple[int, ...],
    what: str,
) -> None:
    dtype, grad_dtype, copy_dtype = kind
    param, grad, exp_avg = (ordinary(numel, seed=seed) for seed in range(3))
    tensors = [param.to(dtype), grad.to(grad_dtype), exp_avg.to(dtype), ordinary(numel, seed=3).square().to(dtype)]
    edge = torch.tensor([0.0, -0.0, 1e-45, 1e-38, 3e38, torch.inf, torch.nan])
    for shift, tensor in enumerate(tensors):
        tensor[shift : shift + 7] = edge[: max(0, numel - shift)].to(tensor.dtype)
    if copy_dtype is not None:
        tensors.append(torch.zeros(numel, dtype=copy_dtype))
    buffers = [place.buffer(tensor, shift, pinned=True) for tensor, shift in zip(tensors, shifts, strict=False)]
    with mock.patch.object(backend, "MOST_BLOCKS", 2):
        adamw(place.backend, scalars, *(buffer.view for buffer in buffers), tail=tail)
    place.synchronize()
    torch_adamw(scalars, *tensors[:4], tensors[4] if copy_dtype is not None else None, tail)
    for role, buffer, expected in zip(("param", "grad", "m", "v", "copy"), buffers, tensors, strict=False):
        assert_same(buffer.result(), expected, f"{what}: {role}")


def check_adamw_rounds_a_fused_product_once(place: Place) -> None:
    """m = 1 + 2**-24 + 2**-60 before it is rounded: by way of float64 it would be the tie, and then 1."""
    scalars = [1.0, 1.0, 2.0**-48 * (1 + 2.0**-12), 0.5, 0.5, 1.0, 1e-8, -0.1]
    grad, exp_avg = torch.tensor([2.0**24 - 2**12 + 2] * 9), torch.ones(9)
    grad[1::2] *= -1
    exp_avg[1::2] *= -1
    buffers = [place.buffer(tensor) for tensor in (torch.ones(9), grad, exp_avg, torch.ones(9))]
    adamw(place.backend, [np.float32(scalar) for scalar in scalars], *(buffer.view for buffer in buffers))
    place.synchronize()
    assert_same(buffers[2].result(), exp_avg * (1 + 2.0**-23))


def check_adamw_equals_the_host(place: Place) -> None:
    """Behind its last full vector torch's kernel rounds otherwise; a parameter of 7 elements has none on any CPU whose
    vectors have 8 or more."""
    for dtype, numel, tail in ((WIDE, 16 * 500, 0), (WIDE, 7, 7), *((half, 32 * 500, 0) for half in HALVES)):
        for name, step in STEPS.items():
            for seed in range(100 if numel == 7 else 1):
                tensors = [ordinary(numel, seed=4 * seed + number).to(dtype) for number in range(4)]
                tensors[3].square_()
                tensors += [torch.zeros(numel, dtype=torch.bfloat16)] if dtype == WIDE else []
                buffers = [place.buffer(tensor) for tensor in tensors]
                adamw(place.backend, update.scalars_of(step), *(buffer.view for buffer in buffers), tail=tail)
                place.synchronize()
                update.update_by_torch(step, *tensors)
                for role, buffer, expected in zip(("param", "grad", "m", "v", "copy"), buffers, tensors, strict=False):
                    assert_same(buffer.result(), expected, f"{name}, {dtype}: {role}")


# ---- Rows of a table. ----


def check_gather(place: Place) -> None:
    """Also of rows that the table does not have, at any alignment."""
    for source_dtype, dtype in sorted(GATHERS, key=str):
        for rows, width in ((7, 1), (7, 8), (9, 24), (5, 13), (3, 2056)):
            table = ordinary(rows * width, source_dtype).view(rows, width)
            for shift in (0, 1):
                indices = torch.tensor([0, rows - 1, 0, -1, rows, rows // 2, -(2**62), 2**40])
                source, which = place.buffer(table.flatten(), shift, pinned=True), place.buffer(indices)
                target = place.buffer(torch.zeros(len(indices) * width, dtype=dtype), shift)
                out = target.view.view(len(indices), width)
                with mock.patch.object(backend, "MOST_BLOCKS", 2):
                    gather_rows(place.backend, source.view.view(rows, width), which.view, out)
                place.synchronize()
                known = (indices >= 0) & (indices < rows)
                expected = table[torch.where(known, indices, 0)].to(dtype)
                expected[~known] = torch.nan
                assert_same(target.result(), expected.flatten(), f"{source_dtype} to {dtype}, {rows} x {width}")


# ---- Quantised weights. ----


def made_codes(coding: Coding, seed: int = 0) -> torch.Tensor:
    """Bytes of a coded weight with every code, and scales of many magnitudes; what lies between the parts is 0xA5."""
    random = torch.Generator().manual_seed(seed)
    coded = torch.full((coding.nbytes,), 0xA5, dtype=torch.uint8)
    start, nbytes = coding.codes_span
    codes = torch.arange(nbytes) * 37 % 256
    codes[codes % 128 == 127] = 5 if coding.format == "fp8" else 127
    coded[start : start + nbytes] = codes.to(torch.uint8)
    start, nbytes = coding.scales_span
    if coding.scale_bytes == 1:
        scales = torch.randint(0, 255, (nbytes,), generator=random).to(torch.uint8)
        scales[::3] = torch.randint(100, 140, (len(scales[::3]),), generator=random).to(torch.uint8)
        scales[:2] = torch.tensor([0, 254], dtype=torch.uint8)[:nbytes]
    else:
        scales = ordinary(coding.scales, seed=seed).abs()
        scales[0] = 1e-38
        scales = scales.view(torch.uint8)
    coded[start : start + nbytes] = scales
    start, nbytes = coding.nested_span
    coded[start : start + nbytes] = ordinary(coding.nested, seed=seed + 1).view(torch.uint8)
    return coded


IN_ORDER = tuple(name for name in ALL_FORMATS if name != "mxfp4-transposed")
SHAPES = ((1,), (3, 5), (64, 64), (129, 257), (2, 130, 70), (7, 3, 3, 3), (40, 17, 31), (128, 384))


def check_dequantise(place: Place) -> None:
    """Every format and dtype, on shapes with short last blocks and tiles, at any alignment of the result."""
    for name in IN_ORDER:
        for number, shape in enumerate(SHAPES):
            coding = Coding.of(name, shape)
            coded = made_codes(coding, number)
            for dtype, shift in ((WIDE, 0), (HALVES[0], number % 3), (HALVES[1], number % 2)):
                source = place.buffer(coded, pinned=True)
                target = place.buffer(torch.full((coding.numel,), 7.0, dtype=dtype), shift)
                with mock.patch.object(backend, "MOST_BLOCKS", 2):
                    dequantise(place.backend, coding, source.view, target.view)
                place.synchronize()
                parts = [coded[span.start : span.start + span.nbytes] for span in spans_of(coding)]
                expected = torch.empty(coding.numel, dtype=dtype)
                torch_dequantise(coding, *parts, expected, 0)
                assert_same(target.result(), expected, f"{name}, {shape}, {dtype}")


def check_dequantise_in_parts(place: Place) -> None:
    """Parts of a weight, whose codes and scales lie in different places, as they do when it is copied in pieces."""
    for name in IN_ORDER:
        coding = Coding.of(name, (150, 300))
        coded, whole = made_codes(coding), torch.empty(coding.numel, dtype=torch.bfloat16)
        codes, scales, nested = (coded[span.start : span.start + span.nbytes] for span in spans_of(coding))
        torch_dequantise(coding, codes, scales, nested, whole, 0)
        for first, last in ((0, 16384), (16384, 32768), (32768, 44999), (16384, 45000)):
            own = coding.codes_of(first, last - first)
            own_codes = codes[own.start : own.stop]
            own_scales = scales[coding.scales_of(first, last - first).start * coding.scale_bytes :]
            buffers = [place.buffer(part, pinned=True) for part in (own_codes, own_scales, nested)]
            target = place.buffer(torch.zeros(last - first, dtype=torch.bfloat16))
            dequantise_parts(place.backend, coding, *(buffer.view for buffer in buffers), target.view, first)
            place.synchronize()
            assert_same(target.result(), whole[first:last], f"{name}, from {first}")


def check_dequantise_transposed(place: Place) -> None:
    """Whole matrices whose blocks run along their rows, also some of several."""
    for number, shape in enumerate(((32, 1), (64, 64), (3, 96, 130), (5, 32, 7), (160, 392))):
        coding = Coding.of("mxfp4-transposed", shape)
        coded = made_codes(coding, number)
        parts = [coded[span.start : span.start + span.nbytes] for span in spans_of(coding)]
        for dtype, shift in ((WIDE, 0), (HALVES[0], number % 3), (HALVES[1], number % 2)):
            expected = torch.empty(coding.numel, dtype=dtype)
            torch_dequantise(coding, *parts, expected, 0)
            for first in {0, (coding.matrices - 1) * coding.unit}:
                source = place.buffer(coded, pinned=True)
                target = place.buffer(torch.full((coding.numel - first,), 7.0, dtype=dtype), shift)
                with mock.patch.object(backend, "MOST_BLOCKS", 2):
                    dequantise(place.backend, coding, source.view, target.view, first)
                place.synchronize()
                assert_same(target.result(), expected[first:], f"{shape}, {dtype}, from {first}")


def spans_of(coding: Coding) -> tuple[ByteRange, ByteRange, ByteRange]:
    return coding.codes_span, coding.scales_span, coding.nested_span


CHECKS: dict[str, Callable[[Place], None]] = {
    name.removeprefix("check_"): check for name, check in list(globals().items()) if name.startswith("check_")
}
