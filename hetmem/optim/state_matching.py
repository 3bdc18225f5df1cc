"""The states of a checkpoint: whether they are what an optimizer keeps, and where. It writes nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from hetmem.errors import ManageError
from hetmem.memory.chunk import ManagedParameter, Role

Places = dict[str, tuple[Role, torch.Tensor]]
"""The homes of a parameter's states, by the names that states have."""


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
