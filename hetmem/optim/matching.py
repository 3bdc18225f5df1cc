"""Whether the states of a checkpoint are what an optimizer keeps. It compares; it changes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hetmem.errors import ManageError
from hetmem.memory.chunk import Role


def check_states(
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
