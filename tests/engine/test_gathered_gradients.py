"""Gradients of a chunk that wait on the device for each other, and cross the link together."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hetmem
from hetmem import testing
from tests.engine.harness import assert_same, assert_same_grads, assert_same_weights, manage, reference, shared

WIDE = 32
"""Three layers of this width are a chunk."""

overlaps = shared("overlap", ["off", "backward", "forward"])
rooms = shared("room", ["128KiB", "32KiB"])
"""For all copies, and for two of three."""


class Layers(nn.Module):
    """Layers of which `skip` leaves out one, `again` uses one twice, and `bare` has one multiply by its weight."""

    def __init__(self, count: int = 9) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDE, WIDE) for _ in range(count))
        self.skip = self.again = self.bare = -1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for at, layer in enumerate(self.layers):
            if at != self.skip:
                x = torch.tanh(layer(x))
            if at == self.again:
                x = layer(x)
            if at == self.bare:
                x = x @ layer.weight  # type: ignore[operator]
        return x.square().mean()


def with_all_copies(model: nn.Module, tmp_path: Path, **options: Any) -> nn.Module:
    device, chunks = options.pop("device_bytes", "64MiB"), options.pop("device_chunks", "128KiB")
    limits = hetmem.Budget(device=device, host="64MiB", device_chunks=chunks, home_copies=False)
    return manage(model, limits, tmp_path, sanitize=False, activations="keep", **options)


def sent_in_a_backward(managed: nn.Module, x: torch.Tensor) -> list[int]:
    """The bytes of each transfer from the device, once all is learned."""
    for _ in range(4):
        managed(x).backward()
        managed.zero_grad()
    loss = managed(x)
    testing.of(managed).wait_idle()
    before = len(testing.of(managed).transfers())
    loss.backward()
    return [nbytes for link, _, nbytes in testing.of(managed).transfers()[before:] if link == "device_to_host"]


@pytest.mark.parametrize("mixed", [None, torch.bfloat16], ids=["fp32", "bf16"])
def test_each_chunk_crosses_the_link_once_in_a_backward(mixed: torch.dtype | None, tmp_path: Path) -> None:
    managed = with_all_copies(Layers(), tmp_path, mixed_precision=mixed)
    sent = sent_in_a_backward(managed, torch.randn(2, WIDE))
    assert len(sent) == len(testing.of(managed).chunks()) > 1
    assert sum(sent) == sum(p.nbytes for p in managed.parameters())


@pytest.mark.parametrize("placed", [False, True], ids=["", "default device"])
def test_each_chunk_crosses_the_link_once_where_copies_are_evicted_too(placed: bool, tmp_path: Path) -> None:
    """A default device of torch is a mode, which sees no gradient."""
    with torch.device("cpu") if placed else nullcontext():
        managed = with_all_copies(Layers(12), tmp_path, device_chunks="40KiB")
        sent = sent_in_a_backward(managed, torch.randn(2, WIDE))
    assert hetmem.report(managed).to_dict()["evictions"] > 0
    assert len(sent) == len(testing.of(managed).chunks()) > 1
    assert sum(sent) == sum(p.nbytes for p in managed.parameters())


def test_a_chunk_that_lacked_a_gradient_before_is_sent_without_it(tmp_path: Path) -> None:
    """While the backward goes on: of three chunks two have all that is usual before the last one has any."""
    managed: Any = with_all_copies(Layers(), tmp_path)
    managed.skip, seen = 4, list[list[int]]()

    def look(*_: object) -> None:
        seen.append([nbytes for link, _, nbytes in testing.of(managed).transfers() if link == "device_to_host"])

    managed.layers[2].register_full_backward_pre_hook(look)
    sent_in_a_backward(managed, torch.randn(2, WIDE))
    layer = sum(p.nbytes for p in managed.layers[0].parameters())
    assert seen[-1][-2:] == [3 * layer, 2 * layer]


def test_a_chunk_larger_than_what_may_be_in_flight_crosses_in_parts(tmp_path: Path) -> None:
    """A sixteenth of the device may be: here four of the nine weights."""
    most = 4 * 4 * WIDE * WIDE + 1024
    managed = with_all_copies(Layers(), tmp_path, chunk_bytes=1 << 16, device_bytes=16 * most)
    assert len(testing.of(managed).chunks()) == 1
    sent = sent_in_a_backward(managed, torch.randn(2, WIDE))
    largest = max(p.nbytes for p in managed.parameters())
    assert len(sent) > 1 and max(sent) <= most + largest and sum(sent) == sum(p.nbytes for p in managed.parameters())


PROGRAMS = {
    "a weight without a gradient": {"skip": 4},
    "another one in each step": {"skip": 4, "turns": True},
    "a layer used twice": {"again": 4},
    "a weight used by a function too": {"bare": 4},
}


@overlaps
@rooms
@pytest.mark.parametrize("mixed", [None, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_chunks_that_get_other_gradients_have_the_bits_of_torch(
    program: str, mixed: torch.dtype | None, room: str, overlap: Any, tmp_path: Path
) -> None:
    if mixed is not None and "function" in program:
        pytest.skip("its two dtypes have no one matrix product in plain torch")
    plain, managed = _pair(tmp_path, mixed, room)
    options = dict(PROGRAMS[program])
    turns = options.pop("turns", False)
    left = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
    right = hetmem.AdamW(managed.parameters(), lr=1e-2, overlap=overlap)
    for step in range(7):
        x = torch.randn(2, WIDE)
        for model in (plain, managed):
            for name, at in options.items():
                setattr(model, name, (at + step) % 9 if turns else at)
        expected, loss = _backward(plain, x, mixed), managed(x)
        loss.backward()
        assert_same(expected, loss, f"loss of step {step}")
        if overlap == "off":
            assert_same_grads(plain, managed, f"step {step}")
        for optimizer in (left, right):
            optimizer.step()
            optimizer.zero_grad()
    assert_same_weights(plain, managed)


@rooms
def test_a_hook_within_the_backward_reads_and_halves_what_waits(room: str, tmp_path: Path) -> None:
    plain, managed = _pair(tmp_path, None, room)
    read: list[list[torch.Tensor | None]] = [[], []]
    for model, found in zip((plain, managed), read, strict=True):

        def halve(*_: object, model: nn.Module = model, found: list[torch.Tensor | None] = found) -> None:
            for parameter in model.parameters():
                found.append(None if parameter.grad is None else parameter.grad.clone())
                if parameter.grad is not None:
                    parameter.grad.mul_(0.5)

        model.layers[4].register_full_backward_hook(halve)  # type: ignore[index,union-attr]
    for step in range(6):
        x = torch.randn(2, WIDE)
        for model in (plain, managed):
            model(x).backward()
        assert_same_grads(plain, managed, f"step {step}")
        for one, other in zip(*read, strict=True):
            assert_same(one, other, f"what the hook of step {step} has read")
        for model in (plain, managed):
            model.zero_grad()


@rooms
def test_a_backward_that_raises_leaves_the_gradients_that_torch_leaves(room: str, tmp_path: Path) -> None:
    plain, managed = _pair(tmp_path, None, room)
    failing: list[bool] = [False]

    def fail(*_: object) -> None:
        if failing[0]:
            raise ArithmeticError("the loss of the program")

    for model in (plain, managed):
        model.layers[4].register_full_backward_hook(fail)  # type: ignore[index,union-attr]
    for step in range(7):
        failing[0], x = step == 5, torch.randn(2, WIDE)
        for model in (plain, managed):
            loss = model(x)
            if failing[0]:
                with pytest.raises(ArithmeticError):
                    loss.backward()
            else:
                loss.backward()
        assert_same_grads(plain, managed, f"step {step}")
        for model in (plain, managed):
            model.zero_grad()


def _pair(tmp_path: Path, mixed: torch.dtype | None, room: str = "128KiB") -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    plain = Layers()
    return plain, with_all_copies(copy.deepcopy(plain), tmp_path, mixed_precision=mixed, device_chunks=room)


def _backward(plain: nn.Module, x: torch.Tensor, mixed: torch.dtype | None) -> torch.Tensor:
    return reference(plain, mixed)(lambda model: model(x if mixed is None else x.to(mixed)))
