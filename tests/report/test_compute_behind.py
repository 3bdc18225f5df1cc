"""On a device whose compute runs behind the host the report says what compute did: runs whose seconds are known."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import hetmem
from tests.engine.lazy_device import ClockedDevice

WIDTH, LAYERS, ROWS = 64, 8, 4
LAYER_BYTES = 4 * WIDTH * WIDTH
COPY = 0.01
"""Seconds in which a layer crosses a link."""


class Launched(torch.autograd.Function):
    """Passes values on; compute takes its time for them, twice as long backwards."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: Timed) -> torch.Tensor:
        ctx.layer = layer
        layer.device.runs(layer.seconds, launch=layer.launch)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        layer = ctx.layer
        layer.device.runs(2 * layer.seconds, launch=2 * layer.launch)
        return grad.clone(), None


class Timed(nn.Module):
    def __init__(self, device: ClockedDevice, seconds: float, launch: float) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)
        self.device, self.seconds, self.launch = device, seconds, launch

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = Launched.apply(self.linear(x), self)
        return out


def run(seconds: float, launch: float, *, chunks: int, steps: int = 4) -> dict[str, Any]:
    """The report of a model of layers that take so long; `chunks` of them have a place on the device."""
    device = ClockedDevice(rate=LAYER_BYTES / COPY)
    model: Any = nn.Sequential(*(Timed(device, seconds, launch) for _ in range(LAYERS)))
    limits = hetmem.Budget(device="4MiB", host="8MiB", device_chunks=chunks * LAYER_BYTES)
    hetmem.manage(model, limits, device=device, chunk_bytes=LAYER_BYTES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(steps):
        model(torch.ones(ROWS, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    data = hetmem.report(model).to_dict()
    hetmem.release(model)
    return data


def about(seconds: float) -> Any:
    return pytest.approx(seconds, rel=0.05)


def test_compute_that_hides_its_copies_binds_and_the_host_that_waits_for_it_does_not() -> None:
    """The host asks for a step within 24 ms and waits for 700: compute of before was the one, stalls the other."""
    data = run(0.03, 0.001, chunks=4)
    step = data["step"]
    assert (step["binding"], step["terms"]["compute"]) == ("compute", about(LAYERS * 3 * 0.03))
    assert step["terms"]["launching"] == about(LAYERS * 3 * 0.001)
    assert step["stall_seconds"] == about(2 * COPY), "for the first weight, and for the last gradient"
    assert step["seconds"] == about(step["terms"]["compute"] + 2 * COPY)
    assert step["host_wait_seconds"] == about(step["seconds"] - step["terms"]["launching"])
    assert step["caught_up_seconds"] == 0
    assert "Memory is not the limit" in step["sentence"]


def test_compute_that_waits_for_copies_is_without_what_it_waited() -> None:
    data = run(0.001, 0.00001, chunks=4)
    step, blocks = data["step"], data["timeline"]["blocks"]
    assert step["terms"]["compute"] == about(LAYERS * 3 * 0.001)
    assert step["terms"]["host_to_device"] == about(step["bytes"]["host_to_device"] / LAYER_BYTES * COPY)
    assert step["binding"] == "host_to_device"
    assert step["seconds"] == about(step["terms"]["compute"] + step["stall_seconds"])
    weights = sum(block["stall_seconds"] for block in blocks if block["role"] == "param")
    forward = COPY + (LAYERS - 1) * (COPY - 0.001)  # each hides behind the layer before it
    backward = COPY - 3 * 0.002 + 2 * (COPY - 0.002)  # the first behind those three that are there, the first layer's
    assert weights == about(forward + backward), "gradients of weights need none of the first layer"
    first = data["faults"] - 3 * step["faults"]
    assert (step["faults"], first) == (6, 11), "others were on their way, except in the first step"


def test_compute_that_has_caught_up_with_its_host_is_bound_by_launching() -> None:
    step = run(0.001, 0.02, chunks=LAYERS)["step"]
    assert step["terms"]["launching"] == about(LAYERS * 3 * 0.02)
    assert step["binding"] == "launching"
    assert step["caught_up_seconds"] == about(step["terms"]["compute"])
    assert step["sentence"].startswith("Launching binds: 480.0 ms of a step of ")
    assert "Compile the blocks" in step["sentence"]


def test_what_fits_of_the_weights_stays_while_a_model_generates() -> None:
    """Each forward uses all layers in one order, and no other schedule would fetch fewer of them."""
    device, places = ClockedDevice(rate=LAYER_BYTES / COPY), 5
    model: Any = nn.Sequential(*(Timed(device, 0.03, 0.001) for _ in range(LAYERS)))
    limits = hetmem.Budget(device="4MiB", host="8MiB", device_chunks=places * LAYER_BYTES)
    hetmem.manage(model.eval(), limits, device=device, chunk_bytes=LAYER_BYTES)
    with torch.no_grad():
        for _ in range(6):
            model(torch.ones(1, WIDTH))
    step = hetmem.report(model).to_dict()["step"]
    assert step["bytes"]["host_to_device"] <= (LAYERS - places) * LAYER_BYTES
    hetmem.release(model)
