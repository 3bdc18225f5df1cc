"""Gradients that stay on the device have few places there: who waits for one, what goes home, what failures leave."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hetmem
from hetmem import testing
from tests.engine.harness import CHUNK, adamws, assert_same_states, assert_same_weights, loss_of, pair
from tests.optim.keeping import (
    EVEN,
    LAYERS,
    ODD,
    OPTIONS,
    Chain,
    batches,
    both,
    crossed,
    grads_on_device,
    room,
    updated,
)
from tests.optim.machines import SLOW_HOST
from tests.optim.test_streamed import MIXED, Failing
from tests.optim.test_streamed_gradients import train_apart

# ---- what does not stay ------------------------------------------------------------------------------------------


class Woven(nn.Module):
    """The gradients of all layers arrive in two rounds: one half of each chunk's, and then the other."""

    def __init__(self) -> None:
        super().__init__()
        both = [nn.ModuleList(nn.Linear(64, 32, bias=False) for _ in range(2)) for _ in range(5)]
        self.layers = nn.ModuleList(both)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        halves = [first(x) for first, _ in self.layers]
        pairs = zip(halves, [second for _, second in self.layers], strict=True)
        return torch.stack([second(torch.tanh(torch.cat((half, half), -1))) for half, second in pairs]).sum(0)


def test_where_all_places_wait_for_gradients_the_next_ones_go_home_and_come_back(tmp_path: Path) -> None:
    """Two of five, in as many places, stay."""
    plain, managed, optimizers = both(tmp_path, shape=EVEN, build=Woven, chunks=5)
    before = crossed(managed)["device_to_host"]
    weights = updated(managed)["streamed"]
    train_apart(plain, managed, optimizers, batches(EVEN, 1))
    assert updated(managed)["streamed"] - weights == 5 * CHUNK
    assert crossed(managed)["device_to_host"] - before == (3 * 5 + 3) * CHUNK


class Nested(nn.Module):
    """The chunks of the two outer pairs get their last gradients after those of the others have all of theirs."""

    def __init__(self, chunks: int = 5) -> None:
        super().__init__()
        both = [nn.ModuleList(nn.Linear(64, 32, bias=False) for _ in range(2)) for _ in range(chunks)]
        self.layers = nn.ModuleList(both)
        self.seen: Callable[[torch.Tensor], None] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = [(chunk, half) for chunk in range(2, len(self.layers)) for half in range(2)]
        order = [(0, 0), (1, 0), *inner, (1, 1), (0, 1)]
        for chunk, half in order:
            if (chunk, half) == (2, 0) and self.seen is not None:
                x.register_hook(self.seen)
            x = self.layers[chunk][half](x)
            x = torch.tanh(torch.cat((x, x), -1))
        return x


def test_who_waits_within_a_backward_for_an_update_that_waits_for_a_place_gets_it_from_the_host(tmp_path: Path) -> None:
    plain, managed, optimizers = both(tmp_path, shape=EVEN, build=Nested, chunks=5)
    before = updated(managed)
    train_apart(plain, managed, optimizers, batches(EVEN, 1))
    assert updated(managed)["streamed"] - before["streamed"] == 5 * CHUNK
    managed.seen = lambda _: optimizers[1].synchronize()
    train_apart(plain, managed, optimizers, batches(EVEN, 1))
    managed.seen = None
    assert updated(managed)["streamed"] - before["streamed"] == (5 + 2) * CHUNK
    assert updated(managed)["host"] - before["host"] == 3 * CHUNK


def test_updates_that_wait_for_a_place_hold_no_memory_at_home_that_others_wait_for(tmp_path: Path) -> None:
    """Ten chunks get all gradients while the places wait for their last ones, and there is memory for six of them."""
    plain, managed, optimizers = both(tmp_path, shape=EVEN, build=lambda: Nested(12), chunks=12)
    train_apart(plain, managed, optimizers, batches(EVEN, 2))
    assert not testing.of(managed).homes("grad")


def test_gradients_that_do_not_get_home_stay_where_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, managed, optimizers = both(tmp_path, shape=EVEN, build=Nested, chunks=5)
    places = next(iter(optimizers[1]._steppers.values()))._kept
    asked: list[int] = []

    def fails(target: torch.Tensor, source: torch.Tensor) -> None:
        raise RuntimeError("the link has failed")

    def ask(_: torch.Tensor) -> None:
        with monkeypatch.context() as patch:
            patch.setattr("hetmem.engine.gradients._copy", fails)
            for chunk in places.chunks:
                asked.append(chunk.spec.index)
                with pytest.raises(RuntimeError, match="the link has failed"):
                    places.bring_home(chunk)
        assert sorted(grads_on_device(managed)) == asked == [0, 1]
        places.bring_home(places.chunks[0])

    managed.seen = ask
    train_apart(plain, managed, optimizers, batches(EVEN, 1))
    assert asked
    managed.seen = None
    train_apart(plain, managed, optimizers, batches(EVEN, 2))


def test_gradients_that_a_hook_of_the_user_sees_go_home_before(tmp_path: Path) -> None:
    plain, managed, optimizers = both(tmp_path)
    seen: list[bool] = []

    def look(parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        assert gradient is not None
        seen.append(testing.of(managed).place_of(gradient) == "home")
        gradient.mul_(0.5)

    def halve(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)

    watched = managed.layers[3].weight
    looking = watched.register_post_accumulate_grad_hook(look)
    plain.layers[3].weight.register_post_accumulate_grad_hook(halve)
    before = crossed(managed)["device_to_host"]
    train_apart(plain, managed, optimizers, batches(ODD, 1))
    assert seen == [True]
    sent = crossed(managed)["device_to_host"] - before
    assert sent == 12 * LAYERS * 4096 + watched.nbytes
    looking.remove()  # torch's collector does not see what such a hook refers to: here the model, which would stay


class Half(nn.Module):
    """The second half of each chunk is used only if the batch says so."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 32, bias=False) for _ in range(2 * LAYERS))

    def forward(self, x: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
        for at in range(0, 2 * LAYERS, 2):
            left = self.layers[at](x)
            right = self.layers[at + 1](x) if whole.all() else left
            x = torch.tanh(torch.cat((left, right), -1))
        return x


def test_gradients_of_a_chunk_that_is_not_complete_are_home_after_the_backward(tmp_path: Path) -> None:
    directory = {"hardware": SLOW_HOST}
    plain, managed = pair(Half, room(None), tmp_path, **directory)
    optimizers = adamws(plain, managed, **OPTIONS)
    inputs = [batch[0] for batch in batches(EVEN, 5)]
    whole = [torch.tensor([True])] * 4 + [torch.tensor([False])]
    steps = list(zip(inputs, whole, strict=True))
    train_apart(plain, managed, optimizers, steps[:4])
    for module in (plain, managed):
        loss_of(module, steps[4]).backward()
    left = [p for p in managed.parameters() if p.grad is not None]
    assert left
    assert all(testing.of(managed).place_of(p.grad) == "home" for p in left)
    assert not grads_on_device(managed)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    assert_same_weights(plain, managed)
    train_apart(plain, managed, optimizers, steps[:2])
    assert testing.of(managed).stayed_gradient_bytes() > 0


@MIXED
def test_slots_that_are_asked_back_within_a_backward_send_gradients_home_and_updates_to_the_host(
    mixed: torch.dtype | None, tmp_path: Path
) -> None:
    """Links are so slow that some gradients wait for a slot then."""
    device = hetmem.SimDevice(host_to_device="2MB", device_to_host="2MB")
    plain, managed, optimizers = both(tmp_path, device=device, mixed=mixed)
    seen: list[list[int]] = []

    def ask_back(*_: Any) -> None:
        seen.append(grads_on_device(managed))
        testing.of(managed).make_room()
        assert not grads_on_device(managed)
        assert testing.of(managed).memory().moved_bytes == 0

    hook = managed.layers[2].register_full_backward_hook(ask_back)
    before = updated(managed)
    train_apart(plain, managed, optimizers, batches(ODD, 1), mixed)
    assert seen[0]
    hook.remove()
    after = updated(managed)
    assert after["streamed"] > before["streamed"]
    assert after["host"] > before["host"]
    train_apart(plain, managed, optimizers, batches(ODD, 3), mixed)
    assert updated(managed)["streamed"] > after["streamed"]


def drops_gradient_of(weight: nn.Parameter) -> Callable[[torch.Tensor], None]:
    def drop(_: torch.Tensor) -> None:
        assert weight.grad is not None
        weight.grad = None

    return drop


def test_gradients_that_stay_beside_one_that_a_hook_has_dropped_go_home(tmp_path: Path) -> None:
    """An update on the device would be of that one too."""
    plain, managed, optimizers = both(tmp_path, shape=EVEN, build=Nested, chunks=5)
    for module in (plain, managed):
        module.seen = drops_gradient_of(module.layers[0][1].weight)
    before = updated(managed)["host"]
    train_apart(plain, managed, optimizers, batches(EVEN, 1))
    assert updated(managed)["host"] == before + CHUNK // 2
    (stepper,) = optimizers[1]._steppers.values()
    assert not stepper._kept.chunks
    for module in (plain, managed):
        module.seen = None
    train_apart(plain, managed, optimizers, batches(EVEN, 2))
    assert updated(managed)["host"] == before + CHUNK // 2


def test_places_that_were_asked_back_take_no_gradients(tmp_path: Path) -> None:
    _, managed, (_, optimizer) = both(tmp_path)
    (stepper,) = optimizer._steppers.values()
    assert stepper._kept.has_room
    testing.of(managed).make_room()
    assert not stepper._kept.has_room


# ---- failures ----------------------------------------------------------------------------------------------------


def test_a_step_whose_transfers_failed_is_tried_again_with_gradients_where_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last one is under way as the step begins."""
    plain, managed, optimizers = both(tmp_path)
    batch = batches(ODD, 1)[0]
    before = crossed(managed)["device_to_host"]
    begins = threading.Event()
    Failing(monkeypatch, "states to the device", LAYERS, 1, begins)
    optimizers[1].register_step_pre_hook(lambda *_: begins.set())
    loss_of(managed, batch).backward()
    with pytest.raises(RuntimeError, match="the link has failed"):
        optimizers[1].step()
    assert grads_on_device(managed)  # of the one that failed, and of what was still queued then
    optimizers[1].step()
    assert not grads_on_device(managed)
    loss_of(plain, batch).backward()
    optimizers[0].step()
    assert_same_weights(plain, managed)
    assert_same_states(*optimizers)
    assert crossed(managed)["device_to_host"] - before <= 12 * LAYERS * 4096
    for optimizer in optimizers:
        optimizer.zero_grad()
    train_apart(plain, managed, optimizers, batches(ODD, 2))


def test_a_place_that_gradients_were_brought_to_is_free_again_after_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of them: as many as there are places."""
    plain, managed = pair(lambda: Chain(ODD), room(None), tmp_path, hardware=SLOW_HOST)
    optimizers = adamws(plain, managed)
    train_apart(plain, managed, optimizers, batches(ODD, 3))
    batch, before = batches(ODD, 1)[0], updated(managed)
    for module in (plain, managed):
        loss_of(module, batch).backward()
    for _ in range(2):
        with monkeypatch.context() as patch:
            Failing(patch, "states to the device", 1, 1)
            with pytest.raises(RuntimeError, match="the link has failed"):
                optimizers[1].step()
    for optimizer in optimizers:
        optimizer.step()
    assert updated(managed)["host"] == before["host"]
    assert_same_weights(plain, managed)
    assert_same_states(*optimizers)


def test_a_step_whose_update_was_left_to_the_host_and_failed_there_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = hetmem.SimDevice(host_to_device="5MB", device_to_host="5MB")
    plain, managed, optimizers = both(tmp_path, device=device)
    batch = batches(ODD, 1)[0]
    loss_of(managed, batch).backward()
    left = grads_on_device(managed)
    assert left

    def fails(*_: Any) -> Any:
        raise RuntimeError("no memory for a temporary")

    with monkeypatch.context() as patch:
        patch.setattr("hetmem.optim.adamw.AdamWRule.tasks", fails)
        testing.of(managed).make_room()
        with pytest.raises(RuntimeError, match="no memory for a temporary"):
            optimizers[1].step()
    shown = [p for p in managed.parameters() if p.grad is not None]
    assert shown
    assert all(testing.of(managed).place_of(p.grad) == "home" for p in shown)
    optimizers[1].step()
    loss_of(plain, batch).backward()
    optimizers[0].step()
    assert_same_weights(plain, managed)
    assert_same_states(*optimizers)
