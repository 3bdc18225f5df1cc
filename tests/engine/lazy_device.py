"""A simulated device with streams that are as late as they may be, to lose every race that can be lost.

Compute runs when it is asked for, as far ahead of the copies as a host can be. A copy runs when somebody waits for it
or compute is ordered behind it, and not before: whoever forgets to do that reads what was there before. What it cannot
show is a copy that overtakes the compute that used its slot, as compute is never late here.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hetmem.memory.chunk import RawMemory
from hetmem.memory.device import DevicePool, SimDevice
from hetmem.memory.stream_copies import StreamCopier
from hetmem.memory.transfer import Copier, Finished, Seen
from hetmem.schedule.blocks import Link
from hetmem.torch_private import TorchDispatchMode


class Event:
    """`at` is the time at which it passed, 0 while it has not. `number` is for tests."""

    def __init__(self) -> None:
        self.at = 0.0
        self.number = 0

    def passes(self) -> None:
        self.at = time.perf_counter()


class LazyStreams:
    """`Streams` whose work is done at the last moment."""

    def __init__(self) -> None:
        self._queues: dict[Link, deque[tuple[Callable[[], None], Event]]] = {link: deque() for link in Link}
        self.enqueued = 0

    def see_compute(self) -> None: ...

    def mark(self) -> Event:
        event = Event()
        event.passes()
        return event

    def now(self) -> float:
        return time.perf_counter()

    def timed_mark(self) -> Event:
        event = Event()
        event.passes()
        return event

    def enqueue(self, link: Link, after: Sequence[Any], work: Callable[[], None]) -> Event:
        assert all(event.at for event in after), "compute has no future here"
        end = Event()
        self._queues[link].append((work, end))
        self.enqueued += 1
        return end

    def order_compute(self, event: Event) -> None:
        self.wait(event)

    def passed(self, event: Event) -> bool:
        return event.at > 0

    def wait(self, event: Event) -> None:
        for jobs in self._queues.values():
            if any(end is event for _, end in jobs):
                while not event.at:
                    work, end = jobs.popleft()
                    work()
                    end.passes()

    def when(self, event: Event) -> float:
        return event.at


class EarlyStreams(LazyStreams):
    """Copies are as early as they may be, and still nobody knows that they are over before somebody waits for them."""

    def enqueue(self, link: Link, after: Sequence[Any], work: Callable[[], None]) -> Event:
        work()
        return super().enqueue(link, after, lambda: None)


def host_slots(nbytes: int) -> torch.Tensor:
    """Memory of slots from the CPU's allocator."""
    return torch.empty(nbytes, dtype=torch.uint8)


class LazyDevice(SimDevice):
    """Acts like a GPU whose copies are late, with a GPU's pool over the memory of the CPU."""

    def pool(self, slot_bytes: int, slots: int) -> DevicePool:
        return DevicePool(slot_bytes, slots, self.torch_device, host_slots)

    def copier(self, seen: Seen, finished: Callable[[Finished], None]) -> Copier:
        self.streams = self.made_streams()
        return StreamCopier(self.streams, seen, finished)

    def made_streams(self) -> Any:
        return LazyStreams()


class EarlyDevice(LazyDevice):
    """Acts like a GPU whose copies are early."""

    def made_streams(self) -> LazyStreams:
        return EarlyStreams()


class UnwatchedDevice(LazyDevice):
    """Acts like a GPU in this too: nobody watches operators, an allocator says how much memory they needed.

    `non_model_bytes` is what that has handed out beside chunks at its peak.
    """

    watched = False

    def __init__(self, non_model_bytes: int) -> None:
        super().__init__()
        self.non_model_bytes = non_model_bytes
        self.pools: list[DevicePool] = []

    def pool(self, slot_bytes: int, slots: int) -> DevicePool:
        self.pools.append(super().pool(slot_bytes, slots))
        return self.pools[-1]

    def peak_bytes(self) -> int:
        return self.non_model_bytes + sum(pool.held_bytes() for pool in self.pools)


class AllocatingDevice(UnwatchedDevice):
    """Knows of the homes on it too, as a GPU's allocator does."""

    def __init__(self, non_model_bytes: int) -> None:
        super().__init__(non_model_bytes)
        self.homes: list[weakref.ref[Any]] = []
        self._told: weakref.WeakMethod[Any] | None = None

    def tell_refusals(self, refused: Callable[[int, int], None]) -> None:
        self._told = weakref.WeakMethod(refused)

    def refuse(self, asked_bytes: int, allocated_bytes: int) -> None:
        """Tell of an allocation that finds no memory, as the allocator of a GPU does before it raises."""
        told = self._told and self._told()
        assert told is not None
        told(asked_bytes, allocated_bytes)

    def allocate(self, nbytes: int) -> RawMemory:
        memory = super().allocate(nbytes)
        self.homes.append(weakref.ref(memory))
        return memory

    def peak_bytes(self) -> int:
        homes = [home() for home in self.homes]
        return super().peak_bytes() + sum(home.nbytes for home in homes if home is not None)


# ---- a clock of its own ----------------------------------------------------------------------------------------------


@dataclass
class Clocked:
    """`Streams` whose events are times that are known as soon as they are asked for."""

    rate: float
    behind: bool
    host: float = 0.0
    compute: float = 0.0
    copied_bytes: int = 0
    free_at: dict[Link, float] = field(default_factory=lambda: dict.fromkeys(Link, 0.0))

    def now(self) -> float:
        return self.host

    def see_compute(self) -> None: ...

    def mark(self) -> float:
        self.compute = max(self.compute, self.host)  # an event is passed no sooner than it is recorded
        return self.compute

    timed_mark = mark

    def enqueue(self, link: Link, after: Sequence[Any], work: Callable[[], None]) -> float:
        before = self.copied_bytes
        work()
        start = max(self.free_at[link], self.host, *after)
        self.free_at[link] = start + (self.copied_bytes - before) / self.rate
        return self.free_at[link]

    def order_compute(self, event: float) -> None:
        self.compute = max(self.compute, event)
        if not self.behind:
            self.wait(event)

    def passed(self, event: float) -> bool:
        return event <= self.host

    def wait(self, event: float) -> None:
        self.host = max(self.host, event)

    def when(self, event: float) -> float:
        return event


class ClockedDevice(LazyDevice):
    """Has a clock of its own, on which compute runs `behind` the host, or is the host's, and each thing takes as long
    as it is told to.

    Values are computed when they are asked for; what runs behind is time. The host's clock goes on where a test
    launches something, and where the host waits; compute's goes on by what was launched, behind the host and the copies
    that it was ordered after; a copy takes its bytes by the `rate` of its link, one after the other. So a run takes the
    same seconds each time, and they can be added up by hand. Updates on the host take none.
    """

    def __init__(self, rate: float, *, behind: bool = True) -> None:
        super().__init__()
        self.clock = Clocked(rate, behind)

    def made_streams(self) -> Clocked:
        return self.clock

    def copy_in(self, target: torch.Tensor, source: torch.Tensor) -> None:
        super().copy_in(target, source)
        self.clock.copied_bytes += source.nbytes

    def gradient_out(self, target: torch.Tensor, arrived: torch.Tensor, *, add: bool) -> None:
        super().gradient_out(target, arrived, add=add)
        self.clock.copied_bytes += target.nbytes

    def gradients_out(self, targets: list[torch.Tensor], arrived: list[torch.Tensor]) -> None:
        super().gradients_out(targets, arrived)
        self.clock.copied_bytes += sum(target.nbytes for target in targets)

    def runs(self, seconds: float, *, launch: float = 0.0) -> None:
        """The host takes `launch` to ask for something that takes compute `seconds`."""
        self.clock.host += launch
        self.clock.compute = max(self.clock.compute, self.clock.host) + seconds
        if not self.clock.behind:
            self.clock.host = self.clock.compute


class Products(TorchDispatchMode):
    """Has each product of matrices take so many `seconds` of the clock of `device`."""

    def __init__(self, device: ClockedDevice, seconds: float) -> None:
        super().__init__()
        self._device, self._seconds = device, seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default):
            self._device.runs(self._seconds)
        return func(*args, **(kwargs or {}))
