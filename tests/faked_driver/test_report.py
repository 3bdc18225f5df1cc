"""What a report says of memory beside chunks, on a device that is no CPU to torch. `test_in_a_process` starts these."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import hetmem
from hetmem.memory.cuda_device import CudaDevice
from tests.faked_driver.test_training import PLACEMENTS, budget, pytestmark
from tests.gpu.test_managed import Model, batches

__all__ = ["pytestmark"]


class Wide(nn.Module):
    """Two equal blocks and a loss: 512 rows of 64 float32 are 128 KiB."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.of_host = torch.ones(1 << 16)
        for block in self.blocks:
            x = block(x)
        return x.float().square().mean()


@pytest.mark.in_turn
@pytest.mark.parametrize("mixed", [None, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_what_was_beside_chunks_at_the_peak_is_told_by_operator_and_module(
    placement: str, mixed: torch.dtype | None, tmp_path: Path
) -> None:
    """Operators of steps that are measured are seen, for the report alone: the allocator counts more."""
    managed = hetmem.manage(Wide(), budget(placement, tmp_path), chunk_bytes="64KiB", mixed_precision=mixed)
    optimizer, x = hetmem.AdamW(managed.parameters()), torch.ones(512, 64, device="cuda")
    for _ in range(3):
        managed(x).backward()
        optimizer.step()
        optimizer.zero_grad()
    section, kib = hetmem.report(managed).to_dict()["beside_chunks"], 1 << 10
    found = {(row["operator"], row["module"], row["held"]): row["bytes"] for row in section["tensors"]}
    assert (section["segment"], section["step"]) == ("backward", 1)
    assert found["relu", "blocks.*.1", "saved"] == 512 * kib // (1 if mixed is None else 2)
    assert {module for _, module, held in found if held == "temporary"} == {""}
    assert "ones" not in {operator for operator, _, _ in found}, "it is not on the device"
    hetmem.release(managed)


def test_operators_are_not_seen_where_transformers_compiles_flex_attention(tmp_path: Path) -> None:
    """A mode of operators would have it run uncompiled, which takes memory for all pairs of tokens."""
    model = Wide()
    model.config = SimpleNamespace(_attn_implementation="flex_attention")
    managed = hetmem.manage(model, budget(next(iter(PLACEMENTS)), tmp_path), chunk_bytes="64KiB")
    managed(torch.ones(512, 64, device="cuda")).backward()
    assert hetmem.report(managed).to_dict()["beside_chunks"] is None
    hetmem.release(managed)


def peak_of_torch() -> int:
    """What `torch.cuda.max_memory_allocated` returns where there is a GPU."""
    return int(torch.cuda.memory_stats()["allocated_bytes.all.peak"])


class Resets(CudaDevice):
    """Notes what the allocator's peak was each time that hetmem has it start anew."""

    def __init__(self) -> None:
        super().__init__()
        self.lost: list[int] = []

    def forget_peak(self) -> None:
        self.lost.append(peak_of_torch())
        super().forget_peak()


def test_the_peak_that_torch_tells_the_program_is_that_of_its_steps() -> None:
    """hetmem asks the same counter for what a model needs beside chunks, and once had it start anew at each segment."""
    device = Resets()
    torch.manual_seed(0)
    room = hetmem.Budget(device_chunks="256KiB", host="64MiB")
    managed = hetmem.manage(Model(64, 3), room, device=device, chunk_bytes="64KiB")
    optimizer = hetmem.AdamW(managed.parameters())
    at_first = len(device.lost)  # earlier peaks of the process are none of its steps
    for batch in batches(3):
        managed(batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert peak_of_torch() >= max(device.lost[at_first:], default=1)
