"""Measures this machine for the planner, in about a minute: memory, disk, links and, if there is one, the GPU.

It measures with the code and the memory that training uses: the optimizer's kernel, the NVMe store, torch's copies,
huge pages that the driver page-locks. It leaves no file.
"""

from __future__ import annotations

import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import NamedTuple

import psutil
import torch

from hetmem.base.hardware import DeviceProfile, HardwareProfile, HostProfile, Rate, ThreadCosts
from hetmem.base.units import MIB
from hetmem.cpu import AdamWStep, adamw_tasks
from hetmem.cpu.workers import WorkerPool, usable_cores
from hetmem.engine.homes import ALLOCATOR_SHARE
from hetmem.memory.chunk import elements
from hetmem.memory.cuda_device import CudaDevice
from hetmem.memory.host_memory import Mapping
from hetmem.memory.nvme_store import BLOCK_BYTES, REQUEST_BYTES, THREADS, Extent, NvmeStore
from hetmem.planner import DEFAULT_HARDWARE, load_profile
from hetmem.planner.step_program import UPDATE_BYTES
from hetmem.tools.probe_ranks import copy_rates, page_lock_rate

_COPY_BYTES = 256 * MIB
_UPDATE_ELEMENTS = 64 << 20  # 1 GiB in all: of less a part would stay in the cache of a large processor
_DISK_BYTES = 256 * MIB
_LOOKED_SECONDS, _BUSY_SHARE = 0.3, 0.25
_LAUNCHES, _TURNS = 200, 9  # shorter than an update


@contextmanager
def ordinary_torch() -> Iterator[None]:
    """Make new tensors float32 in host memory and a backward possible. The default dtype changes for all threads."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.device("cpu"), torch.inference_mode(False):
            yield
    finally:
        torch.set_default_dtype(before)


@ordinary_torch()
def probe(
    nvme_dir: str | os.PathLike[str] | None = None, *, quick: bool = False, say: Callable[[str], object] = bool
) -> HardwareProfile:
    """Measure a profile of this machine; the disk is the one of `nvme_dir` (None: the temporary directory).

    Without a GPU the device is the simulated one, with the rates of this machine's cores. `quick` measures on a
    sixteenth of the bytes: for tests and demonstrations. `say` is called with the name of each part before it is
    measured, and with a warning if the machine is busy, which the profile records too. Raises `BudgetError` if the
    directory cannot be written to.
    """
    scale = 16 if quick else 1
    busy = _busy()
    if busy:
        say(f"warning: {busy}: rates will be too low; measure again when it is idle")
    say("1/3 memory and the host's update")
    together = copy_rates(scale)
    host = replace(
        _host(scale),
        ranks_copy_bytes_per_second=max(together.values()),
        page_lock_bytes_per_second=page_lock_rate(scale),
    )
    ranks = ", ".join(f"{count}: {rate / 1e9:.1f} GB/s" for count, rate in together.items())
    directory = Path(nvme_dir or tempfile.gettempdir())
    say(f"2/3 the drive of {directory}")
    disk = _disk(directory, _DISK_BYTES // scale)
    say("3/3 the device and its links")
    device, to_device, to_host, both = _gpu(scale) if torch.cuda.is_available() else _simulated(scale, host)
    measured = f"measured by hetmem probe on {platform.node() or 'this machine'}, torch {torch.__version__}"
    measured = f"{measured}; {busy}" if busy else measured
    costs, source = _thread_costs(device)
    return HardwareProfile(
        torch.cuda.get_device_name() if torch.cuda.is_available() else f"simulated on {host.cores} cores",
        device,
        host,
        to_device,
        to_host,
        Rate(disk.read, disk.latency),
        Rate(disk.write, disk.latency),
        both,
        {
            "all but thread": measured,
            "thread": source,
            "host.ranks_copy_bytes_per_second": f"processes at once, {ranks}",
        },
        costs,
        disk.both,
    )


def _thread_costs(device: DeviceProfile) -> tuple[ThreadCosts, str]:
    """Return hetmem's own costs on the training thread, from the default profile, and their source; on a GPU scaled by
    this machine's time to launch an operator over the profile's."""
    shipped = load_profile(DEFAULT_HARDWARE)
    factor = device.operator_seconds / shipped.device.operator_seconds if torch.cuda.is_available() else 1.0
    costs = ThreadCosts(**{name: factor * seconds for name, seconds in asdict(shipped.thread).items()})
    return costs, f"{factor:.2f} times those of {shipped.name}, {shipped.sources['thread']}"


def transfers(nvme_dir: str | os.PathLike[str] | None = None, *, quick: bool = False) -> dict[str, float]:
    """Measure the bytes a second of each kind of transfer in training, as `probe` does with the same arguments."""
    scale = 16 if quick else 1
    host, disk = _host(scale), _disk(Path(nvme_dir or tempfile.gettempdir()), _DISK_BYTES // scale)
    _, up, down, both = _gpu(scale) if torch.cuda.is_available() else _simulated(scale, host)
    return {
        "host memory": host.copy_bytes_per_second,
        "host optimizer": host.update_bytes_per_second,
        "host to device": up.bytes_per_second,
        "device to host": down.bytes_per_second,
        "both at once": both,
        "NVMe read": disk.read,
        "NVMe write": disk.write,
    }


def _busy() -> str:
    """Return a note on the load by other processes if it is high enough to spoil measurements, else ""."""
    share = psutil.cpu_percent(_LOOKED_SECONDS) / 100
    return f"the machine was busy, its cores to {share:.0%}" if share > _BUSY_SHARE else ""


def seconds(work: Callable[[], object], rounds: int = 5) -> float:
    """Return the median seconds of `rounds` runs of `work`, after one that is not counted."""
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
    update, by_one, beside = _updates(_UPDATE_ELEMENTS // scale)
    return HostProfile(total, usable_cores(), _copy_rate(scale), update, nodes, by_one, beside)


def _copy_rate(scale: int) -> float:
    nbytes = _COPY_BYTES // scale
    source, target = _parts(Mapping(2 * nbytes), 2, torch.float32)
    source.fill_(1.0)  # unwritten pages are all one page of zeros
    return nbytes / seconds(lambda: target.copy_(source))


def _updates(count: int) -> tuple[float, float, float]:
    """Measure the bytes per second of the optimizer's own kernel, all traffic counted, by all threads and by one; and
    how many times as long this thread takes to launch operators while the others update."""
    pools = WorkerPool(), WorkerPool(1)
    param, gradient, first, second = (part.fill_(1e-3) for part in _parts(Mapping(16 * count), 4, torch.float32))
    hyper = AdamWStep(1e-3, 0.9, 0.999, 1e-8, 0.01, 3, False)
    few = torch.randn(16)

    def tasks() -> list[Callable[[], None]]:
        return adamw_tasks(hyper, param, gradient, first, second)

    def launched() -> float:
        start = time.perf_counter()
        for _ in range(_LAUNCHES):
            few.add(1.0)
        return time.perf_counter() - start

    def launched_beside() -> float:
        batch = pools[0].begin(tasks())
        taken = launched()
        batch.join()
        return taken

    try:
        every, one = (UPDATE_BYTES * count / seconds(lambda: pool.run(tasks())) for pool in pools)  # noqa: B023
        turns = [(launched(), launched_beside()) for _ in range(_TURNS)]
    finally:
        for pool in pools:
            pool.close()
    return every, min(one, every), max(1.0, median(beside for _, beside in turns) / median(alone for alone, _ in turns))


def _parts(memory: Mapping, count: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return `count` tensors of equal length that share `memory`, a mapping as homes lie in."""
    nbytes = memory.nbytes // count
    return [elements(memory.buffer(at * nbytes, nbytes), dtype, nbytes // dtype.itemsize) for at in range(count)]


# ---- the disk ----------------------------------------------------------------------------------------------------


class _Disk(NamedTuple):
    """Bytes a second of reads, of writes, and of both at once in equal parts; and the seconds of a small read."""

    read: float
    write: float
    both: float
    latency: float


def _disk(directory: Path, nbytes: int) -> _Disk:
    """Measure the drive of `directory` with requests as in a run."""
    block = min(REQUEST_BYTES, nbytes // THREADS)
    store = NvmeStore([directory], nbytes + BLOCK_BYTES)
    try:
        extents, memory = store.reserve_many([block] * (nbytes // block)), Mapping(nbytes)
        parts = [(extent, memory.buffer(index * block, block)) for index, extent in enumerate(extents)]
        single, small = store.reserve(BLOCK_BYTES), Mapping(BLOCK_BYTES).buffer(0, BLOCK_BYTES)

        def moved(*ways: Callable[[Extent, memoryview], Future[int]]) -> float:
            def settle() -> None:
                for future in [way(*part) for way, part in zip(cycle(ways), parts, strict=False)]:
                    future.result()

            return nbytes / seconds(settle, 3)

        write, read = moved(store.write), moved(store.read)
        store.write(single, small).result()
        latency = seconds(lambda: store.read(single, small).result(), 15)
        return _Disk(read, write, moved(store.read, store.write), latency)
    finally:
        store.close()


# ---- the device --------------------------------------------------------------------------------------------------


def _simulated(scale: int, host: HostProfile) -> tuple[DeviceProfile, Rate, Rate, float]:
    """Measure the cores of this machine as the simulated device."""
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
    """Measure the first GPU: its links from page-locked memory, its memory, its matrix rates."""
    nbytes = _COPY_BYTES // scale
    memory = Mapping(2 * nbytes)
    unpin = CudaDevice(0).pin(memory)
    try:
        latency, up, down, both = _links(_parts(memory, 2, torch.uint8))
    finally:
        unpin()
    device = [torch.empty(nbytes, dtype=torch.uint8, device="cuda") for _ in range(2)]

    def copy() -> None:
        device[1].copy_(device[0])
        torch.cuda.synchronize()

    bandwidth = 2 * nbytes / seconds(copy)
    flops = {
        str(t).removeprefix("torch."): _matrix_rate(t, scale) for t in (torch.bfloat16, torch.float16, torch.float32)
    }
    launch = _launch_seconds()
    total = int(torch.cuda.get_device_properties(0).total_memory)
    return (
        DeviceProfile(total, bandwidth, flops, launch, ALLOCATOR_SHARE),
        Rate(up, latency),
        Rate(down, latency),
        both,
    )


def _links(pinned: list[torch.Tensor]) -> tuple[float, float, float, float]:
    """Return the seconds of a small copy from and to `pinned`, and the bytes a second up, down, and both at once."""
    nbytes = pinned[0].nbytes
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
    return latency, up, down, both


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
