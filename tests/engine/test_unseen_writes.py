"""Writes that no version counts, and gradients that nobody cleared: the bits of plain torch, or an error."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

import hetmem
from hetmem import testing
from tests.engine.harness import (
    CHUNK,
    WIDTH,
    Mixed,
    adamws,
    assert_same,
    assert_same_weights,
    everywhere,
    loss_of,
    manage,
    mlp,
    pair,
    precisions,
    reference,
    vector_batches,
)

BF16 = torch.bfloat16
ROOMS = {"all copies": 5 * CHUNK, "a third of them": 2 * CHUNK}
"""On the device, of models of 5 chunks in host memory; the least with which they train is two."""


def placed(place: str, directory: Path, mixed: torch.dtype | None, *, home_copies: bool | None = None) -> Any:
    """A pair whose homes lie as `place` says: a name of `ROOMS`, or of the harness's placements."""
    options: dict[str, Any] = {"mixed_precision": mixed, "home_copies": home_copies}
    if place in ROOMS:
        room = ROOMS[place] // (1 if mixed is None else 2)
        options.pop("home_copies")
        limits = hetmem.Budget(device="64MiB", host="64MiB", device_chunks=room, home_copies=home_copies)
        return pair(five_layers, limits, directory, **options)
    return pair(five_layers, place, directory, **options)


def five_layers() -> nn.Module:
    """Each is a chunk."""
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(5)))


WAYS = ("clamp", "mask", "one_element", "by_numpy", "by_a_kept_tensor", "proximal", "by_a_state_dict")


class Writer:
    """What training programs do to weights behind a step, each in one of seven; three of them write single elements."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.parameters = list(module.parameters())
        self.masks = [torch.arange(p.numel()).remainder(101).ne(7).float().view_as(p) for p in self.parameters]
        self.kept: list[torch.Tensor] = []

    def __call__(self, step: int) -> None:
        getattr(self, WAYS[step % len(WAYS)])(step)

    def clamp(self, step: int) -> None:
        for p in self.parameters:
            p.data.clamp_(-0.12, 0.12)

    def mask(self, step: int) -> None:
        for p, mask in zip(self.parameters, self.masks, strict=True):
            p.data.mul_(mask)

    def one_element(self, step: int) -> None:
        self.parameters[step % 5].data[step % WIDTH, 17] = 0.5

    def by_numpy(self, step: int) -> None:
        self.parameters[-1].detach().numpy()[5, step % WIDTH] = -0.5
        self.kept = [p.data for p in self.parameters]

    def by_a_kept_tensor(self, step: int) -> None:
        """That of the step before."""
        for kept in self.kept:
            kept[step % WIDTH, 3] = 0.25
        self.kept = []

    def proximal(self, step: int) -> None:
        for p in self.parameters:
            p.data.copy_(p.data.sign() * (p.data.abs() - 1e-3).clamp(min=0))

    def by_a_state_dict(self, step: int) -> None:
        for value in self.module.state_dict().values():
            value.numpy()[7, step % WIDTH] = 0.375


@pytest.mark.each
@pytest.mark.parametrize("place", ["resident", *ROOMS, "nvme"])
@pytest.mark.parametrize("overlap", ["off", "backward", "forward"])
@pytest.mark.parametrize(
    ("mixed", "home_copies"),
    [(None, None), (BF16, False), (BF16, None)],
    ids=["fp32", "bf16", "bf16 with copies at home"],
)
def test_writes_that_count_no_version_after_a_step_reach_the_next_forward(
    mixed: torch.dtype | None, home_copies: bool | None, overlap: str, place: str, tmp_path: Path
) -> None:
    plain, managed = placed(place, tmp_path, mixed, home_copies=home_copies)
    optimizers = adamws(plain, managed, overlap=overlap)
    writers, backward = (Writer(plain), Writer(managed)), reference(plain, mixed)
    for step, batch in enumerate(vector_batches(14, 2, WIDTH, dtype=mixed)):
        expected = backward(lambda module, batch=batch: loss_of(module, batch))
        got = loss_of(managed, batch)
        assert_same(expected, got, f"loss {step}")
        got.backward()
        for optimizer, write in zip(optimizers, writers, strict=True):
            optimizer.step()
            write(step)
            optimizer.zero_grad()
    assert_same_weights(plain, managed)


@pytest.mark.parametrize("place", ["all copies", "nvme"])
@precisions
def test_an_average_that_is_swapped_in_for_an_evaluation_is_swapped_out_again(
    mixed: torch.dtype | None, place: str, tmp_path: Path
) -> None:
    """It differs in one element, between two forwards, and is swapped out through memory that is kept."""
    plain, managed = placed(place, tmp_path, mixed)
    memory = {module: module[1].weight.detach().numpy() for module in (plain, managed)}
    optimizers, backward = adamws(plain, managed), reference(plain, mixed)
    for batch in vector_batches(4, 2, WIDTH, dtype=mixed):
        expected = backward(lambda module, batch=batch: loss_of(module, batch))
        got = loss_of(managed, batch)
        assert_same(expected, got, "loss")
        got.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for value in (3.0, 0.125):
            for module in (plain, managed):
                (module[1].weight.data.numpy() if value == 3.0 else memory[module])[11, 13] = value
            with torch.no_grad():
                right = plain if mixed is None else Mixed(plain, mixed).twin
                if value == 3.0:
                    assert_same(right(*batch), managed(*batch), "evaluation")


@pytest.mark.parametrize("place", ["all copies", "nvme"])
def test_a_step_by_hand_of_a_few_rows_reaches_the_next_forward(place: str, tmp_path: Path) -> None:
    """As tutorials and C++ make it, without an optimizer. Few rows have a gradient."""
    plain, managed = placed(place, tmp_path, None)
    memory = {module: module[0].weight.detach().numpy() for module in (plain, managed)}
    (batch,) = vector_batches(1, 2, WIDTH)
    with torch.no_grad():
        batch[0][:, :63] = 0  # of the first weight one column has a gradient
    for step in range(4):
        for module in (plain, managed):
            loss_of(module, batch).backward()
            written = memory[module] if step % 2 else module[0].weight.data.numpy()
            written -= 0.1 * module[0].weight.grad.numpy()
            module.zero_grad()
        assert_same(loss_of(plain, batch), loss_of(managed, batch), "loss")


def test_a_frozen_teacher_that_follows_in_steps_below_16_bits_does_follow(tmp_path: Path) -> None:
    """`teacher.data.mul_(0.999).add_(...)`: few of its elements come to be rounded to others at one time."""
    plain, managed = placed("all copies", tmp_path, BF16)
    (batch,) = vector_batches(1, 2, WIDTH, dtype=BF16)
    for module in (plain, managed):
        module.requires_grad_(False)
    for _ in range(6):
        for module in (plain, managed):
            for p in module.parameters():
                p.data.mul_(0.9999)
        assert_same(Mixed(plain, BF16).twin(*batch), managed(*batch), "output")


@pytest.mark.parametrize("place", ["all copies", "nvme"])
@precisions
def test_single_elements_of_frozen_weights_that_are_written_reach_the_next_forward(
    mixed: torch.dtype | None, place: str, tmp_path: Path
) -> None:
    """Through functions of torch, and through kept memory of another one, of whose use torch tells nothing."""
    plain, managed = placed(place, tmp_path, mixed)
    (batch,) = vector_batches(1, 2, WIDTH, dtype=mixed)
    weights, kept = [], []
    for module in (plain, managed):
        weights.append(module.requires_grad_(False)[2].weight)
        kept.append(module[3].weight.detach().numpy())
    for act in (
        lambda weight, _: weight.data[3].__setitem__(5, 1.0),
        lambda weight, _: weight.numpy()[7].__setitem__(9, 1.0),
        lambda _, kept: kept[11].__setitem__(2, 1.0),
        lambda weight, _: torch._foreach_mul_([weight.data], 0.5),
    ):
        right = plain if mixed is None else Mixed(plain, mixed).twin
        assert_same(right(*batch), managed(*batch), "output")
        for weight, memory in zip(weights, kept, strict=True):
            act(weight, memory)
    assert_same((plain if mixed is None else Mixed(plain, mixed).twin)(*batch), managed(*batch), "output")


@pytest.mark.each
@pytest.mark.parametrize("place", ["all copies", "nvme"])
@pytest.mark.parametrize("optimizer", ["off", "forward", "torch"])
def test_after_a_step_of_others_they_do_so_too(optimizer: str, place: str, tmp_path: Path) -> None:
    plain, managed = placed(place, tmp_path, None)
    for module in (plain, managed):
        module[2].requires_grad_(False)
    if optimizer == "torch":
        optimizers = [torch.optim.AdamW(module.parameters(), fused=True) for module in (plain, managed)]
    else:
        optimizers = [*adamws(plain, managed, overlap=optimizer)]
    for batch in vector_batches(4, 2, WIDTH):
        losses = [loss_of(module, batch) for module in (plain, managed)]
        assert_same(*losses, "loss")
        for module, loss, stepper in zip((plain, managed), losses, optimizers, strict=True):
            loss.backward()
            stepper.step()
            stepper.zero_grad()
            module[2].weight.numpy()[7, 9] += 1.0


@pytest.mark.each
@everywhere
@precisions
@pytest.mark.parametrize(
    "options",
    [{"overlap": "backward"}, {"overlap": "forward"}],
    ids=["backward", "forward"],
)
def test_a_forgotten_zero_grad_adds_up_as_in_torch_or_is_an_error(
    options: dict[str, Any], mixed: torch.dtype | None, placement: str, tmp_path: Path
) -> None:
    plain, managed = pair(mlp, placement, tmp_path, mixed_precision=mixed)
    left, right = adamws(plain, managed, **options)
    backward = reference(plain, mixed)
    for step, batch in enumerate(vector_batches(5, 2, WIDTH, dtype=mixed)):
        expected = backward(lambda module, batch=batch: loss_of(module, batch))
        got = loss_of(managed, batch)
        assert_same(expected, got, f"loss {step}")
        consumed = testing.is_hidden(managed[0].weight.grad)
        assert consumed <= (step == 3)
        if consumed:
            with pytest.raises(RuntimeError, match=r"last step was not cleared: .* call zero_grad\(\)"):
                got.backward()
            return
        got.backward()
        left.step()
        right.step()
        if step != 2:
            left.zero_grad()
            right.zero_grad()
    assert_same_weights(plain, managed)


@pytest.mark.parametrize("clear", [lambda m: m.zero_grad(set_to_none=False), lambda m: None], ids=["zeroed", "left"])
def test_a_step_without_a_backward_is_no_step_with_gradients_that_are_used_up(
    clear: Callable[[nn.Module], Any], tmp_path: Path
) -> None:
    """torch would step with them, or with zeros."""
    managed = manage(mlp(), "host", tmp_path)
    optimizer = hetmem.AdamW(managed.parameters(), overlap="forward")
    for _ in range(2):
        optimizer.zero_grad()
        loss_of(managed, vector_batches(1, 2, WIDTH)[0]).backward()
        optimizer.step()
    clear(managed)
    with pytest.raises(RuntimeError, match=r"is that of the last step, which has used it up"):
        optimizer.step()
    optimizer.zero_grad()
    optimizer.step()


@pytest.mark.parametrize("gradients", [False, True], ids=["evaluation", "accumulation"])
@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
def test_writes_between_forwards_of_a_model_whose_copies_stay_on_the_device_with_their_homes(
    frozen: bool, gradients: bool, tmp_path: Path
) -> None:
    """A token of text needs the copies of the one before; each way to write to weights has them made anew."""
    plain, managed = placed("resident", tmp_path, BF16)
    assert testing.of(managed).memory().resident
    for module in (plain, managed):
        module.requires_grad_(not frozen)
    writers = Writer(plain), Writer(managed)
    ways: list[Callable[[Writer, int], object]] = [
        *(lambda writer, at, way=way: getattr(writer, way)(at) for way in WAYS),
        lambda writer, at: writer.parameters[1].detach().mul_(1.5),
        lambda writer, at: setattr(writer.parameters[2], "data", torch.full((WIDTH, WIDTH), 1e-2 * at)),
        lambda writer, at: torch._foreach_neg_([p.data for p in writer.parameters]),
        lambda writer, at: torch.nn.init.constant_(writer.parameters[3], 3e-3 * at),
    ]
    (batch,) = vector_batches(1, 2, WIDTH, dtype=BF16)
    with torch.set_grad_enabled(gradients):
        for at in range(3 * len(ways)):
            for writer in writers if at % 3 == 2 else ():
                ways[at // 3](writer, at)
            with torch.no_grad():
                expected = copy.deepcopy(plain).bfloat16()(batch[0])
            assert_same(expected, managed(batch[0]).detach(), f"forward {at}")


@pytest.mark.parametrize("place", ["resident", "all copies"])
def test_weights_that_are_written_behind_a_step_and_then_frozen_are_the_new_ones(place: str, tmp_path: Path) -> None:
    """They were trained, and not watched, as they were written."""
    plain, managed = placed(place, tmp_path, BF16)
    optimizer = hetmem.AdamW(managed.parameters(), lr=1e-2)
    for batch in vector_batches(4, 2, WIDTH, dtype=BF16):
        managed.requires_grad_(True)
        managed(batch[0]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        first = next(managed.parameters())
        first.data.mul_(1.5)
        first.requires_grad_(False)
        plain.load_state_dict(managed.state_dict())
        with torch.no_grad():
            assert_same(copy.deepcopy(plain).bfloat16()(batch[0]), managed(batch[0]), "the forward behind")


def by_a_function(module: nn.Module) -> list[torch.Tensor]:
    return [p.data for p in module.parameters()]


def past_functions(module: nn.Module) -> list[torch.Tensor]:
    """`other.data = p` calls none for `p`."""
    kept = [torch.empty(0) for _ in module.parameters()]
    for other, p in zip(kept, module.parameters(), strict=True):
        other.data = p
    return kept


def in_a_hook(module: nn.Module) -> list[torch.Tensor]:
    """Of a backward that is still to come."""
    kept: list[torch.Tensor] = []

    def keep(p: torch.Tensor) -> None:
        kept.insert(0, p.data)
        handles[id(p)].remove()

    handles = {id(p): cast(Any, p).register_post_accumulate_grad_hook(keep) for p in module.parameters()}
    return kept


@pytest.mark.parametrize("overlap", ["off", "forward"])
@pytest.mark.parametrize("place", ["all copies", "a third of them", "nvme"])
@precisions
@pytest.mark.parametrize("keep", [by_a_function, past_functions, in_a_hook])
def test_a_tensor_that_shares_memory_for_long_is_written_to_once_and_dropped(
    keep: Callable[[nn.Module], list[torch.Tensor]],
    mixed: torch.dtype | None,
    place: str,
    overlap: str,
    tmp_path: Path,
) -> None:
    """Of some weights before the step, of others behind it, trained and frozen ones."""
    plain, managed = placed(place, tmp_path, mixed)
    for module in (plain, managed) if keep is not in_a_hook else ():
        for layer in (2, 3):
            module[layer].weight.requires_grad_(False)
    optimizers, backward = adamws(plain, managed, overlap=overlap), reference(plain, mixed)
    kept: list[dict[int, torch.Tensor]] = []

    def write(step: int, *layers: int) -> None:
        for tensors in kept if step == 3 else ():
            for layer in layers:
                tensors.pop(layer).view(-1)[17] = 0.75

    for step, batch in enumerate(vector_batches(6, 2, WIDTH, dtype=mixed)):
        if step == 1:
            handed_out = [by_a_function(plain), keep(managed)]
        if step == 2:
            kept = [dict(enumerate(each)) for each in handed_out]
            for each in handed_out:
                each.clear()
        expected = backward(lambda module, batch=batch: loss_of(module, batch))
        got = loss_of(managed, batch)
        assert_same(expected, got, f"loss {step}")
        got.backward()
        write(step, 1, 2)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        write(step, 0, 3, 4)
    assert_same_weights(plain, managed)
