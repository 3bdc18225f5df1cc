"""Gradients on their way home take device memory for as long as their link is slow: that is no reason to give up."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

import hetmem
from tests.runtime.harness import assert_same_weights

BATCH = torch.randn(8, 256, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("speed", ["5MB", "50MB", None])
@pytest.mark.parametrize("overlap", ["off", "forward"])
def test_whether_a_backward_fits_is_no_matter_of_the_speed_of_its_link(
    overlap: str, speed: str | None, tmp_path: Path
) -> None:
    """It was out of memory with three gradients on their way at 50 MB a second, and fitted at 200."""
    torch.manual_seed(0)
    plain = nn.Sequential(*[nn.Linear(256, 256) for _ in range(8)])
    limits = hetmem.Budget(device="1MiB", host="3MiB", nvme="64MiB", nvme_dir=tmp_path)
    device = hetmem.SimDevice(device_to_host=speed)
    managed = hetmem.manage(copy.deepcopy(plain), limits, device=device, chunk_bytes=256 * 1024)
    left = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
    right = hetmem.AdamW(managed.parameters(), lr=1e-2, overlap=overlap)
    for _ in range(3):
        for model, optimizer in ((plain, left), (managed, right)):
            optimizer.zero_grad()
            model(BATCH).square().mean().backward()
            optimizer.step()
    right.synchronize()
    assert_same_weights(plain, managed)
