"""The rows of `hetmem bench transfers` that need a GPU: over the link in both directions, and within its memory.

"fused" is a kernel of `hetmem.cuda` that reads or writes page-locked host memory itself while it casts.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from functools import partial

import torch

from hetmem.bench import PAIRS, Way, in_one, in_two, quantised_routes, short_name, timed
from hetmem.cuda.backend import Backend, backend
from hetmem.cuda.cast import CASTS, cast
from hetmem.cuda.segments import Segments
from hetmem.memory.cuda import CudaDevice
from hetmem.memory.mapping import Mapping

Route = tuple[str, torch.dtype, str, list[Way]]


class Registered:
    """Page-locked memory as hetmem uses it: one mapping, registered. A context; its tensors die with it."""

    def __init__(self, nbytes: int) -> None:
        self._mapping = Mapping(nbytes)
        self._unpin: Callable[[], None] = lambda: None

    def __enter__(self) -> torch.Tensor:
        self._unpin = CudaDevice().pin(self._mapping)
        return torch.frombuffer(self._mapping.buffer(0, self._mapping.nbytes), dtype=torch.uint8)

    def __exit__(self, *error: object) -> None:
        torch.cuda.synchronize()
        self._unpin()


def device_ceilings(elements: int, rounds: int) -> dict[str, float]:
    """Bytes per second of the copy engine in each direction, and of a copy on the device (read and written)."""
    nbytes = 4 * elements
    there, other = (torch.empty(nbytes, dtype=torch.uint8, device="cuda") for _ in range(2))
    with Registered(nbytes) as here:
        up = timed(partial(in_one, here, there), rounds, on_device=True)
        down = timed(partial(in_one, there, here), rounds, on_device=True)
    within = timed(partial(in_one, other, there), rounds, on_device=True)
    return {
        "host to device": nbytes / statistics.median(up),
        "device to host": nbytes / statistics.median(down),
        "device to device": 2 * nbytes / statistics.median(within),
    }


def device_routes(elements: int) -> Iterator[Route]:
    """Every pair of dtypes over every route with a device at one end or both."""
    kernels = backend()
    whole = Segments([(0, 0, elements)], "cuda")
    for source_dtype, target_dtype in PAIRS:
        with Registered(elements * (source_dtype.itemsize + target_dtype.itemsize)) as memory:
            pinned = memory[: elements * source_dtype.itemsize].view(source_dtype)
            pinned.copy_(torch.randn(elements).to(source_dtype))
            target = memory[elements * source_dtype.itemsize :].view(target_dtype)
            there = torch.randn(elements, device="cuda").to(source_dtype)
            yield _up(kernels, whole, pinned, target_dtype)
            yield _down(kernels, whole, there, target)
        yield _within(kernels, whole, there, target_dtype)
    yield from quantised_routes("device to device", elements, "cuda", "device")


def _up(kernels: Backend, whole: Segments, pinned: torch.Tensor, dtype: torch.dtype) -> Route:
    there = torch.empty(pinned.numel(), dtype=dtype, device="cuda")
    buffer = torch.empty_like(pinned, device="cuda")
    ways = []
    for memory, source in (("pinned", pinned), ("pageable", pinned.clone())):
        if source.dtype is dtype:
            ways.append(Way("copy", memory, partial(in_one, source, there), there.nbytes))
            continue
        cast_here = torch.empty_like(source, dtype=dtype, pin_memory=memory == "pinned")
        ways.append(
            Way(
                "cast then copy",
                memory,
                partial(in_two, source, cast_here, there),
                there.nbytes,
            )
        )
        ways.append(
            Way(
                "copy then cast",
                memory,
                partial(in_two, source, buffer, there),
                source.nbytes,
            )
        )
    if kernels.native and (pinned.dtype, dtype) in CASTS:
        ways.append(Way("fused", "pinned", partial(cast, kernels, whole, pinned, there), pinned.nbytes))
    return "host to device", pinned.dtype, short_name(dtype), ways


def _down(kernels: Backend, whole: Segments, there: torch.Tensor, pinned: torch.Tensor) -> Route:
    ways = []
    for memory, target in (("pinned", pinned), ("pageable", torch.empty_like(pinned).clone())):
        if there.dtype is target.dtype:
            ways.append(Way("copy", memory, partial(in_one, there, target), there.nbytes))
            continue
        buffer = torch.empty_like(there, dtype=target.dtype)
        here = torch.empty_like(target, dtype=there.dtype, pin_memory=memory == "pinned")
        ways.append(
            Way(
                "cast then copy",
                memory,
                partial(in_two, there, buffer, target),
                target.nbytes,
            )
        )
        ways.append(Way("copy then cast", memory, partial(in_two, there, here, target), there.nbytes))
    if kernels.native and (there.dtype, pinned.dtype) in CASTS:
        ways.append(Way("fused", "pinned", partial(cast, kernels, whole, there, pinned), pinned.nbytes))
    return "device to host", there.dtype, short_name(pinned.dtype), ways


def _within(kernels: Backend, whole: Segments, source: torch.Tensor, dtype: torch.dtype) -> Route:
    target = torch.empty(source.numel(), dtype=dtype, device="cuda")
    nbytes = source.nbytes + target.nbytes
    ways = [Way("torch", "device", partial(in_one, source, target), nbytes)]
    if kernels.native and (source.dtype, dtype) in CASTS:
        ways.append(Way("fused", "device", partial(cast, kernels, whole, source, target), nbytes))
    return "device to device", source.dtype, short_name(dtype), ways
