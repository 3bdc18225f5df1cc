"""The kernels compile for every architecture without a driver, and the machine code keeps to its bounds."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from hetmem.cuda import backend
from tests import made
from tests.cuda import nvrtc
from tests.cuda.shim import GPP, SOURCES, cuda_sources, kernel_names

ONE, ARCHITECTURES = "sm_90", ("sm_75", "sm_80", "sm_100", "sm_120")
REGISTERS = 64  # four blocks of 256 threads a multiprocessor: half of its threads, enough to hide the memory's latency

try:
    nvrtc.library()
    MISSING = ""
except nvrtc.CompileError as error:
    MISSING = str(error)

pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING)


@pytest.fixture(autouse=True)
def _without_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "_compiler", lambda: nvrtc)


def compiled(source: str, architecture: str) -> tuple[bytes, str]:
    """Code and log."""
    text, headers = (SOURCES / source).read_text(), [(SOURCES / name).read_bytes() for name in backend.HEADERS]
    options = (f"--gpu-architecture={architecture}", *backend.OPTIONS, "--ptxas-options=-v")  # registers and spills

    def make(path: Path) -> None:
        program = nvrtc.createProgram(text, source, headers, [name.encode() for name in backend.HEADERS])
        nvrtc.compileProgram(program, options)
        code = (nvrtc.getPTX if architecture.startswith("compute_") else nvrtc.getCUBIN)(program)
        path.write_text(json.dumps([code.hex(), nvrtc.getProgramLog(program)]))
        nvrtc.destroyProgram(program)

    made_of = (text, headers, options, nvrtc.getVersion())
    code, log = json.loads(made.kept(f"{source}-{architecture}.json", made_of, make).read_text())
    return bytes.fromhex(code), log


def ptx_of_kernels(source: str) -> dict[str, str]:
    """The PTX of each kernel by its name."""
    ptx = compiled(source, "compute_75")[0].rstrip(b"\0").decode()
    parts = re.split(r"\.visible \.entry (\w+)\(", ptx)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


@pytest.mark.parametrize(
    "architecture", [ONE, *(pytest.param(name, marks=pytest.mark.kernels_changed) for name in ARCHITECTURES)]
)
@pytest.mark.parametrize("source", cuda_sources())
def test_compiles_without_spills_and_within_the_registers(source: str, architecture: str) -> None:
    code, log = compiled(source, architecture)
    assert code[:4] == b"\x7fELF"
    assert "warning" not in log.lower()
    spills = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
    registers = [int(number) for number in re.findall(r"Used (\d+) registers", log)]
    assert len(spills) == len(registers) == len(ptx_of_kernels(source)) > 0
    assert set(spills) == {("0", "0", "0")}
    assert max(registers) <= REGISTERS, log


@pytest.mark.skipif(GPP is None, reason="g++ is not installed")
@pytest.mark.parametrize("source", cuda_sources())
def test_gpu_and_cpu_build_the_same_kernels(source: str) -> None:
    assert sorted(ptx_of_kernels(source)) == sorted(kernel_names(SOURCES, source))


@pytest.mark.parametrize("source", cuda_sources())
def test_elements_are_moved_sixteen_bytes_an_access_and_streaming(source: str) -> None:
    """Codes of weights are read eight at a time, 4 or 8 bytes, as their values take 16."""
    for kernel, ptx in ptx_of_kernels(source).items():
        generic = re.findall(r"^\s*(?:ld|st)\.(?!global|param|shared)\S*", ptx, re.MULTILINE)
        assert not generic, f"{kernel}: {Counter(generic)}"
        load = "ld.global.cs.v2.u32" if kernel.startswith("dequantise") else "ld.global.cs.v4.u32"
        if not kernel.startswith("dequantise_transposed"):  # whose neighbours read the rest of each vector
            assert load in ptx, f"{kernel} has no streaming load of a vector"
        if not kernel.startswith("square_sums"):  # which writes 8 bytes for 4096 elements
            assert "st.global.cs.v4.u32" in ptx, f"{kernel} has no streaming store of 16 bytes"


@pytest.mark.parametrize("source", cuda_sources())
def test_no_subnormal_is_flushed_and_no_product_is_fused_unasked(source: str) -> None:
    for kernel, ptx in ptx_of_kernels(source).items():
        assert ".ftz" not in ptx, kernel
        assert ".approx" not in ptx, kernel
        asked = len(re.findall(r"fma\.rn\.f32", ptx))
        assert (asked > 0) == kernel.startswith("adamw"), f"{kernel}: {asked} fma"
        assert ("fma.rn.f64" in ptx) == kernel.startswith("square_sums"), kernel


def test_a_second_compilation_is_taken_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = backend.compiled("cast.cu", 90, tmp_path)
    assert first == compiled("cast.cu", "sm_90")[0]
    (kept,) = tmp_path.iterdir()
    kept.write_bytes(b"kept")
    assert backend.compiled("cast.cu", 90, tmp_path) == b"kept"
    monkeypatch.setattr(backend, "OPTIONS", (*backend.OPTIONS, "-lineinfo"))
    assert backend.compiled("cast.cu", 90, tmp_path) not in (b"kept", first)


def test_a_cache_that_cannot_be_written_or_looked_into_is_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = compiled("cast.cu", "sm_90")[0]

    def forbidden(path: Path, *_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    (tmp_path / "file").touch()
    assert backend.compiled("cast.cu", 90, tmp_path / "file" / "kernels") == expected
    assert backend.compiled("cast.cu", 90, None) == expected
    monkeypatch.setattr(Path, "mkdir", forbidden)
    monkeypatch.setattr(Path, "read_bytes", forbidden)
    assert backend.compiled("cast.cu", 90, tmp_path / "kernels") == expected


def test_a_source_is_compiled_and_loaded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def code_of(source: str, *_: object) -> bytes:
        asked.append(source)
        return b"code"

    cuda = SimpleNamespace(Module=Mock())
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(__version__="0", cuda=cuda))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(backend, "compiled", code_of)
    home = backend.CupyBackend(None)
    for kernel in ("cast_f32_bf16", "cast_f32_f16", "cast_f32_bf16"):
        home._kernel(0, "cast.cu", kernel)
    assert asked == ["cast.cu"]
    cuda.Module.return_value.load.assert_called_once_with(b"code")


def test_a_device_newer_than_the_compiler_gets_ptx() -> None:
    assert backend._target(90, nvrtc) == "sm_90"
    newest = max(nvrtc.getSupportedArchs())
    assert backend._target(999, nvrtc) == f"compute_{newest}"
    assert b".version" in backend.compiled("cast.cu", 999, None)
    with pytest.raises(RuntimeError, match="not for a device of 20"):
        backend._target(20, nvrtc)
