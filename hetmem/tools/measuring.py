"""What measurements share: ordinary torch around them, the clock, and the ways to move elements that are timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

_LONG_SECONDS, LEAST_ROUNDS = 1.0, 3  # of a way that takes longer than that altogether so many rounds are enough
PAIRS = (
    (torch.float32, torch.float32),
    (torch.float32, torch.float16),
    (torch.float32, torch.bfloat16),
    (torch.float16, torch.float32),
    (torch.bfloat16, torch.float32),
)
FORMS = ("snorm8", "unorm8")
"""Of the 8-bit rows: float32 to codes and the scales of their blocks."""


@contextmanager
def ordinary_torch() -> Iterator[None]:
    """New tensors are float32 in host memory, and a backward is possible. All threads have the dtype meanwhile."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.device("cpu"), torch.inference_mode(False):
            yield
    finally:
        torch.set_default_dtype(before)


@dataclass(frozen=True, slots=True)
class TransferWay:
    """One way to move the elements, ready to run."""

    name: str
    memory: str
    run: Callable[[], Any]
    link_bytes: int  # that cross, or within one memory are read and written


def timed(run: Callable[[], Any], rounds: int, *, on_device: bool) -> list[float]:
    """Seconds of each of `rounds` runs, fewer of what takes long, after two that warm up."""
    seconds: list[float] = []
    for index in range(rounds + 2):
        if on_device:
            torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        if on_device:
            torch.cuda.synchronize()
        if index > 1:
            seconds.append(time.perf_counter() - start)
        if len(seconds) >= LEAST_ROUNDS and sum(seconds) > _LONG_SECONDS:
            break
    return seconds


def in_one(source: torch.Tensor, target: torch.Tensor) -> None:
    """One copy; the host waits for it only if it has to."""
    target.copy_(source, non_blocking=True)


def in_two(source: torch.Tensor, between: torch.Tensor, target: torch.Tensor) -> None:
    """Through `between`. What the host casts it has waited for."""
    between.copy_(source, non_blocking=between.is_cuda)
    target.copy_(between, non_blocking=True)


def short_name(dtype: torch.dtype) -> str:
    """Without "torch."."""
    return str(dtype).removeprefix("torch.")


def quantised_routes(
    route: str, elements: int, device: str, memory: str
) -> Iterator[tuple[str, torch.dtype, str, list[TransferWay]]]:
    """float32 to 8 bits within the memory of `device`: by kernels there, by torch elsewhere."""
    from hetmem.cuda import quantise
    from hetmem.cuda.backend import TorchBackend, backend

    here = TorchBackend("host memory") if device == "cpu" else backend()
    source = torch.randn(elements, device=device).abs_()
    for form in FORMS:
        code = quantise.Format(form)
        codes = torch.zeros(elements, dtype=code.dtype, device=device)
        scales = torch.zeros(quantise.scales_numel(elements), device=device)
        way = "fused" if here.native else "torch reference"

        def run(code: quantise.Format = code, codes: torch.Tensor = codes, scales: torch.Tensor = scales) -> None:
            quantise.quantise(here, code, source, codes, scales)

        yield route, torch.float32, form, [TransferWay(way, memory, run, 5 * elements)]
