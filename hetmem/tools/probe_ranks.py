"""Measures what the ranks of a machine share: how fast several processes copy from one memory at once, and how fast a
GPU's driver page-locks that."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import time
from contextlib import ExitStack
from statistics import median

import torch

from hetmem.base.units import MIB
from hetmem.cpu.workers import usable_cores
from hetmem.memory.cuda_device import CudaDevice
from hetmem.ranks.memory import SharedMapping, make_file

_PIECE_BYTES, _ALL_BYTES = 64 * MIB, 4096 * MIB
_SECONDS, _PATIENCE_SECONDS = 0.5, 60.0
_COPIES = """
import mmap, sys, time
descriptor, start, nbytes, seconds = *map(int, sys.argv[1:4]), float(sys.argv[4])
source = memoryview(mmap.mmap(descriptor, nbytes, offset=start))
target = memoryview(mmap.mmap(-1, nbytes))
target[:] = source
print("ready", flush=True)
sys.stdin.readline()
began, done = time.monotonic(), 0
while time.monotonic() < began + seconds:
    target[:] = source
    done += nbytes
print(done / (time.monotonic() - began), flush=True)
"""
"""A rank, without the time of its imports."""


def copy_rates(scale: int) -> dict[int, float]:
    """Return, by the number of processes that copy parts of one memory at once, the bytes a second of all of them: of
    1, 2, 4 and as many as there are cores."""
    cores = usable_cores()
    nbytes = min(_PIECE_BYTES, _ALL_BYTES // cores) // scale // mmap.PAGESIZE * mmap.PAGESIZE
    descriptor = make_file()
    try:
        shared = SharedMapping(descriptor, 0, _grown(descriptor, cores * nbytes))
        shared.buffer(0, shared.nbytes)[:] = bytes([1]) * shared.nbytes
        return {count: _copied(descriptor, nbytes, count, _SECONDS / scale) for count in sorted({1, 2, 4, cores})}
    finally:
        os.close(descriptor)


def _grown(descriptor: int, nbytes: int) -> int:
    """Make the file of `nbytes`, which are returned."""
    os.ftruncate(descriptor, nbytes)
    return nbytes


def _copied(descriptor: int, nbytes: int, count: int, seconds: float) -> float:
    with ExitStack() as ends:
        processes = []
        for number in range(count):
            place = number % usable_cores() * nbytes
            arguments = map(str, (descriptor, place, nbytes, seconds))
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _COPIES, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                pass_fds=(descriptor,),
            )
            ends.enter_context(process)
            ends.callback(process.kill)
            processes.append(process)
        for process in processes:
            assert process.stdout is not None
            process.stdout.readline()
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        return sum(float(process.communicate(timeout=_PATIENCE_SECONDS)[0]) for process in processes)


def page_lock_rate(scale: int) -> float:
    """Return how many bytes of memory that processes share the driver of the GPU page-locks a second; 0 without one."""
    if not torch.cuda.is_available():
        return 0.0
    nbytes, times = 16 * _PIECE_BYTES // scale, list[float]()
    descriptor = make_file()
    try:
        shared = SharedMapping(descriptor, 0, _grown(descriptor, nbytes))
        shared.buffer(0, nbytes)[:] = bytes([1]) * nbytes  # else the time of new pages is measured
        for _ in range(3):
            began = time.perf_counter()
            unlock = CudaDevice(0).pin(shared)
            times.append(time.perf_counter() - began)
            unlock()
    finally:
        os.close(descriptor)
    return nbytes / median(times)
