"""What a backward leaves to its step: which gradients have arrived, and whether weights, gradients and hyper-parameters
still are what updates that began within it took them for.

How often gradients of a parameter arrive in a step is learned from the steps before: the most that was ever seen. The
first step overlaps nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from hetmem import torch_private
from hetmem.engine.gradient_views import UsedUp, is_as_it_was, show_gradient, take_gradient
from hetmem.engine.write_check import WriteCheck
from hetmem.memory.chunk import ManagedParameter
from hetmem.optim.chunk_update import ChunkUpdate, Part
from hetmem.optim.options import Gradients, advice
from hetmem.optim.states import SteppingOptimizer
from hetmem.optim.update_pass import Passes

_NAMED = 32  # parameters that an error names

GOES_THROUGH = (
    "A loss that only goes through the model, as a GAN's generator's does, begins updates too: requires_grad_(False) "
    "on the model for the length of its backward"
)
"""The usual reason for a gradient, or a forward, behind an update that has begun."""


class Arrivals:
    """Of one optimizer's gradients on one runtime. `sees_all`: whether it is told of all in the step that begins."""

    def __init__(self, *, sees_all: bool) -> None:
        self._now: Counter[int] = Counter()
        self._most: Counter[int] = Counter()
        self._expected: dict[int, int] = {}
        """After which the backward that runs has no more, where that was counted: see `intercept.backward`."""
        self._sees_all = sees_all

    def __bool__(self) -> bool:
        """Whether any has arrived in this step."""
        return bool(self._now)

    @property
    def learned(self) -> bool:
        """Whether a step has shown how many there are."""
        return bool(self._most)

    def expect(self, managed: ManagedParameter, more: int) -> None:
        """So many `more` of `managed` come in the backward that begins."""
        self._expected[id(managed)] = self._now[id(managed)] + more

    def count(self, managed: ManagedParameter) -> None:
        """One of `managed` has arrived."""
        self._now[id(managed)] += 1

    def of(self, managed: ManagedParameter) -> int:
        """Those of `managed` in this step."""
        return self._now[id(managed)]

    def complete(self, managed: ManagedParameter) -> bool:
        """Whether all of `managed` that a step ever had are there, and all that are expected."""
        usual = self._most[id(managed)] or max(self._most.values(), default=1)  # for one that never had any
        return self._now[id(managed)] >= max(usual, self._expected.get(id(managed), 0))

    def end_step(self, *, sees_all: bool) -> None:
        """What was counted is learned; a step begins."""
        if self._sees_all:
            for key, count in self._now.items():
                self._most[key] = max(self._most[key], count)
        self._sees_all = sees_all
        self._now.clear()
        self._expected.clear()


class MutationCheck:
    """What one optimizer's backward left to its step."""

    def __init__(self, passes: Passes, writes: WriteCheck) -> None:
        self._passes, self._writes = passes, writes
        self._checked = False
        self._marks, self._shows = Marks(), False

    def show(self, begun: Iterable[ChunkUpdate]) -> None:
        """The backward is over: those streamed gradients of `begun` that are used up are shown as that until the step
        begins."""
        self._shows = True
        self._marks.put(part.managed for update in begun for part in update.parts)

    def show_no_more(self, begun: Iterable[ChunkUpdate]) -> None:
        """The step begins, and finds no gradients of `begun` that are used up."""
        for update in begun if self._shows else ():
            for part in update.parts:
                if not is_as_it_was(part.managed.parameter.grad, part.gradient):  # dropped, or zeroed, by the user
                    update.disturbed = True
        self._shows = False
        self._marks.drop()

    def leave(self, begun: Iterable[ChunkUpdate]) -> None:
        """The step is over, and has used up gradients of `begun`: who computes with them, or adds to them, is told."""
        self._marks.put((part.managed for update in begun for part in update.parts), stepped=True)

    def show_more(self, parameters: Iterable[ManagedParameter]) -> None:
        """The gradients of `parameters` have been used up just now."""
        if self._shows:
            self._marks.put(parameters)

    def check(self, begun: Sequence[ChunkUpdate], optimizer: SteppingOptimizer) -> None:
        """Whatever was updated during backward, with a gradient that others see, must still be as it was then. What a
        step has seen once, it changes itself: one that is repeated looks no more."""
        if self._checked:
            return
        groups = optimizer.groups_by_parameter() if begun else {}
        streamed = optimizer.gradients is Gradients.STREAMED
        seen: list[tuple[ChunkUpdate, Part]] = []
        for update in begun:
            as_used = not update.disturbed
            for part in update.parts:
                if part.managed.parameter.grad is part.gradient:
                    seen.append((update, part))
                else:
                    as_used = as_used and streamed  # it is used up
            if not as_used or self._have_changed(update, groups):
                raise changed(update.parts, optimizer, begun)
        for (update, _), same in zip(seen, self._passes.as_sampled(part for _, part in seen), strict=True):
            if not same:
                raise changed(update.parts, optimizer, begun)
        self._checked = True

    def _have_changed(self, update: ChunkUpdate, groups: dict[int, dict[str, Any]]) -> bool:
        """Whether options of groups, or weights, are not what `update` was made with."""
        said: set[tuple[int, int]] = set()  # most are in one group, whose options are one dictionary
        for part in update.parts:
            group = groups.get(id(part.managed.parameter), {})
            if (id(part.group), id(group)) not in said:
                if not part.says(group):
                    return True
                said.add((id(part.group), id(group)))
            if id(part.managed) in self._writes.noticed:
                return True
        return any(self._writes.counted(part.managed) for part in update.parts)

    def forget(self) -> None:
        """The step is over."""
        self._checked = self._shows = False
        self._marks.drop()


def changed(parts: Sequence[Part], optimizer: SteppingOptimizer, begun: Iterable[ChunkUpdate]) -> RuntimeError:
    """What is wrong where something of `parts` is not what it was; `begun` are of this step."""
    names = ", ".join(part.managed.name for part in parts[:3])
    return RuntimeError(
        f"weights, gradients or hyper-parameters of {names} … changed after their update had begun during backward "
        f"(overlap={optimizer.overlap.value!r}): use max_grad_norm= to clip and loss_scale= to scale, change a "
        f"learning rate behind step() (scheduler.step() too), or set overlap='off'. {updated_already(begun)}"
    )


def edits_gradients(managed: ManagedParameter, optimizer: SteppingOptimizer) -> RuntimeError:
    """What is wrong where a program changes the gradient of `managed` between the backward and the first step."""
    return RuntimeError(
        f"the gradient of {managed.name} was changed between backward() and step(), and from the next step on it will "
        f"have been used by then (overlap={optimizer.overlap.value!r}): use max_grad_norm= to clip and loss_scale= to "
        f"scale, or set overlap='off'. No parameter is updated yet"
    )


def updated_already(begun: Iterable[ChunkUpdate]) -> str:
    """The sentence that says which parameters this step has updated, or is updating."""
    names = [part.managed.name for update in begun if update.begun for part in update.parts]
    if not names:
        return "No parameter is updated yet"
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"Updated already: {', '.join(names[:_NAMED])}{more}"


def came_late(managed: ManagedParameter, optimizer: SteppingOptimizer, begun: Iterable[ChunkUpdate]) -> RuntimeError:
    """What is wrong where a gradient of `managed` comes and its update has begun."""
    return RuntimeError(
        f"a gradient of {managed.name} arrived after its update had begun (overlap={optimizer.overlap.value!r}): "
        f"either step() was not called after the last backward, or this step has more backwards than any before: "
        f"{advice(optimizer.gradients)}, or begin with the step that has most (streamed gradients allow one). "
        f"{GOES_THROUGH}. To leave a step out, or after a backward that did not end, call the optimizer's "
        f"forget_step() and zero_grad(): it goes on from the weights that are updated. {updated_already(begun)}"
    )


def half_updated(parameters: Sequence[ManagedParameter]) -> RuntimeError:
    """Why a step does not begin where the update of `parameters`, or of what belongs to them, failed."""
    names = ", ".join(managed.name for managed in parameters[:3])
    return RuntimeError(
        f"the update of {names} … failed when some of its elements were one step further than others: load a checkpoint"
    )


class Marks:
    """The parameters of one optimizer whose gradients are shown as used up."""

    def __init__(self) -> None:
        self._marked: list[torch.Tensor] = []
        self._made: dict[ManagedParameter, UsedUp] = {}

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

    def _mark(self, managed: ManagedParameter) -> UsedUp:
        """Return the one that stands for a gradient of `managed`."""
        parameter, made = managed.parameter, self._made.get(managed)
        if made is None or made.device != parameter.device:
            element = torch.zeros(1, dtype=parameter.dtype, device=parameter.device)
            made = self._made[managed] = UsedUp(parameter, element, managed.name)
        return made

    def drop(self) -> None:
        """Let every marked gradient be None."""
        for parameter in self._marked:
            if isinstance(parameter.grad, UsedUp):
                take_gradient(parameter)
        self._marked.clear()
