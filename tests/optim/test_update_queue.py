"""Updates that bring in chunks together, wait for writes of the disk, and are timed: however small the ring is."""

from __future__ import annotations

import copy
import signal
import threading
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
from hetmem.optim.chunk_update import ChunkUpdate
from hetmem.optim.update_queue import Updates
from hetmem.schedule.blocks import CopyState
from hetmem.schedule.trace import Tier
from tests.engine.harness import (
    CHUNK,
    WIDTH,
    assert_same_states,
    assert_same_weights,
    budget,
    loss_of,
    manage,
    pair,
    vector_batches,
)
from tests.faults.disk import FaultyDisk
from tests.optim.stories import twins
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

        def watched(updates: Updates, job: ChunkUpdate) -> None:
            opens(updates, job)
            waiting = [job for job in updates._opening if self._waits(updates, job)]
            self.most = max(self.most, len(updates._opening))
            assert waiting in ([], [updates._opening[-1]]), "a job waits that others have opened behind"

        monkeypatch.setattr(Updates, "_open", watched)

    @staticmethod
    def _waits(updates: Updates, job: ChunkUpdate) -> bool:
        homes = [job.chunk.homes[role] for role in job.needs]
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


# ---- what the disk is still writing -----------------------------------------------------------------------------

MOMENT = "exp_avg"
HOST_CHUNKS = 48
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

    def is_open(updates: Updates, job: ChunkUpdate) -> bool:
        """A job that has to wait for the write is what the write waits for."""
        ready = asked(updates, job)
        if any(job.chunk.homes[role] is home for role in job.needs) and late.began.is_set():
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


# ---- what counts as their time ---------------------------------------------------------------------------------


def test_what_the_thread_prepares_for_an_update_is_no_time_of_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    model = hetmem.manage(
        torch.nn.Linear(64, 64), hetmem.Budget(device="1MiB", host="4MiB", device_chunks="32KiB"), device="sim"
    )
    optimizer, real, made = hetmem.AdamW(model.parameters()), Updates.add, []

    def add(self: Updates, job: ChunkUpdate) -> None:
        tasks = job.tasks

        def slow(job: ChunkUpdate) -> list[object]:
            time.sleep(0.02)
            made.append(time.perf_counter())
            return tasks(job)  # type: ignore[return-value]

        job.tasks = slow  # type: ignore[assignment]
        real(self, job)

    monkeypatch.setattr(Updates, "add", add)
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    spans = registry.of_module(model).runtime.events.updates
    assert len(spans) == len(made) > 0
    assert all(span.start >= at for span, at in zip(spans, made, strict=True))


def _alike(step: int, weights: list[nn.Parameter]) -> None:
    """Nothing tells the neighbours apart."""


def _younger(step: int, weights: list[nn.Parameter]) -> None:
    if step == 0:
        weights[1].grad = None


def _own_gradient(step: int, weights: list[nn.Parameter]) -> None:
    gradient = weights[1].grad
    assert gradient is not None
    weights[1].grad = gradient.clone().mul_(2)


@pytest.mark.parametrize("own", [{}, {"lr": 3e-2}])
@pytest.mark.parametrize("does", [_alike, _younger, _own_gradient])
def test_neighbours_in_a_chunk_are_updated_each_with_its_own_numbers(
    does: Any, own: dict[str, float], tmp_path: Path
) -> None:
    """Some are updated as one."""

    def build() -> nn.Module:
        return nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(3)), nn.Linear(32, 7))

    plain, managed = pair(build, "host", tmp_path, chunk_bytes="64KiB")
    optimizers = []
    for module, kind in ((plain, torch.optim.AdamW), (managed, hetmem.AdamW)):
        weights = list(module.parameters())
        groups = [{"params": [weights[0], *weights[2:]]}, {"params": weights[1:2], **own}]
        optimizers.append(
            kind(groups if own else weights, lr=1e-2, **({"fused": True} if kind is torch.optim.AdamW else {}))
        )
    for step, batch in enumerate(vector_batches(3, 4, 32)):
        for module, optimizer in zip((plain, managed), optimizers, strict=True):
            loss_of(module, batch).backward()
            does(step, list(module.parameters()))
            optimizer.step()
            optimizer.zero_grad()
        assert_same_weights(plain, managed, f"step {step}")
    assert_same_states(*optimizers, "at the end")
    hetmem.release(managed)


def test_small_chunks_in_host_memory_are_updated_in_one_go(tmp_path: Path) -> None:
    plain = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6)))
    managed = hetmem.manage(copy.deepcopy(plain), budget("host", tmp_path), device="sim", chunk_bytes=CHUNK)
    left = torch.optim.AdamW(plain.parameters(), fused=True)
    right, chunks = hetmem.AdamW(managed.parameters()), registry.of_module(managed).runtime.chunks
    for batch in vector_batches(3, 4, WIDTH):
        for model, optimizer in ((plain, left), (managed, right)):
            loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert_same_weights(plain, managed)
    spans = registry.of_module(managed).runtime.events.updates
    assert len(spans) <= 3 * 2 < len(chunks)  # homes that have moved to the device are updated there


def test_states_begin_at_zero_where_another_optimizer_has_loaded_some(tmp_path: Path) -> None:
    """Their memory is not written before the first update, as the kernel's pages are zeros; these are not."""
    plain = nn.Linear(WIDTH, WIDTH)
    limits = budget("host", tmp_path, device="160KiB", device_chunks="64KiB")
    managed = hetmem.manage(copy.deepcopy(plain), limits, device="sim", chunk_bytes=CHUNK)
    left, (batch,) = torch.optim.AdamW(plain.parameters(), fused=True), vector_batches(1, 4, WIDTH)
    loss_of(plain, batch).backward()
    before = copy.deepcopy(plain.state_dict())
    left.step()
    hetmem.AdamW(managed.parameters()).load_state_dict(left.state_dict())
    plain.load_state_dict(before)
    left, right = torch.optim.AdamW(plain.parameters(), fused=True), hetmem.AdamW(managed.parameters())
    plain.zero_grad()
    for model, optimizer in ((plain, left), (managed, right)):
        loss_of(model, batch).backward()
        optimizer.step()
    assert_same_weights(plain, managed)
    assert_same_states(left, right)
