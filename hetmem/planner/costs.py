"""What one operator costs: floating-point operations and bytes, from the shapes it was called with."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

_VIEWS: dict[Any, bool] = {}


def tensor_bytes(values: Any) -> int:
    """Bytes of all tensors among `values`, each read or written once."""
    return sum(leaf.numel() * leaf.itemsize for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor))


def only_views(func: Any) -> bool:
    """Whether `func` touches no elements: its results are views of its arguments and nothing is written."""
    known = _VIEWS.get(func)
    if known is None:
        aliases = [argument.alias_info for argument in func._schema.arguments if argument.alias_info is not None]
        returns = [value for value in func._schema.returns if value.alias_info is not None]
        known = _VIEWS[func] = bool(returns) and not any(alias.is_write for alias in aliases)
    return known


def flops_of(func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> int:
    """Floating-point operations of a matrix operator; 0 for any other."""
    packet = func._overloadpacket
    own = _OWN.get(str(packet))
    if own is not None:
        return own(args)
    count: Callable[..., int] | None = flop_registry.get(packet)
    return int(count(*args, **kwargs, out_val=result)) if count is not None else 0


def _flash(args: Any) -> int:
    query, key, value = args[:3]
    return int(sdpa_flop_count(query.shape, key.shape, value.shape))


def _flash_backward(args: Any) -> int:
    gradient, query, key, value = args[:4]
    return int(sdpa_backward_flop_count(gradient.shape, query.shape, key.shape, value.shape))


def _grouped(args: Any) -> int:
    """Rows of one matrix times one of several others each; or several outer products over the rows."""
    left, right = args[0], args[1]
    if left.dim() == right.dim() == 2:
        return int(2 * prod(left.shape) * right.shape[-1])
    return int(2 * prod(left.shape[-2:]) * (left.shape[0] if left.dim() == 3 else 1) * right.shape[-1])


_OWN: dict[str, Callable[[Any], int]] = {
    "aten._scaled_dot_product_flash_attention_for_cpu": _flash,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward": _flash_backward,
    "aten._grouped_mm": _grouped,
}
"""Matrix operators that torch's own counter does not know."""
