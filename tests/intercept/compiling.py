"""Models of `test_compiled`, plain and managed, and the ways to compile them."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hetmem
from hetmem import testing
from tests.engine.harness import (
    CHUNK,
    Recipe,
    manage,
    train_both,
)
from tests.engine.lazy_device import UnwatchedDevice

WIDTH, BLOCKS, STEPS = 64, 6, 2
BATCH = (torch.randn(3, WIDTH),)
Ways = dict[str, Callable[[nn.Module, Any], Any]]


class Block(nn.Module):
    """Weights in five chunks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fails:
            fail()
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Stack(nn.Module):
    """`BLOCKS` blocks, each checkpointed where `reentrant` says how, and a function of a weight of its own."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return x


class Chain(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x)


raised: type[BaseException] = ValueError


@torch._dynamo.disable
def fail() -> None:
    """Is not compiled itself."""
    raise raised


class Backend:
    """Runs what it gets as it is, and keeps what it got; with `managed`, its weights must be on the device."""

    def __init__(self) -> None:
        self.graphs: list[int] = []
        self.calls = 0
        self.managed: Callable[[], Any] = lambda: None  # weak, as torch keeps every backend

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        self.graphs.append(sum(node.op.startswith("call") for node in graph.graph.nodes))

        def call(*arguments: Any) -> Any:
            self.calls += 1
            for argument in arguments:
                if isinstance(argument, nn.Parameter):
                    assert self.managed() is None or testing.of(self.managed()).place_of(argument) == "device"
            return graph(*arguments)

        return call


def each_block(model: Any, backend: Any) -> Any:
    for block in model.blocks:
        block.compile(backend=backend)
    return model


def each_forward(model: Any, backend: Any) -> Any:
    for block in model.blocks:
        block.forward = torch.compile(block.forward, backend=backend)
    return model


def each_wrapped(model: Any, backend: Any) -> Any:
    for index, block in enumerate(model.blocks):
        model.blocks[index] = torch.compile(block, backend=backend)
    return model


def whole(model: Any, backend: Any) -> Any:
    return torch.compile(model, backend=backend)


def whole_in_place(model: Any, backend: Any) -> Any:
    model.compile(backend=backend)
    return model


def function_around(model: Any, backend: Any) -> Any:
    @torch.compile(backend=backend)
    def around(x: torch.Tensor) -> torch.Tensor:
        return model(x)

    return around


BY_BLOCK = (each_block, each_forward, each_wrapped)
AS_A_WHOLE = (whole, whole_in_place, function_around)


def limits(slots: int, directory: Path, **changes: Any) -> hetmem.Budget:
    return hetmem.Budget(
        **{"device": slots * CHUNK, "host": "8MiB", "nvme": "8MiB", "nvme_dir": directory, "home_copies": False}
        | changes
    )


def managed_and_plain(
    make: Callable[[], Any], compiled: Callable[[Any, Any], Any], directory: Path, slots: int = 24, **options: Any
) -> tuple[Any, Any, Any, Any, Backend]:
    """A model, the same managed, what to call each by, and the backend of the managed one."""
    torch.manual_seed(0)
    plain = make()
    device = UnwatchedDevice(0)
    managed = manage(copy.deepcopy(plain), limits(slots, directory), directory, device=device, **options)
    backend = Backend()
    backend.managed = weakref.ref(managed)
    call = compiled(plain, Backend()) if compiled is each_wrapped else plain  # whose names are those of wrapped blocks
    return plain, managed, call, compiled(managed, backend), backend


def train(plain: Any, managed: Any, call: Any, call_managed: Any, steps: int = STEPS) -> None:
    """Losses, gradients and weights are the same."""
    calls = {id(plain): call, id(managed): call_managed}
    train_both(
        plain,
        managed,
        [BATCH],
        Recipe(steps=steps),
        loss=lambda module, batch: calls[id(module)](*batch).square().mean(),
    )
