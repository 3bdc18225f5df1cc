"""The step of parameters that are whole on the device, states and all: one call of torch's kernel for each group.

Chunks, jobs and workers have no part in it: nothing moves, and an update that begins is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import compress
from operator import attrgetter, is_
from typing import Any, Protocol, runtime_checkable

import torch

from hetmem.cpu import square_sum_tasks, square_sums_on_device
from hetmem.cpu.workers import WorkerPool
from hetmem.engine.runtime import Runtime
from hetmem.memory.chunk import ManagedParameter, Role, address_of
from hetmem.optim.chunk_update import Sums
from hetmem.schedule.update_split import Way

Tensors = list[torch.Tensor]

# Looked up of each parameter in each step: by C alone.
_ADDRESS, _STRIDES = torch.Tensor.data_ptr, torch.Tensor.stride
_LAYOUT, _DTYPE, _NBYTES = attrgetter("layout"), attrgetter("dtype"), attrgetter("nbytes")
_COUNT = attrgetter("is_cpu", "dtype", "ndim")


@runtime_checkable
class Whole(Protocol):
    """A rule that updates any number of parameters in one call."""

    def roles(self, group: dict[str, Any], dtype: torch.dtype) -> tuple[Role, ...]:
        """See `Rule`."""

    def whole(
        self,
        group: dict[str, Any],
        params: Tensors,
        grads: Tensors,
        states: Sequence[Tensors],
        steps: Tensors,
        scale: float,
    ) -> None:
        """Update `params` in place, with `states` in the order of `roles` and `grads` times `scale`, and count `steps`:
        with the bits of torch where they lie. Raises before anything is changed, if at all."""


@dataclass(slots=True, eq=False)
class WholeUpdate:
    """What one step updates of a `WholeGroup`."""

    of: WholeGroup
    group: dict[str, Any]
    managed: list[ManagedParameter]
    params: Tensors
    grads: Tensors
    states: list[Tensors]
    steps: Tensors

    def square_sums(self, workers: WorkerPool) -> list[Sums | torch.Tensor]:
        """Sum up the squares of the gradients; see `hetmem.cpu.norm`."""
        flats = [torch.as_strided(grad, (grad.numel(),), (1,)) for grad in self.grads]
        if flats[0].device.type != "cpu":
            return list(map(square_sums_on_device, flats))
        made = [square_sum_tasks(flat) for flat in flats]
        workers.run([task for tasks, _ in made for task in tasks])
        return [sums for _, sums in made]

    def carry_out(self, rule: Whole, scale: float) -> None:
        """Update all, or raise with nothing changed."""
        runtime, began = self.of.runtime, self.of.runtime.events.here()
        chunks = dict.fromkeys(managed.chunk for managed in self.managed) if runtime.memory.uses_copies else {}
        with runtime.unwatched(), runtime.traffic.updated_at_home(chunks):
            rule.whole(self.group, self.params, self.grads, self.states, self.steps, scale)
            torch.autograd.graph.increment_version(self.params)
            for managed, parameter in zip(self.managed, self.params, strict=True):
                managed.version = parameter._version
        runtime.statistics.updated_bytes[Way.RESIDENT] += sum(map(_NBYTES, self.params))
        runtime.events.updated("all chunks", began)


class WholeGroup:
    """Parameters of one group of an optimizer, all of one model and with homes on the device, and where they lie."""

    def __init__(self, runtime: Runtime, managed: list[ManagedParameter], roles: tuple[Role, ...]) -> None:
        self.runtime, self.roles, self._managed = runtime, roles, managed
        self.parameters = [each.parameter for each in managed]
        self._names = [role.name for role in self.roles]
        self._dtypes = [each.chunk.dtype for each in managed]
        self._strides = [each.stride for each in managed]
        self._at = [each.home_address for each in managed]
        self._states_at = [[_address(each, role) for each in managed] for role in roles]

    def is_of(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether it is of `parameters`, and they still are whole on the device."""
        same = len(parameters) == len(self.parameters) and all(map(is_, parameters, self.parameters))
        return same and self.runtime.memory.resident

    def update(self, group: dict[str, Any], shown: Any) -> WholeUpdate | None:
        """What a step is to update, of what has a gradient; `shown` are the optimizer's states. None if something is
        not as the kernel needs it (no state yet, a gradient of another layout, other memory than the home's)."""
        given: list[Any] = [parameter.grad for parameter in self.parameters]
        live = [grad is not None for grad in given]
        pick: Callable[[Iterable[Any]], list[Any]] = list if all(live) else lambda each: list(compress(each, live))
        params, grads, managed = pick(self.parameters), pick(given), pick(self._managed)
        entries: list[Any] = list(map(shown.get, params))
        if not params or not all(entries) or set(map(_LAYOUT, grads)) != {torch.strided}:
            return None
        try:
            states = [[entry[name] for entry in entries] for name in self._names]
            steps = [entry["step"] for entry in entries]
        except KeyError:
            return None
        as_at_home = (
            list(map(_ADDRESS, params)) == pick(self._at)
            and list(map(_STRIDES, params)) == pick(self._strides) == list(map(_STRIDES, grads))
            and list(map(_DTYPE, grads)) == pick(self._dtypes)
            and set(map(_COUNT, steps)) == {(True, torch.float32, 0)}
            and all(list(map(_ADDRESS, some)) == pick(at) for some, at in zip(states, self._states_at, strict=True))
        )
        return WholeUpdate(self, group, managed, params, grads, states, steps) if as_at_home else None


def _address(managed: ManagedParameter, role: Role) -> int:
    """Where `role` of `managed` lies; 0 if it has no home, or no elements."""
    home = managed.chunk.homes.get(role)
    if home is None or not managed.numel:
        return 0
    return address_of(home.memory) + managed.places(role)[role.name]
