"""What hetmem costs the thread that trains: the costs that are found explain what was seen."""

from __future__ import annotations

import math
from dataclasses import astuple, replace

import pytest
import torch

from benchmarks import thread_costs
from benchmarks.thread_costs import Overheads, Seen, solved
from hetmem.base.hardware import ThreadCosts

COSTS = ThreadCosts(2e-5, 3e-4, 1e-4, 5e-4, 4e-5, 6e-5, 7e-5)


def seen(costs: ThreadCosts, *, chunks: int, fetches: tuple[int, int, int], between: int = 0) -> Seen:
    """What 64 layers of two parameters would show if `costs` were all, with `between` calls after each."""
    forward, backward, renewals = (count * costs.transfer_seconds for count in fetches)
    calls = 64 * (2 + between)
    return Seen(
        64 * costs.use_seconds + calls * costs.call_seconds + forward,
        fetches[0],
        (63 + 128) * costs.gradient_seconds + backward,
        fetches[1],
        128 * (costs.queue_seconds + costs.update_seconds) + chunks * costs.chunk_seconds + renewals,
        fetches[2],
        128 * costs.queue_seconds,
    )


def test_costs_of_calls_uses_gradients_transfers_parameters_and_chunks_are_told_apart() -> None:
    found = solved(
        seen(COSTS, chunks=64, fetches=(48, 46, 17)),
        seen(COSTS, chunks=8, fetches=(6, 5, 2)),
        seen(COSTS, chunks=8, fetches=(6, 5, 2), between=6),
    )
    assert astuple(found) == pytest.approx(astuple(COSTS))


def test_no_cost_is_below_zero_where_the_machine_was_busy_at_the_wrong_time() -> None:
    few = Seen(1.0, 6, 2.0, 5, 0.9, 2, 2.0)
    found = solved(Seen(0.5, 48, 1.0, 46, 0.5, 17, 0.1), few, replace(few, forward=0.5))
    assert found.transfer_seconds == found.chunk_seconds == found.call_seconds == 0.0
    assert (found.use_seconds, found.gradient_seconds) == (1.0 / 64, pytest.approx(2.0 / 191))
    assert (found.queue_seconds, found.update_seconds) == (pytest.approx(0.9 / 128), 0.0)


def test_the_models_are_trained_as_the_equations_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fetches are counted, queueing is a part of an update, and more is called in the last model alone."""
    monkeypatch.setattr(thread_costs, "_LAYERS", 32)
    overheads = Overheads()
    for _ in range(5):
        overheads.step()
    many, few, called = (model.result() for model in overheads._models)
    assert (few.forward_fetches, few.backward_fetches) == (called.forward_fetches, called.backward_fetches)
    assert many.forward_fetches > 4 * few.forward_fetches > 0
    for model in (many, few, called):
        assert 0 < model.queued < model.update


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, or the device that stands for one")
@pytest.mark.nightly
def test_on_a_gpu_they_are_measured_there() -> None:
    costs = astuple(thread_costs.measure(1, "cuda"))
    assert all(math.isfinite(cost) and cost >= 0 for cost in costs) and sum(costs) > 0
