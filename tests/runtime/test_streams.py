"""On a device whose copies run on streams: the same bits however late they are, and none before its slot is free."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from hetmem.memory.chunk import ManagedParameter
from hetmem.memory.device import SimDevice
from hetmem.memory.streams import StreamCopier
from hetmem.memory.transfer import Copier, Finished, Link, Seen
from hetmem.runtime.bindings import Bindings
from tests.runtime.harness import PLACEMENTS, Recipe, Tower, pair, token_batches, train_both
from tests.runtime.lazy_device import Event, LazyDevice, LazyStreams


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("mixed", [None, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("checkpointing", [None, True, False])
def test_training_equals_torch_however_late_copies_are(
    placement: str, mixed: torch.dtype | None, checkpointing: bool | None, tmp_path: Path
) -> None:
    device = LazyDevice()
    build = partial(Tower, checkpointing=checkpointing)
    plain, managed = pair(build, placement, tmp_path, mixed_precision=mixed, device=device)
    train_both(plain, managed, token_batches(6), Recipe(accumulation=2, clip=0.05, mixed=mixed))
    assert (device.streams.enqueued > 20) == (placement != "resident" or mixed is not None)


class NumberedStreams(LazyStreams):
    """Numbers marks and uses alike, and refuses a copy to the device that comes before a use of its memory."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = count(1)
        self.last_use: dict[range, int] = {}
        self.ordered = 0

    def mark(self) -> Event:
        event = super().mark()
        event.number = next(self.numbers)
        return event

    def enqueue(self, link: Link, after: Sequence[Any], work: Callable[[], None]) -> tuple[Event, Event]:
        if link is Link.HOST_TO_DEVICE and isinstance(work, partial):
            target = memory_of(work.args[0])
            uses = [at for used, at in self.last_use.items() if used.start < target.stop and target.start < used.stop]
            assert max(uses, default=0) <= max((event.number for event in after), default=0), "compute may still read"
            self.ordered += bool(uses)
        return super().enqueue(link, after, work)


def memory_of(tensor: torch.Tensor) -> range:
    return range(tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.itemsize)


class NumberedDevice(SimDevice):
    def copier(self, seen: Seen, finished: Callable[[Finished], None]) -> Copier:
        self.streams = NumberedStreams()
        return StreamCopier(self.streams, seen, finished)


@pytest.mark.parametrize("mixed", [None, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("placement", ["host", "nvme"])
def test_a_copy_comes_after_the_last_use_of_its_slot(
    placement: str, mixed: torch.dtype | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = NumberedDevice()
    unbind = Bindings.unbind

    def used(self: Bindings, managed: ManagedParameter) -> None:
        assert managed.device is not None
        device.streams.last_use[memory_of(managed.device)] = next(device.streams.numbers)
        unbind(self, managed)

    monkeypatch.setattr(Bindings, "unbind", used)
    plain, managed = pair(Tower, placement, tmp_path, mixed_precision=mixed, device=device, sanitize=False)
    train_both(plain, managed, token_batches(4), Recipe(steps=4, mixed=mixed))
    assert device.streams.ordered > 10
