"""Chunks of one slot and of several share the device: nothing fragments, and no more memory is held than is allowed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hetmem
from hetmem import SimDevice, testing
from tests.engine.harness import CHUNK, WIDTH, Recipe, manage, pair, streamed, train_both, vector_batches
from tests.engine.lazy_device import LazyDevice

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


@pytest.mark.each
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


def test_memory_of_a_home_that_went_back_is_no_chunk_s_any_more(tmp_path: Path) -> None:
    """Its next owner may be an activation, which counts."""
    limits = hetmem.Budget(device="1MiB", host="1MiB", device_chunks=7 * CHUNK)
    managed = manage(nn.Linear(WIDTH, WIDTH), limits, tmp_path)
    optimizer, inside = hetmem.AdamW(managed.parameters()), testing.of(managed)
    for _ in range(3):
        managed(torch.ones(2, WIDTH)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    (moved,) = (chunk for chunk in inside.chunks() if chunk.moved)
    address, idle = managed.get_parameter(moved.parameters[0]).data_ptr(), inside.memory().idle_bytes
    assert inside.place_of(address) == "device"
    assert inside.memory().moved_bytes == 4 * CHUNK
    inside.make_room()
    assert inside.place_of(address) == "other"
    assert inside.memory().idle_bytes == idle + 4 * CHUNK


class Pinning(SimDevice):
    """Counts what is page-locked."""

    locked = 0

    def pin(self, host: Any, start: int = 0) -> Callable[[], None]:
        self.locked += 1
        return self._unpin

    def _unpin(self) -> None:
        self.locked -= 1


def test_page_locking_ends_with_the_management(tmp_path: Path) -> None:
    device = Pinning()
    managed = manage(nn.Linear(WIDTH, WIDTH), "host", tmp_path, device=device)
    assert device.locked > 0
    hetmem.release(managed)
    assert device.locked == 0


@pytest.mark.each
@pytest.mark.parametrize("overlap", ["off", "backward"])
@pytest.mark.parametrize("placement", ["resident", "host"])
def test_what_the_link_carries_is_every_gradient_that_is_not_at_home_on_the_device(
    placement: str, overlap: str, tmp_path: Path
) -> None:
    managed = manage(nn.Linear(WIDTH, WIDTH), placement, tmp_path, mixed_precision=torch.bfloat16)
    optimizer = hetmem.AdamW(managed.parameters(), overlap=overlap)
    inside = testing.of(managed)
    for step in range(1, 4):
        managed(torch.ones(2, WIDTH, dtype=torch.bfloat16)).sum().backward()
        itemsize = 4 if overlap == "off" else 2
        expected = step * itemsize * (WIDTH + 1) * WIDTH if placement == "host" else 0
        assert inside.link_bytes()["device_to_host"] == expected
        optimizer.step()
        optimizer.zero_grad()
