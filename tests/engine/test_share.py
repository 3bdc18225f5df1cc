"""The resident share: homes that move to idle device memory change no bits, save bytes of the links, and go back."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hetmem
from hetmem import testing
from tests.engine.harness import (
    CHUNK,
    Recipe,
    Tower,
    adamws,
    assert_same,
    assert_same_grads,
    assert_same_states,
    assert_same_weights,
    loss_of,
    pair,
    reference,
    shared,
    token_batches,
    train_both,
)
from tests.engine.lazy_device import AllocatingDevice

BF16 = torch.bfloat16
CHUNKS = 18
WHERE = shared("where", ["host", "nvme"])
MIXED = shared("mixed", [None, BF16], ids=["float32", "bfloat16"])


def build() -> nn.Module:
    return Tower(width=64, depth=4)


def room(where: str, mixed: torch.dtype | None, directory: Path, moving: int = 8) -> hetmem.Budget:
    """Chunks may have, on the device, a copy of each and the homes of `moving` of them."""
    copies = CHUNKS * CHUNK // (1 if mixed is None else 2)
    at_home = CHUNK // 2 if mixed is not None and where == "host" else 0  # of the 16-bit copies that lie there
    cap = copies + moving * (4 * CHUNK + at_home) + CHUNK
    if where == "host":
        return hetmem.Budget(device="64MiB", host="8MiB", device_chunks=cap)
    return hetmem.Budget(device="64MiB", host=16 * CHUNK, device_chunks=cap, nvme="64MiB", nvme_dir=directory)


def moving(where: str, mixed: torch.dtype | None, overlap: str) -> int:
    """Slots of the chunks that move: with overlap, gradients of 16 bits borrow less than their homes would take, which
    is enough for one more slot where chunks have no 16-bit copies at home."""
    return 9 if overlap != "off" and mixed is not None and where == "nvme" else 8


def chunks_of(module: nn.Module) -> list[testing.ChunkFacts]:
    return testing.of(module).chunks()


def moved(module: nn.Module) -> int:
    """Slots of the chunks that have moved."""
    return sum(chunk.slots for chunk in chunks_of(module) if chunk.moved)


def links(module: nn.Module) -> dict[str, int]:
    return {name: use["bytes"] for name, use in hetmem.report(module).to_dict()["links"].items()}


def one_more_step(pairs: tuple[nn.Module, nn.Module], optimizers: Any, recipe: Recipe) -> dict[str, int]:
    """The bytes that each link carries in one more step."""
    before = links(pairs[1])
    train_both(*pairs, token_batches(1), recipe, optimizers=optimizers)
    return {name: nbytes - before[name] for name, nbytes in links(pairs[1]).items()}


@pytest.mark.each
@WHERE
@MIXED
@pytest.mark.parametrize("overlap", ["off", "backward", "forward"])
def test_the_bits_are_those_of_plain_torch(overlap: str, where: str, mixed: torch.dtype | None, tmp_path: Path) -> None:
    plain, managed = pair(build, room(where, mixed, tmp_path), tmp_path, mixed_precision=mixed)
    optimizers = adamws(plain, managed, overlap=overlap)
    train_both(plain, managed, token_batches(4), Recipe(steps=4, mixed=mixed), optimizers=optimizers)
    assert moved(managed) == moving(where, mixed, overlap)
    for chunk in chunks_of(managed):
        tiers = set(chunk.homes.values())
        assert (tiers == {"device"}) == chunk.moved
        assert chunk.moved or "device" not in tiers


@pytest.mark.each
@WHERE
@MIXED
def test_accumulated_and_clipped_gradients_are_those_of_plain_torch(
    where: str, mixed: torch.dtype | None, tmp_path: Path
) -> None:
    plain, managed = pair(build, room(where, mixed, tmp_path), tmp_path, mixed_precision=mixed)
    recipe = Recipe(steps=3, accumulation=2, clip=0.01, mixed=mixed, set_to_none=False)
    train_both(plain, managed, token_batches(6), recipe)
    assert moved(managed) == 8


@MIXED
def test_a_moved_chunk_sends_no_gradient_over_the_link_and_its_update_brings_none_back(
    mixed: torch.dtype | None, tmp_path: Path
) -> None:
    """Half of the states fit: half of the bytes of gradients and renewed copies are saved, exactly."""
    seen = {}
    for moving in (0, 8):
        plain, managed = pair(build, room("host", mixed, tmp_path, moving), tmp_path, mixed_precision=mixed)
        recipe = Recipe(steps=1, mixed=mixed)
        optimizers = train_both(plain, managed, token_batches(3), Recipe(steps=3, mixed=mixed))
        assert moved(managed) == moving
        seen[moving] = one_more_step((plain, managed), optimizers, recipe)
    inside = [chunk for chunk in chunks_of(managed) if chunk.moved]
    parameters = dict(managed.named_parameters())
    gradients = sum(parameters[name].nbytes for chunk in inside for name in chunk.parameters)
    copies = sum(chunk.copy_bytes for chunk in inside)
    assert seen[0]["device_to_host"] - seen[8]["device_to_host"] == gradients > 0
    saved = seen[0]["host_to_device"] - seen[8]["host_to_device"]
    assert saved in (copies, sum(4 * chunk.elements for chunk in inside))  # a device may cast what it is sent
    assert saved > 0


def test_states_that_lie_on_nvme_are_not_read_or_written_once_they_have_moved(tmp_path: Path) -> None:
    plain, managed = pair(build, room("nvme", None, tmp_path, 0), tmp_path)
    optimizers = train_both(plain, managed, token_batches(3), Recipe(steps=3))
    before = one_more_step((plain, managed), optimizers, Recipe(steps=1))
    plain, managed = pair(build, room("nvme", None, tmp_path, 8), tmp_path)
    optimizers = train_both(plain, managed, token_batches(3), Recipe(steps=3))
    assert moved(managed) == 8
    after = one_more_step((plain, managed), optimizers, Recipe(steps=1))
    assert after["nvme_read"] < 0.7 * before["nvme_read"]
    assert after["nvme_write"] < 0.7 * before["nvme_write"]


@MIXED
def test_a_model_whose_states_all_fit_beside_what_a_step_needs_comes_to_live_on_the_device(
    mixed: torch.dtype | None, tmp_path: Path
) -> None:
    """Its states take more than half of the device, so that nobody could know before the first step."""
    plain, managed = pair(build, hetmem.Budget(device="2200KiB", host="8MiB"), tmp_path, mixed_precision=mixed)
    assert not testing.of(managed).memory().resident
    optimizers = train_both(plain, managed, token_batches(3), Recipe(steps=3, mixed=mixed))
    assert all(chunk.moved for chunk in chunks_of(managed))
    assert not any(one_more_step((plain, managed), optimizers, Recipe(steps=1, mixed=mixed)).values())


def test_the_report_counts_moved_homes_where_they_are(tmp_path: Path) -> None:
    _, managed = pair(build, room("host", None, tmp_path), tmp_path)
    optimizer = hetmem.AdamW(managed.parameters())
    for batch in token_batches(3):
        managed(*batch).backward()
        optimizer.step()
    tiers = hetmem.report(managed).to_dict()["tiers"]
    names = ("param", "grad", "exp_avg", "exp_avg_sq")
    assert tiers["device"]["homes"] == dict.fromkeys(names, 8 * CHUNK)
    assert tiers["host"]["homes"] == {**dict.fromkeys(names, (CHUNKS - 8) * CHUNK), "kept": 8 * 4 * CHUNK}
    assert tiers["device"]["used_bytes"] >= 8 * 4 * CHUNK
    assert tiers["device"]["peak_bytes"] <= tiers["device"]["capacity_bytes"]
    cap = testing.of(managed).memory().device_chunk_bytes
    assert tiers["device"]["chunk_peak_bytes"] <= cap


# ---- and back ----------------------------------------------------------------------------------------------------


@pytest.mark.each
@WHERE
@MIXED
@pytest.mark.parametrize("accumulation", [1, 2])
def test_homes_go_back_when_a_larger_batch_needs_their_memory(
    accumulation: int, where: str, mixed: torch.dtype | None, tmp_path: Path
) -> None:
    budget = room(where, mixed, tmp_path)
    limits = {"device": "2300KiB", "host": "8MiB"} if where == "host" else {"device": "2300KiB", "host": 16 * CHUNK}
    budget = hetmem.Budget(**limits, nvme=budget.nvme, nvme_dir=budget.nvme_dir)
    plain, managed = pair(build, budget, tmp_path, mixed_precision=mixed)
    recipe = Recipe(steps=2, accumulation=accumulation, mixed=mixed)
    optimizers = train_both(plain, managed, token_batches(3), recipe)
    before = moved(managed)
    assert before > 8
    train_both(plain, managed, token_batches(3, rows=24 if mixed is None else 48), recipe, optimizers=optimizers)
    assert moved(managed) < before
    train_both(plain, managed, token_batches(3), recipe, optimizers=optimizers)
    device = hetmem.report(managed).to_dict()["tiers"]["device"]
    assert device["peak_bytes"] <= device["capacity_bytes"]


@pytest.mark.each
@WHERE
@MIXED
@pytest.mark.parametrize("overlap", ["off", "backward"])
def test_homes_that_go_back_within_a_backward_are_no_write_of_the_user_s(
    overlap: str, where: str, mixed: torch.dtype | None, tmp_path: Path
) -> None:
    """A copy that was made of the home on the device was compared with what the home had been before it moved."""
    plain, managed = pair(build, room(where, mixed, tmp_path), tmp_path, mixed_precision=mixed)
    optimizers = adamws(plain, managed, overlap=overlap)
    train_both(plain, managed, token_batches(4), Recipe(steps=4, mixed=mixed), optimizers=optimizers)
    assert moved(managed) == moving(where, mixed, overlap)
    managed.blocks[0].norm.register_full_backward_hook(lambda *_: testing.of(managed).make_room())
    train_both(plain, managed, token_batches(2), Recipe(steps=2, mixed=mixed), optimizers=optimizers)


@WHERE
def test_gradients_zeroed_behind_a_forward_in_which_their_homes_went_back_are_zero(where: str, tmp_path: Path) -> None:
    """They were added to the values that had been read ahead from NVMe."""
    plain, managed = pair(build, room(where, None, tmp_path), tmp_path)
    optimizers, (*before, last) = adamws(plain, managed), token_batches(3)
    for module, optimizer in zip((plain, managed), optimizers, strict=True):
        for batch in before:
            loss_of(module, batch).backward()
        optimizer.step()
    assert moved(managed) == 8
    managed.blocks[0].register_forward_hook(lambda *_: testing.of(managed).make_room())
    for module in (plain, managed):
        loss = loss_of(module, last)
        module.zero_grad(set_to_none=False)
        loss.backward()
    assert moved(managed) == 0
    assert_same_grads(plain, managed, "zeroed")


def test_homes_go_back_behind_what_is_summed_up_of_their_gradients(tmp_path: Path) -> None:
    """The sum ended with a role of a home on NVMe that it had begun to read on the device, and stopped training."""
    plain, managed = pair(build, room("nvme", None, tmp_path), tmp_path)
    optimizers = adamws(plain, managed, overlap="backward", max_grad_norm=1e9)
    train_both(plain, managed, token_batches(4), Recipe(steps=4), optimizers=optimizers)
    assert moved(managed) == 8
    going_back = threading.Event()

    def squeeze(*_: Any) -> None:
        threading.Timer(0.1, going_back.set).start()
        testing.of(managed).make_room()

    managed.blocks[0].norm.register_full_backward_hook(squeeze)
    with testing.around("begin tasks", lambda begin, pool, tasks, after: begin(pool, [going_back.wait, *tasks], after)):
        for batch in token_batches(2):
            norms = []
            for module, optimizer in zip((plain, managed), optimizers, strict=True):
                loss_of(module, batch).backward()
                norms += (
                    []
                    if module is managed
                    else [torch.stack([p.grad.norm() for p in module.parameters() if p.grad is not None]).norm()]
                )
                optimizer.step()
                optimizer.zero_grad()
            assert float(optimizers[1].grad_norm) == pytest.approx(float(norms[0]), rel=1e-6)
            assert_same_weights(plain, managed)


def test_where_only_an_allocator_is_known_inputs_of_another_shape_leave_homes_where_they_are(tmp_path: Path) -> None:
    device = AllocatingDevice(24 * 1024)
    limits = hetmem.Budget(device="2300KiB", host="8MiB")
    plain, managed = pair(build, limits, tmp_path, device=device, sanitize=False)
    optimizers = train_both(plain, managed, token_batches(3), Recipe(steps=3))
    assert all(chunk.moved for chunk in chunks_of(managed))
    at_first: list[int] = []
    hook = managed.embedding.register_forward_hook(lambda *_: at_first.append(moved(managed)))
    train_both(plain, managed, token_batches(1), Recipe(steps=1), optimizers=optimizers)
    train_both(plain, managed, token_batches(1, rows=4), Recipe(steps=1), optimizers=optimizers)
    hook.remove()
    assert at_first == [CHUNKS, CHUNKS]
    assert all(chunk.moved for chunk in chunks_of(managed))
    assert testing.of(managed).memory().non_model_peak_bytes == 24 * 1024


# ---- what users see ----------------------------------------------------------------------------------------------


@MIXED
def test_tensors_that_users_hold_of_gradients_and_states_stay_the_real_ones(
    mixed: torch.dtype | None, tmp_path: Path
) -> None:
    plain, managed = pair(build, room("host", mixed, tmp_path), tmp_path, mixed_precision=mixed)
    optimizers = train_both(plain, managed, token_batches(3), Recipe(steps=3, mixed=mixed))
    assert moved(managed)
    held = {number: dict(state) for number, state in optimizers[1].state_dict()["state"].items()}
    testing.of(managed).make_room()
    assert not moved(managed)
    train_both(plain, managed, token_batches(2), Recipe(steps=2, mixed=mixed), optimizers=optimizers)
    assert moved(managed)
    for number, state in held.items():
        for name, value in optimizers[0].state_dict()["state"][number].items():
            if name != "step":
                assert_same(value, state[name], f"{name} of {number}")


def test_a_chunk_whose_weights_somebody_holds_does_not_move(tmp_path: Path) -> None:
    plain, managed = pair(build, room("host", None, tmp_path), tmp_path)
    before = managed.state_dict()
    optimizers = train_both(plain, managed, token_batches(3), Recipe(steps=3))
    assert not moved(managed)
    for name, value in plain.state_dict().items():
        assert_same(value, before[name], name)
    del before
    testing.of(managed).look_for_idle_memory()  # it looks again as soon as another number of bytes is idle
    train_both(plain, managed, token_batches(1), Recipe(steps=1), optimizers=optimizers)
    assert moved(managed) == 8
    held = managed.state_dict()
    testing.of(managed).make_room()
    assert moved(managed) == 8
    train_both(plain, managed, token_batches(1), Recipe(steps=1), optimizers=optimizers)
    for name, value in plain.state_dict().items():
        assert_same(value, held[name], name)


@WHERE
def test_writes_to_weights_gradients_and_states_on_the_device_count(where: str, tmp_path: Path) -> None:
    plain, managed = pair(build, room(where, None, tmp_path), tmp_path)
    optimizers = train_both(plain, managed, token_batches(3), Recipe(steps=3))
    assert moved(managed)

    def change(what: Callable[[nn.Module, torch.optim.Optimizer], None]) -> None:
        for module, optimizer in zip((plain, managed), optimizers, strict=True):
            with torch.no_grad():
                what(module, optimizer)
        train_both(plain, managed, token_batches(1), Recipe(steps=1), optimizers=optimizers)

    def weights(module: nn.Module, _: torch.optim.Optimizer) -> None:
        for parameter in module.parameters():
            parameter.mul_(0.5)

    def data(module: nn.Module, _: torch.optim.Optimizer) -> None:
        for parameter in module.parameters():
            parameter.data = parameter.data * 1.5

    def states(_: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for state in optimizer.state.values():
            state["exp_avg"].mul_(0.5)

    for what in (weights, data, states):
        change(what)


def test_checkpoints_interchange_with_torch(tmp_path: Path) -> None:
    plain, managed = pair(build, room("host", None, tmp_path), tmp_path)
    left, right = train_both(plain, managed, token_batches(3), Recipe(steps=3))
    assert moved(managed)
    right.load_state_dict(copy.deepcopy(left.state_dict()))
    train_both(plain, managed, token_batches(2), Recipe(steps=2), optimizers=(left, right))
    # and from the start: the states are there before the first step
    other_plain, other = pair(build, room("host", None, tmp_path), tmp_path)
    other.load_state_dict(copy.deepcopy(plain.state_dict()))
    other_plain.load_state_dict(plain.state_dict())
    optimizers = adamws(other_plain, other)
    for optimizer in optimizers:
        optimizer.load_state_dict(copy.deepcopy(left.state_dict()))
    train_both(other_plain, other, token_batches(3), Recipe(steps=3), optimizers=optimizers)
    assert moved(other) == 8


def test_release_gives_the_weights_and_gradients_of_moved_chunks_back(tmp_path: Path) -> None:
    plain, managed = pair(build, room("host", BF16, tmp_path), tmp_path, mixed_precision=BF16)
    optimizers = train_both(plain, managed, token_batches(3), Recipe(steps=3, mixed=BF16))
    assert moved(managed)
    assert_same_states(*optimizers)
    hetmem.release(managed)
    assert_same_weights(plain, managed)


@MIXED
def test_consumed_gradients_of_moved_chunks_stay_on_the_device(mixed: torch.dtype | None, tmp_path: Path) -> None:
    plain, managed = pair(build, room("host", mixed, tmp_path), tmp_path, mixed_precision=mixed)
    left, right = adamws(plain, managed, overlap="backward")
    backward = reference(plain, mixed)
    for batch in token_batches(5):
        backward(partial(loss_of, batch=batch))
        loss_of(managed, batch).backward()
        left.step()
        right.step()
        assert_same_weights(plain, managed)
        left.zero_grad()
        right.zero_grad()
    assert moved(managed) == 8
    testing.of(managed).make_room()
    assert not moved(managed)


@pytest.mark.parametrize("overlap", ["off", "backward"])
def test_clipping_and_a_loss_scale_within_the_optimizer_equal_torch(overlap: str, tmp_path: Path) -> None:
    plain, managed = pair(build, room("host", None, tmp_path), tmp_path)
    left, right = adamws(plain, managed, overlap=overlap, max_grad_norm=0.25, loss_scale=1024.0)
    other, streamed = pair(build, room("host", None, tmp_path, 0), tmp_path)
    del other, left
    third = hetmem.AdamW(streamed.parameters(), lr=1e-2, max_grad_norm=0.25, loss_scale=1024.0)
    for batch in token_batches(5):
        for module, optimizer in ((managed, right), (streamed, third)):
            optimizer.zero_grad()
            optimizer.scale(module(*batch)).backward()
            optimizer.step()
        assert right.grad_norm == third.grad_norm
        assert_same_weights(streamed, managed)
    assert moved(managed) == 8


def test_a_second_optimizer_finds_its_states_where_the_chunk_is(tmp_path: Path) -> None:
    """New roles of a chunk that has moved: it goes back, gets them, and moves again."""
    plain, managed = pair(build, room("host", None, tmp_path), tmp_path)
    train_both(plain, managed, token_batches(3), Recipe(steps=3))
    others = (
        torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9),
        hetmem.optim.offload(torch.optim.SGD, managed.parameters(), lr=0.1, momentum=0.9),
    )
    for _ in range(2):
        train_both(plain, managed, token_batches(2), Recipe(steps=2), optimizers=others)
    assert 0 < moved(managed) < 8
    for chunk in chunks_of(managed):
        assert len(set(chunk.homes.values())) == 1
        assert "momentum_buffer" in chunk.homes


def test_an_average_of_weights_that_takes_their_data_brings_no_copy_twice(tmp_path: Path) -> None:
    """Copies of weights that the program may write to behind a step are made anew for the forward, and come once."""
    _, managed = pair(build, room("host", None, tmp_path, 0), tmp_path, mixed_precision=None)
    optimizer = hetmem.AdamW(managed.parameters(), lr=1e-3)
    average = [parameter.detach().clone() for parameter in managed.parameters()]
    for batch in token_batches(4):
        before = links(managed)["host_to_device"]
        loss_of(managed, batch).backward()
        optimizer.step()
        for mean, parameter in zip(average, managed.parameters(), strict=True):
            mean.lerp_(parameter.data, 0.1)
        optimizer.zero_grad()
    assert links(managed)["host_to_device"] - before == sum(chunk.copy_bytes for chunk in chunks_of(managed))
