"""`make gpu`'s benchmark does not fail for a silly reason: its parts run here on a fake GPU, at the least sizes."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import gpu, gpu_processes, gpu_results, gpu_sizes
from hetmem.tools import bench_device
from tests.memory.fake_cuda import CpuCuda, FakeCuda, cuda

__all__ = ["cuda"]  # a fixture


@pytest.fixture
def small(cuda: FakeCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fake GPU; sentences of eight words; a cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(gpu, "DEVICE", CpuCuda())
    monkeypatch.setattr("hetmem.memory.cuda_device.CudaDevice", CpuCuda)
    monkeypatch.setattr(bench_device, "CudaDevice", CpuCuda)
    monkeypatch.setattr(bench_device, "backend", CpuCuda()._kernels)
    monkeypatch.setattr(bench_device, "DEVICE", "cpu")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    generator = torch.Generator().manual_seed(0)
    monkeypatch.setattr(gpu, "VOCABULARY", 512)
    monkeypatch.setattr(gpu, "SMALL_VOCABULARY", 1024)  # with width 128 to a block as in the real one
    monkeypatch.setattr(gpu.GPT.__init__, "__defaults__", (1024, 512))
    monkeypatch.setattr(gpu.parameters_of, "__defaults__", (512,))
    monkeypatch.setattr(gpu, "tokens", lambda batch, **_: torch.randint(0, 512, (1, 8), generator=generator))
    monkeypatch.setattr(gpu, "timed", lambda step, rounds, warm_up=0: [(step(), 1e-3)[1] for _ in range(2)])


@pytest.mark.usefixtures("small")
def test_every_part_runs_and_its_result_is_json() -> None:
    found = {
        "rates": gpu.rates(1 << 16),
        "transfers": gpu.transfers(1 << 12),
        "resident": gpu.resident(128, 1),
        "streamed": gpu.streamed(128, 16, "256MiB"),
        "largest": gpu.largest(0.0067, "1GiB", "1GiB", 128),
    }
    found = json.loads(json.dumps(found))
    assert len(found["streamed"]["rows"]) == 3 and found["largest"]["parameters"] == gpu.parameters_of(128, 1)
    assert found["rates"]["ways"].startswith("ways across the link")
    assert all(loss == loss for loss in found["largest"]["losses"])
    environment = {"device": "a fake GPU 1.5", "date": "2000-01-01"}
    text = gpu_results.markdown({"environment": environment, **found})
    assert all(f"\n## {part}\n" in text for part in gpu.SECONDS)
    assert "\n| device to host | float32 to bfloat16 | cast then copy | pinned | " in text
    steps = [found["resident"]["step"], found["largest"]["step"], *(row["step"] for row in found["streamed"]["rows"])]
    assert all(0 < step["overlap"] == max(step["terms"].values()) / step["seconds"] for step in steps)


def test_each_share_of_the_weights_holds_the_largest_of_them_beside_another() -> None:
    """Sizes that no run here has: a budget below the largest chunk would be refused on the GPU, minutes later."""
    with torch.device("meta"):
        model = gpu.GPT(2048, 16, vocabulary=gpu.SMALL_VOCABULARY)
    sizes = sorted(2 * parameter.numel() for parameter in model.parameters())
    assert 0.1 * sum(sizes) > 1.2 * (sizes[-1] + sizes[-2])


def options(directory: Path, seconds: float, only: str, *, tests: bool = False) -> argparse.Namespace:
    return argparse.Namespace(
        only=only, largest=1.0, host="1GiB", nvme="1GiB", directory=directory, seconds=seconds, part=None, tests=tests
    )


def test_what_was_found_is_written_whatever_becomes_of_a_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float] = []
    so_far: list[dict[str, Any]] = []

    def process(
        command: list[str], seconds: float, seen: Callable[[str], None] = lambda _: None
    ) -> tuple[int | None, str, str]:
        limits.append(seconds)
        if "pytest" in command:
            return (None if "managed" in command[-1] else 1), ".F\n1 failed, 1 passed in 2.00s\n", "an error"
        part = command[command.index("--part") + 1]
        seen('RESULT {"ms": 8}\nRESULT {"ms": ')
        so_far.append(json.loads((tmp_path / "gpu-a-fake-GPU-1.5-2000-01-01.json").read_text()))
        code = {"rates": 0, "resident": 1, "streamed": None}[part]
        return code, "" if part == "resident" else 'RESULT {"ms": 9}\nnoise\nRESULT {"ms": 1.5}\n', "no memory"

    monkeypatch.setattr(gpu, "environment", lambda: {"device": "a fake/GPU 1.5", "date": "2000-01-01"})
    monkeypatch.setattr(gpu, "in_a_process", process)
    monkeypatch.setattr(gpu_processes, "in_a_process", process)
    assert gpu.measure(options(tmp_path, 90.0, "rates,resident,streamed", tests=True)) == 1
    found = json.loads((tmp_path / "gpu-a-fake-GPU-1.5-2000-01-01.json").read_text())
    assert found["rates"] == {"ms": 1.5} and found["resident"] == {"failed": "no memory"}
    assert found["streamed"]["ms"] == 1.5 and found["streamed"]["cut off"].startswith("longer than ")
    assert found["streamed"]["said"] == "no memory"
    under_way = [then[part] for then, part in zip(so_far, ("rates", "resident", "streamed"), strict=False)]
    assert under_way == [{"ms": 8, "cut off": "nobody knows when: it was under way"}] * 3
    passed = "1 failed, 1 passed in 2.00s"
    assert found["tests/gpu/test_moves.py"] == {"pytest": passed, "failed": f".F\n{passed}\nan error"}
    managed = found["tests/gpu/test_managed.py"]
    assert managed["cut off"].startswith("longer than ") and managed["said"] == f".F\n{passed}\nan error"
    text = (tmp_path / "gpu-a-fake-GPU-1.5-2000-01-01.md").read_text()
    assert "## streamed" in text and "## tests/gpu/test_moves.py" in text
    assert limits[len(gpu_processes.TESTS)] == gpu.SECONDS["rates"] and all(limit <= 90.0 for limit in limits), (
        "no more than is left for all"
    )
    assert gpu.measure(options(tmp_path / "none", 0.0, "rates", tests=True)) == 1
    assert (tmp_path / "none" / "gpu-a-fake-GPU-1.5-2000-01-01.json").exists()
    assert gpu.measure(options(tmp_path, 90.0, "rates")) == 0
    again = json.loads((tmp_path / "gpu-a-fake-GPU-1.5-2000-01-01.json").read_text())
    assert again["resident"] == {"failed": "no memory"}, "a part that is run again leaves what the others found"
    monkeypatch.setattr(
        gpu, "environment", lambda: {"device": "a fake/GPU 1.5", "date": "2000-01-01", "commit": "another"}
    )
    assert gpu.measure(options(tmp_path, 90.0, "rates")) == 0
    again = json.loads((tmp_path / "gpu-a-fake-GPU-1.5-2000-01-01.json").read_text())
    assert again.keys() == {"environment", "rates"}


def test_the_largest_model_and_the_sanitizer_have_time_whatever_hangs_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, limits = [0.0], {}

    def hang(part: str, seconds: float) -> dict[str, Any]:
        limits[part] = seconds
        now[0] += seconds
        return {"cut off": "it hung"}

    monkeypatch.setattr(gpu.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(gpu, "environment", lambda: {"device": "a fake GPU", "date": "2000-01-01"})
    monkeypatch.setattr(gpu, "tested", hang)
    monkeypatch.setattr(gpu, "sanitized", lambda seconds: hang("sanitizer", seconds))
    monkeypatch.setattr(gpu, "_measured", lambda part, options, seconds, keep: hang(part, seconds))
    assert gpu.measure(options(tmp_path, 500.0, ",".join(gpu.SECONDS), tests=True)) == 1
    assert limits["largest"] == 150
    assert limits["sanitizer"] == 45
    assert now[0] <= 500.0
    assert list(limits)[-2:] == ["largest", "sanitizer"]


@pytest.mark.parametrize(("status", "key"), [(0, None), (86, "failed")])
def test_the_kernel_tests_run_under_the_sanitizer_where_there_is_one(
    status: int, key: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checker = tmp_path / "bin" / "compute-sanitizer"
    checker.parent.mkdir()
    checker.write_text(f'#!/bin/sh\necho "$@"\nexit {status}\n')
    checker.chmod(0o755)
    monkeypatch.setattr(gpu_processes, "_TOOLKITS", ())
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.delenv("CUDA_HOME", raising=False)
    assert gpu_processes.sanitized(60.0).keys() == {"skipped"}
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    found = gpu_processes.sanitized(60.0)
    assert found["said"].startswith(
        f"--tool=memcheck --report-api-errors=no --error-exitcode=86 {sys.executable} -m pytest"
    )
    assert "tests/cuda/test_on_gpu.py" in found["said"]
    assert found.keys() - {"said"} == ({key} if key else set())


def test_a_process_that_hangs_is_interrupted_and_then_killed_and_what_it_said_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    polite = "import time\nprint('begun', flush=True)\ntry: time.sleep(60)\nexcept KeyboardInterrupt: print('ended')"
    rude = (
        "import signal, time\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nprint('begun', flush=True)\ntime.sleep(60)"
    )
    monkeypatch.setattr(gpu_processes, "_GRACE_SECONDS", 5.0)
    assert gpu_processes.in_a_process(["-c", polite], 12.0) == (None, "begun\nended\n", "")
    monkeypatch.setattr(gpu_processes, "_GRACE_SECONDS", 0.2)
    code, out, errors = gpu_processes.in_a_process(["-c", rude], 2.4)
    assert (code, out) == (None, "begun\n")
    assert "Aborted" in errors and 'File "<string>", line 4' in errors, "where it hung"
    assert gpu_processes.in_a_process(["-c", "raise SystemExit(3)"], 60.0) == (3, "", "")


def test_what_a_process_has_said_is_seen_while_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_processes, "_LOOK_SECONDS", 0.3)
    seen: list[str] = []
    slow = "import time\nfor part in 'ab':\n    print(part, flush=True)\n    time.sleep(2)"
    assert gpu_processes.in_a_process(["-c", slow], 60.0, seen.append) == (0, "a\nb\n", "")
    assert "a\n" in seen and seen[-1] == "a\nb\n"


def test_who_ends_the_benchmark_ends_the_part_that_runs(tmp_path: Path) -> None:
    """By SIGTERM, as `timeout` and batch systems do."""
    child = f"import pathlib, time\npathlib.Path({str(tmp_path / 'begun')!r}).touch()\ntime.sleep(3)\n"
    child += f"pathlib.Path({str(tmp_path / 'outlived')!r}).touch()"
    code = f"""
import sys
from unittest import mock
from benchmarks import gpu, gpu_processes
sys.argv = ["gpu"]
with mock.patch.object(gpu.torch.cuda, "is_available", lambda: True), \\
     mock.patch.object(gpu, "measure", lambda _: gpu_processes.in_a_process(["-c", {child!r}], 60.0)):
    gpu.main()
"""
    process = subprocess.Popen([sys.executable, "-c", code], cwd=gpu.ROOT)
    while not (tmp_path / "begun").exists():
        time.sleep(0.05)
    process.terminate()
    assert process.wait(30) == 1
    time.sleep(4)
    assert not (tmp_path / "outlived").exists()


def test_a_part_finds_what_the_user_s_path_leads_to_behind_this_hetmem(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch may be there: it is on machines where software comes in modules."""
    for path, expected in (("/elsewhere", f"{gpu.ROOT}:/elsewhere"), ("", str(gpu.ROOT))):
        monkeypatch.setenv("PYTHONPATH", path)
        told = gpu_processes.in_a_process(["-c", "import os; print(os.environ['PYTHONPATH'])"], 60.0)
        assert told == (0, f"{expected}\n", "")


def test_the_largest_model_is_as_large_as_memory_disk_and_time_allow() -> None:
    gib = gpu_sizes.GIB
    whole = gpu_sizes.largest(1e6, 100 * gib, 1000 * gib)
    assert (whole.host_bytes, whole.nvme_bytes) == (80 * gib, 40 * gib)
    assert gpu_sizes.largest(100, 1000 * gib, 1000 * gib).host_bytes == 50 * gib
    assert gpu_sizes.largest(100, 1000 * gib, 1000 * gib).nvme_bytes == 10 * gib
    assert gpu_sizes.largest(70, 1000 * gib, 1000 * gib, gib).nvme_bytes == 5 * gib
    assert gpu_sizes.largest(1e6, 100 * gib, 5 * gib).nvme_bytes == 4 * gib
    for seconds in (80, 300, 1e6):
        size = gpu_sizes.largest(seconds, 100 * gib, 60 * gib)
        assert 0 < gpu_sizes.STATE_BYTES * size.parameters < 0.9 * (size.host_bytes + size.nvme_bytes)


def test_the_largest_model_of_a_large_gpu_does_not_fit_there_as_a_whole() -> None:
    """Else nothing of it would leave that: 139 GiB of an H200 beside 125 of a host and a disk of 2 GB a second."""
    gib = gpu_sizes.GIB
    size = gpu_sizes.largest(260, 125 * gib, 64 * gib, 2e9)
    assert size.parameters > 9.7e9
    assert 16 * size.parameters > 139 * gib


def test_a_disk_is_measured_and_left_as_it_was(tmp_path: Path) -> None:
    assert gpu_sizes.measured_rate(tmp_path, 16 << 20) not in (0, gpu_sizes._DISK_RATE)
    assert not list(tmp_path.iterdir())
    assert gpu_sizes.measured_rate(tmp_path / "none", 16 << 20) == gpu_sizes._DISK_RATE


@pytest.mark.parametrize(("filesystem", "there"), [("tmpfs", False), ("ext4", True)])
def test_files_of_the_benchmark_are_not_in_memory(
    filesystem: str, there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounts = [SimpleNamespace(mountpoint="/", fstype="ext4"), SimpleNamespace(mountpoint=tmp_path, fstype=filesystem)]
    monkeypatch.setattr("psutil.disk_partitions", lambda all: mounts)
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path / "inner"))
    assert gpu_sizes.disk() == (tmp_path / "inner" if there else gpu.ROOT)


def test_an_environment_without_git_or_driver_tools_is_said_to_be_unknown(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    cuda.properties.total_memory = 1 << 30
    said = gpu.environment()
    assert said["driver"] == said["commit"] == "unknown (FileNotFoundError)" and said["device"] == "a fake GPU"


def test_without_a_gpu_it_says_so_and_writes_nothing(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    command = [sys.executable, "-m", "benchmarks.gpu", "--directory", str(tmp_path / "results")]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=gpu.ROOT)
    assert ended.returncode == 1 and "torch sees no GPU here" in ended.stderr
    assert not (tmp_path / "results").exists()
