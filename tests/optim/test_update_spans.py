"""What a report counts as the host optimizer's time: from when workers may begin with an update to its end."""

from __future__ import annotations

import time

import pytest
import torch

import hetmem
from hetmem.intercept import registry
from hetmem.optim.progress import Job
from hetmem.optim.update_queue import Updates


def test_what_the_thread_prepares_for_an_update_is_no_time_of_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    model = hetmem.manage(torch.nn.Linear(64, 64), hetmem.Budget(device="1MiB", host="4MiB"), device="sim")
    optimizer, real, made = hetmem.AdamW(model.parameters()), Updates.add, []

    def add(self: Updates, job: Job) -> None:
        tasks = job.tasks

        def slow(job: Job) -> list[object]:
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
