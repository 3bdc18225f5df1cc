"""Streamed gradients of chunks whose states come to the device: they never leave it, with the bits of those that do."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from torch import nn

import hetmem
from hetmem import testing
from tests.engine.harness import (
    CHUNK,
    adamws,
    all_hetmem_threads_end,
    assert_same_states,
    assert_same_weights,
    loss_of,
    pair,
    same_bits,
)
from tests.engine.lazy_device import EarlyDevice, EarlyStreams, LazyDevice
from tests.engine.lazy_device import Event as Mark
from tests.optim.keeping import (
    EVEN,
    LAYERS,
    ODD,
    Chain,
    batches,
    both,
    crossed,
    grads_on_device,
    room,
    updated,
)
from tests.optim.machines import BALANCED, SLOW_HOST
from tests.optim.stories import with_gradients
from tests.optim.test_streamed import MIXED
from tests.optim.test_streamed_gradients import train_apart

# ---- bits and bytes ----------------------------------------------------------------------------------------------


@pytest.mark.each
@MIXED
@pytest.mark.parametrize("overlap", ["backward", "forward"])
@pytest.mark.parametrize("shape", [ODD, EVEN])
@pytest.mark.parametrize(
    "device",
    [
        hetmem.SimDevice,
        LazyDevice,
        EarlyDevice,
        lambda: hetmem.SimDevice(host_to_device="20MB", device_to_host="20MB"),
    ],
    ids=["threads", "late", "early", "slow"],
)
def test_gradients_that_stay_give_the_bits_of_plain_torch(
    device: Any, shape: tuple[int, int], overlap: str, mixed: torch.dtype | None, tmp_path: Path
) -> None:
    plain, managed, optimizers = both(tmp_path, shape=shape, mixed=mixed, device=device(), overlap=overlap)
    before = updated(managed)
    stayed = testing.of(managed).stayed_gradient_bytes()
    train_apart(plain, managed, optimizers, batches(shape, 3), mixed)
    weights = sum(parameter.nbytes for parameter in managed.parameters())
    assert updated(managed)["streamed"] - before["streamed"] == 3 * weights
    arrived = weights if mixed is None else weights // 2
    assert testing.of(managed).stayed_gradient_bytes() - stayed == 3 * arrived


@pytest.mark.each
@MIXED
@pytest.mark.parametrize("shape", [ODD, EVEN])
def test_nothing_of_a_gradient_crosses_the_link(
    shape: tuple[int, int], mixed: torch.dtype | None, tmp_path: Path
) -> None:
    plain, managed, optimizers = both(tmp_path, shape=shape, mixed=mixed)
    before, known = crossed(managed), len(testing.of(managed).transfers())
    train_apart(plain, managed, optimizers, batches(shape, 1), mixed)
    optimizers[1].synchronize()
    copies = [nbytes for _, block, nbytes in testing.of(managed).transfers()[known:] if block >= 0]
    assert len(copies) <= len(testing.of(managed).chunks())  # in 16 bits only those still in use as their update began
    pages = LAYERS * 4096
    assert crossed(managed)["host_to_device"] - before["host_to_device"] == 12 * pages + sum(copies)
    home = 12 if mixed is None else 14
    assert crossed(managed)["device_to_host"] - before["device_to_host"] == home * pages


def test_places_take_no_memory_that_slots_did_not_have(tmp_path: Path) -> None:
    _, managed, _ = both(tmp_path)
    assert testing.of(managed).memory().moved_bytes == 2 * 4 * CHUNK
    device = hetmem.report(managed).to_dict()["tiers"]["device"]
    assert device["chunk_peak_bytes"] == LAYERS * CHUNK + 2 * 4 * CHUNK


def test_a_place_is_free_for_other_gradients_as_soon_as_the_kernel_has_read_it(
    tmp_path: Path,
) -> None:
    """Nothing that was updated gets home before the gradients of four chunks have arrived in two places."""
    plain, managed, optimizers = both(tmp_path, shape=EVEN)
    arrived, waited = Event(), []
    placed: list[Any] = []

    def keeping(keep: Any, places: Any, chunk: Any) -> Any:
        placed.append(chunk)
        if len(placed) == 4:
            arrived.set()
        return keep(places, chunk)

    def sending(send: Any, work: Any) -> None:
        waited.append(arrived.wait(20))
        send(work)

    with testing.around("keep a gradient", keeping), testing.around("states home", sending):
        train_apart(plain, managed, optimizers, batches(EVEN, 1))
        optimizers[1].synchronize()
    assert all(waited)
    assert len(placed) == LAYERS


def test_a_gradient_is_seen_until_its_update_has_read_it(tmp_path: Path) -> None:
    device = hetmem.SimDevice(host_to_device="5MB", device_to_host="5MB")
    plain, managed, optimizers = both(tmp_path, device=device)
    batch = batches(ODD, 1)[0]
    for module in (plain, managed):
        loss_of(module, batch).backward()
    left = with_gradients(managed)
    assert 0 < len(left) == len(grads_on_device(managed))
    for expected, parameter in zip(plain.parameters(), managed.parameters(), strict=True):
        if any(parameter is one for one in left):
            assert testing.of(managed).place_of(parameter.grad) == "device"
            assert same_bits(parameter.grad, expected.grad)
    for optimizer in optimizers:
        optimizer.step()
    assert not with_gradients(managed)
    assert not grads_on_device(managed)
    assert_same_weights(plain, managed)
    assert_same_states(*optimizers)


@pytest.mark.parametrize("late", [False, True])
def test_a_gradient_that_is_written_to_before_the_step_is_refused_even_if_it_is_read_meanwhile(
    late: bool, tmp_path: Path
) -> None:
    device = hetmem.SimDevice(host_to_device="5MB", device_to_host="5MB")
    _, managed, optimizers = both(tmp_path, device=device)
    loss_of(managed, batches(ODD, 1)[0]).backward()
    nn.utils.clip_grad_norm_(with_gradients(managed), 0.01)
    if late:
        optimizers[1].synchronize()
        assert not grads_on_device(managed)
    with pytest.raises(RuntimeError, match="changed after their update had begun"):
        optimizers[1].step()


def test_a_second_backward_of_a_step_is_refused_as_for_gradients_at_home(tmp_path: Path) -> None:
    """The model may be dropped then: see `tests.intercept.test_dropped`."""

    def refused() -> weakref.ref[nn.Module]:
        _, managed, _ = both(tmp_path)
        batch = batches(ODD, 1)[0]
        first, second = loss_of(managed, batch), loss_of(managed, batch)
        first.backward()
        with pytest.raises(RuntimeError, match=r"modified by an inplace|arrived after its update had begun"):
            second.backward()
        return weakref.ref(managed)

    model = refused()
    gc.collect()
    assert model() is None
    assert all_hetmem_threads_end()


def test_gradients_of_numbers_stay_too(tmp_path: Path) -> None:
    class Scaled(Chain):
        def __init__(self) -> None:
            super().__init__(EVEN)
            self.scale = nn.Parameter(torch.tensor(0.5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * self.scale

    plain, managed, optimizers = both(tmp_path, shape=EVEN, build=Scaled, chunks=LAYERS + 1)
    before = crossed(managed)["device_to_host"]
    train_apart(plain, managed, optimizers, batches(EVEN, 2))
    pages = (LAYERS + 1) * 4096
    assert crossed(managed)["device_to_host"] - before == 2 * 12 * pages


# ---- order -------------------------------------------------------------------------------------------------------


class Marking(EarlyStreams):
    """Numbers marks, and notes down which ones each transfer comes after."""

    def __init__(self) -> None:
        super().__init__()
        self.marks = 0
        self.brought_after: list[int] = []

    def mark(self) -> Mark:
        event = super().mark()
        self.marks += 1
        event.number = self.marks
        return event

    def enqueue(self, link: Any, after: Sequence[Any], work: Callable[[], None]) -> Mark:
        if isinstance(work, testing.place_of("states to the device")[0]):
            self.brought_after.append(max((event.number for event in after), default=0))
        return super().enqueue(link, after, work)


class MarkingDevice(EarlyDevice):
    def copier(self, seen: Any, finished: Any) -> Any:
        made = super().copier(seen, finished)
        self.streams = made._streams = Marking()
        return made


def test_an_update_comes_behind_the_compute_that_wrote_its_gradients(tmp_path: Path) -> None:
    device = MarkingDevice()
    plain, managed, optimizers = both(tmp_path, device=device)
    written: list[int] = []
    original = device.gradient_out
    streams: Any = device.streams

    def gradient_out(target: torch.Tensor, arrived: torch.Tensor, *, add: bool) -> None:
        original(target, arrived, add=add)
        written.append(streams.marks)

    device.gradient_out = gradient_out  # type: ignore[method-assign]
    streams.brought_after.clear()
    train_apart(plain, managed, optimizers, batches(ODD, 1))
    assert len(written) == len(streams.brought_after) == LAYERS
    assert all(mark > before for mark, before in zip(streams.brought_after, written, strict=True))


# ---- the choice --------------------------------------------------------------------------------------------------


def test_the_part_that_is_streamed_is_larger_where_gradients_stay(tmp_path: Path) -> None:
    """Of a parameter the host updates 28 bytes while 4 of its gradient go down and 4 of its copy up, or 12 go each way:
    with cores of 7 and a link of 8 bytes a second each way, 28 h / 7 = (4 h + 12 s) / 8, so s = 7/10, and not 7/11."""
    for gradients, chosen in (("streamed", 6), ("visible", 5)):
        _, managed = pair(lambda: Chain(ODD), room(None), tmp_path, hardware=BALANCED)
        optimizer = hetmem.AdamW(managed.parameters(), overlap="backward", gradients=gradients)
        for batch in batches(ODD, 4):
            loss_of(managed, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        share = next(iter(optimizer._steppers.values()))._places.share
        assert share is not None
        assert len(share.chosen) == chosen


def test_the_choice_made_again_counts_gradients_that_stayed_as_if_they_had_gone_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, managed, optimizers = both(tmp_path)
    share = next(iter(optimizers[1]._steppers.values()))._places.share
    seen: list[float] = []
    monkeypatch.setattr(
        "hetmem.schedule.update_split.part_sent", lambda hardware, found, sent: seen.append(sent) or 0.0
    )
    share._home_bytes = -1
    train_apart(plain, managed, optimizers, batches(ODD, 1))
    assert seen == [sum(parameter.nbytes for parameter in managed.parameters())]


def test_gradients_of_which_users_see_any_are_not_kept(tmp_path: Path) -> None:
    kept_by: list[Any] = []

    def place(original: Any, *args: Any) -> Any:
        kept_by.append(original(*args))
        return kept_by[-1]

    plain, managed = pair(lambda: Chain(ODD), room(None), tmp_path, hardware=SLOW_HOST)
    optimizers = adamws(plain, managed, overlap="backward")
    with testing.around("place of a gradient", place):
        train_apart(plain, managed, optimizers, batches(ODD, 4))
    assert updated(managed)["streamed"] > 0
    assert not kept_by
