"""Updates on the device with states brought there: the bits of the host's, in bounded memory, in order."""

from __future__ import annotations

import threading
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
    assert_same_states,
    assert_same_weights,
    pair,
    same_bits,
    shared,
    token_batches,
    train_both,
)
from tests.engine.lazy_device import EarlyDevice, LazyDevice
from tests.optim.machines import BALANCED, FAST_HOST, SLOW_HOST
from tests.optim.stories import OVERLAPS
from tests.pairs import case, mostly

BF16 = torch.bfloat16
WIDTH = 57
"""So that the last elements of nearly all parameters are the host's."""

MIXED = shared("mixed", [None, BF16], ids=["float32", "bfloat16"])


def build() -> nn.Module:
    return Tower(width=WIDTH, depth=2)


CHUNKS = 10


def room(mixed: torch.dtype | None = None, slots: float = 2, **changes: Any) -> hetmem.Budget:
    """The device may have a copy of each chunk and, for updates, `slots` of two of them with all roles; no homes."""
    copies = CHUNKS * CHUNK // (1 if mixed is None else 2)
    sizes = {"device": "64MiB", "host": "8MiB", "device_chunks": copies + int(slots * 2 * 4.5 * CHUNK)}
    return hetmem.Budget(**{**sizes, **changes})


def updated(module: nn.Module) -> dict[str, int]:
    return testing.of(module).updated_bytes()


def crossed(module: nn.Module) -> dict[str, int]:
    return testing.of(module).link_bytes()


DEVICES: dict[str, Any] = {
    "threads": hetmem.SimDevice,
    "late": LazyDevice,
    "early": EarlyDevice,
    "linked": lambda: hetmem.SimDevice(host_to_device="100MB", device_to_host="100MB"),
}


@pytest.mark.each
@pytest.mark.parametrize(("mixed", "home_copies"), [(None, None), (BF16, True), (BF16, False)], ids=str)
@pytest.mark.parametrize(
    ("device", "overlap"),
    [
        case(device, overlap, nightly=(at + number) % 2 > 0)
        for at, device in enumerate(DEVICES)
        for number, overlap in enumerate(OVERLAPS)
    ],
)
def test_the_bits_are_those_of_plain_torch(
    device: str, overlap: str, home_copies: bool | None, mixed: torch.dtype | None, tmp_path: Path
) -> None:
    limits, made = room(mixed, home_copies=home_copies), DEVICES[device]()
    plain, managed = pair(build, limits, tmp_path, mixed_precision=mixed, hardware=SLOW_HOST, device=made)
    optimizers = adamws(plain, managed, overlap=overlap)
    train_both(plain, managed, token_batches(5), Recipe(steps=5, mixed=mixed), optimizers=optimizers)
    known = 4 if overlap == "off" else 3  # the choice is made behind the second backward
    assert updated(managed) == {"host": (5 - known) * weight_bytes(managed), "streamed": known * weight_bytes(managed)}


def weight_bytes(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())


def trained(steps: int, directory: Path, hardware: Any, device: Any = None, **options: Any) -> Any:
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


@pytest.mark.parametrize(("overlap", "mixed"), mostly(["off", "backward"], [None, BF16]))
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
def test_a_streamed_update_moves_its_roles_once_each_way_and_a_copy_is_fetched_once_at_most(
    home_copies: bool, tmp_path: Path
) -> None:
    limits = room(BF16, home_copies=home_copies)
    managed, optimizer = trained(4, tmp_path, SLOW_HOST, limits=limits, mixed_precision=BF16)
    before, known = crossed(managed), len(testing.of(managed).transfers())
    train(managed, optimizer, 1)
    after = crossed(managed)
    pages = sum(chunk.elements for chunk in testing.of(managed).chunks())
    copies = [nbytes for _, block, nbytes in testing.of(managed).transfers()[known:] if block >= 0]
    assert len(copies) <= len(testing.of(managed).chunks())  # none is fetched for the update, nor twice behind it
    assert after["host_to_device"] - before["host_to_device"] == 16 * pages + sum(copies)
    gradients = weight_bytes(managed)
    home = (14 if home_copies else 12) * pages
    assert after["device_to_host"] - before["device_to_host"] == gradients + home


# ---- who goes there ----------------------------------------------------------------------------------------------


def test_the_part_that_is_streamed_makes_the_slowest_as_fast_as_it_can_be(tmp_path: Path) -> None:
    """Of a parameter the host updates 28 bytes while 4 of its gradient go down and 4 of its copy up, or 16 go each way:
    with cores of 7 and a link of 8 bytes a second each way, 28 h / 7 = (4 h + 16 s) / 8, so s = 7/11."""
    managed, optimizer = trained(4, tmp_path, BALANCED)
    before = updated(managed)
    train(managed, optimizer, 1)
    step = {way: nbytes - before[way] for way, nbytes in updated(managed).items()}
    largest = max(4 * chunk.elements for chunk in testing.of(managed).chunks())
    assert abs(step["streamed"] - 7 / 11 * weight_bytes(managed)) <= largest
    assert step["streamed"] + step["host"] == weight_bytes(managed)
    share = next(iter(optimizer._steppers.values()))._places.share
    before, share._home_bytes = share.chosen, -1
    train(managed, optimizer, 1)
    assert share._home_bytes != -1
    assert share.chosen == before  # what streaming sends home is no gradient


@pytest.mark.parametrize("reason", ["no profile", "a fast host", "no slots", "NVMe", "another rule"])
def test_nothing_is_streamed_where_it_would_not_pay_or_cannot_be(reason: str, tmp_path: Path) -> None:
    hardware = {"no profile": None, "a fast host": FAST_HOST}.get(reason, SLOW_HOST)
    limits = room(slots=0.9) if reason == "no slots" else room()
    options: dict[str, Any] = {"moments": torch.bfloat16} if reason == "another rule" else {}
    if reason == "NVMe":
        limits = room(host=20 * CHUNK, nvme="64MiB", nvme_dir=tmp_path)
    managed, _ = trained(5, tmp_path, hardware, limits=limits, **options)
    assert "streamed" not in updated(managed)
    if reason != "no slots":  # what was taken for slots is homes' now, or nobody's
        inside = testing.of(managed)
        moved = [sum(chunk.home_bytes.values()) for chunk in inside.chunks() if chunk.moved]
        assert inside.memory().moved_bytes == sum(moved)


def test_idle_memory_is_filled_with_homes_beside_the_slots(tmp_path: Path) -> None:
    managed, _ = trained(5, tmp_path, SLOW_HOST, limits=room(slots=3))
    chunks = testing.of(managed).chunks()
    assert any(chunk.moved for chunk in chunks)
    last = updated(managed)
    assert last["resident"] > 0
    assert last["streamed"] > 0
    homes = [nbytes for chunk in chunks if not chunk.moved for nbytes in chunk.home_bytes.values()]
    assert testing.of(managed).memory().idle_bytes < 4 * max(homes)


def test_a_chunk_of_which_a_parameter_has_no_gradient_is_updated_on_the_host(tmp_path: Path) -> None:
    managed, optimizer = trained(4, tmp_path, SLOW_HOST)
    before = updated(managed)
    managed(*token_batches(1)[0]).backward()
    without = managed.blocks[0].up.bias
    without.grad = None
    optimizer.step()
    names = testing.of(managed).chunks()[testing.of(managed).chunk_of(without)].parameters
    rest = sum(managed.get_parameter(name).nbytes for name in names) - without.nbytes
    assert rest > 0
    assert updated(managed)["host"] - before["host"] == rest


def test_some_parameters_of_a_chunk_alone_are_updated_on_the_host(tmp_path: Path) -> None:
    plain, managed = pair(build, room(), tmp_path, hardware=SLOW_HOST)
    frozen = "blocks.0.up.bias"
    for module in (plain, managed):
        module.get_parameter(frozen).requires_grad_(False)
    train_both(plain, managed, token_batches(5), Recipe(steps=5))
    names = testing.of(managed).chunks()[testing.of(managed).chunk_of(frozen)].parameters
    assert len(names) > 1
    sizes = sum(managed.get_parameter(name).nbytes for name in names)
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
    deep = partial(Tower, width=WIDTH, depth=4)
    plain, managed = pair(deep, limits, tmp_path, mixed_precision=mixed, hardware=SLOW_HOST)
    optimizers = train_both(plain, managed, token_batches(4), Recipe(steps=4, mixed=mixed))
    assert updated(managed)["streamed"] > 0
    seen = testing.of(managed).memory().moved_bytes
    recipe = Recipe(steps=2, mixed=mixed)
    train_both(plain, managed, token_batches(2, rows=24), recipe, optimizers=optimizers)
    assert testing.of(managed).memory().moved_bytes < seen
    device = hetmem.report(managed).to_dict()["tiers"]["device"]
    assert device["peak_bytes"] <= device["capacity_bytes"]


def test_slots_that_are_asked_back_within_a_backward_leave_their_updates_to_the_host(tmp_path: Path) -> None:
    """Links are so slow that some wait for a slot then."""
    device = hetmem.SimDevice(host_to_device="20MB", device_to_host="20MB")
    plain, managed = pair(build, room(), tmp_path, hardware=SLOW_HOST, device=device)
    optimizers = adamws(plain, managed, overlap="backward")
    train_both(plain, managed, token_batches(4), Recipe(steps=4), optimizers=optimizers)
    hook = managed.blocks[1].norm.register_full_backward_hook(lambda *_: testing.of(managed).make_room())
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
    """Makes calls at `point` fail: all from the `first` on, `times` of them, each when `told` is set."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, point: str, first: int, times: int, told: threading.Event | None = None
    ) -> None:
        owner, name = testing.place_of(point)
        self.seen, original = 0, getattr(owner, name)

        def call(work: Any) -> None:
            self.seen += 1
            if first <= self.seen < first + times:
                assert told is None or told.wait(60)
                raise RuntimeError("the link has failed")
            original(work)

        monkeypatch.setattr(owner, name, call)


@pytest.mark.parametrize("device", [hetmem.SimDevice, EarlyDevice], ids=["threads", "streams"])
def test_a_chunk_that_did_not_get_to_the_device_is_as_it_was_and_the_step_can_be_tried_again(
    device: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, found = trained(4, tmp_path, None), trained(4, tmp_path, SLOW_HOST, device=device())
    old = {name: value.clone() for name, value in found[0].state_dict().items()}
    train(*expected, 1)
    Failing(monkeypatch, "states to the device", 3, 1)
    with pytest.raises(RuntimeError, match="the link has failed"):
        train(*found, 1)
    new = expected[0].state_dict()
    for chunk in testing.of(found[0]).chunks():
        names = chunk.parameters
        now = {name: found[0].get_parameter(name) for name in names}
        assert any(all(same_bits(now[name], of[name]) for name in names) for of in (old, new))
    assert not all(same_bits(value, new[name]) for name, value in found[0].state_dict().items())
    found[1].step()
    assert_alike(expected, found)


def test_what_did_not_get_home_is_sent_once_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, found = trained(5, tmp_path, None), trained(4, tmp_path, SLOW_HOST)
    failing = Failing(monkeypatch, "states home", 2, 1)
    for batch in token_batches(5)[4:]:
        found[0](*batch).backward()
        found[1].step()
    assert failing.seen == 1 + len(testing.of(found[0]).chunks())
    assert_alike(expected, found)
