"""`hetmem bench transfers`: every way to move and cast elements between host and device, against its link's ceiling.

It measures and lays out; it decides nothing. Without a GPU only the rows within host memory are measured.
"""

from __future__ import annotations

import json
import platform
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch

from hetmem.base.whole_files import write_whole
from hetmem.tools.measuring import (
    FORMS,
    LEAST_ROUNDS,
    PAIRS,
    TransferWay,
    in_one,
    in_two,
    ordinary_torch,
    quantised_routes,
    short_name,
    timed,
)

ELEMENTS = 16 << 20
ROUNDS = 21


@dataclass(frozen=True, slots=True)
class Row:
    """One way, measured. `seconds`: median, least and most of the rounds. `gigabytes_per_second` counts the bytes that
    this way must move: over the link, or within one memory what is read and written. `of_ceiling` is the time that the
    link needs for the fewer of source and destination bytes (within one memory for both), by the median time."""

    route: str
    cast: str
    way: str
    memory: str
    seconds: tuple[float, float, float]
    gigabytes_per_second: float
    of_ceiling: float


@dataclass(frozen=True, slots=True)
class Transfers:
    """The whole matrix, with the measured ceiling of each link in bytes per second."""

    machine: str
    elements: int
    ceilings: dict[str, float]
    rows: tuple[Row, ...]
    skipped: tuple[str, ...]

    def __str__(self) -> str:
        rounds = f"median of {ROUNDS} rounds, of at least {LEAST_ROUNDS} where they are long"
        head = f"{self.machine}; {self.elements:,} elements, {rounds}"
        ceilings = ", ".join(f"{route} {rate / 1e9:.1f} GB/s" for route, rate in self.ceilings.items())
        lines = [head, f"ceilings: {ceilings}", ""]
        lines += ["| route | cast | way | memory | GB/s | of the ceiling |", "|---|---|---|---|---|---|"]
        for row in self.rows:
            figures = f"{row.gigabytes_per_second:.1f} | {row.of_ceiling:.2f}"
            lines.append(f"| {row.route} | {row.cast} | {row.way} | {row.memory} | {figures} |")
        return "\n".join([*lines, *(f"\nnot measured: {reason}" for reason in self.skipped)])

    def save(self, path: str | Path) -> None:
        """As JSON; the file appears whole or not at all."""
        write_whole(Path(path), json.dumps({"schema_version": 1, **asdict(self)}, indent=2) + "\n")


@ordinary_torch()
def transfers(elements: int = ELEMENTS, rounds: int = ROUNDS) -> Transfers:
    """Measure. Takes some seconds, and on a GPU about a minute; needs some 10 bytes an element on either side."""
    if elements < 1 or rounds < 1:
        raise ValueError(f"elements and rounds must be at least 1, got {elements} and {rounds}")
    cuda = torch.cuda.is_available()
    skipped = () if cuda else ("routes to, from and on a device: torch sees no GPU here",)
    routes: list[Callable[[int], Iterator[tuple[str, torch.dtype, str, list[TransferWay]]]]] = [_host_routes]
    if cuda:
        from hetmem.tools.bench_device import device_routes

        routes.append(device_routes)
    ceilings = _ceilings(elements, rounds, cuda)
    rows = []
    for route in routes:
        for name, source, target, ways in route(elements):
            least = _least_bytes(name, source, target, elements)
            for way in ways:
                seconds = timed(way.run, rounds, on_device=name != "host to host")
                median = statistics.median(seconds)
                spread = (median, min(seconds), max(seconds))
                cast = f"{short_name(source)} to {target}"
                share = least / ceilings[name] / median
                rows.append(Row(name, cast, way.name, way.memory, spread, way.link_bytes / median / 1e9, share))
    machine = f"{torch.cuda.get_device_name()}, " if cuda else ""
    machine += f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    return Transfers(machine, elements, ceilings, tuple(rows), skipped)


def _allocating(source: torch.Tensor, target: torch.Tensor) -> None:
    target.copy_(source.to(target.dtype))


def _ceilings(elements: int, rounds: int, cuda: bool) -> dict[str, float]:
    """Bytes per second of plain copies of the largest size here; within one memory read and written bytes count."""
    source, target = torch.ones(elements), torch.zeros(elements)
    seconds = timed(lambda: target.copy_(source), rounds, on_device=False)
    found = {"host to host": 2 * 4 * elements / statistics.median(seconds)}
    if cuda:
        from hetmem.tools.bench_device import device_ceilings

        found |= device_ceilings(elements, rounds)
    return found


def _least_bytes(route: str, source: torch.dtype, target: str, elements: int) -> int:
    sizes = source.itemsize, itemsize_of(target)
    within = route in ("host to host", "device to device")
    return elements * (sum(sizes) if within else min(sizes))


def itemsize_of(name: str) -> int:
    """Bytes of an element of the dtype or 8-bit form called `name`; the scales of blocks are not counted."""
    return 1 if name in FORMS else int(getattr(torch, name).itemsize)


def _host_routes(elements: int) -> Iterator[tuple[str, torch.dtype, str, list[TransferWay]]]:
    for source_dtype, target_dtype in PAIRS:
        source = torch.randn(elements).to(source_dtype)
        target = torch.zeros(elements, dtype=target_dtype)
        same, cast = torch.empty_like(source), torch.empty_like(target)
        one, other = source.nbytes, target.nbytes
        ways = [TransferWay("fused", "pageable", partial(in_one, source, target), one + other)]
        if source_dtype is not target_dtype:
            ways += [
                TransferWay(
                    "cast then copy",
                    "pageable",
                    partial(in_two, source, cast, target),
                    one + 3 * other,
                ),
                TransferWay(
                    "copy then cast",
                    "pageable",
                    partial(in_two, source, same, target),
                    3 * one + other,
                ),
                TransferWay(
                    "cast that allocates",
                    "pageable",
                    partial(_allocating, source, target),
                    one + 3 * other,
                ),
            ]
        yield "host to host", source_dtype, short_name(target_dtype), ways
    yield from quantised_routes("host to host", elements, "cpu", "pageable")
