"""The live view: a line of what happened since the last one, and files for `hetmem top` of one's own processes only."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import hetmem
from hetmem import testing
from tests.forked import Forks
from tests.report.models import trained
from tests.report.tested import live


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Statuses go here and not to the user's own."""
    place = tmp_path / "status"
    place.mkdir(mode=0o700)
    monkeypatch.setattr(live, "status_directory", lambda: place)
    return place


def test_the_line_tells_of_what_happened_since_the_last_one(tmp_path: Path) -> None:
    model = trained("nvme", tmp_path)
    testing.of(model).wait_idle()  # what is prefetched for a next step comes in meanwhile
    first = live.progress(model)
    second = live.progress(model)
    assert first.startswith("step 3  ")
    assert "H2D" in first
    assert second.startswith("step 3  no new step  stalls 0%")
    assert "H2D" not in second
    hetmem.release(model)


def test_other_terminals_see_the_status_at_most_once_a_second(
    tmp_path: Path, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = trained("host", tmp_path)
    now = [1000.0]
    monkeypatch.setattr(live.time, "perf_counter", lambda: now[0])
    written: list[str] = []
    write = live.publish
    monkeypatch.setattr(live, "publish", lambda path, text: (written.append(text), write(path, text)))
    for _ in range(20):
        live.progress(model)
        now[0] += 0.25
    assert len(written) == 5
    (status,) = live.statuses()
    assert (status["process"], status["model"], status["steps"]) == (os.getpid(), "Sequential", 3)
    assert str(os.getpid()) in live.top()
    hetmem.release(model)


def test_the_status_of_a_process_that_ended_is_removed(directory: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    (directory / f"{int(ended.stdout)}-1.json").write_text("{}")
    assert live.statuses() == []
    assert list(directory.iterdir()) == []
    assert "hetmem.progress(model)" in live.top()


def test_a_status_goes_with_its_model_and_that_of_a_killed_process_with_the_next(
    tmp_path: Path, directory: Path, forks: Forks
) -> None:
    ended = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    (directory / f"{int(ended.stdout)}-1.json").write_text("{}")
    models = [trained("host", tmp_path, steps=1) for _ in range(2)]
    for model in models:
        live.progress(model)
    assert [path.name.partition("-")[0] for path in directory.iterdir()] == [str(os.getpid())] * 2
    hetmem.release(models.pop(0))
    assert len(live.statuses()) == 1
    del models[:], model
    gc.collect()
    assert list(directory.iterdir()) == []
    ended_soon = forks.run(ENDS, str(directory))
    assert (ended_soon.stdout.split(), ended_soon.stderr) == (["1", "1"], "")
    assert list(directory.iterdir()) == []


ENDS = """
import faulthandler, os, sys, torch, hetmem
from pathlib import Path
from hetmem.report import live

faulthandler.cancel_dump_traceback_later()  # a fork has not its thread, and would wait for that at its end
directory = Path(sys.argv[1])
live.status_directory = lambda: directory
model = hetmem.manage(torch.nn.Linear(64, 64), hetmem.Budget(device="1MiB", host="1MiB"), device="sim")
hetmem.progress(model)
print(len(list(directory.iterdir())), flush=True)
if not os.fork():
    sys.exit()  # a child that runs finalizers, too
os.wait()
print(len(list(directory.iterdir())))
"""


def test_a_file_of_another_name_is_passed_over(directory: Path) -> None:
    for name in ("other.json", "-1.json", "٣-1.json", f"{10**30}-1.json"):
        (directory / name).write_text("{}")
    assert live.statuses() == []


def test_training_goes_on_when_the_status_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> Path:
        raise PermissionError("not yours")

    monkeypatch.setattr(live, "status_directory", refuse)
    model = trained("host", tmp_path)
    assert live.progress(model).startswith("step 3")
    hetmem.release(model)


def test_a_watched_model_is_not_kept_alive(tmp_path: Path) -> None:
    model = trained("host", tmp_path)
    live.progress(model)
    alive = testing.of(model).runtime()
    hetmem.release(model)
    del model
    gc.collect()
    assert not alive()


def test_a_directory_that_others_can_open_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(live.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(live.os, "access", lambda path, mode: False)
    made = live.status_directory()
    assert made.stat().st_mode & 0o777 == 0o700
    made.chmod(0o755)
    with pytest.raises(PermissionError, match="of this user alone"):
        live.status_directory()


def test_a_process_with_another_version_of_hetmem_does_not_end_top(directory: Path) -> None:
    (directory / f"{os.getpid()}-1.json").write_text('{"process": 1, "tiers": {"device": 3}}')
    os.mkfifo(directory / f"{os.getpid()}-2.json")
    said = " ".join(live.top().split())
    assert f"{os.getpid()}-1.json is no status that this hetmem knows: model is missing" in said
    assert f"{os.getpid()}-2.json is no status that this hetmem knows: it is no regular file" in said
    assert "hetmem.progress(model)" in said


def test_both_views_fit_a_terminal_of_80_columns_and_show_speeds(directory: Path) -> None:
    links = dict.fromkeys(("host_to_device", "device_to_host", "nvme_read", "nvme_write"), 111.11 * 2**30)
    status = {
        "process": 4000000,
        "model": "GPTForCausalLanguageModellingWithALongName",
        "steps": 120000,
        "step_seconds": 12.345,
        "tokens_per_second": 189000.0,
        "stall_share": 0.14,
        "tiers": {tier: [2**40 - 1, 2**40] for tier in ("device", "host", "nvme")},
        "links": links,
        "history": [1.0, 2.0] * 30,
    }
    (directory / f"{os.getpid()}-1.json").write_text(json.dumps(status))
    shown = live.top().splitlines()
    assert max(map(len, shown)) <= 79
    for part in (
        "189.0k tok/s",
        "H2D 111.11 GiB/s",
        "W 111.11 GiB/s",
        "▅█▅█",
        "step 120000",
        "stalls 14%",
        "█ up to 2.00 s",
    ):
        assert part in "\n".join(shown)
    line = live.line(status | {"links": links | {"nvme_read": 0, "nvme_write": 0}})
    assert len(line) == 79
    assert "H2D 111 D2H 111 GiB/s" in line
    slow = {"host_to_device": 3.25 * 2**20, "device_to_host": 50 * 2**10}
    assert "H2D 3.2 D2H 0.0 MiB/s" in live.line(status | {"links": slow})
    assert "D2H 50 KiB/s" in live.line(status | {"links": slow | {"host_to_device": 0}})
    assert "▅█▅█" in line
