"""Forwards without backwards, as text is generated: what fits of the weights stays on the device, the rest streams."""

from __future__ import annotations

import copy
import math
from collections import OrderedDict
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.profiler import profile

import hetmem
from hetmem import testing
from hetmem.errors import DeviceOutOfMemoryError

LAYERS, WIDTH = 40, 64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("room", [5, 20])
def test_a_token_fetches_the_weights_that_have_no_room_and_no_others(dtype: torch.dtype, room: int) -> None:
    """Beside a slot that computes and one that is filled meanwhile. Eviction by last use would fetch all."""
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))).to(dtype)
    chunk = WIDTH * WIDTH * dtype.itemsize
    limits = hetmem.Budget(device="64MiB", host="16MiB", device_chunks=room * chunk)
    model = hetmem.manage(copy.deepcopy(plain), limits, device=hetmem.SimDevice(), chunk_bytes=chunk)
    assert testing.of(model).memory().device_slots == room
    x, crossed = torch.randn(1, WIDTH, dtype=dtype), []
    with torch.no_grad():
        for _ in range(5):
            assert torch.equal(model(x), plain(x))
            crossed.append(hetmem.report(model).to_dict()["links"]["host_to_device"]["bytes"])
    fetched = [after - before for before, after in pairwise(crossed)]
    assert fetched[-1] == fetched[-2] == (LAYERS - (room - 2)) * chunk


def test_a_model_generates_trains_and_generates_with_the_bits_of_torch_and_its_own_hooks() -> None:
    """A model that is whole on the device computes without hooks of hetmem's in its parts as long as it generates."""
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    model = hetmem.manage(copy.deepcopy(plain), hetmem.Budget(device="64MiB", host=0), device=hetmem.SimDevice())
    optimizers = [torch.optim.AdamW(plain.parameters(), fused=True), hetmem.AdamW(model.parameters())]
    x, seen = torch.randn(3, WIDTH), list[str]()
    for round_ in range(2):
        with torch.no_grad():
            for _ in range(4):
                assert torch.equal(model(x), plain(x))
        if not round_:
            model[2].register_forward_hook(lambda *_: seen.append("called"))
        for module, optimizer in zip((plain, model), optimizers, strict=True):
            (module(x) + module[1](x)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        assert torch.equal(model(x), plain(x))
        assert torch.equal(model[1](x), plain[1](x))
    assert len(seen) == 7
    hetmem.release(model)
    hooks: list[OrderedDict[int, object]] = [part._forward_hooks for part in model.modules()]
    hooks += [part._forward_pre_hooks for part in model.modules()]
    assert sum(map(len, hooks)) == 1, "the one of the program"


def test_a_model_that_is_frozen_before_it_is_managed_is_whole_where_its_weights_fit() -> None:
    """Else there is room for gradients and states, and the report says so."""

    def managed(*, frozen: bool) -> nn.Module:
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))).requires_grad_(not frozen)
        limits = hetmem.Budget(device="128KiB", host="1MiB")
        hetmem.manage(model, limits, device=hetmem.SimDevice(), chunk_bytes="16KiB")
        with torch.no_grad():
            for _ in range(3):
                model(torch.ones(1, WIDTH))
        return model

    whole, streamed = managed(frozen=True), managed(frozen=False)
    assert testing.of(whole).memory().resident
    assert not testing.of(streamed).memory().resident
    assert "requires_grad_(False) before manage" in str(hetmem.report(streamed)).replace("\n", " ")


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
def test_a_token_of_a_model_that_is_whole_in_16_bits_makes_no_copy_of_its_weights(frozen: bool) -> None:
    """It reads 2 bytes of each, and a copy of the float32 ones would read and write 6 more."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))).requires_grad_(not frozen)
    limits = hetmem.Budget(device="64MiB", host=0)
    hetmem.manage(model, limits, device=hetmem.SimDevice(), mixed_precision=torch.bfloat16)
    x, copied = torch.ones(1, WIDTH), []
    with torch.no_grad():
        for token in range(6):
            if token == 4:
                model[1].weight.data.mul_(2)
            with profile(record_shapes=True) as seen:
                model(x)
            shapes = [event.input_shapes for event in seen.function_events or () if event.name.endswith("copy_")]
            copied.append(any(math.prod(shape) >= WIDTH * WIDTH for given in shapes for shape in given if shape))
    assert copied[2:] == [False, False, True, False]


class Remembering(nn.Module):
    """Keeps what it makes of each token in the object that it is given, as a cache of keys and values does."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)))

    def forward(self, x: torch.Tensor, cache: Any) -> torch.Tensor:
        cache.kept.append(self.layers(x))
        last: torch.Tensor = cache.kept[-1]
        return last


def test_a_cache_that_grows_by_each_token_counts_within_the_budget() -> None:
    model = Remembering()
    limits = hetmem.Budget(device="256KiB", host="1MiB", device_chunks="48KiB")
    hetmem.manage(model, limits, device=hetmem.SimDevice(), chunk_bytes="16KiB")
    cache = SimpleNamespace(kept=[])

    @torch.no_grad()
    def generate() -> None:
        for _ in range(100):
            model(torch.ones(64, WIDTH), cache)

    with pytest.raises(DeviceOutOfMemoryError, match=r"forward\swithout\sgradients"):
        generate()
    assert 5 <= len(cache.kept) <= 15, "of 16 KiB each"
