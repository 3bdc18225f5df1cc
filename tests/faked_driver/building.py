"""Compiles the device and the kernels of `plugin`."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from tests import made
from tests.cuda import shim

SOURCE = Path(__file__).parent / "device.cpp"


def library() -> Path:
    """The shared library of the device."""
    home, compiler = Path(torch.__file__).parent, shim.GPP or "g++"
    flags = ["-O1", "-std=c++20", "-shared", "-fPIC"]
    includes = [f"-I{home / 'include'}", f"-I{home / 'include/torch/csrc/api/include'}"]
    links = [f"-L{home / 'lib'}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{home / 'lib'}"]
    made_of = (SOURCE.read_text(), torch.__version__, flags, links, made.version_of(compiler))
    return made.kept(
        "device.so", made_of, lambda path: made.run([compiler, *flags, *includes, str(SOURCE), "-o", str(path), *links])
    )


def named() -> dict[str, str]:
    """Where the device and the kernels are, for processes that take them."""
    with ThreadPoolExecutor() as pool:
        device = pool.submit(library)
        kernels = {source: str(path) for source, path in shim.build_all(shim.cuda_sources()).items()}
    return {"FAKED_DEVICE": str(device.result()), "FAKED_KERNELS": json.dumps(kernels)}


def environment() -> dict[str, str]:
    """With which a process of pytest has the device and the kernels."""
    found = named()
    return {**os.environ, **found, "LD_PRELOAD": found["FAKED_DEVICE"]}
