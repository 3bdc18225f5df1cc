"""The same GPT trained by plain torch, hetmem, FSDP2, DeepSpeed and torchao, side by side in one run.

    OMP_WAIT_POLICY=passive python -m benchmarks.peers [--only plain,hetmem-host] [--rounds 7] [--write FILE.md]

Each trains in a process of its own; rounds are interleaved, and only one process is at work at a time. A round is one
step of training. "CPU" is the time that all threads of the process took of the cores, "thread" that of the thread that
trains; on a machine that others use too these are the measures, and wall times are not. Ratios are of medians within
the run. Without a GPU this compares what the libraries themselves cost: the model computes in float32 on the CPU, and
hetmem's device is the simulated one, which lies in host memory as all else does. On a GPU take `--precision bfloat16`.

The C library keeps freed blocks alike in all processes, unless the environment says otherwise: `hetmem.manage` has
blocks of 128 KiB or more unmapped as they are freed, so that a budget bounds the process of a simulated device, which
costs a page fault for each page of each activation. On a GPU activations are in no such memory.

DeepSpeed and torchao take part where they are installed, and a peer that cannot run here says why.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import platform
import re
import select
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.trainers import PEERS, Shape, Step

ROOT = Path(__file__).parents[1]
WARM_UP = 2
MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(512 << 20)}
"""The first is where glibc's own threshold ends up in a process that frees larger blocks."""
OTHERS = 0.1
"""How much of the cores others may use where wall times are told."""


# ---- one of them, in its process -------------------------------------------------------------------------------


def serve(name: str, shape: Shape) -> None:
    """Answer each line of standard input ("build", "step") with one of JSON; what libraries print goes to the log."""
    begun = time.monotonic()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    step: Step = torch.zeros  # replaced by "build"
    for line in sys.stdin:
        try:
            if line.strip() == "build":
                step = PEERS[name][1](shape)
                answer: dict[str, Any] = {"built": time.monotonic() - begun}
            else:
                answer = _measured(step)
        except Exception as error:
            traceback.print_exc()
            answer = {"failed": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
        answers.write(json.dumps(answer) + "\n")


def _measured(step: Step) -> dict[str, Any]:
    busy = _busy_seconds()
    wall, cpu, thread = time.perf_counter(), time.process_time(), time.thread_time()
    loss = float(step())
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    answer = {
        "wall": time.perf_counter() - wall,
        "cpu": time.process_time() - cpu,
        "thread": time.thread_time() - thread,
        "loss": loss,
        "host_bytes": _peak_bytes(),
    }
    answer["others"] = max(_busy_seconds() - busy - answer["cpu"], 0.0)
    if torch.cuda.is_available():
        answer["device_bytes"] = torch.cuda.memory_stats().get("allocated_bytes.all.peak", 0)
    return answer


def _busy_seconds() -> float:
    """What all programs of the machine have used of its cores so far."""
    times = psutil.cpu_times()
    return sum(times) - times.idle - times.iowait - times.guest - times.guest_nice


def _peak_bytes() -> int:
    """The most memory that this process has had at a time."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


# ---- all of them ------------------------------------------------------------------------------------------------


@dataclass
class Peer:
    """One process, and what it has answered."""

    name: str
    process: subprocess.Popen[str]
    log: Path
    steps: list[dict[str, Any]] = field(default_factory=list)
    failed: str = ""
    built: float = 0.0
    """Seconds that it took to import and to build."""

    def send(self, what: str) -> None:
        """Ask for `what`, and do not wait for the answer."""
        if self.failed:
            return
        try:
            assert self.process.stdin is not None
            self.process.stdin.write(what + "\n")
            self.process.stdin.flush()
        except OSError as error:
            self._fail(f"it ended ({error})")

    def answer(self, seconds: float) -> dict[str, Any]:
        """The answer to what was sent; `failed` if there is none within `seconds`, and then the process is ended."""
        if self.failed:
            return {}
        assert self.process.stdout is not None
        there, _, _ = select.select([self.process.stdout], [], [], max(seconds, 0.1))
        line = self.process.stdout.readline() if there else ""
        try:
            answer: dict[str, Any] = json.loads(line) if line else {}
        except ValueError as error:
            answer = {"failed": f"it ended ({error})"}
        if failed := answer.pop("failed", "" if line else "it ended" if there else f"no answer in {seconds:.0f} s"):
            self._fail(failed)
        return answer

    def _fail(self, why: str) -> None:
        self.failed = why
        self.process.kill()
        self.process.wait()

    def median(self, what: str) -> float:
        """Of the rounds that count."""
        return statistics.median(step[what] for step in self.steps[WARM_UP:])

    @property
    def counts(self) -> bool:
        """Whether it has rounds that count."""
        return len(self.steps) > WARM_UP


@contextlib.contextmanager
def started(names: list[str], shape: Shape, directory: Path, program: Sequence[str]) -> Iterator[list[Peer]]:
    """A process of each, which builds nothing yet. They are gone behind the context."""
    peers = []
    for name in names:
        log = directory / f"{name}.log"
        command = [*program, "--peer", name, "--shape", json.dumps(vars(shape))]
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        with log.open("w") as errors:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                cwd=directory,
                env={**MALLOC, **os.environ, "PYTHONPATH": path, "OMP_WAIT_POLICY": "passive"},
            )
        peers.append(Peer(name, process, log))
    try:
        yield peers
    finally:
        for peer in peers:
            peer.process.kill()
            peer.process.wait()
            for pipe in (peer.process.stdin, peer.process.stdout):
                with contextlib.suppress(OSError):
                    pipe.close()  # type: ignore[union-attr]


def compare(
    names: list[str],
    shape: Shape,
    rounds: int,
    seconds: float,
    tell: Callable[[list[Peer]], None] = lambda _: None,
    program: Sequence[str] = (sys.executable, "-m", "benchmarks.peers"),
    patience: float = 600.0,
) -> list[Peer]:
    """Train with all of `names`, which have `seconds` in all; `tell` hears after each round what is known. `program`:
    what starts this module. `patience`: seconds that one may take for a step."""
    until = time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as directory:
        shape = Shape(**{**vars(shape), "directory": directory})
        with started(names, shape, Path(directory), program) as peers:
            for peer in peers:  # side by side, as each takes many seconds to import and to fill its weights
                peer.send("build")
            built_by = time.monotonic() + seconds / 2
            for peer in peers:
                peer.built = peer.answer(built_by - time.monotonic()).get("built", 0.0)
            for _ in range(WARM_UP + rounds):
                for peer in peers:
                    if until <= time.monotonic():
                        break
                    peer.send("step")
                    if answer := peer.answer(min(patience, until - time.monotonic())):
                        peer.steps.append(answer)
                tell(peers)
            for peer in peers:
                if peer.failed:
                    print(f"{peer.name}: {peer.failed}\n{peer.log.read_text()[-3000:]}", file=sys.stderr)
    return peers


def used_by_others(peers: list[Peer]) -> float:
    """The share of the cores that other programs used during the rounds that count."""
    steps = [step for peer in peers for step in peer.steps[WARM_UP:]]
    seconds = sum(step["wall"] for step in steps) * len(os.sched_getaffinity(0))
    return sum(step["others"] for step in steps) / seconds if seconds else 0.0


def table(peers: list[Peer], *, quiet: bool = True) -> list[str]:
    """Markdown: ratios to plain torch, where that is among them. Wall times only of a `quiet` machine."""
    base = next((peer for peer in peers if peer.name == "plain" and peer.counts), None)
    lines = ["| trained by | CPU | CPU, each round | thread | wall | peak of the process | of the device | last loss |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    for peer in peers:
        about = PEERS[peer.name][0]
        if not peer.counts:
            why = (peer.failed or "no time was left").replace("|", "\\|")
            lines.append(f"| {about} | {why} | | | | | | |")
            continue
        each = [step["cpu"] / _of(base, at, "cpu") for at, step in enumerate(peer.steps) if at >= WARM_UP]
        ratios = [f"{peer.median(what) / (base.median(what) if base else 1):.2f}" for what in ("cpu", "thread", "wall")]
        ratios[2] = ratios[2] if quiet else "-"
        last = peer.steps[-1]
        device = f"{last['device_bytes'] / (1 << 30):.2f} GiB" if "device_bytes" in last else "-"
        lines.append(
            f"| {about} | {ratios[0]} | {min(each):.2f} to {max(each):.2f} | {ratios[1]} | {ratios[2]} "
            f"| {last['host_bytes'] / (1 << 30):.2f} GiB | {device} | {last['loss']:.6f} |"
        )
    if base is not None:
        times = (("cpu", "CPU"), ("wall", "wall")) if quiet else (("cpu", "CPU"),)
        figures = ", ".join(f"{base.median(what):.3f} s {name}" for what, name in times)
        lines += ["", f"Plain torch: {figures} a step (medians of {len(base.steps) - WARM_UP})."]
    return lines


def _of(base: Peer | None, at: int, what: str) -> float:
    return float(base.steps[at][what]) if base is not None and at < len(base.steps) else 1.0


def machine() -> str:
    """Processor, cores, load, versions."""
    models = [
        line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    versions = []
    for name in ("torch", "deepspeed", "torchao"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions.append(f"{name} {importlib.metadata.version(name)}")
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    cores = len(os.sched_getaffinity(0))
    processor = models[0] if models else platform.machine()
    return f"{cores} cores of {processor}, {device}, {', '.join(versions)}, load {os.getloadavg()[0]:.1f}"


def main() -> int:
    """Compare, and print the table or write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PEERS), help="names, separated by commas")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=1200.0, help="for all")
    parser.add_argument("--write", type=Path, help="a file for the table")
    for name, value in vars(Shape()).items():
        if name != "directory":
            parser.add_argument(f"--{name}", type=type(value), default=value)
    parser.add_argument("--peer", help=argparse.SUPPRESS)
    parser.add_argument("--shape", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peer:
        serve(options.peer, Shape(**json.loads(options.shape)))
        return 0
    shape = Shape(**{name: getattr(options, name) for name in vars(Shape()) if name != "directory"})
    text = page(shape, options, machine(), compare(options.only.split(","), shape, options.rounds, options.seconds))
    print(text)
    if options.write:
        options.write.write_text(text)
    return 0 if re.search(r"\| \d", text) else 1


def page(shape: Shape, options: argparse.Namespace, before: str, peers: list[Peer]) -> str:
    """The table with what it is of. `before`: the machine, as it was then."""
    others = used_by_others(peers)
    rows = [
        "# The same GPT, trained by plain torch, hetmem and others",
        "",
        f"{date.today()}: {before} before, {others:.0%} of the cores used by others while it ran. A GPT of "
        f"{shape.depth} blocks, width {shape.width}, batch {shape.batch} x {shape.context}, {shape.precision}: "
        f"`python -m benchmarks.peers --rounds {options.rounds}`, one process each, rounds interleaved, one at work "
        "at a time. Ratios are to plain torch in this run.",
        "",
        *table(peers, quiet=others < OTHERS),
        "",
        "CPU is the time of all threads of a process, thread that of the one that trains: medians of rounds. Wall "
        f"times are left out where others use more than {OTHERS:.0%} of the cores. Peaks include the building. "
        "hetmem's simulated device lies in host memory: what is resident there counts as the process's, as all else. "
        "`malloc` keeps freed blocks alike in all of them.",
        "",
    ]
    return "\n".join(rows)


if __name__ == "__main__":
    sys.exit(main())
