"""On a device whose copies run on streams: the same bits however late they are, and none before its slot is free."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import hetmem
from hetmem.intercept import registry
from hetmem.memory import live_bytes
from hetmem.memory.device import SimDevice
from hetmem.memory.stream_copies import StreamCopier
from hetmem.memory.transfer import Copier, Finished, Seen
from hetmem.schedule.blocks import Link
from hetmem.schedule.trace import Tier
from tests.engine.harness import Recipe, Tower, budget, manage, offloaded, pair, token_batches, train_both
from tests.engine.lazy_device import Event, LazyDevice, LazyStreams, UnwatchedDevice


@pytest.mark.each
@offloaded
@pytest.mark.parametrize("mixed", [None, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("checkpointing", [None, True, False])
def test_training_equals_torch_however_late_copies_are(
    placement: str, mixed: torch.dtype | None, checkpointing: bool | None, tmp_path: Path
) -> None:
    device = LazyDevice()
    build = partial(Tower, checkpointing=checkpointing)
    plain, managed = pair(build, placement, tmp_path, mixed_precision=mixed, device=device)
    train_both(plain, managed, token_batches(6), Recipe(accumulation=2, clip=0.05, mixed=mixed))
    assert (device.streams.enqueued > 20) == (placement != "resident")


class NumberedStreams(LazyStreams):
    """Numbers marks and uses alike, and refuses a copy to the device that comes before a use of its memory."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = count(1)
        self.last_use: dict[range, int] = {}
        self.ordered = 0
        self.copying = False

    def mark(self) -> Event:
        event = super().mark()
        event.number = next(self.numbers)
        return event

    def enqueue(self, link: Link, after: Sequence[Any], work: Callable[[], None]) -> Event:
        for target in targets_of(work) if link is Link.HOST_TO_DEVICE else ():
            uses = [at for used, at in self.last_use.items() if used.start < target.stop and target.start < used.stop]
            assert max(uses, default=0) <= max((event.number for event in after), default=0), "compute may be under way"
            self.ordered += bool(uses)
        return super().enqueue(link, after, partial(self._copy, work))

    def _copy(self, work: Callable[[], None]) -> None:
        self.copying = True
        try:
            work()
        finally:
            self.copying = False


def targets_of(work: Callable[[], None]) -> list[range]:
    """The memory of the device that a transfer writes."""
    return [memory_of(work.args[0])] if isinstance(work, partial) else []


def memory_of(tensor: torch.Tensor) -> range:
    start = tensor.untyped_storage().data_ptr()
    return range(start, start + tensor.untyped_storage().nbytes())


class NumberedDevice(SimDevice):
    def copier(self, seen: Seen, finished: Callable[[Finished], None]) -> Copier:
        self.streams = NumberedStreams()
        return StreamCopier(self.streams, seen, finished)


class Compute(TorchDispatchMode):
    """Numbers whatever any operator reads or writes: the model's, autograd's, an optimizer's, and casts on the device.
    On a GPU each may still be under way when the host goes on."""

    def __init__(self, streams: NumberedStreams) -> None:
        super().__init__()
        self._streams = streams
        self._seen = mock.patch.object(live_bytes, "_modes_are_around", return_value=False)  # also what is hetmem's own

    def __enter__(self) -> Any:
        self._seen.start()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._seen.stop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_view = all(found.alias_info and not found.alias_info.is_write for found in func._schema.returns)
        if not self._streams.copying and not is_view:
            for tensor in tree_leaves((args, kwargs)):
                if isinstance(tensor, torch.Tensor):
                    self._streams.last_use[memory_of(tensor)] = next(self._streams.numbers)
        return func(*args, **(kwargs or {}))


@pytest.mark.each
@pytest.mark.parametrize("overlap", ["off", "backward", "forward"])
@pytest.mark.parametrize("mixed", [None, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("placement", ["host", "nvme"])
def test_a_copy_comes_after_the_last_use_of_its_slot(
    placement: str, mixed: torch.dtype | None, overlap: str, tmp_path: Path
) -> None:
    """A copy that was superseded while a backward used it had its slot given away with no mark behind that backward."""
    device = NumberedDevice()
    managed = manage(Tower(depth=3), placement, tmp_path, mixed_precision=mixed, device=device, sanitize=False)
    train_in_order(managed, device, hetmem.AdamW(managed.parameters(), overlap=overlap))
    assert device.streams.ordered > 10


def test_a_copy_comes_after_whatever_compute_made_of_its_slot_though_no_operator_of_the_model_did(
    tmp_path: Path,
) -> None:
    """Compute casts a home on the device into a slot, when it is prefetched and again at the begin of a forward; and a
    copy that was superseded while it was in use is fetched anew where it lies."""
    device = NumberedDevice()
    room = hetmem.Budget(device="64MiB", host="8MiB", device_chunks="400KiB")
    managed = manage(Tower(depth=3), room, tmp_path, device=device, sanitize=False)
    train_in_order(managed, device, hetmem.AdamW(managed.parameters()))
    runtime = registry.of_module(managed).runtime
    traffic, residency = runtime.traffic, runtime.traffic.residency
    inside, outside = (next(chunk for chunk in runtime.chunks if chunk.moved is moved) for moved in (True, False))
    cast, fetched = inside.operand_block, outside.operand_block
    assert cast is not None and fetched is not None
    runtime.forget_copies()
    traffic.execute(residency.limit(Tier.DEVICE, 1))  # so that all of them lie in one slot
    with Compute(device.streams):
        traffic.execute(residency.prefetch([cast], Tier.DEVICE))
        traffic.execute(residency.invalidate(cast, Tier.DEVICE))
        traffic.acquire(fetched, Tier.DEVICE)
        traffic.release(fetched, Tier.DEVICE)
        traffic.acquire(cast, Tier.DEVICE)
        traffic.release(cast, Tier.DEVICE)
        traffic.executor.copy_homes_again([inside])
        before = device.streams.ordered
        slot = traffic.acquire(fetched, Tier.DEVICE)
        traffic.executor.drain()
        traffic.executor.on_device(outside, slot).sum()
        traffic.execute(residency.invalidate(fetched, Tier.DEVICE))
        assert traffic.acquire(fetched, Tier.DEVICE) == slot
    assert device.streams.ordered == before + 2


def train_in_order(managed: nn.Module, device: NumberedDevice, optimizer: torch.optim.Optimizer) -> None:
    with Compute(device.streams):
        for batch in token_batches(4):
            managed(*batch).backward()
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("placement", ["host", "nvme"])
def test_chunks_leave_the_room_that_the_allocator_was_seen_to_need(placement: str, tmp_path: Path) -> None:
    """24 KiB of 96 go to other things, 3 % to what an allocator wastes, so 4 slots of 16 KiB are left."""
    device = UnwatchedDevice(24 * 1024)
    room = budget(
        placement, tmp_path, device="96KiB", device_chunks=None, host="80KiB" if placement == "nvme" else "8MiB"
    )
    plain, managed = pair(Tower, room, tmp_path, chunk_bytes="16KiB", device=device, sanitize=False)
    train_both(plain, managed, token_batches(6), Recipe(steps=6))
    peak = hetmem.report(managed).to_dict()["tiers"]["device"]
    assert 3 * 16384 <= peak["chunk_peak_bytes"] <= 4 * 16384
    assert device.pools[0].held_bytes() + device.non_model_bytes <= 96 * 1024


class Unable(LazyDevice):
    """Cannot ask for a copy as often as `failures` says."""

    failures = 0

    def copy_in(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if self.failures:
            self.failures -= 1
            raise RuntimeError("no memory to cast in")
        super().copy_in(target, source)


class NowStreams(LazyStreams):
    """Asks for work at once and carries it out late, as a GPU does: what cannot be asked for fails at once."""

    def enqueue(self, link: Link, after: Sequence[Any], work: Callable[[], None]) -> Event:
        device = getattr(getattr(work, "func", None), "__self__", None)
        if isinstance(device, Unable) and device.failures:
            work()
        return super().enqueue(link, after, work)


class UnableDevice(Unable):
    def copier(self, seen: Seen, finished: Callable[[Finished], None]) -> Copier:
        self.streams = NowStreams()
        return StreamCopier(self.streams, seen, finished)


def test_no_operator_runs_on_a_copy_that_could_not_be_asked_for(tmp_path: Path) -> None:
    """It was taken for one that is over: the last operator of a forward used what lay in the slot before."""
    device = UnableDevice()
    plain, managed = pair(lambda: nn.Linear(64, 64, bias=False), "host", tmp_path, device=device)
    x = torch.ones(2, 64)
    device.failures = 1
    with pytest.raises(RuntimeError, match="no memory to cast in"):
        managed(x)
    assert torch.equal(managed(x), plain(x))


def short_of_memory(x: torch.Tensor, failures: list[int]) -> torch.Tensor:
    """An operator that finds no memory as often as `failures` is long, and tells what it asked for."""
    if torch.overrides.has_torch_function_unary(x):
        result: torch.Tensor = torch.overrides.handle_torch_function(short_of_memory, (x,), x, failures)
        return result
    if failures:
        failures.pop()
        raise torch.OutOfMemoryError("CUDA out of memory")
    return x * 2


class Short(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))
        self.failures: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return short_of_memory(self.tower(x), self.failures)


def test_an_operator_without_memory_gets_that_of_idle_chunks_and_runs_again(tmp_path: Path) -> None:
    device = UnwatchedDevice(0)
    room = hetmem.Budget(device="64KiB", host="1MiB", device_chunks="32KiB")
    managed = hetmem.manage(Short(), room, device=device, chunk_bytes="16KiB")
    x = torch.ones(2, 32)
    expected = managed(x)
    assert device.pools[0].held_bytes() > 0
    managed.failures = [1]
    assert torch.equal(managed(x), expected)
    managed.failures = [1, 1]
    with pytest.raises(torch.OutOfMemoryError):
        managed(x)
    assert managed.failures == []
    assert torch.equal(managed(x), expected)
