"""What the user writes to weights reaches the next forward, wherever the weight lives and whoever has a copy of it."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hetmem import testing
from tests.engine.harness import (
    BATCHES,
    PLACEMENTS,
    WIDTH,
    Recipe,
    adamws,
    assert_same,
    assert_same_grads,
    assert_same_weights,
    budget,
    everywhere,
    loss_of,
    mlp,
    pair,
    precisions,
    streamed,
    train_both,
    vector_batches,
)
from tests.engine.lazy_device import EarlyDevice
from tests.faults.disk import FaultyDisk
from tests.pairs import mostly


def named(value: Any) -> str:
    return getattr(value, "__name__", str(value))


def multiplied(module: nn.Module) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(1.5)


def copied(module: nn.Module) -> None:
    with torch.no_grad():
        module[2].weight.copy_(torch.eye(WIDTH))


def one_element(module: nn.Module) -> None:
    with torch.no_grad():
        module[2].weight[3, 5] = 42.0


def moving_average(module: nn.Module) -> None:
    """Weights are exchanged with an average, as for evaluation."""
    average = {name: p.detach().clone().mul_(0.9) for name, p in module.named_parameters()}
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.lerp_(average[name], 0.5)


def loaded(module: nn.Module) -> None:
    state = {name: value * 0.5 for name, value in copy.deepcopy(module.state_dict()).items()}
    module.load_state_dict(state)


def loaded_by_assignment_of_data(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.data = parameter.data * 0.5


def initialised(module: nn.Module) -> None:
    nn.init.normal_(module[2].weight)
    module[0].reset_parameters()


def through_detach(module: nn.Module) -> None:
    module[2].weight.detach().mul_(2)


def through_a_view(module: nn.Module) -> None:
    with torch.no_grad():
        module[2].weight.view(-1)[:100].zero_()


def foreach(module: nn.Module) -> None:
    with torch.no_grad():
        torch._foreach_mul_(list(module.parameters()), 0.5)


def as_a_vector(module: nn.Module) -> None:
    vector = nn.utils.parameters_to_vector(module.parameters()).detach().clone()
    nn.utils.vector_to_parameters(vector * 0.5, module.parameters())


def through_data(module: nn.Module) -> None:
    """torch counts no version of this one; nor of the next two."""
    module[2].weight.data.copy_(torch.eye(WIDTH))


def multiplied_through_data(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.data.mul_(0.5)


def through_numpy(module: nn.Module) -> None:
    array: np.ndarray[Any, Any] = module[2].weight.detach().numpy()
    array[0] = 3.0


def shared(module: nn.Module) -> None:
    """The storages stay and get other memory, as they do when a state dict is sent to another process."""
    for parameter in module.parameters():
        parameter.share_memory_()


def shared_and_multiplied(module: nn.Module) -> None:
    shared(module)
    multiplied_through_data(module)


KINDS = (one_element, loaded_by_assignment_of_data, multiplied_through_data, shared_and_multiplied)
"""One that torch counts, one that replaces tensors, one that nobody counts, and one that exchanges memory."""
WRITES = (
    multiplied, copied, one_element, moving_average, loaded, loaded_by_assignment_of_data, initialised, through_detach,
    through_a_view, foreach, as_a_vector, through_data, multiplied_through_data, through_numpy, shared,
    shared_and_multiplied,
)  # fmt: skip


@pytest.mark.each
@precisions
@pytest.mark.parametrize(("write", "placement"), mostly(WRITES, PLACEMENTS, KINDS), ids=named)
def test_writes_between_steps_reach_the_next_forward(
    write: Callable[[nn.Module], None], mixed: torch.dtype | None, placement: str, tmp_path: Path
) -> None:
    modules = pair(mlp, placement, tmp_path, mixed_precision=mixed)
    optimizers = None
    for steps in (2, 1):
        recipe = Recipe(steps=steps, mixed=mixed)
        batches = vector_batches(2, 4, WIDTH, dtype=mixed)
        optimizers = train_both(*modules, batches, recipe, optimizers=optimizers)
        for module in modules:
            torch.manual_seed(3)
            write(module)
        assert_same_weights(*modules)
    with torch.no_grad():
        if mixed is None:
            assert_same(*(module(*BATCHES[0]) for module in modules), "evaluation")


@streamed
@precisions
def test_writes_while_a_copy_is_on_its_way_reach_the_next_forward(
    mixed: torch.dtype | None, placement: str, tmp_path: Path
) -> None:
    """A copy may have been made of what was there before; nobody knows yet, as its end was not waited for."""
    device = EarlyDevice()
    modules = pair(mlp, placement, tmp_path, mixed_precision=mixed, device=device)
    batches = vector_batches(2, 4, WIDTH, dtype=mixed)
    optimizers = train_both(*modules, batches, Recipe(steps=2, mixed=mixed))
    for step in range(3):
        before = device.streams.enqueued
        optimizers = train_both(*modules, batches, Recipe(steps=1, mixed=mixed), optimizers=optimizers)
        assert device.streams.enqueued > before, step
        for module in modules:
            multiplied_through_data(module)


class LateDisk(FaultyDisk):
    """Has read what was there, and says so only when it may."""

    def __init__(self) -> None:
        super().__init__()
        self.has_read, self.may_answer = threading.Event(), threading.Event()
        self.may_answer.set()

    def preadv(self, fd: int, buffers: list[memoryview], offset: int, /) -> int:
        count = super().preadv(fd, buffers, offset)
        self.has_read.set()
        self.may_answer.wait()
        return count


@pytest.mark.each
@precisions
@pytest.mark.parametrize("home_copies", [False, True])
def test_writes_while_a_disk_reads_what_was_there_before_reach_the_next_forward(
    home_copies: bool, mixed: torch.dtype | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Staging got it after everything had been looked at, and nobody looked again."""
    disk = LateDisk()
    disk.used_by(monkeypatch)
    room = budget("nvme", tmp_path, host="90KiB", device_chunks="64KiB", home_copies=home_copies)
    modules = pair(mlp, room, tmp_path, mixed_precision=mixed)
    batches = vector_batches(2, 4, WIDTH, dtype=mixed)
    optimizers = train_both(*modules, batches, Recipe(steps=2, mixed=mixed))
    inside = testing.of(modules[1])
    on_nvme = [chunk.index for chunk in inside.chunks() if chunk.homes["param"] == "nvme"]
    assert len(on_nvme) >= 2
    for chunk in on_nvme:
        inside.forget_copies()
        disk.has_read.clear()
        disk.may_answer.clear()
        inside.prefetch(chunk, "host")
        assert disk.has_read.wait(30)
        for module in modules:
            multiplied_through_data(module)
        threading.Timer(0.2, disk.may_answer.set).start()
        train_both(*modules, batches, Recipe(steps=1, mixed=mixed), optimizers=optimizers)


def test_writes_while_a_disk_reads_what_was_there_before_reach_the_next_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No step comes between two evaluations, so what is read counts, unless memory that was kept shows that the program
    may have written."""
    disk = LateDisk()
    disk.used_by(monkeypatch)
    modules = pair(mlp, budget("nvme", tmp_path, host="90KiB", device_chunks="64KiB"), tmp_path)
    inside = testing.of(modules[1])
    kept = [each.detach().numpy() for module in modules for each in module.parameters()]

    def evaluate() -> None:
        with torch.no_grad():
            assert_same(*(module(BATCHES[0][0]) for module in modules), "output")

    evaluate()
    evaluate()
    for chunk in [chunk.index for chunk in inside.chunks() if chunk.homes["param"] == "nvme"]:
        inside.forget_copies()
        disk.has_read.clear()
        disk.may_answer.clear()
        inside.prefetch(chunk, "host")
        assert disk.has_read.wait(30)
        for values in kept:
            values *= 0.5
        threading.Timer(0.2, disk.may_answer.set).start()
        evaluate()


@pytest.mark.parametrize(("write", "placement"), mostly(WRITES, PLACEMENTS), ids=named)
def test_writes_between_backward_and_step_are_stepped_from(
    write: Callable[[nn.Module], None], placement: str, tmp_path: Path
) -> None:
    modules = pair(mlp, placement, tmp_path)
    optimizers = adamws(*modules)
    for batch in BATCHES[:3]:
        for module, optimizer in zip(modules, optimizers, strict=True):
            loss_of(module, batch).backward()
            torch.manual_seed(3)
            write(module)
            optimizer.step()
        assert_same_grads(*modules)
        assert_same_weights(*modules)
        for module in modules:
            module.zero_grad()


@pytest.mark.each
@pytest.mark.parametrize("overlap", ["backward", "forward"])
@pytest.mark.parametrize("written", ["weights", "states"])
def test_writes_after_a_chunk_was_prepared_for_its_update_are_stepped_from(
    written: str, overlap: str, tmp_path: Path
) -> None:
    """Where all gradients must be known first, only their squares are summed up in backward. Weights that staging still
    held were updated in place of those that the user had written since."""
    room = budget("nvme", tmp_path, host="70KiB", device_chunks="64KiB")
    modules = pair(lambda: nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6))), room, tmp_path)
    optimizers = adamws(*modules, overlap=overlap, max_grad_norm=1e9)
    for batch in BATCHES * 2:
        for module, optimizer in zip(modules, optimizers, strict=True):
            loss_of(module, batch).backward()
            with torch.no_grad():
                for parameter in module.parameters():
                    if written == "weights":
                        parameter.mul_(0.5)
                    elif parameter in optimizer.state:
                        optimizer.state[parameter]["exp_avg_sq"].mul_(0.5)
            optimizer.step()
            optimizer.zero_grad()
        assert_same_weights(*modules)


@pytest.mark.each
@everywhere
@precisions
def test_writes_before_the_first_forward_and_without_an_optimizer_count(
    placement: str, mixed: torch.dtype | None, tmp_path: Path
) -> None:
    at_home = {"home_copies": True} if mixed is not None and placement == "host" else {}
    modules = pair(mlp, placement, tmp_path, mixed_precision=mixed, **at_home)
    for value in (1.5, 0.25):
        for module in modules:
            with torch.no_grad():
                weight = module[0].weight
                (weight.data if value == 1.5 else weight).mul_(value)
        reference = copy.deepcopy(modules[0])
        for parameter in reference.parameters():
            parameter.data = parameter.data.to(mixed or torch.float32)
        (x,) = BATCHES[0]
        x = x.to(mixed or torch.float32)
        with torch.no_grad():
            assert_same(reference(x), modules[1](x), "output")
