"""The kernels' sources compiled by g++ and launched on the CPU: a backend for the launchers that needs no GPU."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

import hetmem.cuda
from tests import made

SOURCES = Path(hetmem.cuda.__file__).parent
HERE = Path(__file__).parent
ROOT = HERE.parents[1]
GPP = shutil.which("g++")

FLAGS = (
    "-std=c++17",
    "-fPIC",
    "-shared",
    "-ffp-contract=off",
    "-fwrapv",
    "-fno-strict-aliasing",
    "-fno-gnu-unique",
    "-U_FORTIFY_SOURCE",
)
WARNINGS = ("-Wall", "-Werror", "-Wno-unknown-pragmas", "-Wno-unused-function", "-Wno-maybe-uninitialized")
SANITIZERS = ("-g", "-fsanitize=address,undefined,alignment", "-fno-sanitize-recover=all")

_KERNEL = re.compile(r'extern "C" __global__ void __launch_bounds__\(THREADS, 4\) (\w+)\(')


def cuda_sources() -> list[str]:
    return sorted(path.name for path in SOURCES.glob("*.cu"))


def texts() -> dict[str, str]:
    """The sources and headers of the kernels by name."""
    return {path.name: path.read_text() for path in sorted(SOURCES.glob("*.cu*"))}


def kernel_names(folder: Path, source: str) -> list[str]:
    """The names that the macros of `source` make."""
    command = [GPP or "g++", "-E", "-P", "-x", "c++", "-I", str(folder), str(folder / source)]
    return _KERNEL.findall(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def build(source: str, flags: Sequence[str] = ("-O2",), given: Mapping[str, str] | None = None) -> Path:
    """`source` of the `given` texts as a shared library, with a `launch_…` for each kernel."""
    compiler = GPP or "g++"
    used = {name: text for name, text in (given or texts()).items() if name == source or name.endswith(".cuh")}
    fixed = [*FLAGS, *WARNINGS, *flags]

    def make(library: Path) -> None:
        folder = library.parent
        for name, text in used.items():
            (folder / name).write_text(text)
        names = kernel_names(folder, source)
        assert names, f"no kernel in {source}"
        barriers = "true" if re.search("__syncthreads|__shfl", used[source]) else "false"
        launchers = "".join(f"LAUNCHER({name}, {barriers})\n" for name in names)
        unit = folder / f"{source}.cpp"
        unit.write_text(f'#include "shim.h"\n#include "{source}"\n{launchers}')
        made.run([compiler, *fixed, "-I", str(HERE), str(unit), "-o", str(library)])

    made_of = (used, (HERE / "shim.h").read_text(), fixed, made.version_of(compiler))
    return made.kept(f"{source}.so", made_of, make)


def build_all(sources: Sequence[str], flags: Sequence[str] = ("-O2",)) -> dict[str, Path]:
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(sources, pool.map(lambda source: build(source, flags), sources), strict=True))


class ShimBackend:
    """Launches kernels in `libraries` (by source) on the CPU, threads upwards or downwards."""

    name = "g++"
    reason = "the shim"
    native = True

    def __init__(self, libraries: Mapping[str, Path], downwards: bool = False) -> None:
        self.libraries = {source: ctypes.CDLL(str(path)) for source, path in libraries.items()}
        self.downwards = downwards

    def address(self, tensor: torch.Tensor, what: str) -> np.uint64:
        return np.uint64(tensor.data_ptr())

    def launch(
        self, source: str, kernel: str, blocks: int, arguments: Sequence[np.generic], stream: torch.cuda.Stream | None
    ) -> None:
        kept = [np.array([argument]) for argument in arguments]
        pointers = (ctypes.c_void_p * len(kept))(*(array.ctypes.data for array in kept))
        getattr(self.libraries[source], f"launch_{kernel}")(pointers, blocks, 256, self.downwards)
