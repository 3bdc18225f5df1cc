"""Processes of their own for what may fail, or hang, on a GPU: each has its limit, and what it says goes to a file.

It knows what environment they get, so that nothing is written outside of the run's directory; not what they measure.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
GRACE_SECONDS = 2.0
"""What is interrupted says where it was; what hangs in the driver says so when it is aborted, and is killed then. Each
comes behind the limit, which is all for work."""


def environment(scratch: Path) -> dict[str, str]:
    """This hetmem before any other; torch may lie wherever the user's own path leads. All caches and temporary files
    are in `scratch`."""
    theirs = [os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    caches = {
        "TMPDIR": "tmp",
        "XDG_CACHE_HOME": "cache",
        "CUPY_CACHE_DIR": "cache/cupy",
        "CUDA_CACHE_PATH": "cache/cuda",
        "NUMBA_CACHE_DIR": "cache/numba",
        "TORCHINDUCTOR_CACHE_DIR": "cache/inductor",
        "TRITON_CACHE_DIR": "cache/triton",
        "TORCH_EXTENSIONS_DIR": "cache/extensions",
    }
    return {
        **os.environ,
        **{name: str(scratch / folder) for name, folder in caches.items()},
        "PYTHONPATH": os.pathsep.join([str(ROOT), *theirs]),
        "PYTHONFAULTHANDLER": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_WAIT_POLICY": "passive",
    }


def run(command: Sequence[str], seconds: float, log: Path, scratch: Path) -> int | None:
    """The exit status of `command`, None if it took longer than `seconds` (and `end_seconds` to end);
    its output and errors are in `log`. Who ends this process by an exception ends the other one and all it started."""
    for folder in ("tmp", "cache"):
        (scratch / folder).mkdir(parents=True, exist_ok=True)
    with log.open("wb") as said:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            cwd=scratch,
            env=environment(scratch),
            start_new_session=True,
            preexec_fn=_prepare,
        )
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(max(1.0, seconds))
            for ending in (signal.SIGINT, signal.SIGABRT):
                with contextlib.suppress(subprocess.TimeoutExpired, ProcessLookupError):
                    os.killpg(process.pid, ending)
                    process.wait(GRACE_SECONDS)
                    break
            return None
        finally:
            with contextlib.suppress(ProcessLookupError):  # also what it has started and left behind
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):  # one that hangs in the driver cannot even be killed
                process.wait(GRACE_SECONDS)


def _prepare() -> None:
    """A shell's jobs in the background ignore interrupts, and so would all that these start. What is aborted leaves no
    file of its memory, which may be all of the machine's."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def end_seconds() -> float:
    """The most that the end of a process takes which has passed its limit."""
    return 2 * GRACE_SECONDS


def left(until: float) -> float:
    """Seconds until `until`, of `time.monotonic`."""
    return until - time.monotonic()
