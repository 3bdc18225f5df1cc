"""When a GPU's allocator refuses memory: who holds what is said, and chunks leave more room from then on."""

from __future__ import annotations

import gc
import logging
import re
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hetmem
from tests.engine.harness import (
    Recipe,
    Tower,
    assert_same,
    assert_same_grads,
    manage,
    pair,
    token_batches,
    train_both,
)
from tests.engine.lazy_device import host_slots
from tests.memory.fake_cuda import CpuCuda, FakeCuda, cuda
from tests.memory.tested import DevicePool

__all__ = ["cuda"]  # a fixture

KIB = 1 << 10


class Refuses(torch.autograd.Function):
    """Does nothing, in backward after asking for memory that may not be there."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ask: Callable[[], None]) -> torch.Tensor:
        ctx.ask = ask
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        ctx.ask()
        return grad, None


class Greedy(Tower):
    """Asks for memory in the middle of its backward."""

    ask: Callable[[], None] = staticmethod(lambda: None)

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = Refuses.apply(super().hidden(tokens), lambda: self.ask())
        return x


class Machine(CpuCuda):
    """Its allocator has handed out what pools hold and `other_bytes`."""

    other_bytes = 4 * KIB

    def __init__(self, fake: FakeCuda) -> None:
        super().__init__()
        self.fake = fake
        self.pools: list[DevicePool] = []
        self.most = 0
        fake.peak = self.peak

    def pool(self, slot_bytes: int, slots: int) -> DevicePool:
        self.pools.append(DevicePool(slot_bytes, slots, self.torch_device, host_slots))
        return self.pools[-1]

    def held(self) -> int:
        return sum(pool.held_bytes() for pool in self.pools)

    def peak(self) -> int:
        return self.held() + self.other_bytes

    def refuse(self, nbytes: int) -> None:
        self.fake.allocated_bytes = self.held() + self.other_bytes
        self.fake.refuse(nbytes)


ROOM = hetmem.Budget(device="256KiB", host="8MiB")


@pytest.mark.parametrize("tied", [True, False])
def test_after_a_refusal_in_backward_chunks_leave_that_much_more_and_training_goes_on(
    tied: bool, cuda: FakeCuda, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of tied weights no gradient has arrived yet, which begins what the trace knows as the backward."""
    monkeypatch.setattr("hetmem.placing.rehome.choose", lambda *_: [])  # homes are not in what this allocator counts
    device = Machine(cuda)
    model = partial(Greedy, depth=3, tied=tied)
    plain, managed = pair(model, ROOM, tmp_path, chunk_bytes="16KiB", device=device, sanitize=False)
    batches = token_batches(6)
    left, right = train_both(plain, managed, batches)
    before = device.held()
    managed.ask = partial(device.refuse, 40 * KIB)
    with pytest.raises(torch.OutOfMemoryError), caplog.at_level(logging.ERROR, "hetmem"):
        managed(*batches[0]).backward()
    (said,) = caplog.messages
    where = r"a backward after moment \d+ of the forward" if tied else r"moment \d+ of the backward"
    assert re.match(rf"No room for an allocation of 40.00 KiB \({where}\): ", said), said
    assert "activations and other tensors take 4.00 KiB" in said and "of 256.00 KiB, the device budget" in said
    assert said.endswith("From now on chunks leave 40.00 KiB more: the next step may have room")
    managed.ask = lambda: None
    for module in (plain, managed):
        module.zero_grad()
    train_both(plain, managed, batches, Recipe(steps=5), optimizers=(left, right))
    assert before == (7 if tied else 8) * 16 * KIB and device.held() == before - 48 * KIB


def test_room_that_chunks_need_at_once_is_not_left_free_whatever_was_refused(
    cuda: FakeCuda, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    device = Machine(cuda)
    plain, managed = pair(partial(Greedy, depth=3), ROOM, tmp_path, chunk_bytes="16KiB", device=device, sanitize=False)
    managed.ask = partial(device.refuse, 1 << 40)
    with pytest.raises(torch.OutOfMemoryError), caplog.at_level(logging.ERROR, "hetmem"):
        managed(*token_batches(1)[0]).backward()
    assert "raise Budget(device=…): this moment needs 1.00 TiB" in caplog.messages[0]  # with what was refused
    managed.ask = lambda: None
    managed.zero_grad()
    train_both(plain, managed, token_batches(6))


def test_a_refusal_in_a_forward_is_in_the_error_s_own_words_once_evicting_did_not_help(
    cuda: FakeCuda, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    device, refusals = Machine(cuda), [8 * KIB]

    def short(x: torch.Tensor) -> torch.Tensor:
        if torch.overrides.has_torch_function_unary(x):
            result: torch.Tensor = torch.overrides.handle_torch_function(short, (x,), x)
            return result
        if refusals:
            device.refuse(refusals.pop())
        return x * 2

    class Short(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tower = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return short(self.tower(x))

    managed = manage(Short(), ROOM, tmp_path, chunk_bytes="16KiB", device=device, sanitize=False)
    x = torch.ones(2, 64)
    expected = managed(x)
    assert refusals == []
    refusals.extend([8 * KIB, 24 * KIB])
    with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 8192 bytes\nNo room for an alloc"):
        managed(x)
    assert torch.equal(managed(x), expected)
    assert caplog.messages == []


def test_what_was_evicted_for_an_operator_is_not_taken_for_memory_of_the_model(cuda: FakeCuda, tmp_path: Path) -> None:
    """Evicting frees what the allocator's peak still counts; it must not look as if the model had needed it."""
    device = Machine(cuda)
    peaks = [0]

    def peak() -> int:
        peaks[0] = max(peaks[0], device.held() + device.other_bytes)
        return peaks[0]

    def reset(_: Any = None) -> None:
        peaks[0] = device.held() + device.other_bytes

    cuda.peak, cuda.reset_peak = peak, reset
    managed = manage(Tower(), ROOM, tmp_path, chunk_bytes="16KiB", device=device, sanitize=False)
    for batch in token_batches(3):
        managed(*batch).backward()
    runtime = hetmem.intercept.registry.of_module(managed).runtime
    assert runtime.room._most_non_model == 4 * KIB
    device.other_bytes = 20 * KIB
    peak()
    device.other_bytes = 4 * KIB
    runtime.uses.out_of_memory()
    managed(*token_batches(1)[0]).backward()
    assert runtime.room._most_non_model == 20 * KIB, "what the model needed before counts, and no more"


def interrupted() -> None:
    raise KeyboardInterrupt


def test_an_interrupt_while_chunks_give_way_takes_nothing_from_them_for_good(
    cuda: FakeCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, managed = pair(
        Tower,
        hetmem.Budget(device="256KiB", host="8MiB", device_chunks="64KiB"),
        tmp_path,
        chunk_bytes="16KiB",
        device=Machine(cuda),
        sanitize=False,
    )
    left, right = train_both(plain, managed, token_batches(3))
    runtime = hetmem.intercept.registry.of_module(managed).runtime
    with monkeypatch.context() as patched:
        patched.setattr(runtime.traffic.executor, "drain", interrupted)
        with pytest.raises(KeyboardInterrupt):
            runtime.uses.out_of_memory()
    train_both(plain, managed, token_batches(3), optimizers=(left, right))


def test_homes_that_move_until_an_interrupt_are_no_need_of_the_model(cuda: FakeCuda, tmp_path: Path) -> None:
    managed = manage(Tower(), ROOM, tmp_path, chunk_bytes="16KiB", device=Machine(cuda), sanitize=False)
    for batch in token_batches(3):
        managed(*batch).backward()
    runtime = hetmem.intercept.registry.of_module(managed).runtime
    peaks = [0]
    cuda.peak = lambda: peaks[0]
    cuda.reset_peak = lambda _=None: peaks.__setitem__(0, 0)
    before = runtime.room._most_non_model

    def move() -> None:
        with runtime.room.moving_homes():
            peaks[0] = 200 * KIB  # what they take, beside what is held
            interrupted()

    with pytest.raises(KeyboardInterrupt):
        move()
    managed(*token_batches(1)[0]).backward()
    assert runtime.room._most_non_model == before


class Short(DevicePool):
    """Has no memory for a slot as often as `refusals` says."""

    refusals = 0

    def holds_place(self, place: int) -> bool:
        return not self.refusals and super().holds_place(place)

    def prepare(self, place: int, span: int) -> None:
        if self.refusals:
            self.refusals -= 1
            raise torch.OutOfMemoryError("CUDA out of memory")
        super().prepare(place, span)


class ShortMachine(Machine):
    def pool(self, slot_bytes: int, slots: int) -> DevicePool:
        self.pools.append(Short(slot_bytes, slots, self.torch_device, host_slots))
        return self.pools[-1]


@pytest.mark.each
@pytest.mark.parametrize("sanitize", [True, False], ids=["sanitize", "fast"])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_chunk_without_memory_for_its_slot_gets_that_of_idle_chunks(
    cuda: FakeCuda, where: str, sanitize: bool, tmp_path: Path
) -> None:
    """In a backward too, as fetching is hetmem's own. A fetch that did not begin is not waited for."""
    device = ShortMachine(cuda)
    room = hetmem.Budget(device="256KiB", host="8MiB", device_chunks="64KiB")
    plain, managed = pair(
        partial(Greedy, depth=3), room, tmp_path, chunk_bytes="16KiB", device=device, sanitize=sanitize
    )
    pool = device.pools[0]
    (batch,) = token_batches(1)
    expected = plain(*batch)
    if where == "forward":
        pool.refusals = 1
    got = managed(*batch)
    if where == "backward":
        pool.refusals = 1
    got.backward()
    expected.backward()
    assert pool.refusals == 0
    assert_same(expected, got, "loss")
    assert_same_grads(plain, managed)


def test_a_chunk_that_finds_no_memory_at_all_fails_and_nothing_hangs(cuda: FakeCuda, tmp_path: Path) -> None:
    device = ShortMachine(cuda)
    plain, managed = pair(partial(Greedy, depth=3), ROOM, tmp_path, chunk_bytes="16KiB", device=device)
    pool = device.pools[0]
    pool.refusals = 1 << 30
    with pytest.raises(torch.OutOfMemoryError):
        managed(*token_batches(1)[0])
    pool.refusals = 0
    train_both(plain, managed, token_batches(6))


def test_a_model_that_is_gone_is_neither_told_nor_kept_and_others_are_told(cuda: FakeCuda, tmp_path: Path) -> None:
    device = Machine(cuda)
    runtimes = []
    for _ in range(2):
        managed = manage(Tower(), ROOM, tmp_path, chunk_bytes="16KiB", device=device, sanitize=False)
        runtimes.append(weakref.ref(hetmem.intercept.registry.of_module(managed).runtime))
    gc.collect()
    with pytest.raises(torch.OutOfMemoryError):
        device.refuse(8 * KIB)
    gone, alive = (runtime() for runtime in runtimes)
    assert gone is None and alive is not None and "an allocation of 8.00 KiB" in alive.room.shortage.last_message
    assert len(cuda.observers) == 1


def test_an_error_of_hetmem_s_own_does_not_take_the_place_of_torch_s(
    cuda: FakeCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some of torch's own code catches its error and goes on, with a smaller workspace say."""
    device = Machine(cuda)
    managed = manage(Tower(), ROOM, tmp_path, chunk_bytes="16KiB", device=device, sanitize=False)
    told: list[int] = []
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: told.append(1) or 1 / 0)
    with pytest.raises(torch.OutOfMemoryError):
        device.refuse(8 * KIB)
    assert told == [1] and managed is not None
