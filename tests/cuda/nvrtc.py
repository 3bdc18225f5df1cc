# ruff: noqa: N802 - names of CuPy
"""NVIDIA's run-time compiler for tests, with the functions of `cupy.cuda.nvrtc`: no CuPy is needed to compile."""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Sequence
from functools import cache
from pathlib import Path

_SYSTEM = ("libnvrtc.so.12", "libnvrtc.so.13", "libnvrtc.so", "/usr/local/cuda/lib64/libnvrtc.so")


class CompileError(RuntimeError):
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


def getVersion() -> tuple[int, int]:
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check(library().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)), "nvrtcVersion")
    return major.value, minor.value


def getSupportedArchs() -> list[int]:
    count = ctypes.c_int()
    _check(library().nvrtcGetNumSupportedArchs(ctypes.byref(count)), "nvrtcGetNumSupportedArchs")
    numbers = (ctypes.c_int * count.value)()
    _check(library().nvrtcGetSupportedArchs(numbers), "nvrtcGetSupportedArchs")
    return list(numbers)


def createProgram(source: str, name: str, headers: Sequence[bytes], include_names: Sequence[bytes]) -> ctypes.c_void_p:
    program = ctypes.c_void_p()
    texts, names = ((ctypes.c_char_p * len(some))(*some) for some in (headers, include_names))
    made = library().nvrtcCreateProgram(
        ctypes.byref(program), source.encode(), name.encode(), len(headers), texts, names
    )
    _check(made, "nvrtcCreateProgram")
    return program


def compileProgram(program: ctypes.c_void_p, options: Sequence[str]) -> None:
    encoded = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    _check(library().nvrtcCompileProgram(program, len(options), encoded), "compiling", getProgramLog(program))


def getCUBIN(program: ctypes.c_void_p) -> bytes:
    return _output(program, "nvrtcGetCUBIN")


def getPTX(program: ctypes.c_void_p) -> bytes:
    return _output(program, "nvrtcGetPTX")


def getProgramLog(program: ctypes.c_void_p) -> str:
    return _output(program, "nvrtcGetProgramLog").rstrip(b"\0").decode()


def destroyProgram(program: ctypes.c_void_p) -> None:
    library().nvrtcDestroyProgram(ctypes.byref(program))


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
