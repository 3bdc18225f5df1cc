"""How a disk is asked: what was measured for it and nothing else, and never an error because of a cache file."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.memory.tested import (
    DEFAULT,
    MIB,
    DiskSample,
    DiskSettings,
    NvmeStore,
    Requests,
    _keep,
    cache_directory,
    nvme_requests,
)

SAMPLES = [
    DiskSample(1 * MIB, 1, 0.5e9, 1.0e9),
    DiskSample(4 * MIB, 4, 2.0e9, 0.97e9),
    DiskSample(16 * MIB, 2, 1.9e9, 0.4e9),
    DiskSample(16 * MIB, 4, 1.95e9, 0.5e9),
]
FOUND = DiskSettings(Requests(16 * MIB, 4), Requests(4 * MIB, 4), "measured")
"""Of what is within a twentieth of the best: the largest requests, then the most threads."""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "hetmem" / "disks.json"


def test_without_a_measurement_the_default_is_taken_and_said(tmp_path: Path, cache: Path) -> None:
    store = NvmeStore([tmp_path], MIB)
    assert store.settings == (DEFAULT,)
    assert str(store.settings[0]) == "reads 4 x 16.00 MiB, writes 4 x 16.00 MiB (default)"
    assert not cache.exists()
    store.close()


def test_what_the_probe_measured_is_kept_and_taken_by_later_stores_on_that_disk(tmp_path: Path, cache: Path) -> None:
    assert _keep(tmp_path, SAMPLES) == f"best: {FOUND}; kept in {cache}"
    store = NvmeStore([tmp_path, tmp_path], MIB)
    assert store.settings == (FOUND, FOUND)
    store.close()
    assert [path.name for path in cache.parent.iterdir()] == ["disks.json"]


def test_requests_and_threads_that_were_asked_for_win(tmp_path: Path) -> None:
    nvme_requests.remember(str(tmp_path), SAMPLES)
    cases: tuple[tuple[dict[str, Any], Requests], ...] = (
        ({"threads": 3}, Requests(16 * MIB, 3)),
        ({"request_bytes": MIB}, Requests(MIB, 4)),
        ({"threads": 1, "request_bytes": MIB}, Requests(MIB, 1)),
    )
    for asked, read in cases:
        store = NvmeStore([tmp_path], MIB, **asked)
        assert (store.settings[0].read, store.settings[0].source) == (read, "given")
        store.close()


def test_a_measurement_is_of_one_disk_and_others_are_kept_beside_it(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvme_requests.remember(str(tmp_path), SAMPLES)
    with monkeypatch.context() as patch:
        patch.setattr(nvme_requests, "_disk_of", lambda _: "nvme7n1 259:7 f00d")
        assert nvme_requests.settings_for(str(tmp_path)) == DEFAULT
        nvme_requests.remember(str(tmp_path), SAMPLES[:1])
        assert nvme_requests.settings_for(str(tmp_path)).read == Requests(MIB, 1)
    assert nvme_requests.settings_for(str(tmp_path)) == FOUND
    assert len(json.loads(cache.read_text())["entries"]) == 2


def test_a_disk_is_told_by_name_number_and_filesystem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = nvme_requests._disk_of(str(tmp_path))
    real = os.statvfs
    with monkeypatch.context() as patch:
        patch.setattr(os, "statvfs", lambda path: type("Other", (), {"f_fsid": real(path).f_fsid + 1}))
        assert nvme_requests._disk_of(str(tmp_path)) != name
    assert nvme_requests._disk_of(str(tmp_path / "..")) == name
    assert nvme_requests._disk_of("/proc") != name


GOOD = {"nbytes": MIB, "threads": 2}


def with_entry(entry: Any) -> Any:
    return lambda disk: json.dumps({"version": 1, "entries": {disk: entry}})


@pytest.mark.parametrize(
    "content",
    [
        lambda _: "",
        lambda _: "{",
        lambda _: "[]",
        lambda _: "null",
        lambda _: "\x00\xff",
        lambda disk: json.dumps({"version": 2, "entries": {disk: {"read": GOOD, "write": GOOD}}}),
        lambda disk: json.dumps({"entries": {disk: {"read": GOOD, "write": GOOD}}}),
        lambda _: json.dumps({"version": 1, "entries": 5}),
        with_entry(None),
        with_entry([]),
        with_entry({"read": GOOD}),
        with_entry({"read": GOOD, "write": 3}),
        *(
            with_entry({"read": GOOD, "write": {**GOOD, **wrong}})
            for wrong in (
                {"threads": 0},
                {"threads": 1000},
                {"threads": 1.5},
                {"threads": True},
                {"threads": "4"},
                {"nbytes": -4096},
                {"nbytes": 5000},
                {"nbytes": 1 << 40},
            )
        ),
    ],
)
def test_a_cache_file_that_makes_no_sense_is_ignored_and_replaced(tmp_path: Path, cache: Path, content: Any) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_text(content(nvme_requests._disk_of(str(tmp_path))), encoding="latin-1")
    assert nvme_requests.settings_for(str(tmp_path)) == DEFAULT
    assert nvme_requests.remember(str(tmp_path), SAMPLES) == (FOUND, cache)
    assert nvme_requests.settings_for(str(tmp_path)) == FOUND


def test_a_cache_that_cannot_be_read_or_written_is_no_error(tmp_path: Path, cache: Path) -> None:
    cache.parent.parent.mkdir(parents=True)
    cache.parent.write_text("a file where the directory should be")
    assert nvme_requests.settings_for(str(tmp_path)) == DEFAULT
    assert nvme_requests.remember(str(tmp_path), SAMPLES) == (FOUND, None)
    assert "not kept" in _keep(tmp_path, SAMPLES)


def test_what_cannot_be_kept_leaves_nothing_behind(tmp_path: Path, cache: Path) -> None:
    cache.mkdir(parents=True)  # nothing can take its place
    assert nvme_requests.remember(str(tmp_path), SAMPLES) == (FOUND, None)
    assert list(cache.parent.iterdir()) == [cache]


def test_without_a_home_there_is_no_cache_and_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", homeless)
    with pytest.raises(FileNotFoundError, match="set XDG_CACHE_HOME"):
        cache_directory()
    assert nvme_requests.settings_for(str(tmp_path)) == DEFAULT
    assert nvme_requests.remember(str(tmp_path), SAMPLES) == (FOUND, None)
