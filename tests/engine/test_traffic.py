"""The runtime's traffic: who is refused a copy, or fails, leaves no use of one behind and gives up none of another's;
what is being written or replaced is fetched by nobody."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hetmem
from hetmem.engine.runtime import Runtime
from hetmem.errors import CapacityError
from hetmem.intercept import registry
from hetmem.memory.chunk import Chunk, Role
from hetmem.schedule.blocks import CopyState, Drop
from hetmem.schedule.residency import Residency
from hetmem.schedule.trace import DEVICE, HOST, NVME, Schedule, Tier
from tests.engine.harness import (
    BATCHES,
    WIDTH,
    adamws,
    assert_same_weights,
    loss_of,
    manage,
    mlp,
    pair,
    train_both,
)


def runtime_of(module: nn.Module) -> Runtime:
    return registry.of_module(module).runtime


def block_of(chunk: Chunk, role: Role = Role.PARAM) -> int:
    block = chunk.homes[role].block
    assert block is not None
    return block


def in_use(module: nn.Module) -> list[str]:
    """What copies are used on any tier."""
    runtime = runtime_of(module)
    assert not runtime.uses.holds_copies()
    residency = runtime.traffic.residency
    tiers = (DEVICE, HOST)
    return [residency.blocks[b].label for tier in tiers for b in residency.resident(tier) if residency.uses(b, tier)]


@contextmanager
def fails_once(owner: Any, name: str, at: int = 0) -> Iterator[None]:
    """The call number `at` of `owner.name` raises OSError, and does nothing."""
    original: Callable[..., Any] = getattr(owner, name)
    calls = 0

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == at + 1:
            raise OSError("it has failed")
        return original(*args, **kwargs)

    setattr(owner, name, call)
    try:
        yield
    finally:
        setattr(owner, name, original)
    assert calls > at, "nothing has failed"


class Counts(nn.Module):
    """Writes to three of its weights in one operator."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale, self.shift = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            torch._foreach_add_([self.layer.weight, self.scale.weight, self.shift.weight], 1.0)
        y: torch.Tensor = self.shift(self.scale(self.layer(x)))
        return y


@pytest.mark.parametrize("which", range(3))
def test_a_write_that_does_not_get_home_leaves_no_copy_in_use_and_the_others_at_home(
    which: int, tmp_path: Path
) -> None:
    managed = manage(Counts(), "host", tmp_path)
    managed(*BATCHES[0])
    weights = [managed.layer.weight, managed.scale.weight, managed.shift.weight]
    before = [weight.detach().clone() for weight in weights]
    with fails_once(runtime_of(managed).writes, "by_operator", which), pytest.raises(OSError, match="has failed"):
        managed(*BATCHES[0])
    assert not in_use(managed)
    there = [not torch.equal(weight, old) for weight, old in zip(weights, before, strict=True)]
    assert there == [at != which for at in range(3)]


def test_who_is_refused_takes_back_his_own_wait_and_nobody_else_s(tmp_path: Path) -> None:
    """Two wait for the same block; there is no room in staging for it."""
    managed = manage(mlp(), "nvme", tmp_path)
    hetmem.AdamW(managed.parameters())
    traffic, chunks = runtime_of(managed).traffic, runtime_of(managed).chunks
    *others, wanted = [(chunk, role) for chunk in chunks for role in chunk.homes]
    opened = []
    for chunk, role in others:
        try:
            traffic.open_role(chunk, role, load=True)
        except CapacityError:
            break
        opened.append((chunk, role))
    assert len(opened) < len(others), "there is room for all"
    chunk, role = wanted
    traffic.ask_role(chunk, role, load=True)
    with pytest.raises(CapacityError):
        traffic.open_role(chunk, role, load=True)
    residency, block = traffic.residency, block_of(chunk, role)
    assert (residency.state(block, HOST), residency.uses(block, HOST)) == (CopyState.WAITING, 1)
    for one in opened:
        traffic.close_role(*one, dirty=False)
    traffic.executor.drain()
    assert traffic.role_has_arrived(chunk, role)
    traffic.close_role(chunk, role, dirty=False)
    assert not in_use(managed)


@pytest.fixture
def something_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """With each use, ahead of what comes next."""
    acquire = Residency.acquire
    monkeypatch.setattr(Residency, "acquire", lambda *args, **kwargs: acquire(*args, **kwargs) or [Drop(0, HOST, 0)])


@pytest.mark.usefixtures("something_begins")
def test_a_role_is_asked_for_or_not(tmp_path: Path) -> None:
    """What else begins then may fail to begin."""
    managed = manage(mlp(), "nvme", tmp_path)
    hetmem.AdamW(managed.parameters())
    traffic, chunk = runtime_of(managed).traffic, runtime_of(managed).chunks[0]
    with fails_once(traffic, "execute"), pytest.raises(OSError, match="has failed"):
        traffic.ask_role(chunk, Role.PARAM, load=False)
    assert not in_use(managed)
    assert traffic.residency.state(block_of(chunk), HOST) is None


@pytest.mark.parametrize("at", range(4))
def test_an_update_that_cannot_ask_for_all_it_needs_asks_for_nothing(at: int, tmp_path: Path) -> None:
    """It gave back what it had never asked for, which the device was fed from, or what another one had."""
    plain, managed = pair(mlp, "nvme", tmp_path)
    left, right = adamws(plain, managed)
    for module in (plain, managed):
        loss_of(module, BATCHES[0]).backward()
    traffic = runtime_of(managed).traffic
    runtime = runtime_of(managed)
    runtime.traffic.executor.drain()
    for chunk in runtime.chunks:  # whoever else uses what it would ask for
        if chunk.homes[Role.PARAM].tier is NVME:
            traffic.open_role(chunk, Role.PARAM, load=True)
            other = chunk
            break
    with fails_once(traffic, "ask_role", at), pytest.raises(OSError, match="has failed"):
        right.step()
    assert traffic.residency.uses(block_of(other), HOST) == 1
    traffic.close_role(other, Role.PARAM, dirty=False)
    assert not in_use(managed)
    left.step()
    right.step()
    assert_same_weights(plain, managed)


def test_an_update_of_a_chunk_that_waits_for_room_begins_at_once(tmp_path: Path) -> None:
    """Whoever waits for room may be who lets the update begin: waiting there for the copy would have been for ever."""
    module = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    budget = hetmem.Budget(device="1MiB", device_chunks="16KiB", host="8MiB")
    hetmem.manage(module, budget, chunk_bytes="16KiB", device="sim")
    runtime = runtime_of(module)
    traffic, residency = runtime.traffic, runtime.traffic.residency
    used, wanted = (chunk for chunk in runtime.chunks[:2])
    first, second = used.operand_block, wanted.operand_block
    assert first is not None and second is not None
    traffic.acquire(first, Tier.DEVICE)
    traffic.execute(residency.acquire(second, Tier.DEVICE))
    assert residency.state(second, Tier.DEVICE) is CopyState.WAITING
    assert not residency.in_flight()
    assert traffic.begin_updates([wanted]) == []
    traffic.release(first, Tier.DEVICE)
    assert residency.state(second, Tier.DEVICE) is CopyState.WAITING, "its home is being written"
    traffic.end_updates([wanted])
    traffic.executor.drain()
    assert residency.state(second, Tier.DEVICE) is CopyState.VALID
    traffic.release(second, Tier.DEVICE)


def test_what_the_device_is_fed_while_an_old_copy_is_waited_for_is_old_too(tmp_path: Path) -> None:
    """The read into staging was begun before the write, and its end brings the block to the device at once."""
    modules = pair(mlp, "nvme", tmp_path)
    train_both(*modules, BATCHES)
    runtime = runtime_of(modules[1])
    traffic, residency = runtime.traffic, runtime.traffic.residency
    traffic.forget_copies()
    chunk = next(chunk for chunk in runtime.chunks if chunk.parameters[0].name == "0.weight")
    block = chunk.homes[Role.PARAM].block
    assert block is not None
    traffic.execute(residency.expect({Tier.DEVICE: Schedule([(block,)])}))
    assert [residency.state(block, tier) for tier in (Tier.HOST, Tier.DEVICE)] == [CopyState.LOADING, None]
    traffic.superseded(chunk, Role.PARAM)
    assert residency.state(block, Tier.DEVICE) is None
    assert residency.state(block, Tier.HOST) is not CopyState.VALID


class Failing(hetmem.SimDevice):
    """Loses gradients while `fails`. It has a speed, so that they are on their way at the end of a backward."""

    fails = False

    def gradient_out(self, target: torch.Tensor, arrived: torch.Tensor, *, add: bool) -> None:
        if self.fails:
            raise OSError("the link is broken")
        super().gradient_out(target, arrived, add=add)


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor, *, both: bool = True) -> torch.Tensor:
        return self.one(x).square().sum() + (self.other(x).square().sum() if both else 0)


def test_it_is_the_user_s_turn_after_a_backward_that_raised_at_its_end(tmp_path: Path) -> None:
    device = Failing(device_to_host="1GB")
    managed = manage(Heads(), "nvme", tmp_path, device=device)
    managed(*BATCHES[0]).backward()
    loss = managed(*BATCHES[0], both=False)
    device.fails = True
    with pytest.raises(OSError, match="the link is broken"):
        loss.backward()
    runtime = runtime_of(managed)
    assert runtime.events.running() is None
    device.fails = False
    assert managed.other.weight.grad is not None
    managed.other.weight.grad.data.view(-1)[0] = 5.0
    managed(*BATCHES[1]).backward()
    assert managed.other.weight.grad.view(-1)[0] > 4.0, "what was written there is added to"
