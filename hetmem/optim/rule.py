"""What an optimizer computes, apart from where its memory is: the arithmetic of one parameter's update.

A rule sees flat tensors. It must not know chunks, tiers or transfers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch

from hetmem.memory.chunk import Role

Task = Callable[[], None]


class HalfComputedError(Exception):
    """A task that failed before has changed some of its memory, so that it cannot run again."""


@dataclass(slots=True, eq=False)
class ParameterUpdate:
    """One parameter's share of a step: 1-D tensors of one length, in the order of the parameter's memory.

    `group` is its parameter group and `state` its entry of `optimizer.state`: what in there is no tensor of the
    parameter's shape (a step count) is the rule's to read and write. The `fresh` ones among `states` were never made;
    they are zero. `number` is the parameter's place in the optimizer. `grad` is multiplied by `grad_scale` in float32.
    `copy`, if given, gets the new parameter, rounded.
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


There = Callable[[Sequence[Mapping[str, torch.Tensor]]], None]
"""Updates on the device, on the current stream, of tensors there: for each parameter by role, "param", "grad", the
states, and "compute" if there is a copy."""


@runtime_checkable
class Streamable(Protocol):
    """A rule whose updates can be made on a device to which states are brought."""

    def there(self, updates: Sequence[ParameterUpdate]) -> There:
        """`updates`, with the bits of `tasks` where the device `equals_host`. Counts the step in each `state`."""
        ...


class Rule(Protocol):
    """Elementwise arithmetic: what becomes of an element depends on that element alone, and on numbers."""

    runs_on_device: bool
    """Whether there is an `on_device`."""
    seed: int | None
    """What chance depends on; None if nothing does."""

    def roles(self, group: dict[str, Any], dtype: torch.dtype) -> tuple[Role, ...]:
        """The states, beside numbers, of a parameter of `dtype` in `group`."""
        ...

    def like(self, group: dict[str, Any]) -> torch.optim.Optimizer:
        """An optimizer of torch's, of some parameter, that computes the same with the options of `group`."""
        ...

    def prepare(self, dtype: torch.dtype, gradient_dtype: torch.dtype, copy_dtype: torch.dtype | None) -> None:
        """Compile what `tasks` run for parameters of `dtype`, gradients of `gradient_dtype` and copies of `copy_dtype`
        (None: no)."""

    def tasks(self, update: ParameterUpdate) -> list[Task]:
        """What must run, in any order and on any threads, for `update` in host memory. Counts the step in `state`. A
        task that raised can run again, or raises `HalfComputedError` then."""
        ...

    def equals_host(
        self, device: torch.device, group: dict[str, Any], dtype: torch.dtype, copy_dtype: torch.dtype | None
    ) -> bool:
        """Whether updates on `device` of parameters of `dtype` in `group`, with copies of `copy_dtype` (None: without),
        have the bits of `tasks`. Tried once."""
        ...

    def on_device(self, updates: list[ParameterUpdate], *, as_host: bool) -> None:
        """`updates` in the memory of a GPU, on the present stream: with the bits of `tasks` if `as_host`, where it
        `equals_host`, else with those of torch there."""
        ...
