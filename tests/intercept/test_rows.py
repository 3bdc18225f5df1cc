"""Copies for several calls in a row are leased at once, and torch calls their modules without hooks: what moves is what
single calls move, and the bits are torch's, whatever the program does within a row."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import hetmem
from benchmarks.call_cost import counted
from hetmem import testing
from tests.engine.harness import adamws, assert_same_weights
from tests.forked import Forks


class Detached(torch.autograd.Function):
    """A result that is no view of its argument, and has its memory."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0]


class Scaled(nn.Module):
    """Autograd saves its weight itself, or what `shown` makes of it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(32))
        self.around: Callable[[torch.Tensor], Any] = lambda x: x
        self.shown: Callable[[torch.Tensor], Any] = lambda weight: weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.around(x) * self.shown(self.weight)


class Block(nn.ModuleDict):
    """Of three parts with weights: [rows, 32] to the same."""

    def __init__(self) -> None:
        super().__init__({"first": Scaled(), "up": nn.Linear(32, 32), "down": nn.Linear(32, 32)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self["down"](torch.tanh(self["up"](self["first"](x))))


class Stack(nn.Module):
    """Blocks, for each of which it calls `inner`."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(12))
        self.inner: Callable[[Stack, int, torch.Tensor], torch.Tensor] = Stack.block

    def block(self, number: int, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.blocks[number](x)
        return result

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in range(len(self.blocks)):
            x = self.inner(self, number, x)
        return x.square().mean()


@contextmanager
def _kept() -> Iterator[None]:
    """Hooks for saved tensors that keep the tensors themselves."""
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        yield


def _keeping(stack: Stack, number: int, x: torch.Tensor) -> torch.Tensor:
    with _kept() if number % 2 else nullcontext():
        return stack.block(number, x)


def _skipping(stack: Stack, number: int, x: torch.Tensor) -> torch.Tensor:
    return x if number in (3, 4, 8) else stack.block(number, x)


def _in_another_order(stack: Stack, number: int, x: torch.Tensor) -> torch.Tensor:
    return stack.block(len(stack.blocks) - 1 - number, x)


def _using_another(stack: Stack, number: int, x: torch.Tensor) -> torch.Tensor:
    other: Any = stack.blocks[(number + 5) % len(stack.blocks)]
    return stack.block(number, nn.functional.linear(x, other["up"].weight))


def _writing(stack: Stack, number: int, x: torch.Tensor) -> torch.Tensor:
    parts: Any = stack.blocks[number]
    with torch.no_grad():
        parts["up"].bias.add_(0.25)
    return stack.block(number, x)


def _of_a_call(stack: Stack, number: int, x: torch.Tensor) -> torch.Tensor:
    parts: Any = stack.blocks[number]
    seen: list[torch.Size] = []
    handle = parts["down"].register_forward_hook(lambda module, args, output: seen.append(module.weight.shape))
    result = stack.block(number, x)
    handle.remove()
    assert len(seen) == 1
    return result


def _exchanging(stack: Stack, number: int, x: torch.Tensor) -> torch.Tensor:
    parts: Any = stack.blocks[number]
    if number % 4 == 1:
        x = torch.func.functional_call(parts["up"], {"weight": torch.eye(32), "bias": torch.full((32,), 0.5)}, (x,))
    return stack.block(number, x)


def _raising(stack: Stack, number: int, x: torch.Tensor) -> torch.Tensor:
    if number == 7:
        raise ArithmeticError("told")
    return stack.block(number, x)


def _showing_by_a_result(stack: Stack, number: int, x: torch.Tensor) -> torch.Tensor:
    scaled: Any = stack.blocks[number]["first"]  # type: ignore[index]
    before, scaled.shown = scaled.shown, Detached.apply if number == 3 else scaled.shown
    result = stack.block(number, x)
    scaled.shown = before
    return result


PROGRAMS = [
    _showing_by_a_result,
    _keeping,
    _skipping,
    _in_another_order,
    _using_another,
    _writing,
    _of_a_call,
    _exchanging,
]


class Trained:
    """A model, and the same one managed with room for a `share` of its copies, which measures its first steps alone. In
    `turns`, the latter computes three micro-batches block by block."""

    def __init__(self, share: float = 0.5, *, turns: bool = False) -> None:
        torch.manual_seed(0)
        self.turns = turns
        self.plain, self.x = Stack(), torch.randn(4, 32)
        nbytes = sum(parameter.nbytes for parameter in self.plain.parameters())
        limits = hetmem.Budget(device="64MiB", host="64MiB", device_chunks=int(nbytes * share), home_copies=False)
        device, model = hetmem.SimDevice(), copy.deepcopy(self.plain)
        self.managed: Any = hetmem.manage(model, limits, device=device, chunk_bytes=16384)
        self.both = (self.plain, self.managed)
        self.optimizers = adamws(*self.both)

    def train(self, steps: int) -> None:
        """Train both for so many `steps`, with the same bits."""
        for _ in range(steps):
            losses = []
            for model, optimizer in zip(self.both, self.optimizers, strict=True):
                losses += (torch.stack(self.compute(model)),)
                optimizer.step()
                optimizer.zero_grad()
            assert torch.equal(*losses)
        assert_same_weights(*self.both)

    def compute(self, model: Any) -> list[torch.Tensor]:
        """Compute losses, and their backwards."""
        batches = [self.x + number for number in range(3 if self.turns else 1)]
        if self.turns and model is self.managed:
            return hetmem.accumulate(model, batches, lambda model, x: model(x))
        losses: list[torch.Tensor] = []
        for batch in batches:
            losses += (model(batch),)
            if losses[-1].requires_grad:
                losses[-1].backward()
        return [loss.detach() for loss in losses]


def without_rows(managed: Any) -> None:
    """Register hooks, so that each call of a part is seen."""
    for part in managed.modules():
        part.register_forward_hook(lambda module, args, output: None)


def figures(how: str) -> list[Any]:
    """What moves and which operators use it, the same in rows and in single calls or not, and the calls of both beside
    plain torch, whose modules have the same hooks."""
    seen, trains = list[Any](), how != "evaluates"
    for each_alone in (False, True):
        trained = Trained(turns=how == "in turns")
        managed, inside = trained.managed, testing.of(trained.managed)
        if each_alone:
            without_rows(managed)
            without_rows(trained.plain)
        with torch.set_grad_enabled(trains):
            for _ in range(6):
                trained.train(1) if trains else managed(trained.x)
            calls, own = (
                counted(lambda model=model, trained=trained: trained.compute(model) if trains else model(trained.x))[1]
                for model in (managed, trained.plain)
            )
        seen.append((inside.transfers(), inside.operators(), calls - own))
    (moved, used, calls), (moved_alone, used_alone, calls_alone) = seen
    return [moved == moved_alone, used == used_alone, calls, calls_alone]


@pytest.mark.parametrize(("how", "most"), [("trains", 0.82), ("evaluates", 0.66), ("in turns", 0.92)])
def test_what_moves_is_what_single_calls_move(how: str, most: float, forks: Forks) -> None:
    """With at most the part `most` of the calls; in a process without other models, which each backward would ask."""
    ended = forks.run(
        f"import json\nfrom tests.intercept.test_rows import figures\nprint(json.dumps(figures({how!r})))"
    )
    assert ended.returncode == 0, ended.stderr
    same_moves, same_uses, calls, calls_alone = json.loads(ended.stdout.splitlines()[-1])
    assert same_moves
    assert same_uses
    assert calls < most * calls_alone


@pytest.mark.parametrize(
    ("program", "share", "turns"),
    [
        *((each, 0.5, False) for each in PROGRAMS),
        (_exchanging, 1.5, False),
        (_keeping, 0.5, True),
        (_skipping, 0.5, True),
        *(
            pytest.param(each, share, True, marks=pytest.mark.nightly)
            for each, share in ((_in_another_order, 0.5), (_using_another, 0.5), (_exchanging, 0.5), (_exchanging, 1.5))
        ),
    ],
)
def test_a_program_that_leaves_what_was_learned_gets_the_bits_of_torch(program: Any, share: float, turns: bool) -> None:
    trained = Trained(share, turns=turns)
    trained.train(5)
    for inner in (program, Stack.block):
        trained.plain.inner = trained.managed.inner = inner
        trained.train(2)


@pytest.mark.parametrize("turns", [False, True])
def test_a_call_that_raises_in_a_row_leaves_all_as_it_was(turns: bool) -> None:
    trained = Trained(turns=turns)
    trained.train(5)
    hooks = [len(part._forward_hooks) for part in trained.managed.modules()]
    for model in trained.both:
        model.inner = _raising
        with pytest.raises(ArithmeticError):
            trained.compute(model)
        model.inner = Stack.block
    assert [len(part._forward_hooks) for part in trained.managed.modules()] == hooks
    trained.train(2)


def test_copies_leave_the_device_though_results_that_autograd_saves_have_their_memory() -> None:
    trained = Trained()
    for model in trained.both:
        for block in model.blocks:
            block["first"].shown = Detached.apply
    trained.train(4)
