"""Decodes quantised weights in host memory, by compiled loops or, where these cannot be built, by torch with the same
bits."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np
import torch

from hetmem.cpu.loops import Loop, compiling
from hetmem.cpu.workers import Task, as_array, one_torch_thread
from hetmem.cuda.dequantise import E2M1, NF4, Parts, nested_values, parts_of, torch_dequantise
from hetmem.quantised import loops
from hetmem.schedule.formats import PIECE_ELEMENTS, Coding

_TASK_ELEMENTS = 64 * PIECE_ELEMENTS

_Run = Callable[[Coding, Parts, int, torch.Tensor], None]


def decode(coding: Coding, coded: torch.Tensor, target: torch.Tensor, first: int = 0) -> None:
    """Decode elements [first, first + target.numel()) of the weight with the bytes `coded` to the flat `target`, of
    float32, bfloat16 or float16, on this thread. `first` is a multiple of `Coding.unit`."""
    numel = target.numel()
    assert first % coding.unit == 0, f"{first} is no multiple of {coding.unit}"
    assert first + numel <= coding.numel, f"{first + numel} of {coding.numel} elements"
    if numel:
        run = _verified(coding.format, target.dtype) or _by_torch
        run(coding, parts_of(coding, coded, first, numel), first, target)


def decode_parts(coding: Coding, parts: Parts, target: torch.Tensor) -> None:
    """Decode a whole weight from `parts` in different places to the flat `target`, on this thread."""
    if target.numel():
        (_verified(coding.format, target.dtype) or _by_torch)(coding, parts, 0, target)


def decode_tasks(coding: Coding, coded: torch.Tensor, target: torch.Tensor) -> list[Task]:
    """Return tasks that decode the whole weight, to be run once each, in any order, on any thread; they hold the
    memory."""
    return [partial(decode, coding, coded, target[part], part.start) for part in coding.parts(_TASK_ELEMENTS)]


def decoder(name: str, dtype: torch.dtype) -> str:
    """Return what decodes the format `name` to `dtype` here: "numba" or "torch". Compiles the loop if necessary."""
    return "torch" if _verified(name, dtype) is None else "numba"


def _by_torch(coding: Coding, parts: Parts, first: int, target: torch.Tensor) -> None:
    with one_torch_thread():
        torch_dequantise(coding, *parts, target, first)


def _by_loop(loop: Loop, tables: tuple[Any, ...], coding: Coding, parts: Parts, first: int, to: Any) -> None:
    codes, scales, nested = (part.numpy() for part in parts)
    scales = scales if coding.scale_bytes == 1 else scales.view(np.float32)
    out = as_array(to)
    match coding.format:
        case "nf4" | "mxfp4":
            loop(*tables, codes, scales, out)
        case "mxfp4-transposed":
            turned = torch.empty_like(to)
            loop(*tables, codes, scales, as_array(turned))
            with one_torch_thread():
                shape = coding.columns, coding.rows
                to.view(-1, *shape[::-1]).copy_(turned.view(-1, *shape).transpose(1, 2))
        case "nf4-nested":
            loop(first, *tables, codes, scales, nested.view(np.float32), out)
        case "fp8":
            loop(first, coding.rows, coding.columns, codes, scales, out)
        case _:
            loop(first, coding.columns, codes.view(np.int8), scales, out)


_LOOPS: dict[str, Loop] = {
    "nf4": loops.nf4,
    "nf4-nested": loops.nested,
    "mxfp4": loops.mxfp4,
    "mxfp4-transposed": loops.mxfp4,
    "fp8": loops.fp8,
    "int8": loops.int8,
    "int8-torchao": loops.rows,
}


@cache
def _verified(name: str, dtype: torch.dtype) -> _Run | None:
    """Return the compiled loop once it has given torch's bits, or None if torch must decode."""
    mxfp4 = (torch.tensor(E2M1, dtype=torch.float32, device="cpu"),)
    tables: dict[str, tuple[torch.Tensor, ...]] = {
        "nf4": (torch.tensor(NF4, dtype=torch.float32, device="cpu"),),
        "nf4-nested": (torch.tensor(NF4, dtype=torch.float32, device="cpu"), nested_values()),
        "mxfp4": mxfp4,
        "mxfp4-transposed": mxfp4,
    }
    try:
        with compiling():
            arrays = tuple(table.numpy() for table in tables.get(name, ()))
            run = partial(_by_loop, loops.compiled(_LOOPS[name]), arrays)
            return run if _gives_torchs_bits(run, name, dtype) else None
    except Exception:  # no Numba, or one that cannot compile it
        return None


def _gives_torchs_bits(run: _Run, name: str, dtype: torch.dtype) -> bool:
    """Return whether `run` and torch decode one small weight alike."""
    coding = Coding.of(name, (96, 7) if name == "mxfp4-transposed" else (5, 131))
    numbers = torch.arange(coding.nbytes, device="cpu")
    coded = (numbers * 73 % 251 % (0x7F if name == "fp8" else 256)).to(torch.uint8)
    for (start, nbytes), at_least in ((coding.scales_span, 0.25), (coding.nested_span, 0.5)):
        if nbytes and (coding.scale_bytes == 4 or at_least == 0.5):
            scales = torch.linspace(at_least, 3, nbytes // 4, dtype=torch.float32, device="cpu")
            coded[start : start + nbytes] = scales.view(torch.uint8)
    made = [torch.zeros(coding.numel, dtype=dtype, device="cpu") for _ in range(2)]
    parts = parts_of(coding, coded, 0, coding.numel)
    run(coding, parts, 0, made[0])
    torch_dequantise(coding, *parts, made[1], 0)
    return torch.equal(made[0].view(torch.uint8), made[1].view(torch.uint8))
