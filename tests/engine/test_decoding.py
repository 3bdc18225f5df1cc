"""Forwards without backwards, as text is generated: what fits of the weights stays on the device, the rest streams."""

from __future__ import annotations

import copy
from itertools import pairwise

import pytest
import torch
from torch import nn

import hetmem
from hetmem import testing

LAYERS, WIDTH = 24, 64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("room", [5, 20])
def test_a_token_fetches_the_weights_that_have_no_room_and_no_others(dtype: torch.dtype, room: int) -> None:
    """Beside a slot that computes and one that is filled meanwhile. Eviction by last use would fetch all."""
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))).to(dtype)
    chunk = WIDTH * WIDTH * dtype.itemsize
    limits = hetmem.Budget(device="64MiB", host="16MiB", device_chunks=room * chunk)
    model = hetmem.manage(copy.deepcopy(plain), limits, device=hetmem.SimDevice(), chunk_bytes=chunk)
    assert testing.of(model).memory().device_slots == room
    x, crossed = torch.randn(1, WIDTH, dtype=dtype), []
    with torch.no_grad():
        for _ in range(5):
            assert torch.equal(model(x), plain(x))
            crossed.append(hetmem.report(model).to_dict()["links"]["host_to_device"]["bytes"])
    fetched = [after - before for before, after in pairwise(crossed)]
    assert fetched[-1] == fetched[-2] == (LAYERS - (room - 2)) * chunk
