"""Gradients on their way home take device memory for as long as their link is slow: no reason to give up, nor to take
more of the device than there is."""

from __future__ import annotations

import copy
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import hetmem
from hetmem.intercept import registry
from hetmem.memory.live_bytes import DeviceMonitor
from tests.engine.harness import assert_same_grads, assert_same_weights

BATCH = torch.randn(8, 256, generator=torch.Generator().manual_seed(1))


@pytest.mark.each
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


class Slowing(hetmem.SimDevice):
    """Its link home takes `seconds` more for each gradient."""

    seconds = 0.0

    def gradient_out(self, target: torch.Tensor, arrived: torch.Tensor, *, add: bool) -> None:
        time.sleep(self.seconds)
        super().gradient_out(target, arrived, add=add)


class MeanSquare(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.square().mean()


def peak_of_a_backward(module: nn.Module, batch: torch.Tensor) -> int:
    """The most bytes that are on the device at one time, counted by a monitor of the test's own: hetmem's counts only
    what it has not seen before."""
    runtime, peak = registry.of_module(module).runtime, 0

    def grown(operator: str, live_bytes: int) -> None:
        nonlocal peak
        peak = max(peak, live_bytes + runtime.room.chunk_bytes())

    monitor = DeviceMonitor(
        runtime.memory.is_home_address, runtime.memory.is_device_address, grown, torch.device("cpu"), strict=False
    )
    with monitor:
        monitor.count("inputs", [batch])
        loss = module(batch)
    peak = 0
    monitor.watch_backward(loss)
    loss.backward()
    return peak


@pytest.mark.each
@pytest.mark.parametrize("layers", [4, 8])
@pytest.mark.parametrize("biases", [True, False], ids=["biases", "no biases"])
def test_a_later_backward_waits_for_gradients_that_the_first_had_not_on_their_way(layers: int, biases: bool) -> None:
    """Nobody counts there: four of them were on a device that had room for one, and it held 1.5 times its memory."""
    module = nn.Sequential(*[nn.Linear(256, 256, bias=biases) for _ in range(layers)], MeanSquare())
    device, limits = Slowing(device_to_host="1GB"), hetmem.Budget(device="1MiB", host="32MiB")
    hetmem.manage(module, limits, device=device, chunk_bytes=256 * 1024)
    for seconds in (0.0, 0.02, 0.02):
        device.seconds = seconds
        assert peak_of_a_backward(module, BATCH) <= 1 << 20
        module.zero_grad()


def test_a_later_backward_has_room_before_its_first_weight(tmp_path: Path) -> None:
    """What its first nodes need was known of no moment, and copies kept that room."""
    module = nn.Sequential(*[part for _ in range(8) for part in (nn.Linear(256, 256), nn.GELU())], MeanSquare())
    limits = hetmem.Budget(device="6MiB", host="32MiB")
    hetmem.manage(module, limits, device="sim", chunk_bytes=256 * 1024)
    batch = BATCH.repeat(32, 1)
    for _ in range(3):
        assert peak_of_a_backward(module, batch) <= 6 << 20
        module.zero_grad()


class Wide(nn.Module):
    """Layers around a frozen one of four times their size, whose weight a backward needs in its middle."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.wide = nn.Linear(256, 256, bias=False), nn.Linear(256, 1024, bias=False)
        self.behind = nn.Sequential(*[nn.Linear(256, 256, bias=False) for _ in range(3)])
        self.wide.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.behind(self.wide(self.before(x))[:, :256]).square().mean()


@pytest.mark.parametrize("speed", ["20MB", None])
def test_a_weight_waits_for_gradients_that_lie_in_its_way(speed: str | None) -> None:
    """The error said that 40 KiB and 1 MiB do not fit in 1.3 MiB: two gradients of 256 KiB had left meanwhile."""
    torch.manual_seed(0)
    plain = Wide()
    limits, device = hetmem.Budget(device="1344KiB", host="32MiB"), hetmem.SimDevice(device_to_host=speed)
    managed = hetmem.manage(copy.deepcopy(plain), limits, device=device, chunk_bytes=256 * 1024)
    for _ in range(3):
        for model in (plain, managed):
            model.zero_grad()
            model(BATCH).backward()
        assert_same_grads(plain, managed)


def test_what_dies_while_something_is_counted_is_taken_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the thread of a copy, or by the garbage collector: a sum that has begun must not put its bytes back."""
    monitor = DeviceMonitor(lambda _: False, lambda _: False, lambda *_: None, torch.device("cpu"), strict=False)
    with monitor:
        dying = [torch.ones(100) for _ in range(3)]
    size = torch.UntypedStorage.nbytes

    def dies_meanwhile(storage: torch.UntypedStorage) -> int:
        dying.pop()
        return size(storage)

    monkeypatch.setattr(torch.UntypedStorage, "nbytes", dies_meanwhile)
    with monitor:
        kept = torch.ones(50)
    dying.clear()
    assert monitor.live_bytes == 4 * kept.numel()
    del kept
    assert monitor.live_bytes == 0
