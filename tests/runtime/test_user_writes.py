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

import hetmem
from hetmem.engine.sampling import Fingerprints
from hetmem.engine.write_check import Writes
from hetmem.intercept import registry
from hetmem.memory.chunk import Chunk, Role
from hetmem.memory.nvme_store import Extent, NvmeStore
from hetmem.schedule.blocks import CopyState
from hetmem.schedule.trace import Schedule, Tier
from tests.faults.disk import FaultyDisk
from tests.runtime.harness import (
    BATCHES,
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
from tests.runtime.lazy_device import EarlyDevice


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


WRITES = (
    multiplied, copied, one_element, moving_average, loaded, loaded_by_assignment_of_data, initialised, through_detach,
    through_a_view, foreach, as_a_vector, through_data, multiplied_through_data, through_numpy, shared,
    shared_and_multiplied,
)  # fmt: skip


@pytest.mark.pairs
@everywhere
@precisions
@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
def test_writes_between_steps_reach_the_next_forward(
    write: Callable[[nn.Module], None], mixed: torch.dtype | None, placement: str, tmp_path: Path
) -> None:
    modules = pair(mlp, placement, tmp_path, mixed_precision=mixed)
    optimizers = None
    for _ in range(2):
        recipe = Recipe(steps=2, mixed=mixed)
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


def test_what_the_device_is_fed_while_an_old_copy_is_waited_for_is_old_too(tmp_path: Path) -> None:
    """The read into staging was begun before the write, and its end brings the block to the device at once."""
    modules = pair(mlp, "nvme", tmp_path)
    train_both(*modules, BATCHES)
    runtime = registry.of_module(modules[1]).runtime
    traffic, residency = runtime.traffic, runtime.traffic.residency
    traffic.forget_copies()
    chunk = next(chunk for chunk in runtime.chunks if chunk.parameters[0].name == "0.weight")
    block = chunk.homes[Role.PARAM].block
    assert block is not None
    traffic.execute(residency.expect(Tier.DEVICE, Schedule([(block,)])))
    assert [residency.state(block, tier) for tier in (Tier.HOST, Tier.DEVICE)] == [CopyState.LOADING, None]
    traffic.superseded(chunk, Role.PARAM)
    assert residency.state(block, Tier.DEVICE) is None
    assert residency.state(block, Tier.HOST) is not CopyState.VALID


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
    runtime = registry.of_module(modules[1]).runtime
    on_nvme = [chunk.homes[Role.PARAM] for chunk in runtime.chunks if chunk.homes[Role.PARAM].tier is Tier.NVME]
    assert len(on_nvme) >= 2
    for home in on_nvme:
        runtime.forget_copies()
        disk.has_read.clear()
        disk.may_answer.clear()
        assert home.block is not None
        runtime.traffic.execute(runtime.traffic.residency.prefetch(home.block, Tier.HOST))
        assert disk.has_read.wait(30)
        for module in modules:
            multiplied_through_data(module)
        threading.Timer(0.2, disk.may_answer.set).start()
        train_both(*modules, batches, Recipe(steps=1, mixed=mixed), optimizers=optimizers)


@everywhere
@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
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


@everywhere
@precisions
def test_writes_before_the_first_forward_and_without_an_optimizer_count(
    placement: str, mixed: torch.dtype | None, tmp_path: Path
) -> None:
    modules = pair(mlp, placement, tmp_path, mixed_precision=mixed)
    for value in (1.5, 0.25):
        for module in modules:
            with torch.no_grad():
                module[0].weight.mul_(value)
        reference = copy.deepcopy(modules[0])
        for parameter in reference.parameters():
            parameter.data = parameter.data.to(mixed or torch.float32)
        (x,) = BATCHES[0]
        x = x.to(mixed or torch.float32)
        with torch.no_grad():
            assert_same(reference(x), modules[1](x), "output")


@pytest.mark.parametrize("when", ["forward", "step"])
def test_homes_on_nvme_that_are_looked_at_are_read_together_before(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One access of the disk after the other would hold training up."""
    _, managed = pair(mlp, "nvme", tmp_path)
    optimizer = hetmem.AdamW(managed.parameters(), lr=1e-2)
    asked: list[Extent] = []
    compared: list[Extent] = []
    caches, differ = NvmeStore.cache_pages, Fingerprints.differ

    def noted(fingerprints: Fingerprints, chunk: Chunk, *args: Any) -> bool:
        compared.append(chunk.homes[Role.PARAM].extent)
        assert set(compared) <= set(asked)
        return differ(fingerprints, chunk, *args)

    def start_anew() -> None:
        asked.clear()
        compared.clear()

    monkeypatch.setattr(Writes, "make_sure", lambda *_: None)  # of what was on its way and could not be looked at
    monkeypatch.setattr(Fingerprints, "differ", noted)
    monkeypatch.setattr(NvmeStore, "cache_pages", lambda *args: (asked.append(args[1]), caches(*args)))
    for batch in vector_batches(4, 4, WIDTH):
        loss = loss_of(managed, batch)
        if when == "step":
            start_anew()
        loss.backward()
        optimizer.step()
        if when == "forward":
            start_anew()
        optimizer.zero_grad()
    loss_of(managed, BATCHES[0])
    assert compared
