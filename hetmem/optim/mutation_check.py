"""What a backward leaves to its step: which gradients have arrived, and whether weights and hyper-parameters are
unchanged since updates within the backward used them.

How many gradients of a parameter a step has is learned from the steps before: the most ever seen. The first step
overlaps nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import chain, repeat
from operator import attrgetter, ge
from typing import Any

from hetmem.engine.gradient_views import are_as_they_were
from hetmem.engine.write_check import WriteCheck
from hetmem.memory.chunk import ManagedParameter
from hetmem.optim.chunk_update import ChunkUpdate
from hetmem.optim.members import Part
from hetmem.optim.states import SteppingOptimizer

# Read for each parameter in each step: these run in C.
_MANAGED, _PARAMETERS = attrgetter("members.managed"), attrgetter("members.parameters")
_GRADIENTS, _PARTS, _GROUP = attrgetter("gradients"), attrgetter("parts"), attrgetter("group")

_NAMED = 32  # parameters that an error names

GOES_THROUGH = (
    "A loss that only goes through the model, as a GAN's generator's does, begins updates too: requires_grad_(False) "
    "on the model for the length of its backward"
)
"""Names the usual cause of a gradient, or a forward, after an update has begun."""

HELD = "host memory has room to keep gradients of"


class Arrivals:
    """Counts one optimizer's gradients on one runtime. `sees_all`: whether it gets all those of the next step."""

    def __init__(self, *, sees_all: bool) -> None:
        self._now: defaultdict[int, int] = defaultdict(int)
        self._most: dict[int, int] = {}
        self._most_of_any = 1
        """That is usual for a parameter that never had a gradient."""
        self._expected: dict[int, int] = {}
        """Counts after which the running backward has no more, if that is known: see `intercept.backward`."""
        self._sees_all = sees_all
        self.begun = self.learned = False
        """Whether any gradient has arrived in this step, and whether a step has shown how many there are."""

    def expect(self, managed: ManagedParameter, more: int) -> None:
        """Expect `more` gradients of `managed` in the backward that begins."""
        self._expected[id(managed)] = self.of(managed) + more

    def count(self, arrived: Iterable[ManagedParameter]) -> None:
        """Count a gradient of each of those that have `arrived`."""
        now, self.begun = self._now, True
        for key in map(id, arrived):
            now[key] += 1

    def of(self, managed: ManagedParameter) -> int:
        """Return how many gradients of `managed` this step has."""
        return self._now.get(id(managed), 0)

    def complete(self, managed: Iterable[ManagedParameter]) -> bool:
        """Return whether as many gradients of each of `managed` have arrived as any step had, and all that are
        expected. Runs for each chunk in each step: in C alone."""
        keys = [*map(id, managed)]
        now, usual = map(self._now.get, keys, repeat(0)), map(self._most.get, keys, repeat(self._most_of_any))
        return False not in map(ge, now, map(max, usual, map(self._expected.get, keys, repeat(0))))

    def end_step(self, *, sees_all: bool) -> None:
        """Learn from the counts of the step that ends; another begins."""
        if self._sees_all:
            most = map(max, self._now.values(), map(self._most.get, self._now, repeat(0)))
            self._most |= zip(self._now, most, strict=True)
            self._most_of_any = max(self._most.values(), default=1)
        self._sees_all, self.begun, self.learned = sees_all, False, bool(self._most)
        self._now.clear()
        self._expected.clear()


def found_changes(
    begun: Sequence[ChunkUpdate], optimizer: SteppingOptimizer, writes: WriteCheck
) -> RuntimeError | None:
    """Return the error if an input of the updates in `begun` that the program can reach has changed since."""
    groups = optimizer.groups_by_parameter() if begun else {}
    if begun and _have_changed(begun, groups, writes):
        first = next(update for update in begun if _have_changed([update], groups, writes))
        return changed(first.parts, optimizer, begun)
    return None


def _have_changed(updates: Sequence[ChunkUpdate], groups: dict[int, dict[str, Any]], writes: WriteCheck) -> bool:
    """Return whether gradients, weights, or options of groups differ from those with which `updates` were made, or may
    do so. Looks at each parameter in C alone."""
    managed = [*chain.from_iterable(map(_MANAGED, updates))]
    parameters = [*chain.from_iterable(map(_PARAMETERS, updates))]
    if not are_as_they_were(parameters, [*chain.from_iterable(map(_GRADIENTS, updates))]):
        return True
    if not writes.noticed.isdisjoint(map(id, managed)) or writes.all_counted(managed):
        return True
    used = [*map(_GROUP, chain.from_iterable(map(_PARTS, updates)))]
    now = [*map(groups.get, map(id, parameters), repeat({}))]
    distinct = dict(zip(zip(map(id, used), map(id, now), strict=True), zip(used, now, strict=True), strict=True))
    return any(used != {name: now[name] for name in now if name != "params"} for used, now in distinct.values())


def changed(parts: Sequence[Part], optimizer: SteppingOptimizer, begun: Iterable[ChunkUpdate]) -> RuntimeError:
    """Return the error for an input of the updates of `parts` that changed; `begun` are the step's updates."""
    names = ", ".join(part.managed.name for part in parts[:3])
    return RuntimeError(
        f"weights, gradients or hyper-parameters of {names} … changed after their update had begun during backward "
        f"(overlap={optimizer.overlap.value!r}): use max_grad_norm= to clip and loss_scale= to scale, change a "
        f"learning rate behind step() (scheduler.step() too), or set overlap='off'. {updated_already(begun)}"
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
        f"either step() was not called after the last backward, or this step has more backwards than any before, or "
        f"than {HELD} in the first one: use overlap='off', or begin with the step that has most. {GOES_THROUGH}. To "
        f"leave a step out, or after a backward that did not end, call the optimizer's forget_step() and zero_grad(): "
        f"it goes on from the weights that are updated. {updated_already(begun)}"
    )


def used_again(
    managed: ManagedParameter, optimizer: SteppingOptimizer, begun: Iterable[ChunkUpdate], *, hurries: bool
) -> RuntimeError:
    """Return the error for a use of `managed` after its update has begun, in a first step if that `hurries`."""
    more = f", or it is the first of a step that has more backwards than {HELD}" if hurries else ""
    return RuntimeError(
        f"{managed.name} is used again, by a recomputation within backward, or by a forward, a read or a write before "
        f"step(), after its update had begun (overlap={optimizer.overlap.value!r}), as all its gradients had "
        f"arrived{more}: call step() before (to leave it out, or after a backward that did not end, forget_step() and "
        f"zero_grad()), or use overlap='off'. {GOES_THROUGH}. {updated_already(begun)}"
    )


def states_used(optimizer: SteppingOptimizer, begun: Iterable[ChunkUpdate]) -> RuntimeError:
    """Return the error for optimizer states that the program uses after updates have begun."""
    return RuntimeError(
        f"optimizer states are used before step(), after updates had begun during backward "
        f"(overlap={optimizer.overlap.value!r}), which change them: use them before backward() or after step() (to "
        f"leave it out, forget_step() and zero_grad()), or set overlap='off'. {updated_already(begun)}"
    )


def backward_ended(how: str, optimizer: SteppingOptimizer, begun: Iterable[ChunkUpdate]) -> RuntimeError:
    """Return the error for what a step cannot do any more as its backward has ended early: `how`, the error there."""
    return RuntimeError(
        f"the backward of this step has ended with {how}, after updates had begun "
        f"(overlap={optimizer.overlap.value!r}): call the optimizer's forget_step() and zero_grad(), which goes on "
        f"from the weights that are updated, or load a checkpoint. {updated_already(begun)}"
    )


def half_updated(parameters: Sequence[ManagedParameter]) -> RuntimeError:
    """Return the error for a step after the update of `parameters`, or of their group, failed half-way."""
    names = ", ".join(managed.name for managed in parameters[:3])
    return RuntimeError(
        f"the update of {names} … failed when some of its elements were one step further than others: load a checkpoint"
    )
