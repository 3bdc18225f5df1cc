"""Gradients that updates consume: the bits of visible ones, and the memory of a few chunks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hetmem
from hetmem import testing
from tests.engine.harness import (
    WIDTH,
    Tower,
    adamws,
    assert_same,
    assert_same_states,
    assert_same_weights,
    budget,
    everywhere,
    loss_of,
    manage,
    mlp,
    pair,
    precisions,
    reference,
    streamed,
    token_batches,
    vector_batches,
)
from tests.optim.stories import one
from tests.pairs import mostly

STREAMED = {"overlap": "backward"}


def train_apart(
    plain: nn.Module, managed: nn.Module, optimizers: Any, batches: list[Any], mixed: torch.dtype | None = None
) -> None:
    """As `train_both`, which looks at gradients; here they are gone after backward."""
    backward = reference(plain, mixed)
    for step, batch in enumerate(batches):
        expected = backward(partial(loss_of, batch=batch))
        got = loss_of(managed, batch)
        got.backward()
        assert_same(expected, got, f"step {step} loss")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert_same_weights(plain, managed, f"step {step}")
        assert_same_states(*optimizers, f"step {step}")


@pytest.mark.each
@everywhere
@precisions
@pytest.mark.parametrize("overlap", ["backward", "forward"])
def test_consumed_gradients_give_the_bits_of_visible_ones(
    overlap: str, mixed: torch.dtype | None, placement: str, tmp_path: Path
) -> None:
    room: Any = placement
    if placement == "nvme":
        room = budget("nvme", tmp_path, host="256KiB", device_chunks="256KiB")
    plain, managed = pair(Tower, room, tmp_path, mixed_precision=mixed)
    left, right = adamws(plain, managed, overlap=overlap)
    train_apart(plain, managed, (left, right), token_batches(5), mixed)


def test_consumed_gradients_take_the_memory_of_a_few_chunks(tmp_path: Path) -> None:
    plain = nn.Sequential(*[nn.Linear(64, 64) for _ in range(24)])
    managed = manage(copy.deepcopy(plain), "host", tmp_path)
    left, right = adamws(plain, managed, overlap="backward")
    free = testing.of(managed).memory().host_free_bytes
    train_apart(plain, managed, (left, right), vector_batches(4, 4, 64))
    assert testing.of(managed).memory().host_free_bytes == free
    chunks = len(testing.of(managed).chunks())
    visible = 16 * 4096 * chunks / sum(p.numel() for p in plain.parameters())
    streamed = hetmem.report(managed).to_dict()["bytes_per_parameter"]
    assert streamed == pytest.approx(visible * (12 + 4 * 6 / chunks) / 16)
    assert all((parameter.grad is None or testing.is_consumed(parameter.grad)) for parameter in managed.parameters())


def test_chunks_of_all_sizes_share_the_memory_for_streamed_gradients(tmp_path: Path) -> None:
    """Seven large chunks, more than memory is set aside for, and small ones between them."""
    plain = nn.Sequential(*[layer for _ in range(7) for layer in (nn.Linear(64, 256), nn.Linear(256, 64))])
    managed = manage(copy.deepcopy(plain), "host", tmp_path)
    left, right = adamws(plain, managed, overlap="backward")
    train_apart(plain, managed, (left, right), vector_batches(4, 4, 64))
    sizes = sorted(chunk.home_bytes["param"] for chunk in testing.of(managed).chunks())  # as a gradient's
    assert sizes[0] < sizes[-7]
    assert not testing.of(managed).homes("grad")
    assert testing.of(managed).memory().spare_bytes == sum(sizes[-6:])


class Halves(nn.Module):
    """Two halves that run in turns, in whatever order: a batch says which."""

    def __init__(self) -> None:
        super().__init__()
        self.halves = nn.ModuleList(nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)]) for _ in range(2))

    def forward(self, x: torch.Tensor, which: torch.Tensor) -> torch.Tensor:
        return torch.stack([self.halves[i](x) for i in which.tolist()]).sum(0)


@streamed
def test_consumed_gradients_of_chunks_that_never_complete_have_homes_too(placement: str, tmp_path: Path) -> None:
    room: Any = placement
    if placement == "nvme":
        room = budget("nvme", tmp_path, host="512KiB", device_chunks="256KiB")
    plain, managed = pair(Halves, room, tmp_path, chunk_bytes="64KiB")
    left, right = adamws(plain, managed, overlap="backward")
    inputs = [batch[0] for batch in vector_batches(6, 4, 64)]
    turns = [torch.tensor(which) for which in ([0], [1], [0, 1], [1], [0], [1, 0])]
    train_apart(plain, managed, (left, right), list(zip(inputs, turns, strict=True)))


@streamed
@pytest.mark.parametrize("overlap", ["backward", "forward"])
def test_a_learning_rate_that_changes_before_the_step_is_refused_where_updates_have_used_the_old_one(
    overlap: str, placement: str, tmp_path: Path
) -> None:
    plain, managed = pair(partial(nn.Linear, 64, 64), placement, tmp_path)
    left, right = adamws(plain, managed, overlap=overlap)
    batches = list(vector_batches(3, 4, 64))
    train_apart(plain, managed, (left, right), batches[:2])
    loss_of(managed, batches[2]).backward()
    right.param_groups[0]["lr"] = 0.5
    with pytest.raises(RuntimeError, match=r"hyper-parameters .* a learning rate behind step\(\)"):
        right.step()
    right.param_groups[0]["lr"] = 1e-2
    loss_of(plain, batches[2]).backward()
    left.step()
    right.step()
    right.synchronize()
    assert_same_weights(plain, managed)


USES: dict[str, Any] = {
    "clip": lambda module: nn.utils.clip_grad_norm_(module.parameters(), 1.0),
    "measure": lambda module: nn.utils.clip_grad_norm_(module.parameters(), float("inf")),
    "clip values": lambda module: nn.utils.clip_grad_value_(module.parameters(), 1.0),
    "log": lambda module: [p.grad.norm() for p in module.parameters() if p.grad is not None],
    "add": lambda module: [p.grad.add_(1.0) for p in module.parameters() if p.grad is not None],
    "step": lambda module: torch.optim.SGD(module.parameters(), lr=0.1).step(),
    "address": lambda module: [p.grad.data_ptr() for p in module.parameters()],  # a kernel would read what is there
    "share": lambda module: [p.grad.__dlpack__() for p in module.parameters()],
}


def used_up_by_backward(directory: Path, overlap: str) -> tuple[nn.Module, nn.Module, Any, Any]:
    """A pair in the middle of its third step: every gradient of the managed one has been used up."""
    plain, managed = pair(mlp, "host", directory)
    left, right = adamws(plain, managed, overlap=overlap)
    *before, batch = vector_batches(3, 4, 64)
    train_apart(plain, managed, (left, right), before)
    for module in (plain, managed):
        loss_of(module, batch).backward()
    right.synchronize()
    assert all(testing.is_consumed(parameter.grad) for parameter in managed.parameters())
    return plain, managed, left, right


@pytest.mark.parametrize(("use", "overlap"), mostly(USES, ["backward", "forward"]))
def test_a_use_of_gradients_that_are_used_up_is_an_error(use: str, overlap: str, tmp_path: Path) -> None:
    """A clip of all gradients found none, clipped nothing and returned 0, and nobody saw it."""
    plain, managed, left, right = used_up_by_backward(tmp_path, overlap)
    with pytest.raises(RuntimeError, match=r"met the gradient of \w+\.(weight|bias), which its update has used up \("):
        USES[use](managed)
    for optimizer in (left, right):
        optimizer.step()
    assert all(testing.is_consumed(parameter.grad) for parameter in managed.parameters())
    right.synchronize()
    assert_same_weights(plain, managed)


@pytest.mark.each
@pytest.mark.parametrize("overlap", ["backward", "forward"])
@pytest.mark.parametrize("way", ["release", "forget", "squeeze"])
def test_gradients_that_are_used_up_hinder_nothing_else(way: str, overlap: str, tmp_path: Path) -> None:
    plain, managed, left, right = used_up_by_backward(tmp_path, overlap)
    left.step()
    match way:
        case "release":
            hetmem.release(managed)
        case "forget":
            right.forget_step()
        case "squeeze":
            testing.of(managed).make_room()
    if way == "squeeze":  # before it weights are neither read nor written
        right.step()
    assert_same_weights(plain, managed)
    if way != "release":
        for optimizer in (left, right):
            optimizer.zero_grad()
        train_apart(plain, managed, (left, right), vector_batches(2, 4, 64))


DROPS: dict[str, Callable[[Any, Any], object]] = {
    "none": lambda _, optimizer: optimizer.zero_grad(),
    "one": lambda module, _: setattr(module[2].bias, "grad", None),
    "zero": lambda _, optimizer: optimizer.zero_grad(set_to_none=False),
    "zero of the module": lambda module, _: module.zero_grad(set_to_none=False),
}


@pytest.mark.each
@pytest.mark.parametrize("overlap", ["backward", "forward"])
@pytest.mark.parametrize("consumed", ["in the backward", "after it", "before what is dropped", "in the step"])
@pytest.mark.parametrize("way", DROPS)
def test_gradients_that_are_dropped_or_zeroed_when_they_are_used_up_are_no_step(
    way: str, consumed: str, overlap: str, tmp_path: Path
) -> None:
    """torch would make none, or one with zeros."""
    if consumed == "in the backward":
        _, managed, _, right = used_up_by_backward(tmp_path, overlap)
    else:
        plain, managed = pair(mlp, "host", tmp_path)
        left, right = adamws(plain, managed, overlap=overlap)
        *before, batch = vector_batches(3, 4, 64)
        train_apart(plain, managed, (left, right), before)
        right.synchronize()
        with testing.updates_held():
            loss_of(managed, batch).backward()
            assert not any(testing.is_consumed(parameter.grad) for parameter in managed.parameters())
    if consumed == "before what is dropped":
        right.synchronize()
        assert all(testing.is_consumed(parameter.grad) for parameter in managed.parameters())
    DROPS[way](managed, right)
    if consumed == "after it":
        right.synchronize()
    with pytest.raises(RuntimeError, match="changed after their update had begun"):
        right.step()
    right.forget_step()
    right.zero_grad()
    loss_of(managed, vector_batches(1, 4, 64)[0]).backward()
    right.step()
    assert all(testing.is_consumed(parameter.grad) for parameter in managed.parameters())


def norms_between() -> nn.Sequential:
    """Small parameters, which share one chunk, between large ones of a chunk each."""
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(2 * WIDTH, 2 * WIDTH), nn.LayerNorm(128))))


@pytest.mark.parametrize("split", ["large first", "small first", "two optimizers"])
def test_parameter_groups_in_any_order_keep_no_more_gradients_than_one(split: str, tmp_path: Path) -> None:
    """Memory was set aside for chunks of the first group only: the others had homes for good."""
    host, options = {}, {"overlap": "backward"}
    for groups in ("one", split):
        model = manage(norms_between(), budget("host", tmp_path, host="16MiB"), tmp_path)
        large, small = ([p for p in model.parameters() if (p.dim() > 1) is is_large] for is_large in (True, False))
        kept: Any = {
            "one": [list(model.parameters())],
            "large first": [[{"params": large}, {"params": small, "weight_decay": 0.0}]],
            "small first": [[{"params": small, "weight_decay": 0.0}, {"params": large}]],
            "two optimizers": [small, large],
        }[groups]
        optimizers = [hetmem.AdamW(each, lr=1e-3, **options) for each in kept]
        inside = testing.of(model)
        assert not inside.homes("grad")
        host[groups] = inside.memory().spare_bytes
        for batch in vector_batches(3, 4, 2 * WIDTH):
            one(model, batch, *optimizers)
            assert not inside.homes("grad"), "kept behind the step"
        assert inside.memory().spare_bytes == host[groups]
    if split != "two optimizers":
        assert host[split] == host["one"]


@streamed
def test_sparse_gradients_are_refused_by_name(placement: str, tmp_path: Path) -> None:
    module = nn.Sequential(nn.Embedding(100, 64, sparse=True), nn.Linear(64, 64), nn.Linear(64, 64))
    managed = manage(module, placement, tmp_path)
    optimizer = hetmem.AdamW(managed.parameters(), overlap="backward")

    def step() -> None:
        managed(torch.arange(4)).sum().backward()
        optimizer.step()

    with pytest.raises(RuntimeError, match="AdamW does not support sparse gradients"):
        step()


@pytest.mark.each
@streamed
@precisions
@pytest.mark.parametrize("used", ["both forwards", "one of two"])
@pytest.mark.parametrize("options", [STREAMED, {**STREAMED, "overlap": "forward"}], ids=str)
def test_a_backward_of_two_forwards_is_updated_when_all_of_it_has_arrived(
    options: dict[str, str], used: str, mixed: torch.dtype | None, placement: str, tmp_path: Path
) -> None:
    """A gradient arrives for each of them; a forward that no backward is of is not waited for."""
    both = [manage(mlp(), placement, tmp_path, mixed_precision=mixed) for _ in range(2)]
    both[1].load_state_dict(both[0].state_dict())
    optimizers = [hetmem.AdamW(both[0].parameters(), lr=1e-2), hetmem.AdamW(both[1].parameters(), lr=1e-2, **options)]
    for step, (x,) in enumerate(vector_batches(4, 4, 64, dtype=mixed)):
        for model, optimizer in zip(both, optimizers, strict=True):
            outputs = [model(x), model(-x)]
            loss = sum(output.float().square().mean() for output in outputs[: 1 if used == "one of two" else 2])
            loss.backward()
            if step and model is both[1]:
                begun, names = testing.updates_begun(model), [name for name, _ in model.named_parameters()]
                assert sorted(begun) == sorted(names), "not all begun in the backward"
            optimizer.step()
            optimizer.zero_grad()
        assert_same_weights(*both)


class Again(nn.Module):
    """One block in several checkpoints, each of which has a backward of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.before = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before(x)
        for _ in range(2):
            x = checkpoint(self.block, x, use_reentrant=True)
        return x


@streamed
@precisions
def test_a_block_of_several_checkpoints_is_updated_after_the_last(
    mixed: torch.dtype | None, placement: str, tmp_path: Path
) -> None:
    both = [pair(Again, placement, tmp_path, mixed_precision=mixed)[1] for _ in range(2)]
    optimizers = [
        hetmem.AdamW(module.parameters(), **options) for module, options in zip(both, ({}, STREAMED), strict=True)
    ]
    for batch in vector_batches(4, 4, WIDTH, dtype=mixed):
        for module, optimizer in zip(both, optimizers, strict=True):
            one(module, batch, optimizer)
        assert_same_weights(*both)


@pytest.mark.parametrize("placement", ["host", "nvme"])
def test_a_part_of_a_chunk_that_was_frozen_is_trained(placement: str, tmp_path: Path) -> None:
    """Its neighbour is frozen still: nobody hooks into gradients that it does not have."""

    def build() -> nn.Sequential:
        model = mlp()
        for layer in (0, 2):
            model[layer].bias.requires_grad_(False)
        return model

    both = pair(build, placement, tmp_path)
    for module in both:
        module[0].bias.requires_grad_(True)
    train_apart(*both, adamws(*both, **STREAMED), vector_batches(3, 4, WIDTH))
    assert_same_weights(*both)
