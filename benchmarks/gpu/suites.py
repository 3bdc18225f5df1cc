"""The tests that need a GPU, a process for each file: after an illegal access a process can do nothing more there."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
from pathlib import Path

from benchmarks.gpu import processes
from benchmarks.gpu.notes import Notes

MANAGED = "tests/gpu/test_managed.py"
FIRST = "fits_stays or late or homes_that_move"
RUNS = (
    (MANAGED, FIRST, 60),
    ("tests/gpu/test_assumptions.py", "", 40),
    ("tests/cuda/test_on_gpu.py", "", 60),
    ("tests/gpu/test_moves.py", "", 50),
    (MANAGED, f"not ({FIRST})", 110),
)
"""File, which of its tests, and the seconds that these may take; those that say most first."""
_SOME = "explained or homes_that_move or stay_on_the_gpu_for"
LEAST_SECONDS = 10.0
"""With less no file begins: importing torch takes most of it."""
SANITIZER = "compute-sanitizer"
_TOOLKITS = ("/usr/local/cuda/bin", "/opt/cuda/bin")
_OPTIONS = "-m gpu -W default -p no:cacheprovider -v --tb=short -rfE -o faulthandler_timeout=25".split()


def suites(notes: Notes) -> None:
    """Every file, then the kernels' tests under NVIDIA's checker of memory accesses, where that is installed."""
    if importlib.util.find_spec("pytest") is None:
        notes.text("tests", "not run: pytest is not installed")
        return
    pytest = notes.program("pytest")
    for path, which, seconds in RUNS:
        which = " and ".join(f"({each})" for each in (which, _SOME if notes.small else "") if each)
        limit = 10 * seconds if notes.small else seconds
        name = f"{path}, {which}" if which else path
        run(notes, name, [*pytest, *_OPTIONS, *(["-k", which] if which else []), str(processes.ROOT / path)], limit)
    checker = find_sanitizer()
    if checker is None:
        notes.text(SANITIZER, "not on this machine: it comes with the CUDA toolkit")
        return
    command = [checker, "--tool=memcheck", "--report-api-errors=no", "--error-exitcode=86", *pytest, *_OPTIONS]
    run(notes, SANITIZER, [*command, "-k", "test_equals_torch", str(processes.ROOT / "tests/cuda/test_on_gpu.py")], 90)


def run(notes: Notes, name: str, command: list[str], seconds: float) -> None:
    """Note how many tests passed and failed; all that pytest said of failures is kept."""
    limit = min(seconds, notes.left() - processes.end_seconds() - 1)
    if limit < LEAST_SECONDS:
        notes.line(name=name, skipped=f"{notes.left():.0f} s were left")
        return
    log = notes.folder / f"tests-{re.sub(r'[^a-z]+', '-', name)}.log"
    scratch = Path(os.environ["TMPDIR"]).parent
    code = processes.run(
        [*command, f"--rootdir={processes.ROOT}", f"-c{processes.ROOT / 'pyproject.toml'}"], limit, log, scratch
    )
    said = log.read_text(errors="replace")
    words = re.findall(r"^\S+::.* (PASSED|FAILED|ERROR|SKIPPED)", said, re.MULTILINE)  # as far as it came
    others = {word.lower(): words.count(word) for word in ("FAILED", "ERROR", "SKIPPED")}
    notes.number(f"{name}: passed", words.count("PASSED"), "tests", **others)
    if code not in (0, 5):  # 5: none was chosen
        notes.failures += 1
        why = f"cut off: longer than {limit:.0f} s" if code is None else f"exit status {code}"
        notes.line(name=name, failed=why, traceback=said[:30000])
    else:
        log.unlink()


def find_sanitizer() -> str | None:
    """The path of the checker."""
    toolkits = [f"{os.environ[name]}/bin" for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ]
    return shutil.which(SANITIZER, path=os.pathsep.join([os.environ.get("PATH", ""), *toolkits, *_TOOLKITS]))
