"""Activations that leave the device: the bits of plain torch, within the budget, each over a link once."""

from __future__ import annotations

import errno
import gc
import weakref
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import hetmem
from hetmem import testing
from hetmem.errors import DeviceOutOfMemoryError, ManageError
from tests.engine import harness
from tests.engine.harness import Block, assert_same, assert_same_grads, pair, train_both, vector_batches
from tests.engine.lazy_device import EarlyDevice, LazyDevice
from tests.models.zoo import MODELS

WIDTH, ROWS, DEPTH = 64, 128, 6
SAVED = ROWS * WIDTH * 4
"""Bytes of one activation of `Deep`."""
KIB = 1 << 10


class Deep(nn.Module):
    """Blocks whose activations take many times what `budget` gives the device: each saves five of `SAVED` bytes."""

    def __init__(self, call: Callable[..., torch.Tensor] | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(DEPTH))
        self.call = call or (lambda block, x: block(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = self.call(block, x)
        return x.square().mean()


def budget(**changes: Any) -> hetmem.Budget:
    return hetmem.Budget(**{"device": 512 * KIB, "device_chunks": 192 * KIB, "host": "16MiB", **changes})


def deep(tmp_path: Path, call: Any = None, *, limits: hetmem.Budget | None = None, **options: Any) -> tuple[Any, Any]:
    options = {"activations": "offload", "chunk_bytes": 16 * KIB, **options}
    return pair(partial(Deep, call), limits or budget(), tmp_path, **options)


BATCHES = vector_batches(3, ROWS, WIDTH)
INPUTS = [(x.clone().requires_grad_(),) for (x,) in BATCHES]
reentrant, non_reentrant = partial(checkpoint, use_reentrant=True), partial(checkpoint, use_reentrant=False)


def slow() -> hetmem.SimDevice:
    """One whose copies run beside compute."""
    return hetmem.SimDevice(host_to_device="400MB", device_to_host="400MB")


DEVICES = {"copies by the caller": hetmem.SimDevice, "beside compute": slow, "late": LazyDevice, "early": EarlyDevice}


def peak(module: nn.Module) -> int:
    return hetmem.report(module).to_dict()["tiers"]["device"]["peak_bytes"]


@pytest.mark.each
@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize("sanitize", [True, False], ids=["checked", "traced"])
def test_a_step_that_is_too_large_for_the_device_has_the_bits_of_torch(
    name: str, sanitize: bool, tmp_path: Path
) -> None:
    plain, managed = deep(tmp_path, device=DEVICES[name](), sanitize=sanitize)
    train_both(plain, managed, INPUTS)
    assert peak(managed) <= 512 * KIB <= DEPTH * 6 * SAVED // 2
    assert testing.of(managed).memory().activation_bytes == 0


def test_without_it_the_same_step_is_refused(tmp_path: Path) -> None:
    _, managed = deep(tmp_path, activations="keep")
    with pytest.raises(DeviceOutOfMemoryError):
        managed(*BATCHES[0])


@pytest.mark.parametrize("call", [reentrant, non_reentrant], ids=["reentrant", "non-reentrant"])
def test_of_checkpoints_the_inputs_leave(call: Any, tmp_path: Path) -> None:
    plain, managed = deep(tmp_path, call)
    train_both(plain, managed, INPUTS)
    out = testing.of(managed).link_bytes()["device_to_host"]
    gradients = 3 * sum(p.numel() * 4 for p in plain.parameters())
    assert out - gradients <= 3 * DEPTH * SAVED


def test_what_is_saved_crosses_each_link_once(tmp_path: Path) -> None:
    """Each block saves the norm's and both layers' inputs, and what the activation is of: one storage of its width, and
    two of twice that; the sum that it begins with is its norm's input. What the last block saves last, the sum holds
    still, and the input, the caller."""
    _, managed = deep(tmp_path, device=hetmem.SimDevice(), limits=budget(device="8MiB"))
    loss, links = managed(*BATCHES[0]), testing.of(managed).link_bytes
    out = links()["device_to_host"]
    storages = DEPTH * (1 + 1 + 2 + 2) - 1  # of `SAVED` bytes; the input stays
    assert storages * SAVED - 4 * SAVED <= out <= storages * SAVED
    weights = links()["host_to_device"]
    assert testing.of(managed).memory().activation_bytes == out
    loss.backward()
    moments = testing.of(managed).transfers()
    back = sum(nbytes for link, block, nbytes in moments if link == "host_to_device" and block < 0)
    assert back == out
    assert links()["host_to_device"] - weights >= out


def test_what_others_hold_does_not_leave(tmp_path: Path) -> None:
    kept: list[torch.Tensor] = []

    def call(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        kept.append(block(x))
        return kept[-1]

    _, managed = deep(tmp_path, call, limits=budget(device="8MiB"))
    managed(*BATCHES[0])
    kept_out = testing.of(managed).link_bytes()["device_to_host"]
    _, other = deep(tmp_path, limits=budget(device="8MiB"))
    other(*BATCHES[0])
    assert testing.of(other).link_bytes()["device_to_host"] - kept_out >= (DEPTH - 2) * SAVED


def test_nothing_moves_and_nothing_is_kept_without_a_graph(tmp_path: Path) -> None:
    _, managed = deep(tmp_path)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            managed(*BATCHES[0])
    assert testing.of(managed).link_bytes()["device_to_host"] == 0
    assert testing.of(managed).memory().activation_bytes == 0


class Written(nn.Module):
    """Writes to what `exp` has saved, before or after it has left."""

    def __init__(self, when: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.when = when

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x).exp()
        y = x.view(-1)
        other = self.layers[1](torch.ones_like(x))
        if self.when == "at once":
            x.mul_(2)
        else:
            y.detach()[:4] = 1.0
        del x
        return self.layers[2](other.tanh() + y.view(-1, WIDTH)).tanh().mean()


@pytest.mark.parametrize("when", ["at once", "through a view"])
def test_a_write_to_what_is_saved_is_torch_s_own_error(when: str, tmp_path: Path) -> None:
    for module in pair(partial(Written, when), budget(device="8MiB"), tmp_path, activations="offload"):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            module(*BATCHES[0]).backward()


def several_backwards(module: nn.Module) -> None:
    loss = module(*BATCHES[0])
    loss.backward(retain_graph=True)
    loss.backward(retain_graph=True)
    loss.backward()


def several_forwards(module: nn.Module) -> None:
    losses = [module(*batch) for batch in BATCHES]
    (losses[0] + losses[2]).backward()
    losses[1].backward()


def twice(module: nn.Module) -> None:
    x = BATCHES[0][0].clone().requires_grad_()
    (grad,) = torch.autograd.grad(module(x), x, create_graph=True)
    grad.square().sum().backward()


def in_parts(module: nn.Module) -> None:
    """A backward that asks for a part of the graph, and one for all."""
    x = BATCHES[0][0].clone().requires_grad_()
    loss = module(x)
    last = [*module.parameters()][-2:]
    for parameter, grad in zip(last, torch.autograd.grad(loss, last, retain_graph=True), strict=True):
        parameter.grad = grad
    loss.backward()


def autocast(module: nn.Module) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = module(*BATCHES[0])
    loss.float().backward()


def dropped(module: nn.Module) -> None:
    module(*BATCHES[0])
    module(*BATCHES[1])
    module(*BATCHES[2]).backward()


def raised(module: nn.Module) -> None:
    def fail(*_: Any) -> None:
        raise KeyError("in forward")

    handle = [*module.modules()][-1].register_forward_hook(fail)
    with pytest.raises(KeyError):
        module(*BATCHES[0])
    handle.remove()
    module(*BATCHES[0]).backward()


def frozen(module: nn.Module) -> None:
    for parameter in [*module.parameters()][:12]:
        parameter.requires_grad_(False)
    module(*BATCHES[0]).backward()


ACTS = (several_backwards, several_forwards, twice, in_parts, autocast, dropped, raised, frozen)


@pytest.mark.each
@pytest.mark.parametrize("act", ACTS, ids=lambda act: act.__name__)
@pytest.mark.parametrize("name", DEVICES)
def test_gradients_of_any_use_of_a_graph_equal_torch(act: Callable[[Any], None], name: str, tmp_path: Path) -> None:
    plain, managed = deep(tmp_path, device=DEVICES[name](), limits=budget(device="4MiB"))
    for _ in range(2):
        act(plain)
        act(managed)
        assert_same_grads(plain, managed)
    testing.of(managed).wait_idle()
    assert testing.of(managed).memory().activation_bytes == 0


def test_a_graph_outlives_its_model(tmp_path: Path) -> None:
    """What has left comes back after `release`, and after the model is dropped."""
    for end in (hetmem.release, lambda module: None):
        plain, managed = deep(tmp_path, limits=budget(device="4MiB"))
        inputs, losses = [], []
        for module in (plain, managed):
            inputs.append(BATCHES[0][0].detach().clone().requires_grad_())
            losses.append(module(inputs[-1]))
        end(managed)
        del managed, module
        for loss in losses:
            loss.backward()
        assert_same(inputs[0].grad, inputs[1].grad, "gradient of the input")


def test_where_host_memory_ends_the_error_says_what_would_help(tmp_path: Path) -> None:
    states = 4 * sum(p.numel() * 4 for p in Deep().parameters())
    plain, managed = deep(tmp_path, limits=budget(host=states + 450 * KIB))
    optimizers = harness.adamws(plain, managed)
    with pytest.raises(DeviceOutOfMemoryError) as failed:
        managed(*BATCHES[0])
    for part in (r"moment\s\d+\sof\sthe\sforward", r"raise\sBudget\(host=…\)\sby", "checkpointing", "micro-batch"):
        failed.match(part)
    del failed
    train_both(plain, managed, [(x[:16],) for (x,) in BATCHES], optimizers=optimizers)  # nothing is lost


@pytest.mark.in_turn
@pytest.mark.parametrize("nvme", [None, "16MiB"])
def test_what_has_moved_and_gone_leaves_nothing_behind(nvme: str | None, tmp_path: Path) -> None:
    directory = None if nvme is None else tmp_path
    plain, managed = deep(tmp_path, limits=budget(host="16MiB", nvme=nvme, nvme_dir=directory))
    optimizers = harness.adamws(plain, managed)

    def references() -> int:
        train_both(plain, managed, INPUTS, optimizers=optimizers)
        testing.of(managed).wait_idle()
        gc.collect()
        return sum(type(each) is weakref.ref for each in gc.get_objects())

    references()
    before = references()
    assert references() <= before + 2


def test_optimizer_states_find_the_room_that_activations_had(tmp_path: Path) -> None:
    """Nothing but the step itself reserves them: what a forward borrows of host memory is given back."""
    states = 4 * sum(-(-p.numel() * 4 // (16 * KIB)) * 16 * KIB for p in Deep().parameters())
    plain, managed = deep(tmp_path, limits=budget(host=states, device="4MiB"))
    managed(*BATCHES[0]).backward()
    plain(*BATCHES[0]).backward()
    assert_same_grads(plain, managed)
    for module in (plain, managed):
        module.zero_grad()
    train_both(plain, managed, BATCHES)


class Failing(hetmem.SimDevice):
    """Fails to copy one activation."""

    def __init__(self, at: int, *, out: bool, **speeds: Any) -> None:
        super().__init__(**speeds)
        self.at, self.out, self.failed = at, out, False

    def _fails(self, tensor: torch.Tensor) -> None:
        if tensor.dtype is torch.uint8:
            self.at -= 1
            if self.at == 0:
                self.failed = True
                raise OSError(errno.EIO, "a copy failed")

    def copy_in(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if not self.out:
            self._fails(source)
        super().copy_in(target, source)

    def gradient_out(self, target: torch.Tensor, arrived: torch.Tensor, *, add: bool) -> None:
        if self.out:
            self._fails(arrived)
        super().gradient_out(target, arrived, add=add)

    def gradients_out(self, targets: list[torch.Tensor], arrived: list[torch.Tensor]) -> None:
        for target, each in zip(targets, arrived, strict=True):
            self.gradient_out(target, each, add=False)


@pytest.mark.each
@pytest.mark.parametrize("speed", [None, "400MB"], ids=["by the caller", "beside compute"])
@pytest.mark.parametrize("out", [True, False], ids=["out", "in"])
def test_a_copy_that_fails_ends_in_an_error_or_in_the_right_bits(
    out: bool, speed: str | None, all_cases: bool, tmp_path: Path
) -> None:
    plain, _ = deep(tmp_path, activations="keep", limits=budget(device="8MiB"))
    plain(*BATCHES[0]).backward()
    for at in range(1, 71) if all_cases else (1, 20, 69):
        device = Failing(at, out=out, host_to_device=speed, device_to_host=speed)
        _, managed = deep(tmp_path, device=device, limits=budget(device="1MiB"))
        try:
            loss = managed(*BATCHES[0])
        except OSError:
            assert device.failed
            loss = managed(*BATCHES[0])
        try:
            loss.backward(retain_graph=True)
            testing.of(managed).wait_idle()
        except OSError:  # of what did not leave, or did not come, nothing is lost: the same graph has the right bits
            assert device.failed
            managed.zero_grad()
            loss.backward()
        assert_same_grads(plain, managed, f"copy {at}")


class Convolutions(nn.Module):
    """A convolutional net with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 16, 32, 32)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(inplace=True))
            for a, b in pairwise(widths)
        )
        self.head = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return F.log_softmax(self.head(F.max_pool2d(x, 2).mean((2, 3))), -1).square().mean()


class Recurrent(nn.Module):
    """An LSTM of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(32, 48, 2, batch_first=True), nn.Linear(48, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0].relu()).square().mean()


def family(name: str) -> tuple[Callable[[], nn.Module], list[Any], Callable[..., torch.Tensor]]:
    """A model, its batches, and its loss of one."""
    if name == "convolutions":
        return Convolutions, vector_batches(2, 4, 3, 16, 16), harness.loss_of
    if name == "lstm":
        return Recurrent, vector_batches(2, 8, 20, 32), harness.loss_of
    inputs = MODELS[name]()[1]
    return lambda: MODELS[name]()[0], [inputs], lambda module, batch: module(**batch).loss


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5", "vit", "convolutions", "lstm"])
def test_families_train_with_the_bits_of_torch(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build, batches, loss = family(name)
    parameters = sum(p.numel() * 4 for p in build().parameters())
    limits = hetmem.Budget(device="3MiB", device_chunks=max(parameters // 2, 200 * KIB), host="64MiB")
    plain, managed = pair(build, limits, tmp_path, activations="offload", chunk_bytes=64 * KIB, device=slow())
    train_both(plain, managed, batches, harness.Recipe(steps=2), loss=loss)
    gradients = 2 * parameters
    assert testing.of(managed).link_bytes()["device_to_host"] > gradients, "nothing has left"
    assert peak(managed) <= 3 << 20


def test_what_says_nothing_of_activations_is_refused() -> None:
    for asked in ("foo", None, True, ["offload"]):
        with pytest.raises(ManageError, match="activations must be 'keep', 'offload' or 'auto'"):
            hetmem.manage(nn.Linear(4, 4), activations=asked)
    with pytest.raises(ManageError, match="activations must be"):
        hetmem.managed(hetmem.Budget(), activations="foo")(type("Line", (nn.Linear,), {}))(4, 4)


class Saving(nn.Module):
    """Twelve layers, of which each saves two tensors of 1 MiB."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.ones(1)) for _ in range(12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = (x * weight).exp().sqrt()
        return x.sum()


def test_a_slow_link_holds_the_forward_back_before_activations_pile_up_on_the_device() -> None:
    model = Saving()
    device = hetmem.SimDevice(host_to_device="200MB", device_to_host="200MB")
    limits = hetmem.Budget(device="32MiB", device_chunks="1MiB", host="64MiB")
    hetmem.manage(model, limits, device=device, activations="offload", chunk_bytes=16 * KIB)
    for _ in range(2):
        model(torch.zeros(1 << 18)).backward()
    saved = hetmem.report(model).to_dict()["activations"]
    assert saved["bytes"]["device_to_host"] >= 20 << 20, "all leave"
    assert saved["peak_bytes"]["device"] <= 8 << 20, "two cross the link, one is computed, one is fetched ahead of it"
