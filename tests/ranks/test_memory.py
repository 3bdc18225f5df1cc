"""Ranks together take the host memory of one process, as homes are there once."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import hetmem
from hetmem.testing import Inside, ranks

WIDTH, LAYERS = 1024, 14
MIB = 1 << 20


def proportional_bytes() -> int:
    """The proportional set size of this process: pages that n processes share count 1/n."""
    found = re.search(r"Pss: +(\d+) kB", Path("/proc/self/smaps_rollup").read_text())
    assert found
    return int(found[1]) * 1024


def takes(rank: int, count: int, width: int = WIDTH) -> int:
    """Host bytes of this rank behind three steps, less what it had before, and what its simulated device holds."""
    before = proportional_bytes()
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(LAYERS)))
    budget = hetmem.Budget(device="32MiB", host="320MiB", device_chunks="16MiB")
    hetmem.manage(model, budget, device="sim", chunk_bytes=4 * width * width)
    optimizer = hetmem.AdamW(model.parameters())
    for _ in range(3):
        model(torch.ones(4, width)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    if count > 1:
        dist.barrier()
    found = proportional_bytes() - before - Inside(model).memory().held_bytes
    if count > 1:
        dist.barrier()  # what one leaves counts for the others
    hetmem.release(model)
    return found


def behind_a_warm_up(rank: int, count: int) -> int:
    takes(rank, count, 64)
    return takes(rank, count)


@pytest.mark.nightly
@pytest.mark.parametrize("count", [2, 3, 4])
def test_ranks_take_the_memory_of_one_process(count: int) -> None:
    (one,) = ranks(1, behind_a_warm_up, 1)
    of_all = sum(ranks(count, behind_a_warm_up, count))
    assert one > 4 * 4 * WIDTH * WIDTH * LAYERS * 0.9
    assert of_all <= 1.03 * one + 4 * MIB * count, f"{count} ranks {of_all / MIB:.0f} MiB, one process {one / MIB:.0f}"
