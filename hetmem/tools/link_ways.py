"""Measures, for `hetmem probe`, which way bytes are faster across the link of this GPU, and keeps it in a file."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch

from hetmem.base.units import MIB
from hetmem.cuda.backend import Backend, backend
from hetmem.memory import cuda_copies, mapping
from hetmem.memory.cuda_copies import Moves
from hetmem.memory.cuda_device import CudaDevice, driver_version
from hetmem.tools.measuring import timed

Grids = Mapping[int, float]
"""Seconds of a kernel by the number of its blocks."""

BLOCKS = (2, 4, 8)
_WAY_ELEMENTS = 64 * MIB
_PRODUCT_SIDE = 8192
_ALIKE = 1.03  # times that are closer than this are equal


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
    engine, kernel = cuda_copies.CopyPath.COPY_ENGINE, cuda_copies.CopyPath.KERNEL
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


def link_rates(scale: int = 1) -> Iterator[tuple[str, str, float]]:
    """Yield route, way and bytes a second at home of float32 weights and gradients that are cast on their way."""
    device, kernels, elements = CudaDevice(), backend(), _WAY_ELEMENTS // scale
    tried = [(cuda_copies.CopyPath.COPY_ENGINE, 1)]
    tried += [(cuda_copies.CopyPath.KERNEL, blocks) for blocks in BLOCKS if kernels.native]
    with LinkCrossing(device, kernels, elements, _PRODUCT_SIDE // scale) as crossing:
        for inwards, route in ((True, "host to device"), (False, "device to host")):
            for path, blocks in tried:
                taken = crossing.seconds(path, blocks, 7, inwards=inwards, beside=False)
                kernel = path is cuda_copies.CopyPath.KERNEL
                yield route, f"cast, kernel of {blocks} blocks" if kernel else "cast, copy engine", 4 * elements / taken


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
        engine = cuda_copies.CopyPath.COPY_ENGINE
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

    def seconds(
        self, way: cuda_copies.CopyPath, blocks: int, rounds: int, *, inwards: bool, beside: bool = True
    ) -> float:
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
        chosen.append(cuda_copies.CopyPath.KERNEL if by_kernel else cuda_copies.CopyPath.COPY_ENGINE)
        if by_kernel:
            grids.append(min(blocks for blocks, taken in grid.items() if taken <= _ALIKE * min(grid.values())))
    return cuda_copies.Ways(chosen[0], chosen[1], max(grids))
