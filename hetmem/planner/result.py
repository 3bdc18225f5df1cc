"""What a rehearsed step comes to, as numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class StepResult:
    """One step. `terms` are the busy seconds of each resource; `bytes` of each link. Peaks are of the whole run."""

    seconds: float
    stall_seconds: float
    terms: dict[str, float]
    bytes: dict[str, int]
    device_peak_bytes: int
    chunk_peak_bytes: int
    non_model_peak_bytes: int
    fetches: int
    faults: int
    events: int
    moved_bytes: dict[str, dict[str, int]]
    """Homes that have moved to the device by now, by the tier that they left and by role."""
    device_updates: float
    """The share of the trained elements whose update runs on the device, where their states live."""
    streamed_updates: float
    """That of those whose states are sent there for it."""
    update_slot_bytes: int
    """What that takes of the device."""
    new_bytes: dict[str, int]
    """Homes that gradients have for good by now, and had not when the run began, by tier."""

    def steady(self) -> StepResult:
        """The same as one of many steps: what one leaves to be written behind it, the next ones wait for, so that none
        is shorter than any resource is busy for it."""
        return replace(self, seconds=max(self.seconds, *self.terms.values()))

    @classmethod
    def mean(cls, steps: Sequence[StepResult]) -> StepResult:
        """The last of `steps`, with the times and bytes of a link that they have in the mean."""
        last, count = steps[-1], len(steps)
        return replace(
            last,
            seconds=sum(step.seconds for step in steps) / count,
            stall_seconds=sum(step.stall_seconds for step in steps) / count,
            terms={name: sum(step.terms[name] for step in steps) / count for name in last.terms},
            bytes={name: round(sum(step.bytes[name] for step in steps) / count) for name in last.bytes},
        )
