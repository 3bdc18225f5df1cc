"""Quantised frozen weights: bytes at home and on the link, the speed of decoding on the host, the error of each format,
and a step whose link binds.

    python -m benchmarks.quantised

Speeds are ratios within this run, of CPU time of one thread, the least of several. Errors are beside those of the
libraries whose formats they are, where these are installed.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import nn

import hetmem
from hetmem import testing
from hetmem.placing.frozen import Format
from hetmem.quantised.decode import decode, decoder
from hetmem.quantised.encode import encode
from hetmem.schedule.formats import Coding

ROWS, COLUMNS, TIMES = 4096, 4096, 15
FORMATS: tuple[Format, ...] = ("nf4", "nf4-nested", "mxfp4", "fp8", "int8")
LAYERS, WIDTH, LINK = 16, 1024, "4MB"


def least_seconds(work: Callable[[], object]) -> float:
    """CPU time of this thread, the least of `TIMES`."""
    found = []
    for _ in range(TIMES):
        start = time.thread_time()
        work()
        found.append(time.thread_time() - start)
    return min(found)


def coded(format_: str, weight: torch.Tensor) -> tuple[Coding, torch.Tensor]:
    coding = Coding.of(format_, weight.shape)
    codes = torch.zeros(coding.nbytes, dtype=torch.uint8)
    encode(coding, weight.flatten(), codes)
    return coding, codes


def speeds() -> None:
    """Decoded bytes of bfloat16 a second, as a share of those that a copy writes."""
    torch.set_num_threads(1)
    weight = torch.randn(ROWS, COLUMNS)
    source, target = weight.bfloat16().flatten(), torch.empty(weight.numel(), dtype=torch.bfloat16)
    copy = least_seconds(lambda: target.copy_(source))
    print(f"copy of bfloat16: {target.nbytes / copy / 1e9:.2f} GB/s written")
    for format_ in FORMATS:
        coding, codes = coded(format_, weight)
        seconds = least_seconds(partial(decode, coding, codes, target))
        by = decoder(format_, torch.bfloat16)
        print(f"decode {format_:10} {target.nbytes / seconds / 1e9:6.2f} GB/s, {copy / seconds:.2f} of a copy, by {by}")


def errors() -> None:
    """The norm of the error over that of normal weights, of hetmem and of the library."""
    torch.manual_seed(0)
    weight = torch.randn(1024, 1024)
    for format_ in FORMATS:
        coding, codes = coded(format_, weight)
        own = torch.empty(weight.numel())
        decode(coding, codes, own)
        theirs = _by_library(format_, weight)
        error, other = (None if each is None else _error(weight, each) for each in (own, theirs))
        print(f"error  {format_:10} {error:.4f}, of the library {'-' if other is None else f'{other:.4f}'}")


def _error(weight: torch.Tensor, found: torch.Tensor) -> float:
    return float((weight.flatten() - found.flatten()).norm() / weight.norm())


def _by_library(format_: str, weight: torch.Tensor) -> Any:
    """Return what the library decodes of its own codes of `weight` (of fp8: of ours); None if it is not installed."""
    library: Any
    try:
        if format_ == "mxfp4":
            library = import_module("torchao.prototype.mx_formats.mx_tensor")
            return library.MXTensor.to_mx(weight, torch.float4_e2m1fn_x2, 32).dequantize(torch.float32)
        if format_ == "fp8":
            library = import_module("transformers.integrations.finegrained_fp8")
            coding, codes = coded("fp8", weight)
            values = codes[: weight.numel()].view(torch.float8_e4m3fn).view(weight.shape)
            scales = codes[coding.scales_span.start :][: coding.scales_span.nbytes].view(torch.float32)
            return library._dequantize_fp8_weight(values, scales.view(coding.grid), [128, 128], torch.float32)
        library = import_module("bitsandbytes.functional")
        if format_ == "int8":
            return library.int8_vectorwise_dequant(*library.int8_vectorwise_quant(weight)[:2])
        nested = format_ == "nf4-nested"
        return library.dequantize_4bit(
            *library.quantize_4bit(weight, blocksize=64, quant_type="nf4", compress_statistics=nested)
        )
    except ImportError:
        return None


class Layer(nn.Module):
    """A frozen matrix, and a vector that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16).requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(WIDTH, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.base(x)
        return x + y * self.scale


def steps() -> None:
    """Bytes of each format, and the seconds of a step whose link binds over those of its link."""
    for format_ in FORMATS:
        torch.manual_seed(0)
        model = nn.Sequential(*(Layer() for _ in range(LAYERS)))
        device = hetmem.SimDevice(host_to_device=LINK)
        limits = hetmem.Budget(device="64MiB", device_chunks="12MiB", host="128MiB")
        hetmem.manage(model, limits, device=device, frozen=format_, chunk_bytes="2MiB")
        optimizer = hetmem.AdamW([p for p in model.parameters() if p.requires_grad])
        x, read = torch.randn(4, WIDTH, dtype=torch.bfloat16), []
        for _ in range(4):
            model(x).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            link = hetmem.report(model).to_dict()["links"]["host_to_device"]
            read.append((time.perf_counter(), link["seconds"], link["bytes"]))
        (start, busy, before), (end, busy_then, after) = read[-2:]
        numel = LAYERS * WIDTH * WIDTH
        chunks = [chunk for chunk in testing.of(model).chunks() if chunk.elements > LAYERS * WIDTH]
        home = sum(chunk.home_bytes["param"] for chunk in chunks) / numel
        ratio = (end - start) / (busy_then - busy)
        link_bytes = (after - before) / numel / 2  # in a forward and a backward
        print(f"step   {format_:10} {home:.4f} bytes a parameter at home, {link_bytes:.4f} on the link a pass")
        print(f"       {ratio:.3f} of the seconds of the link ({end - start:.2f} s)")


def main() -> int:
    """Print all."""
    speeds()
    errors()
    steps()
    return 0


if __name__ == "__main__":
    sys.exit(main())
