"""A managed module as the stage of a pipeline of `torch.distributed.pipelining`, on two ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.nn.parallel import DistributedDataParallel

import hetmem
from hetmem.errors import ManageError
from hetmem.testing import ranks

RANKS = 2
SCHEDULES: dict[str, tuple[Any, int]] = {
    "gpipe": (ScheduleGPipe, 1),
    "1f1b": (Schedule1F1B, 1),
    "interleaved": (ScheduleInterleaved1F1B, 2),
    "zero bubble": (ScheduleInterleavedZeroBubble, 2),
}
Found = tuple[list[torch.Tensor], list[torch.Tensor]]


def built(stage: int) -> nn.Module:
    torch.manual_seed(stage)
    return nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)])


def managed(module: nn.Module) -> nn.Module:
    budget = hetmem.Budget(device="1MiB", host="16MiB", device_chunks="48KiB")
    return hetmem.manage(module, budget, device="sim", chunk_bytes="16KiB", group=False)


def squared(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean() / 4


def trained(rank: int, schedule: str, **options: Any) -> Found:
    """The losses and weights of two steps of four micro-batches. Managed, if there are `options` of its optimizer."""
    kind, stages_a_rank = SCHEDULES[schedule]
    indices = [rank + RANKS * index for index in range(stages_a_rank)]
    parts = [managed(built(index)) if options else built(index) for index in indices]
    count = RANKS * stages_a_rank
    stages = [
        PipelineStage(part, index, count, torch.device("cpu")) for part, index in zip(parts, indices, strict=True)
    ]
    runs = kind(stages if stages_a_rank > 1 else stages[0], 4, loss_fn=squared, scale_grads=False)
    weights = [weight for part in parts for weight in part.parameters()]
    own = [hetmem.AdamW(part.parameters(), lr=1e-2, **options) for part in parts if options]
    optimizers = own or [torch.optim.AdamW(weights, lr=1e-2, fused=True)]
    torch.manual_seed(3)
    losses: list[torch.Tensor] = []
    for _ in range(2):
        batch, target = torch.randn(8, 64), torch.randn(8, 64)
        runs.step(*[batch][rank:], **({"target": target, "losses": losses} if rank else {}))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return [loss.detach() for loss in losses], [weight.detach().clone() for weight in weights]


def told(refused: Callable[[], object]) -> str:
    """The error of `refused`, and what torch's pipeline raised it for."""
    try:
        refused()
    except (ManageError, RuntimeError) as error:  # one of two ranks that lose each other
        return f"{error} {error.__cause__}"
    return "nothing"


def story(rank: int) -> dict[str, bool | str]:
    found: dict[str, bool | str] = {}
    for schedule, overlap in (("gpipe", "forward"), ("1f1b", "off"), ("interleaved", "backward")):
        losses, weights = trained(rank, schedule)
        own_losses, own_weights = trained(rank, schedule, overlap=overlap)
        pairs = zip([*losses, *weights], [*own_losses, *own_weights], strict=True)
        found[schedule] = all(torch.equal(plain, own) for plain, own in pairs)
    around = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), managed(built(0))))
    found["replica"] = told(lambda: around(torch.randn(2, 64)))
    found["zero bubble"] = told(lambda: trained(rank, "zero bubble", overlap="off"))
    return found


@pytest.mark.nightly
def test_a_stage_has_the_bits_of_torch_and_what_would_train_nothing_is_refused() -> None:
    for told in (found := ranks(RANKS, story)):
        assert (told["gpipe"], told["1f1b"], told["interleaved"]) == (True, True, True)
        assert "DistributedDataParallel, which reads each gradient before it is at home" in str(told["replica"])
    assert any("computes gradients of inputs and of weights apart" in str(told["zero bubble"]) for told in found)
