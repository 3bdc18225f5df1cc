"""States of optimizers: what users see of them, whose they are, and where those of a checkpoint belong.

In `optimizer.state` are tensors that are the homes. It knows of no steps; it neither updates nor waits.

Note "owners": states of one name have one home for each parameter, so of two optimizers that keep the same ones the
last to make them has them, and the other may not step with what it finds there. And one alone may update a parameter
within a backward, before its `step` is called: the one that was the last to step it, or the only one there is.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, Protocol

import torch

from hetmem.engine.gradient_views import updated_by_another
from hetmem.engine.gradients import GradientListener, GradientSink
from hetmem.engine.param_views import is_shared
from hetmem.errors import ManageError
from hetmem.intercept import registry
from hetmem.intercept.interceptor import Interception
from hetmem.memory.chunk import Chunk, ManagedParameter, Role, address_of
from hetmem.optim.options import Gradients, Overlap, Rule

Places = dict[str, tuple[Role, torch.Tensor]]
"""The homes of a parameter's states, by the names that states have."""


class States:
    """Of one optimizer. `shown` is its `state`: entries by parameter, as torch's optimizers have them."""

    def __init__(self) -> None:
        self.shown: Any = {}
        self._versions: dict[tuple[int, str], int] = {}

    def of(self, managed: ManagedParameter) -> dict[str, Any]:
        """The entry of `managed` in `shown`, empty if it was never updated."""
        found: dict[str, Any] = self.shown[managed.parameter]
        return found

    def has(self, managed: ManagedParameter, role: Role) -> bool:
        """Whether they show `role` of `managed`."""
        return self.shown.get(managed.parameter, {}).get(role.name) is not None

    def forget_empty(self, managed: ManagedParameter) -> None:
        """torch shows no entry for a parameter of which it keeps nothing."""
        if not self.shown.get(managed.parameter, True):
            del self.shown[managed.parameter]

    def show(self, managed: ManagedParameter, role: Role) -> None:
        """`role` of `managed` is being made: its home is what users see."""
        for name, home in managed.views(role).items():
            self.shown[managed.parameter][name] = home
            self._versions[id(managed), name] = home._version

    def load(self, managed: ManagedParameter, places: Places, saved: Mapping[str, Any]) -> None:
        """What was `saved` for `managed` goes to its homes, from `meta` nothing. Step counts and the like are the
        host's, which reads them at each step; torch has sent those of a fused optimizer to where the parameter is."""
        state = self.shown[managed.parameter]
        for name, (role, home) in places.items():
            managed.chunk.homes[role].written = True
            if not saved[name].is_meta:
                home.copy_(saved[name])
            state[name] = home
            self._versions[id(managed), name] = -1  # whatever is staged of it is old
        for name, value in state.items():
            if name not in places and isinstance(value, torch.Tensor):
                state[name] = value.cpu()

    def renew(self, rule: Rule, groups: list[dict[str, Any]], names: Iterable[str]) -> None:
        """What older versions of torch have saved becomes what the present one has, as its optimizers do it: numbers
        in `shown`, and those of `names` that `groups` lack."""
        renewed = [dict(group) for group in groups]
        for group in renewed[:1]:
            rule.like(group).__setstate__({"state": self.shown, "param_groups": renewed})
        for group, new in zip(groups, renewed, strict=True):
            for name in names:
                if name in new:
                    group.setdefault(name, new[name])

    def written(self, chunk: Chunk) -> Iterable[Role]:
        """The states of `chunk` that the user has written to since this was asked last."""
        written: dict[Role, None] = {}
        homes = [(role, address_of(home.memory)) for role, home in chunk.homes.items() if role.is_state]
        versions = self._versions
        for managed in chunk.parameters if homes else ():
            state = self.shown.get(managed.parameter)
            if not managed.numel or not state:
                continue
            for role, address in homes:
                if state.get(role.name) is None:
                    continue
                for name, place in managed.places(role).items():
                    shown, key = state[name], (id(managed), name)
                    if shown.data_ptr() != address + place:
                        home = managed.views(role)[name]
                        home.copy_(shown)
                        state[name] = shown = home
                        versions[key] = -1
                    version = shown._version
                    if versions.get(key) != version:
                        versions[key] = version
                        written[role] = None
        return written

    def held(self, chunk: Chunk) -> bool:
        """Whether the program holds views of states of `chunk` beside those in `state`."""
        return any(is_shared(shown) for shown, _ in self._shown(chunk))

    def moved(self, chunk: Chunk) -> None:
        """The states of `chunk` have other homes: the tensors in `state` stay the same, and are those from now on."""
        for shown, home in self._shown(chunk):
            shown.data = home

    def _shown(self, chunk: Chunk) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """What `state` shows of `chunk`, and the homes of that."""
        for managed in chunk.parameters:
            state = self.shown.get(managed.parameter, {})
            for role in chunk.homes:
                if managed.numel and state.get(role.name) is not None:
                    for name, home in managed.views(role).items():
                        yield state[name], home


def saved_homes(
    state_dict: dict[str, Any],
    groups: list[dict[str, Any]],
    with_homes: Callable[[torch.Tensor, dict[str, Any]], tuple[ManagedParameter, tuple[Role, ...]]],
) -> list[tuple[int, ManagedParameter, Places]]:
    """Where the states in `state_dict` belong, by numbers of parameters.

    `groups` are the optimizer's own; `with_homes` gives homes to what a parameter keeps with the options of a group.
    Raises `ManageError` for states of other shapes or of another kind than these homes are for.
    """
    found = []
    for mine, theirs in zip(groups, state_dict["param_groups"], strict=False):
        for parameter, number in zip(mine["params"], theirs["params"], strict=False):
            if number not in state_dict["state"]:
                continue
            state = state_dict["state"][number]
            managed, roles = with_homes(parameter, {**mine, **theirs})
            places = {
                name: (role, home)
                for role in roles
                if state.get(role.name) is not None
                for name, home in managed.views(role).items()
            }
            _check_states(managed.name, state, roles, {name: home for name, (_, home) in places.items()})
            found.append((number, managed, places))
    return found


def _check_states(
    parameter: str, state: Mapping[str, Any], roles: tuple[Role, ...], homes: Mapping[str, torch.Tensor]
) -> None:
    """`state`, saved for `parameter`, goes into `homes`, those of `roles`. Raises `ManageError` if it cannot."""
    for role in roles:
        scaled = f"{role.name}_scale" in state
        if state.get(role.name) is not None and scaled != bool(role.scale_block):
            raise ManageError(
                f"{role.name} of {parameter} is {state[role.name].dtype} {'with' if scaled else 'without'} scales in "
                f"this checkpoint, and this optimizer keeps it as {homes[role.name].dtype}: make it with moments= as "
                f"the one that was saved"
            )
    for name, value in state.items():
        if name in homes and value.shape != homes[name].shape:
            raise ManageError(
                f"{name} of {parameter} is {tuple(value.shape)} in this checkpoint and {tuple(homes[name].shape)} here"
            )
        if name not in homes and isinstance(value, torch.Tensor) and value.dim():
            raise ManageError(
                f"{name} of {parameter}, {tuple(value.shape)} in this checkpoint, is no state of this optimizer: it is "
                f"of another kind"
            )


class SteppingOptimizer(Protocol):
    """What a step asks its optimizer for; it may change between steps."""

    overlap: Overlap
    gradients: Gradients
    max_grad_norm: float | None
    rule: Rule
    states: States
    token: object
    """Stands for the optimizer, also when it is gone."""

    @property
    def needs_all_gradients(self) -> bool:
        """Whether the factor of gradients depends on all of them."""

    def groups_by_parameter(self) -> dict[int, dict[str, Any]]:
        """The group of each parameter, by its `id`."""

    def number_of(self, managed: ManagedParameter) -> int:
        """The place of `managed` among all parameters of the optimizer."""


class Owners:
    """Of the parameters of one managed model."""

    def __init__(self) -> None:
        self._last: dict[int, weakref.ref[SteppingOptimizer] | None] = {}
        self._states: dict[tuple[int, Role], object] = {}
        self._latest: object = None
        """The `token` of the optimizer that took a parameter or a state last."""
        self._settled: weakref.WeakSet[object] = weakref.WeakSet()

    def settled(self, parameters: object, owner: SteppingOptimizer) -> bool:
        """Whether `settle` was called for these, and no other optimizer has taken anything since."""
        return self._latest is owner.token and parameters in self._settled

    def settle(self, parameters: object, owner: SteppingOptimizer) -> None:
        """All of `parameters`, an object that stands for them, are the `owner`'s, with their states."""
        self._taken_by(owner)
        self._settled.add(parameters)

    def _taken_by(self, owner: SteppingOptimizer) -> None:
        if self._latest is not owner.token:
            self._latest = owner.token
            self._settled.clear()

    def made(self, managed: ManagedParameter, owner: SteppingOptimizer) -> None:
        """`owner` is going to step `managed`; if another one may too, it has to step it first."""
        self._taken_by(owner)
        last = self._last.get(id(managed), weakref.ref(owner))
        alone = last is not None and last() in (None, owner)
        self._last[id(managed)] = weakref.ref(owner) if alone else None

    def steps(
        self, stepped: Iterable[ManagedParameter], owner: SteppingOptimizer, others: Iterable[GradientListener]
    ) -> None:
        """`owner` steps `stepped`. Raises RuntimeError if one of `others` has updated any of them in this step."""
        self._taken_by(owner)
        begun = {managed for other in others for managed in other.begun()}
        for managed in stepped:
            if managed in begun:
                raise RuntimeError(updated_by_another(managed.name))
            self._last[id(managed)] = weakref.ref(owner)

    def may_begin(self, managed: ManagedParameter, owner: SteppingOptimizer) -> bool:
        """Whether `owner` may update `managed` before its `step` is called."""
        last = self._last.get(id(managed))
        return last is not None and last() is owner

    def take_states(self, managed: ManagedParameter, roles: Collection[Role], owner: SteppingOptimizer) -> None:
        """`owner` is about to write to `roles` of `managed`. Raises RuntimeError if it has made them, and another one
        has made them anew since."""
        token, states, key = owner.token, self._states, id(managed)
        for role in roles:
            if states.get((key, role)) is not token:
                break
        else:
            return
        for role in roles:
            holder = self._states.get((id(managed), role), token)
            if holder is not token and owner.states.has(managed, role):
                raise RuntimeError(
                    f"{role.name} of {managed.name} is another optimizer's, which has stepped since: hetmem keeps one "
                    f"of each state for a parameter. Load a state_dict into this one to go on with it, or use "
                    f"torch.optim for one of the two"
                )
        self.give_states(managed, roles, owner)

    def give_states(self, managed: ManagedParameter, roles: Collection[Role], owner: SteppingOptimizer) -> None:
        """`roles` of `managed` are those of `owner`, whosever they were."""
        self._taken_by(owner)
        self._states |= {(id(managed), role): owner.token for role in roles}


_owners: weakref.WeakKeyDictionary[Interception, Owners] = weakref.WeakKeyDictionary()


def owners_of(interception: Interception) -> Owners:
    """Those of the model that `interception` manages."""
    return _owners.setdefault(interception, Owners())


def ends_with_its_optimizer(listener: GradientListener, sink: GradientSink) -> Callable[[Any], None]:
    """Take `listener` out of the backwards, for an optimizer that is gone, also where something else still holds it."""
    own, sinks = weakref.ref(listener), weakref.ref(sink)

    def gone(_: Any) -> None:
        alive, watched = own(), sinks()
        if alive is not None and watched is not None:
            watched.listeners.discard(alive)

    return gone


def checked(parameter: torch.Tensor, optimizer: str) -> tuple[Interception, ManagedParameter]:
    """Return what manages `parameter`. Raises `ManageError` if `optimizer` cannot update it."""
    found = registry.of_parameter(parameter)
    if found is None and (added := registry.added_as(parameter)) is not None:
        raise ManageError(
            f"{optimizer} got {added}, which was added to its model after hetmem.manage: call "
            f"hetmem.release(model) and hetmem.manage(model, …) again, or use torch's for this one"
        )
    if found is None:
        raise ManageError(
            f"{optimizer} got a parameter of shape {tuple(parameter.shape)} that is not managed: call "
            f"hetmem.manage(model, …) before making the optimizer, or use torch's for this one"
        )
    if not parameter.dtype.is_floating_point:
        raise ManageError(f"{optimizer} cannot update {found[1].name} of dtype {parameter.dtype}")
    return found


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
