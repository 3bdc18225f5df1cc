"""What stands in `p.grad` for a gradient that is gone: its shape, and an error for whoever computes with it.

From the end of a backward to `step`, None would say that there was no gradient, and a clip of all gradients would clip
nothing, by a norm of 0. From `step` to `zero_grad` it would say that the gradient was cleared, and a backward would
not add to it as torch does. It takes no memory, and knows neither homes nor updates.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from hetmem import torch_private
from hetmem.memory.chunk import ManagedParameter

_ZERO = (torch.ops.aten.zero_.default, torch.ops.aten._foreach_zero_.default)


class UsedUp(torch.Tensor):
    """The used up gradient of the parameter called `name`. Only `zero_grad` may touch it: `hetmem_zeroed` says so.
    `hetmem_stepped`: the step that has used it up is over."""

    hetmem_name: str
    hetmem_zeroed: bool
    hetmem_stepped: bool

    @staticmethod
    def __new__(cls, like: torch.Tensor, element: torch.Tensor, name: str, *, stepped: bool) -> UsedUp:
        """In the shape of `like`, all of it the one `element`."""
        made = torch_private.make_subclass(cls, element.as_strided(like.shape, [0] * like.dim()))
        made.hetmem_name, made.hetmem_zeroed, made.hetmem_stepped = name, False, stepped
        return made

    def __init__(self, like: torch.Tensor, element: torch.Tensor, name: str, *, stepped: bool) -> None:
        pass

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch has no types there
        return f"<the gradient of {self.hetmem_name}, used up by its update>"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares it without `func`
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        leaves = [leaf for leaf in torch_private.tree_leaves((args, kwargs)) if isinstance(leaf, cls)]
        if func in _ZERO:
            for leaf in leaves:
                leaf.hetmem_zeroed = True
            return args[0]
        if any(leaf.hetmem_stepped for leaf in leaves):
            raise RuntimeError(
                f"{func} met the gradient of {leaves[0].hetmem_name}, which the last step() has used up "
                f"(overlap='forward' or gradients='streamed'): read gradients before step(), or use overlap='backward' "
                f"and gradients='visible', which keep them"
            )
        name = next((leaf.hetmem_name for leaf in leaves), "a parameter")
        raise RuntimeError(
            f"{func} met the gradient of {name}, which its update has used up during backward "
            f"(gradients='streamed'): nothing can be clipped, scaled or measured any more. To clip, use "
            f"gradients='visible' with max_grad_norm=, or with overlap='off'"
        )


def clear_zeroed(parameter: torch.Tensor) -> None:
    """A gradient of `parameter` arrives. Raise RuntimeError if one that a step has used up was not cleared before."""
    gradient = parameter.grad
    if not isinstance(gradient, UsedUp):
        return
    if not gradient.hetmem_zeroed:
        raise RuntimeError(
            f"a gradient of {gradient.hetmem_name} arrives, and that of the last step was not cleared: torch would add "
            f"to it, but its update has used it up (overlap='forward' or gradients='streamed'): call zero_grad() "
            f"between step() and the next backward, or use overlap='backward' and gradients='visible', which keep it"
        )
    parameter.grad = None


def refuse_used_up(parameters: Iterable[torch.Tensor]) -> None:
    """Raise RuntimeError if a step would begin with gradients in `parameters` that the step before has used up."""
    gradients = [parameter.grad for parameter in parameters]
    for gradient in gradients if UsedUp in set(map(type, gradients)) else ():
        if isinstance(gradient, UsedUp) and gradient.hetmem_stepped:
            raise RuntimeError(
                f"the gradient of {gradient.hetmem_name} is that of the last step, which has used it up "
                f"(overlap='forward' or gradients='streamed'), and torch would step with it, or with zeros, once more: "
                f"call zero_grad() between step() and the next backward, which leaves None behind"
            )


def is_as_it_was(gradient: torch.Tensor | None, used: torch.Tensor) -> bool:
    """Whether `gradient`, which a parameter has, is `used`, or what stands for that once it is used up."""
    return gradient is used or (isinstance(gradient, UsedUp) and not gradient.hetmem_zeroed)


def updated_by_another(name: str) -> str:
    """What is wrong where an optimizer steps the parameter called `name`, and another one has begun to."""
    return (
        f"{name} was updated during backward by another optimizer, made with overlap=, whose step() was to be called: "
        f"make that with overlap='off', or drop it before the backward"
    )


class Marks:
    """The gradients of one optimizer that are shown as used up."""

    def __init__(self) -> None:
        self._marked: list[torch.Tensor] = []
        self._elements: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}

    def put(self, parameters: Iterable[ManagedParameter], *, stepped: bool = False) -> None:
        """Those of `parameters` that have no gradient have had one. `stepped`: until it is cleared."""
        for managed in parameters:
            parameter = managed.parameter
            if parameter.grad is not None:
                continue
            key = parameter.dtype, parameter.device
            if key not in self._elements:
                self._elements[key] = torch.zeros(1, dtype=parameter.dtype, device=parameter.device)
            parameter.grad = UsedUp(parameter, self._elements[key], managed.name, stepped=stepped)
            if not stepped:
                self._marked.append(parameter)

    def drop(self) -> None:
        """None is what a used up gradient is from now on."""
        for parameter in self._marked:
            if isinstance(parameter.grad, UsedUp):
                parameter.grad = None
        self._marked.clear()
