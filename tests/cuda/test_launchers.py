"""What the launchers refuse, and what they do without a GPU."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from hetmem.cpu import AdamWStep
from hetmem.cpu import adamw as update
from hetmem.cuda import backend as backend_module
from hetmem.cuda.backend import GROUP_ELEMENTS, THREADS, CupyBackend, TorchBackend, backend
from hetmem.cuda.dequantise import dequantise
from hetmem.cuda.kernels import SCALARS, adamw, cast, gather_rows, square_sums
from hetmem.schedule import formats
from hetmem.schedule.formats import Coding
from tests.cuda.kernel_checks import CHECKS
from tests.cuda.shim import GPP, SOURCES, ShimBackend, build
from tests.cuda.vectors import Place
from tests.forked import Forks

TORCH = TorchBackend("a test")
SCALARS_8 = [np.float32(1)] * 8


def zeros(numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(numel, dtype=dtype)


HALF = torch.float16
DOUBLE = torch.float64
REFUSED: dict[str, tuple[Callable[[], None], str]] = {
    "cast, dtypes": (
        lambda: cast(TORCH, zeros(8), zeros(8)),
        r"cast: expected bf16 to f32, .*, got torch\.float32 to torch\.float32",
    ),
    "cast, destination": (
        lambda: cast(TORCH, zeros(8), zeros(7, HALF)),
        "destination: expected at least 8 elements, got 7",
    ),
    "cast, strides": (
        lambda: cast(TORCH, zeros(16)[::2], zeros(8, HALF)),
        r"source: expected contiguous memory, got \(8,\), strides \(2,\)",
    ),
    "adamw, scalars": (
        lambda: adamw(TORCH, SCALARS_8[:7], *(zeros(8) for _ in range(4))),
        r"scalars: expected 8 \(sign, .*, negative_step\), got 7",
    ),
    "adamw, lengths": (
        lambda: adamw(TORCH, SCALARS_8, zeros(8), zeros(9), zeros(8), zeros(8)),
        "grad: expected 8 elements like param, got 9",
    ),
    "adamw, dtypes": (
        lambda: adamw(TORCH, SCALARS_8, zeros(8), zeros(8), zeros(8, HALF), zeros(8)),
        r"exp_avg: expected torch\.float32, got torch\.float16",
    ),
    "adamw, kinds": (
        lambda: adamw(TORCH, SCALARS_8, *(zeros(8, HALF) for _ in range(4)), zeros(8, torch.bfloat16)),
        r"there is no kernel for torch\.float16, torch\.float16, torch\.bfloat16",
    ),
    "adamw, tail": (
        lambda: adamw(TORCH, SCALARS_8, *(zeros(8) for _ in range(4)), tail=9),
        "tail: expected 0 to 8 elements, got 9",
    ),
    "squares, sums": (
        lambda: square_sums(TORCH, zeros(4097), zeros(1, torch.float64)),
        "sums: expected at least 2 elements, got 1",
    ),
    "dequantise, bytes": (
        lambda: dequantise(TORCH, Coding.of("nf4", (64, 64)), zeros(2303, torch.uint8), zeros(4096)),
        "coded: expected at least 2304 elements, got 2303",
    ),
    "dequantise, first": (
        lambda: dequantise(TORCH, Coding.of("nf4", (64, 64)), zeros(2304, torch.uint8), zeros(64), 64),
        r"first: expected a multiple of 16384 in Coding\(.*, got 64 and 64 elements",
    ),
    "gather, shapes": (
        lambda: gather_rows(TORCH, zeros(32).view(4, 8), torch.zeros(3, dtype=torch.int64), zeros(16).view(2, 8)),
        r"expected a table .* got \(4, 8\), \(3,\) and \(2, 8\)",
    ),
    "gather, dtypes": (
        lambda: gather_rows(
            TORCH, zeros(32, HALF).view(4, 8), torch.zeros(3, dtype=torch.int64), zeros(24, torch.bfloat16).view(3, 8)
        ),
        r"no kernel for torch\.float16 to torch\.bfloat16",
    ),
    "squares, dtypes": (
        lambda: square_sums(TORCH, zeros(8, torch.float64), zeros(1, torch.float64)),
        r"values: expected torch\.float32 or .*, got torch\.float64",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_says_what_was_expected_and_got(name: str) -> None:
    call, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("check", CHECKS)
def test_without_a_gpu_torch_does_the_same_work(check: str) -> None:
    CHECKS[check](Place(TORCH, thorough=False))


def test_the_backend_says_why_it_is_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        assert (backend().name, backend().reason) == ("torch", "torch sees no GPU")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(sys.modules, "cupy", None)
    found = backend.__wrapped__()
    assert (found.name, found.native) == ("torch", False)
    assert "ModuleNotFoundError: import of cupy halted" in found.reason


def test_without_a_home_no_kernels_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    given: list[Path | None] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(CupyBackend, "__init__", lambda self, cache: given.append(cache))
    monkeypatch.setattr(CupyBackend, "works", lambda self: True)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    assert backend.__wrapped__().native
    assert given == [None]


class BrokenCupy:
    """An old CuPy with a new numpy, say: no error of an import."""

    def find_spec(self, name: str, *_: object) -> None:
        if name == "cupy":
            raise AttributeError("module 'numpy' has no attribute 'bool8'")


def test_the_backend_says_that_cupy_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    monkeypatch.setattr(sys, "meta_path", [BrokenCupy(), *sys.meta_path])
    assert backend.__wrapped__().reason == "AttributeError: module 'numpy' has no attribute 'bool8'"


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU, a compiler, and a CuPy that imports."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(CupyBackend, "__init__", lambda self, cache: None)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(backend_module, "_version_of", lambda name: "14.0" if name == "cupy-cuda13x" else "")


@pytest.mark.usefixtures("installed")
def test_a_cupy_for_another_cuda_is_found_out_before_training_and_torch_does_the_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def launch(*_: object) -> None:
        raise RuntimeError("cudaErrorInsufficientDriver: CUDA driver version is insufficient for CUDA runtime version")

    works = CupyBackend.works
    monkeypatch.setattr(CupyBackend, "works", lambda self: works(self, "cpu"))
    monkeypatch.setattr(CupyBackend, "launch", launch)
    found = backend.__wrapped__()
    assert (found.name, found.native) == ("torch", False)
    assert found.reason.startswith("RuntimeError: cudaErrorInsufficientDriver: ")
    assert found.reason.endswith("(cupy-cuda13x 14.0 beside torch for CUDA 12.8, which wants hetmem[cuda12])")
    monkeypatch.setattr(CupyBackend, "launch", lambda *_: None)
    assert backend.__wrapped__().reason.startswith("a kernel gave wrong bits here (cupy-cuda13x 14.0 beside torch")


@pytest.mark.usefixtures("installed")
def test_the_backend_says_that_the_compiler_has_left_the_gpu_out(monkeypatch: pytest.MonkeyPatch) -> None:
    works = CupyBackend.works
    monkeypatch.setattr(CupyBackend, "works", lambda self: works(self, "cpu"))
    nvrtc = SimpleNamespace(getVersion=lambda: (13, 0), getSupportedArchs=lambda: [75, 90])
    monkeypatch.setattr(CupyBackend, "launch", lambda *_: backend_module._target(70, nvrtc))
    left_out = "RuntimeError: NVRTC (13, 0) compiles for [75, 90], not for a device of 70"
    assert backend.__wrapped__().reason.startswith(left_out)


@pytest.mark.skipif(GPP is None, reason="g++ is not installed")
def test_kernels_that_work_are_found_to_work() -> None:
    kernels: Any = ShimBackend({"cast.cu": build("cast.cu")})
    assert CupyBackend.works(kernels, "cpu")


def test_importing_the_launchers_does_not_import_cupy(forks: Forks) -> None:
    script = "import sys, hetmem.cuda.kernels, hetmem.cuda.backend as b; b.backend(); assert 'cupy' not in sys.modules"
    assert forks.run(script).returncode == 0


def test_the_host_prepares_the_scalars_in_the_order_of_the_kernel() -> None:
    step = AdamWStep(lr=0.5, beta1=0.75, beta2=0.5, eps=0.125, weight_decay=0.25, step=1, maximize=True)
    scalars = dict(zip(SCALARS, map(float, update.scalars_of(step)), strict=True))
    assert scalars == {
        "sign": -1.0,
        "decay": 0.875,
        "lerp": 0.25,
        "beta2": 0.5,
        "square": 0.5,
        "bias": float(np.float32(0.5**0.5)),
        "eps": 0.125,
        "negative_step": -2.0,
    }


def test_python_and_cuda_agree_on_their_constants() -> None:
    of_formats = (SOURCES / "dequantise.cu").read_text()
    for name in ("NF4_BLOCK", "MX_BLOCK", "NESTED_BLOCK", "FP8_TILE"):
        assert f"const int {name} = {getattr(formats, name)};" in of_formats
    text = (SOURCES / "floats.cuh").read_text()
    for line in (f"const int THREADS = {THREADS};", f"const int GROUP = {GROUP_ELEMENTS};"):
        assert line in text
