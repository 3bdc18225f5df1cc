"""16-bit copies at home: always what the parameters say, whoever wrote them; half the bytes, and no other bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hetmem
from hetmem import testing
from tests.engine import test_user_writes as writes
from tests.engine.harness import (
    CHUNK,
    Mixed,
    Recipe,
    Tower,
    adamws,
    assert_same,
    assert_same_weights,
    loss_of,
    manage,
    mlp,
    pair,
    same_bits,
    shared,
    token_batches,
    train_both,
    vector_batches,
)
from tests.engine.test_writes_within_steps import KINDS, WAYS, WritesInForward
from tests.faults.disk import EIO, FaultyDisk, healthy, once, settle
from tests.optim import test_clipping as clipping
from tests.optim.stories import OVERLAPS, overlaps
from tests.pairs import mostly, some

BF16, FP16 = torch.bfloat16, torch.float16
NVME, HOST = "nvme", "host"

# Chunks that host memory has room for, of which the staging ring takes four; and where the parameters and the copies of
# a model of four chunks come to lie then.
SLOTS = {
    "host": (256.0, [(HOST, HOST)] * 4),
    "some without": (7.0, [(HOST, HOST), (HOST, None), *[(NVME, None)] * 2]),
}
everywhere = shared("place", SLOTS)


def room(place: str, directory: Path, **changes: Any) -> hetmem.Budget:
    """Copies as `place` says; the device has room for five of them."""
    host = int(SLOTS[place][0] * CHUNK)
    disk = {} if place == "host" else {"nvme": "64MiB", "nvme_dir": directory}
    options = {"device": "64MiB", "device_chunks": 5 * CHUNK // 2, "host": host, "home_copies": True, **disk}
    return hetmem.Budget(**{**options, **changes})


def four_chunks() -> nn.Module:
    return nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))


def assert_true_copies(module: nn.Module) -> None:
    """Every copy at home has the bits of its parameter, rounded."""
    inside = testing.of(module)
    inside.wait_for_updates()
    chunks = [chunk for chunk in inside.chunks() if "compute" in chunk.homes]
    assert chunks, "nothing has a copy at home"
    for chunk in chunks:
        for name in chunk.parameters:
            expected = inside.home(name).to(chunk.compute_dtype)
            assert_same(expected, inside.home(name, "compute"), f"copy of {name}")


def trained(module: nn.Module, batches: list[Any], **options: Any) -> torch.optim.Optimizer:
    optimizer = hetmem.AdamW(module.parameters(), lr=1e-2, **options)
    for batch in batches:
        loss_of(module, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


# ---- where they are --------------------------------------------------------------------------------------------------


@everywhere
def test_a_copy_lies_in_host_memory_beside_its_parameters_or_nowhere(place: str, tmp_path: Path) -> None:
    module = manage(four_chunks(), room(place, tmp_path), tmp_path, mixed_precision=BF16)
    homes = [chunk.homes for chunk in testing.of(module).chunks()]
    assert [(own["param"], own.get("compute")) for own in homes] == SLOTS[place][1]
    assert_true_copies(module)


@pytest.mark.parametrize(("spare", "expected"), [(0, True), (-1, False)])
def test_they_come_by_themselves_where_host_memory_has_room_for_three_states_and_them(
    spare: int, expected: bool, tmp_path: Path
) -> None:
    """So no optimizer of torch's that had room without them has none with them."""
    host = 4 * (5 * CHUNK + CHUNK // 2) + 4096 * spare
    limits = hetmem.Budget(device="64MiB", device_chunks=5 * CHUNK // 2, host=host)
    module = manage(four_chunks(), limits, tmp_path, mixed_precision=BF16)
    homes = hetmem.report(module).to_dict()["tiers"]["host"]["homes"]
    assert homes == {"param": 4 * CHUNK, **({"compute": 2 * CHUNK} if expected else {})}
    hetmem.optim.offload(torch.optim.Adam, module.parameters(), amsgrad=True)


@pytest.mark.parametrize(
    ("mixed", "changes"),
    [(None, {}), (BF16, {"home_copies": False}), (BF16, {"device_chunks": "64MiB"})],
    ids=["float32", "not wanted", "whole on the device"],
)
def test_nothing_has_copies_where_they_are_of_no_use_or_not_wanted(
    mixed: torch.dtype | None, changes: dict[str, Any], tmp_path: Path
) -> None:
    module = manage(mlp(), room("host", tmp_path, **changes), tmp_path, mixed_precision=mixed)
    assert not testing.of(module).homes("compute")


def test_only_float32_parameters_have_copies(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False).to(BF16))
    module = manage(model, room("host", tmp_path), tmp_path, mixed_precision=BF16)
    chunks = testing.of(module).chunks()
    assert {chunk.dtype: "compute" in chunk.homes for chunk in chunks} == {torch.float32: True, BF16: False}


# ---- the same bits ---------------------------------------------------------------------------------------------------


@pytest.mark.each
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize(("overlap", "place"), mostly(OVERLAPS, SLOTS, ["off"]))
def test_training_equals_torch(overlap: str, accumulation: int, place: str, tmp_path: Path) -> None:
    plain, managed = pair(Tower, room(place, tmp_path), tmp_path, mixed_precision=BF16)
    optimizers = adamws(plain, managed, overlap=overlap)
    recipe = Recipe(accumulation=accumulation, mixed=BF16)
    if place == "some without" and overlap != "off" and accumulation > 1:
        with pytest.raises(RuntimeError, match="more backwards than host memory has room to keep gradients of"):
            train_both(plain, managed, token_batches(3 * accumulation), recipe, optimizers=optimizers)
        return
    train_both(plain, managed, token_batches(3 * accumulation), recipe, optimizers=optimizers)
    assert_true_copies(managed)


@pytest.mark.each
@overlaps
def test_clipping_equals_a_clip_of_plain_gradients(overlap: str, tmp_path: Path) -> None:
    clipping.test_clipping_equals_a_clip_of_plain_gradients(overlap, BF16, room("some without", tmp_path), tmp_path)


@pytest.mark.parametrize(("overlap", "place"), mostly(OVERLAPS, SLOTS))
def test_a_step_that_overflows_leaves_copies_as_they_were(overlap: str, place: str, tmp_path: Path) -> None:
    """Of float16, with an overflow."""
    torch.manual_seed(0)
    module = manage(Tower(), room(place, tmp_path), tmp_path, mixed_precision=FP16)
    optimizer = hetmem.AdamW(module.parameters(), lr=1e-2, overlap=overlap, loss_scale=2.0**8)
    for index, batch in enumerate(token_batches(5)):
        before = copy.deepcopy(module.state_dict())
        (optimizer.scale(loss_of(module, batch)) * (float("inf") if index == 3 else 1.0)).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert all(map(same_bits, before.values(), module.state_dict().values())) == (index == 3)
        assert_true_copies(module)


@everywhere
def test_the_gradient_scaler_of_torch_works_in_float16(place: str, tmp_path: Path) -> None:
    plain, managed = pair(Tower, room(place, tmp_path), tmp_path, mixed_precision=FP16)
    masters = Mixed(plain, FP16)
    left, right = adamws(plain, managed)
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2) for _ in range(2)]
    for index, batch in enumerate(token_batches(5)):
        masters.backward(lambda module, batch=batch: scalers[0].scale(loss_of(module, batch)))
        scalers[1].scale(loss_of(managed, batch)).backward()
        for module, optimizer, scaler in zip((plain, managed), (left, right), scalers, strict=True):
            if index == 3:
                clipping.poison(module)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert_same_weights(plain, managed)
        assert_true_copies(managed)


@pytest.mark.each
@everywhere
@pytest.mark.parametrize("overlap", ["backward", "forward"])
def test_consumed_gradients_and_small_states_write_copies_too(overlap: str, place: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = manage(Tower(), room(place, tmp_path), tmp_path, mixed_precision=BF16)
    options = {"overlap": overlap, "moments": "8bit"}
    trained(module, token_batches(4), **options)
    assert_true_copies(module)


@pytest.mark.each
@everywhere
@pytest.mark.parametrize(
    ("optimizer", "options"),
    [(torch.optim.SGD, {"momentum": 0.9}), (torch.optim.Adam, {"amsgrad": True})],
    ids=["SGD", "Adam"],
)
def test_optimizers_of_torch_write_copies_too(
    optimizer: type[torch.optim.Optimizer], options: dict[str, Any], place: str, tmp_path: Path
) -> None:
    limits = room(place, tmp_path, host="1MiB") if options.get("amsgrad") else room(place, tmp_path)
    plain, managed = pair(mlp, limits, tmp_path, mixed_precision=BF16)
    optimizers = (
        optimizer(plain.parameters(), lr=1e-2, foreach=False, **options),
        hetmem.optim.offload(optimizer, managed.parameters(), lr=1e-2, **options),
    )
    recipe = Recipe(steps=4, mixed=BF16)
    train_both(plain, managed, vector_batches(4, 4, 64, dtype=BF16), recipe, optimizers=optimizers)
    assert_true_copies(managed)


class Narrow(nn.Module):
    """Several layers share a chunk."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(24))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.each
@everywhere
def test_what_an_update_leaves_out_keeps_its_copy(place: str, tmp_path: Path) -> None:
    """Every third parameter has no gradient, in each step others."""
    limits = room(place, tmp_path)
    plain, managed = pair(Narrow, limits, tmp_path, mixed_precision=BF16)
    masters = Mixed(plain, BF16)
    left, right = adamws(plain, managed)
    for step, batch in enumerate(vector_batches(4, 4, 32, dtype=BF16)):
        masters.backward(lambda module, batch=batch: loss_of(module, batch))
        loss_of(managed, batch).backward()
        for module, optimizer in ((plain, left), (managed, right)):
            for parameter in list(module.parameters())[step % 3 :: 3]:
                parameter.grad = None
            optimizer.step()
            optimizer.zero_grad()
        assert_same_weights(plain, managed, f"step {step}")
        assert_true_copies(managed)


# ---- what the user writes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("write", "place"), mostly(writes.WRITES, SLOTS), ids=writes.named)
def test_what_the_user_writes_is_in_the_copies_at_the_next_forward(
    write: Callable[[nn.Module], None], place: str, tmp_path: Path
) -> None:
    writes.test_writes_between_steps_reach_the_next_forward(write, BF16, room(place, tmp_path), tmp_path)


@pytest.mark.each
@everywhere
@pytest.mark.parametrize("write", writes.KINDS, ids=writes.named)
def test_what_the_user_writes_before_a_step_is_stepped_from(
    write: Callable[[nn.Module], None], place: str, tmp_path: Path
) -> None:
    plain, managed = pair(mlp, room(place, tmp_path), tmp_path, mixed_precision=BF16)
    masters = Mixed(plain, BF16)
    optimizers = adamws(plain, managed)
    for batch in vector_batches(2, 4, 64, dtype=BF16):
        masters.backward(lambda module, batch=batch: loss_of(module, batch))
        loss_of(managed, batch).backward()
        for module, optimizer in zip((plain, managed), optimizers, strict=True):
            torch.manual_seed(3)
            write(module)
            optimizer.step()
            optimizer.zero_grad()
        assert_same_weights(plain, managed)
        assert_true_copies(managed)


@everywhere
def test_what_is_written_before_the_first_forward_is_in_the_copies(place: str, tmp_path: Path) -> None:
    writes.test_writes_before_the_first_forward_and_without_an_optimizer_count(room(place, tmp_path), BF16, tmp_path)


@pytest.mark.parametrize(("way", "place"), mostly(WAYS, SLOTS, KINDS))
def test_what_a_forward_writes_is_in_the_copies(way: str, place: str, tmp_path: Path) -> None:
    """Seen by the forwards that follow, also when every copy on a nearer tier is gone."""
    module = manage(WritesInForward(way), room(place, tmp_path), tmp_path, mixed_precision=BF16)
    inside = testing.of(module)
    optimizer = hetmem.AdamW(module.parameters(), lr=1e-2)
    for batch in vector_batches(3, 4, 64, dtype=BF16):
        before = module.layer.weight.clone()
        loss_of(module, batch).backward()
        assert not torch.equal(before, module.layer.weight)
        inside.detect_writes()
        assert_true_copies(module)
        inside.forget_copies()
        optimizer.step()
        assert_true_copies(module)


@everywhere
def test_what_another_optimizer_writes_is_in_the_copies(place: str, tmp_path: Path) -> None:
    """Torch's fused one counts no versions, and a step of SGD may change a few rows only."""
    plain, managed = pair(Tower, room(place, tmp_path), tmp_path, mixed_precision=BF16)
    masters = Mixed(plain, BF16)
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.5, fused=True) for module in (plain, managed)]
    for batch in token_batches(3):
        expected = masters.backward(lambda module, batch=batch: loss_of(module, batch))
        got = loss_of(managed, batch)
        got.backward()
        assert_same(expected, got, "loss")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert_same_weights(plain, managed)
        assert_true_copies(managed)


# ---- around training -------------------------------------------------------------------------------------------------


@everywhere
def test_a_checkpoint_goes_on_as_if_it_had_not_stopped(place: str, tmp_path: Path) -> None:
    batches = token_batches(4)
    torch.manual_seed(0)
    first = manage(Tower(), room(place, tmp_path), tmp_path, mixed_precision=BF16)
    optimizer = trained(first, batches[:2])
    saved = copy.deepcopy((first.state_dict(), optimizer.state_dict()))
    second = manage(Tower(), room(place, tmp_path), tmp_path, mixed_precision=BF16)
    other = hetmem.AdamW(second.parameters(), lr=1e-2)
    loss_of(second, batches[0])  # copies of what is overwritten now are on the device
    second.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    assert list(saved[0]) == list(second.state_dict())
    for batch in batches[2:]:
        for module, own in ((first, optimizer), (second, other)):
            loss_of(module, batch).backward()
            own.step()
            own.zero_grad()
    assert_same_weights(first, second)
    assert_true_copies(second)


@everywhere
def test_a_released_model_has_its_weights_and_no_copies(place: str, tmp_path: Path) -> None:
    plain, managed = pair(Tower, room(place, tmp_path), tmp_path, mixed_precision=BF16)
    train_both(plain, managed, token_batches(3), Recipe(mixed=BF16))
    hetmem.release(managed)
    assert_same_weights(plain, managed)
    assert {parameter.dtype for parameter in managed.parameters()} == {torch.float32}


@pytest.mark.parametrize("call", some(range(0, 60, 4), 3))
def test_a_step_that_is_repeated_after_a_fault_of_the_disk_leaves_true_copies(
    call: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FaultyDisk()
    disk.used_by(monkeypatch, threads=2)
    plain, managed = pair(mlp, room("some without", tmp_path), tmp_path, mixed_precision=BF16)
    batches = vector_batches(3, 4, 64, dtype=BF16)
    left, right = adamws(plain, managed)
    train_both(plain, managed, batches[:1], Recipe(steps=1, mixed=BF16), optimizers=(left, right))
    masters = Mixed(plain, BF16)
    masters.backward(lambda module: loss_of(module, batches[1]))
    loss_of(managed, batches[1]).backward()
    left.step()
    disk.fault = once(call, EIO)
    try:
        right.step()
    except hetmem.errors.StoreError:
        right.step()
    disk.fault = healthy
    settle(managed)
    right.synchronize()
    for optimizer in (left, right):
        optimizer.zero_grad()
    assert_same_weights(plain, managed)
    assert_true_copies(managed)
    train_both(plain, managed, batches[2:], Recipe(steps=1, mixed=BF16), optimizers=(left, right))


# ---- what crosses the links ------------------------------------------------------------------------------------------


def links(place: str, directory: Path, slots: int, **changes: Any) -> dict[str, int]:
    """Bytes of three steps, after two that learn what comes."""
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8)))
    limits = room(place, directory, device_chunks=slots * CHUNK // 2, **changes)
    device = hetmem.SimDevice(host_to_device="100GB")
    module = manage(layers, limits, directory, mixed_precision=BF16, device=device, sanitize=False)
    optimizer = trained(module, vector_batches(2, 4, 64, dtype=BF16))
    optimizer.synchronize()
    before = hetmem.report(module).to_dict()["links"]
    for batch in vector_batches(3, 4, 64, dtype=BF16):
        loss_of(module, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()
    after = hetmem.report(module).to_dict()["links"]
    hetmem.release(module)
    return {name: after[name]["bytes"] - before[name]["bytes"] for name in after}


@pytest.mark.parametrize(("slots", "crossings"), [(8, 8), (3, 13)])
def test_half_the_bytes_go_to_the_device(slots: int, crossings: int, tmp_path: Path) -> None:
    """With room for all eight there, each goes there once a step; with room for three, five of them twice, or four if
    one that is read ahead comes late."""
    without, with_copies = (links("host", tmp_path, slots, home_copies=wanted) for wanted in (False, True))
    fewest = {8: 8, 3: 12}[slots]
    assert 3 * fewest * CHUNK <= without["host_to_device"] <= 3 * crossings * CHUNK
    assert 3 * fewest * CHUNK // 2 <= with_copies["host_to_device"] <= 3 * crossings * CHUNK // 2
    assert with_copies["device_to_host"] == without["device_to_host"] == 3 * 8 * CHUNK
