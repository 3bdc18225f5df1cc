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

from hetmem.base.units import MIB
from hetmem.cuda import quantise
from hetmem.cuda.backend import Backend, TorchBackend, backend
from hetmem.cuda.cast import CASTS, cast
from hetmem.cuda.segments import Segments
from hetmem.memory import cuda_copies, mapping
from hetmem.memory.cuda_copies import Moves
from hetmem.memory.cuda_device import CudaDevice, driver_version
from hetmem.tools.measuring import FORMS, PAIRS, TransferWay, in_one, in_two, quantised_routes, short_name, timed

Route = tuple[str, torch.dtype, str, list[TransferWay]]
Grids = Mapping[int, float]
"""Seconds of a kernel by the number of its blocks."""

DEVICE = "cuda"
"""Where routes begin or end; the tests take what this machine has."""

BLOCKS = (8, 16, 32, 64, 132)
_WAY_ELEMENTS = 64 * MIB
_PRODUCT_SIDE = 8192
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
    there, other = (torch.empty(nbytes, dtype=torch.uint8, device=DEVICE) for _ in range(2))
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
    whole = Segments([(0, 0, elements)], DEVICE)
    for source_dtype, target_dtype in PAIRS:
        with Registered(elements * (source_dtype.itemsize + target_dtype.itemsize)) as memory:
            pinned = memory[: elements * source_dtype.itemsize].view(source_dtype)
            pinned.copy_(torch.randn(elements).to(source_dtype))
            target = memory[elements * source_dtype.itemsize :].view(target_dtype)
            there = torch.randn(elements, device=DEVICE).to(source_dtype)
            yield _up(kernels, whole, pinned, target_dtype)
            yield _down(kernels, whole, there, target)
        yield _within(kernels, whole, there, target_dtype)
    for form in FORMS:
        with Registered(4 * elements) as memory:
            yield _quantised_up(kernels, form, memory[: 4 * elements].view(torch.float32))
        yield _quantised_down(kernels, form, elements)
    yield from quantised_routes("device to device", elements, DEVICE, "device")


def _up(kernels: Backend, whole: Segments, pinned: torch.Tensor, dtype: torch.dtype) -> Route:
    there = torch.empty(pinned.numel(), dtype=dtype, device=DEVICE)
    buffer = torch.empty_like(pinned, device=DEVICE)
    ways = []
    for memory, source in (("pinned", pinned), ("pageable", pinned.clone())):
        if source.dtype is dtype:
            ways.append(TransferWay("copy", memory, partial(in_one, source, there), there.nbytes))
            continue
        cast_here = _on_host(source.numel(), dtype, memory)
        ways.append(
            TransferWay(
                "cast then copy",
                memory,
                partial(in_two, source, cast_here, there),
                there.nbytes,
            )
        )
        ways.append(
            TransferWay(
                "copy then cast",
                memory,
                partial(in_two, source, buffer, there),
                source.nbytes,
            )
        )
    if kernels.native and (pinned.dtype, dtype) in CASTS:
        ways.append(TransferWay("fused", "pinned", partial(cast, kernels, whole, pinned, there), pinned.nbytes))
    return "host to device", pinned.dtype, short_name(dtype), ways


def _down(kernels: Backend, whole: Segments, there: torch.Tensor, pinned: torch.Tensor) -> Route:
    ways = []
    for memory, target in (("pinned", pinned), ("pageable", torch.empty_like(pinned).clone())):
        if there.dtype is target.dtype:
            ways.append(TransferWay("copy", memory, partial(in_one, there, target), there.nbytes))
            continue
        buffer = torch.empty_like(there, dtype=target.dtype)
        here = _on_host(target.numel(), there.dtype, memory)
        ways.append(
            TransferWay(
                "cast then copy",
                memory,
                partial(in_two, there, buffer, target),
                target.nbytes,
            )
        )
        ways.append(TransferWay("copy then cast", memory, partial(in_two, there, here, target), there.nbytes))
    if kernels.native and (there.dtype, pinned.dtype) in CASTS:
        ways.append(TransferWay("fused", "pinned", partial(cast, kernels, whole, there, pinned), pinned.nbytes))
    return "device to host", there.dtype, short_name(pinned.dtype), ways


def _within(kernels: Backend, whole: Segments, source: torch.Tensor, dtype: torch.dtype) -> Route:
    target = torch.empty(source.numel(), dtype=dtype, device=DEVICE)
    one, other = source.nbytes, target.nbytes
    nbytes = one + other
    ways = [TransferWay("torch", "device", partial(in_one, source, target), nbytes)]
    if source.dtype is not dtype:
        cast_there, copied = torch.empty_like(target), torch.empty_like(source)
        ways.append(
            TransferWay("cast then copy", "device", partial(in_two, source, cast_there, target), one + 3 * other)
        )
        ways.append(TransferWay("copy then cast", "device", partial(in_two, source, copied, target), 3 * one + other))
    if kernels.native and (source.dtype, dtype) in CASTS:
        ways.append(TransferWay("fused", "device", partial(cast, kernels, whole, source, target), nbytes))
    return "device to device", source.dtype, short_name(dtype), ways


def _on_host(numel: int, dtype: torch.dtype, memory: str) -> torch.Tensor:
    """Memory of the host, page-locked by torch where `memory` says so."""
    return torch.empty(numel, dtype=dtype, pin_memory=memory == "pinned" and DEVICE == "cuda")


class _Codes:
    """Codes of 8 bits and their scales, in one memory."""

    def __init__(self, form: str, numel: int, where: str) -> None:
        """`where`: "device", or a memory of the host."""
        self.form = quantise.Format(form)
        scales = quantise.scales_numel(numel)
        if where == "device":
            self.codes = torch.empty(numel, dtype=self.form.dtype, device=DEVICE)
            self.scales = torch.empty(scales, device=DEVICE)
        else:
            self.codes, self.scales = _on_host(numel, self.form.dtype, where), _on_host(scales, torch.float32, where)
        self.nbytes = self.codes.nbytes + self.scales.nbytes

    def make(self, kernels: Backend, source: torch.Tensor) -> None:
        """Of `source`, where the codes are or where `kernels` reach."""
        quantise.quantise(kernels, self.form, source, self.codes, self.scales)

    def copy(self, other: _Codes) -> None:
        """From `other`, in two copies."""
        in_one(other.codes, self.codes)
        in_one(other.scales, self.scales)


_BY_TORCH = TorchBackend("host memory")


def _quantised_up(kernels: Backend, form: str, pinned: torch.Tensor) -> Route:
    numel = pinned.numel()
    pinned.copy_(torch.rand(numel))
    there, buffer = _Codes(form, numel, "device"), torch.empty_like(pinned, device=DEVICE)
    ways = []
    for memory, source in (("pinned", pinned), ("pageable", pinned.clone())):
        here = _Codes(form, numel, memory)
        cast_first = partial(_after, partial(here.make, _BY_TORCH, source), partial(there.copy, here))
        copy_first = partial(_after, partial(in_one, source, buffer), partial(there.make, kernels, buffer))
        ways.append(TransferWay("cast then copy", memory, cast_first, there.nbytes))
        ways.append(TransferWay("copy then cast", memory, copy_first, source.nbytes))
    if kernels.native:
        ways.append(TransferWay("fused", "pinned", partial(there.make, kernels, pinned), pinned.nbytes))
    return "host to device", torch.float32, form, ways


def _quantised_down(kernels: Backend, form: str, numel: int) -> Route:
    source, there = torch.rand(numel, device=DEVICE), _Codes(form, numel, "device")
    ways = []
    for where in ("pinned", "pageable"):
        here, buffer = _Codes(form, numel, where), _on_host(numel, torch.float32, where)
        cast_first = partial(_after, partial(there.make, kernels, source), partial(here.copy, there))
        copy_first = partial(_after, partial(_arrive, source, buffer), partial(here.make, _BY_TORCH, buffer))
        ways.append(TransferWay("cast then copy", where, cast_first, there.nbytes))
        ways.append(TransferWay("copy then cast", where, copy_first, source.nbytes))
    if kernels.native:
        here = _Codes(form, numel, "pinned")
        ways.append(TransferWay("fused", "pinned", partial(here.make, kernels, source), here.nbytes))
    return "device to host", torch.float32, form, ways


def _after(first: Callable[[], None], then: Callable[[], None]) -> None:
    first()
    then()


def _arrive(source: torch.Tensor, here: torch.Tensor) -> None:
    """A copy to the host that the host waits for: it goes on with the values."""
    here.copy_(source)


# ---- which way is faster -----------------------------------------------------------------------------------------


def keep_ways(*, quick: bool = False) -> str:
    """Measure the ways of this GPU and keep what is best for the runs to come. Returns a sentence that says so.

    Where kernels cannot run nothing is kept: there is but one way.
    """
    device, kernels = CudaDevice(), backend()
    if not kernels.native:
        return f"ways across the link: torch's operators only ({kernels.reason})"
    scale = 16 if quick else 1
    best = measure_ways(device, kernels, _WAY_ELEMENTS // scale, side=_PRODUCT_SIDE // scale)
    try:
        name = torch.cuda.get_device_name(device.torch_device)
        kept = f"kept in {cuda_copies.save_ways(best, name, driver_version())}"
    except OSError as error:
        kept = f"not kept, as the cache cannot be written to ({error})"
    return f"weights by {best.weights.value}, gradients by {best.gradients.value}, {best.blocks} blocks: {kept}"


def measure_ways(
    device: CudaDevice, kernels: Backend, elements: int, rounds: int = 7, side: int = _PRODUCT_SIDE
) -> cuda_copies.Ways:
    """The better way for float32 weights to a bfloat16 slot, and for bfloat16 gradients to a float32 home: the one with
    which a transfer and matrix products beside it are over first, as a kernel takes from the products what it runs on.

    Needs 4 bytes an element of host memory, 4 of the device, 16 MiB, and 4 bytes for `side` squared. Each time is the
    median of `rounds`.
    """
    engine, kernel = cuda_copies.Way.COPY_ENGINE, cuda_copies.Way.KERNEL
    with LinkCrossing(device, kernels, elements, side) as crossing:
        engines = [crossing.seconds(engine, BLOCKS[0], rounds, inwards=inwards) for inwards in (True, False)]
        grids = [
            {blocks: crossing.seconds(kernel, blocks, rounds, inwards=inwards) for blocks in BLOCKS}
            for inwards in (True, False)
        ]
    best = fastest(engines[0], grids[0], engines[1], grids[1])
    said = "; ".join(
        f"{what} {1e3 * min(grid.values()):.2f} ms by kernel, {1e3 * taken:.2f} by copy engine"
        for what, grid, taken in zip(("weights", "gradients"), grids, engines, strict=True)
    )
    products = f"{crossing.products} products of {side} x {side}" if crossing.products else "no products"
    return replace(best, source=f"measured: {said}, {elements:,} elements beside {products}")


class LinkCrossing:
    """Weights on their way to the device and gradients on theirs to the host, alone or beside matrix products on
    another stream that last about as long as the copy engine needs. A context; its memory is page-locked within it."""

    def __init__(self, device: CudaDevice, kernels: Backend, elements: int, side: int = _PRODUCT_SIDE) -> None:
        self._device, self._kernels = device, kernels
        self._host = mapping.Mapping(4 * elements)
        where = device.torch_device
        self._slot, self._gradient = (torch.zeros(elements, dtype=torch.bfloat16, device=where) for _ in range(2))
        self._left, self._product = (torch.randn(side, side, dtype=torch.bfloat16, device=where) for _ in range(2))
        self._stream = torch.cuda.Stream()
        self.products = 0

    def __enter__(self) -> LinkCrossing:
        self._unpin = self._device.pin(self._host)
        self._home = torch.frombuffer(self._host.buffer(0, self._host.nbytes), dtype=torch.float32)
        engine = cuda_copies.Way.COPY_ENGINE
        alone = [self.seconds(engine, BLOCKS[0], 3, inwards=inwards) for inwards in (True, False)]
        self.products = 1
        self.products = max(1, round(max(alone) / self.products_seconds(3)))
        return self

    def __exit__(self, *error: object) -> None:
        torch.cuda.synchronize()
        self._unpin()

    def products_seconds(self, rounds: int) -> float:
        """Of the products alone."""
        return statistics.median(timed(self._multiply, rounds, on_device=True))

    def seconds(self, way: cuda_copies.Way, blocks: int, rounds: int, *, inwards: bool, beside: bool = True) -> float:
        """Until weights are on the device (`inwards`) or gradients in host memory, and, `beside` them, the products are
        done too: the median of `rounds`."""
        moves = Moves(self._device.torch_device, self._kernels, cuda_copies.Ways(way, way, blocks), lambda tensor: True)

        def cross() -> None:
            if beside:
                self._multiply()
            if inwards:
                moves.copy_in(self._slot, self._home)
            else:
                moves.gradient_out(self._home, self._gradient, add=False)

        return statistics.median(timed(cross, rounds, on_device=True))

    def _multiply(self) -> None:
        with torch.cuda.stream(self._stream):
            for _ in range(self.products):
                torch.mm(self._left, self._left, out=self._product)


def fastest(weights_engine: float, weights: Grids, gradients_engine: float, gradients: Grids) -> cuda_copies.Ways:
    """From seconds of each way: a kernel where it is faster, with the fewest blocks that do as well as any."""
    chosen, grids = [], [1]
    for engine, grid in ((weights_engine, weights), (gradients_engine, gradients)):
        by_kernel = min(grid.values()) < engine
        chosen.append(cuda_copies.Way.KERNEL if by_kernel else cuda_copies.Way.COPY_ENGINE)
        if by_kernel:
            grids.append(min(blocks for blocks, taken in grid.items() if taken <= _ALIKE * min(grid.values())))
    return cuda_copies.Ways(chosen[0], chosen[1], max(grids))
