"""Parameters of every kind: of any stride and size, frozen and unfrozen, used now and then or never."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hetmem
from hetmem.errors import ManageError
from tests.engine.harness import (
    BATCHES,
    WIDTH,
    Recipe,
    Tower,
    adamws,
    assert_same,
    assert_same_grads,
    assert_same_states,
    assert_same_weights,
    both,
    budget,
    everywhere,
    loss_of,
    mlp,
    offloaded,
    pair,
    token_batches,
    train_both,
    vector_batches,
)


class Odd(nn.Module):
    """Parameters that are transposed, gapped, scalar and empty, and a convolution in channels_last."""

    def __init__(self) -> None:
        super().__init__()
        self.transposed = nn.Parameter(torch.randn(48, WIDTH).t() / 8)
        self.gapped = nn.Parameter(torch.randn(48, 2 * WIDTH)[:, ::2] / 8)
        self.scalar = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, 3))
        conv: Any = nn.Conv2d(3, 8, 3)
        self.conv = conv.to(memory_format=torch.channels_last)
        self.ballast = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, image: torch.Tensor) -> torch.Tensor:
        y = self.ballast(x) @ self.transposed @ self.gapped * self.scalar
        return y.square().mean() + self.conv(image).mean() * self.scalar + self.empty.sum()


@everywhere
def test_parameters_of_every_stride_and_size_train_as_in_torch(placement: str, tmp_path: Path) -> None:
    """The reference steps element by element: torch's own fused AdamW is wrong where strides differ."""
    modules = pair(Odd, placement, tmp_path)
    for name in ("transposed", "scalar", "empty", "conv.weight"):
        left, right = (module.get_parameter(name) for module in modules)
        assert (left.shape, left.stride()) == (right.shape, right.stride())
    reference = [nn.Parameter(p.detach().clone(memory_format=torch.contiguous_format)) for p in modules[0].parameters()]
    left = torch.optim.AdamW(reference, lr=1e-2, fused=True)
    right = hetmem.AdamW(modules[1].parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(3)
    for _ in range(3):
        batch = torch.randn(4, WIDTH, generator=generator), torch.randn(2, 3, 8, 8, generator=generator)
        losses = both(modules, lambda module, batch=batch: module(*batch))
        assert_same(*losses, "loss")
        for loss in losses:
            loss.backward()
        assert_same_grads(*modules)
        for mine, parameter in zip(reference, modules[0].parameters(), strict=True):
            mine.grad = parameter.grad.clone(memory_format=torch.contiguous_format)
        left.step()
        right.step()
        with torch.no_grad():
            for mine, parameter in zip(reference, modules[0].parameters(), strict=True):
                parameter.copy_(mine)
        assert_same_weights(*modules)
        assert_same_states(left, right)
        for module in modules:
            module.zero_grad()


class Parts(nn.Module):
    """Weights that were parts of one tensor, as a fused query, key and value is taken apart: torch has them count
    their versions together."""

    def __init__(self) -> None:
        super().__init__()
        fused = torch.randn(3 * WIDTH, WIDTH) / 8
        self.parts = nn.ParameterList(nn.Parameter(fused[at : at + WIDTH]) for at in range(0, 3 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = torch.tanh(x @ part)
        return x


@pytest.mark.each
@offloaded
@pytest.mark.parametrize("overlap", ["off", "backward", "forward"])
def test_the_update_of_a_part_of_a_tensor_is_no_write_of_the_users_to_the_others(
    overlap: str, placement: str, tmp_path: Path
) -> None:
    modules = pair(Parts, placement, tmp_path)
    left, right = optimizers = adamws(*modules, overlap=overlap)
    for batch in vector_batches(5, 4, WIDTH):
        both(modules, lambda module, batch=batch: loss_of(module, batch).backward())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        right.synchronize()
        with torch.no_grad():
            for module in modules:
                module.parts[1].mul_(0.5)
    assert_same_weights(*modules)
    assert_same_states(left, right)


@pytest.mark.each
@everywhere
@pytest.mark.parametrize("mixed", [None, torch.bfloat16], ids=["fp32", "bf16"])
def test_frozen_parameters_may_be_unfrozen_and_frozen_again(
    placement: str, mixed: torch.dtype | None, tmp_path: Path
) -> None:
    def build() -> nn.Module:
        module = Tower(WIDTH, 2)
        module.blocks[0].requires_grad_(False)
        module.blocks[1].up.requires_grad_(False)
        return module

    modules = pair(build, placement, tmp_path, mixed_precision=mixed)
    optimizers = train_both(*modules, token_batches(2), Recipe(steps=2, mixed=mixed))
    for module in modules:
        module.blocks[0].requires_grad_(True)
        module.blocks[1].down.requires_grad_(False)
    train_both(*modules, token_batches(4), Recipe(steps=3, mixed=mixed), optimizers=optimizers)


@offloaded
def test_a_weight_that_has_a_hook_may_be_frozen(placement: str, tmp_path: Path) -> None:
    """As a critic is whose gradients are logged, while the generator trains through it."""
    modules = pair(mlp, placement, tmp_path)
    for module in modules:
        module[2].weight.register_hook(lambda grad: grad * 2)
    for trains in (False, True, False, True):
        for module in modules:
            module[2].weight.requires_grad_(trains)
            loss_of(module, BATCHES[0]).backward()
        assert_same_grads(*modules)


class PartlyUsed(nn.Module):
    """Uses `second` only when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.never = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.both = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.second(x) if self.both else x


@pytest.mark.each
@everywhere
@pytest.mark.parametrize("set_to_none", [True, False])
def test_unused_parameters_have_no_gradient_and_do_not_decay(placement: str, set_to_none: bool, tmp_path: Path) -> None:
    modules = pair(PartlyUsed, placement, tmp_path)
    never = modules[1].never.detach().clone()
    optimizers = None
    for use in (False, True, False):
        for module in modules:
            module.both = use
        recipe = Recipe(steps=2, set_to_none=set_to_none)
        optimizers = train_both(*modules, vector_batches(2, 4, WIDTH), recipe, optimizers=optimizers)
    assert modules[1].never.grad is None
    assert_same(never, modules[1].never, "never used")


class OneMemory(nn.Module):
    """Two parameters of one memory; or, if it is `kept` by somebody else only, one."""

    kept = torch.randn(WIDTH, WIDTH)

    def __init__(self, *, two: bool) -> None:
        super().__init__()
        self.first = nn.Parameter(self.kept)
        self.layer = nn.Linear(WIDTH, WIDTH)
        if two:
            self.second = nn.Parameter(self.layer.weight.data)


@pytest.mark.parametrize("placement", ["host", "nvme"])
def test_parameters_of_one_memory_are_refused_wherever_they_are_built(placement: str, tmp_path: Path) -> None:
    """On their way to NVMe, where each waits alone, they became two."""
    managed = hetmem.managed(budget(placement, tmp_path), device="sim")(OneMemory)
    with pytest.raises(ManageError, match=r"layer\.weight and second share memory"):
        managed(two=True)
    assert_same(OneMemory.kept, managed(two=False).first, "what somebody else has too")


class Wrapped(torch.Tensor):
    """Answers for `inner`, as quantized and distributed tensors do."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapped:
        made: Any = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return Wrapped(func(*(each.inner if isinstance(each, Wrapped) else each for each in args), **(kwargs or {})))


@pytest.mark.parametrize("weights", [1, 2])
def test_tensors_without_memory_of_their_own_are_refused_by_name(weights: int) -> None:
    """Two of them "share memory": both at address 0."""
    module = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    for layer in [*module][-weights:]:
        layer.weight = nn.Parameter(Wrapped(layer.weight.detach()))
    with pytest.raises(ManageError, match=rf"{2 - weights}\.weight is a Wrapped, which has no memory of its own"):
        hetmem.manage(module, hetmem.Budget(device="1MiB", host="8MiB"), device="sim")


def test_frozen_weights_of_integers_are_skipped_by_an_optimizer_over_all() -> None:
    """As torch's skip them."""

    class Quantized(nn.Linear):
        def __init__(self) -> None:
            super().__init__(64, 64)
            self.codes = nn.Parameter(torch.arange(4096, dtype=torch.int8).view(64, 64), requires_grad=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) @ self.codes.to(x.dtype)

    torch.manual_seed(0)
    plain, managed = Quantized(), Quantized()
    managed.load_state_dict(plain.state_dict())
    hetmem.manage(managed, hetmem.Budget(device="1MiB", device_chunks="64KiB", host="8MiB"), device="sim")
    optimizers = torch.optim.AdamW(plain.parameters(), fused=True), hetmem.AdamW(managed.parameters())
    for _ in range(2):
        for module, optimizer in zip((plain, managed), optimizers, strict=True):
            module(torch.ones(2, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    for name, value in plain.state_dict().items():
        assert torch.equal(value, managed.state_dict()[name]), name
