"""Whose a parameter is, where several optimizers were made over it, at once or one after the other.

It remembers; it neither updates nor waits.

Note "owners": states of one name have one home for each parameter, so of two optimizers that keep the same ones the
last to make them has them, and the other may not step with what it finds there. And one alone may update a parameter
within a backward, before anybody has called its `step`: the one that was the last to step it, or the only one there is.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable
from typing import Any, Protocol

import torch

from hetmem.engine.gradients import GradientListener, GradientSink
from hetmem.engine.param_views import updated_by_another
from hetmem.errors import ManageError
from hetmem.intercept.interceptor import Interception
from hetmem.memory.chunk import ManagedParameter, Role
from hetmem.optim.overlap import Gradients, Overlap
from hetmem.optim.rule import Rule
from hetmem.optim.states import States


class Owner(Protocol):
    """An optimizer."""

    @property
    def token(self) -> object:
        """What stands for it, also when it is gone."""
        ...

    def has_state(self, managed: ManagedParameter, role: Role) -> bool:
        """Whether it shows `role` of `managed` as a state of its own."""
        ...


class SteppingOptimizer(Owner, Protocol):
    """What a step asks its optimizer for; it may change between steps."""

    overlap: Overlap
    gradients: Gradients
    rule: Rule
    states: States

    @property
    def needs_all_gradients(self) -> bool:
        """Whether the factor of gradients depends on all of them."""
        ...

    def groups_by_parameter(self) -> dict[int, dict[str, Any]]:
        """The group of each parameter, by its `id`."""
        ...

    def number_of(self, managed: ManagedParameter) -> int:
        """The place of `managed` among all parameters of the optimizer."""
        ...


class Owners:
    """Of the parameters of one managed model."""

    def __init__(self) -> None:
        self._last: dict[int, weakref.ref[Owner] | None] = {}
        self._states: dict[tuple[int, Role], object] = {}
        self._latest: object = None
        """The `token` of the optimizer that took a parameter or a state last."""
        self._settled: weakref.WeakSet[object] = weakref.WeakSet()

    def settled(self, parameters: object, owner: Owner) -> bool:
        """Whether `settle` was called for these, and no other optimizer has taken anything since."""
        return self._latest is owner.token and parameters in self._settled

    def settle(self, parameters: object, owner: Owner) -> None:
        """All of `parameters`, an object that stands for them, are the `owner`'s, with their states."""
        self._taken_by(owner)
        self._settled.add(parameters)

    def _taken_by(self, owner: Owner) -> None:
        if self._latest is not owner.token:
            self._latest = owner.token
            self._settled.clear()

    def made(self, managed: ManagedParameter, owner: Owner) -> None:
        """`owner` is going to step `managed`; if another one may too, it has to step it first."""
        self._taken_by(owner)
        last = self._last.get(id(managed), weakref.ref(owner))
        alone = last is not None and last() in (None, owner)
        self._last[id(managed)] = weakref.ref(owner) if alone else None

    def steps(self, stepped: Iterable[ManagedParameter], owner: Owner, others: Iterable[GradientListener]) -> None:
        """`owner` steps `stepped`. Raises RuntimeError if one of `others` has updated any of them in this step."""
        self._taken_by(owner)
        begun = {managed for other in others for managed in other.begun()}
        for managed in stepped:
            if managed in begun:
                raise RuntimeError(updated_by_another(managed.name))
            self._last[id(managed)] = weakref.ref(owner)

    def may_begin(self, managed: ManagedParameter, owner: Owner) -> bool:
        """Whether `owner` may update `managed` before its `step` is called."""
        last = self._last.get(id(managed))
        return last is not None and last() is owner

    def take_states(self, managed: ManagedParameter, roles: Collection[Role], owner: Owner) -> None:
        """`owner` is about to write to `roles` of `managed`. Raises RuntimeError if it has made them, and another one
        has made them anew since."""
        token = owner.token
        if all(self._states.get((id(managed), role)) is token for role in roles):
            return
        for role in roles:
            holder = self._states.get((id(managed), role), token)
            if holder is not token and owner.has_state(managed, role):
                raise RuntimeError(
                    f"{role.name} of {managed.name} is another optimizer's, which has stepped since: hetmem keeps one "
                    f"of each state for a parameter. Load a state_dict into this one to go on with it, or use "
                    f"torch.optim for one of the two"
                )
        self.give_states(managed, roles, owner)

    def give_states(self, managed: ManagedParameter, roles: Collection[Role], owner: Owner) -> None:
        """`roles` of `managed` are those of `owner`, whosever they were."""
        self._taken_by(owner)
        self._states |= {(id(managed), role): owner.token for role in roles}


_owners: weakref.WeakKeyDictionary[Interception, Owners] = weakref.WeakKeyDictionary()


def owners_of(interception: Interception) -> Owners:
    """Those of the model that `interception` manages."""
    return _owners.setdefault(interception, Owners())


def ends_with_its_optimizer(listener: GradientListener, sink: GradientSink) -> Callable[[Any], None]:
    """To be called when an optimizer is gone: takes `listener`, whoever else may hold it, out of the backwards."""
    own, sinks = weakref.ref(listener), weakref.ref(sink)

    def gone(_: Any) -> None:
        alive, watched = own(), sinks()
        if alive is not None and watched is not None:
            watched.listeners.discard(alive)

    return gone


def no_longer_managed(parameter: torch.Tensor, optimizer: str) -> ManageError:
    """What is wrong where `optimizer` steps a `parameter` that was managed when it was made."""
    return ManageError(
        f"{optimizer} cannot step a parameter of shape {tuple(parameter.shape)} that is not managed any "
        f"more: its model was released, or is a copy, as this is. Make an ordinary optimizer, or call "
        f"hetmem.manage(model, …) and make {optimizer} again, and load this one's state_dict into it"
    )


def managed_again(managed: ManagedParameter, optimizer: str) -> ManageError:
    """What is wrong where the states of `optimizer` are of another managing of the model."""
    return ManageError(
        f"{optimizer} has states of {managed.name} from before its model was released and managed again: "
        f"make it again and load this one's state_dict into it, or load its own state_dict() into itself"
    )
