"""The rows of `hetmem bench transfers` that need a GPU: over the link in both directions, and within its memory.

And the part of `hetmem probe` that keeps a file: which way bytes are faster across the link of this GPU.

"fused" is a kernel of `hetmem.cuda` that reads or writes page-locked host memory itself while it casts.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial

import torch

from hetmem.bench import PAIRS, Way, in_one, in_two, quantised_routes, short_name, timed
from hetmem.cuda.backend import Backend, backend
from hetmem.cuda.cast import CASTS, cast
from hetmem.cuda.segments import Segments
from hetmem.memory import mapping, ways
from hetmem.memory.cuda import CudaDevice, driver_version
from hetmem.memory.moves import Moves
from hetmem.units import MIB

Route = tuple[str, torch.dtype, str, list[Way]]
Grids = Mapping[int, float]
"""Seconds of a kernel by the number of its blocks."""

BLOCKS = (8, 16, 32, 64, 132)
_WAY_ELEMENTS = 64 * MIB
_ALIKE = 1.03  # times that are closer than this are equal


class Registered:
    """Page-locked memory as hetmem uses it: one mapping, registered. A context; its tensors die with it."""

    def __init__(self, nbytes: int) -> None:
        self._mapping = mapping.Mapping(nbytes)
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


# ---- which way is faster -----------------------------------------------------------------------------------------


def keep_ways(*, quick: bool = False) -> str:
    """Measure the ways of this GPU and keep what is best for the runs to come. Returns a sentence that says so.

    Where kernels cannot run nothing is kept: there is but one way.
    """
    device, kernels = CudaDevice(), backend()
    if not kernels.native:
        return f"ways across the link: torch's operators only ({kernels.reason})"
    best = measure_ways(device, kernels, _WAY_ELEMENTS // (16 if quick else 1))
    try:
        kept = f"kept in {ways.save_ways(best, torch.cuda.get_device_name(device.torch_device), driver_version())}"
    except OSError as error:
        kept = f"not kept, as the cache cannot be written to ({error})"
    return f"weights by {best.weights.value}, gradients by {best.gradients.value}, {best.blocks} blocks: {kept}"


def measure_ways(device: CudaDevice, kernels: Backend, elements: int, rounds: int = 7) -> ways.Ways:
    """The faster way for float32 weights to a bfloat16 slot, and for bfloat16 gradients to a float32 home.

    Needs 4 bytes an element of host memory, 4 of the device, and 16 MiB. Each time is the median of `rounds`.
    """
    host = mapping.Mapping(4 * elements)
    unpin = device.pin(host)
    try:
        home = torch.frombuffer(host.buffer(0, 4 * elements), dtype=torch.float32)
        slot, gradient = (torch.zeros(elements, dtype=torch.bfloat16, device=device.torch_device) for _ in range(2))

        def seconds(way: ways.Way, blocks: int, *, inwards: bool) -> float:
            asked = ways.Ways(way, way, blocks)
            moves = Moves(device.torch_device, kernels, asked, lambda tensor: True)
            move = (
                partial(moves.copy_in, slot, home)
                if inwards
                else partial(moves.gradient_out, home, gradient, add=False)
            )
            return statistics.median(timed(move, rounds, on_device=True))

        engine, kernel = ways.Way.COPY_ENGINE, ways.Way.KERNEL
        engines = [seconds(engine, BLOCKS[0], inwards=inwards) for inwards in (True, False)]
        grids = [{blocks: seconds(kernel, blocks, inwards=inwards) for blocks in BLOCKS} for inwards in (True, False)]
    finally:
        torch.cuda.synchronize()
        unpin()
    best = fastest(engines[0], grids[0], engines[1], grids[1])
    figures = [4 * elements / min(grid.values()) / 1e9 for grid in grids], [4 * elements / x / 1e9 for x in engines]
    said = "; ".join(
        f"{what} {by_kernel:.1f} GB/s by kernel, {by_engine:.1f} by copy engine"
        for what, by_kernel, by_engine in zip(("weights", "gradients"), *figures, strict=True)
    )
    return replace(best, source=f"measured: {said}")


def fastest(weights_engine: float, weights: Grids, gradients_engine: float, gradients: Grids) -> ways.Ways:
    """From seconds of each way: a kernel where it is faster, with the fewest blocks that do as well as any."""
    chosen, grids = [], [1]
    for engine, grid in ((weights_engine, weights), (gradients_engine, gradients)):
        by_kernel = min(grid.values()) < engine
        chosen.append(ways.Way.KERNEL if by_kernel else ways.Way.COPY_ENGINE)
        if by_kernel:
            grids.append(min(blocks for blocks, taken in grid.items() if taken <= _ALIKE * min(grid.values())))
    return ways.Ways(chosen[0], chosen[1], max(grids))
