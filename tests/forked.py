"""Programs in processes of their own that need not import torch again: forks of one that has done nothing else.

As a program it is that process: a line on standard input is a job, a line on standard output how it ended. It has one
thread and no part of hetmem, so that a fork is as clean as a new interpreter with torch in it. A fork of it that has
imported more may do the same.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

ROOT = Path(__file__).parent.parent


class Ended(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


class Forks:
    """Runs programs one by one."""

    def __init__(self, jobs: IO[str], answers: IO[str]) -> None:
        self._jobs, self._answers = jobs, answers

    @classmethod
    @contextmanager
    def begun(cls) -> Iterator[Forks]:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "tests.forked"]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, env=environment, text=True
        )
        assert process.stdin is not None and process.stdout is not None
        with process:
            yield cls(process.stdin, process.stdout)
            process.kill()  # a fork of this process, such as a data loader's worker, may hold its input open

    @contextmanager
    def that_import(self, *modules: str) -> Iterator[Forks]:
        """Forks that find these modules imported, too."""
        with tempfile.TemporaryDirectory() as folder:
            for name in ("jobs", "answers"):
                os.mkfifo(os.path.join(folder, name))
            process = self._ask({"modules": modules, "folder": folder})
            with open(os.path.join(folder, "jobs"), "w") as jobs, open(os.path.join(folder, "answers")) as answers:
                yield Forks(jobs, answers)
            self._ask({"wait for": process})

    def run(
        self, program: str, *arguments: str, environment: Mapping[str, str] | None = None, seconds: float = 300.0
    ) -> Ended:
        """`program` to the end of its interpreter. One that takes longer says where it hangs, and fails."""
        with tempfile.TemporaryDirectory() as folder:
            job = {
                "program": program,
                "arguments": arguments,
                "environment": dict(environment or {}),
                "seconds": seconds,
                "folder": folder,
            }
            status = self._ask(job)
            texts = [(Path(folder) / name).read_text(errors="replace") for name in ("stdout", "stderr")]
        return Ended(status, *texts)

    def _ask(self, job: Mapping[str, object]) -> int:
        print(json.dumps(job), file=self._jobs, flush=True)
        answer = self._answers.readline()
        assert answer, "the process that forks has ended"
        return int(answer)


@contextmanager
def nothing_collected() -> Iterator[None]:
    """Have forks that are made within leave to their parent what earlier tests have dropped: a part of it, such as a
    process group, ends only where its threads are, and a fork that collects it waits for ever."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def end_in_a_fork(act: Callable[[], object]) -> int:
    """How a fork of this very process ends in which `act` runs: 0, 1 if it raises, -n by signal n."""
    with nothing_collected():
        child = os.fork()
        if child == 0:
            status = 1
            try:
                signal.alarm(60)
                act()
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main() -> None:
    """Answer jobs until there are no more. Only a fork returns with one: its program, which is still to run."""
    for line in sys.stdin:
        job = json.loads(line)
        child = job.get("wait for") or os.fork()
        if not child:
            return _import(job) if "modules" in job else _become(job)
        ended = "modules" not in job and os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(ended[1]) if ended else child, flush=True)


def _import(job: Mapping[str, Any]) -> None:
    """Answer jobs from files of its own, with the modules of `job` imported."""
    for descriptor, (name, flags) in enumerate((("jobs", os.O_RDONLY), ("answers", os.O_WRONLY))):
        os.dup2(os.open(os.path.join(job["folder"], name), flags), descriptor)
    for module in job["modules"]:
        importlib.import_module(module)
    _freeze()
    main()


def _become(job: Mapping[str, Any]) -> None:
    """Run the program of `job` as `python -c` does."""
    for descriptor, name in enumerate((os.devnull, "stdout", "stderr")):
        flags = os.O_RDONLY if descriptor == 0 else os.O_WRONLY | os.O_CREAT
        os.dup2(os.open(os.path.join(job["folder"], name), flags), descriptor)
    faulthandler.dump_traceback_later(job["seconds"], exit=True, file=os.dup(2))
    os.environ.update(job["environment"])
    sys.argv = ["-c", *job["arguments"]]
    exec(compile(job["program"], "<string>", "exec"), vars(sys.modules["__main__"]))  # to the end of the interpreter


def _prepare() -> None:
    """Import what takes long and starts no thread."""
    import hypothesis
    import numba
    import numba.extending
    import pytest
    import torch
    import torch._dynamo  # with the first optimizer

    assert all((hypothesis, numba, pytest, torch))
    assert not any(name.partition(".")[0] == "hetmem" for name in sys.modules)
    _freeze()


def _freeze() -> None:
    assert len(os.listdir("/proc/self/task")) == 1, "a fork has none of its parent's other threads"
    gc.freeze()


if __name__ == "__main__":
    _prepare()
    main()
