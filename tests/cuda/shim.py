"""The kernels' sources compiled by g++ and launched on the CPU: a backend for the launchers that needs no GPU."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

import hetmem.cuda

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


def kernel_names(folder: Path, source: str) -> list[str]:
    """The names that the macros of `source` make."""
    command = [GPP or "g++", "-E", "-P", "-x", "c++", "-I", str(folder), str(folder / source)]
    return _KERNEL.findall(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def build(source: str, out: Path, flags: Sequence[str] = ("-O2",), folder: Path = SOURCES) -> Path:
    """`source` of `folder` as a shared library in `out`, with a `launch_…` for each kernel."""
    text = (folder / source).read_text()
    barriers = "true" if re.search("__syncthreads|__shfl", text) else "false"
    names = kernel_names(folder, source)
    assert names, f"no kernel in {source}"
    launchers = "".join(f"LAUNCHER({name}, {barriers})\n" for name in names)
    out.mkdir(parents=True, exist_ok=True)
    unit = out / f"{source}.cpp"
    unit.write_text(f'#include "shim.h"\n#include "{folder / source}"\n{launchers}')
    library = out / f"{source}.so"
    command = [GPP or "g++", *FLAGS, *WARNINGS, *flags, "-I", str(HERE), str(unit), "-o", str(library)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return library


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
