"""Shared by the tests of streamed gradients that stay on the device: models, their optimizers, and what is counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import hetmem
from hetmem import testing
from tests.engine.harness import CHUNK, adamws, pair, vector_batches
from tests.optim.machines import SLOW_HOST
from tests.optim.test_streamed_gradients import train_apart

ODD, EVEN = (63, 65), (64, 64)
"""Weights of 4095 elements, 15 of which the host updates, and of 4096. Each is a chunk."""
LAYERS = 8
OPTIONS = {"overlap": "backward", "gradients": "streamed"}


class Chain(nn.Module):
    """Layers used one after the other, there and back: gradients arrive chunk by chunk."""

    def __init__(self, shape: tuple[int, int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(*shape[:: 1 if at % 2 else -1], bias=False) for at in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(self.layers[0].weight.dtype)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def room(mixed: torch.dtype | None, chunks: int = LAYERS) -> hetmem.Budget:
    """The device may have a copy of each chunk and, for updates, two of them with all roles; no homes."""
    copies = chunks * CHUNK // (1 if mixed is None else 2)
    return hetmem.Budget(device="64MiB", host="64MiB", device_chunks=copies + int(2 * 4.5 * CHUNK))


def both(
    directory: Path,
    *,
    shape: tuple[int, int] = ODD,
    mixed: torch.dtype | None = None,
    device: Any = None,
    overlap: str = "backward",
    build: Callable[[], nn.Module] | None = None,
    chunks: int = LAYERS,
) -> tuple[nn.Module, nn.Module, Any]:
    """A plain model, the same managed, and their optimizers, trained until states are streamed."""
    device = device or hetmem.SimDevice()
    options = {"mixed_precision": mixed, "hardware": SLOW_HOST, "device": device}
    plain, managed = pair(build or (lambda: Chain(shape)), room(mixed, chunks), directory, **options)
    optimizers = adamws(plain, managed, overlap=overlap, gradients="streamed")
    train_apart(plain, managed, optimizers, batches(shape, 3), mixed)
    return plain, managed, optimizers


def batches(shape: tuple[int, int], steps: int) -> list[Any]:
    return vector_batches(steps, 4, shape[1])


def crossed(module: nn.Module) -> dict[str, int]:
    return testing.of(module).link_bytes()


def updated(module: nn.Module) -> Counter[str]:
    return Counter(testing.of(module).updated_bytes())


def grads_on_device(module: nn.Module) -> list[int]:
    """The chunks whose gradients have homes there."""
    return [chunk.index for chunk in testing.of(module).chunks() if chunk.homes.get("grad") == "device"]
