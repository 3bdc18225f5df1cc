"""Runs checks, each in a process of its own, so that a kernel that crashes costs one of them; under ASan on request.

As a program: standard input is a JSON list of jobs, standard output a JSON object of what became of each.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tests.cuda.kernel_checks import CHECKS
from tests.cuda.shim import GPP, ROOT, ShimBackend
from tests.cuda.vectors import Place

PASSED = "passed"


class Job(NamedTuple):
    name: str
    libraries: dict[str, str]  # path by source
    check: str
    exact: bool  # buffers without margins


def run(names: Mapping[str, tuple[Mapping[str, Path], str]], sanitised: bool) -> dict[str, str]:
    """By name, what becomes of a check on libraries, threads upwards and, if not `sanitised`, downwards.

    PASSED, or the end of what the process printed. `sanitised`: the libraries were built for it.
    """
    jobs = [
        Job(name, {source: str(path) for source, path in libraries.items()}, check, sanitised)
        for name, (libraries, check) in names.items()
    ]
    environment = dict(os.environ)
    if sanitised:
        find = [GPP or "g++", "-print-file-name=libasan.so"]
        environment["LD_PRELOAD"] = subprocess.run(find, check=True, capture_output=True, text=True).stdout.strip()
        environment["ASAN_OPTIONS"] = "detect_leaks=0"
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-m", "tests.cuda.isolated"]
    done = subprocess.run(command, input=json.dumps(jobs), env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    outcome: dict[str, str] = json.loads(done.stdout)
    return outcome


def main() -> None:
    torch.set_num_threads(1)  # a fork has none of its parent's other threads
    jobs: list[list[Any]] = json.load(sys.stdin)
    print(json.dumps({given.name: _in_a_fork(given) for given in (Job(*fields) for fields in jobs)}))


def _in_a_fork(given: Job) -> str:
    with tempfile.TemporaryFile() as output:
        child = os.fork()
        if child == 0:
            _run_and_exit(given, output.fileno())
        _, status = os.waitpid(child, 0)
        output.seek(0)
        return PASSED if status == 0 else output.read().decode(errors="replace")[-2000:] or f"status {status}"


def _run_and_exit(given: Job, output: int) -> None:
    os.dup2(output, 1)
    os.dup2(output, 2)
    status = 1
    try:
        libraries = {source: Path(path) for source, path in given.libraries.items()}
        for downwards in (False,) if given.exact else (False, True):  # no access depends on the order
            CHECKS[given.check](Place(ShimBackend(libraries, downwards), exact=given.exact, thorough=False))
        status = 0
    except BaseException as error:
        print(type(error).__name__, error, flush=True)
    finally:
        os._exit(status)


if __name__ == "__main__":
    main()
