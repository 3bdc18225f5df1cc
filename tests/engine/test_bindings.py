"""What a parameter is while homes move, and what is held of it when its memory is given away."""

from __future__ import annotations

import weakref
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import nn

import hetmem
from hetmem.intercept import registry
from hetmem.memory.chunk import elements, give_away
from tests.engine.harness import manage


def test_within_a_forward_modules_have_other_parameters_and_the_model_has_its_own_at_home(tmp_path: Path) -> None:
    """Also where copies come and go; what is not used takes no memory, and what is kept is found again."""
    model: Any = manage(nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)]), "host", tmp_path)
    ours, homes = [*model.parameters()], [parameter.data_ptr() for parameter in model.parameters()]
    kept = {}

    def look(module: Any, args: Any, output: torch.Tensor) -> None:
        kept[module] = module.weight
        assert module.weight is not ours[2] and type(module.weight) is not nn.Parameter
        assert [*model.parameters()] == ours
        with torch._C.DisableTorchFunctionSubclass():  # else functions would compute with the copies
            assert [parameter.data_ptr() for parameter in ours] == homes
            assert module.weight.isnan().all()
        assert torch.equal(module.weight, ours[2]) and module.weight.grad is None

    x = torch.randn(3, 64)
    model(x).sum().backward()
    handle = model[1].register_forward_hook(look)
    gradient = ours[2].grad
    model(x)
    assert ours[2].grad is gradient and model[1].weight is ours[2]
    assert torch.equal(kept[model[1]], ours[2]), "the same weight behind the forward"
    handle.remove()


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
