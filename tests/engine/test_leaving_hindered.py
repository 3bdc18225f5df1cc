"""A model leaves the device in the middle of a function, or is hindered: no memory, failing copies, held views."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import hetmem
from hetmem import testing
from hetmem.errors import DeviceOutOfMemoryError
from tests.engine.harness import (
    Recipe,
    assert_same,
    assert_same_grads,
    assert_same_weights,
    loss_of,
    pair,
    reference,
    token_batches,
    train_both,
    vector_batches,
)
from tests.engine.leaving import MIXED, build, is_resident, optimizers_of, room, tiers

# ---- homes that find no memory -----------------------------------------------------------------------------------


class Full(hetmem.SimDevice):
    """Has no memory for the last of so many homes."""

    left = 1 << 30

    def allocate(self, nbytes: int) -> Any:
        self.left -= 1
        if self.left < 0:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().allocate(nbytes)


def test_a_home_that_finds_no_memory_on_the_device_says_who_has_it_and_reserves_nothing(tmp_path: Path) -> None:
    device = Full()
    _, managed = pair(build, room(None), tmp_path, device=device)
    inside = testing.of(managed)
    before = inside.memory().device_home_bytes
    device.left = len(inside.chunks()) + 3  # the first moments, and three of the second
    with pytest.raises(DeviceOutOfMemoryError) as caught:
        hetmem.AdamW(managed.parameters())
    message = str(caught.value)
    assert "no memory for exp_avg_sq of chunk" in message
    for part in ("homes on the device parameters", "first moments", "copies of parameters take 0 B", "Budget(device="):
        assert part in message
    assert inside.memory().device_home_bytes == 2 * before
    device.left = 1 << 30
    train_both(build_like(managed), managed, token_batches(2), Recipe(steps=2))


def build_like(managed: nn.Module) -> nn.Module:
    plain = build()
    plain.load_state_dict(managed.state_dict())
    return plain


class Again(nn.Module):
    """A function, no module, is computed again in its backward; others see what is saved meanwhile."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.norm, self.layer, self.reentrant = nn.LayerNorm(64), nn.Linear(64, 64), reentrant
        self.hook: Any = None

    def function(self, x: torch.Tensor) -> torch.Tensor:
        x = F.layer_norm(torch.sin(x), (64,), self.norm.weight, self.norm.bias)
        if self.hook is not None and x.requires_grad:
            x.register_hook(self.hook)
        return F.linear(x, self.layer.weight) * self.layer.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + checkpoint(self.function, x, use_reentrant=self.reentrant)  # type: ignore[no-any-return]


@pytest.mark.each
@MIXED
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("within", ["forward", "backward", "backward of the function"])
def test_it_leaves_between_a_function_and_its_being_computed_again(
    within: str, reentrant: bool, mixed: torch.dtype | None, tmp_path: Path
) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(64, 64), *(Again(reentrant) for _ in range(3)), nn.Linear(64, 64))

    options = {"mixed_precision": mixed, "sanitize": True}
    plain, managed = pair(build, hetmem.Budget(device="16MiB", host="8MiB"), tmp_path, **options)
    assert is_resident(managed)

    def leave(*_: Any) -> None:
        testing.of(managed).make_room()

    if within == "forward":
        managed[3].register_forward_hook(leave)
    elif within == "backward":
        managed[4].register_full_backward_hook(leave)
    else:  # which is a backward within the other one, if reentrant
        managed[2].hook = leave
    batches = vector_batches(3, 4, 64, dtype=mixed)
    train_both(plain, managed, batches, Recipe(mixed=mixed), optimizers=optimizers_of(plain, managed))
    assert not is_resident(managed)


class Recurrent(nn.Module):
    """One function of torch's is many operators, which all use its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(16, 16, bidirectional=True, batch_first=True)
        self.rest = nn.Sequential(*[nn.Linear(32, 32) for _ in range(12)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.rest(self.layer(x)[0].mean(1))
        return y


def test_it_leaves_within_a_function_of_many_operators(tmp_path: Path) -> None:
    """Wherever that is: each budget has room for a little more of it, the last ones for all of it."""
    compared = 0
    for device in range(640 << 10, 2500 << 10, 196 << 10):
        torch.manual_seed(0)
        plain = Recurrent()
        managed = hetmem.manage(
            copy.deepcopy(plain), hetmem.Budget(device=device, host="8MiB"), chunk_bytes=16 << 10, sanitize=True
        )
        assert is_resident(managed)
        try:
            for x in (torch.randn(1, 4, 16), torch.randn(96, 16, 16)):
                losses = [loss_of(module, (x,)) for module in (plain, managed)]
                assert testing.of(managed).checks(), "checks are left out of one function only"
                for loss in losses:
                    loss.backward()
                assert_same_grads(plain, managed, f"{device} bytes")
            compared += not is_resident(managed)
        except DeviceOutOfMemoryError:
            pass
        hetmem.release(managed)
    assert compared


@pytest.mark.each
@MIXED
@pytest.mark.parametrize("at", [0, 3, 7, 12, 20])
def test_a_copy_that_fails_leaves_all_of_a_chunk_where_it_was(
    at: int, mixed: torch.dtype | None, tmp_path: Path
) -> None:
    """Weights, states and the gradients of the step so far, which were autograd's own; then it leaves all the same."""
    plain, managed = pair(build, room(mixed), tmp_path, mixed_precision=mixed)
    optimizers = optimizers_of(plain, managed)
    train_both(plain, managed, token_batches(1), Recipe(steps=1, mixed=mixed), optimizers=optimizers)
    backward = reference(plain, mixed)
    small, large = token_batches(1, seed=5)[0], token_batches(1, rows=40 if mixed is None else 80)[0]
    backward(lambda module: loss_of(module, small))
    loss_of(managed, small).backward()
    struck = testing.failing("copy now", lambda: OSError("the link has failed"), at)
    with struck, pytest.raises(OSError, match="the link has failed"):
        managed(*large)
    for chunk in testing.of(managed).chunks():
        assert len(set(chunk.homes.values())) == 1
    assert_same_weights(plain, managed)
    assert_same_grads(plain, managed)
    expected = backward(lambda module: loss_of(module, large))
    got = loss_of(managed, large)
    got.backward()
    assert_same(expected, got, "loss")
    for optimizer in optimizers:
        optimizer.step()
    assert_same_weights(plain, managed)


def test_gradients_that_are_parts_of_a_buffer_of_the_user_s_stay_so(tmp_path: Path) -> None:
    """What is written to the buffer reaches them. So their chunks stay where they are, and others leave."""
    plain, managed = modules = pair(build, room(None), tmp_path)
    optimizers = optimizers_of(plain, managed)
    buffers: list[torch.Tensor] = []
    for module in modules:
        parts = [p for block in module.blocks[2:] for p in block.parameters()]
        buffers.append(torch.zeros(sum(p.numel() for p in parts)))
        for parameter, part in zip(parts, buffers[-1].split([p.numel() for p in parts]), strict=True):
            parameter.grad = part.view_as(parameter)
    for batch in [*token_batches(1), *token_batches(3, rows=24)]:
        losses = [loss_of(module, batch) for module in modules]
        assert_same(*losses, "loss")
        for loss, optimizer, buffer in zip(losses, optimizers, buffers, strict=True):
            loss.backward()
            buffer.mul_(0.5)
            optimizer.step()
            buffer.zero_()
        assert_same_weights(plain, managed)
    assert not is_resident(managed)
    assert tiers(managed) == {"host", "device"}
