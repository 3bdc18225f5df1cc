"""A training step as the planner sees it: a model's operators, the settings of a run, and the result. Pure data.

Parameters are indices into `parameters`, never tensors. Chunks and tiers are no part of a workload, so that one serves
every candidate of a plan.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from itertools import cycle, takewhile
from typing import Any

from hetmem.base.hardware import DeviceProfile, HardwareProfile
from hetmem.schedule.layout import ParameterSpec
from hetmem.schedule.placement import Capacities
from hetmem.schedule.saved import SavedInterval


class Kind(Enum):
    """The kinds of events of a workload."""

    FORWARD = auto()  # a forward begins
    BACKWARD = auto()  # the backward begins
    USE = auto()  # an operator uses parameters
    SAVED = auto()  # autograd asks for a parameter that it saved
    GRADIENT = auto()  # the gradient of a parameter has been made
    END = auto()  # the backward is over
    BORDER = auto()  # micro-batches that take turns pass on to the next one


@dataclass(slots=True)
class Work:
    """The work of operators: (flops, bytes) of each matrix operator, the bytes of all others, the number of all."""

    matrix: list[tuple[int, int]] = field(default_factory=list)
    moved_bytes: int = 0
    operators: int = 0

    def seconds(self, device: DeviceProfile, dtype: str) -> float:
        """Return the seconds on `device`: matrix operators at their roofline, all others at the memory's rate."""
        rate, bandwidth = device.flops_per_second(dtype), device.bytes_per_second
        matrix = sum(max(flops / rate, nbytes / bandwidth) for flops, nbytes in self.matrix)
        return matrix + self.moved_bytes / bandwidth + self.operators * device.operator_seconds


@dataclass(slots=True)
class Phase:
    """A sequence of operators: their work, the peak of bytes beside parameters during it, and the calls of functions
    and modules in a forward that ran them."""

    work: Work = field(default_factory=Work)
    peak_bytes: int = 0
    calls: int = 0
    rows_bytes: int = 0
    """Bytes of rows of embeddings that cross the link by themselves: see `engine.rows`."""


@dataclass(slots=True)
class Event:
    """One boundary, with `during` (the operator that uses the parameters) and `after` (all until the next boundary).

    `let_go`: parameters whose last view died since the boundary before, so that they are no longer used. `held`: those
    of `parameters` still used after the operator. `live_bytes`: bytes of tensors beside parameters at the boundary.
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
        """The peak of bytes beside parameters up to the next boundary."""
        return max(self.during.peak_bytes, self.after.peak_bytes)

    def seconds(self, device: DeviceProfile, dtype: str) -> float:
        """Return the seconds that `device` computes up to the next boundary."""
        return self.during.work.seconds(device, dtype) + self.after.work.seconds(device, dtype)

    def resized(self, of_bytes: Callable[[int], int]) -> Event:
        """Return this event with the bytes beside parameters replaced by `of_bytes` of them."""
        during, after = (replace(phase, peak_bytes=of_bytes(phase.peak_bytes)) for phase in (self.during, self.after))
        return replace(self, live_bytes=of_bytes(self.live_bytes), during=during, after=after)


@dataclass(frozen=True, slots=True)
class Move:
    """A storage of `nbytes` that leaves the device after the event `leaves_at`, and is back for the event `used_at`."""

    leaves_at: int
    used_at: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Workload:
    """One training step without the optimizer. `compute_itemsizes[i]`: bytes per element of parameter i on the device.

    `rows` is the batch size, `tokens` the unit of throughput (elements of the largest integer input, or rows), `dtype`
    that of most matrix work, all of one micro-batch.
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
    """The largest kinds of tensors alive beside parameters at their peak, and the bytes of each kind."""
    logits_bytes: int = 0
    """Bytes at the peak of tensors whose last dimension is the vocabulary's."""
    kept_logits_bytes: int = 0
    """Bytes of such tensors that are kept between forward and backward."""
    recomputed_flops: int = 0
    """Floating-point operations that checkpoints repeat in the backward."""
    saved: tuple[SavedInterval, ...] = ()
    """The tensors that autograd saves, without parameters, on the clock of `schedule.saved`."""
    ticks: tuple[tuple[int, int], ...] = ()
    """For each tick of that clock, the event that follows, and the peak of bytes beside parameters until the next."""
    moves: tuple[Move, ...] = ()
    """The saved tensors that are offloaded."""
    away_bytes: int = 0
    """The peak of offloaded bytes, in whole pages."""
    fills_device: bool = False
    """Whether the first step of a run, which has no trace yet, offloads nothing before the device is full."""
    micro_batches: int = 1
    """How many the `events` cover, in turns."""
    alone: Workload | None = None
    """One of several such micro-batches."""

    def __hash__(self) -> int:
        return hash((self.name, self.dtype, self.rows, len(self.parameters), len(self.events)))  # of thousands

    @property
    def peak_operator(self) -> str:
        """The operator at the peak of bytes beside parameters."""
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
        """The peak of bytes beside parameters."""
        return max((event.peak_bytes for event in self.events), default=0)

    @property
    def saved_bytes(self) -> int:
        """Bytes that a forward saves for the backward."""
        live = [event.live_bytes for event in takewhile(lambda e: e.kind is not Kind.BACKWARD, self.events)]
        return max(0, live[-1] - live[0]) if live else 0

    def gradients(self) -> Counter[int]:
        """Count the gradients of each parameter in a micro-batch."""
        return Counter(event.parameters[0] for event in self.events if event.kind is Kind.GRADIENT)

    def compute_seconds(self, device: DeviceProfile) -> float:
        """Return the seconds that `device` computes for one micro-batch, without stalls."""
        return sum(event.seconds(device, self.dtype) for event in self.events)


def resized(workload: Workload, of_bytes: Callable[[int], int]) -> Workload:
    """Return `workload` with the bytes beside parameters replaced by `of_bytes` of them."""
    events = tuple(event.resized(of_bytes) for event in workload.events)
    saved = tuple(replace(each, nbytes=of_bytes(each.nbytes)) for each in workload.saved)
    ticks = tuple((event, of_bytes(nbytes)) for event, nbytes in workload.ticks)
    alone = workload.alone and resized(workload.alone, of_bytes)
    return replace(workload, events=events, saved=saved, ticks=ticks, alone=alone)


def larger_by(workload: Workload, times: float) -> Workload:
    """Return `workload` with about `times` as many parameters, at least 1: more layers, without their events. What a
    forward saves for the backward grows with them."""
    sizes = Counter(spec.numel for spec in workload.parameters)
    layers = [at for at, spec in enumerate(workload.parameters) if sizes[spec.numel] > _REPEATED]
    if sum(workload.parameters[at].numel for at in layers) < _LAYERS_SHARE * workload.numel:
        layers = [*range(len(workload.parameters))]
    missing, more = (times - 1) * workload.numel, list[int]()
    for at in cycle(layers):
        if missing <= 0:
            break
        more.append(at)
        missing -= workload.parameters[at].numel
    first, saved = len(workload.parameters), int((times - 1) * workload.saved_bytes)
    trained = {first + number for number, at in enumerate(more) if at in workload.trainable}
    return replace(
        resized(workload, lambda nbytes: nbytes + saved),
        parameters=(*workload.parameters, *(workload.parameters[at] for at in more)),
        compute_itemsizes=(*workload.compute_itemsizes, *(workload.compute_itemsizes[at] for at in more)),
        trainable=workload.trainable | trained,
        alone=workload.alone and larger_by(workload.alone, times),
    )


_REPEATED = 2
"""Parameters of a size that occurs more often are those of repeated layers."""
_LAYERS_SHARE = 0.1
"""Of all elements; with less they are biases and norms, of which it would take thousands to make a model larger."""


def smaller(workload: Workload, parts: int) -> Workload:
    """Return a lower bound of `workload` with one `parts`-th of its rows, without a trace: gradients of weights, which
    do not shrink with the rows, are divided too."""
    return replace(resized(workload, lambda nbytes: nbytes // parts), rows=workload.rows // parts)


@dataclass(frozen=True, slots=True)
class Updating:
    """The options of an optimizer that decide when updates run, where, and how long gradients stay.

    `overlapped`: from the second step on a chunk is updated as soon as all its gradients have arrived, as with
    `hetmem.AdamW(overlap="backward")`, and gradients borrow their homes. With `max_grad_norm` or `loss_scale`, as
    AdamW has them, updates wait for all gradients, which have homes in the dtype in which they arrive.
    `into_forward`: `step()` does not wait for updates, as with "forward".
    """

    overlapped: bool = False
    into_forward: bool = False
    moments: str = "float32"
    """The format of the two moments, as with `hetmem.AdamW(moments=…)`: "float32", "bfloat16" or "8bit"."""
    stochastic_rounding: bool = False
    max_grad_norm: float | None = None
    loss_scale: float | str | None = None

    @property
    def lends(self) -> bool:
        """Whether gradients borrow their homes until their update."""
        return self.overlapped and not self.needs_all

    @property
    def needs_all(self) -> bool:
        """Whether all gradients stay until the step, which takes their norm."""
        return self.max_grad_norm is not None or self.loss_scale is not None

    @property
    def on_host_only(self) -> bool:
        """Whether such updates run on the host only."""
        return self.moments != "float32" or self.stochastic_rounding


AS_IT_IS = Updating()
"""The updates of torch's optimizers, and of hetmem's with default options."""


@dataclass(frozen=True, slots=True)
class Setting:
    """The settings of a run, its machine, and the forwards and backwards of a step (`micro_batches`). `chunk_bytes`:
    None = the size that the run finds by itself."""

    capacities: Capacities
    chunk_bytes: int | None
    hardware: HardwareProfile
    micro_batches: int = 1
    updating: Updating = AS_IT_IS

    def updated(self, **how: Any) -> Setting:
        """Return this setting with the fields `how` of `updating` replaced."""
        return replace(self, updating=replace(self.updating, **how))

    def within(self, **capacities: Any) -> Setting:
        """Return this setting with the given fields of `capacities` replaced."""
        return replace(self, capacities=replace(self.capacities, **capacities))

    def compute_seconds(self, workload: Workload) -> float:
        """Return the seconds that the device computes in a step of `workload`, without stalls."""
        return self.micro_batches * workload.compute_seconds(self.hardware.device)


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of one step: `terms`, the busy seconds of each resource; `bytes` of each link; peaks of the run."""

    seconds: float
    stall_seconds: float
    terms: dict[str, float]
    bytes: dict[str, int]
    device_peak_bytes: int
    chunk_peak_bytes: int
    non_model_peak_bytes: int
    moved_bytes: dict[str, dict[str, int]]
    """Bytes of homes that have moved to the device so far, by the tier that they left and by role."""
    device_updates: float
    """The share of the trained elements whose update runs on the device, where their states live."""
    new_bytes: dict[str, int]
    """Bytes of permanent homes that gradients have got during the run, by tier."""
    loaned_bytes: int
    """The most bytes of host memory that gradients have borrowed beside homes and what was set aside."""

    def is_as(self, before: StepResult) -> bool:
        """Return whether this step equals the one `before`, within 1 % of the bytes, and no home has moved."""
        if (self.moved_bytes, self.new_bytes) != (before.moved_bytes, before.new_bytes):
            return False
        same = all(math.isclose(self.bytes[link], before.bytes[link], rel_tol=0.01) for link in self.bytes)
        return same and math.isclose(self.seconds, before.seconds, rel_tol=1e-4)

    @classmethod
    def total(cls, parts: Sequence[tuple[float, StepResult]]) -> StepResult:
        """Return the last of `parts` with the weighted sums of seconds and bytes; a part is a weight and a step.

        A step counts as at least as long as its busiest resource: in many steps, writes that one leaves behind delay
        the next ones.
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
