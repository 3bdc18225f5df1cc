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
HOME = Path(torch.__file__).parent


def library() -> Path:
    """The shared library of the device; one for all environments that have this torch."""
    compiler = shim.GPP or "g++"
    flags = ["-O1", "-std=c++20", "-shared", "-fPIC"]
    includes = [f"-I{HOME / 'include'}", f"-I{HOME / 'include/torch/csrc/api/include'}"]
    links = [f"-L{HOME / 'lib'}", "-lc10", "-ltorch_cpu"]
    made_of = (SOURCE.read_text(), torch.__version__, flags, made.version_of(compiler))
    return made.kept(
        "device.so", made_of, lambda path: made.run([compiler, *flags, *includes, str(SOURCE), "-o", str(path), *links])
    )


def named() -> dict[str, str]:
    """Where the device, what it is linked to and the kernels are, for processes that take them."""
    with ThreadPoolExecutor() as pool:
        device = pool.submit(library)
        kernels = {source: str(path) for source, path in shim.build_all(shim.cuda_sources()).items()}
    libraries = ":".join(filter(None, [str(HOME / "lib"), os.environ.get("LD_LIBRARY_PATH")]))
    return {"FAKED_DEVICE": str(device.result()), "FAKED_KERNELS": json.dumps(kernels), "LD_LIBRARY_PATH": libraries}


def environment() -> dict[str, str]:
    """With which a process of pytest has the device and the kernels."""
    found = named()
    return {**os.environ, **found, "LD_PRELOAD": found["FAKED_DEVICE"]}
