"""Options of an optimizer: when updates happen, what gradients are multiplied by, and the rule that computes the update
of one parameter. A rule sees flat tensors. It must not know chunks, tiers or transfers."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch

from hetmem.cpu.workers import Task
from hetmem.memory.chunk import Role


@dataclass(slots=True, eq=False)
class ParameterUpdate:
    """One parameter's share of a step: 1-D tensors of one length, in the order of the parameter's memory.

    `group` is its parameter group and `state` its entry of `optimizer.state`; the rule reads and writes what in there
    has not the parameter's shape (a step count). The `fresh` ones among `states` are new and zero. `number` is the
    parameter's index in the optimizer. `grad` is multiplied by `grad_scale` in float32. `copy`, if given, gets the new
    parameter, rounded. `own`: the elements to update, in parts that end within no vector; None = all. A rule that
    `has_kernel` gets adjacent parameters of one group and step count as one; `also` has the states of the others. The
    rule gets the same objects in the next step as long as states, and tensors but `grad`, are the same, and may cache
    what it derives from them in `counts` and `kernel` of the first. `ages`: the values of these `counts` before this
    step, if they are known.
    """

    group: dict[str, Any]
    state: dict[str, Any]
    param: torch.Tensor
    grad: torch.Tensor
    states: dict[str, torch.Tensor] = field(default_factory=dict)
    grad_scale: float = 1.0
    fresh: frozenset[str] = frozenset()
    number: int = 0
    copy: torch.Tensor | None = None
    own: Sequence[slice] | None = None
    also: Sequence[dict[str, Any]] = ()
    counts: list[torch.Tensor] = field(default_factory=list)
    ages: list[float] = field(default_factory=list)
    kernel: Any = None


class Rule(ABC):
    """Elementwise arithmetic: the new value of an element depends on that element and on scalars only."""

    runs_on_device = True
    """Whether `on_device` is implemented."""
    has_kernel = False
    """Whether `begin` and `whole` are implemented, and adjacent parameters are updated as one: they lie at multiples of
    `schedule.layout.ALIGNMENT_ELEMENTS`, so that only the last of them may end within a vector."""
    seed: int | None = None
    """Seed of random rounding; None if nothing is random."""

    def in_words(self) -> str:
        """Return what results depend on beside the options of groups, for ranks to compare."""
        return type(self).__name__

    @abstractmethod
    def roles(self, group: dict[str, Any], dtype: torch.dtype) -> tuple[Role, ...]:
        """Return the states, other than scalars, of a parameter of `dtype` in `group`."""

    @abstractmethod
    def needs(self, group: dict[str, Any], dtype: torch.dtype) -> tuple[str, ...]:
        """Return the names of states and scalars that a parameter of `dtype` in `group` has from its first update on:
        an entry of `optimizer.state` that has others but lacks one of these is damaged, or of another optimizer."""

    @abstractmethod
    def tasks(self, updates: list[ParameterUpdate]) -> list[Task]:
        """Return the tasks of `updates` in host memory, for any order and threads. Counts the step in each `state`."""

    def equals_host(self, device: torch.device, dtype: torch.dtype, copy_dtype: torch.dtype | None) -> bool:
        """Return whether updates on `device` of parameters of `dtype`, with copies of `copy_dtype` (None: without),
        have the bits of `tasks`. Tried once."""
        return False

    @abstractmethod
    def on_device(self, updates: list[ParameterUpdate]) -> None:
        """Compute `updates` in GPU memory on the current stream: with the bits of `tasks` if it `equals_host`, else
        with those of torch there."""

    def begin(self, state: dict[str, Any]) -> None:
        """Add the missing scalars (step count) of a parameter to `state`, before `whole`."""
        raise NotImplementedError

    def whole(
        self,
        group: dict[str, Any],
        params: list[torch.Tensor],
        grads: list[torch.Tensor],
        states: Sequence[list[torch.Tensor]],
        steps: list[torch.Tensor],
        scale: float,
    ) -> None:
        """Update `params` in place in one call, with `states` in the order of `roles` and `grads` times `scale`, and
        count `steps`: with the bits of torch on their device. If it raises, nothing has changed."""
        raise NotImplementedError


class Overlap(str, Enum):
    """How far updates of a step overlap with other work; the bits are the same with all of them.

    "off": all within `step`, and gradients are the program's to read and write. With the others an update consumes
    each gradient: `p.grad` cannot be read, nor written to but with zeros. "backward": chunk by chunk as gradients
    arrive; where a factor that needs all gradients (clipping, loss scaling) forbids it, in `step`. "forward": as
    "backward", and `step` returns before all is done: the next forward waits for what it needs, and so does a read or
    a write of a parameter; `torch.tensor(p)`, which no hook of torch shows, needs `synchronize` before.

    A gradient lives from its arrival to the update of its chunk, in host memory that is free, in the dtype in which it
    arrives: 12 bytes a parameter in place of 16 (float32 AdamW), and the gradients of a few chunks. A sum of several is
    kept in float32 until the last one. With `max_grad_norm` or `loss_scale` all gradients stay until the step.

    Weights must stay as they are between the backward and `step`: `step` raises where they were written to. So does a
    forward there that uses a weight which is updated already; another thread's waits for the step.
    """

    OFF = "off"
    BACKWARD = "backward"
    FORWARD = "forward"


def choice(wanted: str) -> Overlap:
    """Return the `Overlap` that `wanted` names. Raises ValueError with all valid values for anything else."""
    try:
        return Overlap(wanted)
    except ValueError:
        *others, last = (repr(known.value) for known in Overlap)
        raise ValueError(f"overlap must be {', '.join(others)} or {last}, got {wanted!r}") from None


def refuse_others(name: str, others: Mapping[str, object]) -> None:
    """Raise TypeError if `name`, a function, was called with keywords that it has not."""
    if "gradients" in others:
        raise TypeError(
            f"{name}() has no gradients= any more, got {others['gradients']!r}: with overlap='backward' or 'forward' "
            f"updates consume gradients as they arrive (12 bytes a parameter), with overlap='off' they are visible"
        )
    for other in others:
        raise TypeError(f"{name}() got an unexpected keyword argument {other!r}")


class LossScale:
    """What a float16 loss is multiplied by, so that small gradients do not vanish: `torch.amp.GradScaler`'s rule.

    A step whose gradients are not all finite is skipped, and the scale multiplied by `backoff_factor`; after
    `growth_interval` steps in a row without that it is multiplied by `growth_factor`. With both factors 1 it is static.
    `value` is the present scale, `skipped` the number of steps that were skipped.

    Raises ValueError for a scale that is not positive and finite, and for factors on the wrong side of 1.
    """

    def __init__(
        self,
        value: float = 2.0**16,
        *,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
    ) -> None:
        if not (is_number(value) and value > 0 and math.isfinite(value)):
            raise ValueError(f"a loss scale must be positive and finite, got {value!r}")
        factors = is_number(growth_factor) and is_number(backoff_factor)
        if not (factors and 1 <= growth_factor < math.inf and 0 < backoff_factor <= 1):
            raise ValueError(
                f"expected growth_factor >= 1 and 0 < backoff_factor <= 1, got {growth_factor!r} and {backoff_factor!r}"
            )
        if not (isinstance(growth_interval, int) and growth_interval >= 1):
            raise ValueError(f"growth_interval must be an int of steps, at least 1, got {growth_interval!r}")
        self.value = value
        self.growth_factor, self.backoff_factor, self.growth_interval = growth_factor, backoff_factor, growth_interval
        self.skipped = 0
        """Steps skipped so far."""
        self._finite_in_a_row = 0

    def update(self, *, finite: bool) -> None:
        """Adapt the scale to a step whose gradients were all `finite`, or not. The optimizer calls it once a step."""
        if not finite:
            self.value *= self.backoff_factor
            self.skipped += 1
            self._finite_in_a_row = 0
            return
        self._finite_in_a_row += 1
        if self._finite_in_a_row == self.growth_interval:
            grown = self.value * self.growth_factor
            self.value = grown if math.isfinite(grown) else self.value
            self._finite_in_a_row = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the state for `load_state_dict`."""
        return {"value": self.value, "skipped": self.skipped, "finite_in_a_row": self._finite_in_a_row}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict`."""
        self.value, self.skipped = float(state["value"]), int(state["skipped"])
        self._finite_in_a_row = int(state["finite_in_a_row"])


def loss_scale(wanted: LossScale | float | str | None) -> LossScale | None:
    """Return the `LossScale` for an option: "dynamic", a constant number, a `LossScale`, or None."""
    if wanted is None or isinstance(wanted, LossScale):
        return wanted
    if wanted == "dynamic":
        return LossScale()
    if isinstance(wanted, bool) or not is_number(wanted):
        raise ValueError(f"loss_scale must be 'dynamic', a number or a LossScale, got {wanted!r}")
    return LossScale(float(wanted), growth_factor=1.0, backoff_factor=1.0)


def check_max_grad_norm(wanted: float | None) -> None:
    """Raise ValueError unless `wanted` is a positive number, or None."""
    if wanted is not None and not (is_number(wanted) and wanted > 0):
        raise ValueError(f"max_grad_norm must be a positive number or None, got {wanted!r}")


def is_number(value: Any) -> bool:
    """Return whether `value` is a real number, or a tensor of one element."""
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and not value.is_complex()
    return hasattr(value, "__float__")


def clip_factor(norm: float, max_norm: float | None) -> float:
    """Return the factor of `torch.nn.utils.clip_grad_norm_` for gradients of that norm; NaN if the norm is NaN."""
    if max_norm is None:
        return 1.0
    factor = max_norm / (norm + 1e-6)
    return 1.0 if factor > 1.0 else factor
