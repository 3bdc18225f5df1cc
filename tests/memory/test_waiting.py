"""Once warm, a step waits for the GPU only where this file says: every other place fails here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hetmem
from tests.engine.harness import PLACEMENTS, Tower, manage, token_batches, vector_batches
from tests.memory.fake_cuda import CpuCuda, FakeCuda, cuda
from tests.memory.tested import registry
from tests.memory.waiting import Watch

__all__ = ["cuda"]  # a fixture

ARRIVED = "executor.wait_for_one < gradient_watch.wait < gradients.wait_until_home: take"
"""The end of backward: users find gradients at home."""
UPDATED = "executor.wait_for_one < update_queue.finish < step._carry_out: take"
"""The step: threads of the host update, and the norm is of all gradients."""
FETCHED = "executor.wait_for_one < gradients.wait_until < traffic._wait_for: take"
"""What is used next is on its way, from the disk, or behind an update that trails into the forward and is late."""
ON_NVME = {
    FETCHED,
    "executor.wait_for_one < traffic.open_role < gradients._open: take",
    "executor.wait_for_one < write_check.wait_for_staged_gradients < gradients._open: take",
    "executor.wait_for_one < write_check.wait_for_staged_gradients < step.begin: take",
    "executor.wait_for_one < traffic.wait_until_written < gradients.wait_until_home: take",
    "executor.wait_for_one < traffic.wait_until_written < step._carry_out: take",
    # What was read ahead while it was written is read again:
    "executor.wait_for_one < traffic.superseded < write_check.honour_written_gradients: take",
}
OF_THE_FAKE = (
    # What tells a GPU's memory from the host's by `tensor.device` takes another branch there.
    "executor.wait_for_one < gradient_watch.wait < gradients._send",
    "chunk_update._on_host",
    "workers.as_array",
)
WRITES = "write_check.compare < "
"""A model that takes `weight.data` in forward may write to it: the one way to know is to look."""


def waits_of(module: nn.Module, batches: list[tuple[torch.Tensor, ...]], **options: Any) -> dict[str, set[str]]:
    """Where the host waits in forward, backward and step, from the third step of training `module` on."""
    optimizer = hetmem.AdamW(module.parameters(), lr=1e-3, **options)
    watch = Watch(registry.of_module(module).runtime.memory)
    found: dict[str, set[str]] = {"forward": set(), "backward": set(), "step": set()}
    for index, batch in enumerate(batches):
        with watch.watching():
            watch.computed(batch)
            output = module(*batch)
            loss = output if output.dim() == 0 else output.square().mean()
            forward, watch.waits = watch.waits, []
            optimizer.scale(loss).backward()
            backward, watch.waits = watch.waits, []
            optimizer.step()
            step, watch.waits = watch.waits, []
            optimizer.zero_grad()
        for name, waits in (("forward", forward), ("backward", backward), ("step", step)):
            found[name].update(wait for wait in waits if index >= 2 and not wait.startswith(OF_THE_FAKE))
    return found


@pytest.mark.each
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("mixed", [None, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    "options", [{}, {"max_grad_norm": 0.01}, {"overlap": "forward"}], ids=["plain", "clip", "overlap"]
)
def test_a_warm_step_waits_only_where_it_must(
    cuda: FakeCuda, placement: str, mixed: Any, options: dict[str, Any], tmp_path: Path
) -> None:
    managed = manage(Tower(), placement, tmp_path, mixed_precision=mixed, device=CpuCuda(), sanitize=False)
    found = waits_of(managed, token_batches(5), **options)
    disk = ON_NVME if placement == "nvme" else set()
    trailing = {FETCHED} if options.get("overlap") == "forward" else set()
    assert found["forward"] <= disk | trailing
    assert found["backward"] <= {ARRIVED, *disk}
    assert found["step"] <= {UPDATED, *disk}
    assert placement == "resident" or ARRIVED in found["backward"], "the test sees no wait at all"


class Masked(nn.Module):
    """Adds its bias in place, and takes its weight as `.data` if it `peeks`."""

    def __init__(self, *, peeks: bool) -> None:
        super().__init__()
        self.layer, self.bias, self.peeks = nn.Linear(64, 64), nn.Parameter(torch.ones(64)), peeks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.layer.weight.data if self.peeks else self.layer.weight
        return (x @ weight).add_(self.bias).mul_(self.bias)


@pytest.mark.parametrize("peeks", [False, True])
def test_a_forward_that_cannot_write_to_weights_is_not_compared_with_them(
    cuda: FakeCuda, peeks: bool, tmp_path: Path
) -> None:
    """Operators in place that read a weight, as `x.add_(bias)` does, write to none."""
    managed = manage(Masked(peeks=peeks), "host", tmp_path, device=CpuCuda(), sanitize=False)
    forward = waits_of(managed, vector_batches(5, 4, 64))["forward"]
    assert bool(forward) == peeks and all(WRITES in place for place in forward)


@pytest.mark.parametrize(
    "wait",
    [
        lambda there, here: there[0].item(),
        lambda there, here: float(there[0]),
        lambda there, here: bool((there > 0).all()),
        lambda there, here: there.cpu(),
        lambda there, here: there.numpy(),
        lambda there, here: there.tolist(),
        lambda there, here: torch.equal(there, there),
        lambda there, here: there.nonzero(),
        lambda there, here: there[there > 0],
        lambda there, here: here.copy_(there),
        lambda there, here: there.copy_(here),
        lambda there, here: here.to(there),
        lambda there, here: torch.linalg.vector_norm(there * 2).item(),
    ],
)
def test_each_kind_of_wait_is_seen(cuda: FakeCuda, wait: Callable[..., Any], tmp_path: Path) -> None:
    managed = manage(nn.Linear(64, 64), "host", tmp_path, device=CpuCuda(), sanitize=False)
    watch, there, here = Watch(registry.of_module(managed).runtime.memory), torch.ones(64), managed.bias.detach()
    with watch.watching():
        watch.computed([there])
        there.add_(1)
        here.copy_(there, non_blocking=True)
        assert watch.waits == []
        wait(there, here)
    assert watch.waits
