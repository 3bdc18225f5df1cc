"""Shared by the tests of checkpoints: a model with everything that is awkward to save, and what trains it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import hetmem
from tests.engine.harness import CHUNK, Tower, budget, manage, nvme_bytes, token_batches

OptimizerOf = Callable[[nn.Module], torch.optim.Optimizer]


class Awkward(Tower):
    """Tied weights; a frozen and an unused parameter; a buffer that counts, one that is not saved; dropout."""

    def __init__(self) -> None:
        super().__init__(width=48)
        self.frozen = nn.Parameter(torch.rand(48), requires_grad=False)
        self.unused = nn.Linear(3, 5)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        hidden = super().hidden(tokens)
        return F.dropout(hidden * self.frozen.to(hidden.dtype), 0.1)


@dataclass
class Run:
    """A model and all that a program keeps beside it, built from a seed."""

    module: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: Any

    def step(self, batch: Any) -> float:
        """One step; the loss."""
        scaled = isinstance(self.optimizer, hetmem.AdamW)
        loss = self.module(*batch)
        (self.optimizer.scale(loss) if scaled else loss).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        return float(loss.detach())

    def steps(self, first: int, last: int) -> list[float]:
        """Steps `first` to `last` of every run."""
        return [self.step(batch) for batch in token_batches(6)[first:last]]

    def save(self, path: Path, *, wait: bool = True) -> Any:
        """The handle of a save in the background."""
        extra = {"scheduler": self.scheduler.state_dict(), "rng": torch.get_rng_state()}
        options: Any = {} if wait else {"wait": False}
        return hetmem.save(path, self.module, self.optimizer, extra, **options)

    def load(self, path: Path) -> None:
        extra = hetmem.load(path, self.module, self.optimizer)
        self.scheduler.load_state_dict(extra["scheduler"])
        torch.set_rng_state(extra["rng"])


def start(
    directory: Path,
    placement: str = "host",
    optimizer_of: OptimizerOf = lambda module: hetmem.AdamW(module.parameters(), lr=1e-2),
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    chunks: int = 1,
    home_copies: bool | None = None,
    **options: Any,
) -> Run:
    """A new run; `placement` "plain" is without hetmem."""
    torch.manual_seed(seed)
    module: nn.Module = Awkward().to(dtype)
    if placement != "plain":
        sizes: dict[str, Any] = {"device_chunks": "256KiB"} if placement != "resident" else {}
        sizes |= {"host": "192KiB"} if placement == "nvme" else {}
        limits = budget(placement, directory, home_copies=home_copies, **sizes)
        module = manage(module, limits, directory, chunk_bytes=chunks * CHUNK, sanitize=False, **options)
        assert bool(nvme_bytes(module)) == (placement == "nvme")
    optimizer = optimizer_of(module)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[1, 3, 3], gamma=0.5)
    return Run(module, optimizer, scheduler)
