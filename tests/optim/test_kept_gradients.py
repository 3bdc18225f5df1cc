"""Streamed gradients of chunks whose states come to the device: they never leave it, with the bits of those that do."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from torch import nn

import hetmem
from hetmem.memory.chunk import Role
from hetmem.memory.transfer import Copier, Finished, Seen
from hetmem.optim import kept, streamed
from hetmem.optim.places import UpdatePlaces
from hetmem.plan.balance import Way
from hetmem.plan.hardware import Rate
from hetmem.plan.links import Link
from hetmem.plan.trace import Tier
from hetmem.runtime import registry
from hetmem.runtime.runtime import Runtime
from tests.optim.machines import SLOW_HOST
from tests.optim.test_streamed import MIXED, Failing
from tests.optim.test_streamed_gradients import train_apart
from tests.runtime.harness import (
    CHUNK,
    adamws,
    all_hetmem_threads_end,
    assert_same_states,
    assert_same_weights,
    loss_of,
    pair,
    same_bits,
    vector_batches,
)
from tests.runtime.lazy_device import EarlyDevice, EarlyStreams, LazyDevice
from tests.runtime.lazy_device import Event as Mark

ODD, EVEN = (63, 65), (64, 64)
"""Weights of 4095 elements, 15 of which the host updates, and of 4096. Each is a chunk."""
LAYERS = 8
OPTIONS = {"overlap": "backward", "gradients": "streamed"}


class Chain(nn.Module):
    """Layers used one after the other, there and back: gradients arrive chunk by chunk."""

    def __init__(self, shape: tuple[int, int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(*shape[:: 1 if at % 2 else -1], bias=False) for at in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(self.layers[0].weight.dtype)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def room(mixed: torch.dtype | None, chunks: int = LAYERS) -> hetmem.Budget:
    """The device may have a copy of each chunk and, for updates, two of them with all roles; no homes."""
    copies = chunks * CHUNK // (1 if mixed is None else 2)
    return hetmem.Budget(device="64MiB", host="64MiB", device_chunks=copies + int(2 * 4.5 * CHUNK))


def both(
    directory: Path,
    *,
    shape: tuple[int, int] = ODD,
    mixed: torch.dtype | None = None,
    device: Any = None,
    overlap: str = "backward",
    build: Callable[[], nn.Module] | None = None,
    chunks: int = LAYERS,
) -> tuple[nn.Module, nn.Module, Any]:
    """A plain model, the same managed, and their optimizers, trained until states are streamed."""
    device = device or hetmem.SimDevice()
    options = {"mixed_precision": mixed, "hardware": SLOW_HOST, "device": device}
    plain, managed = pair(build or (lambda: Chain(shape)), room(mixed, chunks), directory, **options)
    optimizers = adamws(plain, managed, overlap=overlap, gradients="streamed")
    train_apart(plain, managed, optimizers, batches(shape, 3), mixed)
    return plain, managed, optimizers


def batches(shape: tuple[int, int], steps: int) -> list[Any]:
    return vector_batches(steps, 4, shape[1])


def runtime_of(module: nn.Module) -> Runtime:
    return registry.of_module(module).runtime


def crossed(module: nn.Module) -> dict[Link, int]:
    return {link: use.bytes for link, use in runtime_of(module).traffic.engine.links().items()}


def updated(module: nn.Module) -> dict[Way, int]:
    return dict(runtime_of(module).statistics.updated_bytes)


def grads_on_device(module: nn.Module) -> list[int]:
    """The chunks whose gradients have homes there."""
    chunks = runtime_of(module).chunks
    return [c.spec.index for c in chunks if Role.GRAD in c.homes and c.homes[Role.GRAD].tier is Tier.DEVICE]


# ---- bits and bytes ----------------------------------------------------------------------------------------------


@pytest.mark.pairs
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
    stayed = registry.of_module(managed).gradients.stayed_bytes
    train_apart(plain, managed, optimizers, batches(shape, 3), mixed)
    weights = sum(parameter.nbytes for parameter in managed.parameters())
    assert updated(managed)[Way.STREAMED] - before[Way.STREAMED] == 3 * weights
    assert registry.of_module(managed).gradients.stayed_bytes - stayed == 3 * weights


@MIXED
@pytest.mark.parametrize("shape", [ODD, EVEN])
def test_nothing_of_a_gradient_crosses_the_link_but_what_the_host_updates(
    shape: tuple[int, int], mixed: torch.dtype | None, tmp_path: Path
) -> None:
    plain, managed, optimizers = both(tmp_path, shape=shape, mixed=mixed)
    runtime = runtime_of(managed)
    before = crossed(managed)
    runtime.events.transfers.clear()
    train_apart(plain, managed, optimizers, batches(shape, 1), mixed)
    optimizers[1].synchronize()
    copies = [transfer.nbytes for transfer in runtime.events.transfers if transfer.block >= 0]
    assert len(copies) <= 1  # one was still in use as its update began
    pages = LAYERS * 4096
    assert crossed(managed)[Link.HOST_TO_DEVICE] - before[Link.HOST_TO_DEVICE] == 12 * pages + sum(copies)
    tails = LAYERS * 15 * 4 if shape == ODD else 0
    home = 12 if mixed is None else 14
    assert crossed(managed)[Link.DEVICE_TO_HOST] - before[Link.DEVICE_TO_HOST] == home * pages + tails


def test_places_take_no_memory_that_slots_did_not_have(tmp_path: Path) -> None:
    _, managed, _ = both(tmp_path)
    runtime = runtime_of(managed)
    assert runtime.memory.moved_bytes == 2 * 4 * CHUNK
    device = hetmem.report(managed).to_dict()["tiers"]["device"]
    assert device["chunk_peak_bytes"] == LAYERS * CHUNK + 2 * 4 * CHUNK


def test_a_place_is_free_for_other_gradients_as_soon_as_the_kernel_has_read_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing that was updated gets home before the gradients of four chunks have arrived in two places."""
    plain, managed, optimizers = both(tmp_path, shape=EVEN)
    arrived, waited = Event(), []
    placed: list[Any] = []
    keep, send = kept.KeptGradients.keep, streamed._SendHome.__call__

    def keeping(places: Any, chunk: Any) -> Any:
        placed.append(chunk)
        if len(placed) == 4:
            arrived.set()
        return keep(places, chunk)

    def sending(work: Any) -> None:
        waited.append(arrived.wait(20))
        send(work)

    monkeypatch.setattr(kept.KeptGradients, "keep", keeping)
    monkeypatch.setattr(streamed._SendHome, "__call__", sending)
    train_apart(plain, managed, optimizers, batches(EVEN, 1))
    assert all(waited)
    assert len(placed) == LAYERS


def test_a_gradient_is_seen_until_its_update_has_read_it(tmp_path: Path) -> None:
    device = hetmem.SimDevice(host_to_device="5MB", device_to_host="5MB")
    plain, managed, optimizers = both(tmp_path, device=device)
    batch, memory = batches(ODD, 1)[0], runtime_of(managed).memory
    for module in (plain, managed):
        loss_of(module, batch).backward()
    left = {name: p.grad for name, p in managed.named_parameters() if p.grad is not None}
    assert 0 < len(left) == len(grads_on_device(managed))
    for name, gradient in left.items():
        assert memory.is_device_address(gradient.data_ptr())
        assert same_bits(gradient, plain.get_parameter(name).grad)
    for optimizer in optimizers:
        optimizer.step()
    assert all(parameter.grad is None for parameter in managed.parameters())
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
    nn.utils.clip_grad_norm_(managed.parameters(), 0.01)
    if late:
        optimizers[1].synchronize()
        assert not grads_on_device(managed)
    with pytest.raises(RuntimeError, match="changed after their update had begun"):
        optimizers[1].step()


def test_a_second_backward_of_a_step_is_refused_as_for_gradients_at_home(tmp_path: Path) -> None:
    """The model may be dropped then: see `tests.runtime.test_dropped`."""

    def refused() -> weakref.ref[nn.Module]:
        _, managed, _ = both(tmp_path)
        batch = batches(ODD, 1)[0]
        loss_of(managed, batch).backward()
        with pytest.raises(RuntimeError, match="arrived after its update had begun"):
            loss_of(managed, batch).backward()
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
    before = crossed(managed)[Link.DEVICE_TO_HOST]
    train_apart(plain, managed, optimizers, batches(EVEN, 2))
    pages = (LAYERS + 1) * 4096
    assert crossed(managed)[Link.DEVICE_TO_HOST] - before == 2 * (12 * pages + 4)


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
    before = crossed(managed)[Link.DEVICE_TO_HOST]
    weights = updated(managed)[Way.STREAMED]
    train_apart(plain, managed, optimizers, batches(EVEN, 1))
    assert updated(managed)[Way.STREAMED] - weights == 5 * CHUNK
    assert crossed(managed)[Link.DEVICE_TO_HOST] - before == (3 * 5 + 3) * CHUNK


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
    assert updated(managed)[Way.STREAMED] - before[Way.STREAMED] == 5 * CHUNK
    managed.seen = lambda _: managed.state_dict() and None
    train_apart(plain, managed, optimizers, batches(EVEN, 1))
    managed.seen = None
    assert updated(managed)[Way.STREAMED] - before[Way.STREAMED] == (5 + 2) * CHUNK
    assert updated(managed)[Way.HOST] - before[Way.HOST] == 3 * CHUNK


def test_updates_that_wait_for_a_place_hold_no_memory_at_home_that_others_wait_for(tmp_path: Path) -> None:
    """Ten chunks get all gradients while the places wait for their last ones, and there is memory for six of them."""
    plain, managed, optimizers = both(tmp_path, shape=EVEN, build=lambda: Nested(12), chunks=12)
    train_apart(plain, managed, optimizers, batches(EVEN, 2))
    assert not any(Role.GRAD in chunk.homes for chunk in runtime_of(managed).chunks)


def test_gradients_that_do_not_get_home_stay_where_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, managed, optimizers = both(tmp_path, shape=EVEN, build=Nested, chunks=5)
    places = next(iter(optimizers[1]._steppers.values()))._kept
    asked: list[int] = []

    def fails(target: torch.Tensor, source: torch.Tensor) -> None:
        raise RuntimeError("the link has failed")

    def ask(_: torch.Tensor) -> None:
        with monkeypatch.context() as patch:
            patch.setattr("hetmem.runtime.gradients._copy", fails)
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
        seen.append(runtime_of(managed).memory.is_home_address(gradient.data_ptr()))
        gradient.mul_(0.5)

    def halve(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)

    watched = managed.layers[3].weight
    looking = watched.register_post_accumulate_grad_hook(look)
    plain.layers[3].weight.register_post_accumulate_grad_hook(halve)
    before = crossed(managed)[Link.DEVICE_TO_HOST]
    train_apart(plain, managed, optimizers, batches(ODD, 1))
    assert seen == [True]
    sent = crossed(managed)[Link.DEVICE_TO_HOST] - before
    assert sent == 12 * LAYERS * 4096 + 15 * 4 * (LAYERS - 1) + watched.nbytes
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
    memory = runtime_of(managed).memory
    left = [p for p in managed.parameters() if p.grad is not None]
    assert left
    assert all(memory.is_home_address(p.grad.data_ptr()) for p in left)
    assert not grads_on_device(managed)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    assert_same_weights(plain, managed)
    train_apart(plain, managed, optimizers, steps[:2])
    assert registry.of_module(managed).gradients.stayed_bytes > 0


@MIXED
def test_slots_that_are_asked_back_within_a_backward_send_gradients_home_and_updates_to_the_host(
    mixed: torch.dtype | None, tmp_path: Path
) -> None:
    """Links are so slow that some gradients wait for a slot then."""
    device = hetmem.SimDevice(host_to_device="2MB", device_to_host="2MB")
    plain, managed, optimizers = both(tmp_path, device=device, mixed=mixed)
    runtime = runtime_of(managed)
    seen: list[list[int]] = []

    def ask_back(*_: Any) -> None:
        seen.append(grads_on_device(managed))
        runtime.give_way(1 << 30)
        assert not grads_on_device(managed)
        assert runtime.memory.moved_bytes == 0

    hook = managed.layers[2].register_full_backward_hook(ask_back)
    before = updated(managed)
    train_apart(plain, managed, optimizers, batches(ODD, 1), mixed)
    assert seen[0]
    hook.remove()
    after = updated(managed)
    assert after[Way.STREAMED] > before[Way.STREAMED]
    assert after[Way.HOST] > before[Way.HOST]
    train_apart(plain, managed, optimizers, batches(ODD, 3), mixed)
    assert updated(managed)[Way.STREAMED] > after[Way.STREAMED]


# ---- failures ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [streamed._Bring, kept.Tails], ids=["states", "tails"])
def test_a_step_whose_transfers_failed_is_tried_again_with_gradients_where_they_are(
    kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Links are so slow that the last one is under way as the step begins."""
    device = hetmem.SimDevice(host_to_device="5MB", device_to_host="5MB")
    plain, managed, optimizers = both(tmp_path, device=device)
    batch = batches(ODD, 1)[0]
    before = crossed(managed)[Link.DEVICE_TO_HOST]
    Failing(monkeypatch, kind, LAYERS, 1)
    loss_of(managed, batch).backward()
    with pytest.raises(RuntimeError, match="the link has failed"):
        optimizers[1].step()
    assert len(grads_on_device(managed)) == 1
    optimizers[1].step()
    assert not grads_on_device(managed)
    loss_of(plain, batch).backward()
    optimizers[0].step()
    assert_same_weights(plain, managed)
    assert_same_states(*optimizers)
    tails = 15 * 4 * (LAYERS + 1)
    assert crossed(managed)[Link.DEVICE_TO_HOST] - before <= 12 * LAYERS * 4096 + tails
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
            Failing(patch, streamed._Bring, 1, 1)
            with pytest.raises(RuntimeError, match="the link has failed"):
                optimizers[1].step()
    for optimizer in optimizers:
        optimizer.step()
    assert updated(managed)[Way.HOST] == before[Way.HOST]
    assert_same_weights(plain, managed)
    assert_same_states(*optimizers)


def test_a_step_whose_update_was_left_to_the_host_and_failed_there_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = hetmem.SimDevice(host_to_device="5MB", device_to_host="5MB")
    plain, managed, optimizers = both(tmp_path, device=device)
    batch, runtime = batches(ODD, 1)[0], runtime_of(managed)
    loss_of(managed, batch).backward()
    left = grads_on_device(managed)
    assert left

    def fails(*_: Any) -> Any:
        raise RuntimeError("no memory for a temporary")

    with monkeypatch.context() as patch:
        patch.setattr("hetmem.optim.adamw.AdamWRule.tasks", fails)
        runtime.give_way(1 << 30)
        with pytest.raises(RuntimeError, match="no memory for a temporary"):
            optimizers[1].step()
    shown = [p for p in managed.parameters() if p.grad is not None]
    assert shown
    assert all(runtime.memory.is_home_address(p.grad.data_ptr()) for p in shown)
    optimizers[1].step()
    loss_of(plain, batch).backward()
    optimizers[0].step()
    assert_same_weights(plain, managed)
    assert_same_states(*optimizers)


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

    def enqueue(self, link: Link, after: Sequence[Any], work: Callable[[], None]) -> tuple[Mark, Mark]:
        if isinstance(work, streamed._Bring):
            self.brought_after.append(max((event.number for event in after), default=0))
        return super().enqueue(link, after, work)


class MarkingDevice(EarlyDevice):
    def copier(self, seen: Seen, finished: Callable[[Finished], None]) -> Copier:
        made = super().copier(seen, finished)
        self.streams = made._streams = Marking()  # type: ignore[attr-defined]
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
    balanced = replace(
        SLOW_HOST,
        host=replace(SLOW_HOST.host, update_bytes_per_second=7e6),
        host_to_device=Rate(8e6),
        device_to_host=Rate(8e6),
        both_ways_bytes_per_second=100e6,
    )
    for gradients, chosen in (("streamed", 6), ("visible", 5)):
        _, managed = pair(lambda: Chain(ODD), room(None), tmp_path, hardware=balanced)
        optimizer = hetmem.AdamW(managed.parameters(), overlap="backward", gradients=gradients)
        for batch in batches(ODD, 4):
            loss_of(managed, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        share = next(iter(optimizer._steppers.values()))._places.share
        assert share is not None
        assert len(share.chosen) == chosen


def test_the_choice_made_again_counts_gradients_that_stayed_as_if_they_had_gone_home(tmp_path: Path) -> None:
    plain, managed, optimizers = both(tmp_path)
    share = next(iter(optimizers[1]._steppers.values()))._places.share
    seen: list[float] = []
    original = share._part
    share._part = lambda found, sent: seen.append(sent) or original(found, sent)
    share._home_bytes = -1
    train_apart(plain, managed, optimizers, batches(ODD, 1))
    assert seen == [sum(parameter.nbytes for parameter in managed.parameters())]


def test_gradients_of_which_users_see_any_are_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept_by: list[Any] = []
    original = UpdatePlaces.place_on_device

    def place(places: UpdatePlaces, chunk: Any) -> Any:
        kept_by.append(original(places, chunk))
        return kept_by[-1]

    monkeypatch.setattr(UpdatePlaces, "place_on_device", place)
    plain, managed = pair(lambda: Chain(ODD), room(None), tmp_path, hardware=SLOW_HOST)
    optimizers = adamws(plain, managed, overlap="backward")
    train_apart(plain, managed, optimizers, batches(ODD, 4))
    assert updated(managed)[Way.STREAMED] > 0
    assert not kept_by
