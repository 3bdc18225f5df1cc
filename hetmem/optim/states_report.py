"""What a report of an optimizer over unmanaged parameters says: where states are, and what the last step took."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from hetmem.base.units import format_seconds, format_size

_WAYS = {
    "device_to_host": "device to host",
    "host_to_device": "host to device",
    "nvme_read": "NVMe read",
    "nvme_write": "NVMe write",
}


@dataclass(frozen=True, slots=True)
class PassCounts:
    """What passes over states have done so far: elements updated, seconds in which the threads of updates were at work,
    and bytes moved, by way."""

    updated: int
    update_seconds: float
    moved_bytes: dict[str, int]


@dataclass(frozen=True, repr=False)
class StatesReport:
    """Of an optimizer with `budget=`, for this process; `str()` is a text. Bytes and seconds.

    `state_bytes[tier]` and `budget_bytes[tier]` for "host" and "nvme"; `slots_bytes` of host memory through which
    parameters, gradients and states pass. Of the last whole step: `step_seconds` of `step()`, `update_seconds` in which
    the threads were at work, of those `early_seconds` before `step()` was called (`overlap="backward"`), the elements
    `updated`, and `moved_bytes` by way ("device_to_host", "host_to_device", "nvme_read", "nvme_write"). Before the
    first step they are zero.
    """

    name: str
    parameters: int
    state_bytes: dict[str, int]
    slots_bytes: int
    budget_bytes: dict[str, int]
    steps: int
    step_seconds: float
    update_seconds: float
    early_seconds: float
    updated: int
    moved_bytes: dict[str, int]

    def __str__(self) -> str:
        host, nvme = self.state_bytes["host"], self.state_bytes["nvme"]
        slots = f" and {format_size(self.slots_bytes)} for what passes" if self.slots_bytes else ""
        lines = [
            f"{self.name}, {self.parameters:,} parameters here, {self.steps} steps",
            f"host memory  states of {format_size(host)}{slots}, of {format_size(self.budget_bytes['host'])}",
        ]
        if self.budget_bytes["nvme"]:
            lines.append(f"NVMe         states of {format_size(nvme)}, of {format_size(self.budget_bytes['nvme'])}")
        if not self.steps:
            return "\n".join([*lines, "no step yet"])
        lines.append(f"last step()  {format_seconds(self.step_seconds)}")
        if self.update_seconds:
            rate = f"{self.updated / self.update_seconds / 1e6:,.0f} M parameters/s"
            early = self.early_seconds / self.update_seconds
            where = f", {early:.0%} of it in the backward" if early else ""
            lines.append(f"  update       {format_seconds(self.update_seconds)}, {rate}{where}")
        for way, what in _WAYS.items():
            if self.moved_bytes[way]:
                lines.append(f"  {what:<12} {format_size(self.moved_bytes[way])}")
        return "\n".join(lines)

    __repr__ = __str__


class StepTimes:
    """Measures steps: the last whole one, in terms of what `counts()` returns at its begin and end."""

    def __init__(self) -> None:
        self.steps, self.seconds, self.early_seconds = 0, 0.0, 0.0
        self.last = PassCounts(0, 0.0, dict.fromkeys(_WAYS, 0))
        self._before = self.last

    @contextmanager
    def of_a_step(self, counts: Callable[[], PassCounts]) -> Iterator[None]:
        """Measure the block, and what has been done since the last one ended. One that raises is not counted: the next
        has its work too."""
        began, called = time.perf_counter(), counts()
        yield
        before, now = self._before, counts()
        self._before, self.steps, self.seconds = now, self.steps + 1, time.perf_counter() - began
        self.early_seconds = called.update_seconds - before.update_seconds
        moved = {way: now.moved_bytes[way] - before.moved_bytes[way] for way in _WAYS}
        self.last = PassCounts(now.updated - before.updated, now.update_seconds - before.update_seconds, moved)

    def begin_again(self) -> None:
        """Forget what was counted: counts begin at zero."""
        self._before = PassCounts(0, 0.0, dict.fromkeys(_WAYS, 0))
