"""What hetmem costs the thread that trains: the costs that are found explain what was seen."""

from __future__ import annotations

import pytest

from hetmem.overheads import _Seen, solved
from hetmem.plan.hardware import ThreadCosts


def seen(costs: ThreadCosts, *, chunks: int, fetches: int, renewals: int) -> _Seen:
    """What 64 layers of two parameters would show if `costs` were all."""
    extra = 255 * costs.use_seconds + fetches * costs.transfer_seconds
    update = 128 * costs.update_seconds + chunks * costs.chunk_seconds + renewals * costs.transfer_seconds
    return _Seen(extra, fetches, update, renewals)


def test_costs_of_uses_transfers_parameters_and_chunks_are_told_apart() -> None:
    costs = ThreadCosts(use_seconds=2e-5, transfer_seconds=3e-4, update_seconds=1e-4, chunk_seconds=5e-4)
    found = solved(
        seen(costs, chunks=64, fetches=94, renewals=17),
        seen(costs, chunks=8, fetches=11, renewals=2),
    )
    assert found.use_seconds == pytest.approx(costs.use_seconds)
    assert found.transfer_seconds == pytest.approx(costs.transfer_seconds)
    assert found.update_seconds == pytest.approx(costs.update_seconds)
    assert found.chunk_seconds == pytest.approx(costs.chunk_seconds)


def test_no_cost_is_below_zero_where_the_machine_was_busy_at_the_wrong_time() -> None:
    found = solved(_Seen(1.0, 94, 0.5, 17), _Seen(2.0, 11, 0.9, 2))
    assert found.transfer_seconds == 0.0 and found.chunk_seconds == 0.0
    assert found.update_seconds == pytest.approx(0.9 / 128) and found.use_seconds == pytest.approx(2.0 / 255)
