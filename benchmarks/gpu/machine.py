"""What the machine is, and what calls cost the thread that makes them. `python -m benchmarks.gpu.machine FILE` writes
who the GPU is, for the page."""

from __future__ import annotations

import datetime
import importlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.notes import PROFILE, Notes

ROOT = Path(__file__).parents[2]
GIB = 1 << 30
_LANE_GB = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
"""GB/s of one lane in one direction, by the generation of PCIe."""


def said(*command: str, seconds: float = 10.0) -> str:
    """What `command` prints; why not, where it cannot."""
    try:
        ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False, timeout=seconds)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"unknown ({type(error).__name__})"
    return ended.stdout.strip() or "unknown"


def described() -> dict[str, Any]:
    """Who the GPU is, and with which versions and commit it was measured. Raises without one."""
    return {
        "GPU": torch.cuda.get_device_name(),
        "date": datetime.date.today().isoformat(),
        "memory": f"{torch.cuda.get_device_properties(0).total_memory / GIB:.1f} GiB",
        "driver": said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "torch": torch.__version__,
        "CUDA of torch": torch.version.cuda,
        "CuPy": _version_of("cupy"),
        "Python": sys.version.split()[0],
        "cores": len(os.sched_getaffinity(0)),
        "commit": said("git", "rev-parse", "HEAD"),
        "changed since": said("git", "status", "--short", "--untracked-files=no")
        .replace("\n", ", ")
        .replace("unknown", ""),
    }


def _version_of(module: str) -> str:
    try:
        return str(importlib.import_module(module).__version__)
    except Exception as error:  # a CuPy without its libraries raises what it likes
        return f"none ({type(error).__name__})"


def pcie_gigabytes() -> float | None:
    """GB/s of the link in one direction, as its generation and width say; None where nobody says them."""
    asked = "--query-gpu=pcie.link.gen.max,pcie.link.width.max"
    try:
        generation, width = (
            int(word) for word in said("nvidia-smi", asked, "--format=csv,noheader,nounits").split(",")
        )
        return _LANE_GB[generation] * width
    except (ValueError, KeyError):
        return None


def facts(notes: Notes) -> None:
    """The machine as the system, the driver and torch describe it."""
    for name, read in {
        "memory": _memory,
        "overcommit": lambda: Path("/proc/sys/vm/overcommit_memory").read_text().strip(),
        "huge pages": lambda: Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text().strip(),
        "limit of locked memory": lambda: said("bash", "-c", "ulimit -l"),
        "memory of the control group": lambda: said("cat", "/sys/fs/cgroup/memory.max"),
        "processor": _processor,
        "cores": lambda: len(os.sched_getaffinity(0)),
        "NUMA nodes": lambda: len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))),
        "kernel": lambda: said("uname", "-r"),
        "disk of OUT": lambda: said("df", "-hT", str(notes.folder)).splitlines()[-1],
        "GPU": lambda: said("nvidia-smi", _GPU_QUERY, "--format=csv"),
        "PCIe, GB/s in one direction": pcie_gigabytes,
        "topology": lambda: said("nvidia-smi", "topo", "-m"),
        "properties": lambda: torch.cuda.get_device_properties(0),
        "kernels of hetmem": _kernels,
    }.items():
        found = notes.attempt(name, read)
        if found is not None:
            notes.text(name, found)
    notes.number("free disk of OUT", shutil.disk_usage(notes.folder).free / GIB, "GiB")
    for module in ("torch", "hetmem", "cupy"):
        notes.attempt(f"a process that imports {module}", _import, notes, module, needs=3)


def _import(notes: Notes, module: str) -> None:
    command = [*notes.program("timeit"), "-n1", "-r1", f"import {module}"]
    start = time.perf_counter()
    ended = subprocess.run(command, capture_output=True, check=False, timeout=notes.left())
    seconds = time.perf_counter() - start
    notes.number(f"a process that imports {module}", seconds, "s", status=ended.returncode)


_GPU_QUERY = (
    "--query-gpu=name,pcie.link.gen.current,pcie.link.gen.max,pcie.link.width.current,pcie.link.width.max,power.limit,"
    "clocks.max.sm,clocks.max.mem,memory.total,memory.free,compute_cap,mig.mode.current,persistence_mode"
)


def _memory() -> str:
    names = ("MemTotal", "MemFree", "MemAvailable", "CommitLimit", "Committed_AS", "HugePages_Total", "AnonHugePages")
    lines = (line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    found = {name: value.strip() for name, value in lines}
    return ", ".join(f"{name} {found[name]}" for name in names if name in found)


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "unknown")


def _kernels() -> str:
    from hetmem.cuda.backend import backend

    found = backend()
    return "native" if found.native else f"torch's operators: {found.reason}"


def calls(notes: Notes) -> None:
    """Microseconds of the thread for each call that a step makes many of."""
    from hetmem.cuda.backend import backend
    from hetmem.cuda.kernels import cast

    count = 20 if notes.small else 2000
    stream, other = torch.cuda.current_stream(), torch.cuda.Stream()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    for event in events:
        event.record(stream)
    torch.cuda.synchronize()
    few = torch.zeros(16, device="cuda")
    copied, pinned = torch.zeros(1024, device="cuda"), torch.zeros(1024).pin_memory()
    half, kernels = few.bfloat16(), backend()

    def enter() -> None:
        with torch.cuda.stream(other):
            pass

    for name, call in {
        "event: create": torch.cuda.Event,
        "event: create with timing": lambda: torch.cuda.Event(enable_timing=True),
        "event: create and record": lambda: torch.cuda.Event().record(stream),
        "event: query": events[0].query,
        "event: elapsed_time": lambda: events[0].elapsed_time(events[1]),
        "stream: wait_event": lambda: other.wait_event(events[0]),
        "torch.cuda.current_stream": torch.cuda.current_stream,
        "torch.cuda.stream, a context": enter,
        "an operator of torch (add_)": lambda: few.add_(1.0),
        "a copy of 4 KiB from pinned memory": lambda: copied.copy_(pinned, non_blocking=True),
        "a kernel of hetmem (cast, 16 elements)": lambda: cast(kernels, few, half),
        "torch.empty on the device, 1 MiB": lambda: torch.empty(1 << 20, dtype=torch.uint8, device="cuda"),
        "torch.cuda.memory_stats": torch.cuda.memory_stats,
        "torch.cuda.synchronize, idle": torch.cuda.synchronize,
    }.items():
        seconds = notes.attempt(name, _of_each, call, count)
        if seconds is not None:
            notes.number(name, 1e6 * seconds, "µs")


def _of_each(call: Callable[[], Any], count: int, rounds: int = 5) -> float:
    """Seconds of this thread for one call: the median of some rounds of `count`."""
    taken = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        for _ in range(count):
            call()
        taken.append((time.perf_counter() - start) / count)
        torch.cuda.synchronize()  # or the driver's queue is full, and calls wait for the device
    return statistics.median(taken[1:])


if __name__ == "__main__":
    if torch.cuda.is_available():
        Path(sys.argv[1]).write_text(json.dumps(described()))


def probe(notes: Notes) -> None:
    """`hetmem probe`, whose profile later stages plan with; the file is as good for `hetmem plan --hardware`."""
    from benchmarks.thread_costs import measure
    from hetmem.planner import load_profile
    from hetmem.tools.probe import probe as measured

    (notes.folder / PROFILE).unlink(missing_ok=True)
    if notes.small:  # a faked device takes minutes for a matrix product
        profile = replace(load_profile("h100"), thread=measure(3, "cuda"))
    else:
        profile = measured(notes.folder, say=lambda what: notes.text(what.partition(" ")[0], what))
        profile = replace(profile, thread=measure(device="cuda"))
    (notes.folder / PROFILE).write_text(profile.to_json() + "\n")
    for name, seconds in asdict(profile.thread).items():
        notes.number(f"the training thread, {name}", 1e6 * seconds, "µs")
