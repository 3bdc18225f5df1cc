"""Training with states on NVMe that saves after each step is killed at any moment, again and again, and resumed: what
lies at the path has the bits of a step of training without a break, and nothing piles up."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path

import pytest

from tests.forked import Forks

STEPS = 6
TRAIN = f"""
import os, signal, sys, time
from pathlib import Path

folder, seconds = Path(sys.argv[1]), float(sys.argv[2])
trainer, (wait, go) = os.getpid(), os.pipe()
killer = os.fork() if seconds else 0
if seconds and not killer:
    os.close(go)
    os.read(wait, 1)
    time.sleep(seconds)
    os.kill(trainer, signal.SIGKILL)
    os._exit(0)

import torch
import hetmem
from tests.checkpoint.models import start
from tests.engine.harness import token_batches

torch.set_num_threads(1)
run, path = start(folder / "nvme", "nvme"), folder / "c"
first, began = 0, time.perf_counter()
os.write(go, b"1")
if path.exists():
    run.load(path)
    first = int(run.scheduler.last_epoch)
for number in range(first, {STEPS}):
    run.step(token_batches({STEPS})[number])
    run.save(path, wait=bool(not seconds or sys.argv[3] == "wait"))
    if not seconds:
        (folder / f"step {{number + 1}}").write_bytes(path.read_bytes())
print(first, time.perf_counter() - began)
if seconds:
    os.kill(killer, signal.SIGKILL)
"""


def bits(path: Path) -> str:
    """A digest of all tensors of a checkpoint: weights, states, step counts, the random number generator."""
    data = path.read_bytes()
    return hashlib.sha256(data[8 + int.from_bytes(data[:8], "little") :]).hexdigest()


@pytest.mark.nightly
@pytest.mark.parametrize(("way", "seed"), [("wait", 0), ("wait", 1), ("background", 2), ("background", 3)])
def test_training_that_is_killed_at_any_moment_goes_on_with_the_same_bits(
    way: str, seed: int, forks: Forks, tmp_path: Path
) -> None:
    chance, whole, folder = random.Random(seed), tmp_path / "whole", tmp_path / "killed"
    for each in (whole, folder):
        (each / "nvme").mkdir(parents=True)
    with forks.that_import("numba", "torch", "hetmem", "tests.checkpoint.models") as prepared:
        ended = prepared.run(TRAIN, str(whole), "0", way)
        assert ended.returncode == 0, ended.stderr
        seconds = float(ended.stdout.split()[1])
        steps = [bits(whole / f"step {number}") for number in range(1, STEPS + 1)]
        assert len({*steps}) == STEPS
        killed, seen, lost = 0, set[int](), 0
        while killed < 50:
            ended = prepared.run(TRAIN, str(folder), str(chance.random() * seconds), way)
            assert ended.returncode in (0, -9), ended.stderr
            killed += ended.returncode == -9
            assert not list((folder / "nvme").iterdir()), "the file of a killed process has a name"
            left = [each.name for each in folder.iterdir() if each.name.startswith(".hetmem-")]
            assert len(left) <= 1
            lost += len(left)
            if (folder / "c").exists():
                found = bits(folder / "c")
                assert found in steps, "it has the bits of no step"
                seen.add(steps.index(found))
                if found == steps[-1]:
                    (folder / "c").unlink()
        assert len(seen) > 2
        assert lost, "none was killed while it saved"
