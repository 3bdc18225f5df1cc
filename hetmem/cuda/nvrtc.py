"""NVIDIA's run-time compiler, called directly: no driver, no GPU and no CuPy are needed to compile.

It turns CUDA source into machine code and a log; it does not know which kernels there are or where they run.

CuPy could compile as well, but appends `-ftz=true` to whatever options it is given, and subnormals would be lost.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from hetmem.errors import HetmemError

OPTIONS = (
    "--std=c++17",
    "-ftz=false",  # subnormals count
    "-fmad=false",  # a product is rounded before it is added to, unless __fmaf_rn says otherwise
    "-prec-div=true",
    "-prec-sqrt=true",
    "--ptxas-options=-v",  # registers and spills in the log
)


_SYSTEM = ("libnvrtc.so.12", "libnvrtc.so.13", "libnvrtc.so", "/usr/local/cuda/lib64/libnvrtc.so")


class CompileError(HetmemError, RuntimeError):
    """NVRTC is missing or refused a source; the message carries its log."""


@cache
def library() -> ctypes.CDLL:
    """NVRTC, from the wheels of NVIDIA (`nvidia-cuda-nvrtc-cu12`, `nvidia-cuda-nvrtc`) or from the system.

    Raises `CompileError` where there is none.
    """
    problems = []
    for builtins, name in _in_wheels() or [(None, name) for name in _SYSTEM]:
        loaded = _load(builtins, name)
        if isinstance(loaded, ctypes.CDLL):
            return loaded
        problems.append(loaded)
    raise CompileError(
        f"NVRTC was not found ({'; '.join(problems)}): install hetmem[cuda12] or hetmem[cuda13], "
        "or nvidia-cuda-nvrtc-cu12 alone"
    )


def _load(builtins: str | None, name: str) -> ctypes.CDLL | str:
    """NVRTC, or why it cannot be loaded."""
    try:
        if builtins is not None:
            ctypes.CDLL(builtins)  # NVRTC looks for it by name alone, and then finds it loaded
        return ctypes.CDLL(name)
    except OSError as error:
        return str(error)


def _in_wheels() -> list[tuple[str | None, str]]:
    """Each NVRTC among the installed packages of NVIDIA: the path of its built-in headers' library, and its own.

    The oldest first: drivers load the code of compilers up to their own age.
    """
    spec = importlib.util.find_spec("nvidia")
    folders = [Path(place) for place in (spec.submodule_search_locations or ())] if spec else []
    found = []
    for folder in folders:
        for path in sorted(folder.glob("*/lib/libnvrtc.so.*"), key=lambda path: path.suffix):
            builtins = sorted(path.parent.glob("libnvrtc-builtins.so.*"))
            found.append((str(builtins[-1]) if builtins else None, str(path)))
    return found


def version() -> tuple[int, int]:
    """Major and minor version of NVRTC."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check(library().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)), "nvrtcVersion")
    return major.value, minor.value


def architectures() -> list[int]:
    """The compute capabilities NVRTC compiles for, ascending; 90 is 9.0."""
    count = ctypes.c_int()
    _check(library().nvrtcGetNumSupportedArchs(ctypes.byref(count)), "nvrtcGetNumSupportedArchs")
    numbers = (ctypes.c_int * count.value)()
    _check(library().nvrtcGetSupportedArchs(numbers), "nvrtcGetSupportedArchs")
    return sorted(numbers)


def target(capability: int) -> str:
    """What to compile for: the device's own architecture, or the newest one known as PTX, which drivers finish."""
    known = [number for number in architectures() if number <= capability]
    if not known:
        raise CompileError(f"NVRTC {version()} compiles for {architectures()}, not for a device of {capability}")
    return f"sm_{capability}" if capability in known else f"compute_{known[-1]}"


def compile_source(source: str, name: str, headers: Mapping[str, str], architecture: str) -> tuple[bytes, str]:
    """Machine code and log of `source` for `architecture`; PTX instead of machine code for "compute_…".

    `headers`: what it may include, text by name. Raises `CompileError` with the log.
    """
    nvrtc = library()
    program = ctypes.c_void_p()
    texts = (ctypes.c_char_p * len(headers))(*(text.encode() for text in headers.values()))
    names = (ctypes.c_char_p * len(headers))(*(header.encode() for header in headers))
    _check(
        nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), name.encode(), len(headers), texts, names),
        "nvrtcCreateProgram",
    )
    try:
        options = [option.encode() for option in (f"--gpu-architecture={architecture}", *OPTIONS)]
        result = nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
        log = _output(program, "nvrtcGetProgramLog").rstrip(b"\0").decode()
        _check(result, f"compiling {name} for {architecture}", log)
        kind = "PTX" if architecture.startswith("compute_") else "CUBIN"
        return _output(program, f"nvrtcGet{kind}"), log
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _output(program: ctypes.c_void_p, getter: str) -> bytes:
    size = ctypes.c_size_t()
    _check(getattr(library(), f"{getter}Size")(program, ctypes.byref(size)), getter)
    buffer = ctypes.create_string_buffer(size.value)
    _check(getattr(library(), getter)(program, buffer), getter)
    return buffer.raw


def _check(result: int, what: str, log: str = "") -> None:
    if result != 0:
        nvrtc = library()
        nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p
        raise CompileError(f"NVRTC: {what}: {nvrtc.nvrtcGetErrorString(result).decode()}\n{log}".rstrip())
