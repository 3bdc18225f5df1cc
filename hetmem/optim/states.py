"""What users see of an optimizer's states, in `optimizer.state`: tensors that are their homes. It knows of no steps.

And where the states of a checkpoint belong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from hetmem.engine.param_views import is_shared
from hetmem.errors import ManageError
from hetmem.memory.chunk import Chunk, ManagedParameter, Role
from hetmem.memory.tensor_views import address_of
from hetmem.optim.rule import Rule

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
        homes = {role: address_of(home.memory) for role, home in chunk.homes.items() if role.is_state}
        for managed in chunk.parameters if homes else ():
            state = self.shown.get(managed.parameter)
            if not managed.numel or not state:
                continue
            for role, address in homes.items():
                if state.get(role.name) is None:
                    continue
                for name, place in managed.places(role).items():
                    shown, key = state[name], (id(managed), name)
                    if shown.data_ptr() != address + place:
                        home = managed.views(role)[name]
                        home.copy_(shown)
                        state[name] = shown = home
                        self._versions[key] = -1
                    if self._versions.get(key) != shown._version:
                        self._versions[key] = shown._version
                        written[role] = None
        return written

    def held(self, chunk: Chunk) -> bool:
        """Whether anybody has views of states of `chunk` beside those in `state`."""
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
