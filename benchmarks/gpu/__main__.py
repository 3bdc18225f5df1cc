"""What a GPU shows, in nine minutes: `make gpu`, or

    OUT=DIRECTORY python -m benchmarks.gpu [--stages facts,links] [--seconds 540] [--dry-run]

Each stage runs in a process of its own with its own limit and depends on none before it, so one that fails, or hangs,
takes nothing from the others. After each stage three files are written into the directory that the variable OUT names
(default benchmarks/results): the page `gpu-<name>-<date>.html`, and `.md`, shows each number beside its ceiling and
what the plan foretold, and `.tgz` has them as lines of JSON, a file for each stage, with what it said in `<stage>.log`.
Stages that are not run again keep their numbers of the same day. All else is in a temporary directory (TMPDIR), which
is gone at the end: caches, and homes on NVMe.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.gpu import page, processes
from benchmarks.gpu.notes import COMPLETE, append, lines_of, path_of, without_paths
from benchmarks.gpu.stages import TOTAL_SECONDS, Stage, chosen, described

LEAST_SECONDS = 5.0  # a stage that has less is not begun


def main(words: Sequence[str] | None = None, *, through: str = "", remark: str = "") -> int:
    """Run the stages; 0 if all are complete. `through`: a module that starts each process, for a faked device, of which
    the page says `remark`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", default="", help="names, separated by commas; all by default")
    parser.add_argument("--seconds", type=float, default=TOTAL_SECONDS, help="for all stages together")
    parser.add_argument("--small", action="store_true", help="the least sizes: shows that it runs, measures nothing")
    parser.add_argument("--slow", type=float, default=1.0, help="times the limit of each stage; for a faked device")
    parser.add_argument("--dry-run", action="store_true", help="say what each stage takes, and run none")
    options = parser.parse_args(words)
    until = time.monotonic() + options.seconds
    if options.dry_run:
        print(described())
        return 0
    try:
        stages = [replace(stage, seconds=stage.seconds * options.slow) for stage in chosen(options.stages)]
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the process of a stage is not to outlive us
    out = Path(os.environ.get("OUT") or processes.ROOT / "benchmarks" / "results").resolve()
    scratch = Path(tempfile.mkdtemp(prefix="hetmem-gpu-"))
    try:
        machine = _machine(scratch, through)
        if machine is None:
            print(f"{sys.executable} sees no GPU through torch: nothing was measured", file=sys.stderr)
            return 1
        machine["remark"] = remark
        name = re.sub(r"[^\w.-]+", "-", machine["GPU"])  # "RTX 6000/8000" is a name too
        folder = scratch / f"gpu-{name}-{machine['date']}"
        folder.mkdir()
        if (before := out / f"{folder.name}.tgz").exists():
            with tarfile.open(before) as archive:
                archive.extractall(scratch, filter="data")
        (folder / "machine.json").write_text(json.dumps(machine, indent=2) + "\n")
        more = [*(["small"] if options.small else []), *([f"through={through}"] if through else [])]
        prefix = [sys.executable, "-m", *([through] if through else []), "benchmarks.gpu.stage"]
        with _compiled_beside(scratch):
            words_of = lambda stage, limit: [*prefix, *_words(stage, folder, limit), *more]  # noqa: E731
            return run(stages, until, folder, out, scratch, words_of)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _words(stage: Stage, folder: Path, limit: float) -> list[str]:
    return [stage.name, str(folder), f"{limit:.1f}"]


@contextlib.contextmanager
def _compiled_beside(scratch: Path) -> Iterator[None]:
    """Compile the Adam of DeepSpeed, which takes a minute, where it is installed, beside the first stages."""
    if importlib.util.find_spec("deepspeed") is None:
        yield
        return
    code = "from deepspeed.ops.op_builder import CPUAdamBuilder; CPUAdamBuilder().load()"
    with (scratch / "deepspeed.log").open("wb") as said:
        compiler = subprocess.Popen(
            [sys.executable, "-c", code], stdout=said, stderr=said, env=processes.environment(scratch), cwd=scratch
        )
        try:
            yield
        finally:
            compiler.kill()
            compiler.wait()


def _machine(scratch: Path, through: str) -> dict[str, Any] | None:
    """What another process says of the GPU: one whose driver hangs must not take us along. None without a GPU."""
    scratch.mkdir(parents=True, exist_ok=True)
    answer = scratch / "machine.json"
    answer.unlink(missing_ok=True)
    command = [sys.executable, "-m", *([through] if through else []), "benchmarks.gpu.machine", str(answer)]
    processes.run(command, 60.0, scratch / "machine.log", scratch)
    try:
        found: dict[str, Any] = json.loads(answer.read_text())
    except (OSError, ValueError):
        return None
    return found


def run(stages: Sequence[Stage], until: float, folder: Path, out: Path, scratch: Path, command_of: Any) -> int:
    """Each of `stages` in the process that `command_of(stage, seconds)` starts; `out` is written to after each."""
    for at, stage in enumerate(stages):
        kept = sum(later.seconds + processes.end_seconds() for later in stages[at + 1 :])
        left = processes.left(until) - processes.end_seconds()
        limit = max(left - kept, min(stage.seconds, left)) if stage.stretches else min(stage.seconds, left)
        path_of(folder, stage.name).unlink(missing_ok=True)
        log = folder / f"{stage.name}.log"
        print(f"{stage.name}: at most {limit:.0f} s. {stage.about}", flush=True)
        if limit < LEAST_SECONDS:
            append(folder, {"stage": stage.name, "ended": "not begun: no time was left"})
        else:
            code = processes.run(command_of(stage, limit), limit, log, scratch)
            _end(folder, stage, code, limit, log)
            for said in folder.glob("*.log"):
                said.write_text(without_paths(said.read_text(errors="replace")))
        try:
            page.write(folder, out)
            _pack(folder, out)
        except Exception:  # the numbers are there; the page can be made of them later
            traceback.print_exc()
    found = lines_of(folder, [stage.name for stage in stages])
    print(f"{out / folder.name}.html", flush=True)
    failed = any("failed" in line for lines in found.values() for line in lines)
    complete = all(lines and lines[-1].get("ended") == COMPLETE for lines in found.values())
    return 0 if complete and not failed else 1


def _pack(folder: Path, out: Path) -> None:
    """All of `folder` in one file of `out`: whoever ends us leaves the old one or the new one."""
    new = out / f".{folder.name}.tgz.new"
    with tarfile.open(new, "w:gz") as archive:
        archive.add(folder, folder.name)
    os.replace(new, out / f"{folder.name}.tgz")


def _end(folder: Path, stage: Stage, code: int | None, limit: float, log: Path) -> None:
    """Say in the stage's file how it ended, unless it has done so itself; the whole log of one that died is there."""
    lines = lines_of(folder, [stage.name]).get(stage.name, [])
    if not lines or "ended" not in lines[-1]:
        why = f"cut off: it took longer than {limit:.0f} s" if code is None else f"ended with status {code}"
        said = log.read_text(errors="replace")
        append(folder, {"stage": stage.name, "ended": why, "traceback": _first_traceback(said)}, before="\n")
    if not log.stat().st_size:
        log.unlink()


def _first_traceback(said: str) -> str:
    """From the first error on, as it is; of what has none the end."""
    starts = [said.find(word) for word in ("Traceback (most", "Fatal Python error", "CUDA error") if word in said]
    return said[min(starts) :][:20000] if starts else said[-4000:]


if __name__ == "__main__":
    sys.exit(main())
