"""Copies for several calls in a row are leased at once, and torch calls their modules without hooks: what moves is what
single calls move, and the bits are torch's, whatever the program does within a row."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import hetmem
from benchmarks.call_cost import counted
from hetmem import testing


class Scaled(nn.Module):
    """Autograd saves its weight itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(32))
        self.around: Callable[[torch.Tensor], Any] = lambda x: x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.around(x) * self.weight


class Stack(nn.Module):
    """Blocks whose parts it calls itself. From the step `at` on it calls `inner` for each block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"first": Scaled(), "up": nn.Linear(32, 32), "down": nn.Linear(32, 32)}) for _ in range(8)
        )
        self.inner: Callable[[Stack, int, torch.Tensor], torch.Tensor] = Stack.block

    def block(self, number: int, x: torch.Tensor) -> torch.Tensor:
        parts: Any = self.blocks[number]
        return x + parts["down"](torch.tanh(parts["up"](parts["first"](x))))

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
    with _kept():
        return stack.block(number, x)


def _skipping(stack: Stack, number: int, x: torch.Tensor) -> torch.Tensor:
    return x if number in (2, 3, 6) else stack.block(number, x)


def _in_another_order(stack: Stack, number: int, x: torch.Tensor) -> torch.Tensor:
    return stack.block(len(stack.blocks) - 1 - number, x)


def _using_another(stack: Stack, number: int, x: torch.Tensor) -> torch.Tensor:
    other: Any = stack.blocks[(number + 3) % len(stack.blocks)]
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


def _raising(stack: Stack, number: int, x: torch.Tensor) -> torch.Tensor:
    if number == 5:
        raise ArithmeticError("told")
    return stack.block(number, x)


PROGRAMS = [_keeping, _skipping, _in_another_order, _using_another, _writing, _of_a_call]


def managed_stack(**options: Any) -> tuple[Stack, Any]:
    """A model, and the same one managed with room for half of its copies, which measures its first steps alone."""
    torch.manual_seed(0)
    plain = Stack()
    nbytes = sum(parameter.nbytes for parameter in plain.parameters())
    limits = hetmem.Budget(device="64MiB", host="64MiB", device_chunks=nbytes // 2, home_copies=False)
    managed = hetmem.manage(copy.deepcopy(plain), limits, device=hetmem.SimDevice(), chunk_bytes=16384, **options)
    return plain, managed


def step(model: Any, x: torch.Tensor) -> torch.Tensor:
    """One step of plain gradient descent; return the loss."""
    loss = model(x)
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=0.1)
                parameter.grad = None
    return loss.detach()  # type: ignore[no-any-return]


def assert_same(plain: Stack, managed: Any, x: torch.Tensor, steps: int) -> None:
    """Train both for so many `steps`, with the same bits."""
    for _ in range(steps):
        assert torch.equal(step(plain, x), step(managed, x))
    for mine, others in zip(plain.parameters(), managed.parameters(), strict=True):
        assert torch.equal(mine, others)


def without_rows(managed: Any) -> None:
    """Register hooks, so that each call of a part is seen."""
    for part in managed.modules():
        part.register_forward_hook(lambda module, args, output: None)


@pytest.mark.parametrize("trains", [True, False])
def test_what_moves_is_what_single_calls_move(trains: bool) -> None:
    seen = []
    for each_alone in (False, True):
        _, managed = managed_stack()
        if each_alone:
            without_rows(managed)
        x, inside = torch.randn(4, 32), testing.of(managed)
        with torch.set_grad_enabled(trains):
            for _ in range(6):
                step(managed, x) if trains else managed(x)
            _, calls = counted(lambda model=managed, x=x: model(x))
        seen.append((inside.transfers(), inside.operators(), calls))
    (moved, used, calls), (moved_alone, used_alone, calls_alone) = seen
    assert moved == moved_alone
    assert used == used_alone
    assert not trains or calls < 0.8 * calls_alone


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_a_program_that_leaves_what_was_learned_gets_the_bits_of_torch(program: Any) -> None:
    plain, managed = managed_stack()
    x = torch.randn(4, 32)
    assert_same(plain, managed, x, 5)
    for inner in (program, Stack.block):
        plain.inner = managed.inner = inner
        assert_same(plain, managed, x, 2)


def test_a_call_that_raises_in_a_row_leaves_all_as_it_was() -> None:
    plain, managed = managed_stack()
    x = torch.randn(4, 32)
    assert_same(plain, managed, x, 5)
    hooks = [len(part._forward_hooks) for part in managed.modules()]
    for model in (plain, managed):
        model.inner = _raising
        with pytest.raises(ArithmeticError):
            model(x)
        model.inner = Stack.block
    assert [len(part._forward_hooks) for part in managed.modules()] == hooks
    assert_same(plain, managed, x, 2)
