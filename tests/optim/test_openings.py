"""Several updates are brought in at once, and none of them waits for what another one holds: however small the ring."""

from __future__ import annotations

import copy
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hetmem
from hetmem.cpu.workers import WorkerPool
from hetmem.intercept import registry
from hetmem.optim.progress import Job
from hetmem.optim.update_queue import Updates
from hetmem.schedule.blocks import CopyState
from hetmem.schedule.trace import Tier
from tests.engine.harness import CHUNK, WIDTH, assert_same_states, assert_same_weights, budget, loss_of, manage
from tests.faults.disk import FaultyDisk
from tests.pairs import case

LAYERS = 16
HOST_SLOTS = {4: 4, 5: 20, 7: 28, 12: 48}
"""Slots of staging, the least first, and the chunks of host memory with which a ring has so many."""


@contextmanager
def ends_within(seconds: int) -> Iterator[None]:
    """What waits for ever is a failure, not a run without an end."""

    def hangs(*_: object) -> None:
        raise AssertionError(f"nothing has come to an end in {seconds} s")

    before = signal.signal(signal.SIGALRM, hangs)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def late(verb: str, offset: int, nbytes: int) -> int:
    """Transfers of neighbours take unequal times, so that they end in another order than they began in."""
    time.sleep(0.002 if offset // CHUNK % 3 else 0.0)
    return nbytes


class Opened:
    """Looks at the jobs that are opening whenever one more of them has begun to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.most = 0
        opens = Updates._open

        def watched(updates: Updates, job: Job) -> None:
            opens(updates, job)
            waiting = [job for job in updates._opening if self._waits(updates, job)]
            self.most = max(self.most, len(updates._opening))
            assert waiting in ([], [updates._opening[-1]]), "a job waits that others have opened behind"

        monkeypatch.setattr(Updates, "_open", watched)

    @staticmethod
    def _waits(updates: Updates, job: Job) -> bool:
        homes = [job.chunk.homes[role] for role in job.roles]
        states = [
            updates._runtime.traffic.residency.state(home.block, Tier.HOST)
            for home in homes
            if home.tier is Tier.NVME and home.block is not None
        ]
        return any(state not in (CopyState.VALID, CopyState.LOADING) for state in states)


def train(module: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    """Batches that depend on nothing but their number."""
    for step in range(steps):
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss_of(module, (x,)).backward()
        optimizer.step()


KINDS: dict[str, dict[str, Any]] = {
    "off": {},
    "backward": {"overlap": "backward"},
    "streamed": {"overlap": "backward", "gradients": "streamed"},
    "forward": {"overlap": "forward"},
}


@pytest.mark.parametrize(
    ("slots", "kind"),
    [case(slots, kind, nightly=slots != 4 and (slots, kind) != (12, "off")) for slots in HOST_SLOTS for kind in KINDS],
)
def test_jobs_that_open_together_end_with_the_bits_of_torch(
    kind: str, slots: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the least ring, which holds one chunk's update, to one that holds three."""
    opened, disk = Opened(monkeypatch), FaultyDisk()
    disk.fault = late
    disk.used_by(monkeypatch, threads=3)
    monkeypatch.setattr(WorkerPool, "__init__", _with_threads(4))
    torch.manual_seed(0)
    options = KINDS[kind]
    limit = options.get("max_grad_norm")
    plain = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])
    room = budget("nvme", tmp_path, host=f"{HOST_SLOTS[slots] * CHUNK}B", device_chunks=f"{4 * CHUNK}B")
    managed = manage(copy.deepcopy(plain), room, tmp_path)
    assert registry.of_module(managed).runtime.memory.staging_slots == slots
    # As the clip is within the pass that updates, plain torch shows what it gives only without one.
    reference = (
        torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
        if limit is None
        else hetmem.AdamW(manage(plain, "host", tmp_path).parameters(), lr=1e-2, max_grad_norm=limit)
    )
    optimizer = hetmem.AdamW(managed.parameters(), lr=1e-2, **options)
    train(plain, reference)
    with ends_within(60):
        train(managed, optimizer)
        optimizer.synchronize()
    assert_same_weights(plain, managed)
    if limit is None:
        assert_same_states(reference, optimizer)
    assert options or slots < 12 or opened.most > 1, "updates of chunks were brought in one by one"


def _with_threads(threads: int) -> Any:
    made = WorkerPool.__init__

    def make(pool: WorkerPool, *_: Any, **__: Any) -> None:
        made(pool, threads)

    return make
