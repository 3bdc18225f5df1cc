"""`weight.data` within a forward is the weight, and counts no versions: what is written there goes home at once, and a
module that only keeps it changes nothing."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from hetmem import testing
from hetmem.errors import ManageError, StoreError
from tests.engine.harness import (
    BATCHES,
    WIDTH,
    adamws,
    assert_same,
    assert_same_grads,
    assert_same_weights,
    everywhere,
    loss_of,
    manage,
    mlp,
    pair,
    streamed,
    train_both,
)


class Keeps(nn.Module):
    """Has `data` of a weight from its first forward on, and writes to it in the forwards that `writes` names."""

    def __init__(self, writes: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.layer, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.writes, self.forwards = writes, 0
        self.kept: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.other(self.layer(x))
        if self.kept is None:
            self.kept = self.layer.weight.data
        if self.forwards in self.writes:
            self.kept.mul_(0.5)
        self.forwards += 1
        return x.square().mean()


@pytest.mark.each
@everywhere
@pytest.mark.parametrize("writes", [(), (0,), (1, 2)], ids=["kept", "first", "later"])
@pytest.mark.parametrize("hetmems", [True, False], ids=["AdamW", "torch"])
def test_data_that_a_module_keeps_undoes_no_update(
    hetmems: bool, writes: tuple[int, ...], placement: str, tmp_path: Path
) -> None:
    """It shows what was before an update, and was taken for something that the module had written since."""
    plain, managed = pair(lambda: Keeps(writes), placement, tmp_path)
    left, right = adamws(plain, managed)
    optimizers = (left, right if hetmems else torch.optim.AdamW(managed.parameters(), lr=1e-2, fused=True))
    for step in range(4):
        losses = [loss_of(module, BATCHES[step]) for module in (plain, managed)]
        assert_same(*losses, f"step {step} loss")
        for loss, optimizer in zip(losses, optimizers, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert_same_weights(plain, managed, f"step {step}")


@everywhere
def test_what_the_user_writes_at_home_is_not_undone_by_data_that_a_module_keeps(placement: str, tmp_path: Path) -> None:
    """Between a forward and its backward, which compares the one with the other."""
    plain, managed = pair(Keeps, placement, tmp_path)
    for step in range(2):
        losses = [loss_of(module, BATCHES[step]) for module in (plain, managed)]
        for module, loss in zip((plain, managed), losses, strict=True):
            module.layer.weight.data.mul_(0.5)
            loss.backward()
        assert_same(*losses, f"step {step} loss")
        assert_same_grads(plain, managed, f"step {step}")
        assert_same_weights(plain, managed, f"step {step}")


def last(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = layer(x)
    layer.weight.data.mul_(0.5)
    return y


def beside_a_counted_view(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    turned = layer.weight.T
    layer.weight.data.mul_(0.5)
    return x @ turned


def sign_of_zero(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    layer.bias.data.neg_()
    return layer(x) + x


class Writes(nn.Module):
    """Writes to weights by `way`, and computes something."""

    def __init__(self, way: Callable[[nn.Linear, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layer, self.other, self.way = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), way
        nn.init.zeros_(self.layer.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.way(self.layer, self.other(x))


@pytest.mark.each
@streamed
@pytest.mark.parametrize("way", [last, beside_a_counted_view, sign_of_zero])
def test_what_is_written_to_data_is_at_home_when_the_forward_is_over(
    way: Callable[[nn.Linear, torch.Tensor], torch.Tensor], placement: str, tmp_path: Path
) -> None:
    plain, managed = pair(lambda: Writes(way), placement, tmp_path)
    for step in range(3):
        assert_same(plain(BATCHES[step][0]), managed(BATCHES[step][0]), f"forward {step}")
        assert_same_weights(plain, managed, f"forward {step}")


class HasView(nn.Module):
    """Has a view of its weight from the beginning, where `keep` puts it."""

    def __init__(self, keep: Callable[[nn.Module, nn.Parameter], None]) -> None:
        super().__init__()
        self.layer, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        keep(self, self.layer.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.other(self.layer(x))
        return y


def kept_by_a_function(weight: nn.Parameter) -> Callable[[], torch.Tensor]:
    turned = weight.T
    return lambda: turned


KEPT: dict[str, Callable[[nn.Module, nn.Parameter], None]] = {
    "kept": lambda module, weight: setattr(module, "kept", weight.T),
    "layer.kept": lambda module, weight: setattr(module.layer, "kept", weight.data[3:]),
    "buffer": lambda module, weight: module.register_buffer("buffer", weight.detach(), persistent=False),
    "kept in a dictionary": lambda module, weight: setattr(module, "kept", {"a": (0, weight.detach())}),
    "kept in an object": lambda module, weight: setattr(module, "kept", SimpleNamespace(here=weight.T)),
    "kept by a function": lambda module, weight: setattr(module, "kept", kept_by_a_function(weight)),
    "array": lambda module, weight: setattr(module, "array", weight.detach().numpy()),
    "kept in a module": lambda module, weight: setattr(module, "kept", [linear_with(weight.data)]),
}


def linear_with(weight: torch.Tensor) -> nn.Linear:
    layer = nn.Linear(WIDTH, WIDTH)
    layer.weight = nn.Parameter(weight)
    return layer


@pytest.mark.parametrize("path", KEPT)
def test_a_view_from_before_manage_is_refused_by_name(path: str, tmp_path: Path) -> None:
    module = HasView(KEPT[path])
    before = module.layer.weight.data
    with pytest.raises(
        ManageError, match=rf"^{re.escape(path.split()[0])} is a view of layer.weight that was made before"
    ):
        manage(module, "host", tmp_path)
    assert module.layer.weight.data_ptr() == before.data_ptr()


def with_its_state_dict(module: nn.Module, _: Path) -> Any:
    return module.state_dict()


def assigned(module: nn.Module, directory: Path) -> Any:
    torch.save(module.state_dict(), directory / "weights")
    saved = torch.load(directory / "weights", mmap=True)
    module.load_state_dict(saved, assign=True)
    return saved


def in_one_vector(module: nn.Module, _: Path) -> Any:
    vector = nn.utils.parameters_to_vector(module.parameters()).detach()
    nn.utils.vector_to_parameters(vector, module.parameters())
    return vector


def normalized(module: nn.Module, _: Path) -> None:
    nn.utils.spectral_norm(module[0])


def beside_a_buffer(module: nn.Module, _: Path) -> None:
    """In one memory with a weight, behind it."""
    weight = module[0].weight
    memory = torch.cat([weight.detach().flatten(), torch.ones(WIDTH)])
    weight.data = memory[:-WIDTH].view_as(weight)
    module.register_buffer("beside", memory[-WIDTH:])


@pytest.mark.parametrize("hold", [with_its_state_dict, assigned, in_one_vector, normalized, beside_a_buffer])
@everywhere
def test_what_others_hold_of_the_memory_of_weights_is_no_view_of_the_module(
    hold: Callable[[nn.Module, Path], Any], placement: str, tmp_path: Path
) -> None:
    held = []

    def build() -> nn.Module:
        module = mlp()
        held.append(hold(module, tmp_path))
        return module

    train_both(*pair(build, placement, tmp_path), BATCHES)


VIEWS: dict[str, Callable[[nn.Parameter], torch.Tensor]] = {
    "turned": lambda weight: weight.T,
    "turned beside the weight": lambda weight: weight.T,
    "detached": lambda weight: weight.detach().T,
    "data": lambda weight: weight.data.T,
}


class Caches(nn.Module):
    """Makes a view of its weight once, and uses that from then on."""

    def __init__(self, view: str, *, writes: bool = False) -> None:
        super().__init__()
        self.layer, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.view, self.writes, self.cached = view, writes, torch.empty(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.cached.numel():
            self.cached = VIEWS[self.view](self.layer.weight)
        if self.writes:
            with torch.no_grad():
                self.layer.weight.mul_(0.99)
        y: torch.Tensor = self.other(x @ self.cached)
        return y if self.view == "turned" else y + self.layer(x)


@pytest.mark.each
@everywhere
@pytest.mark.parametrize("overlap", ["off", "backward", "forward"])
@pytest.mark.parametrize("writes", [False, True], ids=["reads", "writes"])
@pytest.mark.parametrize("view", VIEWS)
def test_a_view_that_a_module_keeps_shows_the_weight_as_it_is(
    view: str, writes: bool, overlap: str, placement: str, tmp_path: Path
) -> None:
    plain, managed = pair(lambda: Caches(view, writes=writes), placement, tmp_path)
    optimizers = adamws(plain, managed, overlap=overlap)
    for step in range(4):
        losses = [loss_of(module, BATCHES[step]) for module in (plain, managed)]
        assert_same(*losses, f"step {step} loss")
        for loss, optimizer in zip(losses, optimizers, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert_same(plain.cached, managed.cached, f"step {step} view")
        with torch.no_grad():  # and what the user writes
            for module in (plain, managed):
                module.layer.weight.mul_(0.9)
        assert_same_weights(plain, managed, f"step {step}")


def test_a_step_of_torch_that_a_drive_did_not_let_be_noted_is_not_undone_by_data_that_a_module_keeps(
    tmp_path: Path,
) -> None:
    plain, managed = pair(Keeps, "host", tmp_path)
    optimizers = [torch.optim.AdamW(module.parameters(), lr=1e-2, fused=True) for module in (plain, managed)]
    for batch in BATCHES:
        for module, optimizer in zip((plain, managed), optimizers, strict=True):
            loss_of(module, batch).backward()
            with testing.failing("home written", lambda: StoreError(5, "cannot read"), times=1):
                optimizer.step()
            optimizer.zero_grad()
        assert_same_weights(plain, managed)
