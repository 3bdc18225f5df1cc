"""An accelerator that is a clock: its compute and its link take time and no CPU, and run behind the program as a GPU's.

Compute is asked for with `ClockDevice.compute` and takes so many seconds; copies to the device take as long as the link
would, and move nothing; gradients are moved, as the optimizer reads them. What waits for what is as on a GPU: compute
for the copies that it was ordered behind, a copy for the compute that used its slot or made the gradient. So it shows
when things happen, and nothing of their values: operators must not read weights.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

import torch

from hetmem.memory.device import DevicePool, SimDevice
from hetmem.memory.stream_copies import StreamCopier
from hetmem.memory.transfer import Copier, Finished, Seen
from hetmem.schedule.blocks import Link


class Event:
    """Passed at `at`, in seconds of `time.perf_counter`; 0 before."""

    def __init__(self) -> None:
        self.at = 0.0
        self._passed = threading.Event()

    def passes(self, at: float) -> None:
        """It has passed."""
        self.at = at
        self._passed.set()

    def wait(self) -> float:
        """When it passed, once it has."""
        self._passed.wait()
        return self.at


class Timeline:
    """Work in order, on a thread. Each begins when the one before, and what it comes after, is over by the clock: that
    a thread is woken late delays nothing behind it."""

    def __init__(self, name: str) -> None:
        self._queue: SimpleQueue[tuple[float, Sequence[Event], Callable[[], float], Event, Event]] = SimpleQueue()
        threading.Thread(target=_run, args=(self._queue,), name=name, daemon=True).start()

    def ask(self, work: Callable[[], float], after: Sequence[Event]) -> tuple[Event, Event]:
        """Run `work`, which says how many seconds it takes, behind `after`: the events of its start and its end."""
        start, end = Event(), Event()
        self._queue.put((time.perf_counter(), after, work, start, end))
        return start, end


def _run(queue: SimpleQueue[tuple[float, Sequence[Event], Callable[[], float], Event, Event]]) -> None:
    free_at = 0.0
    while True:
        asked_at, after, work, start, end = queue.get()
        begins = max([free_at, asked_at, *(event.wait() for event in after)])
        start.passes(begins)
        free_at = begins + work()
        time.sleep(max(0.0, free_at - time.perf_counter()))
        end.passes(free_at)


class ClockStreams:
    """`hetmem.memory.stream_copies.Streams` of three timelines; those of the links move at `bytes_per_second`."""

    def __init__(self, device: ClockDevice) -> None:
        self._device = device
        self._compute = Timeline("clock-compute")
        self._links = {link: Timeline(f"clock-{link.value}") for link in (Link.HOST_TO_DEVICE, Link.DEVICE_TO_HOST)}
        self._after: list[Event] = []
        self._last = Event()
        self._last.passes(time.perf_counter())

    def compute(self, seconds: float) -> None:
        """Ask for compute."""
        after, self._after = self._after, []
        _, self._last = self._compute.ask(lambda: seconds, after)

    now = staticmethod(time.perf_counter)

    def see_compute(self) -> None:
        """There is one stream."""

    def mark(self) -> Event:
        """The end of the last compute."""
        return self._last

    timed_mark = mark

    def enqueue(self, link: Link, after: Sequence[Any], work: Callable[[], None]) -> Event:
        """See `Streams`."""
        return self._links[link].ask(lambda: self._device.seconds_of(work), after)[1]

    def order_compute(self, event: Event) -> None:
        """The next compute, and so all behind it, comes after `event`."""
        self._after.append(event)

    def passed(self, event: Event) -> bool:
        """Whether it has."""
        return event.at > 0

    def wait(self, event: Event) -> None:
        """Until it has."""
        event.wait()

    def when(self, event: Event) -> float:
        """See `Streams`."""
        return event.at


class _Moved(threading.local):
    """The bytes that this thread has moved; what moves within the device counts for nothing."""

    nbytes = 0


class ClockDevice(SimDevice):
    """The accelerator, with a link of `bytes_per_second` each way."""

    def __init__(self, bytes_per_second: float) -> None:
        super().__init__()
        self._bytes_per_second = bytes_per_second
        self._moved = _Moved()
        self.streams = ClockStreams(self)

    def pool(self, slot_bytes: int, slots: int) -> DevicePool:
        """Slots whose memory nobody touches."""
        return DevicePool(slot_bytes, slots, self.torch_device, _untouched)

    def copier(self, seen: Seen, finished: Callable[[Finished], None]) -> Copier:
        """As a GPU's."""
        return StreamCopier(self.streams, seen, finished)

    def compute(self, seconds: float) -> None:
        """Ask for so much compute."""
        self.streams.compute(seconds)

    def finish(self) -> None:
        """Wait for all compute."""
        self.streams.mark().wait()

    def seconds_of(self, work: Callable[[], None]) -> float:
        """How long the link takes for `work`."""
        self._moved.nbytes = 0
        work()
        return float(self._moved.nbytes / self._bytes_per_second)

    def copy_in(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Nothing but the time."""
        self._moved.nbytes += source.nbytes

    def gradient_out(self, target: torch.Tensor, arrived: torch.Tensor, *, add: bool) -> None:
        """It arrives: the optimizer reads it."""
        self._moved.nbytes += arrived.nbytes
        super().gradient_out(target, arrived, add=add)


def _untouched(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8)
