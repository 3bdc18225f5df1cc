"""`hetmem bench transfers`: what it measures is what it says, and it runs without a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from hetmem import bench


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


@pytest.mark.parametrize(("elements", "rounds"), [(0, 3), (16, 0), (-1, 1)])
def test_nothing_to_measure_is_refused(elements: int, rounds: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        bench.transfers(elements, rounds)
