"""What is written to weights inside forward is kept; what backward needs must not change before it, as in torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hetmem
from hetmem import testing
from hetmem.errors import ManageError
from tests.engine.harness import (
    BATCHES,
    PLACEMENTS,
    WIDTH,
    Recipe,
    assert_same,
    assert_same_grads,
    assert_same_weights,
    everywhere,
    loss_of,
    manage,
    mlp,
    pair,
    precisions,
    streamed,
    train_both,
    vector_batches,
)
from tests.pairs import mostly


class WritesInForward(nn.Module):
    """Changes its weights inside forward, by several ways, before it uses them."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.other = nn.Linear(WIDTH, WIDTH)
        self.way = way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.other(x)
        weight = self.layer.weight
        with torch.no_grad():
            if self.way == "mul_":
                weight.mul_(0.9)
            elif self.way == "slice":
                weight[0] = weight[1] * 0.5
            elif self.way == "out":
                torch.mul(weight, 0.9, out=weight)
            elif self.way == "foreach":
                torch._foreach_mul_([weight, self.layer.bias], 0.9)
            elif self.way == "view":
                weight.view(-1)[:64].mul_(0.9)
            elif self.way == "detach":
                weight.detach().mul_(0.9)
            elif self.way == "data":
                weight.data.mul_(0.9)
            elif self.way == "held view":
                rows = weight[:2]
                x = x + self.other.bias
                rows.mul_(0.9)
        return self.layer(x)


WAYS = ("mul_", "slice", "out", "foreach", "view", "detach", "data", "held view")
KINDS = ("slice", "data")
"""One that torch counts, and one that nobody counts."""


@pytest.mark.parametrize(("way", "placement"), mostly(WAYS, PLACEMENTS, KINDS))
def test_writes_inside_forward_are_kept(way: str, placement: str, tmp_path: Path) -> None:
    modules = pair(lambda: WritesInForward(way), placement, tmp_path)
    train_both(*modules, BATCHES, Recipe(accumulation=2))
    with torch.no_grad():
        assert_same(*(module(*BATCHES[0]) for module in modules), "evaluation")
    assert_same_weights(*modules, "after evaluation")


@streamed
@precisions
@pytest.mark.parametrize("within", [True, False], ids=["its module", "another one"])
def test_data_that_is_set_within_a_forward_is_an_error_that_says_what_to_write(
    within: bool, mixed: torch.dtype | None, placement: str, tmp_path: Path
) -> None:
    """In every forward. Nothing is lost, and what is written instead counts."""

    class Sets(nn.Linear):
        set_data: Callable[[torch.Tensor], object] = staticmethod(lambda weight: None)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if within:
                self.set_data(self.weight)
            return super().forward(x)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.layer = nn.Linear(WIDTH, WIDTH), Sets(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not within:
                self.layer.set_data(self.layer.weight)
            return self.layer(self.first(x))  # type: ignore[no-any-return]

    model: Any = manage(Model(), placement, tmp_path, mixed_precision=mixed)
    for _ in range(4):
        expected = model(*BATCHES[0]).detach()
        for value in (lambda weight: weight.data * 2, lambda weight: model.first.weight, lambda weight: weight[:3]):
            model.layer.set_data = lambda weight, value=value: setattr(weight, "data", value(weight))
            with pytest.raises(ManageError, match=r"layer.weight.data is set to another tensor within .*copy_\("):
                model(*BATCHES[0])
        model.layer.set_data = lambda weight: setattr(weight, "data", weight.data.to(weight.dtype))
        assert_same(expected, model(*BATCHES[0]), "what is set to what it is")

    def copy(weight: torch.Tensor) -> None:
        with torch.no_grad():
            weight.copy_(torch.ones_like(weight))

    model.layer.set_data = copy
    model(*BATCHES[0])
    assert (model.layer.weight == 1).all()


@everywhere
def test_a_weight_that_is_left_the_memory_of_another_outside_of_forwards_is_an_error(
    placement: str, tmp_path: Path
) -> None:
    """Also that of another model."""
    models: Any = [manage(mlp(), placement, tmp_path) for _ in range(2)]
    for model in models:
        model[0].weight.data = models[0][4].weight.data
        with pytest.raises(ManageError, match=r"0.weight.data was set to the memory of 4.weight"):
            model(*BATCHES[0])


class Sets(nn.Module):
    """Replaces the memory of a weight, before the call of the module that has it or within that."""

    def __init__(self, *, within: bool) -> None:
        super().__init__()
        self.first, self.layer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        if within:
            self.layer.register_forward_pre_hook(lambda *_: self.replace())
        self.within, self.sets = within, False

    def replace(self) -> None:
        """Leave the weight the memory of another tensor."""
        if self.sets:
            with torch.no_grad():
                self.layer.weight.set_(torch.full_like(self.layer.weight, 0.01))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if not self.within:
            self.replace()
        return self.layer(x)  # type: ignore[no-any-return]


@streamed
@pytest.mark.parametrize("within", [False, True])
def test_memory_that_a_forward_puts_below_a_weight_is_an_error(within: bool, placement: str, tmp_path: Path) -> None:
    """It was lost when the weight went home."""
    managed: Any = manage(Sets(within=within), placement, tmp_path)
    for _ in range(2):
        loss_of(managed, BATCHES[0]).backward()
    managed.sets = True
    with pytest.raises(ManageError, match=r"set_\(…\) of a managed parameter within a forward"):
        managed(*BATCHES[0])


@streamed
def test_data_that_a_hook_of_a_backward_sets_is_not_used_by_nodes_before_it(placement: str, tmp_path: Path) -> None:
    """Their graph has saved what was there, which hetmem has not kept."""
    managed: Any = manage(mlp(), placement, tmp_path)
    for _ in range(2):
        loss_of(managed, BATCHES[0]).backward()
    managed[4].weight.register_hook(lambda _, weight=managed[2].weight: setattr(weight, "data", weight.data * 0.5))
    with pytest.raises(RuntimeError, match=r"2\.weight\.data was set within a backward"):
        loss_of(managed, BATCHES[0]).backward()


class HandsOut(nn.Module):
    """A tensor that is no weight gets the weight's memory."""

    def __init__(self, taken: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layer, self.taken = nn.Linear(WIDTH, WIDTH), taken

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        other = torch.empty(0)
        with torch.no_grad():
            other.data = self.taken(self.layer.weight)
            other.mul_(0.5)
        return self.layer(x)  # type: ignore[no-any-return]


@streamed
def test_a_tensor_that_gets_the_memory_of_a_weight_by_data_writes_to_it_or_is_an_error(
    placement: str, tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    managed = manage(HandsOut(lambda weight: weight), placement, tmp_path / "other")
    with pytest.raises(ManageError, match=r"write other\.data = weight\.data"):
        managed(*BATCHES[0])
    train_both(*pair(lambda: HandsOut(lambda weight: weight.data), placement, tmp_path), BATCHES)


@pytest.mark.parametrize(
    "take",
    [torch.tensor, torch.empty(0).new_tensor, lambda weight: torch.empty(0, dtype=weight.dtype).set_(weight)],
    ids=["tensor", "new_tensor", "set_"],
)
@pytest.mark.filterwarnings("ignore:To copy construct from a tensor:UserWarning")
def test_a_function_of_which_torch_does_not_tell_gets_no_stand_in(
    take: Callable[[torch.Tensor], torch.Tensor], tmp_path: Path
) -> None:
    """From the second forward on it would have read NaN."""
    managed = manage(HandsOut(take), "host", tmp_path, mixed_precision=torch.bfloat16, sanitize=False)
    with pytest.raises(ManageError, match=r"was given a weight itself within a forward.* weight\.detach\(\)\.clone"):
        managed(*BATCHES[0])


@pytest.mark.each
@streamed
@precisions
@pytest.mark.parametrize("overlap", ["off", "forward"])
def test_what_hetmem_writes_itself_is_no_write_of_the_user_s(
    overlap: str, mixed: torch.dtype | None, placement: str, tmp_path: Path
) -> None:
    """Where an update, or an operator, has written to a weight nothing looks like a write of the user's."""
    superseded: list[str] = []

    def superseding(written: Callable[..., None], writes: Any, managed: Any, **options: bool) -> None:
        written(writes, managed, **options)
        if not options.get("but_device"):
            superseded.append(managed.name)

    _, managed = pair(lambda: WritesInForward("mul_"), placement, tmp_path, mixed_precision=mixed)
    optimizer = hetmem.AdamW(managed.parameters(), lr=1e-2, overlap=overlap)
    managed(*BATCHES[0])  # before which the program may have written to all
    with testing.around("write of the user", superseding):
        for batch in BATCHES:
            loss_of(managed, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                managed(*batch)
    assert superseded == []


@pytest.mark.each
@everywhere
@precisions
def test_a_weight_changed_between_forward_and_backward_is_an_error_as_in_torch(
    placement: str, mixed: torch.dtype | None, tmp_path: Path
) -> None:
    """And the model goes on as if that forward had not been."""
    modules = pair(mlp, placement, tmp_path, mixed_precision=mixed)
    batches = vector_batches(3, 4, WIDTH, dtype=mixed)
    optimizers = train_both(*modules, batches, Recipe(mixed=mixed))
    for module in modules:
        loss = loss_of(module, batches[0] if module is modules[1] else BATCHES[0])
        with torch.no_grad():
            module[2].weight.mul_(0.5)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        module.zero_grad()
    train_both(*modules, batches, Recipe(mixed=mixed), optimizers=optimizers)


@streamed
def test_under_autocast_that_is_an_error_too(placement: str, tmp_path: Path) -> None:
    """torch may go on, with the cast that it has kept."""
    managed = manage(mlp(), placement, tmp_path)
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(managed, BATCHES[0])
    with torch.no_grad():
        managed[2].weight.mul_(0.5)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@everywhere
def test_a_step_between_forward_and_backward_is_an_error_as_in_torch(placement: str, tmp_path: Path) -> None:
    modules = pair(mlp, placement, tmp_path)
    for module, make in zip(modules, (torch.optim.AdamW, hetmem.AdamW), strict=True):
        optimizer = make(module.parameters(), lr=1e-2)
        loss_of(module, BATCHES[1]).backward()
        loss = loss_of(module, BATCHES[0])
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@everywhere
def test_an_activation_changed_in_place_is_an_error_as_in_torch(placement: str, tmp_path: Path) -> None:
    class Changes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)
            self.other = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.sigmoid(self.layer(x))
            y = self.other(x)
            x.mul_(2)
            return y

    for module in pair(Changes, placement, tmp_path):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss_of(module, BATCHES[0]).backward()


@everywhere
def test_an_output_changed_in_place_by_the_user_is_an_error_where_it_was_saved(placement: str, tmp_path: Path) -> None:
    for module in pair(
        lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Sigmoid()), placement, tmp_path
    ):
        output = module(*BATCHES[0])
        with torch.no_grad():
            output.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.sum().backward()


@everywhere
def test_an_unchanged_weight_beside_a_changed_one_needs_no_new_forward(placement: str, tmp_path: Path) -> None:
    """The bias is not saved by a linear layer: changing it between forward and backward is legal in torch."""
    modules = pair(mlp, placement, tmp_path)
    for module in modules:
        loss = loss_of(module, BATCHES[0])
        with torch.no_grad():
            module[2].bias.mul_(0.5)
        loss.backward()
    assert_same_grads(*modules)
    assert_same_weights(*modules)
