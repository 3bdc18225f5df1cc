"""What a parameter is while homes move, and what is held of it when its memory is given away."""

from __future__ import annotations

import weakref
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hetmem
from hetmem.engine.param_views import stand_in
from hetmem.intercept import registry
from hetmem.memory.chunk import elements, give_away
from tests.engine.harness import manage


@pytest.mark.parametrize("computes", [False, True])
def test_a_weight_whose_home_leaves_the_device_within_a_forward_rests_until_that_is_over(
    computes: bool, tmp_path: Path
) -> None:
    """A custom function takes it as it is then, and its gradient has to be on the device."""
    runtime = registry.of_module(manage(nn.Linear(64, 64), "resident", tmp_path)).runtime
    managed, bindings = runtime.parameters[0], runtime.bindings
    home = managed.home.clone()
    rest = stand_in(home, home.dtype, home.device)
    if computes:
        bindings.leave_home()
    bindings.move_home(managed, home, rest)
    with torch._C.DisableTorchFunctionSubclass():  # else it is faulted in
        assert managed.parameter.data_ptr() == (rest if computes else home).data_ptr()
    bindings.go_home()
    assert managed.parameter.data_ptr() == home.data_ptr()


def test_what_is_given_away_has_memory_of_its_own() -> None:
    """Also with a torch that cannot exchange the memory of storages."""

    class Storage:
        def __init__(self, storage: torch.UntypedStorage) -> None:
            self.data_ptr, self.share_memory_ = storage.data_ptr, storage.share_memory_

    class View:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.untyped_storage = lambda: Storage(tensor.untyped_storage())

    for view in (lambda tensor: tensor, View):
        memory = bytearray(range(64))
        tensor = elements(memoryview(memory), torch.uint8, 32, 16)
        held = tensor[4:8]
        assert give_away(view(tensor))
        memory[:] = bytes(64)
        assert held.tolist() == [20, 21, 22, 23]


class Shares(nn.Linear):
    """Gives the memory of its weight to other processes as it computes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [rows, 64]."""
        self.weight.share_memory_()
        return super().forward(x)


ROOM = hetmem.Budget(device="64MiB", host="64MiB", device_chunks="64KiB", home_copies=False)


def test_no_view_of_a_slot_is_used_again_once_its_storage_was_given_other_memory(tmp_path: Path) -> None:
    plain = nn.Sequential(*(Shares(64, 64, bias=False) for _ in range(8)))
    managed, x = manage(deepcopy(plain), ROOM, tmp_path), torch.randn(4, 64)
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(managed(x), plain(x))


def test_no_view_of_a_slot_outlives_its_memory(tmp_path: Path) -> None:
    managed = manage(nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8))), ROOM, tmp_path)
    runtime = registry.of_module(managed).runtime
    with torch.no_grad():
        managed(torch.randn(4, 64))
    pool = runtime.memory.device_pool
    views = [
        weakref.ref(view.tensor) for layouts in pool.views.values() for _, known in layouts.values() for view in known
    ]
    assert len(views) == 4
    runtime.uses.out_of_memory()
    assert not pool.held_bytes()
    assert [view() for view in views] == [None] * 4


class Hands(nn.Linear):
    """Hands a view of its weight out."""

    def forward(self, x: torch.Tensor) -> Any:
        """x: [rows, 64]."""
        return super().forward(x), self.weight.t()


class Late(nn.Sequential):
    """Computes with a view of its first weight after all of its layers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [rows, 64]."""
        x, view = self[0](x)
        for layer in self[1:]:
            x = layer(x)
        return x + x.detach() @ view.detach()  # which no backward uses again


def test_a_copy_stays_as_long_as_a_view_of_it_that_a_call_has_handed_out(tmp_path: Path) -> None:
    plain = Late(Hands(64, 64, bias=False), *(nn.Linear(64, 64, bias=False) for _ in range(7)))
    managed, x = manage(deepcopy(plain), ROOM, tmp_path, sanitize=False), torch.randn(4, 64)
    for _ in range(4):
        losses = [module(x).square().mean() for module in (plain, managed)]
        assert torch.equal(*losses)
        for loss in losses:
            loss.backward()
