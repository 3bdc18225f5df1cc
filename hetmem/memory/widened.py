"""A tensor that is kept in 16 bits and seen in more: streamed gradients in mixed precision, as `p.grad`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from hetmem import torch_private


class Widened(torch.Tensor):
    """Shows `kept`, a tensor of 16 bits, in a wider `dtype`: what reads it gets a copy in that dtype, a view is another
    one, and what writes to it raises RuntimeError, as it could not be kept; but zeros can. `name` says of what it is.
    """

    kept: torch.Tensor
    named: str
    __torch_function__ = torch_private.without_functions

    @staticmethod
    def __new__(cls, kept: torch.Tensor, dtype: torch.dtype, name: str) -> Widened:
        """Make one of the shape and strides of `kept`."""
        made: Widened = torch_private.make_wrapper(
            cls, kept.shape, strides=kept.stride(), dtype=dtype, device=kept.device
        )
        made.kept, made.named = kept, name
        return made

    def __init__(self, kept: torch.Tensor, dtype: torch.dtype, name: str) -> None:
        pass

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch has no types there
        return repr(self.kept.to(self.dtype))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares it without `func`
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        written = [each for each in torch_private.tree_leaves(list(_written(func, args, kwargs))) if type(each) is cls]
        if written and func in _ZERO:
            for each in written:
                each.kept.zero_()
            return args[0]
        if written:
            raise RuntimeError(
                f"{func} would write to {written[0].named}, which is kept in {written[0].kept.dtype} until its update "
                f"has read it (gradients='streamed' with mixed_precision) and cannot be changed: use max_grad_norm= to "
                f"clip and loss_scale= to scale, with gradients='visible'"
            )
        if func is not torch.ops.aten.view.dtype and any(_is_a_view(returned) for returned in func._schema.returns):
            views = func(*torch_private.tree_map(stored, args), **torch_private.tree_map(stored, kwargs))
            return torch_private.tree_map(lambda view: cls(view, args[0].dtype, args[0].named), views)
        return func(*torch_private.tree_map(_widened, args), **torch_private.tree_map(_widened, kwargs))


_ZERO = (torch.ops.aten.zero_.default, torch.ops.aten._foreach_zero_.default)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
    """Yield the arguments that `func` writes to."""
    for argument, value in zip(func._schema.arguments, args, strict=False):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield value
    for argument in func._schema.arguments[len(args) :]:
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield kwargs.get(argument.name)


def _is_a_view(returned: Any) -> bool:
    return returned.alias_info is not None and not returned.alias_info.is_write


def stored(value: Any) -> Any:
    """Return what a `Widened` shows; anything else as it is."""
    return value.kept if type(value) is Widened else value


def _widened(value: Any) -> Any:
    return value.kept.to(value.dtype) if type(value) is Widened else value
