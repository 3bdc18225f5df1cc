"""A training step as the planner sees it: what a model does, how a run updates it, and what that comes to. Pure data.

Parameters are numbers (indices into `parameters`), never tensors; chunks and tiers enter later, so one workload serves
every candidate of a plan.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from itertools import takewhile
from typing import Any

from hetmem.base.hardware import DeviceProfile, HardwareProfile
from hetmem.schedule.layout import ParameterSpec
from hetmem.schedule.placement import Capacities
from hetmem.schedule.saved import SavedInterval


class Kind(Enum):
    """What an event of a workload is."""

    FORWARD = auto()  # a forward begins
    BACKWARD = auto()  # the backward begins
    USE = auto()  # an operator uses parameters
    SAVED = auto()  # autograd asks for a parameter that it saved
    GRADIENT = auto()  # the gradient of a parameter has been made
    END = auto()  # the backward is over


@dataclass(slots=True)
class Work:
    """What operators do: (flops, bytes) of each matrix operator, the bytes of all others, and how many there are."""

    matrix: list[tuple[int, int]] = field(default_factory=list)
    moved_bytes: int = 0
    operators: int = 0

    def seconds(self, device: DeviceProfile, dtype: str) -> float:
        """How long `device` takes: each matrix operator at its roofline, everything else at the memory's rate."""
        rate, bandwidth = device.flops_per_second(dtype), device.bytes_per_second
        matrix = sum(max(flops / rate, nbytes / bandwidth) for flops, nbytes in self.matrix)
        return matrix + self.moved_bytes / bandwidth + self.operators * device.operator_seconds


@dataclass(slots=True)
class Phase:
    """A run of operators: what they do, the most bytes that are not parameters meanwhile, and the calls of functions
    and modules in a forward that make them."""

    work: Work = field(default_factory=Work)
    peak_bytes: int = 0
    calls: int = 0


@dataclass(slots=True)
class Event:
    """One boundary, with `during` (the operator that uses the parameters) and `after` (all until the next boundary).

    `let_go`: parameters whose last view died since the boundary before, so that they are no longer used. `held`:
    those of `parameters` that are still used after the operator. `live_bytes` is what is not parameters at the
    boundary.
    """

    kind: Kind
    operator: str
    parameters: tuple[int, ...]
    held: list[int]
    let_go: tuple[int, ...]
    live_bytes: int
    during: Phase
    after: Phase

    @property
    def peak_bytes(self) -> int:
        """The most bytes that are not parameters up to the next boundary."""
        return max(self.during.peak_bytes, self.after.peak_bytes)

    def seconds(self, device: DeviceProfile, dtype: str) -> float:
        """How long `device` computes up to the next boundary."""
        return self.during.work.seconds(device, dtype) + self.after.work.seconds(device, dtype)

    def resized(self, of_bytes: Callable[[int], int]) -> Event:
        """The same with other bytes that are not parameters."""
        during, after = (replace(phase, peak_bytes=of_bytes(phase.peak_bytes)) for phase in (self.during, self.after))
        return replace(self, live_bytes=of_bytes(self.live_bytes), during=during, after=after)


@dataclass(frozen=True, slots=True)
class Move:
    """A storage of `nbytes` that leaves the device behind the event `leaves_at`, and is back for that at `used_at`."""

    leaves_at: int
    used_at: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Workload:
    """One training step but for the optimizer. `compute_itemsizes[i]` is what parameter i takes on the device.

    `rows` is the batch size and `tokens` what throughput counts (elements of the largest integer input, or rows);
    `dtype` is that of most matrix work. `events` cover one micro-batch.
    """

    name: str
    parameters: tuple[ParameterSpec, ...]
    trainable: frozenset[int]
    compute_itemsizes: tuple[int, ...]
    mixed_precision: bool
    buffer_bytes: int
    events: tuple[Event, ...]
    rows: int
    tokens: int
    dtype: str
    at_peak: tuple[tuple[str, int], ...] = ()
    """The largest of what is alive beside parameters at its peak: what it is, and the bytes of all such tensors."""
    logits_bytes: int = 0
    """Of them, those whose last dimension is that of the vocabulary."""
    saved: tuple[SavedInterval, ...] = ()
    """What autograd saves of anything but parameters, on the clock of `schedule.saved`."""
    ticks: tuple[tuple[int, int], ...] = ()
    """Of each tick of that clock, the event before which it comes, and the most that is not parameters until the
    next."""
    moves: tuple[Move, ...] = ()
    """What of it leaves the device meanwhile."""
    away_bytes: int = 0
    """The most that is in host memory at one time then."""
    fills_device: bool = False
    """Whether the first step of a run, which knows of none of `moves`, moves nothing before the device is full."""

    def __hash__(self) -> int:
        return hash((self.name, self.dtype, self.rows, len(self.parameters), len(self.events)))  # of thousands

    @property
    def peak_operator(self) -> str:
        """The operator at which most is alive."""
        return max(self.events, key=lambda event: event.peak_bytes).operator if self.events else ""

    @property
    def numel(self) -> int:
        """Elements of all parameters."""
        return sum(spec.numel for spec in self.parameters)

    @property
    def flops(self) -> int:
        """Floating-point operations of all matrix operators."""
        phases = (phase for event in self.events for phase in (event.during, event.after))
        return sum(flops for phase in phases for flops, _ in phase.work.matrix)

    @property
    def peak_live_bytes(self) -> int:
        """The most that is not parameters at one time."""
        return max((event.peak_bytes for event in self.events), default=0)

    @property
    def kept_bytes(self) -> int:
        """What the layers of a forward leave for the backward."""
        live = [event.live_bytes for event in takewhile(lambda e: e.kind is not Kind.BACKWARD, self.events)]
        return max(0, live[-1] - live[0]) if live else 0

    def gradients(self) -> Counter[int]:
        """How often a gradient of each parameter is made."""
        return Counter(event.parameters[0] for event in self.events if event.kind is Kind.GRADIENT)

    def compute_seconds(self, device: DeviceProfile) -> float:
        """How long `device` computes for one micro-batch when nothing keeps it waiting."""
        return sum(event.seconds(device, self.dtype) for event in self.events)


def resized(workload: Workload, of_bytes: Callable[[int], int]) -> Workload:
    """`workload` with other bytes that are not parameters."""
    events = tuple(event.resized(of_bytes) for event in workload.events)
    saved = tuple(replace(each, nbytes=of_bytes(each.nbytes)) for each in workload.saved)
    ticks = tuple((event, of_bytes(nbytes)) for event, nbytes in workload.ticks)
    return replace(workload, events=events, saved=saved, ticks=ticks)


def smaller(workload: Workload, parts: int) -> Workload:
    """About `workload` with one of `parts` of its rows, without a trace: never more than that would come to, as
    gradients of weights, which do not shrink with the rows, are taken to."""
    return replace(resized(workload, lambda nbytes: nbytes // parts), rows=workload.rows // parts)


@dataclass(frozen=True, slots=True)
class Updating:
    """When updates are made, where, and how long gradients stay.

    `overlapped`: a chunk is updated as soon as all its gradients are there, as with `hetmem.AdamW(overlap="backward")`,
    from the second step on. `trails`: and a step does not wait for that, as with "forward". `streamed_gradients`:
    no program sees gradients, as with `hetmem.AdamW(gradients="streamed")`, so that they have homes for a while only,
    and updates begin in the first step.
    """

    overlapped: bool = False
    trails: bool = False
    streamed_gradients: bool = False
    moments: str = "float32"
    """What each of the two moments takes, as with `hetmem.AdamW(moments=…)`: "float32", "bfloat16" or "8bit"."""
    stochastic_rounding: bool = False

    @property
    def on_host_only(self) -> bool:
        """Whether the device cannot make such updates."""
        return self.moments != "float32" or self.stochastic_rounding


AS_IT_IS = Updating()
"""As an optimizer of torch updates, or one of hetmem's that is told nothing."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What a run can be told, the machine that it is on, and the forwards and backwards of a step. `chunk_bytes`: None
    = the size that the run finds by itself."""

    capacities: Capacities
    chunk_bytes: int | None
    hardware: HardwareProfile
    micro_batches: int = 1
    updating: Updating = AS_IT_IS

    def updated(self, **how: Any) -> Setting:
        """The same, but for what `how` says of its `updating`."""
        return replace(self, updating=replace(self.updating, **how))

    def within(self, **capacities: Any) -> Setting:
        """The same, but for what is said of its `capacities`."""
        return replace(self, capacities=replace(self.capacities, **capacities))

    def compute_seconds(self, workload: Workload) -> float:
        """How long the device computes in a step of `workload` when nothing keeps it waiting."""
        return self.micro_batches * workload.compute_seconds(self.hardware.device)


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
    moved_bytes: dict[str, dict[str, int]]
    """Homes that have moved to the device by now, by the tier that they left and by role."""
    device_updates: float
    """The share of the trained elements whose update runs on the device, where their states live."""
    new_bytes: dict[str, int]
    """Homes that gradients have for good by now, and had not when the run began, by tier."""

    def is_as(self, before: StepResult) -> bool:
        """Whether this step came to what the one `before` did, but for bytes that jitter, and no home has moved."""
        if (self.moved_bytes, self.new_bytes) != (before.moved_bytes, before.new_bytes):
            return False
        same = all(math.isclose(self.bytes[link], before.bytes[link], rel_tol=0.01) for link in self.bytes)
        return same and math.isclose(self.seconds, before.seconds, rel_tol=1e-4)

    @classmethod
    def total(cls, parts: Sequence[tuple[float, StepResult]]) -> StepResult:
        """The last of `parts`, with the times and bytes of all together, each so many times.

        As one of many steps: what one leaves to be written behind it, the next ones wait for, so that none is shorter
        than any resource is busy for it.
        """

        def together(figures: Iterable[float]) -> float:
            return sum(times * figure for (times, _), figure in zip(parts, figures, strict=True))

        steps = [step for _, step in parts]
        terms = {name: together(step.terms[name] for step in steps) for name in steps[-1].terms}
        return replace(
            steps[-1],
            seconds=max(together(step.seconds for step in steps), *terms.values()),
            stall_seconds=together(step.stall_seconds for step in steps),
            terms=terms,
            bytes={name: round(together(step.bytes[name] for step in steps)) for name in steps[-1].bytes},
        )
