"""A plain and a managed model that train alike, the managed one on a disk that may fail."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.engine.harness import adamws, assert_same_states, assert_same_weights, loss_of, mlp, pair, vector_batches
from tests.faults.disk import BLOCK_BYTES, FaultyDisk

REQUEST_BYTES = 2 * BLOCK_BYTES
CHUNK_BYTES = 4 * BLOCK_BYTES
WHERE = r"cannot (read|write) 8192 bytes at offset \d+ of the NVMe store in '{}'"


class Training:
    """A plain and a managed model, in step after one update; all of the managed one is on `disk`."""

    def __init__(self, disk: FaultyDisk, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        disk.used_by(monkeypatch, threads=2, request_bytes=REQUEST_BYTES)
        self.disk = disk
        self.plain, self.managed = pair(mlp, "nvme", directory)
        self.left, self.right = adamws(self.plain, self.managed)
        self.batches = iter(vector_batches(9, 8, 64))
        self.where = re.compile(WHERE.format(re.escape(str(directory))))
        self.both()

    def both(self) -> None:
        """One undisturbed step of both."""
        batch = next(self.batches)
        for module, optimizer in ((self.plain, self.left), (self.managed, self.right)):
            loss_of(module, batch).backward()
            optimizer.step()
            optimizer.zero_grad()

    def step_to_the_end(self) -> None:
        """A managed step, and the writes of states that trail behind it."""
        self.right.step()
        self.right.synchronize()

    def assert_same(self) -> None:
        """All weights and states have the bits of the undisturbed run."""
        assert_same_weights(self.plain, self.managed)
        assert_same_states(self.left, self.right)

    def homes(self) -> list[tuple[str, torch.Tensor]]:
        """Weights and states of the managed model as they lie on the disk, copied."""
        self.settle()
        return tensors(self.managed, self.right)

    def settle(self) -> None:
        """Wait until nothing is under way to or from the disk."""
        (store,) = self.disk.stores
        while store.is_busy:
            time.sleep(0.001)


def tensors(module: nn.Module, optimizer: torch.optim.Optimizer) -> list[tuple[str, torch.Tensor]]:
    found = []
    for name, parameter in module.named_parameters():
        state = optimizer.state[parameter]
        found += [(name, parameter.detach().clone())]
        found += [(f"{what} of {name}", state[what].clone()) for what in ("exp_avg", "exp_avg_sq")]
    return found
