"""An exception in the middle of a step leaves a model that trains on with the same bits."""

from __future__ import annotations

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hetmem
from tests.engine.harness import (
    BATCHES,
    CHUNK,
    WIDTH,
    Recipe,
    Tower,
    assert_same,
    assert_same_grads,
    assert_same_weights,
    everywhere,
    manage,
    mlp,
    offloaded,
    pair,
    precisions,
    streamed,
    token_batches,
    train_both,
)
from tests.engine.lazy_device import LazyDevice


class Failing(nn.Module):
    """Raises in forward or in backward when told to."""

    def __init__(self, checkpointing: bool | None = None) -> None:
        super().__init__()
        self.tower = Tower(WIDTH, 2, checkpointing=checkpointing)
        self.fail: str | None = None

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        fail, self.fail = self.fail, None
        hidden = self.tower.hidden(tokens)
        if fail == "forward":
            raise KeyError("in forward")
        if fail == "interrupt":
            raise KeyboardInterrupt
        if fail == "backward":
            hidden.register_hook(_fail)
        if fail == "hook of a weight":
            handle = self.tower.blocks[0].up.weight.register_hook(lambda grad: (handle.remove(), _fail(grad)))
        logits = self.tower.head(hidden)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _fail(grad: torch.Tensor) -> None:
    raise KeyError("in backward")


def _fails_in_its_backward(_: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
    args[0].register_hook(_fail)


RAISED: dict[str, tuple[type[BaseException], str]] = {
    "forward": (KeyError, "in forward"),
    "interrupt": (KeyboardInterrupt, "^$"),
    "backward": (KeyError, "in backward"),
    "hook of a weight": (KeyError, "in backward"),
    "wrong shape": (ValueError, r"^Expected input batch_size \(\d+\) to match target batch_size \(\d+\)"),
}


@pytest.mark.each
@offloaded
@pytest.mark.parametrize("where", RAISED)
@pytest.mark.parametrize("checkpointing", [None, False, True], ids=["no checkpoint", "non-reentrant", "reentrant"])
def test_an_exception_leaves_a_model_that_trains_on_with_the_same_bits(
    where: str, placement: str, checkpointing: bool | None, tmp_path: Path
) -> None:
    modules = pair(partial(Failing, checkpointing), placement, tmp_path)
    batches = token_batches(3)
    optimizers = train_both(*modules, batches, Recipe(steps=2))
    for module in modules:
        module.fail = where
        tokens, targets = batches[0]
        kind, says = RAISED[where]
        with pytest.raises(kind, match=says):
            module(tokens, targets[:, :3] if where == "wrong shape" else targets).backward()
    assert_same_weights(*modules)
    assert_same_grads(*modules, "after the exception")
    for module in modules:
        module.zero_grad()
    train_both(*modules, batches, Recipe(accumulation=2), optimizers=optimizers)


@streamed
@pytest.mark.parametrize("device", [None, LazyDevice], ids=["at once", "late"])
def test_gradients_of_a_backward_after_one_that_raised_are_at_home(placement: str, device: Any, tmp_path: Path) -> None:
    """Forwards on a thread of their own, and the backwards here: autograd lets go of the one that raised on a thread
    that does not train, as it does on a GPU."""
    options = {} if device is None else {"device": device()}
    modules = pair(Failing, placement, tmp_path, **options)
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, foreach=False) for module in modules]
    batches = token_batches(3)
    with ThreadPoolExecutor(1) as thread:
        for batch in batches:
            losses = [thread.submit(module, *batch).result() for module in modules]
            for module in modules:
                hook = module.tower.blocks[1].register_forward_pre_hook(_fails_in_its_backward)
                failing = thread.submit(module, *batches[0]).result()
                hook.remove()
                with pytest.raises(KeyError):
                    failing.backward()
            assert_same_grads(*modules, "of the backward that raised")
            for loss in losses:
                loss.backward()
            assert_same_grads(*modules, "of the backward after it")
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            assert_same_weights(*modules)


class _Scaled(torch.autograd.Function):
    """A function that raises in its backward, where torch tells nobody that it has ended."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (_,) = ctx.saved_tensors
        raise KeyError("in backward")


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.weight = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = _Scaled.apply(self.first(x), self.weight)
        return result


@pytest.mark.each
@everywhere
@precisions
def test_parameters_are_at_home_as_soon_as_a_function_of_the_users_has_raised_in_a_backward(
    mixed: torch.dtype | None, placement: str, tmp_path: Path
) -> None:
    _, managed = pair(Scaled, placement, tmp_path, mixed_precision=mixed)
    parameters = list(managed.parameters())
    before = [parameter.detach().clone() for parameter in parameters]
    x = torch.ones(2, WIDTH, dtype=mixed)
    for _ in range(2):
        loss = managed(x).float().sum()
        with pytest.raises(KeyError):
            loss.backward()
        for expected, parameter in zip(before, parameters, strict=True):
            assert_same(expected, parameter.detach(), "parameter")


class Remembered(nn.Module):
    """Tells of its last activation."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 2
        self.last = weakref.ref(x)
        return self.layers(x) + x


@pytest.mark.each
@pytest.mark.parametrize("speed", [None, "1GB"], ids=["at once", "on a thread"])
@pytest.mark.parametrize("times", [1, 1000], ids=["tried again", "raised"])
def test_an_error_of_a_copy_holds_no_activation_once_nobody_holds_it(
    times: int, speed: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory is what it is about: who tries again, or with less, has what the failed forward took."""
    copy_in, left = hetmem.SimDevice.copy_in, 0

    def no_memory(*copied: Any) -> None:
        nonlocal left
        left -= 1
        if left >= 0:
            raise torch.OutOfMemoryError("no memory to cast in")
        copy_in(*copied)

    monkeypatch.setattr(hetmem.SimDevice, "copy_in", no_memory)
    limits = hetmem.Budget(device="64MiB", host="64MiB", device_chunks=2 * CHUNK)
    model = manage(Remembered(), limits, tmp_path, device=hetmem.SimDevice(host_to_device=speed), sanitize=times > 1)
    for _ in range(3):
        model(*BATCHES[0]).sum().backward()
    gc.collect()
    gc.disable()
    try:
        left = times
        try:
            model(*BATCHES[0])
        except torch.OutOfMemoryError:
            assert times > 1
        assert left < times, "no copy was asked for"
        assert model.last() is None
    finally:
        gc.enable()


class Joined(Remembered):
    """One operator needs all weights at once."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 2
        self.last = weakref.ref(x)
        return x.sum() * torch.stack([layer.weight for layer in self.layers if isinstance(layer, nn.Linear)]).sum()


def test_weights_that_have_no_room_at_once_hold_no_activation_once_nobody_holds_the_error(tmp_path: Path) -> None:
    model = manage(Joined(), hetmem.Budget(device="64MiB", host="64MiB", device_chunks=2 * CHUNK), tmp_path)
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(hetmem.errors.DeviceOutOfMemoryError):
            model(*BATCHES[0])
        assert model.last() is None
    finally:
        gc.enable()
