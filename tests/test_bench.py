"""`hetmem bench transfers`: what it measures is what it says, and it runs without a GPU."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch

from hetmem import bench, bench_device
from hetmem.cuda.backend import Backend, TorchBackend
from tests.cuda.shim import GPP, ShimBackend, build
from tests.memory.fake_cuda import CpuCuda, FakeCuda, cuda

__all__ = ["cuda"]  # a fixture


def test_the_host_rows_are_measured_without_a_gpu_and_the_rest_is_said_to_be_missing(tmp_path: Path) -> None:
    found = bench.transfers(elements=1 << 12, rounds=2)
    host = [row for row in found.rows if row.route == "host to host"]
    ways = {(row.cast, row.way) for row in host}
    for one, other in (
        ("float32", "bfloat16"),
        ("float32", "float16"),
        ("bfloat16", "float32"),
        ("float16", "float32"),
    ):
        for way in ("fused", "cast then copy", "copy then cast"):
            assert (f"{one} to {other}", way) in ways
    assert {"float32 to snorm8", "float32 to unorm8"} <= {row.cast for row in host}
    assert bool(found.skipped) == (not torch.cuda.is_available())
    assert all(least <= median <= most for median, least, most in (row.seconds for row in found.rows))
    found.save(tmp_path / "bench.json")
    saved = json.loads((tmp_path / "bench.json").read_text())
    assert (saved["schema_version"], len(saved["rows"])) == (1, len(found.rows))
    assert all(row.way in str(found) for row in found.rows)


def test_a_row_counts_the_bytes_that_its_way_moves() -> None:
    """float32 to bfloat16: 6 bytes an element in one pass; 4 + 2 + 2 + 2 when cast first, 4 + 4 + 4 + 2 when copied."""
    found = bench.transfers(elements=1 << 12, rounds=2)
    moved = {
        row.way: round(row.gigabytes_per_second * 1e9 * row.seconds[0] / (1 << 12))
        for row in found.rows
        if row.cast == "float32 to bfloat16"
    }
    assert moved["fused"] == 6
    assert moved["cast then copy"] == 10
    assert moved["copy then cast"] == 14


@pytest.mark.parametrize("native", [True, False])
def test_each_route_has_each_cast_by_each_way_from_both_kinds_of_memory(
    cuda: FakeCuda, native: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if native and GPP is None:
        pytest.skip("g++ is not installed")
    kernels: Backend = TorchBackend("a test")
    if native:
        kernels = ShimBackend({source: build(source) for source in ("cast.cu", "quantise.cu")})
    monkeypatch.setattr(bench_device, "DEVICE", "cpu")
    monkeypatch.setattr(bench_device, "CudaDevice", CpuCuda)
    monkeypatch.setattr(bench_device, "backend", lambda: kernels)
    monkeypatch.setattr("hetmem.cuda.backend.backend", lambda: kernels)
    found = bench.transfers(elements=1 << 12, rounds=1)
    there = {(row.route, row.cast, row.way, row.memory) for row in found.rows}
    casts = [f"{bench.short_name(one)} to {bench.short_name(other)}" for one, other in bench.PAIRS]
    for route in ("host to device", "device to host"):
        for memory in ("pinned", "pageable"):
            assert (route, casts[0], "copy", memory) in there
            for cast in (*casts[1:], "float32 to snorm8", "float32 to unorm8"):
                for way in ("cast then copy", "copy then cast"):
                    assert (route, cast, way, memory) in there
    for cast in casts[1:]:
        assert ("device to device", cast, "cast then copy", "device") in there
        assert ("device to device", cast, "copy then cast", "device") in there
    fused = {row.route for row in found.rows if row.way == "fused" and row.cast == "float32 to unorm8"}
    assert fused == ({"host to device", "device to host"} if native else set())
    assert not found.skipped
    assert cuda.pinned == {}


def test_the_codes_that_are_timed_are_those_of_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_device, "DEVICE", "cpu")
    source = torch.randn(1000)
    one, other = (bench_device._Codes("snorm8", 1000, where) for where in ("device", "pageable"))
    one.make(TorchBackend("a test"), source)
    other.copy(one)
    assert torch.equal(one.codes, other.codes)
    assert torch.equal(one.scales, other.scales)
    values = other.codes.view(-1).float() * other.scales.repeat_interleave(256)[:1000]
    assert (values - source).abs().max() <= 0.51 * other.scales.max()


def test_what_takes_long_is_measured_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "_LONG_SECONDS", 0.01)
    assert len(bench.timed(lambda: time.sleep(0.005), 21, on_device=False)) == bench._LEAST_ROUNDS
    assert len(bench.timed(lambda: None, 21, on_device=False)) == 21


@pytest.mark.parametrize(("elements", "rounds"), [(0, 3), (16, 0), (-1, 1)])
def test_nothing_to_measure_is_refused(elements: int, rounds: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        bench.transfers(elements, rounds)
