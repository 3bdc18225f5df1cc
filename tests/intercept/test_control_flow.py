"""`torch.cond`, `while_loop`, `scan` and flex attention, which trace functions of the program, on a watched device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.nn import functional as F
from torch.nn.attention.flex_attention import flex_attention

from tests.engine.harness import BATCHES, WIDTH, Recipe, assert_same, everywhere, pair, train_both

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor", "ignore::DeprecationWarning")


@pytest.fixture(autouse=True)
def forgetful() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()  # compiled code may hold models


class Chooses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.left(x)
        return self.right(torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)))  # type: ignore[no-any-return]


class ChoosesWeights(Chooses):
    """As operands of the branches."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = [layer.weight.view_as(layer.weight) for layer in (self.left, self.right)]
        branches = (lambda x, left, _: F.linear(x, left)), (lambda x, _, right: F.linear(x, right).cos())
        return torch.cond(x.sum() > 0, *branches, (x, *weights))  # type: ignore[no-any-return]


class Repeats(Chooses):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.left(x)
        with torch.no_grad():
            _, y = while_loop(lambda i, _: i < 3, lambda i, y: (i + 1, y.sin()), (torch.tensor(0), x))
        return self.right(x + y)  # type: ignore[no-any-return]


class Scans(Chooses):
    """With gradients, for which torch traces the step and its backward when it is called."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _, y = scan(lambda sums, row: (sums + row, sums * row), torch.zeros(WIDTH), self.left(x))
        return self.right(y)  # type: ignore[no-any-return]


@everywhere
@pytest.mark.parametrize("build", [Chooses, ChoosesWeights, Repeats, Scans])
@pytest.mark.each
def test_functions_that_torch_traces_change_no_bit(build: type[nn.Module], placement: str, tmp_path: Path) -> None:
    train_both(*pair(build, placement, tmp_path), BATCHES, Recipe(steps=3))


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.all, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.all(x).detach().view(1, -1, 3, 4, WIDTH // 4).permute(2, 0, 3, 1, 4)
        y = flex_attention(q, k, v, score_mod=lambda score, *at: score + at[2] - at[3])  # on a CPU without backward
        return self.out(y.transpose(1, 2).reshape(-1, WIDTH))  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore::UserWarning")  # that it is slow when it is not compiled
@everywhere
def test_flex_attention_has_the_bits_of_torch(placement: str, tmp_path: Path) -> None:
    modules = pair(Attends, placement, tmp_path)
    for batch in BATCHES[:2]:
        assert_same(*(module(*batch) for module in modules), "output")


class ChoosesLayers(Chooses):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, self.left, self.right, (x,))  # type: ignore[no-any-return]


@pytest.mark.parametrize("placement", ["host"])
def test_managed_modules_as_branches_are_an_error_that_says_what_works(placement: str, tmp_path: Path) -> None:
    modules = pair(ChoosesLayers, placement, tmp_path)
    with pytest.raises(RuntimeError, match=r"trace their branches, .* \(module.compile\(\)\)"):
        modules[1](*BATCHES[0])
    for module in modules:
        module.compile(backend="eager")
    train_both(*modules, BATCHES, Recipe(steps=3))
