"""Updates on the device with states brought there: the bits of the host's, in bounded memory, in order."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hetmem
from hetmem.cpu.on_device import equals_host
from hetmem.engine.runtime import Runtime
from hetmem.intercept import registry
from hetmem.optim import device_updates
from hetmem.schedule.blocks import Link
from hetmem.schedule.hardware import HardwareProfile, Rate
from hetmem.schedule.update_split import Fitting, spread
from tests.optim.machines import GB, SLOW_HOST
from tests.runtime.harness import (
    CHUNK,
    Recipe,
    Tower,
    adamws,
    assert_same_states,
    assert_same_weights,
    pair,
    same_bits,
    token_batches,
    train_both,
)
from tests.runtime.lazy_device import EarlyDevice, LazyDevice

BF16 = torch.bfloat16
WIDTH = 57
"""So that the last elements of nearly all parameters are the host's."""

MIXED = pytest.mark.parametrize("mixed", [None, BF16], ids=["float32", "bfloat16"])


def build() -> nn.Module:
    return Tower(width=WIDTH, depth=4)


CHUNKS = 18


def room(mixed: torch.dtype | None = None, slots: float = 2, **changes: Any) -> hetmem.Budget:
    """The device may have a copy of each chunk and, for updates, `slots` of two of them with all roles; no homes."""
    copies = CHUNKS * CHUNK // (1 if mixed is None else 2)
    sizes = {"device": "64MiB", "host": "8MiB", "device_chunks": copies + int(slots * 2 * 4.5 * CHUNK)}
    return hetmem.Budget(**{**sizes, **changes})


def runtime_of(module: nn.Module) -> Runtime:
    return registry.of_module(module).runtime


def updated(module: nn.Module) -> dict[str, int]:
    return {way.value: nbytes for way, nbytes in runtime_of(module).statistics.updated_bytes.items() if nbytes}


def crossed(module: nn.Module) -> dict[Link, int]:
    return {link: use.bytes for link, use in runtime_of(module).traffic.engine.links().items()}


@pytest.mark.pairs
@MIXED
@pytest.mark.parametrize("home_copies", [True, False])
@pytest.mark.parametrize("overlap", ["off", "backward", "forward"])
@pytest.mark.parametrize(
    "device",
    [
        hetmem.SimDevice,
        LazyDevice,
        EarlyDevice,
        lambda: hetmem.SimDevice(host_to_device="100MB", device_to_host="100MB"),
    ],
    ids=["threads", "late", "early", "linked"],
)
def test_the_bits_are_those_of_plain_torch(
    device: Any, overlap: str, home_copies: bool, mixed: torch.dtype | None, tmp_path: Path
) -> None:
    limits = room(mixed, home_copies=home_copies)
    plain, managed = pair(build, limits, tmp_path, mixed_precision=mixed, hardware=SLOW_HOST, device=device())
    optimizers = adamws(plain, managed, overlap=overlap)
    train_both(plain, managed, token_batches(5), Recipe(steps=5, mixed=mixed), optimizers=optimizers)
    known = 4 if overlap == "off" else 3  # the choice is made behind the second backward
    assert updated(managed) == {"host": (5 - known) * weight_bytes(managed), "streamed": known * weight_bytes(managed)}


def weight_bytes(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())


def trained(steps: int, directory: Path, hardware: HardwareProfile | None, device: Any = None, **options: Any) -> Any:
    """A model of its own, trained, and its optimizer."""
    torch.manual_seed(0)
    limits = options.pop("limits", None) or room(options.get("mixed_precision"))
    mixed = options.pop("mixed_precision", None)
    device = device or hetmem.SimDevice()
    managed = hetmem.manage(
        build(), limits, chunk_bytes=CHUNK, device=device, mixed_precision=mixed, hardware=hardware, sanitize=True
    )
    optimizer = hetmem.AdamW(managed.parameters(), lr=1e-2, **options)
    train(managed, optimizer, steps)
    return managed, optimizer


def train(managed: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for batch in token_batches(steps):
        managed(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()


def assert_alike(one: Any, other: Any) -> None:
    for optimizer in (one[1], other[1]):
        optimizer.synchronize()
    assert_same_weights(one[0], other[0])
    assert_same_states(one[1], other[1])


@pytest.mark.parametrize("overlap", ["off", "backward"])
@MIXED
def test_clipped_and_scaled_updates_have_the_bits_of_those_on_the_host(
    mixed: torch.dtype | None, overlap: str, tmp_path: Path
) -> None:
    options: dict[str, Any] = {
        "overlap": overlap,
        "max_grad_norm": 0.01,
        "loss_scale": 1024.0,
        "mixed_precision": mixed,
    }
    here, there = (trained(5, tmp_path, hardware, **options) for hardware in (None, SLOW_HOST))
    assert updated(there[0])["streamed"] == 4 * weight_bytes(there[0])
    assert_alike(here, there)


@MIXED
def test_streamed_gradients_come_to_the_device_too(mixed: torch.dtype | None, tmp_path: Path) -> None:
    options: dict[str, Any] = {"overlap": "backward", "gradients": "streamed", "mixed_precision": mixed}
    here, there = (trained(5, tmp_path, hardware, **options) for hardware in (None, SLOW_HOST))
    assert updated(there[0])["streamed"] == 3 * weight_bytes(there[0])
    assert_alike(here, there)


@pytest.mark.parametrize("home_copies", [True, False])
def test_a_streamed_update_moves_its_roles_once_each_way_and_no_copy_is_fetched_for_it(
    home_copies: bool, tmp_path: Path
) -> None:
    limits = room(BF16, home_copies=home_copies)
    managed, optimizer = trained(4, tmp_path, SLOW_HOST, limits=limits, mixed_precision=BF16)
    before, log = crossed(managed), runtime_of(managed).events
    log.transfers.clear()
    train(managed, optimizer, 1)
    after = crossed(managed)
    chunks = runtime_of(managed).chunks
    pages = sum(chunk.numel for chunk in chunks)
    copies = [transfer.nbytes for transfer in log.transfers if transfer.block >= 0]
    assert len(copies) <= 1  # one was still in use as its update began
    assert after[Link.HOST_TO_DEVICE] - before[Link.HOST_TO_DEVICE] == 16 * pages + sum(copies)
    gradients = weight_bytes(managed)
    home = (14 if home_copies else 12) * pages
    assert after[Link.DEVICE_TO_HOST] - before[Link.DEVICE_TO_HOST] == gradients + home


# ---- who goes there ----------------------------------------------------------------------------------------------


def test_the_part_that_is_streamed_makes_the_slowest_as_fast_as_it_can_be(tmp_path: Path) -> None:
    """Of a parameter the host updates 28 bytes while 4 of its gradient go down and 4 of its copy up, or 16 go each way:
    with cores of 7 and a link of 8 bytes a second each way, 28 h / 7 = (4 h + 16 s) / 8, so s = 7/11."""
    balanced = replace(
        SLOW_HOST,
        host=replace(SLOW_HOST.host, update_bytes_per_second=7e6),
        host_to_device=Rate(8e6),
        device_to_host=Rate(8e6),
        both_ways_bytes_per_second=100e6,
    )
    managed, optimizer = trained(4, tmp_path, balanced)
    before = updated(managed)
    train(managed, optimizer, 1)
    step = {way: nbytes - before[way] for way, nbytes in updated(managed).items()}
    largest = max(4 * chunk.numel for chunk in runtime_of(managed).chunks)
    assert abs(step["streamed"] - 7 / 11 * weight_bytes(managed)) <= largest
    assert step["streamed"] + step["host"] == weight_bytes(managed)
    share = next(iter(optimizer._steppers.values()))._places.share
    before, share._home_bytes = share.chosen, -1
    train(managed, optimizer, 1)
    assert share._home_bytes != -1
    assert share.chosen == before  # what streaming sends home is no gradient


def test_a_part_of_chunks_is_spread_evenly_among_them() -> None:
    chunks = [Fitting(number, 10, 160) for number in range(12)]
    chosen = spread(chunks, 1 / 3)
    assert [number in chosen for number in range(12)] == 4 * [False, True, False]
    assert spread(chunks, 1.0) == set(range(12))
    assert spread(chunks, 0.0) == set()


@pytest.mark.parametrize("reason", ["no profile", "a fast host", "no slots", "NVMe", "another rule"])
def test_nothing_is_streamed_where_it_would_not_pay_or_cannot_be(reason: str, tmp_path: Path) -> None:
    fast = replace(SLOW_HOST, host=replace(SLOW_HOST.host, update_bytes_per_second=1000 * GB))
    hardware = {"no profile": None, "a fast host": fast}.get(reason, SLOW_HOST)
    limits = room(slots=0.9) if reason == "no slots" else room()
    options: dict[str, Any] = {"moments": torch.bfloat16} if reason == "another rule" else {}
    if reason == "NVMe":
        limits = room(host=20 * CHUNK, nvme="64MiB", nvme_dir=tmp_path)
    managed, _ = trained(5, tmp_path, hardware, limits=limits, **options)
    assert "streamed" not in updated(managed)
    if reason != "no slots":  # what was taken for slots is homes' now, or nobody's
        assert runtime_of(managed).memory.moved_bytes == sum(
            chunk.home_nbytes(role) for chunk in runtime_of(managed).chunks if chunk.moved for role in chunk.homes
        )


def test_idle_memory_is_filled_with_homes_beside_the_slots(tmp_path: Path) -> None:
    managed, _ = trained(5, tmp_path, SLOW_HOST, limits=room(slots=4))
    runtime = runtime_of(managed)
    assert any(chunk.moved for chunk in runtime.chunks)
    last = updated(managed)
    assert last["resident"] > 0
    assert last["streamed"] > 0
    homes = [c.home_nbytes(role) for c in runtime.chunks if not c.moved for role in c.homes]
    assert runtime.memory.idle_bytes(runtime.room.non_model_peak_bytes) < 4 * max(homes)


def test_a_chunk_of_which_a_parameter_has_no_gradient_is_updated_on_the_host(tmp_path: Path) -> None:
    managed, optimizer = trained(4, tmp_path, SLOW_HOST)
    before = updated(managed)
    managed(*token_batches(1)[0]).backward()
    without = managed.blocks[0].up.bias
    without.grad = None
    optimizer.step()
    chunk = next(c for c in runtime_of(managed).chunks if any(m.parameter is without for m in c.parameters))
    rest = sum(m.numel * 4 for m in chunk.parameters if m.parameter is not without)
    assert rest > 0
    assert updated(managed)["host"] - before["host"] == rest


def test_some_parameters_of_a_chunk_alone_are_updated_on_the_host(tmp_path: Path) -> None:
    plain, managed = pair(build, room(), tmp_path, hardware=SLOW_HOST)
    frozen = "blocks.0.up.bias"
    for module in (plain, managed):
        module.get_parameter(frozen).requires_grad_(False)
    train_both(plain, managed, token_batches(5), Recipe(steps=5))
    chunk = next(c for c in runtime_of(managed).chunks if any(m.name == frozen for m in c.parameters))
    assert len(chunk.parameters) > 1
    sizes = sum(m.numel * 4 for m in chunk.parameters)
    assert updated(managed)["streamed"] == 4 * (weight_bytes(managed) - sizes)


def test_the_report_says_which_part_was_updated_where(tmp_path: Path) -> None:
    managed, _ = trained(5, tmp_path, SLOW_HOST)
    report = hetmem.report(managed)
    whole = weight_bytes(managed)
    assert report.to_dict()["updates"] == {"host": whole, "streamed": 4 * whole, "resident": 0}
    assert "updated 20.0% on the host, 80.0% on the device, sent there for it" in str(report)


# ---- room --------------------------------------------------------------------------------------------------------


@MIXED
def test_slots_give_way_to_a_larger_batch_and_come_back(mixed: torch.dtype | None, tmp_path: Path) -> None:
    limits = hetmem.Budget(device="1600KiB" if mixed is None else "1300KiB", host="8MiB")
    plain, managed = pair(build, limits, tmp_path, mixed_precision=mixed, hardware=SLOW_HOST)
    optimizers = train_both(plain, managed, token_batches(4), Recipe(steps=4, mixed=mixed))
    memory = runtime_of(managed).memory
    assert updated(managed)["streamed"] > 0
    seen = memory.moved_bytes
    recipe = Recipe(steps=2, mixed=mixed)
    train_both(plain, managed, token_batches(2, rows=24), recipe, optimizers=optimizers)
    assert memory.moved_bytes < seen
    device = hetmem.report(managed).to_dict()["tiers"]["device"]
    assert device["peak_bytes"] <= device["capacity_bytes"]


def test_slots_that_are_asked_back_within_a_backward_leave_their_updates_to_the_host(tmp_path: Path) -> None:
    """Links are so slow that some wait for a slot then."""
    device = hetmem.SimDevice(host_to_device="20MB", device_to_host="20MB")
    plain, managed = pair(build, room(), tmp_path, hardware=SLOW_HOST, device=device)
    optimizers = adamws(plain, managed, overlap="backward")
    train_both(plain, managed, token_batches(4), Recipe(steps=4), optimizers=optimizers)
    runtime = runtime_of(managed)
    hook = managed.blocks[1].norm.register_full_backward_hook(lambda *_: runtime.room.give_way(1 << 30))
    before = updated(managed)
    train_both(plain, managed, token_batches(1), Recipe(steps=1), optimizers=optimizers)
    after = updated(managed)
    assert after["streamed"] > before["streamed"]
    assert after["host"] > before["host"]
    hook.remove()
    train_both(plain, managed, token_batches(2), Recipe(steps=2), optimizers=optimizers)
    assert updated(managed)["streamed"] >= after["streamed"] + weight_bytes(managed)


# ---- failures ----------------------------------------------------------------------------------------------------


class Failing:
    """Makes the transfers of a class fail: all from the `first` on, `times` of them, each when `told` is set."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, kind: Any, first: int, times: int, told: threading.Event | None = None
    ) -> None:
        self.seen, original = 0, kind.__call__

        def call(work: Any) -> None:
            self.seen += 1
            if first <= self.seen < first + times:
                assert told is None or told.wait(60)
                raise RuntimeError("the link has failed")
            original(work)

        monkeypatch.setattr(kind, "__call__", call)


@pytest.mark.parametrize("device", [hetmem.SimDevice, EarlyDevice], ids=["threads", "streams"])
def test_a_chunk_that_did_not_get_to_the_device_is_as_it_was_and_the_step_can_be_tried_again(
    device: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, found = trained(4, tmp_path, None), trained(4, tmp_path, SLOW_HOST, device=device())
    old = {name: value.clone() for name, value in found[0].state_dict().items()}
    train(*expected, 1)
    Failing(monkeypatch, device_updates._Bring, 3, 1)
    with pytest.raises(RuntimeError, match="the link has failed"):
        train(*found, 1)
    new = expected[0].state_dict()
    for chunk in runtime_of(found[0]).chunks:
        names = [managed.name for managed in chunk.parameters]
        now = {name: found[0].get_parameter(name) for name in names}
        assert any(all(same_bits(now[name], of[name]) for name in names) for of in (old, new))
    assert not all(same_bits(value, new[name]) for name, value in found[0].state_dict().items())
    found[1].step()
    assert_alike(expected, found)


def test_what_did_not_get_home_is_sent_once_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, found = trained(5, tmp_path, None), trained(4, tmp_path, SLOW_HOST)
    failing = Failing(monkeypatch, device_updates._SendHome, 2, 1)
    for batch in token_batches(5)[4:]:
        found[0](*batch).backward()
        found[1].step()
    assert failing.seen == 1 + len(runtime_of(found[0]).chunks)
    assert_alike(expected, found)


# ---- the kernel --------------------------------------------------------------------------------------------------


def test_a_device_that_rounds_otherwise_gets_no_updates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert equals_host(torch.device("cpu"), torch.float32, BF16)
    monkeypatch.setattr("hetmem.cpu.on_device._known", {})
    monkeypatch.setattr("hetmem.cuda.reference._fma", lambda a, b, c: a * b + c)
    assert not equals_host(torch.device("cpu"), torch.float32, BF16)
    managed, _ = trained(4, tmp_path, SLOW_HOST)
    assert "streamed" not in updated(managed)
