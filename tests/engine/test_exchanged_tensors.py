"""`torch.utils.swap_tensors` and flat buffers: the tensor below a parameter becomes another one, with the bits of
torch, or there is an error that says what works instead."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import swap_tensors

from hetmem.errors import ManageError
from tests.engine.harness import (
    BATCHES,
    WIDTH,
    Mixed,
    Recipe,
    adamws,
    assert_same,
    assert_same_grads,
    assert_same_weights,
    both,
    everywhere,
    loss_of,
    mlp,
    pair,
    precisions,
    reference,
    shared,
    streamed,
    train_both,
    vector_batches,
)

OVERLAPS = ("off", "backward", "forward")


@contextmanager
def exchanges_on_conversion() -> Iterator[None]:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def halves(module: nn.Module) -> list[nn.Parameter]:
    return [nn.Parameter(p.detach().cpu() * 0.5) for p in module.parameters()]


def swap_all(module: nn.Module, others: list[nn.Parameter]) -> None:
    for parameter, other in zip(module.parameters(), others, strict=True):
        swap_tensors(parameter, other)


@pytest.mark.pairs
@everywhere
@precisions
@shared("overlap", OVERLAPS)
def test_averages_that_are_swapped_in_for_an_evaluation_come_out_again(
    overlap: str, mixed: torch.dtype | None, placement: str, tmp_path: Path
) -> None:
    """Before the first forward, and behind steps. In the end an average is memory of its own."""
    modules = pair(mlp, placement, tmp_path, mixed_precision=mixed)
    optimizers, backward = adamws(*modules, overlap=overlap), reference(modules[0], mixed)
    averages = [halves(module) for module in modules]
    hooked = [[module[2].weight.register_hook(lambda grad: grad * 2)] for module in modules]

    def evaluate(module: nn.Module, batch: Any) -> torch.Tensor:
        right = Mixed(module, mixed).twin if module is modules[0] and mixed is not None else module
        with torch.no_grad():
            return right(*batch)  # type: ignore[no-any-return]

    for batch in vector_batches(3, 4, WIDTH, dtype=mixed):
        for _ in range(2):  # in, and out again
            for module, others in zip(modules, averages, strict=True):
                swap_all(module, others)
            assert_same(*both(modules, lambda module, batch=batch: evaluate(module, batch)), "evaluation")
        for others in averages:
            others[0].data.zero_()
        if mixed is not None:  # hooks of the reference's masters do not run
            for (hook,) in hooked:
                hook.remove()
        expected = backward(lambda module, batch=batch: loss_of(module, batch))
        loss = loss_of(modules[1], batch)
        assert_same(expected, loss, "loss")
        loss.backward()
        del expected, loss
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_weights(*modules)
    for left, right in zip(*averages, strict=True):
        assert_same(left, right, "average")


def with_another(module: Any) -> None:
    """And a backward of its own comes before the forward."""
    weight = module[2].weight
    swap_tensors(weight, nn.Parameter(torch.full((WIDTH, WIDTH), 0.01)))
    (gradient,) = torch.autograd.grad(weight.square().sum(), weight)
    assert torch.equal(gradient, 2 * weight.detach())


def with_a_view_of_itself(module: Any) -> None:
    swap_tensors(module[2].weight, nn.Parameter(module[2].weight.detach()[:]))


def with_each_other(module: Any) -> None:
    swap_tensors(module[0].weight, module[4].weight)


def by_a_state_dict(module: nn.Module) -> None:
    with exchanges_on_conversion():
        module.load_state_dict({name: value * 0.5 for name, value in module.state_dict().items()})


def by_set(module: Any) -> None:
    with torch.no_grad():
        module[2].weight.set_(module[2].weight.detach() * 0.5)


@pytest.mark.each
@everywhere
@precisions
@shared("overlap", OVERLAPS)
@pytest.mark.parametrize(
    "exchange",
    [with_another, with_a_view_of_itself, with_each_other, by_a_state_dict, by_set],
    ids=lambda exchange: exchange.__name__,
)
def test_weights_that_are_exchanged_for_good_are_trained(
    exchange: Callable[[nn.Module], None], overlap: str, mixed: torch.dtype | None, placement: str, tmp_path: Path
) -> None:
    """Later writes to them count as ever, and their gradients arrive."""
    modules = pair(mlp, placement, tmp_path, mixed_precision=mixed)
    optimizers, batches = adamws(*modules, overlap=overlap), vector_batches(2, 4, WIDTH, dtype=mixed)
    for _ in range(2):
        both(modules, exchange)
        train_both(*modules, batches, Recipe(steps=1, mixed=mixed), optimizers=optimizers)
        for module in modules:
            with torch.no_grad():
                module[2].weight.mul_(0.5)
    train_both(*modules, batches, Recipe(steps=1, mixed=mixed), optimizers=optimizers)


@everywhere
def test_a_swap_between_a_backward_and_its_step_takes_the_gradient_along(placement: str, tmp_path: Path) -> None:
    modules = pair(mlp, placement, tmp_path)
    optimizers = adamws(*modules)
    averages = [halves(module) for module in modules]
    for swapped_back in (True, False):
        for module, others, optimizer in zip(modules, averages, optimizers, strict=True):
            optimizer.zero_grad()
            loss_of(module, BATCHES[0]).backward()
            for _ in range(1 + swapped_back):
                swap_all(module, others)
            optimizer.step()
        assert_same_grads(*modules)
        assert_same_weights(*modules)


# ---- refused -----------------------------------------------------------------------------------------------------


@streamed
def test_a_swap_that_cannot_be_served_is_refused_and_nothing_is_lost(placement: str, tmp_path: Path) -> None:
    """Within a forward, once an update has begun, and for a tensor that is no parameter."""
    plain, managed = pair(mlp, placement, tmp_path)
    optimizers = adamws(plain, managed, overlap="backward")
    train_both(plain, managed, BATCHES, Recipe(steps=2), optimizers=optimizers)
    weight, other = managed[2].weight, nn.Parameter(torch.ones(WIDTH, WIDTH))
    for layer in (managed[0], managed[2]):
        within = layer.register_forward_pre_hook(lambda *_: swap_tensors(weight, other))
        with pytest.raises(ManageError, match=r"swap_tensors of a managed parameter within a forward or backward"):
            managed(*BATCHES[0])
        within.remove()
    for module in (plain, managed):
        loss_of(module, BATCHES[0]).backward()
    with pytest.raises(RuntimeError, match=r"2.weight is used again, .* after its update had begun"):
        swap_tensors(weight, other)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    value = torch.ones(WIDTH, WIDTH)
    swap_tensors(weight, value)
    with pytest.raises(ManageError, match=r"2.weight was a Parameter .* is a Tensor now: swap it back"):
        managed(*BATCHES[0])
    assert torch.equal(weight, torch.ones(WIDTH, WIDTH))
    swap_tensors(weight, value)
    assert torch.equal(value, torch.ones(WIDTH, WIDTH))
    train_both(plain, managed, BATCHES, Recipe(steps=1), optimizers=optimizers)


@everywhere
def test_conversions_that_would_exchange_parameters_are_refused(placement: str, tmp_path: Path) -> None:
    plain, managed = pair(mlp, placement, tmp_path)
    for _ in range(2):
        with exchanges_on_conversion(), pytest.raises(ManageError, match=r"set_swap_module_params_on_conversion\(True"):
            managed.cpu()
        train_both(plain, managed, BATCHES, Recipe(steps=1))


def by_vector(module: nn.Module) -> torch.Tensor:
    vector = nn.utils.parameters_to_vector(module.parameters()).detach() * 0.5
    nn.utils.vector_to_parameters(vector, module.parameters())
    return vector


def by_one_tensor(module: Any) -> torch.Tensor:
    module[0].weight.data = module[4].weight.data = torch.ones(WIDTH, WIDTH)
    return torch.empty(0)


@everywhere
@pytest.mark.parametrize("moment", ["before a forward", "before a step"])
@pytest.mark.parametrize("put", [by_vector, by_one_tensor])
def test_several_weights_in_memory_that_is_held_are_refused(
    put: Callable[[Any], torch.Tensor], moment: str, placement: str, tmp_path: Path
) -> None:
    """Writes to it would not reach them. A vector that is dropped is no matter."""
    plain, managed = pair(mlp, placement, tmp_path)
    optimizers = adamws(plain, managed)
    train_both(plain, managed, BATCHES, Recipe(steps=1), optimizers=optimizers)
    for module in (plain, managed):
        loss_of(module, BATCHES[0]).backward()
    kept = [put(module) for module in (plain, managed)]
    shows = [parameter.detach().clone() for parameter in managed.parameters()]
    with pytest.raises(ManageError, match=r"0.weight.data and .*.data were set to one memory.* \(p.data.copy_\(part\)"):
        managed(*BATCHES[0]) if moment == "before a forward" else optimizers[1].step()
    for parameter, before in zip(managed.parameters(), shows, strict=True):
        assert_same(before, parameter.detach(), "weight")
    del kept
    for module in (plain, managed):
        by_vector(module)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    train_both(plain, managed, BATCHES, Recipe(steps=1), optimizers=optimizers)


@streamed
def test_a_vector_below_weights_that_are_updated_in_the_backward_is_refused_there(
    placement: str, tmp_path: Path
) -> None:
    """Each chunk is updated by itself."""
    plain, managed = pair(mlp, placement, tmp_path)
    optimizers = adamws(plain, managed, overlap="backward")
    train_both(plain, managed, BATCHES, Recipe(steps=2), optimizers=optimizers)
    loss = loss_of(managed, BATCHES[0])
    kept = by_vector(managed)
    with pytest.raises(ManageError, match=r"were set to one memory"):
        loss.backward()
    assert torch.equal(nn.utils.parameters_to_vector(managed.parameters()), kept)


@everywhere
def test_a_dropped_vector_may_lie_below_weights_of_which_the_optimizer_steps_some(
    placement: str, tmp_path: Path
) -> None:
    """The others were taken for tensors of the program."""
    plain, managed = pair(mlp, placement, tmp_path)
    some = [list(module.parameters())[::2] for module in (plain, managed)]
    optimizers = [torch.optim.AdamW(parameters, lr=1e-2, fused=True) for parameters in some]
    for _ in range(2):
        for module, optimizer in zip((plain, managed), optimizers, strict=True):
            loss_of(module, BATCHES[0]).backward()
            by_vector(module)
            optimizer.step()
            optimizer.zero_grad()
        assert_same(plain(*BATCHES[1]), managed(*BATCHES[1]), "output")
    assert_same_weights(plain, managed)
