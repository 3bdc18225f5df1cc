"""Processes of their own for what may fail, or hang, on a GPU, and the tests that need one.

It knows how long each may take; not what they measure.
"""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
TESTS = {
    "tests/gpu/test_assumptions.py": 40,
    "tests/cuda/test_on_gpu.py": 60,
    "tests/gpu/test_moves.py": 50,
    "tests/gpu/test_managed.py": 110,
}
"""Seconds that each may take. One process each: after an illegal access a process can do nothing more on a GPU."""
SANITIZER = "compute-sanitizer"
_SANITIZER_SECONDS = 90
_TOOLKITS = ("/usr/local/cuda/bin", "/opt/cuda/bin")
_LOOK_SECONDS = 5.0
_STUCK_SECONDS = 25  # after so many of one test pytest says where each thread is
_GRACE_SECONDS = 5.0  # what is interrupted says what it found; what hangs in the driver says where, and is killed


def tested(path: str, seconds: float) -> dict[str, Any]:
    """The tests of one file; an interrupted pytest says what had passed until then."""
    options = ["-m", "gpu", "-W", "default", "-p", "no:cacheprovider", "-v", "--tb=short", "-rfE"]
    options += ["-o", f"faulthandler_timeout={_STUCK_SECONDS}"]
    code, out, errors = in_a_process(["-m", "pytest", *options, path], seconds)
    lines = [line for line in out.splitlines() if line.strip()]
    result: dict[str, Any] = {"pytest": lines[-1] if lines else ""}
    if code is None:
        result["cut off"] = f"longer than {seconds:.0f} s"
        result["said"] = f"{shortened(out)}{shortened(errors)}"
    elif code:
        result["failed"] = f"{shortened(out)}{shortened(errors)}"
    return result


def sanitized(seconds: float) -> dict[str, Any]:
    """What NVIDIA's checker of memory accesses finds in the kernels, where it is installed: torch brings none."""
    toolkits = [f"{os.environ[name]}/bin" for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ]
    checker = shutil.which(SANITIZER, path=os.pathsep.join([os.environ.get("PATH", ""), *toolkits, *_TOOLKITS]))
    if checker is None:
        return {"skipped": f"{SANITIZER} is not on this machine: it comes with the CUDA toolkit"}
    seconds = min(seconds, _SANITIZER_SECONDS)
    program = [checker, "--tool=memcheck", "--report-api-errors=no", "--error-exitcode=86", sys.executable]
    options = ["-m", "gpu", "-W", "default", "-p", "no:cacheprovider", "--tb=short", "-k", "test_equals_torch"]
    code, out, errors = in_a_process(["-m", "pytest", *options, "tests/cuda/test_on_gpu.py"], seconds, program=program)
    result: dict[str, Any] = {"said": shortened(out)[-1500:]}
    if code is None:
        result["cut off"] = f"longer than {seconds:.0f} s"
    elif code:
        result["failed"] = f"exit status {code}\n{shortened(out)}{shortened(errors)}"
    return result


def shortened(text: str) -> str:
    """How `text` begins, where a crash is told, and how it ends, where an error is."""
    lines = [line for line in text.splitlines(keepends=True) if not line.startswith("Extension modules:")]
    text = "".join(lines)
    return text if len(text) <= 5000 else f"{text[:2000]}\n…\n{text[-3000:]}"


def _prepare() -> None:
    """A shell's jobs in the background ignore interrupts, and so would all that these start. What is aborted leaves no
    file of its memory, which may be all of the machine's."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _environment() -> dict[str, str]:
    """This hetmem before any other; torch may lie wherever the user's own path leads. A crash says where it was."""
    path = os.environ.get("PYTHONPATH")
    return {
        **os.environ,
        "PYTHONPATH": f"{ROOT}{os.pathsep}{path}" if path else str(ROOT),
        "PYTHONFAULTHANDLER": "1",
    }


def in_a_process(
    command: list[str],
    seconds: float,
    seen: Callable[[str], None] = lambda _: None,
    program: Sequence[str] = (sys.executable,),
) -> tuple[int | None, str, str]:
    """Exit status, output and errors of Python, or `program`, with `command`; the status is None if it took longer and
    was ended. `seen` is called now and then with the output so far: whoever ends this process ends the other one."""
    with (
        tempfile.TemporaryFile("w+", errors="replace") as out,
        tempfile.TemporaryFile("w+", errors="replace") as errors,
    ):
        process = subprocess.Popen(
            [*program, *command],
            stdout=out,
            stderr=errors,
            cwd=ROOT,
            env=_environment(),
            start_new_session=True,
            preexec_fn=_prepare,
        )
        code: int | None = None
        try:
            until = time.monotonic() + max(1.0, seconds - 2 * _GRACE_SECONDS)
            while code is None and (left := until - time.monotonic()) > 0:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    code = process.wait(min(_LOOK_SECONDS, left))
                said = os.pread(out.fileno(), os.fstat(out.fileno()).st_size, 0)  # its place in the file is its own
                seen(said.decode(errors="replace"))
            for ending in (signal.SIGINT, signal.SIGABRT, signal.SIGKILL) if code is None else ():
                with contextlib.suppress(subprocess.TimeoutExpired, ProcessLookupError):
                    os.killpg(process.pid, ending)
                    process.wait(_GRACE_SECONDS)
                    break
        finally:
            if process.poll() is None:  # whoever waits here was interrupted
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        for stream in (out, errors):
            stream.seek(0)
        return code, out.read(), errors.read()
