"""Chunks of one slot and of several share the device: nothing fragments, and no more memory is held than is allowed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hetmem
from hetmem.memory.device import SimDevice
from tests.runtime.harness import CHUNK, WIDTH, Recipe, pair, streamed, train_both, vector_batches
from tests.runtime.lazy_device import LazyDevice

SLOTS = 9
KEPT = (0, 3, 6)
"""Their weights stay in use: wherever three slots in a row begin at a multiple of three, one of these lies in it."""


class Keeping(nn.Module):
    """Small layers, of which some weights are kept as they were seen, and a large one that is used at last."""

    def __init__(self) -> None:
        super().__init__()
        self.small = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(SLOTS))
        self.large = nn.Linear(WIDTH, 3 * WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = []
        for index, layer in enumerate(self.small):
            x = torch.tanh(layer(x))
            if index in KEPT:
                kept.append(layer.weight.view(-1))
        y = self.large(x)
        return y + sum(weight.sum() for weight in kept)


class Held:
    """What pools have held at most, in slots; of devices made by `counting`."""

    most = 0


def counting(kind: Any) -> tuple[SimDevice, Held]:
    """A device whose pools note how many slots hold memory, after each was prepared."""
    held = Held()

    class Counting(kind):
        def pool(self, slot_bytes: int, slots: int) -> Any:
            pool: Any = super().pool(slot_bytes, slots)
            prepare: Callable[[int, int], None] = pool.prepare

            def count(place: int, span: int) -> None:
                prepare(place, span)
                held.most = max(held.most, pool.held_slots)

            pool.prepare = count
            return pool

    return Counting(), held


@streamed
@pytest.mark.parametrize("kind", [SimDevice, LazyDevice])
def test_weights_in_use_leave_a_large_one_all_the_room_that_they_do_not_take(
    placement: str, kind: type[SimDevice], tmp_path: Path
) -> None:
    device, held = counting(kind)
    sizes: dict[str, Any] = {"device": "16MiB", "host": "16MiB", "device_chunks": SLOTS * CHUNK}
    if placement == "nvme":
        sizes |= {"host": 13 * CHUNK, "nvme": "16MiB", "nvme_dir": tmp_path}
    plain, managed = pair(Keeping, hetmem.Budget(**sizes), tmp_path, device=device)
    train_both(plain, managed, vector_batches(3, 4, WIDTH), Recipe())
    assert held.most == SLOTS
    assert hetmem.report(managed).to_dict()["tiers"]["device"]["chunk_peak_bytes"] <= SLOTS * CHUNK
