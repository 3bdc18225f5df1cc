"""Under `torch.autocast` all uses of a weight share one cast, whose gradients torch adds in 16 bits: so are those of a
managed model, and no cast takes memory while its weight is not used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import hetmem
from hetmem.errors import ManageError
from tests.engine.harness import (
    CHUNK,
    WIDTH,
    Recipe,
    Tower,
    budget,
    loss_of,
    pair,
    streamed,
    token_batches,
    train_both,
    vector_batches,
)
from tests.pairs import case


class Uses(nn.Module):
    """Weights that are used more than once, as `way` says."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.first, self.shared, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.tied = nn.Linear(WIDTH, WIDTH, bias=False)
        self.tied.weight = self.shared.weight
        self.convolution = nn.Conv1d(WIDTH, WIDTH, 1)

    def turn(self, x: torch.Tensor) -> torch.Tensor:
        """A part that is called twice."""
        return self.last(torch.relu(self.shared(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.way == "twice":
            return self.turn(torch.relu(self.turn(x)))
        if self.way == "tied":
            return self.tied(self.turn(x))
        if self.way == "function":
            return F.linear(self.turn(x), self.shared.weight) @ self.last.weight
        if self.way == "convolution":
            return self.convolution(self.convolution(x.t()).relu()).t()
        if self.way == "no_grad":
            with torch.no_grad():
                target = self.turn(x)
                with torch.enable_grad():
                    x = self.turn(x)
            return self.turn(x) - target
        for _ in range(2):
            x = x + checkpoint(self.turn, x, use_reentrant=self.way == "reentrant")
        return x


WAYS = ["twice", "tied", "function", "convolution", "no_grad", "reentrant", "checkpoint"]


def around(module: nn.Module, batch: Any) -> torch.Tensor:
    """The loss under one autocast."""
    with torch.autocast("cpu", torch.bfloat16):
        return module(*batch).float().square().mean()


def alike(module: nn.Module, batch: Any) -> torch.Tensor:
    """Two forwards share the casts."""
    with torch.autocast("cpu", torch.bfloat16):
        return (module(module(*batch)) - module(batch[0].flip(0))).float().square().mean()


class Within(nn.Module):
    """Its forward enters autocast, as that of a model of `accelerate` does."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return self.inner(x)


def kept_copies(directory: Path) -> hetmem.Budget:
    """Homes on the host, and room for a copy of each."""
    return budget("host", directory, device_chunks=5 * CHUNK)


CASES = [
    case(enter, placement, way, nightly=(first + second + third) % 5 > 0)
    for first, enter in enumerate(("around", "within", "alike"))
    for second, placement in enumerate(("host", "nvme", "kept"))
    for third, way in enumerate(WAYS)
]


@pytest.mark.parametrize(("enter", "placement", "way"), CASES)
def test_gradients_of_a_weight_are_added_at_one_cast(enter: str, placement: str, way: str, tmp_path: Path) -> None:
    where: Any = kept_copies(tmp_path) if placement == "kept" else placement
    modules = pair(lambda: Within(Uses(way)) if enter == "within" else Uses(way), where, tmp_path)
    loss = {"around": around, "alike": alike, "within": loss_of}[enter]
    batches, recipe = vector_batches(3, 8, WIDTH), Recipe(accumulation=2)
    train_both(*modules, batches, recipe, loss=loss)
    assert torch.is_autocast_cache_enabled()


@streamed
@pytest.mark.parametrize("checkpointing", [None, False, True])
def test_a_tied_head_trains_alike(checkpointing: bool | None, placement: str, tmp_path: Path) -> None:
    modules = pair(lambda: Tower(checkpointing=checkpointing), placement, tmp_path)

    def loss(module: nn.Module, batch: Any) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            found: torch.Tensor = module(*batch)
            return found

    train_both(*modules, token_batches(3), loss=loss)


@streamed
def test_hooks_of_the_program_keep_casts_as_they_were(placement: str, tmp_path: Path) -> None:
    modules = pair(lambda: Uses("convolution"), placement, tmp_path)

    def loss(module: nn.Module, batch: Any) -> torch.Tensor:
        kept: list[tuple[torch.Tensor, torch.Size]] = []

        def keep(saved: torch.Tensor) -> torch.Tensor:
            kept.append((saved, saved.shape))
            assert all(each.shape == shape for each, shape in kept)
            return saved

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
            return around(module, batch)

    train_both(*modules, vector_batches(2, 8, WIDTH), loss=loss)


@streamed
@pytest.mark.parametrize("write", ["step", "copy"])
def test_a_weight_that_changes_under_its_cast_is_refused(write: str, placement: str, tmp_path: Path) -> None:
    """Plain torch computes with the old one."""
    _, managed = pair(lambda: Uses("twice"), placement, tmp_path)
    optimizer = hetmem.AdamW(managed.parameters())
    (batch,) = vector_batches(1, 8, WIDTH)
    with torch.autocast("cpu", torch.bfloat16):
        managed(*batch).float().sum().backward()
        if write == "step":
            optimizer.step()
        else:
            with torch.no_grad():
                managed.shared.weight.mul_(2)
        with pytest.raises(ManageError, match="which casts a weight once"):
            managed(*batch)
    around(managed, batch).backward()


@streamed
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("enter", ["around", "within"])
def test_a_checkpoint_keeps_no_casts(enter: str, reentrant: bool, placement: str, tmp_path: Path) -> None:
    """Without one see `test_pointers`. Plain torch keeps a cast of each weight until autocast is left."""

    count = 12

    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=reentrant)
            return x.float().square().mean()

    modules = pair(lambda: Within(Layers()) if enter == "within" else Layers(), placement, tmp_path)
    batches = [(x.requires_grad_(),) for (x,) in vector_batches(3, 2, WIDTH)]
    train_both(*modules, batches, loss=around if enter == "around" else loss_of)
    tier = hetmem.report(modules[1]).to_dict()["tiers"]["device"]
    assert tier["peak_bytes"] - tier["chunk_peak_bytes"] < count * WIDTH * WIDTH * 2 // 2
