"""The report of any rank shows all of them: who waits, where and for whom, and what is remarkable about that."""

from __future__ import annotations

import time
from typing import Any

import torch

import hetmem
from hetmem.testing import ranks

WIDTH, BACKWARDS, NAP = 64, 10, 0.1


class Slow(torch.nn.Module):
    """Its backward takes a nap on one rank."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.inner, self.rank = torch.nn.Linear(WIDTH, WIDTH), rank

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.inner(x)
        if self.rank == 1:
            out.register_hook(lambda _: time.sleep(NAP))
        return out


def reported(rank: int) -> tuple[dict[str, Any], str]:
    budget = hetmem.Budget(device="4MiB", host="16MiB")
    model = hetmem.manage(Slow(rank), budget, device="sim")
    optimizer = hetmem.AdamW(model.parameters())
    for _ in range(BACKWARDS):
        model(torch.ones(2, WIDTH)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    report = hetmem.report(model)
    found = report.to_dict()["ranks"], str(report)
    model(torch.ones(2, WIDTH)).sum().backward()  # nobody leaves before all have reported
    hetmem.release(model)
    return found


def test_the_report_names_the_rank_that_others_wait_for() -> None:
    for rank, (found, text) in enumerate(ranks(2, reported)):
        assert found["own"] == rank
        fast, slow = found["rows"]
        assert [row["rank"] for row in found["rows"]] == [0, 1]
        assert {row["backwards"] for row in (fast, slow)} <= {BACKWARDS, BACKWARDS + 1}, "one may be in the next one"
        assert {row["steps"] for row in (fast, slow)} == {BACKWARDS}
        assert slow["last_in_backwards"] >= 0.8 * BACKWARDS > fast["last_in_backwards"]
        assert fast["wait_seconds"]["backward"] > 0.8 * BACKWARDS * NAP > slow["wait_seconds"]["backward"]
        assert fast["waited_for_seconds"][1] > 0.8 * BACKWARDS * NAP
        assert fast["waited_for_seconds"][0] == 0.0
        assert fast["step_seconds"] >= NAP
        assert all(row["bytes"]["device_to_host"] >= (BACKWARDS - 1) * WIDTH * WIDTH * 4 for row in (fast, slow))
        last, same = found["remarks"]
        assert last.startswith("Rank 1 is the last one in ")
        assert same == "All ranks got the same first batch: is the sampler distributed?"
        assert f"{rank} (own)" in text
        assert "is the sampler distributed?" in text
