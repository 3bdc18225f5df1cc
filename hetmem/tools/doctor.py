"""`hetmem doctor`: reports which parts of hetmem work on this machine, and how to fix the others. Changes nothing."""

from __future__ import annotations

import mmap
import os
import resource
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill

import psutil
import pynvml
import torch

import hetmem
from hetmem.base.units import MIB, format_size
from hetmem.cpu import kernel_name
from hetmem.cuda.backend import backend
from hetmem.errors import BudgetError, CapacityError, ManageError
from hetmem.memory.host_memory import free_host_bytes
from hetmem.memory.nvme_store import NvmeStore
from hetmem.ranks.memory import SharedMapping, make_file, open_file

_LANE_GBS = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
"""GB/s of a PCIe lane each way, by generation (PCI-SIG's rates less the encoding overhead)."""

_SIGNS = {True: "ok  ", False: "FAIL", None: "--  "}


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check. `well` is False if something that was asked for does not work, and None if the machine
    lacks something optional; `advice` says how to fix it."""

    what: str
    found: str
    well: bool | None = True
    advice: str = ""

    def __str__(self) -> str:
        lines = f"{_SIGNS[self.well]} {self.what:<14} {self.found}"
        return fill(lines, 79, subsequent_indent=" " * 20, break_long_words=False) + (
            "\n" + fill(self.advice, 79, initial_indent=" " * 20, subsequent_indent=" " * 20) if self.advice else ""
        )


def examine(nvme_directory: str | None = None) -> list[Finding]:
    """Check everything that hetmem needs or can use, and the drive of `nvme_directory` if it is given."""
    directory = [] if nvme_directory is None else [_drive(nvme_directory)]
    return [
        _versions(),
        _gpu(),
        *_links(),
        _kernels(),
        _host_kernel(),
        _host_memory(),
        *_locked_memory(),
        _shared_memory(),
        *directory,
    ]


def _versions() -> Finding:
    python = ".".join(map(str, sys.version_info[:3]))
    return Finding("versions", f"hetmem {hetmem.__version__}, Python {python}, torch {torch.__version__}")


def _gpu() -> Finding:
    if not torch.cuda.is_available():
        built = "a build without CUDA" if torch.version.cuda is None else f"a build for CUDA {torch.version.cuda}"
        advice = "models run on the simulated accelerator; for a GPU: its driver, and a CUDA build of torch"
        return Finding("GPU", f"none that torch sees ({built})", None, advice)
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    free, total = torch.cuda.mem_get_info()
    return Finding("GPU", f"{', '.join(names)}; {format_size(free)} of {format_size(total)} free")


def _links() -> Iterator[Finding]:
    """Check the PCIe link of each GPU with NVML. An idle GPU lowers its generation, so this shows the highest one that
    GPU and slot share, and the lanes in use."""
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        try:
            pynvml.nvmlInit()
            gpu = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(index).uuid}")
            here = pynvml.nvmlDeviceGetMaxPcieLinkGeneration(gpu), pynvml.nvmlDeviceGetCurrPcieLinkWidth(gpu)
            able = pynvml.nvmlDeviceGetGpuMaxPcieLinkGeneration(gpu), pynvml.nvmlDeviceGetMaxPcieLinkWidth(gpu)
        except pynvml.NVMLError as error:
            yield Finding("PCIe link", f"unknown: {error}", None)
            continue
        rate = _LANE_GBS.get(here[0], 0) * here[1]
        found = f"generation {here[0]}, {here[1]} lanes: at most {rate:.0f} GB/s each way"
        could = f"the GPU could use generation {able[0]}, {able[1]} lanes: try another slot"
        advice = could if here < able else ""
        yield Finding("PCIe link", found, advice=advice)


def _kernels() -> Finding:
    here = backend()
    if here.native:
        return Finding("GPU kernels", here.reason)
    advice = "" if not torch.cuda.is_available() else "pip install 'hetmem[cuda12]' or 'hetmem[cuda13]'"
    return Finding("GPU kernels", f"torch in their stead: {here.reason}", None, advice)


def _host_kernel() -> Finding:
    name = kernel_name()
    advice = "" if name == "numba" else "the update takes torch's kernel, with the same bits and more passes"
    return Finding("host update", name, advice=advice)


def _host_memory() -> Finding:
    memory = psutil.virtual_memory()
    cores = len(os.sched_getaffinity(0))
    free = free_host_bytes()
    least = ", within the limit of a control group" if free < memory.available else ""
    return Finding("host", f"{format_size(free)} of {format_size(memory.total)} free{least}, {cores} cores")


def _locked_memory() -> Iterator[Finding]:
    """Check the limit of locked memory: a low one makes the GPU's driver refuse to page-lock host memory."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if torch.cuda.is_available() and limit != resource.RLIM_INFINITY:
        advice = "if copies are slow: ulimit -l unlimited, or in a container --ulimit memlock=-1"
        yield Finding("locked memory", f"at most {format_size(limit)}", advice=advice)


_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")


def _shared_memory() -> Finding:
    """Check what several ranks of a model need of this machine: a file in memory that another process opens, and pages
    that tell who has written to them."""
    try:
        descriptor = make_file()
        try:
            os.ftruncate(descriptor, mmap.PAGESIZE)
            os.close(open_file(os.getpid(), descriptor))
            mapping = SharedMapping(descriptor, 0, mmap.PAGESIZE)
        finally:
            os.close(descriptor)
        mapping.private(mapping.buffer(0, 1))[0] = 1
        tells = mapping.written((0, mmap.PAGESIZE)) == [0]
    except (OSError, ManageError, CapacityError) as error:
        advice = "several ranks cannot share a model here: give them a sandbox or a container that shows /proc"
        return Finding("shared memory", str(error), None, advice)
    if not tells:
        advice = "several ranks cannot share a model here, as writes of a program would not be seen"
        return Finding("shared memory", "/proc/self/pagemap hides which pages were written", None, advice)
    huge = _HUGE_PAGES.read_text() if _HUGE_PAGES.exists() else "[never]"
    if "[never]" in huge or "[deny]" in huge:
        advice = f"for updates that are up to 1.2 times as fast: echo advise > {_HUGE_PAGES}, as root"
        return Finding("shared memory", "several ranks can share a model; without huge pages", advice=advice)
    return Finding("shared memory", "several ranks can share a model")


def _drive(directory: str) -> Finding:
    """Check `directory` with a small file, made as for a managed model and removed again."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the finding below has their content
            store = NvmeStore([Path(directory)], 2 * MIB)
    except BudgetError as error:
        return Finding("drive", directory, False, str(error))
    kind = _filesystem(directory)
    direct = all(store.direct)
    store.close()
    status = os.statvfs(directory)
    free = format_size(status.f_bavail * status.f_frsize)
    if kind in ("tmpfs", "ramfs"):
        advice = "what lies there takes host memory: name a directory on a drive, with ext4 or xfs"
        return Finding("drive", f"{directory}: {free} free, {kind}, which is memory and no drive", False, advice)
    how = "O_DIRECT" if direct else "buffered I/O, as this filesystem has no O_DIRECT"
    advice = "" if direct else "use a directory on ext4 or xfs: buffered writes take twice as long and more"
    return Finding("drive", f"{directory}: {free} free, {how}", advice=advice)


def _filesystem(directory: str) -> str:
    """Return the type of the filesystem of `directory`."""
    path = os.path.realpath(directory)
    mounts = {part.mountpoint: part.fstype for part in psutil.disk_partitions(all=True)}
    return next((mounts[str(at)] for at in (Path(path), *Path(path).parents) if str(at) in mounts), "")
