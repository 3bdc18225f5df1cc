"""A report says what a token moves, which falls with the micro-batches of a step that take turns."""

from __future__ import annotations

import re

import pytest
import torch

import hetmem
from tests.test_planning import BATCH, GPT, KIB


@pytest.mark.parametrize("count", [1, 4])
def test_bytes_of_a_token_are_those_of_the_step(count: int) -> None:
    torch.manual_seed(0)
    budget = hetmem.Budget(device="8MiB", device_chunks="768KiB", host="32MiB")
    model = hetmem.manage(GPT(saves=True), budget, device="sim", chunk_bytes=128 * KIB)
    optimizer = hetmem.AdamW(model.parameters())
    for _ in range(3):
        hetmem.accumulate(model, [BATCH.clone() for _ in range(count)])
        optimizer.step()
        optimizer.zero_grad()
    report = hetmem.report(model)
    hetmem.release(model)
    step = report.to_dict()["step"]
    assert step["tokens"] == count * BATCH.numel()
    by_segment = step["moments_by_segment"]
    assert sum(by_segment.values()) == step["moments"]
    assert {"forward", "backward"} <= by_segment.keys() <= {"forward", "backward", "step"}
    assert min(by_segment["backward"], by_segment["forward"]) >= count * len(model.layers)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    assert weights < step["bytes"]["host_to_device"] < 2.5 * weights
    said = re.search(r"; a token: Host to device ([\d.]+) KiB", " ".join(str(report).split()), re.IGNORECASE)
    assert said is not None
    assert float(said[1]) == pytest.approx(step["bytes"]["host_to_device"] / step["tokens"] / KIB, rel=0.01)
