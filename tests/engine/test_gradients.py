"""Gradients in the hands of the user, and hooks: read, written, replaced and stepped from as in plain torch."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hetmem
from tests.engine.harness import (
    BATCHES,
    WIDTH,
    Recipe,
    adamws,
    assert_same,
    assert_same_grads,
    assert_same_states,
    assert_same_weights,
    both,
    everywhere,
    loss_of,
    manage,
    mlp,
    offloaded,
    pair,
    step_in_backward,
    streamed,
    train_both,
    vector_batches,
)
from tests.engine.lazy_device import LazyDevice


def scaled(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.grad.mul_(0.25)


def replaced(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.grad = parameter.grad * 0.25 + 1


def written_by_slice(module: nn.Module) -> None:
    module[0].weight.grad[3:5] = 7.0


def dropped(module: nn.Module) -> None:
    module[2].weight.grad = None


def data_written(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.grad.data = parameter.grad.data * 2


def set_without_backward(module: nn.Module) -> None:
    module.zero_grad()
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)


def swapped(module: nn.Module) -> None:
    module[0].weight.grad, module[2].weight.grad = module[2].weight.grad, module[0].weight.grad


def viewed_by_another(module: nn.Module) -> None:
    module[0].weight.grad, module[2].weight.grad = module[2].weight.grad[:], None


EDITS = (scaled, replaced, written_by_slice, dropped, data_written, set_without_backward, swapped, viewed_by_another)


def one_element(gradient: torch.Tensor, kept: torch.Tensor) -> None:
    gradient.data.view(-1)[1] = 5.0


def half_of_the_rows(gradient: torch.Tensor, kept: torch.Tensor) -> None:
    gradient.numpy()[: len(gradient) // 2] = 0


def by_a_kept_view(gradient: torch.Tensor, kept: torch.Tensor) -> None:
    kept[:3] = 7.0


@pytest.mark.parametrize("edit", [one_element, half_of_the_rows, by_a_kept_view])
def test_edits_that_count_no_version_reach_gradients_of_which_a_copy_is_staged(
    edit: Callable[[torch.Tensor, torch.Tensor], None], tmp_path: Path
) -> None:
    """As a program does that trains some rows of an embedding alone; an element of each gradient was compared once."""
    room = hetmem.Budget(device="64MiB", device_chunks="8MiB", host="32MiB", nvme="200MiB", nvme_dir=tmp_path)
    modules = pair(lambda: nn.Sequential(*(nn.Linear(512, 512) for _ in range(8))), room, tmp_path, chunk_bytes=2**20)
    optimizers = adamws(*modules)
    kept: dict[torch.nn.Parameter, torch.Tensor] = {}
    for batch in vector_batches(3, 4, 512):
        for module, optimizer in zip(modules, optimizers, strict=True):
            for _ in range(2):
                loss_of(module, batch).backward()
                for parameter in module.parameters():
                    assert parameter.grad is not None
                    if parameter not in kept:
                        kept[parameter] = parameter.grad.data.view(-1)
                    edit(parameter.grad, kept[parameter])
            optimizer.step()
            for parameter in module.parameters():
                assert parameter.grad is not None
                parameter.grad.data.zero_()
        assert_same_weights(*modules)


@pytest.mark.each
@offloaded
@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.__name__)
@pytest.mark.parametrize("when", ["before step", "between micro-steps"])
def test_the_user_may_edit_gradients(
    edit: Callable[[nn.Module], None], when: str, placement: str, tmp_path: Path
) -> None:
    modules = pair(mlp, placement, tmp_path)
    optimizers = adamws(*modules)

    def step(module: nn.Module) -> None:
        loss_of(module, BATCHES[0]).backward()
        edit(module)
        if when == "between micro-steps":
            loss_of(module, BATCHES[1]).backward()

    for index in range(3):
        both(modules, step)
        assert_same_grads(*modules, f"{index}")
        for optimizer in optimizers:
            optimizer.step()
        assert_same_weights(*modules, f"{index}")
        assert_same_states(*optimizers, f"{index}")
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=index == 0)


@pytest.mark.each
@everywhere
@pytest.mark.parametrize("mixed", [None, torch.bfloat16], ids=["fp32", "bf16"])
def test_an_old_gradient_stays_readable_and_full_shaped(
    placement: str, mixed: torch.dtype | None, tmp_path: Path
) -> None:
    module = manage(mlp(), placement, tmp_path, mixed_precision=mixed)
    loss_of(module, vector_batches(1, 4, WIDTH, dtype=mixed)[0]).backward()
    for parameter in module.parameters():
        assert parameter.grad.shape == parameter.shape
        assert parameter.grad.stride() == parameter.stride()
        assert parameter.grad.dtype == parameter.dtype == torch.float32
        assert not parameter.grad.requires_grad


@everywhere
def test_a_parameter_frozen_before_its_backward_keeps_the_gradient_that_it_had(placement: str, tmp_path: Path) -> None:
    """It was taken away for the new one to arrive, and none came."""
    modules = pair(mlp, placement, tmp_path)
    first, second = vector_batches(2, 4, WIDTH)
    for module in modules:
        loss_of(module, first).backward()
        loss = loss_of(module, second)
        module[2].weight.requires_grad_(False)
        loss.backward()
    assert modules[0][2].weight.grad is not None
    assert_same_grads(*modules)


@everywhere
def test_a_gradient_scaled_without_a_version_is_added_to_as_it_is(placement: str, tmp_path: Path) -> None:
    """One of each chunk: the staged copy on NVMe was compared for all parameters but the one that was added to."""
    modules = pair(mlp, placement, tmp_path)
    for batch in vector_batches(3, 4, WIDTH):
        for module in modules:
            loss_of(module, batch).backward()
        assert_same_grads(*modules)
        for module in modules:
            module[4].bias.grad.data.mul_(0.5)
            module[2].weight.grad.data.mul_(0.5)


# ---- hooks -----------------------------------------------------------------------------------------------------


@offloaded
def test_hooks_and_gradients_of_others_that_come_between_backwards(placement: str, tmp_path: Path) -> None:
    """A hook finds the sum so far; two weights exchange their gradients, and add to those from then on. The backward
    before is of neither."""
    modules, seen = pair(mlp, placement, tmp_path), (list[torch.Tensor](), list[torch.Tensor]())
    batches = vector_batches(5, 4, WIDTH)
    for step, batch in enumerate(batches):
        for module, log in zip(modules, seen, strict=True):
            first, second = module[0].weight, module[2].weight
            if step == 2:
                first.register_hook(lambda grad, first=first, log=log: log.append(first.grad.clone()))
            if step == 3:
                first.grad, second.grad = second.grad, first.grad
            loss_of(module, batch).backward()
            module[4](*batch).sum().backward()
        assert_same_grads(*modules)
    assert len(seen[0]) == len(seen[1]) == len(batches) - 2
    for expected, got in zip(*seen, strict=True):
        assert_same(expected, got, "the sum so far")


@pytest.mark.each
@offloaded
@pytest.mark.parametrize("managed_first", [True, False], ids=["hooks after manage", "hooks before manage"])
def test_hooks_of_the_user_fire_in_order_with_the_right_values(
    placement: str, managed_first: bool, tmp_path: Path
) -> None:
    logs: dict[int, list[Any]] = {}

    def hook(module: nn.Module, log: list[Any]) -> None:
        weight, bias = module[2].weight, module[2].bias
        weight.register_hook(lambda grad: log.append(("weight", grad.clone())))
        weight.register_hook(lambda grad: grad * 3)
        weight.register_hook(lambda grad: log.append(("tripled", grad.clone())))
        bias.register_post_accumulate_grad_hook(
            lambda p: log.append(("accumulated", p.grad.clone(), p.detach().clone()))
        )
        module[0].register_forward_pre_hook(lambda m, args: log.append(("pre", args[0].clone())))
        module[0].register_forward_hook(lambda m, args, output: log.append(("post", output.detach().clone())))
        module[2].register_forward_hook(lambda m, args, output: output * 2)
        module[4].register_full_backward_hook(lambda m, gi, go: log.append(("full", gi[0].clone(), go[0].clone())))
        module.register_state_dict_post_hook(lambda *args: log.append(("state_dict",)))

    plain = mlp()
    managed = copy.deepcopy(plain)
    hook(plain, logs.setdefault(0, []))
    if not managed_first:
        hook(managed, logs.setdefault(1, []))
    manage(managed, placement, tmp_path)
    if managed_first:
        hook(managed, logs.setdefault(1, []))
    train_both(plain, managed, BATCHES, Recipe(accumulation=2))
    assert [entry[0] for entry in logs[0]] == [entry[0] for entry in logs[1]]
    for left, right in zip(logs[0], logs[1], strict=True):
        for a, b in zip(left[1:], right[1:], strict=True):
            assert_same(a, b, f"seen by the hook {left[0]}")


@everywhere
def test_gradients_read_inside_hooks_are_the_true_ones(placement: str, tmp_path: Path) -> None:
    """At the end of each accumulation `p.grad` is the sum so far, also in a hook that runs within backward."""
    modules = pair(mlp, placement, tmp_path)
    logs: list[list[torch.Tensor]] = [[], []]
    for module, log in zip(modules, logs, strict=True):
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p, log=log: log.append(p.grad.clone()))
    for batch in BATCHES[:3]:
        both(modules, lambda module, batch=batch: loss_of(module, batch).backward())
    for left, right in zip(*logs, strict=True):
        assert_same(left, right, "gradient in a hook")


@offloaded
def test_hooks_of_modules_read_and_write_gradients_that_have_arrived(placement: str, tmp_path: Path) -> None:
    """Over a slow link; in chunks that get more of them, and those that are still to be written to NVMe too."""
    link = hetmem.SimDevice(device_to_host="20MB")
    modules = pair(mlp, placement, tmp_path, device=link, sanitize=False)  # else a hook may not touch host memory
    logs: list[list[torch.Tensor]] = [[], []]

    def halve(module: nn.Module, log: list[torch.Tensor], *_: object) -> None:
        for parameter in module.parameters():
            if parameter.grad is not None:
                log.append(parameter.grad.clone())
                parameter.grad.mul_(0.5)

    for module, log in zip(modules, logs, strict=True):
        for number in (2, 4):
            module[number].register_full_backward_hook(partial(halve, module, log))
    train_both(*modules, BATCHES, Recipe(accumulation=2))
    assert len(logs[0]) == len(logs[1]) > 0
    for left, right in zip(*logs, strict=True):
        assert_same(left, right, "gradient in a hook")


@streamed
def test_a_recomputation_that_reads_gradients_in_flight_leaves_them_as_they_are(placement: str, tmp_path: Path) -> None:
    class Converted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.part, x, use_reentrant=False)  # type: ignore[no-any-return]

        def part(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.layer.to(torch.float32)(x))

    build = lambda: nn.Sequential(*(Converted() for _ in range(3)), nn.Linear(WIDTH, WIDTH))  # noqa: E731
    train_both(*pair(build, placement, tmp_path, device=LazyDevice()), BATCHES, Recipe(accumulation=2))


@everywhere
def test_an_optimizer_in_the_backward_steps_as_in_torch(placement: str, tmp_path: Path) -> None:
    """One plain optimizer per parameter, stepped by post-accumulate hooks: torch's own recipe to save memory."""
    modules = pair(mlp, placement, tmp_path)
    for module in modules:
        step_in_backward(module, partial(torch.optim.SGD, lr=0.5))
    for batch in BATCHES:
        losses = both(modules, lambda module, batch=batch: loss_of(module, batch))
        assert_same(*losses, "loss")
        for loss in losses:
            loss.backward()
        assert_same_weights(*modules)
        assert_same_grads(*modules)


@pytest.mark.each
@offloaded
@pytest.mark.parametrize("early", [True, False], ids=["before manage", "after it"])
def test_hooks_for_what_arrives_read_the_true_gradients(early: bool, placement: str, tmp_path: Path) -> None:
    """As in torch: the sum so far of their own parameter, and of those behind it what this backward has made of it."""

    def hooked(module: nn.Module) -> nn.Module:
        def add(g: torch.Tensor) -> torch.Tensor:
            own, other = module[0].weight.grad, module[4].weight.grad
            assert other is not None
            return g + 0.5 * other if own is None else g + 0.25 * own + 0.5 * other

        module[0].weight.register_hook(add)
        return module

    plain, managed = pair((lambda: hooked(mlp())) if early else mlp, placement, tmp_path)
    if not early:
        hooked(plain), hooked(managed)
    train_both(plain, managed, BATCHES, Recipe(steps=3, accumulation=2))
    hetmem.release(managed)
    train_both(plain, managed, BATCHES, Recipe(steps=1, accumulation=2), optimizers=sgds(plain, managed))


def sgds(*modules: nn.Module) -> Any:
    return tuple(torch.optim.SGD(module.parameters(), lr=0.1) for module in modules)


@everywhere
def test_gradients_with_a_graph_are_differentiated_as_in_torch(placement: str, tmp_path: Path) -> None:
    modules = pair(mlp, placement, tmp_path)

    def step(module: nn.Module) -> None:
        loss_of(module, BATCHES[0]).backward()  # what is added to has no graph
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, of the cycle that this makes
            loss_of(module, BATCHES[1]).backward(create_graph=True)
        gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
        module.zero_grad()
        torch.stack([gradient.square().sum() for gradient in gradients]).sum().backward()

    for index in range(2):
        both(modules, step)
        assert_same_grads(*modules, f"{index}")
        for module in modules:
            module.zero_grad()


def test_a_hook_of_a_weight_that_is_used_outside_of_forwards_finds_the_gradient_before(tmp_path: Path) -> None:
    """Behind hetmem's own, which takes it away while autograd adds, it would find none."""
    plain, managed = pair(mlp, "host", tmp_path)
    found: list[list[torch.Tensor | None]] = [[], []]
    for model, seen in zip((plain, managed), found, strict=True):
        for p in model.parameters():
            p.register_hook(lambda _, p=p, seen=seen: seen.append(None if p.grad is None else p.grad.clone()))
        for _ in range(3):
            sum(p.square().sum() for p in model.parameters()).backward()  # type: ignore[union-attr]
    for one, other in zip(*found, strict=True):
        assert_same(one, other, "what a hook has found")
    assert_same_grads(plain, managed, "in the end")


def test_a_released_model_has_no_hooks_left(tmp_path: Path) -> None:
    module = mlp()
    manage(module, "host", tmp_path)
    loss_of(module, BATCHES[0]).backward()
    hetmem.release(module)
    for parameter in module.parameters():
        assert not parameter._backward_hooks
        hooks: Any = parameter._post_accumulate_grad_hooks
        assert not hooks
