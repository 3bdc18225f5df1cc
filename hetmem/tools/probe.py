"""Measures this machine for the planner, in about a minute: memory, disk, links and, if there is one, the GPU.

Everything measured goes through what training uses: the optimizer's kernel, the NVMe store, torch's copies. It decides
nothing and leaves no file behind.
"""

from __future__ import annotations

import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import psutil
import torch

from hetmem.base.hardware import DeviceProfile, DiskSample, HardwareProfile, HostProfile, Rate
from hetmem.base.units import MIB, format_size
from hetmem.cpu import AdamWStep, adamw_tasks
from hetmem.cpu.workers import WorkerPool, usable_cores
from hetmem.engine.homes import ALLOCATOR_SHARE
from hetmem.memory import nvme_requests
from hetmem.memory.cuda_device import CudaDevice
from hetmem.memory.mapping import Mapping
from hetmem.memory.nvme_store import Extent, NvmeStore
from hetmem.schedule.update_split import UPDATE_BYTES
from hetmem.tools.measuring import measure, ordinary_torch

_COPY_BYTES = 256 * MIB
_UPDATE_ELEMENTS = 16 << 20
_DISK_BYTES = 256 * MIB
_LOOKED_SECONDS, _BUSY_SHARE = 0.3, 0.25
_BOTH_WAYS_BYTES = 4 * MIB
_DISK_POINTS = ((1 * MIB, 1), (4 * MIB, 2), (4 * MIB, 4), (4 * MIB, 8), (16 * MIB, 1), (16 * MIB, 2), (16 * MIB, 4))


@ordinary_torch()
def probe(
    nvme_dir: str | os.PathLike[str] | None = None, *, quick: bool = False, say: Callable[[str], object] = bool
) -> HardwareProfile:
    """A profile of this machine; the disk is the one of `nvme_dir` (None: the temporary directory).

    Without a GPU the device is the simulated one, and its rates are those of this machine's cores. `quick` measures on
    a sixteenth of the bytes: for tests and demonstrations. Otherwise the best way to ask the disk is kept in the cache
    directory, and every later NVMe store on that disk takes it. `say` is told what is measured next, and whether the
    machine is busy, which the profile tells too. Raises `BudgetError` if the directory cannot be written to.
    """
    scale = 16 if quick else 1
    busy = _busy()
    if busy:
        say(f"warning: {busy}: rates will be too low; measure again when it is idle")
    say("1/4 memory and the host's update")
    host = _host(scale)
    directory = Path(nvme_dir or tempfile.gettempdir())
    say(f"2/4 the drive of {directory}")
    samples = _disk(directory, _DISK_BYTES // scale)
    best_read = max(sample.read_bytes_per_second for sample in samples)
    best_write = max(sample.write_bytes_per_second for sample in samples)
    latency = _seconds_of_a_small_read(directory)
    kept = {} if quick else {"disk_samples": _keep(directory, samples)}
    at_once = _disk_both_ways(directory, _DISK_BYTES // scale)
    say("3/4 the device and its links")
    device, to_device, to_host, both = _gpu(scale) if torch.cuda.is_available() else _simulated(scale, host)
    measured = f"measured by hetmem probe on {platform.node() or 'this machine'}, torch {torch.__version__}"
    say("4/4 what a call costs the training thread")
    costs = measure(3 if quick else 15, "cuda" if torch.cuda.is_available() else "sim")
    return HardwareProfile(
        torch.cuda.get_device_name() if torch.cuda.is_available() else f"simulated on {host.cores} cores",
        device,
        host,
        to_device,
        to_host,
        Rate(best_read, latency),
        Rate(best_write, latency),
        both,
        {"all": f"{measured}; {busy}" if busy else measured, **kept},
        tuple(samples),
        costs,
        at_once,
    )


@ordinary_torch()
def transfers(nvme_dir: str | os.PathLike[str] | None = None, *, quick: bool = False) -> list[Transferred]:
    """Measure what moves bytes here: host memory, the drive of `nvme_dir` (None: the temporary directory) by each way
    to ask it, and, where torch sees a GPU, its link, with a cast and without. Nothing is kept."""
    scale = 16 if quick else 1
    found = [Transferred("host memory", "copy", _copy_rate(scale), 1.0)]
    samples = _disk(Path(nvme_dir or tempfile.gettempdir()), _DISK_BYTES // scale)
    for route, rates in (
        ("NVMe, read", [sample.read_bytes_per_second for sample in samples]),
        ("NVMe, write", [sample.write_bytes_per_second for sample in samples]),
    ):
        asked = (f"{sample.depth} x {format_size(sample.block_bytes)}" for sample in samples)
        found += [Transferred(route, way, rate, rate / max(rates)) for way, rate in zip(asked, rates, strict=True)]
    if torch.cuda.is_available():
        _, up, down, _ = _gpu(scale)
        ceilings = {"host to device": up.bytes_per_second, "device to host": down.bytes_per_second}
        found += [Transferred(route, "copy", rate, 1.0) for route, rate in ceilings.items()]
        for route, rate in _cast_rates(scale):
            found.append(Transferred(route, "copy, cast", rate, rate / ceilings[route]))
    return found


@dataclass(frozen=True, slots=True)
class Transferred:
    """Bytes a second over `route` by one `way`, and what part that is of the ceiling: the plain copy over it, or the
    fastest way to ask a drive."""

    route: str
    way: str
    bytes_per_second: float
    of_ceiling: float


def _busy() -> str:
    """What other processes take of the cores, where that spoils measurements; else nothing."""
    share = psutil.cpu_percent(_LOOKED_SECONDS) / 100
    return f"the machine was busy, its cores to {share:.0%}" if share > _BUSY_SHARE else ""


def seconds(work: Callable[[], object], rounds: int = 5) -> float:
    """The median of `rounds` runs of `work`, after one that is not counted."""
    work()
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return median(times)


# ---- the host ----------------------------------------------------------------------------------------------------


def _host(scale: int) -> HostProfile:
    nodes = len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or 1
    total = int(psutil.virtual_memory().total)
    return HostProfile(total, usable_cores(), _copy_rate(scale), _update_rate(_UPDATE_ELEMENTS // scale), nodes)


def _copy_rate(scale: int) -> float:
    nbytes = _COPY_BYTES // scale
    source, target = torch.ones(nbytes // 4), torch.zeros(nbytes // 4)
    return nbytes / seconds(lambda: target.copy_(source))


def _update_rate(elements: int) -> float:
    """Bytes per second of the optimizer's own kernel, all traffic counted."""
    pool = WorkerPool()
    param, gradient, first, second = (torch.full((elements,), 1e-3) for _ in range(4))
    hyper = AdamWStep(1e-3, 0.9, 0.999, 1e-8, 0.01, 3, False)
    try:
        return UPDATE_BYTES * elements / seconds(lambda: pool.run(adamw_tasks(hyper, param, gradient, first, second)))
    finally:
        pool.close()


# ---- the disk ----------------------------------------------------------------------------------------------------


def _disk(directory: Path, nbytes: int) -> list[DiskSample]:
    samples = []
    for block, depth in _DISK_POINTS:
        block = min(block, nbytes // depth)
        store = NvmeStore([directory], nbytes, threads=depth, request_bytes=block)
        try:
            extents = store.reserve_many([block * depth] * (nbytes // (block * depth)))
            memory = Mapping(nbytes)
            parts = [memory.buffer(index * block * depth, block * depth) for index in range(len(extents))]
            written = seconds(lambda: _settle(store.write, extents, parts), 3)  # noqa: B023 - called at once
            read = seconds(lambda: _settle(store.read, extents, parts), 3)  # noqa: B023 - called at once
        finally:
            store.close()
        samples.append(DiskSample(block, depth, nbytes / read, nbytes / written))
    return samples


def _disk_both_ways(directory: Path, nbytes: int) -> float:
    """Bytes per second of reads and writes together, as many of each, asked for as a run does."""
    block = min(_BOTH_WAYS_BYTES, nbytes // 2)
    store = NvmeStore([directory], nbytes)
    try:
        extents, memory = store.reserve_many([block] * (nbytes // block)), Mapping(nbytes)
        parts = [memory.buffer(index * block, block) for index in range(len(extents))]
        _settle(store.write, extents, parts)

        def both() -> None:
            moves = (store.read, store.write) * len(extents)
            for future in [move(*what) for move, what in zip(moves, zip(extents, parts, strict=True), strict=False)]:
                future.result()

        return nbytes / seconds(both, 3)
    finally:
        store.close()


def _keep(directory: Path, samples: list[DiskSample]) -> str:
    """Let later stores ask the disk as was best here; says so."""
    settings, path = nvme_requests.remember(os.fspath(directory), samples)
    return f"best: {settings}; " + (f"kept in {path}" if path else "not kept, as the cache cannot be written to")


def _settle(move: Callable[[Extent, memoryview], Future[int]], extents: list[Extent], parts: list[memoryview]) -> None:
    """Move all parts, as many at once as the store has threads."""
    for future in [move(extent, part) for extent, part in zip(extents, parts, strict=True)]:
        future.result()


def _seconds_of_a_small_read(directory: Path) -> float:
    store = NvmeStore([directory], 4096, threads=1)
    try:
        extent, memory = store.reserve(4096), Mapping(4096).buffer(0, 4096)
        store.write(extent, memory).result()
        return seconds(lambda: store.read(extent, memory).result(), 15)
    finally:
        store.close()


# ---- the device --------------------------------------------------------------------------------------------------


def _simulated(scale: int, host: HostProfile) -> tuple[DeviceProfile, Rate, Rate, float]:
    """The cores of this machine, as the device that operators run on."""
    flops = {}
    for dtype in (torch.float32, torch.bfloat16):
        side, taken = 64, 0.0
        while side < 2048 and taken < 0.05:  # a core without instructions for a dtype may be a thousand times slower
            side *= 2
            left, right = torch.randn(side, side, dtype=dtype), torch.randn(side, side, dtype=dtype)
            taken = seconds(lambda: left @ right, 3)  # noqa: B023 - called at once
        flops[str(dtype).removeprefix("torch.")] = 2 * side**3 / taken
    numbers = torch.randn(_COPY_BYTES // scale // 16)
    bandwidth = 2 * numbers.nbytes / seconds(lambda: torch.mul(numbers, 2.0))
    few = torch.randn(16)
    launch = seconds(lambda: [few.add(1.0) for _ in range(1000)]) / 1000
    link = Rate(host.copy_bytes_per_second, 0.0, by_the_caller=True)
    return DeviceProfile(host.memory_bytes, bandwidth, flops, launch), link, link, link.bytes_per_second


def _gpu(scale: int) -> tuple[DeviceProfile, Rate, Rate, float]:
    """The first GPU: its links from pinned memory, its memory, its matrix rates."""
    nbytes = _COPY_BYTES // scale
    pinned = [torch.empty(nbytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    device = [torch.empty(nbytes, dtype=torch.uint8, device="cuda") for _ in range(2)]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]

    def move(*, up: bool, down: bool) -> None:
        with torch.cuda.stream(streams[0]):
            if up:
                device[0].copy_(pinned[0], non_blocking=True)
        with torch.cuda.stream(streams[1]):
            if down:
                pinned[1].copy_(device[1], non_blocking=True)
        torch.cuda.synchronize()

    def small() -> None:
        device[0][:16].copy_(pinned[0][:16], non_blocking=True)
        torch.cuda.synchronize()

    latency = seconds(small, 50)
    up = nbytes / seconds(lambda: move(up=True, down=False))
    down = nbytes / seconds(lambda: move(up=False, down=True))
    both = 2 * nbytes / seconds(lambda: move(up=True, down=True))

    def copy() -> None:
        device[1].copy_(device[0])
        torch.cuda.synchronize()

    bandwidth = 2 * nbytes / seconds(copy)
    flops = {
        str(t).removeprefix("torch."): _matrix_rate(t, scale) for t in (torch.bfloat16, torch.float16, torch.float32)
    }
    launch = _launch_seconds()
    memory = int(torch.cuda.get_device_properties(0).total_memory)
    return (
        DeviceProfile(memory, bandwidth, flops, launch, ALLOCATOR_SHARE),
        Rate(up, latency),
        Rate(down, latency),
        both,
    )


def _cast_rates(scale: int) -> Iterator[tuple[str, float]]:
    """Yield route and bytes a second, as they lie at home, of float32 weights to a 16-bit slot and of 16-bit gradients
    to a float32 home."""
    device, host = CudaDevice(), Mapping(_COPY_BYTES // scale)
    unpin = device.pin(host)
    home = torch.frombuffer(host.buffer(0, host.nbytes), dtype=torch.float32)
    slot = torch.zeros(home.numel(), dtype=torch.bfloat16, device=device.torch_device)

    def come() -> None:
        device.copy_in(slot, home)
        torch.cuda.synchronize()

    def leave() -> None:
        device.gradient_out(home, slot, add=False)
        torch.cuda.synchronize()

    try:
        yield "host to device", host.nbytes / seconds(come)
        yield "device to host", host.nbytes / seconds(leave)
    finally:
        unpin()


def _matrix_rate(dtype: torch.dtype, scale: int) -> float:
    side = 8192 if scale == 1 else 2048
    left = torch.randn(side, side, device="cuda", dtype=dtype)

    def multiply() -> None:
        torch.mm(left, left)
        torch.cuda.synchronize()

    return 2 * side**3 / seconds(multiply)


def _launch_seconds() -> float:
    few = torch.zeros(16, device="cuda")

    def many() -> None:
        for _ in range(1000):
            few.add_(1.0)
        torch.cuda.synchronize()

    return seconds(many) / 1000
