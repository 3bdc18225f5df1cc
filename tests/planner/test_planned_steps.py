"""What plans and the search take for granted of how well times are known: what the measured rows show."""

from __future__ import annotations

import re
from statistics import median

import pytest
import torch

from benchmarks.gpu.models import Llama
from benchmarks.planned_steps import rows
from tests.planner.tested import deciding, planner, wording


@pytest.mark.nightly
def test_a_plan_says_how_far_plans_were_from_the_steps_that_were_measured() -> None:
    ratios = [row.ratio for row in rows()]
    assert len(ratios) == 7
    assert re.findall(r"\d\.\d\d", wording.TIMES) == [f"{min(ratios):.2f}", f"{max(ratios):.2f}"]
    spread = max(abs(ratio / median(ratios) - 1) for ratio in ratios)
    assert pytest.approx(1 - min(0.1, spread)) == deciding.WORTH


def test_recomputation_is_counted_apart() -> None:
    """What a checkpoint repeats is no training: without it, both are the same operators."""
    plans = [
        planner.plan(lambda: Llama(2, 128, width=64, heads=4, groups=2, inner=128), batch, checkpointing=checkpointing)
        for batch in [torch.empty(2, 32, dtype=torch.int64)]
        for checkpointing in (False, True)
    ]
    kept, repeated = plans
    assert repeated.flops > kept.flops == repeated.flops - repeated.recomputed_flops
    assert kept.recomputed_flops == 0
    assert "TFLOP/s; overlap" in str(kept)
    assert re.search(r"TFLOP/s with recomputation, [\d.]+\s+without", str(repeated))
