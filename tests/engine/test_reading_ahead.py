"""A model whose weights live on NVMe: from the second forward on they are read before they are asked for."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hetmem.intercept import registry
from hetmem.schedule.trace import Tier
from tests.engine.harness import CHUNK, WIDTH, budget, manage, same_bits

LAYERS, PASSES = 40, 4


@pytest.mark.parametrize("placed", [3, 12])
def test_forwards_without_an_optimizer_read_their_weights_ahead(
    placed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`placed`: so many weights have room on the device."""
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    limits = budget("nvme", tmp_path, host=8 * CHUNK, device_chunks=placed * CHUNK)
    managed = manage(copy.deepcopy(plain), limits, tmp_path)
    residency = registry.of_module(managed).runtime.traffic.residency
    assert {block.home for block in residency.blocks} >= {Tier.NVME}
    asked: list[int] = []
    acquire = residency.acquire

    def noted(block: int, tier: Tier, **options: Any) -> Any:
        nowhere = residency.state(block, Tier.DEVICE) is None and residency.state(block, Tier.HOST) is None
        if nowhere and residency.blocks[block].home is Tier.NVME:
            asked.append(block)
        return acquire(block, tier, **options)

    monkeypatch.setattr(residency, "acquire", noted)
    counts = []
    for number in range(PASSES):
        batch = torch.full((2, WIDTH), float(number + 1))
        with torch.no_grad():
            assert same_bits(plain(batch), managed(batch).cpu())
        counts.append(len(asked))
    first, later = counts[0], counts[-1] - counts[0]
    assert first > LAYERS // 2, "the first forward cannot know what comes"
    assert later <= (PASSES - 1) * 2, counts
    reads, copies = residency.counts.fetches[Tier.HOST], residency.counts.fetches[Tier.DEVICE]
    assert reads <= copies + 8, "none is read twice for one use"
