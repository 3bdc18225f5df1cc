"""The NVMe store against the best that fio gets from the same disk, alone and in both directions at once.

    python benchmarks/nvme.py DIRECTORY [--gib 2] [--rounds 9]

First every combination of fio's engine, block size and depth is tried; its best in each direction, by median, is what
hetmem is held against. fio gets huge pages from its malloc (GLIBC_TUNABLES), as hetmem does from its mappings: without
them it reaches half as much where a request to the disk has a limited number of segments. Then hetmem and fio take
turns within a round, so what else the machine and its disk do falls on both, and each round gives one ratio: the table
has the median and the middle half of them. All I/O is O_DIRECT, over blocks that were written before (the first write
to a reserved block costs the filesystem more). hetmem moves chunks between memory and extents, at most three under way
in a direction, as the optimizer does; "both" reads chunks while others are written, fio the same with two jobs. CPU
seconds are those of the process (hetmem) and of fio's threads, all included.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import random
import resource
import statistics
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from hetmem.base.units import GIB, MIB
from hetmem.memory.host_memory import Mapping
from hetmem.memory.nvme_store import Extent, NvmeStore

CHUNK_BYTES = 64 * MIB
UNDER_WAY = 3
ENGINES = ("libaio", "io_uring", "psync")
BLOCKS_MIB = (1, 4, 16)
DEPTHS = (2, 4, 8)
DIRECTIONS = ("read", "write", "both")

Move = Callable[[Extent, memoryview], Future[int]]


@dataclass(frozen=True)
class Sample:
    """One run: bytes per second, and CPU seconds per GiB."""

    rate: float
    cpu: float


@dataclass(frozen=True)
class Fio:
    """One way to run fio: `depth` requests of `block_mib` under way, in one thread or, for psync, one each."""

    engine: str
    block_mib: int
    depth: int

    def run(self, file: Path, direction: str, nbytes: int) -> Sample:
        """Move `nbytes` of `file`; in both directions at once half of it each."""
        jobs = [direction] if direction != "both" else ["read", "write"]
        command = ["fio", "--output-format=json", f"--filename={file}", "--direct=1", "--thread", "--overwrite=1"]
        command += [f"--ioengine={self.engine}", f"--bs={self.block_mib}M", "--scramble_buffers=0"]
        threads = self.depth if self.engine == "psync" else 1
        share = nbytes // len(jobs) // threads
        command += [f"--iodepth={1 if self.engine == 'psync' else self.depth}", f"--numjobs={threads}"]
        for index, job in enumerate(jobs):
            command += [f"--name={job}", f"--rw={job}", f"--size={share}", f"--offset_increment={share}"]
            command += [f"--offset={index * share * threads}"]
        tuned = {**os.environ, "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
        text = subprocess.run(command, capture_output=True, text=True, check=True, env=tuned).stdout
        runs = json.loads(text[text.index("{") :])["jobs"]
        moved = sum(run["read"]["io_bytes"] + run["write"]["io_bytes"] for run in runs)
        seconds = max(run[way]["runtime"] for run in runs for way in ("read", "write")) / 1000
        cpu = sum((run["usr_cpu"] + run["sys_cpu"]) / 100 * run["job_runtime"] / 1000 for run in runs)
        return Sample(moved / seconds, cpu / (moved / GIB))


class Hetmem:
    """A store whose extents are all written, and as much memory as is under way."""

    def __init__(self, directory: str, nbytes: int) -> None:
        self.store = NvmeStore([directory], nbytes)
        self._extents = self.store.reserve_many([CHUNK_BYTES] * (nbytes // CHUNK_BYTES))
        memory = Mapping(2 * UNDER_WAY * CHUNK_BYTES)
        self._memory = [memory.buffer(index * CHUNK_BYTES, CHUNK_BYTES) for index in range(2 * UNDER_WAY)]
        for part in self._memory:
            part[:] = os.urandom(MIB) * (CHUNK_BYTES // MIB)
        self.run("write")

    def run(self, direction: str) -> Sample:
        """All extents once; in both directions at once one half is read and the other written."""
        half = len(self._extents) // 2
        ways: dict[str, list[tuple[Move, list[Extent]]]] = {
            "read": [(self.store.read, self._extents)],
            "write": [(self.store.write, self._extents)],
            "both": [(self.store.read, self._extents[:half]), (self.store.write, self._extents[half:])],
        }
        used, start = _cpu_seconds(), time.perf_counter()
        streams = [_stream(move, extents, self._memory[n::2]) for n, (move, extents) in enumerate(ways[direction])]
        for _ in itertools.zip_longest(*streams):
            pass
        seconds, used = time.perf_counter() - start, _cpu_seconds() - used
        moved = sum(extent.nbytes for _, extents in ways[direction] for extent in extents)
        return Sample(moved / seconds, used / (moved / GIB))


def _stream(move: Move, extents: Sequence[Extent], memory: Sequence[memoryview]) -> Iterator[None]:
    """Move `extents` through `memory`, as many under way as there is memory for; yields whenever it has waited."""
    under_way: deque[Future[int]] = deque()
    for extent, part in zip(extents, itertools.cycle(memory)):
        if len(under_way) == len(memory):
            under_way.popleft().result()
            yield
        under_way.append(move(extent, part))
    for future in under_way:
        future.result()
        yield


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def search(file: Path, nbytes: int, rounds: int) -> dict[str, Fio]:
    """fio's best way in each direction, by the median of `rounds` short runs in random order."""
    ways = [Fio(*way) for way in itertools.product(ENGINES, BLOCKS_MIB, DEPTHS)]
    found = {}
    for direction in DIRECTIONS:
        rates: dict[Fio, list[float]] = {way: [] for way in ways}
        for _ in range(rounds):
            for way in random.sample(ways, len(ways)):
                rates[way].append(way.run(file, direction, nbytes).rate)
        ranked = sorted(ways, key=lambda way: statistics.median(rates[way]), reverse=True)
        found[direction] = ranked[0]
        worst = statistics.median(rates[ranked[-1]])
        print(f"{direction}: fio's best of {len(ways)} is {ranked[0]}; its worst has {_gb(worst)} GB/s", flush=True)
    return found


def compare(ours: Hetmem, file: Path, best: dict[str, Fio], nbytes: int, rounds: int) -> None:
    """Print the table."""
    print("\n| direction | of fio's best | GB/s hetmem | GB/s fio | CPU s/GiB hetmem | fio | fio's best |")
    print("|---|---|---|---|---|---|---|")
    for direction in DIRECTIONS:
        pairs = []
        for turn in range(rounds):
            mine = ours.run(direction) if turn % 2 else None  # who goes first changes
            theirs = best[direction].run(file, direction, nbytes)
            pairs.append((mine or ours.run(direction), theirs))
        ratios = _quartiles([mine.rate / theirs.rate for mine, theirs in pairs])
        rates = [_gb(statistics.median(sample.rate for sample in column)) for column in zip(*pairs, strict=True)]
        cpu = [f"{statistics.median(sample.cpu for sample in column):.3f}" for column in zip(*pairs, strict=True)]
        spread = f"**{ratios[1]:.2f}** ({ratios[0]:.2f} to {ratios[2]:.2f})"
        way = best[direction]
        print(
            f"| {direction} | {spread} | {rates[0]} | {rates[1]} | {cpu[0]} | {cpu[1]} | "
            f"{way.engine}, {way.block_mib} MiB x {way.depth} |",
            flush=True,
        )


def _quartiles(values: list[float]) -> list[float]:
    return statistics.quantiles(values, n=4, method="inclusive")


def _gb(rate: float) -> str:
    return f"{rate / 1e9:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", help="on the disk to measure; its files are removed afterwards")
    parser.add_argument("--gib", type=int, default=2, help="moved by each run")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    nbytes = options.gib * GIB
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        file = Path(directory, "fio")
        Fio("psync", 16, 4).run(file, "write", nbytes)
        ours = Hetmem(directory, nbytes)
        print(f"{platform.machine()}, {os.cpu_count()} cores, Linux {platform.release()}; {options.gib} GiB a run, ")
        print(f"{options.rounds} rounds; O_DIRECT {ours.store.direct[0]}\n")
        best = search(file, nbytes // 4, 3)
        compare(ours, file, best, nbytes, options.rounds)
        ours.store.close()


if __name__ == "__main__":
    main()
