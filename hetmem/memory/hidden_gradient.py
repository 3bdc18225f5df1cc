"""The stand-in for a gradient that only its update reads."""

from __future__ import annotations

from typing import Any

import torch

from hetmem import torch_private


class HiddenGradient(torch.Tensor):
    """Stands in `p.grad` for a gradient that only its update reads, with its shape and dtype and without memory.

    The program may zero it, as `zero_grad` does: it is `zeroed` then, and can be computed with, as zeros. All else that
    computes with it or asks for its address raises RuntimeError. `gradient` is where the values are until it is
    `consumed`, as an update has read them; `stepped`: by a step that has ended. `label` names it in errors.
    """

    __torch_function__ = torch_private.without_functions
    gradient: torch.Tensor
    label: str
    zeroed: bool
    consumed: bool
    stepped: bool

    @staticmethod
    def __new__(cls, like: torch.Tensor, dtype: torch.dtype, label: str) -> HiddenGradient:
        """Make one of the shape, strides and device of `like`."""
        made: HiddenGradient = torch_private.make_wrapper(
            cls, like.shape, strides=like.stride(), dtype=dtype, device=like.device
        )
        made.label, made.gradient = label, like
        made.zeroed = made.consumed = made.stepped = False
        return made

    def __init__(self, like: torch.Tensor, dtype: torch.dtype, label: str) -> None:
        pass

    def begin(self, gradient: torch.Tensor) -> None:
        """Stand for `gradient`, which arrives."""
        self.gradient, self.zeroed, self.consumed, self.stepped = gradient, False, False, False

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch has no types there
        return f"<{self.label}, {'used up by' if self.consumed else 'kept for'} its update>"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares it without `func`
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        found = [each for each in torch_private.tree_leaves((args, kwargs)) if isinstance(each, cls)]
        if func in ZEROING:
            for each in found:
                each.zeroed = True
            return args[0]
        name = func.overloadpacket.__name__
        if all(each.zeroed for each in found) and not (func.is_view or (name.endswith("_") and name[:2] != "__")):
            args, kwargs = torch_private.tree_map(_zeros_for, (args, kwargs or {}))
            return func(*args, **kwargs)
        raise RuntimeError(found[0].refused(func))

    def refused(self, what: object) -> str:
        """Return the message of the error for `what`, which the program has done with it."""
        if self.stepped:
            return (
                f"{what} met {self.label}, which the last step() has used up (overlap='backward' or 'forward'): to "
                f"read gradients, use overlap='off'"
            )
        state = "which its update has used up" if self.consumed else "which only its update reads"
        return (
            f"{what} met {self.label}, {state} (overlap='backward' or 'forward'), and which cannot be read or changed: "
            f"use max_grad_norm= to clip and loss_scale= to scale, or overlap='off' to do it yourself"
        )

    def data_ptr(self) -> int:
        """Raise RuntimeError: a kernel would read memory that is not the gradient's."""
        raise RuntimeError(self.refused("data_ptr"))

    def numpy(self, *, force: bool = False) -> Any:
        """Raise RuntimeError, as `data_ptr` does."""
        raise RuntimeError(self.refused("numpy"))

    def __dlpack__(self, **_: Any) -> Any:
        raise RuntimeError(self.refused("__dlpack__"))


def _zeros_for(value: Any) -> Any:
    if type(value) is not HiddenGradient:
        return value
    return torch.zeros((), dtype=value.dtype, device=value.device).expand(value.shape)


ZEROING = (torch.ops.aten.zero_.default, torch.ops.aten._foreach_zero_.default)
"""The operators of `zero_grad(set_to_none=False)`."""


def stored(value: Any) -> Any:
    """Return the gradient for which a `HiddenGradient` stands; any other value as it is."""
    return value.gradient if type(value) is HiddenGradient else value
