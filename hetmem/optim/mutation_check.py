"""What a backward leaves to its step: which gradients have arrived, and whether weights, gradients and hyper-parameters
are unchanged since updates within the backward used them.

How many gradients of a parameter a step has is learned from the steps before: the most ever seen. The first step
overlaps nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from hetmem import torch_private
from hetmem.engine.gradient_views import ConsumedGradient, is_as_it_was, show_gradient, take_gradient
from hetmem.engine.write_check import WriteCheck
from hetmem.memory.chunk import ManagedParameter
from hetmem.optim.chunk_update import ChunkUpdate
from hetmem.optim.members import Part
from hetmem.optim.options import Gradients, advice
from hetmem.optim.states import SteppingOptimizer
from hetmem.optim.update_pass import Passes

_NAMED = 32  # parameters that an error names

GOES_THROUGH = (
    "A loss that only goes through the model, as a GAN's generator's does, begins updates too: requires_grad_(False) "
    "on the model for the length of its backward"
)
"""Names the usual cause of a gradient, or a forward, after an update has begun."""


class Arrivals:
    """Counts one optimizer's gradients on one runtime. `sees_all`: whether it gets all those of the next step."""

    def __init__(self, *, sees_all: bool) -> None:
        self._now: Counter[int] = Counter()
        self._most: Counter[int] = Counter()
        self._expected: dict[int, int] = {}
        """Counts after which the running backward has no more, if that is known: see `intercept.backward`."""
        self._sees_all = sees_all

    def __bool__(self) -> bool:
        """Return whether any gradient has arrived in this step."""
        return bool(self._now)

    @property
    def learned(self) -> bool:
        """Whether a step has shown how many gradients there are."""
        return bool(self._most)

    def expect(self, managed: ManagedParameter, more: int) -> None:
        """Expect `more` gradients of `managed` in the backward that begins."""
        self._expected[id(managed)] = self._now[id(managed)] + more

    def count(self, managed: ManagedParameter) -> None:
        """Count a gradient of `managed` that has arrived."""
        self._now[id(managed)] += 1

    def of(self, managed: ManagedParameter) -> int:
        """Return how many gradients of `managed` this step has."""
        return self._now[id(managed)]

    def complete(self, managed: ManagedParameter) -> bool:
        """Return whether as many gradients of `managed` have arrived as any step had, and all that are expected."""
        usual = self._most[id(managed)] or max(self._most.values(), default=1)  # for one that never had any
        return self._now[id(managed)] >= max(usual, self._expected.get(id(managed), 0))

    def end_step(self, *, sees_all: bool) -> None:
        """Learn from the counts of the step that ends; another begins."""
        if self._sees_all:
            for key, count in self._now.items():
                self._most[key] = max(self._most[key], count)
        self._sees_all = sees_all
        self._now.clear()
        self._expected.clear()


class MutationCheck:
    """Checks, at a step, that nothing changed which an optimizer's updates during the backward used."""

    def __init__(self, passes: Passes, writes: WriteCheck) -> None:
        self._passes, self._writes = passes, writes
        self._checked = False
        self._marks, self._shows = Marks(), False

    def show(self, begun: Iterable[ChunkUpdate]) -> None:
        """Show the used-up streamed gradients of `begun` as such, from the end of the backward until the step
        begins."""
        self._shows = True
        self._marks.put(part.managed for update in begun for part in update.parts)

    def show_no_more(self, begun: Iterable[ChunkUpdate]) -> None:
        """End `show` as the step begins, and find out whether the program cleared gradients of `begun` meanwhile."""
        for update in begun if self._shows else ():
            for part in update.parts:
                if not is_as_it_was(part.managed.parameter.grad, part.gradient):  # dropped or zeroed by the program
                    update.edited = True
        self._shows = False
        self._marks.drop()

    def leave(self, begun: Iterable[ChunkUpdate]) -> None:
        """Mark the gradients of `begun`, which the step has used up, so that reading or adding to them raises."""
        self._marks.put((part.managed for update in begun for part in update.parts), stepped=True)

    def show_more(self, parameters: Iterable[ManagedParameter], *, within: bool) -> None:
        """Show the gradients of `parameters` as used up too; `within`: a backward runs, which has not called `show`."""
        if self._shows or within:
            self._marks.put(parameters)

    def check(self, begun: Sequence[ChunkUpdate], optimizer: SteppingOptimizer) -> None:
        """Raise RuntimeError if an input of the updates in `begun` that the program can reach changed since. Does
        nothing in a repeated step, as the failed one changed them itself."""
        if self._checked:
            return
        groups = optimizer.groups_by_parameter() if begun else {}
        streamed = optimizer.gradients is Gradients.STREAMED
        for update in begun:
            shown = all(part.managed.parameter.grad is part.gradient for part in update.parts)
            edited = update.edited or not (shown or streamed) or any(map(self._passes.is_edited, update.parts))
            if edited or self._have_changed(update, groups):
                raise changed(update.parts, optimizer, begun)
        self._checked = True

    def _have_changed(self, update: ChunkUpdate, groups: dict[int, dict[str, Any]]) -> bool:
        """Return whether options of groups, or weights, differ from those with which `update` was made."""
        compared: set[tuple[int, int]] = set()  # most parts share the options of one group
        for part in update.parts:
            group = groups.get(id(part.managed.parameter), {})
            if (id(part.group), id(group)) not in compared:
                if not part.matches(group):
                    return True
                compared.add((id(part.group), id(group)))
            if id(part.managed) in self._writes.noticed:
                return True
        return any(self._writes.counted(part.managed) for part in update.parts)

    def forget(self) -> None:
        """Reset at the end of a step."""
        self._checked = self._shows = False
        self._marks.drop()


def changed(parts: Sequence[Part], optimizer: SteppingOptimizer, begun: Iterable[ChunkUpdate]) -> RuntimeError:
    """Return the error for an input of the updates of `parts` that changed; `begun` are the step's updates."""
    names = ", ".join(part.managed.name for part in parts[:3])
    return RuntimeError(
        f"weights, gradients or hyper-parameters of {names} … changed after their update had begun during backward "
        f"(overlap={optimizer.overlap.value!r}): use max_grad_norm= to clip and loss_scale= to scale, change a "
        f"learning rate behind step() (scheduler.step() too), or set overlap='off'. {updated_already(begun)}"
    )


def edits_gradients(managed: ManagedParameter, optimizer: SteppingOptimizer) -> RuntimeError:
    """Return the error for a program that changes the gradient of `managed` between the backward and the first step."""
    return RuntimeError(
        f"the gradient of {managed.name} was changed between backward() and step(), and from the next step on it will "
        f"have been used by then (overlap={optimizer.overlap.value!r}): use max_grad_norm= to clip and loss_scale= to "
        f"scale, or set overlap='off'. No parameter is updated yet"
    )


def updated_already(begun: Iterable[ChunkUpdate]) -> str:
    """Return the sentence that names the parameters which this step has updated, or is updating."""
    names = [part.managed.name for update in begun if update.begun for part in update.parts]
    if not names:
        return "No parameter is updated yet"
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"Updated already: {', '.join(names[:_NAMED])}{more}"


def came_late(managed: ManagedParameter, optimizer: SteppingOptimizer, begun: Iterable[ChunkUpdate]) -> RuntimeError:
    """Return the error for a gradient of `managed` that arrives after its update has begun."""
    return RuntimeError(
        f"a gradient of {managed.name} arrived after its update had begun (overlap={optimizer.overlap.value!r}): "
        f"either step() was not called after the last backward, or this step has more backwards than any before: "
        f"{advice(optimizer.gradients)}, or begin with the step that has most (streamed gradients allow one). "
        f"{GOES_THROUGH}. To leave a step out, or after a backward that did not end, call the optimizer's "
        f"forget_step() and zero_grad(): it goes on from the weights that are updated. {updated_already(begun)}"
    )


def half_updated(parameters: Sequence[ManagedParameter]) -> RuntimeError:
    """Return the error for a step after the update of `parameters`, or of their group, failed half-way."""
    names = ", ".join(managed.name for managed in parameters[:3])
    return RuntimeError(
        f"the update of {names} … failed when some of its elements were one step further than others: load a checkpoint"
    )


class Marks:
    """The parameters of one optimizer whose gradients are shown as used up."""

    def __init__(self) -> None:
        self._marked: list[torch.Tensor] = []
        self._made: dict[ManagedParameter, ConsumedGradient] = {}

    def put(self, parameters: Iterable[ManagedParameter], *, stepped: bool = False) -> None:
        """Mark the gradients of those of `parameters` that have none as used up; once `stepped`, until cleared."""
        with torch_private.NoFunctionsOfSubclasses():
            for managed in parameters:
                parameter = managed.parameter
                if parameter.grad is not None:
                    continue
                mark = self._mark(managed)
                mark.hetmem_zeroed, mark.hetmem_stepped = False, stepped
                show_gradient(parameter, mark)
                if not stepped:
                    self._marked.append(parameter)

    def _mark(self, managed: ManagedParameter) -> ConsumedGradient:
        """Return the tensor that stands for the used-up gradient of `managed`."""
        parameter, made = managed.parameter, self._made.get(managed)
        if made is None or made.device != parameter.device:
            made = self._made[managed] = ConsumedGradient(parameter, managed.name)
        return made

    def drop(self) -> None:
        """Set every marked gradient to None."""
        for parameter in self._marked:
            if isinstance(parameter.grad, ConsumedGradient):
                take_gradient(parameter)
        self._marked.clear()
