"""A weight's raw pointer is right for the length of the call of the module that owns it, and in a node that unpacked
it."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hetmem
from hetmem import testing
from tests.engine.harness import (
    WIDTH,
    Recipe,
    adamws,
    assert_same_weights,
    everywhere,
    pair,
    precisions,
    streamed,
    train_both,
    vector_batches,
)


def read(address: int, like: torch.Tensor) -> torch.Tensor:
    """What lies at `address`, as a kernel of somebody's would find it."""
    memory = (ctypes.c_uint8 * (like.numel() * like.itemsize)).from_address(address)
    return torch.frombuffer(bytearray(memory), dtype=like.dtype).view(like.shape).clone()


class ByPointer(torch.autograd.Function):
    """A product that reads its weight through its address, after all else was used that there is."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, owner: Any) -> torch.Tensor:
        address = weight.data_ptr()
        owner.use_others()
        ctx.save_for_backward(x, weight)
        return x @ read(address, weight).t()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        address = weight.data_ptr()
        return grads[0] @ read(address, weight), grads[0].t() @ x, None


class Raw(nn.Module):
    def __init__(self, others: list[nn.Linear]) -> None:
        super().__init__()
        self.weight, self.others = nn.Parameter(torch.randn(WIDTH, WIDTH) / 8), others

    def use_others(self) -> None:
        with torch.no_grad():
            for other in self.others:
                other(torch.zeros(1, WIDTH, dtype=other.bias.dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = ByPointer.apply(x, self.weight, self)
        return y


class Kernels(nn.Module):
    """Layers that are computed by pointers, of which a few have room at once."""

    def __init__(self) -> None:
        super().__init__()
        self.others = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8))
        self.raw = nn.ModuleList(Raw(list(self.others)) for _ in range(4))  # type: ignore[arg-type]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.raw:
            x = torch.tanh(layer(x))
        return x


@pytest.mark.pairs
@everywhere
@precisions
@pytest.mark.parametrize("sanitize", [True, False], ids=["checked", "known"])
def test_a_function_that_reads_a_weight_through_its_address_finds_it(
    sanitize: bool, mixed: torch.dtype | None, placement: str, tmp_path: Path
) -> None:
    modules = pair(Kernels, placement, tmp_path, mixed_precision=mixed, sanitize=sanitize)
    train_both(*modules, vector_batches(3, 4, WIDTH, dtype=mixed), Recipe(mixed=mixed))


class Holds(nn.Module):
    """Asks for the address of a weight of another module: that stays there until its own call is over."""

    def __init__(self) -> None:
        super().__init__()
        self.others = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8))
        self.lender = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.lender.weight
        address = weight.data_ptr()
        for other in self.others:
            x = torch.tanh(other(x))
        return x @ read(address, weight.detach())


@streamed
def test_the_address_of_a_weight_of_another_module_is_right_until_the_call_is_over(
    placement: str, tmp_path: Path
) -> None:
    plain, managed = pair(Holds, placement, tmp_path)
    with torch.no_grad():
        for batch in vector_batches(3, 4, WIDTH):
            assert torch.equal(plain(*batch), managed(*batch))
    assert not testing.of(managed).holds_views()


@streamed
def test_under_autocast_no_cast_of_a_weight_outlives_its_use(placement: str, tmp_path: Path) -> None:
    def layers() -> nn.Module:
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(24)))

    plain, managed = pair(layers, placement, tmp_path)
    for batch in vector_batches(3, 2, WIDTH):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(plain(*batch), managed(*batch))
            assert torch.is_autocast_cache_enabled(), "it is the user's again"
    tier = hetmem.report(managed).to_dict()["tiers"]["device"]
    assert tier["peak_bytes"] - tier["chunk_peak_bytes"] < 24 * WIDTH * WIDTH * 2


@streamed
@pytest.mark.parametrize("within", [False, True], ids=["around", "within"])
def test_under_autocast_a_graph_holds_no_casts_of_weights(within: bool, placement: str, tmp_path: Path) -> None:
    """Around the model, or entered in its forward as `accelerate` does it: plain torch keeps a cast of each weight
    from the forward to the backward."""

    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(24)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=within):
                return self.layers(x)

    plain, managed = pair(Layers, placement, tmp_path)
    optimizers = adamws(plain, managed)
    for batch in vector_batches(3, 2, WIDTH):
        for module, optimizer in zip((plain, managed), optimizers, strict=True):
            with torch.autocast("cpu", torch.bfloat16, enabled=not within):
                loss = module(*batch).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert_same_weights(plain, managed)
        assert torch.is_autocast_cache_enabled(), "it is the user's again"
    tier = hetmem.report(managed).to_dict()["tiers"]["device"]
    assert tier["peak_bytes"] - tier["chunk_peak_bytes"] < 24 * WIDTH * WIDTH * 2 // 2
