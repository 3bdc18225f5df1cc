"""The logs of a model stay small however long it runs, and a history of its steps outlives their entries."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch

import hetmem
from tests.engine.harness import manage
from tests.report.tested import EventLog, Link, Log, MomentSeen, Transfer, history, last_window, registry

MIB = 1 << 20
LAYERS, WIDTH = 4, 64


def _fill(events: EventLog) -> None:
    """Log the most that `events` remembers of each kind and a little more: entries that share nothing."""
    for at in range(52_000):
        new, number, block, text = at + 0.5, at + (1 << 40), at + 300, f"chunks {at} to {at + 1}"
        events.begin_segment("forward")
        events.moments.append((new, f"an operator of a long name: {at}", (at, at + 1, at + 2), number, number))
        if at < 42_000:
            events.copies.append((new, block, 0, True))
        if at < 32_000:
            events.transfers.append((Link.NVME_READ, block, new, new + 1, number))
        if at < 21_000:
            events.saved.append((new, number, 1, 2))
        if at < 17_000:
            events.stalls.append((new, new + 1, block))
        if at < 13_000:
            events.updates.append((text, new, new + 1))
        if at < 9_000:
            events.faults.append((new, block))
        if at < 7_000:
            events.forwards.append((new, number, True))
            for log in (events.launched, events.host_waits, events.caught_up):
                log.append((text, new, new + 1))


def test_the_logs_of_a_model_take_at_most_8_mib_however_long_it_runs() -> None:
    """The worst program: every kind of entry, and no two that share a text or their blocks."""
    tracemalloc.start()
    try:
        events = EventLog()
        _fill(events)
        kept, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    logs = [log for log in (*vars(events).values(), *events.ended.values()) if isinstance(log, Log)]
    packed = sum(log.nbytes for log in logs)
    assert most + packed < 8 * MIB, f"{most / MIB:.1f} and {packed / MIB:.1f} MiB"
    assert kept + packed > 5 * MIB, "else its shares are unused"
    assert events.transfers[-1] == Transfer(Link.NVME_READ, 32_299, 31_999.5, 32_000.5, 31_999 + (1 << 40))
    assert len(events.moments) >= 37_500


def test_entries_are_read_as_they_were_logged() -> None:
    moments, transfers = Log(MomentSeen, 8), Log(Transfer, 8)
    seen = [
        MomentSeen(0.1, "aten.mm", (), 1 << 50, -1),
        MomentSeen(0.2, "aten.mm", (70_000,), 0, 0),
        MomentSeen(0.3, "aten.add", (3, 70_000), 5, 6),
    ]
    moved = [Transfer(link, -1, 1e9 + 0.1, 1e9 + 0.2, 1 << 50) for link in Link]
    for each in seen:
        moments.append(each)
    for copied in moved:
        transfers.append(copied)
    assert (list(moments), moments[1], moments[-1], len(moments)) == (seen, seen[1], seen[-1], 3)
    assert list(transfers) == moved
    assert [type(member) for member in moments[2]] == [float, str, tuple, int, int]


def _train(model: torch.nn.Module, optimizer: Any, steps: int) -> None:
    for _ in range(steps):
        model(torch.ones(2, 3, dtype=torch.long)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_steps_whose_entries_are_dropped_remain_in_the_history_and_sums_are_exact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each log has room for little more than the last step."""
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    model = torch.nn.Sequential(torch.nn.Embedding(5, WIDTH), *layers)
    made = Log.__init__
    monkeypatch.setattr(Log, "__init__", lambda log, kind, most, *texts: made(log, kind, min(most, 100), *texts))
    manage(model, "host", tmp_path)
    optimizer = hetmem.AdamW(model.parameters())
    events = registry.of_module(model).runtime.events
    _train(model, optimizer, 42)
    assert events.moments.lost, "else nothing is shown"
    data = hetmem.report(model).to_dict()
    past, step = data["history"], data["step"]
    assert [len(past[key]) for key in ("seconds", "stall_seconds", "tokens")] == [41, 41, 41]
    assert past["tokens"] == [6] * 41
    assert past["seconds"][-1] == step["seconds"]
    assert 0 < sum(past["stall_seconds"]) <= data["stall_seconds"]
    assert data["missing"] == []
    assert step["moments"] == len(data["timeline"]["moments"]["at_us"]) >= 2 * LAYERS
    hetmem.release(model)


class Ticking:
    """A clock of a device that computes at once: each look at it takes a second."""

    def __init__(self) -> None:
        self.at = 0.0

    def now(self) -> float:
        self.at += 1
        return self.at


def test_only_the_last_500_steps_are_remembered_and_all_count_in_the_sums() -> None:
    clock: Any = Ticking()
    events = EventLog(clock)
    for step in range(3_000):
        events.begin_forward(step, trains=True)
        events.begin_segment("step")
        events.waited(events.here())
        events.end_segment()
    past = history(events)
    assert past == {
        "of": "step",
        "seconds": [5.0] * 500,
        "stall_seconds": [1.0] * 500,
        "tokens": [*range(2_500, 3_000)],
    }
    assert (events.stall_seconds, events.tokens) == (3_000, sum(range(3_000)))


class Behind:
    """The clock of a device that passes each mark only when it is waited for, one second after the one before."""

    def __init__(self) -> None:
        self.asked = self.read = 0.0

    def now(self) -> float:
        return 0.0

    def timed_mark(self) -> float:
        self.asked += 1
        return self.asked

    def passed(self, mark: float) -> bool:
        return mark <= self.read

    def wait(self, mark: float) -> None:
        self.read = max(self.read, mark)

    def when(self, mark: float) -> float:
        return mark


def test_a_step_has_the_tokens_that_were_launched_in_it_though_it_is_computed_after_the_next_began() -> None:
    clock: Any = Behind()
    events = EventLog(clock, asynchronous=True)
    for tokens in (1, 10, 100, 1_000):
        events.begin_forward(tokens, trains=True)
        events.begin_segment("forward")
        copied = events.here()[1]
        events.waits_for(0, copied + 2)  # as long as one second after compute gets there
        events.begin_segment("step")
        events.end_segment()
    assert history(events)["tokens"] == []
    events.read_marks(wait=True)
    past = history(events)
    assert past["tokens"] == [10, 100, 1_000]
    assert past["stall_seconds"] == [1.0] * 3
    assert sum(past["stall_seconds"]) == events.stall_seconds - 1.0


def test_a_report_makes_no_more_of_the_log_than_it_shows() -> None:
    """All entries as objects at once would take ten times the memory of the log, and the process would keep it."""
    events = EventLog()
    for at in range(48_000):
        events.moments.append((at + 0.5, "aten.mm", (3,), at, at))
    for end in (47_000.0, 48_000.0):
        events.segments.append(("step", end - 1, end))
    events.moments.pack()
    tracemalloc.start()
    try:
        window = last_window(events)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert window is not None and len(window.moments) == 1_000
    assert most < 3 * MIB, f"{most / MIB:.1f} MiB"
