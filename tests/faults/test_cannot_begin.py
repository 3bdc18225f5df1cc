"""What cannot begin, or does not arrive, is told of like any transfer that failed: nobody waits for it for ever, and no
update is made with what it would have brought."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import hetmem
from hetmem import testing
from hetmem.errors import BudgetError
from hetmem.intercept import registry
from hetmem.memory.chunk import Role
from hetmem.schedule.trace import Tier
from tests.engine.harness import (
    BATCHES,
    Recipe,
    adamws,
    assert_same_states,
    assert_same_weights,
    loss_of,
    mlp,
    pair,
    same_bits,
    streamed,
    token_batches,
    train_both,
    vector_batches,
)
from tests.engine.lazy_device import LazyDevice
from tests.engine.test_share import build as share_build
from tests.engine.test_share import moved, room
from tests.pairs import some


def linked() -> hetmem.SimDevice:
    """Copies are made by threads of the links."""
    return hetmem.SimDevice(host_to_device="100MB", device_to_host="100MB")


class Once:
    """Raises `error` in the place of call number `at` from `arm` on, on the main thread if it is `main`."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, owner: type, name: str, error: Callable[[], Exception], *, main: bool
    ) -> None:
        self.at, self.calls, self.raised = -1, 0, False
        original = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if not main or threading.current_thread() is threading.main_thread():
                self.calls += 1
                if self.calls == self.at:
                    self.raised = True
                    raise error()
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    def arm(self, at: int) -> None:
        self.at, self.calls, self.raised = at, 0, False


def no_thread() -> RuntimeError:
    return RuntimeError("can't start new thread")


def lacks_a_thread(call: Callable[[], object]) -> bool:
    """Whether `call` raises that no thread can be started; another error is one."""
    try:
        call()
    except RuntimeError as error:
        if not str(error).startswith("can't start new thread"):
            raise
        return True
    return False


@streamed
def test_a_transfer_for_which_no_thread_can_be_started_is_an_error_of_the_step_and_not_waited_for(
    placement: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    once = Once(monkeypatch, ThreadPoolExecutor, "submit", no_thread, main=True)
    plain, managed = pair(mlp, placement, tmp_path, device=linked())
    left, right = adamws(plain, managed)
    steps, at = 0, 0
    while not steps or steps <= 2 or once.raised:
        batch, steps = BATCHES[steps % len(BATCHES)], steps + 1
        loss_of(plain, batch).backward()
        left.step()
        at += steps > 2
        once.arm(at)
        if lacks_a_thread(lambda: loss_of(managed, batch).backward()):  # noqa: B023 - called here
            right.zero_grad()
            loss_of(managed, batch).backward()
        if lacks_a_thread(right.step):
            right.step()
        if lacks_a_thread(right.synchronize):  # what was to be written or read ahead is asked for again
            right.synchronize()
        assert_same_weights(plain, managed, f"call {at}")
        assert_same_states(left, right, f"call {at}")
        left.zero_grad()
        right.zero_grad()
        lacks_a_thread(testing.of(managed).wait_idle)  # it was to fetch ahead for the next step
        assert not testing.of(managed).busy()
    assert at > 3


def test_copies_that_were_asked_for_with_one_that_cannot_begin_are_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, managed = pair(mlp, "host", tmp_path, device=LazyDevice())
    traffic = registry.of_module(managed).runtime.traffic
    blocks = [chunk.operand_block for chunk in registry.of_module(managed).runtime.chunks][:2]
    once = Once(monkeypatch, *testing.place_of("take a slot"), lambda: RuntimeError("refused"), main=False)
    commands = [command for block in blocks for command in traffic.residency.prefetch([block], Tier.DEVICE)]
    assert len(commands) == 2
    once.arm(1)
    with pytest.raises(RuntimeError, match=r"^refused$"):
        traffic.execute(commands)
    assert not traffic.executor._commands, "they are waited for, and would never come"
    traffic.executor.drain()
    assert [traffic.residency.state(block, Tier.DEVICE) is None for block in blocks] == [True, False]


@pytest.mark.each
@pytest.mark.parametrize("overlap", ["backward", "forward"])
@pytest.mark.parametrize("at", range(1, 7))
@streamed
def test_no_update_is_made_with_a_gradient_that_did_not_arrive(
    placement: str, at: int, overlap: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The update was queued as the last gradient of its chunk was sent, and made although that had failed."""
    plain, managed = pair(mlp, placement, tmp_path, device=linked())
    left, right = adamws(plain, managed, overlap=overlap)
    for batch in BATCHES[:2]:
        for module, optimizer in ((plain, left), (managed, right)):
            loss_of(module, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    old = [parameter.detach().clone() for parameter in plain.parameters()]
    loss_of(plain, BATCHES[2]).backward()
    left.step()
    once = Once(monkeypatch, hetmem.SimDevice, "gradient_out", lambda: torch.OutOfMemoryError("refused"), main=False)
    once.arm(at)
    with pytest.raises(torch.OutOfMemoryError):
        loss_of(managed, BATCHES[2]).backward()
    right.forget_step()
    right.zero_grad()
    for (name, now), before, new in zip(managed.named_parameters(), old, plain.parameters(), strict=True):
        assert same_bits(now, before) or same_bits(now, new), f"{name} is neither before nor after its update"
    for batch in BATCHES:
        loss_of(managed, batch).backward()
        right.step()
        right.zero_grad()
    hetmem.release(managed)


def test_a_read_that_the_store_refuses_is_reported_like_one_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was waited for: nobody else knew of it."""
    _, managed = pair(mlp, "nvme", tmp_path)
    traffic = registry.of_module(managed).runtime.traffic
    once = Once(monkeypatch, *testing.place_of("read from NVMe"), no_thread, main=False)
    once.arm(1)
    chunk = registry.of_module(managed).runtime.chunks[0]
    traffic.ask_role(chunk, Role.PARAM, load=True)
    with pytest.raises(RuntimeError, match="new thread"):
        traffic.wait_for_one()
    assert not traffic.executor.busy()
    traffic.unask_role(chunk, Role.PARAM)
    assert torch.equal(traffic.open_role(chunk, Role.PARAM, load=True), chunk.flat(Role.PARAM))
    traffic.close_role(chunk, Role.PARAM, dirty=False)


def test_a_role_for_which_host_memory_has_no_room_is_not_left_on_the_device_either(tmp_path: Path) -> None:
    plain, managed = pair(share_build, room("host", None, tmp_path), tmp_path)
    train_both(plain, managed, token_batches(4), Recipe(steps=4), optimizers=adamws(plain, managed))
    memory = registry.of_module(managed).runtime.memory
    assert moved(managed)
    taken, role = memory.device_home_bytes, Role("another")
    memory.host_pool.reserve(memory.host_pool.free_bytes)
    with pytest.raises(BudgetError):
        memory.reserve(memory.chunks, role)
    assert memory.device_home_bytes == taken
    assert not any(role in chunk.homes for chunk in memory.chunks)


@pytest.mark.each
@pytest.mark.parametrize(("models", "call"), some([(1, 3), (1, 0), (2, 13), (1, 7), (2, 3), (2, 15)], 2))
@pytest.mark.parametrize("overlap", ["backward", "forward"])
def test_a_step_that_cannot_begin_all_of_its_updates_is_repeated_with_its_gradients(
    overlap: str, models: int, call: int, tmp_path: Path
) -> None:
    """Updates that trail use gradients up, and those that were never begun have used none."""
    pairs = [pair(mlp, "nvme", tmp_path) for _ in range(models)]
    plain, managed = (torch.nn.ModuleList(modules) for modules in zip(*pairs, strict=True))
    left, right = adamws(plain, managed, overlap=overlap, max_grad_norm=1e9)
    error = partial(torch.OutOfMemoryError, "for what is to be brought")

    for number, batch in enumerate(vector_batches(4, 8, 64)):
        for modules in (plain, managed):
            torch.stack([loss_of(module, batch) for module in modules]).sum().backward()
        left.step()
        if number == 2:
            with testing.failing("ask for a role", error, call), pytest.raises(torch.OutOfMemoryError):
                right.step()
        right.step()
        for optimizer in (left, right):
            optimizer.zero_grad()
    for expected, found in pairs:
        assert_same_weights(expected, found)
    assert_same_states(left, right)
