"""A model that was put whole on the device leaves it, as far as it must, when somebody else needs the memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import _get_current_function_mode_stack

import hetmem
from hetmem import testing
from hetmem.errors import DeviceOutOfMemoryError
from tests.engine.harness import (
    CHUNK,
    Recipe,
    assert_same,
    assert_same_weights,
    loss_of,
    pair,
    token_batches,
    train_both,
)
from tests.engine.lazy_device import AllocatingDevice
from tests.engine.leaving import BF16, MIXED, build, is_resident, optimizers_of, room, tiers


@pytest.mark.each
@MIXED
@pytest.mark.parametrize("sanitize", [True, False])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("overlap", ["off", "backward", "forward"])
@pytest.mark.parametrize("before", [0, 2])
def test_a_larger_batch_than_ever_trains_on_with_the_bits_of_plain_torch(
    before: int, overlap: str, accumulation: int, sanitize: bool, mixed: torch.dtype | None, tmp_path: Path
) -> None:
    plain, managed = pair(build, room(mixed), tmp_path, mixed_precision=mixed, sanitize=sanitize)
    optimizers = optimizers_of(plain, managed, overlap=overlap)
    assert is_resident(managed)
    small = token_batches(before * accumulation, seed=2)
    recipe = Recipe(steps=before, accumulation=accumulation, mixed=mixed)
    train_both(plain, managed, small, recipe, optimizers=optimizers)
    assert is_resident(managed)
    large = token_batches(3 * accumulation, rows=40 if mixed is None else 80)
    recipe = Recipe(steps=3, accumulation=accumulation, mixed=mixed)
    train_both(plain, managed, large, recipe, optimizers=optimizers)
    assert not is_resident(managed)
    assert "host" in tiers(managed)
    device = hetmem.report(managed).to_dict()["tiers"]["device"]
    assert device["peak_bytes"] <= device["capacity_bytes"]


@pytest.mark.each
@MIXED
@pytest.mark.parametrize("overlap", ["off", "backward"])
def test_gradients_of_the_step_so_far_come_along_in_the_tensors_that_users_have(
    overlap: str, mixed: torch.dtype | None, tmp_path: Path
) -> None:
    """A small micro-batch, then one that needs the memory; and what was half counted of that step is not learned."""
    plain, managed = pair(build, room(mixed), tmp_path, mixed_precision=mixed)
    optimizers = optimizers_of(plain, managed, overlap=overlap)
    held: dict[str, torch.Tensor] = {}

    def hold(module: nn.Module, batch: Any) -> torch.Tensor:
        if module is managed and not held:
            held.update({name: p.grad for name, p in module.named_parameters() if p.grad is not None})
        return loss_of(module, batch)

    recipe = Recipe(steps=1, accumulation=2, mixed=mixed)
    batches = [*token_batches(1), *token_batches(1, rows=40 if mixed is None else 80)]
    train_both(plain, managed, token_batches(2), recipe, optimizers=optimizers)
    assert is_resident(managed)
    train_both(plain, managed, batches, recipe, optimizers=optimizers, loss=hold)
    assert not is_resident(managed)
    assert held
    train_both(plain, managed, batches, Recipe(steps=3, accumulation=2, mixed=mixed), optimizers=optimizers)


@pytest.mark.each
@MIXED
@pytest.mark.parametrize("overlap", ["off", "backward"])
def test_it_leaves_within_a_backward(overlap: str, mixed: torch.dtype | None, tmp_path: Path) -> None:
    plain, managed = pair(build, room(mixed), tmp_path, mixed_precision=mixed)
    optimizers = optimizers_of(plain, managed, overlap=overlap)
    train_both(plain, managed, token_batches(2), Recipe(steps=2, mixed=mixed), optimizers=optimizers)
    inside, at_once = testing.of(managed), list[bool]()

    def leave(*_: Any) -> None:
        at_once.append(inside.leave_device(inside.memory().device_bytes - 20 * CHUNK))

    managed.blocks[1].norm.register_full_backward_hook(leave)
    train_both(plain, managed, token_batches(3), Recipe(steps=3, mixed=mixed), optimizers=optimizers)
    assert at_once == [True, False, False]
    assert "host" in tiers(managed) or any(chunk.moved for chunk in inside.chunks())


@MIXED
def test_chunks_that_could_stay_take_their_gradients_along_when_they_go_later(
    mixed: torch.dtype | None, tmp_path: Path
) -> None:
    """Between two micro-batches: gradients that came to be on the device have a place too."""
    plain, managed = pair(build, room(mixed), tmp_path, mixed_precision=mixed)
    optimizers = optimizers_of(plain, managed)
    train_both(plain, managed, token_batches(2), Recipe(steps=2, mixed=mixed), optimizers=optimizers)
    inside = testing.of(managed)
    assert inside.leave_device()
    assert tiers(managed) == {"device"}
    forwards: list[set[str]] = []

    def squeezed(module: nn.Module, batch: Any) -> torch.Tensor:
        if module is managed:
            if forwards:
                assert all("grad" in chunk.homes for chunk in inside.chunks())
                inside.make_room()
            forwards.append(tiers(managed))
        return loss_of(module, batch)

    recipe = Recipe(steps=1, accumulation=2, mixed=mixed)
    train_both(plain, managed, token_batches(2), recipe, optimizers=optimizers, loss=squeezed)
    assert forwards == [{"device"}, {"host"}]


@MIXED
def test_it_comes_back_when_the_memory_is_idle_again(mixed: torch.dtype | None, tmp_path: Path) -> None:
    plain, managed = pair(build, room(mixed), tmp_path, mixed_precision=mixed, sanitize=True)
    optimizers = optimizers_of(plain, managed)
    large = token_batches(2, rows=40 if mixed is None else 80)
    train_both(plain, managed, large, Recipe(steps=2, mixed=mixed), optimizers=optimizers)
    inside = testing.of(managed)
    assert "host" in tiers(managed)
    reserved = inside.memory().host_reserved_bytes
    inside.forget_peaks()  # as if the large ones had never been
    train_both(plain, managed, token_batches(3), Recipe(steps=3, mixed=mixed), optimizers=optimizers)
    assert tiers(managed) == {"device"}
    train_both(plain, managed, large, Recipe(steps=2, mixed=mixed), optimizers=optimizers)
    assert "host" in tiers(managed)
    assert inside.memory().host_reserved_bytes == reserved


def test_what_was_traced_before_is_traced_again_as_nobody_saw_what_it_needs(tmp_path: Path) -> None:
    plain, managed = pair(build, room(None), tmp_path, sanitize=False)
    optimizers = optimizers_of(plain, managed)
    for rows, steps in ((2, 5), (40, 1), (2, 1)):  # of the first three, backwards are waited for
        train_both(plain, managed, token_batches(steps, rows=rows), Recipe(steps=steps), optimizers=optimizers)
    assert not is_resident(managed)
    peaks = testing.of(managed).expected_peaks("forward")
    assert peaks and all(peaks)


@MIXED
def test_without_room_in_host_memory_the_error_says_so(mixed: torch.dtype | None, tmp_path: Path) -> None:
    _, managed = pair(build, room(mixed, host="64KiB"), tmp_path, mixed_precision=mixed)
    optimizer = hetmem.AdamW(managed.parameters())
    with pytest.raises(
        DeviceOutOfMemoryError, match=r"(?s)cannot\sgo\sto\shost\smemory,\swhere\sthey\sneed\s.*\sand\s64\.00\sKiB"
    ):
        managed(*token_batches(1, rows=60 if mixed is None else 110)[0]).backward()
    assert is_resident(managed)
    managed.zero_grad()
    managed(*token_batches(1)[0]).backward()
    optimizer.step()


def test_a_model_that_another_optimizer_updates_stays(tmp_path: Path) -> None:
    """Its states would be on the device, and parameters in host memory."""
    _, managed = pair(build, room(None), tmp_path)
    optimizer = torch.optim.AdamW(managed.parameters())
    managed(*token_batches(1)[0]).backward()
    optimizer.step()
    with pytest.raises(DeviceOutOfMemoryError, match=r"out of memory\.\nNo room for"):
        managed(*token_batches(1, rows=60)[0])
    assert is_resident(managed)


def test_what_somebody_holds_stays_where_it_is(tmp_path: Path) -> None:
    plain, managed = pair(build, room(None), tmp_path)
    optimizers = optimizers_of(plain, managed)
    held = managed.blocks[0].up.weight.detach()
    train_both(plain, managed, token_batches(2, rows=36), Recipe(steps=2), optimizers=optimizers)
    inside = testing.of(managed)
    assert set(inside.chunks()[inside.chunk_of("blocks.0.up.weight")].homes.values()) == {"device"}
    assert "host" in tiers(managed)
    assert_same(plain.blocks[0].up.weight.detach(), held, "what was held")


def test_an_evaluation_before_any_optimizer_makes_it_leave_too(tmp_path: Path) -> None:
    plain, managed = pair(build, room(None), tmp_path)
    rows = 100
    while is_resident(managed):
        batch = token_batches(1, rows=rows)[0]
        with torch.no_grad():
            assert_same(plain(*batch), managed(*batch), "loss")
        rows += 8
    assert not is_resident(managed)
    train_both(plain, managed, token_batches(3), Recipe(steps=3))
    hetmem.release(managed)
    assert_same_weights(plain, managed)


class Refused(nn.Module):
    """An operator behind a tower finds no memory, as often as `failures` says."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))
        self.failures, self.device = 0, AllocatingDevice(0)
        self.seen: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return refusing(self.tower(x), self.tower[0].weight, self)


def refusing(x: torch.Tensor, weight: torch.Tensor, module: Refused) -> torch.Tensor:
    if torch.overrides.has_torch_function((x, weight)) or _get_current_function_mode_stack():
        result: torch.Tensor = torch.overrides.handle_torch_function(refusing, (x, weight), x, weight, module)
        return result
    if module.failures:
        module.failures -= 1
        module.device.refuse(480 << 10, 200 << 10)
        raise torch.OutOfMemoryError("CUDA out of memory")
    module.seen.append(weight.detach())
    return x @ weight


@MIXED
def test_an_operator_that_finds_no_memory_runs_again_when_homes_have_left(
    mixed: torch.dtype | None, tmp_path: Path
) -> None:
    """A GPU's allocator refuses, and says what was asked for."""
    plain, other = Refused(), Refused()
    other.load_state_dict(plain.state_dict())
    limits = hetmem.Budget(device="512KiB", host="1MiB")
    managed = hetmem.manage(other, limits, device=other.device, chunk_bytes="16KiB", mixed_precision=mixed)
    assert is_resident(managed)
    x = torch.ones(2, 32)
    expected = plain(x) if mixed is None else plain.to(mixed)(x.to(mixed))
    managed.failures = 1
    assert torch.equal(managed(x), expected)
    assert managed.failures == 0
    assert testing.of(managed).place_of(managed.seen[-1]) == "device"
    managed.seen.clear()
    assert "host" in tiers(managed)
    assert torch.equal(managed(x), expected)


@MIXED
def test_a_forward_behind_a_backward_that_found_no_memory_begins_with_room_for_it(
    mixed: torch.dtype | None, tmp_path: Path
) -> None:
    """On a GPU nobody can run a part of a backward again."""
    plain, other = Refused(), Refused()
    other.load_state_dict(plain.state_dict())
    limits = hetmem.Budget(device="512KiB", host="1MiB")
    managed = hetmem.manage(other, limits, device=other.device, chunk_bytes="16KiB", mixed_precision=mixed)
    x = torch.ones(2, 32)
    expected = plain(x) if mixed is None else plain.to(mixed)(x.to(mixed))
    assert torch.equal(managed(x), expected)
    assert is_resident(managed)
    other.device.refuse(480 << 10, 200 << 10)
    seen: list[set[str]] = []
    managed.tower[0].register_forward_pre_hook(lambda *_: seen.append(tiers(managed)))
    assert torch.equal(managed(x), expected)
    assert "host" in seen[0]


class Holding(nn.Module):
    """All weights are in use at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = [layer.weight.reshape(-1) for layer in self.layers]
        return torch.stack([part.sum() for part in parts]).sum() + x[0]


def test_a_copy_that_finds_no_room_makes_homes_leave(tmp_path: Path) -> None:
    plain, managed = pair(Holding, hetmem.Budget(device="1400KiB", host="8MiB"), tmp_path, mixed_precision=BF16)
    memory = testing.of(managed).memory()
    assert memory.resident
    room = memory.device_bytes - memory.device_home_bytes - int(3.5 * memory.slot_bytes)
    x = torch.ones(room // 2, dtype=BF16)
    with torch.no_grad():
        assert_same(plain.to(BF16)(x), managed(x), "sum")
    assert not is_resident(managed)
    device = hetmem.report(managed).to_dict()["tiers"]["device"]
    assert device["peak_bytes"] <= device["capacity_bytes"]


@MIXED
def test_a_write_that_counts_no_version_is_kept_after_a_forward_in_which_the_model_left(
    mixed: torch.dtype | None, tmp_path: Path
) -> None:
    plain, managed = pair(build, room(mixed), tmp_path, mixed_precision=mixed)
    assert is_resident(managed)
    handle = next(managed.children()).register_forward_pre_hook(lambda *_: testing.of(managed).make_room())
    with torch.no_grad():
        loss_of(managed, token_batches(1)[0])
        handle.remove()
        assert not is_resident(managed)
        for module in (plain, managed):
            for parameter in module.parameters():
                parameter.data.mul_(0.75)
        loss_of(managed, token_batches(1)[0])
    assert_same_weights(plain, managed)
