"""States that the disk is still writing when the next step wants to change them."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from torch import nn

from hetmem.intercept import registry
from hetmem.optim.progress import Job
from hetmem.optim.update_queue import Updates
from hetmem.schedule.trace import Tier
from tests.engine.harness import CHUNK, WIDTH, budget, pair, vector_batches
from tests.faults.disk import FaultyDisk
from tests.optim.stories import twins

MOMENT = "exp_avg"
LAYERS, HOST_CHUNKS = 16, 48
"""With so much host memory the ring of staging has room for three updates: one that waits holds nobody up."""


def tower() -> nn.Sequential:
    """Each weight is a chunk."""
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


class LateWrite:
    """The next write within `first` to `last` of the file is not carried out before `may_end` is set."""

    def __init__(self, first: int, last: int) -> None:
        self._first, self._last = first, last
        self.began, self.may_end = threading.Event(), threading.Event()

    def __call__(self, verb: str, offset: int, nbytes: int) -> int:
        if verb == "write" and self._first <= offset < self._last and not self.began.is_set():
            self.began.set()
            assert self.may_end.wait(60)
        return nbytes


def test_no_update_changes_what_the_disk_is_still_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The write would take up half of an update, and an error of that update could not be undone any more.

    In a step that overlaps with nothing: otherwise the order of updates depends on when they can begin, and another one
    may wait for the slot that is being written.
    """
    disk = FaultyDisk()
    disk.used_by(monkeypatch, threads=4)
    room = budget("nvme", tmp_path, host=HOST_CHUNKS * CHUNK)
    both = twins(pair(tower, room, tmp_path))
    batches = vector_batches(4, 4, 64)
    both.train(batches[:2])
    both.right.synchronize()
    runtime = registry.of_module(both.managed).runtime
    home = next(
        home
        for chunk in runtime.chunks
        for role, home in chunk.homes.items()
        if role.name == MOMENT and home.tier is Tier.NVME
    )
    assert home.extent is not None
    assert home.block is not None
    disk.fault = late = LateWrite(home.extent.offset, home.extent.offset + home.extent.nbytes)
    waited, written_meanwhile = threading.Event(), []

    def is_open(updates: Updates, job: Job) -> bool:
        """A job that has to wait for the write is what the write waits for."""
        ready = asked(updates, job)
        if any(job.chunk.homes[role] is home for role in job.roles) and late.began.is_set():
            writing = not late.may_end.is_set()
            (written_meanwhile.append(writing) if ready else waited.set())
            late.may_end.set()
        return ready

    asked = Updates._is_open
    monkeypatch.setattr(Updates, "_is_open", is_open)
    both.train(batches[2:])
    assert late.began.is_set()
    assert waited.is_set()
    assert not any(written_meanwhile)
    both.assert_same()
