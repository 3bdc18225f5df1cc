"""A step may have any shape that torch allows: calls, backwards, transforms, threads, lengths, passes in between."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hetmem import testing
from tests.engine.harness import (
    BATCHES,
    Recipe,
    Tower,
    adamws,
    assert_same,
    assert_same_grads,
    assert_same_weights,
    both,
    everywhere,
    mlp,
    offloaded,
    pair,
    streamed,
    token_batches,
    train_both,
)


def compare(modules: tuple[nn.Module, nn.Module], act: Callable[[nn.Module], Any]) -> None:
    """Run `act` on both; what it returns and all gradients agree; then one step of AdamW agrees too."""
    results = both(modules, act)
    for left, right in zip(*(r if isinstance(r, tuple) else (r,) for r in results), strict=True):
        assert_same(left, right, "result")
    assert_same_grads(*modules)
    left_optimizer, right_optimizer = adamws(*modules)
    for optimizer in (left_optimizer, right_optimizer):
        optimizer.step()
    assert_same_weights(*modules)


def called_twice(module: nn.Module) -> Any:
    """Two calls, one backward."""
    loss = module(*BATCHES[0]).square().mean() + module(*BATCHES[1]).mean()
    loss.backward()
    return loss


def chained(module: nn.Module) -> Any:
    """The output of one call is the input of the next."""
    loss = module(module(*BATCHES[0])).square().mean()
    loss.backward()
    return loss


def two_backwards(module: nn.Module) -> Any:
    """retain_graph, then again."""
    loss = module(*BATCHES[0]).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()
    return loss


def interleaved(module: nn.Module) -> Any:
    """Two forwards, two backwards in the order of the forwards."""
    first, second = module(*BATCHES[0]).square().mean(), module(*BATCHES[1]).square().mean()
    first.backward()
    second.backward()
    return first, second


def partial_backward(module: nn.Module) -> Any:
    """One of two losses goes back, with the other alive until later."""
    output = module(*BATCHES[0])
    output[:2].sum().backward(retain_graph=True)
    output[2:].square().sum().backward()
    return output


def zeroed_between(set_to_none: bool, module: nn.Module) -> Any:
    """zero_grad between forward and backward."""
    module(*BATCHES[1]).sum().backward()
    loss = module(*BATCHES[0]).square().mean()
    module.zero_grad(set_to_none=set_to_none)
    loss.backward()
    return loss


def not_backward(module: nn.Module) -> Any:
    """Forwards whose backward never comes."""
    outputs = [module(*BATCHES[1]) for _ in range(5)]
    loss = module(*BATCHES[0]).square().mean()
    loss.backward()
    return loss, *outputs


def detached(module: nn.Module) -> Any:
    """no_grad and inference_mode passes before the real one."""
    with torch.no_grad():
        a = module(*BATCHES[1])
    with torch.inference_mode():
        b = module(*BATCHES[2]).clone()
    loss = module(*BATCHES[0]).square().mean()
    loss.backward()
    return loss, a, b


def with_inputs(module: nn.Module) -> Any:
    """backward(inputs=…) accumulates into those only."""
    loss = module(*BATCHES[0]).square().mean()
    loss.backward(inputs=[module[0].weight, module[4].bias])
    return loss


def input_gradient(module: nn.Module) -> Any:
    """The gradient of the input too."""
    x = BATCHES[0][0].clone().requires_grad_()
    module(x).square().mean().backward()
    return x.grad


def outside_forward(module: nn.Module) -> Any:
    """A weight used by the loss, outside of any forward of the module."""
    loss = module(*BATCHES[0]).square().mean() + 0.1 * sum(p.square().sum() for p in module.parameters())
    loss.backward()
    return loss


def part_called(module: nn.Module) -> Any:
    """Parts of the module are called by the user."""
    loss = module[2](module[0](*BATCHES[0])).square().mean()
    loss.backward()
    return loss


def functional_gradients(module: nn.Module) -> Any:
    """torch.autograd.grad leaves p.grad alone."""
    loss = module(*BATCHES[0]).square().mean()
    grads = torch.autograd.grad(loss, list(module.parameters()))
    module(*BATCHES[1]).mean().backward()
    return loss, *grads


def double_backward(module: nn.Module) -> Any:
    """A gradient penalty on the weights."""
    loss = module(*BATCHES[0]).square().mean()
    grads = torch.autograd.grad(loss, list(module.parameters()), create_graph=True)
    penalty = loss + sum(grad.square().sum() for grad in grads)
    penalty.backward()
    return loss, penalty, *grads


def input_penalty(module: nn.Module) -> Any:
    """A gradient penalty on the input, as in WGAN."""
    x = BATCHES[0][0].clone().requires_grad_()
    (grad,) = torch.autograd.grad(module(x).sum(), x, create_graph=True)
    penalty = (grad.norm(dim=1) - 1).square().mean()
    penalty.backward()
    return penalty


def functional_call(module: nn.Module) -> Any:
    """functional_call with other values, then the module itself."""
    other = {name: p.detach() * 0.5 for name, p in module.named_parameters()}
    first = torch.func.functional_call(module, other, BATCHES[0])
    own = dict(module.named_parameters())
    loss = torch.func.functional_call(module, own, BATCHES[0]).square().mean()
    loss.backward()
    return first, loss


def func_grad(module: nn.Module) -> Any:
    """torch.func.grad over functional_call."""
    own = {name: p.detach() for name, p in module.named_parameters()}
    grads = torch.func.grad(lambda p: torch.func.functional_call(module, p, BATCHES[0]).square().mean())(own)
    module(*BATCHES[0]).square().mean().backward()
    return tuple(grads.values())


def func_grad_of_input(module: nn.Module) -> Any:
    """torch.func.grad and vmap of the module itself, over its input."""
    (x,) = BATCHES[0]
    grad = torch.func.grad(lambda value: module(value).square().mean())(x)
    rows = torch.func.vmap(module)(x)
    module(x).square().mean().backward()
    return grad, rows


def saved_on_cpu(module: nn.Module) -> Any:
    """Saved-tensor hooks of the user's around the forward."""
    with torch.autograd.graph.save_on_cpu():
        loss = module(*BATCHES[0]).square().mean()
    loss.backward()
    return loss


def autocast(module: nn.Module) -> Any:
    """torch.autocast around the forward."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = module(*BATCHES[0]).float().square().mean()
    loss.backward()
    return loss


def other_thread(module: nn.Module) -> Any:
    """Forward and backward on another thread."""
    found = []

    def work() -> None:
        loss = module(*BATCHES[0]).square().mean()
        loss.backward()
        found.append(loss)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return tuple(found)


STEPS: dict[str, Callable[[nn.Module], Any]] = {
    function.__name__: function
    for function in (
        called_twice, chained, two_backwards, interleaved, partial_backward, not_backward, detached, with_inputs,
        input_gradient, outside_forward, part_called, functional_gradients, double_backward, input_penalty,
        functional_call, func_grad, func_grad_of_input, saved_on_cpu, autocast, other_thread,
    )
}  # fmt: skip
STEPS["zeroed between, None"] = partial(zeroed_between, True)
STEPS["zeroed between, zeros"] = partial(zeroed_between, False)


@pytest.mark.each
@offloaded
@pytest.mark.parametrize("name", STEPS)
def test_a_step_may_have_any_shape(name: str, placement: str, tmp_path: Path) -> None:
    modules = pair(mlp, placement, tmp_path)
    for _ in range(3):
        compare(modules, STEPS[name])
        for module in modules:
            module.zero_grad()


@everywhere
def test_lengths_may_change_in_the_middle_of_training(placement: str, tmp_path: Path) -> None:
    modules = pair(Tower, placement, tmp_path)
    batches = [
        token_batches(1, length=length, rows=rows)[0] for length, rows in ((8, 2), (8, 2), (24, 2), (5, 1), (8, 4))
    ]
    train_both(*modules, batches, Recipe(steps=7))


@pytest.mark.each
@everywhere
@pytest.mark.parametrize("mixed", [None, torch.bfloat16], ids=["fp32", "bf16"])
def test_an_eval_pass_in_between_changes_nothing(placement: str, mixed: torch.dtype | None, tmp_path: Path) -> None:
    modules = pair(Tower, placement, tmp_path, mixed_precision=mixed)
    optimizers = None
    for _ in range(3):
        optimizers = train_both(*modules, token_batches(2), Recipe(steps=2, mixed=mixed), optimizers=optimizers)
        modules[1].eval()
        with torch.no_grad():
            modules[1](*token_batches(1, length=3)[0])
        modules[1].train()


@streamed
def test_forwards_without_a_backward_are_not_kept_in_mind(placement: str, tmp_path: Path) -> None:
    """A program that computes without `no_grad`: each forward was watched as one before a backward that is new, and
    what named that backward grew with the square of them."""
    plain, managed = pair(mlp, placement, tmp_path, sanitize=False)
    lengths = [(length, module) for length in range(1, 5) for module in (plain, managed)]
    for _ in range(25):
        for length, module in lengths:
            module(torch.ones(length, 64))
    assert testing.of(managed).remembered_forwards() < 50
    assert not testing.of(managed).measured()
    compare((plain, managed), lambda module: of_many(module, 4))
    compare((plain, managed), lambda module: of_many(module, 40))


def of_many(module: nn.Module, forwards: int) -> Any:
    """One backward of all of them."""
    loss = torch.stack([module(*BATCHES[at % 4]).square().mean() for at in range(forwards)]).sum()
    loss.backward()
    return loss
