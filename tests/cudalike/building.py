"""Compiles the device and the kernels of `plugin`, once for each text of the source and each torch."""

from __future__ import annotations

import hashlib
import os
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from tests.cuda import shim

SOURCE = Path(__file__).parent / "device.cpp"


def library(folder: Path) -> Path:
    """The shared library of the device, in `folder` unless it is there."""
    digest = hashlib.sha256(SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    target = folder / f"device-{digest}.so"
    if not target.exists():
        home = Path(torch.__file__).parent
        includes = [f"-I{home / 'include'}", f"-I{home / 'include/torch/csrc/api/include'}"]
        links = [f"-L{home / 'lib'}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{home / 'lib'}"]
        handle, made = tempfile.mkstemp(dir=folder, suffix=".so")
        os.close(handle)
        command = [
            shim.GPP or "g++",
            "-O1",
            "-std=c++20",
            "-shared",
            "-fPIC",
            *includes,
            str(SOURCE),
            "-o",
            made,
            *links,
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
        os.replace(made, target)
    return target


def environment(folder: Path) -> dict[str, str]:
    """With which a process has the device and the kernels."""
    kernels = folder / "kernels"
    with ThreadPoolExecutor() as pool:
        device = pool.submit(library, folder)
        list(pool.map(lambda source: shim.build(source, kernels), shim.cuda_sources()))
    return {**os.environ, "LD_PRELOAD": str(device.result()), "CUDALIKE_KERNELS": str(kernels)}
