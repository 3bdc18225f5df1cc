"""What was measured of a GPU is found again for that GPU and driver only, and a broken file is as good as none."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.cuda.shim import GPP, build_all
from tests.memory.fake_cuda import CpuCuda, FakeCuda, LateKernels, cuda
from tests.memory.tested import (
    CopyPath,
    CudaDevice,
    Ways,
    kernel_cache_directory,
    link_ways,
    load_ways,
    save_ways,
)
from tests.memory.tested import cuda_device as cuda_module

__all__ = ["cuda"]  # a fixture

MEASURED = Ways(CopyPath.KERNEL, CopyPath.COPY_ENGINE, 16, "measured")


@pytest.fixture(autouse=True)
def ways_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "hetmem" / "ways.json"


def test_what_was_kept_is_found_for_this_gpu_and_driver_alone(ways_path: Path) -> None:
    path = ways_path
    other = Ways(CopyPath.COPY_ENGINE, CopyPath.KERNEL, 8, "another day")
    assert save_ways(MEASURED, "H1", "1.0") == path
    save_ways(other, "H2", "1.0")
    assert load_ways("H1", "1.0") == MEASURED
    assert load_ways("H2", "1.0") == other
    assert load_ways("H1", "1.1") == Ways()
    assert [entry.name for entry in path.parent.iterdir()] == ["ways.json"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"version": 2, "entries": {"H1, driver 1.0": {}}}',
        '{"version": 1, "entries": 3}',
        '{"version": 1, "entries": {"H1, driver 1.0": 3}}',
        '{"version": 1, "entries": {"H1, driver 1.0": {"weights": "by hand"}}}',
        '{"version": 1, "entries": {"H1, driver 1.0": {"weights": "kernel", "gradients": "kernel", "blocks": 1e999}}}',
        "[" * 100_000,
    ],
)
def test_a_file_that_is_not_ours_counts_as_none_and_is_replaced(text: str, ways_path: Path) -> None:
    ways_path.parent.mkdir()
    ways_path.write_text(text)
    assert load_ways("H1", "1.0") == Ways()
    save_ways(MEASURED, "H1", "1.0")
    assert load_ways("H1", "1.0") == MEASURED


def homeless() -> Path:
    raise RuntimeError("Could not determine home directory.")


def test_without_a_home_nothing_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    assert load_ways("H1", "1.0") == Ways()
    with pytest.raises(OSError, match="set XDG_CACHE_HOME"):
        save_ways(MEASURED, "H1", "1.0")


def test_what_is_unmeasured_goes_by_the_copy_engine() -> None:
    assert (Ways().weights, Ways().gradients, Ways().blocks) == (CopyPath.COPY_ENGINE, CopyPath.COPY_ENGINE, 8)
    assert "not measured" in Ways().source


def test_a_device_takes_the_ways_that_were_measured_on_it(
    cuda: FakeCuda, ways_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cuda_module, "_DRIVER_VERSION", tmp_path / "version")
    assert ways_path.parent == kernel_cache_directory().parent == tmp_path / "hetmem"
    assert CpuCuda(measured=True).moves.ways == Ways()
    save_ways(MEASURED, "a fake GPU", "unknown")
    assert CpuCuda(measured=True).moves.ways == MEASURED
    (tmp_path / "version").write_text("580.65.06\n")
    assert CpuCuda(measured=True).moves.ways == Ways()
    save_ways(MEASURED, "a fake GPU", "580.65.06")
    assert CpuCuda(measured=True).moves.ways == MEASURED
    assert len(json.loads(ways_path.read_text())["entries"]) == 2


def test_the_fewest_blocks_that_do_as_well_as_any_are_taken() -> None:
    best = link_ways.fastest(1.0, {8: 1.4, 32: 1.2}, 1.0, {8: 1.5, 16: 0.61, 32: 0.6, 132: 0.6})
    assert (best.weights, best.gradients, best.blocks) == (CopyPath.COPY_ENGINE, CopyPath.KERNEL, 16)
    best = link_ways.fastest(1.0, {8: 0.9, 32: 0.7}, 1.0, {8: 0.5, 32: 0.5})
    assert (best.weights, best.gradients, best.blocks) == (CopyPath.KERNEL, CopyPath.KERNEL, 32)
    best = link_ways.fastest(0.5, {8: 0.5}, 0.4, {8: 0.5})
    assert (best.weights, best.gradients) == (CopyPath.COPY_ENGINE, CopyPath.COPY_ENGINE)


@pytest.mark.skipif(GPP is None, reason="g++ is not installed")
def test_measuring_runs_both_ways_in_both_directions_and_unpins(cuda: FakeCuda) -> None:
    kernels = LateKernels(build_all(["cast.cu", "gradient.cu"]))
    found = link_ways.measure_ways(CpuCuda(), kernels, 10_000, rounds=1, side=8)
    assert set(kernels.launched) == {"cast_f32_bf16", "gradient_bf16_f32_overwrite"}
    assert found.source.startswith("measured: weights ") and "ms by kernel" in found.source
    assert "beside" in found.source and "products of 8 x 8" in found.source
    assert cuda.pinned == {}


def test_without_kernels_nothing_is_kept_and_the_reason_is_said(
    cuda: FakeCuda, ways_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(link_ways, "backend", CpuCuda()._kernels)
    monkeypatch.setattr(link_ways, "CudaDevice", CpuCuda)
    assert link_ways.keep_ways(quick=True) == "ways across the link: torch's operators only (a test)"
    assert not ways_path.exists()
    assert issubclass(CpuCuda, CudaDevice)


@pytest.mark.skipif(GPP is None, reason="g++ is not installed")
def test_what_a_probe_measures_the_next_run_takes(
    cuda: FakeCuda, ways_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kernels = LateKernels(build_all(["cast.cu", "gradient.cu"]))
    monkeypatch.setattr(link_ways, "backend", lambda: kernels)
    monkeypatch.setattr(link_ways, "CudaDevice", CpuCuda)
    monkeypatch.setattr(link_ways, "_WAY_ELEMENTS", 160_000)
    monkeypatch.setattr(link_ways, "_PRODUCT_SIDE", 128)
    said = link_ways.keep_ways(quick=True)
    assert said.endswith(f"kept in {ways_path}")
    assert CpuCuda(measured=True).moves.ways.source.startswith("measured: weights ")
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert re.search(
        r"\d+ blocks: not kept, as the cache cannot be written to \(.*Not a dir", link_ways.keep_ways(quick=True)
    )
