"""The links of the machine: host memory, the way to the GPU and back, the host's own update."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import torch

from benchmarks.gpu.machine import pcie_gigabytes
from benchmarks.gpu.notes import Notes

GIB, MIB = 1 << 30, 1 << 20
UPDATE_BYTES = (
    28  # of host memory's traffic for a parameter: float32 weight, gradient and two moments, read and written
)


def links(notes: Notes) -> None:
    """Copies first, as they are worth most."""
    ceiling = pcie_gigabytes()
    notes.attempt("copies", _copies, notes, ceiling)
    notes.attempt("on the device", _on_device, notes)
    notes.attempt("quantised weights", _decodes, notes, needs=4)
    notes.attempt("host AdamW", _host_adam, notes, needs=8)
    for threads in (8, 1, 16):
        notes.attempt(f"populate, {threads} threads", _populate, notes, threads, needs=4)
    for gib in (1, 8, 32, 64):
        nbytes = gib * (MIB if notes.small else GIB)
        notes.attempt(f"register {gib} GiB", _register, notes, gib, nbytes, needs=2 + gib / 4)


def seconds_of(work: Callable[[], object], rounds: int = 9) -> float:
    """The median, the device's part included, after one that warms up."""
    taken = []
    for _ in range(rounds + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[1:])


@contextmanager
def registered(nbytes: int) -> Iterator[torch.Tensor]:
    """Page-locked memory as hetmem takes it; tensors of it die with the context."""
    from hetmem.memory.cuda_device import CudaDevice
    from hetmem.memory.host_memory import Mapping

    memory = Mapping(nbytes)
    unpin = CudaDevice().pin(memory)
    try:
        yield torch.frombuffer(memory.buffer(0, nbytes), dtype=torch.uint8)
    finally:
        torch.cuda.synchronize()
        unpin()


def _copies(notes: Notes, ceiling: float | None) -> None:
    largest = MIB if notes.small else 256 * MIB
    one, other = (torch.empty(largest, dtype=torch.uint8, device="cuda") for _ in range(2))
    streams = torch.cuda.Stream(), torch.cuda.Stream()
    with registered(2 * largest) as host:
        up, down = host[:largest], host[largest:]

        def move(nbytes: int, *, inwards: bool, outwards: bool) -> None:
            if inwards:
                with torch.cuda.stream(streams[0]):
                    one[:nbytes].copy_(up[:nbytes], non_blocking=True)
            if outwards:
                with torch.cuda.stream(streams[1]):
                    down[:nbytes].copy_(other[:nbytes], non_blocking=True)

        for nbytes in (largest, largest // 4, largest // 16, largest // 64, largest // 256):
            for name, inwards, outwards in (
                ("host to device", True, False),
                ("device to host", False, True),
                ("both at once, sum", True, True),
            ):
                moved = nbytes * (inwards + outwards)
                rate = moved / seconds_of(lambda: move(nbytes, inwards=inwards, outwards=outwards))  # noqa: B023
                best = None if ceiling is None else ceiling * (inwards + outwards)
                notes.number(f"{name}, {nbytes // MIB or nbytes / MIB:g} MiB", rate / 1e9, "GB/s", ceiling=best)
                if nbytes == largest:
                    key = {"host to device": "host_to_device.", "device to host": "device_to_host."}.get(name)
                    notes.keep_rates({f"{key}bytes_per_second" if key else "both_ways_bytes_per_second": rate})
        pageable = torch.ones(largest, dtype=torch.uint8)
        rate = largest / seconds_of(lambda: one.copy_(pageable), 3)
        notes.number("host to device, pageable", rate / 1e9, "GB/s", ceiling=ceiling)


def _on_device(notes: Notes) -> None:
    nbytes, side = (MIB, 128) if notes.small else (GIB, 8192)
    one, other = (torch.empty(nbytes, dtype=torch.uint8, device="cuda") for _ in range(2))
    rate = 2 * nbytes / seconds_of(lambda: one.copy_(other))
    notes.number("copy on the device, read + written", rate / 1e9, "GB/s")
    rates = {"device.bytes_per_second": rate, "device.memory_bytes": torch.cuda.mem_get_info()[1]}
    for dtype in (torch.bfloat16, torch.float32):
        left = torch.randn(side, side, device="cuda").to(dtype)
        torch.backends.cuda.matmul.allow_tf32 = True
        rate = 2 * side**3 / seconds_of(lambda: torch.mm(left, left))  # noqa: B023
        name = str(dtype).removeprefix("torch.")
        notes.number(f"products of {side} x {side}, {name}", rate / 1e12, "TFLOP/s", tf32=dtype is torch.float32)
        rates[f"device.matrix_flops.{name}"] = rate
    notes.keep_rates(rates)


def _decodes(notes: Notes) -> None:
    """Each format's kernel, in bytes of bfloat16 written: codes on the device, and in page-locked host memory."""
    from hetmem.cuda.backend import backend
    from hetmem.cuda.dequantise import dequantise
    from hetmem.schedule.formats import ALL_FORMATS, Coding

    shape = (256, 256) if notes.small else (8192, 16384)
    target = torch.empty(shape[0] * shape[1], dtype=torch.bfloat16, device="cuda")
    for name in ALL_FORMATS:
        coding = Coding.of(name, shape)
        there = torch.full((coding.nbytes,), 60, dtype=torch.uint8, device="cuda")
        with registered(coding.nbytes) as host:
            host.copy_(there)
            for place, coded in (("device", there), ("host", host)):
                seconds = seconds_of(lambda: dequantise(backend(), coding, coded, target))  # noqa: B023
                read = {"codes and scales read": f"{coding.nbytes / seconds / 1e9:.1f} GB/s"}
                notes.number(f"decode {name}, codes on the {place}", target.nbytes / seconds / 1e9, "GB/s", **read)


def _host_adam(notes: Notes) -> None:
    from hetmem.cpu import AdamWStep, adamw_tasks
    from hetmem.cpu.workers import WorkerPool, usable_cores

    elements = (1 << 16) if notes.small else (64 << 20)
    param, gradient, first, second = (torch.full((elements,), 1e-3) for _ in range(4))
    hyper = AdamWStep(1e-3, 0.9, 0.999, 1e-8, 0.01, 3, False)
    cores = usable_cores()
    best = 0.0
    for threads in sorted({1, 2, 4, 8, cores}):
        if threads > cores:
            continue
        pool = WorkerPool(threads)
        try:
            seconds = seconds_of(lambda: pool.run(adamw_tasks(hyper, param, gradient, first, second)), 5)  # noqa: B023
        finally:
            pool.close()
        rate = UPDATE_BYTES * elements / seconds
        best = max(best, rate)
        details = {"of parameters": f"{elements / seconds / 1e9:.2f} G/s"}
        notes.number(f"host AdamW, {threads} threads", rate / 1e9, "GB/s", **details)
    notes.keep_rates({"host.update_bytes_per_second": best, "host.cores": cores})


def _populate(notes: Notes, threads: int) -> None:

    from hetmem.memory import host_memory

    nbytes = MIB if notes.small else 2 * GIB
    memory = host_memory.Mapping(nbytes)
    with mock.patch.object(host_memory, "_POPULATE_THREADS", threads):
        start = time.perf_counter()
        memory.populate()
    notes.number(f"populate, {threads} threads", nbytes / (time.perf_counter() - start) / 1e9, "GB/s")


def _register(notes: Notes, gib: int, nbytes: int) -> None:
    from hetmem.memory.cuda_device import CudaDevice
    from hetmem.memory.host_memory import Mapping, free_host_bytes

    if free_host_bytes() < 1.3 * nbytes:
        notes.line(name=f"register {gib} GiB", skipped=f"{free_host_bytes() / GIB:.0f} GiB of host memory are free")
        return
    memory = Mapping(nbytes)
    start = time.perf_counter()
    memory.populate()
    populated = time.perf_counter()
    unpin = CudaDevice().pin(memory)
    done = time.perf_counter()
    notes.number(f"populate {gib} GiB", nbytes / (populated - start) / 1e9, "GB/s")
    notes.number(f"register {gib} GiB", nbytes / (done - populated) / 1e9, "GB/s")
    unpin()
    notes.number(f"unregister {gib} GiB", nbytes / (time.perf_counter() - done) / 1e9, "GB/s")
