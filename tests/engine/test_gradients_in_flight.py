"""Gradients whose copies are on their way home, in hooks: a use waits, and what is written is stepped from."""

from __future__ import annotations

import copy
import ctypes
import itertools
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import nn

import hetmem
from hetmem import testing
from tests.engine.harness import (
    BATCHES,
    WIDTH,
    Recipe,
    adamws,
    assert_same,
    loss_of,
    manage,
    mlp,
    pair,
    streamed,
    train_both,
    vector_batches,
)
from tests.engine.lazy_device import LazyDevice


def by_its_address(gradient: torch.Tensor) -> torch.Tensor:
    elements = (ctypes.c_float * gradient.numel()).from_address(gradient.data_ptr())
    return torch.tensor(list(elements)).view(gradient.shape)


READS: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    by_its_address,
    torch.clone,
    lambda gradient: torch.from_numpy(gradient.numpy()).clone(),
    lambda gradient: torch.from_dlpack(gradient).clone(),
    lambda gradient: torch._foreach_mul([gradient], 1.0)[0],
    lambda gradient: pickle.loads(pickle.dumps(gradient)),
    copy.deepcopy,
    lambda gradient: gradient.data.clone(),
)


def hooks_that_read(module: nn.Module, log: list[torch.Tensor], *, writes: bool = True) -> None:
    """A hook of a layer and one of a tensor that read gradients, the last that has arrived first, each in another way,
    and halve them if they are to write."""
    ways = itertools.cycle(READS)

    def read(*_: object) -> None:
        for parameter in reversed([*module.parameters()]):
            if parameter.grad is not None:
                log.append(next(ways)(parameter.grad))
                if writes:
                    parameter.grad.mul_(0.5)

    module[2].register_full_backward_hook(read)  # type: ignore[index]
    module[1].register_forward_hook(lambda *given: given[-1].register_hook(read) and None)  # type: ignore[index]


@streamed
def test_a_hook_that_uses_a_gradient_in_flight_waits_for_it(placement: str, tmp_path: Path) -> None:
    """Its copy is as late as it may be: the home has what it had before. What a hook writes is stepped from."""
    modules = pair(mlp, placement, tmp_path, device=LazyDevice(), sanitize=False)
    logs: list[list[torch.Tensor]] = [[], []]
    for module, log in zip(modules, logs, strict=True):
        hooks_that_read(module, log)
    optimizers = adamws(*modules)
    train_both(*modules, BATCHES, Recipe(steps=4, accumulation=2), optimizers=optimizers)
    assert len(logs[0]) == len(logs[1]) > len(READS)
    for left, right in zip(*logs, strict=True):
        assert_same(left, right, "gradient in a hook")


def test_a_hook_writes_to_a_gradient_of_a_chunk_that_got_another_since_it_did_last(tmp_path: Path) -> None:
    """On NVMe, in chunks of several layers: the chunk was staged again, and written over what the hook had written."""

    def halve(module: nn.Module, *_: object) -> None:
        for layer in module[2][2], module[2][4]:  # type: ignore[index]
            if layer.weight.grad is not None:
                layer.weight.grad.mul_(0.5)

    build = lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), mlp())  # noqa: E731
    room = hetmem.Budget(device="64MiB", device_chunks="256KiB", host="256KiB", nvme="64MiB", nvme_dir=tmp_path)
    modules = pair(build, room, tmp_path, device=LazyDevice(), sanitize=False, chunk_bytes="64KiB")
    for module in modules:
        for layer in module[2][2], module[2][0]:
            layer.register_full_backward_hook(partial(halve, module))
        module[1].register_forward_hook(lambda *given, m=module: given[-1].register_hook(partial(halve, m)) and None)
    train_both(*modules, BATCHES, Recipe(accumulation=2))
    assert testing.of(modules[1]).homes("grad") == {"nvme"}


@streamed
def test_a_backward_without_hooks_waits_for_gradients_at_its_end_alone(placement: str, tmp_path: Path) -> None:
    """Nothing of hetmem's own uses one in flight."""
    module, waits = manage(mlp(), placement, tmp_path, device=LazyDevice()), []
    for batch in BATCHES:
        with testing.around("gradients arrive", lambda wait, *given: waits.append(wait(*given))):
            (loss_of(module, batch) + loss_of(module, batch)).backward()
    assert len(waits) == len(BATCHES)


@streamed
def test_a_hook_finds_gradients_of_mixed_precision_as_the_backward_leaves_them(placement: str, tmp_path: Path) -> None:
    module = manage(mlp(), placement, tmp_path, device=LazyDevice(), sanitize=False, mixed_precision=torch.bfloat16)
    log: list[torch.Tensor] = []
    hooks_that_read(module, log, writes=False)
    for batch in vector_batches(2, 4, WIDTH, dtype=torch.bfloat16):
        loss_of(module, batch).backward()
        left = {parameter.shape: [] for parameter in module.parameters()}  # type: ignore[var-annotated]
        for parameter in module.parameters():
            left[parameter.shape].append(parameter.grad)
        assert log
        assert all(any(torch.equal(read, one) for one in left[read.shape]) for read in log)
        log.clear()
        module.zero_grad()


@streamed
def test_a_kept_view_of_a_gradient_shows_a_hook_the_sum_so_far(placement: str, tmp_path: Path) -> None:
    modules, seen = pair(mlp, placement, tmp_path, device=LazyDevice(), sanitize=False), ([], [])
    for module, log in zip(modules, seen, strict=True):
        loss_of(module, BATCHES[0]).backward()
        kept = [parameter.grad.view(-1) for parameter in module[4].parameters()]
        module[2].register_full_backward_hook(lambda *_, k=kept, log=log: log.extend(view.clone() for view in k))
        loss_of(module, BATCHES[1]).backward()
    for left, right in zip(*seen, strict=True):
        assert_same(left, right, "view of a gradient")
