"""Gradients on NVMe are written while the backward that makes them goes on, each chunk once."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hetmem
from hetmem import testing
from tests.engine.harness import CHUNK, WIDTH, assert_same_grads, budget, loss_of, manage, pair
from tests.faults.disk import FaultyDisk

LAYERS, HOST_CHUNKS = 30, 48
"""Weights and a ring of 12 slots in host memory; most gradients, and all states, on NVMe."""


def tower() -> nn.Sequential:
    """Each weight is a chunk."""
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


@contextmanager
def left_in_staging(managed: nn.Module) -> Iterator[list[int]]:
    """At each end of a backward: how many gradients are neither on NVMe nor on their way there."""
    inside, found = testing.of(managed), list[int]()

    def watched(arrive: Callable[..., None], *args: Any) -> None:
        assert sum(chunk.homes.get("grad") == "nvme" for chunk in inside.chunks()) > LAYERS // 2
        found.append(len(inside.unwritten("grad")))
        arrive(*args)

    with testing.around("gradients arrive", watched):
        yield found


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, hetmem.AdamW])
def test_when_a_backward_ends_its_gradients_are_on_their_way(
    optimizer: type[torch.optim.Optimizer], tmp_path: Path
) -> None:
    """Written where somebody wanted their place, and at the end, they left the drive idle while the device computed."""
    module = manage(tower(), budget("nvme", tmp_path, host=HOST_CHUNKS * CHUNK, device_chunks=4 * CHUNK), tmp_path)
    made = optimizer(module.parameters(), lr=1e-3)  # type: ignore[call-arg]
    with left_in_staging(module) as found:
        for _ in range(3):
            loss_of(module, (torch.randn(2, WIDTH),)).backward()
            made.step()
    assert found == [0, 0, 0]


class Twice(nn.Module):
    """Each layer is used twice in a row, and has a gradient of each use on its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [rows, WIDTH]."""
        for layer in self.layers:
            for _ in range(2):
                x = checkpoint(layer, x, use_reentrant=True)
        return x


def test_what_a_backward_adds_to_twice_is_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the second backward on; in the first one nobody knows that more will come."""
    disk = FaultyDisk()
    disk.used_by(monkeypatch)
    plain, managed = pair(Twice, "nvme", tmp_path)
    on_disk, written = sum(parameter.nbytes for parameter in plain.parameters()), []
    for seed in range(3):
        x = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(seed), requires_grad=True)
        for module in (plain, managed):
            module.zero_grad()
            disk.calls.clear()
            loss_of(module, (x,)).backward()
        assert_same_grads(plain, managed)
        written.append(sum(nbytes for verb, _, nbytes in disk.calls if verb == "write") / on_disk)
    assert written == [2, 1, 1]


def test_no_gradient_is_written_while_another_one_of_its_chunk_is_on_its_way(tmp_path: Path) -> None:
    """The write would take what was there before. Each takes 2 ms on its way, for which a backward does not wait."""
    few = WIDTH // 4  # four weights make a chunk
    sizes = [(WIDTH, few), (few, WIDTH)] * 12
    plain = nn.Sequential(*(nn.Linear(there, back, bias=False) for there, back in sizes))
    managed = manage(copy.deepcopy(plain), "nvme", tmp_path, device=hetmem.SimDevice(device_to_host="2MB"))
    for seed in range(3):
        x = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(seed))
        for module in (plain, managed):
            module.zero_grad()
            loss_of(module, (x,)).backward()
        assert_same_grads(plain, managed)
