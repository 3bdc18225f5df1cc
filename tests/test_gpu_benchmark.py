"""`make gpu` leaves its numbers behind whatever becomes of a stage. What stages measure runs by `make fake-gpu`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import peers
from benchmarks.gpu import page, processes, stages, suites
from benchmarks.gpu.__main__ import main
from benchmarks.gpu.models import Llama, sizes_of
from benchmarks.gpu.notes import COMPLETE, Notes, append, lines_of
from tests.cuda.shim import GPP
from tests.forked import Forks

PRETENDED = """
import json, os, pathlib, signal, sys, tempfile, time
module, *words = sys.argv[1:]
if module.endswith("machine"):
    pathlib.Path(words[0]).write_text(json.dumps({"GPU": "RTX <1>/2", "date": "2000-01-01"}))
    sys.exit()
name, folder, seconds = words[:3]
def tell(text): open(f"{folder}/{name}.jsonl", "a").write(text)
def number(what): tell(json.dumps({"stage": name, "name": what, "value": 5.0, "unit": "GB/s", "ceiling": 10.0}) + "\\n")
places = [tempfile.gettempdir(), os.environ["XDG_CACHE_HOME"], os.getcwd()]
tell(json.dumps({"stage": name, "name": "places", "text": " ".join(places)}) + "\\n")
pathlib.Path(tempfile.gettempdir(), "left").touch()
number("before")
if name == "calls":
    os.kill(os.getpid(), signal.SIGKILL)
if name == "links":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    time.sleep(60)
if name == "probe":
    tell('{"stage": "probe", "value')
    raise ValueError("the first of " + "many " * 100 + "words")
if name == "smoke":
    time.sleep(60)
if name == "resident":
    time.sleep(float(os.environ.get("RESIDENT", "0")))
    open(os.environ["HOME"] + "/outlived", "w") if "RESIDENT" in os.environ else None
number("after")
tell(json.dumps({"stage": name, "ended": "complete"}) + "\\n")
"""


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`OUT`, beside an empty home; processes of stages run `PRETENDED`."""
    for name in ("out", "home", "code", "scratch"):
        (tmp_path / name).mkdir()
    (tmp_path / "code" / "pretended.py").write_text(PRETENDED)
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "scratch"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "code"))
    monkeypatch.setattr(processes, "GRACE_SECONDS", 0.5)
    return tmp_path / "out"


def test_every_stage_leaves_its_numbers_whatever_becomes_of_those_before(
    out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = {"links": 4.5, "smoke": 4.5}
    changed = [replace(stage, seconds=short.get(stage.name, 30)) for stage in stages.STAGES]
    monkeypatch.setattr(stages, "STAGES", tuple(changed))
    monkeypatch.setattr("benchmarks.gpu.__main__.LEAST_SECONDS", 1.0)
    before = signal.getsignal(signal.SIGTERM)
    assert main(["--seconds", "100"], through="pretended", remark="not a GPU") == 1
    signal.signal(signal.SIGTERM, before)
    folder = unpacked(out, tmp_path)
    found = lines_of(folder, [stage.name for stage in stages.STAGES])
    assert list(found) == [stage.name for stage in stages.STAGES]
    numbers = {name: [line["name"] for line in lines if "value" in line] for name, lines in found.items()}
    cut = {"calls", "links", "probe", "smoke"}
    assert numbers == {name: ["before"] if name in cut else ["before", "after"] for name in found}
    ended = {name: lines[-1]["ended"] for name, lines in found.items()}
    assert ended["calls"] == "ended with status -9" and ended["probe"] == "ended with status 1"
    assert ended["links"] == ended["smoke"] == "cut off: it took longer than 4 s"
    assert all(ended[name] == COMPLETE for name in found.keys() - cut)
    assert found["probe"][-1]["traceback"].endswith("the first of " + "many " * 100 + "words\n")
    assert "KeyboardInterrupt" in found["smoke"][-1]["traceback"], "what is interrupted says where it was"
    assert "Fatal Python error: Aborted" in found["links"][-1]["traceback"], "so does what ignores interrupts"
    for ending in (".md", ".html"):
        text = (out / f"gpu-RTX-1-2-2000-01-01{ending}").read_text()
        assert "0.50" in text and "not a GPU" in text and "many words" in text
    places = [place for lines in found.values() for place in lines[0]["text"].split()]
    assert len(places) == 3 * len(found) and all(Path(place).is_relative_to(tmp_path / "scratch") for place in places)
    assert not list((tmp_path / "scratch").iterdir()), "what is temporary is gone"
    names = sorted(path.name for path in out.iterdir())
    assert names == [f"{folder.name}{ending}" for ending in (".html", ".md", ".tgz")], "few files, whatever was run"
    assert not list((tmp_path / "home").iterdir())


def unpacked(out: Path, where: Path) -> Path:
    """The folder of numbers that a run has left as one file."""
    (packed,) = out.glob("*.tgz")
    with tarfile.open(packed) as archive:
        archive.extractall(where, filter="data")
    return where / packed.stem


def test_some_stages_run_again_and_the_others_keep_their_numbers(out: Path, tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    assert main(["--stages", "peers,facts"], through="pretended") == 0
    first = (unpacked(out, tmp_path) / "facts.jsonl").stat().st_mtime_ns
    assert main(["--stages", "peers"], through="pretended") == 0
    assert main(["--stages", "largest", "--seconds", "1"], through="pretended") == 1
    signal.signal(signal.SIGTERM, before)
    folder = unpacked(out, tmp_path)
    assert sorted(path.name for path in folder.glob("*.jsonl")) == ["facts.jsonl", "largest.jsonl", "peers.jsonl"]
    assert (folder / "facts.jsonl").stat().st_mtime_ns == first
    assert lines_of(folder, ["largest"])["largest"][-1]["ended"] == "not begun: no time was left"
    assert len(lines_of(folder, ["peers"])["peers"]) == 4
    assert main(["--stages", "fact"]) == 2


def test_who_ends_the_run_ends_the_stage_that_is_under_way(out: Path, tmp_path: Path) -> None:
    """By SIGTERM, as `timeout` and batch systems do."""
    code = "import sys; from benchmarks.gpu.__main__ import main; "
    code += "sys.exit(main(['--stages', 'resident'], through='pretended'))"
    path = os.pathsep.join((str(processes.ROOT), os.environ["PYTHONPATH"]))
    process = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "RESIDENT": "3", "PYTHONPATH": path})
    while not list((tmp_path / "scratch").glob("*/*/resident.jsonl")):
        time.sleep(0.05)
    process.terminate()
    assert process.wait(30) == 1
    time.sleep(3.5)
    assert not (tmp_path / "home" / "outlived").exists()
    assert not list((tmp_path / "scratch").iterdir())


def test_all_stages_have_nine_minutes_and_a_dry_run_says_how_many_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--dry-run"]) == 0
    said = capsys.readouterr().out
    assert all(f"\n{stage.name} " in said and stage.about in said for stage in stages.STAGES)
    assert sum(stage.seconds + processes.end_seconds() for stage in stages.STAGES) <= stages.TOTAL_SECONDS == 540


def test_every_stage_has_the_time_that_it_took_on_a_gpu() -> None:
    """One that had ten seconds less two ends was over before torch was imported."""
    recorded = processes.ROOT / "benchmarks/results/gpu-NVIDIA-H100-80GB-HBM3-2026-11-26"
    for stage in stages.STAGES:
        *_, last = lines_of(recorded, [stage.name])[stage.name]
        if (
            last.get("ended") == COMPLETE and not stage.stretches and stage.name != "streamed"
        ):  # whose rows are others now
            assert stage.seconds >= 1.05 * last["at"], stage.name


def test_a_failure_ends_its_measurement_and_a_dead_device_the_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    notes = Notes(tmp_path, "calls", 60)
    assert notes.attempt("bad", lambda: 1 // 0) is None
    assert notes.attempt("good", lambda: 7) == 7
    assert notes.attempt("long", lambda: 7, needs=61) is None

    def dead() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", dead)
    with pytest.raises(SystemExit):
        notes.attempt("worse", lambda: 1 // 0)
    lines = lines_of(tmp_path, ["calls"])["calls"]
    assert [next(key for key in ("failed", "skipped", "ended") if key in line) for line in lines] == [
        "failed",
        "skipped",
        "failed",
        "ended",
    ]
    assert lines[0]["traceback"].startswith("Traceback") and "1 // 0" in lines[0]["traceback"]
    assert 'after "worse": RuntimeError: CUDA error' in lines[-1]["ended"]


def test_the_page_shows_each_number_beside_its_ceiling_and_its_plan(tmp_path: Path) -> None:
    notes = Notes(tmp_path / "gpu", "links", 60)
    (tmp_path / "gpu").mkdir()
    (tmp_path / "gpu" / "machine.json").write_text(json.dumps({"GPU": "a <GPU>", "date": "today"}))
    notes.number("up", 40.0, "GB/s", ceiling=50.0)
    notes.number("step", 200.0, "ms", ceiling=150.0, planned=180.0, faults=3)
    notes.number("step", 100.0, "ms", ceiling=50.0, planned=110.0, faults=0, says="a | b")
    append(tmp_path / "gpu", {"stage": "links", "ended": COMPLETE})
    page.write(tmp_path / "gpu")
    text = (tmp_path / "gpu.md").read_text()
    assert "| up | 40 GB/s | 50 | 0.80 | - | - |  |" in text
    assert "| step | 100 ms | 50 | 0.50 | 110 | +10 % | faults 0, says a \\| b |" in text and "| step | 200" not in text
    assert "<h1>a &lt;GPU&gt;, today</h1>" in (tmp_path / "gpu.html").read_text()


def test_a_tenth_of_the_copies_holds_the_largest_weight() -> None:
    """A size that no run here has: a budget below the largest chunk would be refused on the GPU, minutes later."""
    sizes = sizes_of(lambda: Llama(4))
    assert 0.1 * sum(sizes) > 1.2 * max(sizes)


ANSWERS = """
import json, sys, time
name = sys.argv[sys.argv.index("--peer") + 1]
for at, line in enumerate(sys.stdin):
    if name == "deepspeed": print(json.dumps({"failed": "no | compiler"}), flush=True); continue
    if name == "torchao": sys.exit(3)
    if name == "fsdp2" and at == 2: time.sleep(60)
    step = {"wall": 2.0, "cpu": 3.0 if name == "plain" else 6.0, "thread": 1.0, "loss": 0.25, "host_bytes": 1 << 30}
    print(json.dumps({"built": True} if line == "build\\n" else step), flush=True)
"""


def test_peers_take_turns_and_one_that_fails_or_hangs_leaves_the_others_their_numbers() -> None:
    told: list[tuple[int, int]] = []
    names = ["plain", "hetmem-host", "fsdp2", "deepspeed", "torchao"]
    program = [sys.executable, "-c", ANSWERS]

    def tell(found: list[peers.Peer]) -> None:
        told.append((sum(peer.counts for peer in found), sum(peer.process.poll() is None for peer in found)))

    found = peers.compare(names, peers.Shape(), 2, 20.0, tell, program, patience=1.0)
    assert told == [(0, 3), (0, 2), (2, 2), (2, 2)], "what hangs does not go on beside the others"
    assert [len(peer.steps) for peer in found] == [4, 4, 1, 0, 0]
    table = peers.table(found)
    assert table[2].startswith("| plain torch, all on the device | 1.00 | 1.00 to 1.00 | 1.00 | 1.00 | 1.00 GiB | -")
    assert " | 2.00 | 2.00 to 2.00 | 1.00 | 1.00 | " in table[3]
    assert [row.split(" | ")[1] for row in table[4:7]] == ["no answer in 1 s", "no \\| compiler", "it ended"]


def test_tests_count_as_far_as_they_came_and_what_they_said_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "scratch" / "tmp"))
    monkeypatch.setattr(processes, "GRACE_SECONDS", 0.5)
    monkeypatch.setattr(suites, "LEAST_SECONDS", 1.0)
    notes = Notes(tmp_path, "tests", 60)
    said = "t.py::a PASSED\nt.py::b[x y] FAILED [ 50%]\nt.py::c PASSED\nE   Error: 7 != 8\nFAILED t.py::b[x y]\n"
    for ending in ("import sys; sys.exit(1)", "import time; time.sleep(60)"):
        suites.run(notes, "t.py", [sys.executable, "-c", f"print({said!r}, flush=True); {ending}"], 4.5)
    lines = lines_of(tmp_path, ["tests"])["tests"]
    numbers = [(line["value"], line["details"]["failed"]) for line in lines if "value" in line]
    assert numbers == [(2, 1), (2, 1)]
    failures = [line for line in lines if "failed" in line]
    assert [line["failed"] for line in failures] == ["exit status 1", "cut off: longer than 4 s"]
    assert all(line["traceback"].startswith(said) for line in failures)


@pytest.mark.nightly
def test_peers_lose_what_plain_torch_does() -> None:
    shape = peers.Shape(width=32, depth=2, vocabulary=64, batch=2, context=8)
    found = peers.compare(["plain", "hetmem-resident", "hetmem-overlap", "fsdp2"], shape, 1, 300.0)
    losses = [[step["loss"] for step in peer.steps] for peer in found]
    assert len(losses[0]) == 3 and all(one == losses[0] for one in losses[1:])


def test_without_a_gpu_it_says_so_in_one_line_and_writes_nothing(out: Path, forks: Forks) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    ended = forks.run("import runpy; runpy.run_module('benchmarks.gpu', {}, '__main__')", environment={"OUT": str(out)})
    assert ended.returncode == 1 and not ended.stdout
    assert ended.stderr == f"{sys.executable} sees no GPU through torch: nothing was measured\n"
    assert not list(out.iterdir())


@pytest.mark.nightly
@pytest.mark.skipif(GPP is None, reason="g++ is not installed")
@pytest.mark.parametrize("stage", ["calls", "smoke", "streamed"])
def test_stages_run_on_a_device_that_stands_for_a_gpu(stage: str, tmp_path: Path) -> None:
    environment: dict[str, Any] = {**os.environ, "OUT": str(tmp_path), "PYTHONPATH": str(processes.ROOT)}
    command = [sys.executable, "-m", "tests.faked_driver", "--stages", stage]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    (folder,) = tmp_path.glob("gpu-*/")
    assert ended.returncode == 0, (folder / f"{stage}.jsonl").read_text()
