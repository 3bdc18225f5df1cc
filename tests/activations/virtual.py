"""A simulated device with a clock of its own: compute and links take the seconds that a test says, and no time."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tests.engine.lazy_device import LazyDevice, LazyStreams


class Event:
    """Passed at `at`."""

    def __init__(self, at: float) -> None:
        self.at = at


class VirtualStreams(LazyStreams):
    """`Streams` of one thread that computes, and of a link each way that moves `bytes_per_second`. Copies are made when
    they are asked for, and are over when the clock says so."""

    def __init__(self, bytes_per_second: float, moved: threading.local) -> None:
        super().__init__()
        self.time, self._rate, self._moved = 0.0, bytes_per_second, moved
        self._free: dict[Any, float] = defaultdict(float)

    def now(self) -> float:
        return self.time

    def mark(self) -> Any:
        return Event(self.time)

    timed_mark = mark

    def enqueue(self, link: Any, after: Sequence[Any], work: Callable[[], None]) -> Any:
        self._moved.nbytes = 0
        work()
        begins = max([self.time, self._free[link], *(event.at for event in after)])
        self._free[link] = begins + self._moved.nbytes / self._rate
        return Event(self._free[link])

    def order_compute(self, event: Any) -> None:
        self.time = max(self.time, event.at)

    wait = order_compute

    def passed(self, event: Any) -> bool:
        return bool(event.at <= self.time)


class VirtualDevice(LazyDevice):
    """Has links of `bytes_per_second` on a clock of its own, which `spend` moves on."""

    def __init__(self, bytes_per_second: float) -> None:
        super().__init__()
        self.bytes_per_second = bytes_per_second
        self._moved = threading.local()
        self.streams = VirtualStreams(bytes_per_second, self._moved)

    def made_streams(self) -> LazyStreams:
        return self.streams

    def now(self) -> float:
        return self.streams.now()

    def spend(self, seconds: float) -> None:
        """Let so much time pass."""
        self.streams.time += seconds

    def copy_in(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._count(source)
        super().copy_in(target, source)

    def gradient_out(self, target: torch.Tensor, arrived: torch.Tensor, *, add: bool) -> None:
        self._count(arrived)
        super().gradient_out(target, arrived, add=add)

    def _count(self, tensor: torch.Tensor) -> None:
        self._moved.nbytes = getattr(self._moved, "nbytes", 0) + tensor.nbytes


class Timed(torch.autograd.Function):
    """Takes `seconds` of the clock of a device in forward, and twice those in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, spend: Callable[[float], None], seconds: float) -> torch.Tensor:
        ctx.spend, ctx.seconds = spend, seconds
        spend(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        ctx.spend(2 * ctx.seconds)
        return grads[0], None, None
