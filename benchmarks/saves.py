"""How well a save in the background hides: steps beside one, and others, as multiples of what binds them.

    python -m benchmarks.saves [--layers 16] [--milliseconds 960] [--cycles 4] [--only host|nvme]

The accelerator is a clock (`benchmarks.clock`), and so is the drive: each direction moves so many bytes a second, for
the checkpoint and for homes alike, in no CPU time. The file itself is written to memory. A save of homes on the drive
reads them there first. Bytes are few and rates low, so that what the machine computes counts for little.

In each cycle comes a save, with the step that follows at once, steps until the file is complete, and two that no save
runs beside. "File" is how long the drive takes for the bytes of the file, as a multiple of a step's compute. The bound
of a step beside a save is the longest of a step alone and the drive with what both move, each direction for itself.
Ratios are medians over cycles: of the longest step beside a save, with the call, and of the other steps to one alone.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import isqrt
from pathlib import Path
from typing import Any

import torch
from torch import nn

import hetmem
from benchmarks.clock import ClockDevice
from benchmarks.overlap import Stack, timed
from hetmem.intercept import registry
from hetmem.memory.chunk import Role, address_of
from hetmem.schedule.trace import Tier

CHUNK_BYTES = 256 << 10
OVERLAPS = ("off", "backward", "forward")
FILES = (0.4, 1.0, 2.5)
"""Seconds of the drive for a file, in steps."""
TARGET = 1.05


class Drive:
    """Takes the time of a drive for what this process reads and writes by `os.preadv` and `os.pwritev`."""

    def __init__(self) -> None:
        self.rate = 0.0
        """Bytes a second each way; 0 is as fast as it is."""
        self.homes: list[range] = []
        """Addresses of memory that lies on the drive."""
        self.moved = {"read": 0, "write": 0}
        self._lock, self._free_at = threading.Lock(), {"read": 0.0, "write": 0.0}
        self._calls = {"read": os.preadv, "write": os.pwritev}

    @contextmanager
    def used(self) -> Iterator[None]:
        """All calls of the block are the drive's."""
        os.preadv, os.pwritev = self._read, self._write  # type: ignore[assignment]
        try:
            yield
        finally:
            os.preadv, os.pwritev = self._calls["read"], self._calls["write"]  # type: ignore[assignment]

    def _read(self, fd: int, buffers: list[memoryview], offset: int) -> int:
        self._take("read", buffers[0].nbytes)
        return int(self._calls["read"](fd, buffers, offset))

    def _write(self, fd: int, buffers: list[memoryview], offset: int) -> int:
        address = address_of(buffers[0])
        if any(address in home for home in self.homes):
            self._take("read", buffers[0].nbytes)
        self._take("write", buffers[0].nbytes)
        return int(self._calls["write"](fd, buffers, offset))

    def _take(self, way: str, nbytes: int) -> None:
        with self._lock:
            self.moved[way] += nbytes
            if not self.rate:
                return
            end = self._free_at[way] = max(time.perf_counter(), self._free_at[way]) + nbytes / self.rate
        time.sleep(max(0.0, end - time.perf_counter()))


@dataclass
class Case:
    """What one way to train took, in seconds."""

    alone: list[float] = field(default_factory=list)
    beside: list[float] = field(default_factory=list)
    """Of each cycle, the longest step that a save ran beside, the call counted, to its bound."""
    others: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        """The longest step beside a save to its bound."""
        return statistics.median(self.beside)

    @property
    def other_ratio(self) -> float:
        """A step without a save to a step before any."""
        return statistics.median(self.others) / statistics.median(self.alone)


class Trained:
    """A model whose step computes for `seconds`, with homes in `place`."""

    def __init__(self, place: str, overlap: Any, layers: int, seconds: float, drive: Drive, folder: Path) -> None:
        width = isqrt(CHUNK_BYTES // 4)
        parameters = layers * width**2
        device = ClockDevice(parameters * 4 * 20 / seconds)  # copies of all weights take a twentieth of a step
        torch.manual_seed(0)
        self.model: nn.Module = Stack(layers, width, seconds / (3 * layers), device)
        limits: dict[str, Any] = {"host": 40 * parameters}
        if place == "nvme":
            limits = {"host": 4 * parameters, "nvme": 20 * parameters, "nvme_dir": folder}
        budget = hetmem.Budget(device="4GiB", device_chunks=6 * CHUNK_BYTES, **limits)
        hetmem.manage(self.model, budget, device=device, chunk_bytes=CHUNK_BYTES)
        self.optimizer = hetmem.AdamW(self.model.parameters(), lr=1e-5, overlap=overlap)
        self.x, self.drive, self.path = torch.randn(4, width), drive, folder / "c"
        drive.rate, drive.homes = 0.0, []
        self.step()
        self.save().wait()
        self.nbytes = self.path.stat().st_size
        self.optimizer.synchronize()
        for chunk in registry.of_module(self.model).runtime.chunks:
            for role, home in chunk.homes.items():
                if home.tier is Tier.NVME and role != Role.GRAD:
                    start = address_of(home.memory)
                    drive.homes.append(range(start, start + chunk.role_nbytes(role)))

    def step(self) -> None:
        """One step."""
        self.model(self.x).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self) -> Any:
        """Begin to save; the handle."""
        return hetmem.save(self.path, self.model, self.optimizer, wait=False)


def measured(trained: Trained, file_seconds: float, cycles: int) -> Case:
    """Steps alone, and cycles of a save and steps, on a drive that takes `file_seconds` for a file."""
    case, drive = Case(), trained.drive
    drive.rate = trained.nbytes / file_seconds
    for count in range(5):
        before = dict(drive.moved)
        took = timed(trained.step)
        if count > 1:
            case.alone.append(took)
    of_a_step = {way: drive.moved[way] - before[way] for way in before}
    of_a_save = {"read": sum(map(len, drive.homes)), "write": trained.nbytes}
    busy = max(of_a_step[way] + of_a_save[way] for way in of_a_step) / drive.rate
    bound = max(statistics.median(case.alone), busy)
    for _ in range(cycles):
        handles, beside = list[Any](), list[float]()
        beside.append(timed(lambda: (handles.append(trained.save()), trained.step())))  # noqa: B023
        while not handles[0].done():
            beside.append(timed(trained.step))
        case.beside.append(max(beside) / bound)
        trained.step()  # behind what trails
        case.others.extend(timed(trained.step) for _ in range(2))
    trained.optimizer.synchronize()  # type: ignore[attr-defined]
    return case


def main() -> None:
    """Parse, measure, print Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=Path("/dev/shm"), help="in memory, where homes and files are")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--milliseconds", type=float, default=960.0, help="of a step's compute")
    parser.add_argument("--cycles", type=int, default=4)
    parser.add_argument("--only", choices=("host", "nvme"))
    parser.add_argument("--overlap", choices=OVERLAPS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    seconds, drive = args.milliseconds / 1e3, Drive()
    print("| homes | overlap | file, in steps | step alone | beside a save / its bound | others / alone |")
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(dir=args.dir) as folder, drive.used():
        for place in (args.only,) if args.only else ("host", "nvme"):
            for overlap in (args.overlap,) if args.overlap else OVERLAPS:
                trained = Trained(place, overlap, args.layers, seconds, drive, Path(folder))
                for file in FILES:
                    case = measured(trained, file * seconds, args.cycles)
                    print(
                        f"| {place} | {overlap} | {file:g} | {statistics.median(case.alone) * 1e3:.0f} ms "
                        f"| {case.ratio:.3f} | {case.other_ratio:.3f} |",
                        flush=True,
                    )
                drive.rate = 0.0
                hetmem.release(trained.model)


if __name__ == "__main__":
    main()
