"""`Module.to` and the like of a managed model: moves leave its parameters where they are, other dtypes are refused."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hetmem
from hetmem.errors import ManageError
from tests.engine.harness import (
    BATCHES,
    WIDTH,
    Recipe,
    assert_same,
    assert_same_weights,
    assert_trains_alike,
    everywhere,
    manage,
    mlp,
    pair,
    precisions,
    train_both,
    vector_batches,
)

Conversion = Callable[[nn.Module], object]

MOVES: dict[str, Conversion] = {
    "to": lambda module: module.to("cpu"),
    "to elsewhere": lambda module: module.to("meta"),
    "cpu": lambda module: module.cpu(),
    "float": lambda module: module.float(),
    "device and dtype": lambda module: module.to("meta", torch.float32),
    "empty": lambda module: module.to_empty(device="cpu"),
    "share_memory": lambda module: module.share_memory(),
    "a part": lambda module: module.get_submodule("0").to("meta"),
    "around": lambda module: nn.ModuleList([module]).to("meta"),
    "without parts": lambda module: module.get_submodule("2").to_empty(device="meta", recurse=False),
}
OTHERS: dict[str, Conversion] = {
    "half": lambda module: module.half(),
    "bfloat16": lambda module: module.to(torch.bfloat16),
    "double": lambda module: module.double(),
    "type": lambda module: module.type(torch.float16),
    "device and dtype": lambda module: module.to("meta", torch.float64),
    "a part": lambda module: module.get_submodule("2").half(),
    "around": lambda module: nn.ModuleList([module]).half(),
}


@pytest.mark.each
@everywhere
@precisions
@pytest.mark.parametrize("move", MOVES)
def test_a_move_leaves_parameters_and_gradients(
    move: str, mixed: torch.dtype | None, placement: str, tmp_path: Path
) -> None:
    plain, managed = pair(mlp, placement, tmp_path, mixed_precision=mixed)
    batches = vector_batches(2, 4, WIDTH, dtype=mixed)
    optimizers = train_both(plain, managed, batches, Recipe(steps=2, mixed=mixed))
    parameters = [(each, each.device, each._version) for each in managed.parameters()]
    MOVES[move](managed)
    assert [(each, each.device, each._version) for each in managed.parameters()] == parameters
    train_both(plain, managed, batches, Recipe(steps=2, mixed=mixed), optimizers=optimizers)


@everywhere
def test_gradients_stay_where_they_are(placement: str, tmp_path: Path) -> None:
    model = manage(mlp(), placement, tmp_path)
    model(*BATCHES[0]).sum().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    model.to("meta")
    assert all(parameter.grad is grad for parameter, grad in zip(model.parameters(), gradients, strict=True))
    assert not any(grad is None or grad.is_meta for grad in gradients)


def test_it_is_asked_once_for_all_modules(tmp_path: Path) -> None:
    """And not once for each, where a model has thousands."""
    model = manage(mlp(), "host", tmp_path)
    asked: list[int] = []

    def convert(tensor: torch.Tensor) -> torch.Tensor:
        asked.append(tensor.numel())
        return tensor

    nn.ModuleList([model])._apply(convert)
    assert asked == [0]


def test_what_is_not_managed_moves(tmp_path: Path) -> None:
    model: nn.Sequential = nn.Sequential(mlp(), nn.BatchNorm1d(WIDTH))
    manage(model, "host", tmp_path)
    model.append(nn.Linear(WIDTH, WIDTH))
    model.to("meta")
    assert model[2].weight.is_meta
    assert all(buffer.is_meta for buffer in model[1].buffers())
    assert not any(parameter.is_meta for parameter in model[:2].parameters())


@pytest.mark.each
@everywhere
@precisions
@pytest.mark.parametrize("other", OTHERS)
def test_another_dtype_is_refused_and_changes_nothing(
    other: str, mixed: torch.dtype | None, placement: str, tmp_path: Path
) -> None:
    plain, managed = pair(mlp, placement, tmp_path, mixed_precision=mixed)
    batches = vector_batches(2, 4, WIDTH, dtype=mixed)
    optimizers = train_both(plain, managed, batches, Recipe(steps=2, mixed=mixed))
    with pytest.raises(ManageError, match=r"torch\.float32 that are managed cannot become .*hetmem\.release"):
        OTHERS[other](managed)
    assert_same_weights(plain, managed)
    train_both(plain, managed, batches, Recipe(steps=2, mixed=mixed), optimizers=optimizers)


def conv(memory_format: torch.memory_format) -> nn.Module:
    kind = nn.Conv3d if memory_format is torch.channels_last_3d else nn.Conv2d
    layers: Any = nn.Sequential(kind(3, 8, 3), kind(8, 8, 1), nn.Flatten(), nn.LazyLinear(WIDTH))
    layers(torch.ones((1, 3, 4, 4, 4)[: 2 + len(layers[0].kernel_size)]))
    return layers  # type: ignore[no-any-return]


FORMATS = (torch.channels_last, torch.channels_last_3d)


@pytest.mark.parametrize("placement", ["resident", "host"])
@pytest.mark.parametrize("layout", FORMATS, ids=str)
def test_another_memory_format_is_refused_and_the_present_one_is_not(
    layout: torch.memory_format, placement: str, tmp_path: Path
) -> None:
    """Operators would compute with other strides than plain torch, and might round otherwise."""
    contiguous = manage(conv(layout), placement, tmp_path)
    contiguous.to(memory_format=torch.contiguous_format)
    with pytest.raises(ManageError, match=r"0\.weight .* cannot get another memory format.*before hetmem\.manage"):
        contiguous.to(memory_format=layout)
    converted = manage(conv(layout).to(memory_format=layout), placement, tmp_path)
    converted.to(memory_format=layout).to("meta").float()
    with pytest.raises(ManageError, match=r"0\.weight .* cannot get another memory format"):
        converted.to(memory_format=torch.contiguous_format)


class Recurrent(nn.Module):
    """Its `_apply` is its own: it keeps a list of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.lstm(x)[0]
        return result


def test_a_part_that_is_given_a_weight_later_neither_converts_nor_replaces_it(tmp_path: Path) -> None:
    managed = manage(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Identity()), "host", tmp_path)
    part, weight = managed.get_submodule("1"), managed.get_parameter("0.weight")
    part.register_parameter("weight", weight)  # type: ignore[arg-type]
    with pytest.raises(ManageError, match=r"cannot become torch\.float16"):
        part.half()
    with pytest.raises(ManageError, match="assign=True"):
        part.load_state_dict({"weight": torch.ones(WIDTH, WIDTH)}, assign=True)
    assert part.weight is weight is managed.get_parameter("0.weight") and weight.dtype is torch.float32


def test_a_module_with_an_apply_of_its_own(tmp_path: Path) -> None:
    modules = pair(Recurrent, "host", tmp_path)
    optimizers = train_both(*modules, BATCHES, Recipe(steps=2))
    for module in modules:
        module.to("cpu")
    train_both(*modules, BATCHES, Recipe(steps=2), optimizers=optimizers)


def pickled(module: nn.Module) -> nn.Module:
    stream = io.BytesIO()
    torch.save(module, stream)
    stream.seek(0)
    loaded: nn.Module = torch.load(stream, weights_only=False)
    return loaded


def released(module: nn.Module) -> nn.Module:
    hetmem.release(module)
    assert not any("_apply" in vars(part) for part in module.modules())
    return module


@pytest.mark.each
@everywhere
@pytest.mark.parametrize("ordinary", [copy.deepcopy, pickled, released])
def test_an_ordinary_module_with_the_weights_converts_as_any(
    ordinary: Callable[[nn.Module], nn.Module], placement: str, tmp_path: Path
) -> None:
    plain, managed = pair(mlp, placement, tmp_path)
    train_both(plain, managed, BATCHES, Recipe(steps=2))
    before = [parameter.dtype for parameter in managed.parameters()]
    other = ordinary(managed)
    assert_same_weights(plain.double(), other.double())
    if other is not managed:
        assert [parameter.dtype for parameter in managed.parameters()] == before
    assert all(parameter.is_meta for parameter in other.to("meta").parameters())


def test_a_copy_is_managed_by_itself(tmp_path: Path) -> None:
    """What the copy has taken over from the first model does not stand in the way."""
    plain, managed = pair(mlp, "host", tmp_path)
    train_both(plain, managed, BATCHES, Recipe(steps=2))
    other = manage(copy.deepcopy(managed), "host", tmp_path)
    with pytest.raises(ManageError, match=r"cannot become torch\.float16"):
        other.half()
    train_both(plain, other, BATCHES, Recipe(steps=2))


class Casts(nn.Module):
    """Casts a layer's weights in forward, as a router of experts does."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.first, self.router, self.dtype = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), dtype
        self.norm = nn.BatchNorm1d(WIDTH)  # computes in float32 whatever the others do

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.first(x)).to(self.dtype)
        self.router = self.router.to(self.dtype)
        return self.router(x)  # type: ignore[no-any-return]


@everywhere
def test_a_module_that_casts_its_weights_in_forward_computes_or_is_told_what_to_write(
    placement: str, tmp_path: Path
) -> None:
    for mixed in (None, torch.bfloat16):
        directory = tmp_path / str(mixed)
        directory.mkdir()
        assert_trains_alike(lambda mixed=mixed: Casts(mixed or torch.float32), placement, directory, mixed)
    modules = pair(lambda: Casts(torch.float32), placement, tmp_path)
    for module in modules:
        module(*BATCHES[0]).sum().backward()  # gradients are converted too
    with torch.inference_mode():
        assert_same(*(module(*BATCHES[0]) for module in modules), "output")
    refused = manage(Casts(torch.float32), placement, tmp_path, mixed_precision=torch.bfloat16)
    with pytest.raises(ManageError, match=r"casts its weights in forward, .* \(self\.weight\.to\(torch\.float32\)\)"):
        refused(*BATCHES[0])
