"""Functions that `torch.compile` makes code of, which a forward calls: graphs end at weights, and only there.

They are traced with hetmem's function mode on the stack. On a device that nobody watches, as in `test_compiled`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import hetmem
from tests.engine.harness import CHUNK, WIDTH, Recipe, assert_same, manage, train_both, vector_batches
from tests.engine.lazy_device import UnwatchedDevice

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch hides it, but not as an error

BLOCKS = 3


@pytest.fixture(autouse=True)
def forgetful() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()  # compiled code may hold models


def code(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
    """As code of a compiler: no mode sees what it does."""

    def call(*arguments: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return graph(*arguments)

    return call


def boxed(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
    """In the form that autograd ahead of time asks for."""
    made: Callable[..., Any] = make_boxed_func(code(graph, inputs))
    return made


class Backend:
    """Makes `code` of what it gets, or by autograd of its own (`ahead`), and keeps how many calls each graph has."""

    def __init__(self, *, ahead: bool = False) -> None:
        self.graphs: list[int] = []
        self.ahead = ahead

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        self.graphs.append(sum(node.op.startswith("call") for node in graph.graph.nodes))
        made: Callable[..., Any] = aot_autograd(fw_compiler=boxed) if self.ahead else code
        compiled: Callable[..., Any] = made(graph, inputs)
        return compiled


def gate(x: torch.Tensor) -> torch.Tensor:
    left, right = x.chunk(2, -1)
    return F.silu(left) * right


def gate_of_product(x: torch.Tensor, weight: torch.Tensor, biases: list[torch.Tensor]) -> torch.Tensor:
    return gate(torch.relu(F.linear(x * 2, weight) + torch.cat(tensors=biases)))


class Gated(nn.Module):
    """Its function has no weights, or those that `of` names: of its own, trained or frozen."""

    def __init__(self, function: Any, of: str | None) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.left, self.right = (nn.Parameter(torch.randn(WIDTH)) for _ in range(2))
        self.up.requires_grad_(of != "frozen")
        self.function, self.of = [function], of

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (function,) = self.function
        if self.of is None:
            return x + self.down(function(self.up(x)))
        return x + self.down(function(x, self.up.weight, [self.left, self.right]))


class Stack(nn.Module):
    def __init__(self, function: Any, of: str | None, reentrant: bool | None) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Gated(function, of) for _ in range(BLOCKS))
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return x


def plain_and_managed(
    function: Callable[..., Any], of: str | None, backend: Backend, directory: Path, **options: Any
) -> tuple[Any, Any]:
    torch.manual_seed(0)
    plain = Stack(function, of, options.pop("reentrant", None))
    managed = copy.deepcopy(plain)
    for block in managed.blocks:
        block.function = [torch.compile(function, backend=backend)]
    limits = hetmem.Budget(device=24 * CHUNK, host="8MiB", home_copies=False)
    return plain, manage(managed, limits, directory, device=UnwatchedDevice(0), **options)


@pytest.mark.each
@pytest.mark.parametrize("ahead", [False, True], ids=["eager", "aot"])
@pytest.mark.parametrize("reentrant", [None, False, True])
def test_a_compiled_function_without_weights_is_one_graph(reentrant: bool | None, ahead: bool, tmp_path: Path) -> None:
    """In the forward and where a checkpoint computes it again; none of hetmem's own code is compiled."""
    backend = Backend(ahead=ahead)
    modules = plain_and_managed(gate, None, backend, tmp_path, reentrant=reentrant, sanitize=True)
    train_both(*modules, vector_batches(3, 4, WIDTH), Recipe(steps=3))
    assert set(backend.graphs) == {5}
    assert len(backend.graphs) <= 2, "once with gradients and once, for what a checkpoint computes first, without"


@pytest.mark.each
@pytest.mark.parametrize("ahead", [False, True], ids=["eager", "aot"])
@pytest.mark.parametrize("mixed", [None, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("of", ["trained", "frozen"])
def test_a_compiled_function_of_weights_finds_them_on_the_device(
    of: str, mixed: torch.dtype | None, ahead: bool, tmp_path: Path
) -> None:
    """Between operators a weight rests, as NaN in 16 bits: where the graph ends it is brought."""
    backend = Backend(ahead=ahead)
    modules = plain_and_managed(gate_of_product, of, backend, tmp_path, mixed_precision=mixed, sanitize=True)
    train_both(*modules, vector_batches(3, 4, WIDTH, dtype=mixed), Recipe(steps=3, mixed=mixed))
    assert backend.graphs and sum(backend.graphs) <= 2 * 7, "but for the two that use weights all operators are there"


def test_a_function_that_must_be_one_graph_is_told_why_it_is_none(tmp_path: Path) -> None:
    plain, managed = plain_and_managed(gate_of_product, "trained", Backend(), tmp_path)
    for block in managed.blocks:
        block.function = [torch.compile(gate_of_product, backend=Backend(), fullgraph=True)]
    (batch,) = vector_batches(1, 4, WIDTH)
    with pytest.raises(Exception, match="a weight that hetmem manages, in a function that is compiled by itself"):
        managed(*batch)
    for block in managed.blocks:
        block.function = [gate_of_product]
    assert_same(plain(*batch), managed(*batch), "output")


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_attention_with_a_score_of_the_users_is_that_of_torch(backend: str | None, tmp_path: Path) -> None:
    """It calls the compiler by itself where it is not compiled."""
    flex = pytest.importorskip("torch.nn.attention.flex_attention").flex_attention
    if backend is not None:
        flex = torch.compile(flex, backend=backend, fullgraph=True)

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            query, key, value = self.qkv(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
            attended = flex(query, key, value, score_mod=lambda score, _, head, row, column: score - head * column)
            return self.out(attended.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    torch.manual_seed(0)
    plain = nn.Sequential(Attention(), Attention())
    limits = hetmem.Budget(device=24 * CHUNK, host="8MiB")
    managed = manage(copy.deepcopy(plain), limits, tmp_path, device=UnwatchedDevice(0))
    for batch in vector_batches(2, 2, 128, WIDTH):
        with torch.no_grad():  # torch has no backward of it for the CPU
            assert_same(plain(*batch), managed(*batch), "output")
