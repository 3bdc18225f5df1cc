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

from hetmem.cuda import backend, nvrtc
from tests import made
from tests.cuda.shim import GPP, SOURCES, cuda_sources, kernel_names

ONE, ARCHITECTURES = "sm_90", ("sm_75", "sm_80", "sm_100", "sm_120")
REGISTERS = 64  # four blocks of 256 threads a multiprocessor: half of its threads, enough to hide the memory's latency

try:
    nvrtc.library()
    MISSING = ""
except nvrtc.CompileError as error:
    MISSING = str(error)

pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING)


def compiled(source: str, architecture: str) -> tuple[bytes, str]:
    """Code and log."""
    text, headers = (SOURCES / source).read_text(), {name: (SOURCES / name).read_text() for name in backend.HEADERS}

    def make(path: Path) -> None:
        code, log = nvrtc.compile_source(text, source, headers, architecture)
        path.write_text(json.dumps([code.hex(), log]))

    made_of = (text, headers, architecture, nvrtc.OPTIONS, nvrtc.version())
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
    for kernel, ptx in ptx_of_kernels(source).items():
        generic = re.findall(r"^\s*(?:ld|st)\.(?!global|param|shared)\S*", ptx, re.MULTILINE)
        assert not generic, f"{kernel}: {Counter(generic)}"
        assert "ld.global.cs.v4.u32" in ptx, f"{kernel} has no streaming load of 16 bytes"
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
    first = backend.compiled("cast.cu", "sm_90", tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(nvrtc, "compile_source", None)
        assert backend.compiled("cast.cu", "sm_90", tmp_path) == first
    assert first.read_bytes() == compiled("cast.cu", "sm_90")[0]
    assert list(tmp_path.iterdir()) == [first]


def test_other_options_are_another_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = backend.compiled("cast.cu", "sm_90", tmp_path)
    monkeypatch.setattr(nvrtc, "OPTIONS", (*nvrtc.OPTIONS, "-lineinfo"))
    assert backend.compiled("cast.cu", "sm_90", tmp_path) != first


def test_a_cache_that_cannot_be_written_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    path = backend.compiled("cast.cu", "sm_90", tmp_path / "file" / "kernels")
    assert path.read_bytes() == compiled("cast.cu", "sm_90")[0]


def test_a_cache_that_nobody_may_look_into_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = compiled("cast.cu", "sm_90")[0]

    def forbidden(path: Path, *_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "exists", forbidden)  # as its directory's owner is somebody else
    monkeypatch.setattr(Path, "mkdir", forbidden)
    path = backend.compiled("cast.cu", "sm_90", tmp_path / "kernels")
    assert path.read_bytes() == expected


def test_a_source_is_compiled_once_where_the_cache_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def compile_source(text: str, name: str, *_: object) -> tuple[bytes, str]:
        asked.append(name)
        return b"code", ""

    (tmp_path / "file").touch()
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(__version__="0", RawModule=Mock()))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(nvrtc, "compile_source", compile_source)
    home = backend.CupyBackend(tmp_path / "file" / "kernels")
    for kernel in ("cast_f32_bf16", "cast_f32_f16", "cast_f32_bf16"):
        home._kernel(0, "cast.cu", kernel)
    assert asked == ["cast.cu"]


def test_an_error_carries_the_log() -> None:
    with pytest.raises(nvrtc.CompileError, match=r"compiling broken\.cu for sm_90.*\n.*broken\.cu\(1\): error"):
        nvrtc.compile_source("__global__ void f() { x; }", "broken.cu", {}, "sm_90")


def test_a_device_newer_than_the_compiler_gets_ptx() -> None:
    assert nvrtc.target(90) == "sm_90"
    assert nvrtc.target(999) == f"compute_{nvrtc.architectures()[-1]}"
    with pytest.raises(nvrtc.CompileError, match="not for a device of 20"):
        nvrtc.target(20)
