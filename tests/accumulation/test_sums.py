"""Gradients of several micro-batches are added up on the device, and cross the link once: with the bits of the loop."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hetmem
from hetmem import testing
from tests.accumulation.test_accumulate import Stack, batches, both_ways, bytes_of
from tests.engine.harness import assert_same, assert_same_weights, manage, shared

BF16 = torch.bfloat16
WIDTH = 64

overlaps = shared("overlap", ["off", "backward", "forward"])
precisions = pytest.mark.parametrize("mixed", [None, BF16], ids=["fp32", "bf16"])


class Tower(nn.Module):
    """Layers between an embedding and a head, which are one weight."""

    def __init__(self, depth: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth))
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return F.cross_entropy(self.head(x).float().flatten(0, 1), tokens.flatten())


def placed(model: nn.Module, tmp_path: Path, device: str = "4MiB", chunks: str = "80KiB", **options: Any) -> nn.Module:
    """In host memory, with room for some of the copies, and nothing but the first steps measured."""
    limits = hetmem.Budget(device=device, host="64MiB", device_chunks=chunks, home_copies=False)
    return manage(model, limits, tmp_path, sanitize=False, activations="keep", **options)


def out_in_a_step(managed: nn.Module, step: Callable[[], object]) -> int:
    """Bytes from the device, once all is learned."""
    for _ in range(3):
        step()
        managed.zero_grad()
    before = bytes_of(managed)["device_to_host"]
    step()
    return bytes_of(managed)["device_to_host"] - before


@precisions
@pytest.mark.parametrize("chunks", ["80KiB", "256KiB"], ids=["some of the copies", "all copies"])
def test_gradients_cross_the_link_once_for_eight_micro_batches(
    mixed: torch.dtype | None, chunks: str, tmp_path: Path
) -> None:
    """With 16-bit compute as a sum in float32, of twice the bytes of one gradient."""
    several = batches(8)
    once = placed(Tower(), tmp_path, chunks=chunks, mixed_precision=mixed)
    one = out_in_a_step(once, lambda: once(several[0]).backward())
    managed = placed(Tower(), tmp_path, chunks=chunks, mixed_precision=mixed)
    eight = out_in_a_step(managed, lambda: hetmem.accumulate(managed, several))
    assert one == eight == sum(p.nbytes for p in managed.parameters()), "bytes at home"
    by_loop = out_in_a_step(once, lambda: [once(batch).backward() for batch in several])
    assert by_loop == 8 * one


@overlaps
@precisions
@pytest.mark.parametrize("kind", ["", "again", "experts", "drops", "recomputed", "adapters"])
def test_training_with_sums_has_the_bits_of_the_loop(
    kind: str, mixed: torch.dtype | None, overlap: Any, tmp_path: Path
) -> None:
    plain = Stack(kind)
    managed = placed(copy.deepcopy(plain), tmp_path, mixed_precision=mixed)
    left = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
    right = hetmem.AdamW(managed.parameters(), lr=1e-2, overlap=overlap)
    for step in range(5):
        several = batches(3, seed=step % 2)
        both_ways(plain, managed, several, mixed, f"step {step}", consumed=overlap != "off")
        for optimizer in (left, right):
            optimizer.step()
            optimizer.zero_grad()
    assert_same_weights(plain, managed)


@pytest.mark.parametrize("device", ["224KiB", "300KiB"])
@precisions
def test_sums_that_have_no_room_are_made_at_home(device: str, mixed: torch.dtype | None, tmp_path: Path) -> None:
    """All of them, or some."""
    torch.manual_seed(0)
    plain = Tower()
    managed = placed(copy.deepcopy(plain), tmp_path, device, chunks="64KiB", mixed_precision=mixed)
    for step in range(5):
        both_ways(plain, managed, batches(4, seed=step), mixed, f"step {step}")
        for model in (plain, managed):
            model.zero_grad()


def test_a_sum_without_room_to_become_float32_is_sent_before_the_next_gradient(tmp_path: Path) -> None:
    """The first gradients of the layers between two borders have room, and their sums do not."""
    torch.manual_seed(0)
    plain = Tower()
    managed: Any = placed(copy.deepcopy(plain), tmp_path, "160KiB", chunks="64KiB", mixed_precision=BF16)
    for step in range(5):
        borders = [managed.layers[0], managed.layers[4]]
        both_ways(plain, managed, batches(4, seed=step), BF16, f"step {step}", borders=borders)
        for model in (plain, managed):
            model.zero_grad()


@precisions
def test_what_is_there_already_and_what_a_hook_sees_is_as_in_the_loop(
    mixed: torch.dtype | None, tmp_path: Path
) -> None:
    """Two calls in a step; a hook of a parameter, which makes another gradient; one of a module that reads them."""
    torch.manual_seed(0)
    plain = Tower()
    managed = placed(copy.deepcopy(plain), tmp_path, mixed_precision=mixed)
    if mixed is None:
        read: list[list[torch.Tensor | None]] = [[], []]
        for model, found in zip((plain, managed), read, strict=True):
            model.layers[2].weight.register_hook(lambda gradient: 2 * gradient)  # type: ignore[index,union-attr]

            def see(*_: object, model: nn.Module = model, found: list[torch.Tensor | None] = found) -> None:
                found.append(model.layers[5].bias.grad)  # type: ignore[index,union-attr,arg-type]

            model.layers[4].register_full_backward_hook(see)  # type: ignore[index,union-attr]
    for step in range(5):
        for call in range(2):
            both_ways(plain, managed, batches(3, seed=2 * step + call), mixed, f"call {call} of step {step}")
        for model in (plain, managed):
            model.zero_grad()


@precisions
def test_updates_within_the_backward_take_sums_from_lent_memory(mixed: torch.dtype | None, tmp_path: Path) -> None:
    """So no home for gradients is left: 12 bytes a parameter. And they begin in it, though each sum is of eight."""
    managed = placed(Tower(), tmp_path, mixed_precision=mixed)
    optimizer = hetmem.AdamW(managed.parameters(), overlap="backward")
    for step in range(5):
        hetmem.accumulate(managed, batches(8, seed=step))
        begun = testing.updates_begun(managed)
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            kept = testing.of(managed).memory().host_reserved_bytes
    assert len(begun) == len([*managed.parameters()])
    if mixed is not None:
        assert testing.of(managed).memory().host_reserved_bytes == kept
    assert all("grad" not in chunk.homes for chunk in testing.of(managed).chunks()[2:])


@overlaps
def test_an_error_in_a_backward_leaves_the_next_call_right(overlap: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = Tower()
    managed = placed(copy.deepcopy(plain), tmp_path)
    optimizers = [
        torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True),
        hetmem.AdamW(managed.parameters(), lr=1e-2, overlap=overlap),
    ]
    failing = [False]

    def fail(*_: object) -> None:
        if failing[0]:
            raise ArithmeticError("the program's")

    managed.layers[7].register_full_backward_hook(fail)  # type: ignore[index,union-attr]
    for step in range(6):
        if step == 3:
            failing[0] = True
            with pytest.raises(ArithmeticError):
                hetmem.accumulate(managed, batches(3))
            failing[0] = False
            managed.zero_grad()
        both_ways(plain, managed, batches(3, seed=step), None, f"step {step}", consumed=overlap != "off")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_weights(plain, managed)


def test_a_gradient_that_a_hook_drops_between_two_micro_batches_is_dropped(tmp_path: Path) -> None:
    plain = Tower()
    managed = placed(copy.deepcopy(plain), tmp_path)
    for model in (plain, managed):

        def drop(*_: object, model: nn.Module = model, calls: Any = count()) -> None:  # noqa: B008 - one for each model
            if next(calls) % 3 == 0:
                model.layers[6].weight.grad = None  # type: ignore[index,union-attr]

        model.layers[5].register_full_backward_hook(drop)  # type: ignore[index,union-attr]
    for step in range(4):
        several = batches(3, seed=step)
        for model in (managed, plain):
            hetmem.accumulate(model, several, borders=[model.layers[0], model.layers[4]])  # type: ignore[index,list-item]
        for one, other in zip(plain.parameters(), managed.parameters(), strict=True):
            assert_same(one.grad, other.grad, f"step {step}")
        for model in (plain, managed):
            model.zero_grad()
