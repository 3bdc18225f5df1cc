"""Who is refused a copy, or fails, leaves no use of one behind, and gives up none that is another's."""

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
from hetmem.schedule.trace import DEVICE, HOST, NVME
from tests.runtime.harness import BATCHES, WIDTH, adamws, assert_same_weights, loss_of, manage, mlp, pair


def runtime_of(module: nn.Module) -> Runtime:
    return registry.of_module(module).runtime


def block_of(chunk: Chunk, role: Role = Role.PARAM) -> int:
    block = chunk.homes[role].block
    assert block is not None
    return block


def in_use(module: nn.Module) -> list[str]:
    """What copies are used on any tier."""
    runtime = runtime_of(module)
    assert not runtime.holds_copies()
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
    traffic.pending.drain()
    assert traffic.role_is_there(chunk, role)
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
    with fails_once(traffic._uses, "_execute"), pytest.raises(OSError, match="has failed"):
        traffic.ask_role(chunk, Role.PARAM, load=False)
    assert not in_use(managed)
    assert traffic.residency.state(block_of(chunk), HOST) is None


@pytest.mark.usefixtures("something_begins")
def test_a_copy_that_is_held_for_an_update_is_let_go_of_where_that_cannot_begin(tmp_path: Path) -> None:
    managed = manage(mlp(), "host", tmp_path)
    with torch.no_grad():
        managed[0](*BATCHES[0])
    traffic = runtime_of(managed).traffic
    found = [chunk for chunk in runtime_of(managed).chunks if traffic.device_copy(chunk) is not None]
    with fails_once(traffic._uses, "_execute"), pytest.raises(OSError, match="has failed"):
        traffic.hold_copy(found[0])
    assert not in_use(managed)


@pytest.mark.parametrize("at", range(4))
def test_an_update_that_cannot_ask_for_all_it_needs_asks_for_nothing(at: int, tmp_path: Path) -> None:
    """It gave back what it had never asked for, which the device was fed from, or what another one had."""
    plain, managed = pair(mlp, "nvme", tmp_path)
    left, right = adamws(plain, managed)
    for module in (plain, managed):
        loss_of(module, BATCHES[0]).backward()
    traffic = runtime_of(managed).traffic
    runtime = runtime_of(managed)
    runtime.traffic.pending.drain()
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
