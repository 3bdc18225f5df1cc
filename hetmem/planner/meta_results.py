"""What operators make on the `meta` device and what that costs, remembered by the shapes they were called with.

Working out a shape takes an operator up to a millisecond, and a model of equal layers asks for the same ones again and
again: a plan of 80 layers spends most of its time there. Only what neither shares memory nor writes is remembered.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from hetmem.planner.costs import flops_of, only_views, tensor_bytes


@dataclass(frozen=True, slots=True)
class Cost:
    """Floating-point operations of a matrix operator in `dtype` (0 for others), and the bytes it reads and writes."""

    flops: int
    nbytes: int
    dtype: str


@dataclass(frozen=True, slots=True)
class _Like:
    """A tensor to be made."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    def made(self) -> torch.Tensor:
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device="meta")


class Results:
    """Calls operators, or does as if. For one plan: what it knows holds as long as shapes say all.

    `last` names the operator that was really called last. `fuses_dropout`: the device drops scores of attention within
    its kernel, as GPUs do; processors keep the whole matrix of them.
    """

    def __init__(self, *, fuses_dropout: bool = False) -> None:
        self.fuses_dropout = fuses_dropout
        self._known: dict[Any, tuple[Any, Cost]] = {}
        self._pure: dict[Any, bool] = {}
        self.last = ""

    def of(self, func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Cost | None]:
        """What `func(*args, **kwargs)` returns, and its cost; None if it touches no elements."""
        key = self._key(func, args, kwargs) if self._is_pure(func) else None
        known = self._known.get(key) if key is not None else None
        if known is not None:
            template, cost = known
            return _filled(template), cost
        self.last = str(func)
        result = func(*args, **kwargs)
        if only_views(func):
            return result, None
        flops, nbytes = flops_of(func, args, kwargs, result), tensor_bytes((args, kwargs, result))
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        cost = Cost(flops, nbytes, str(tensors[0].dtype).removeprefix("torch.") if tensors else "")
        if key is not None and _is_new(result, tensors):
            self._known[key] = (tree_map(_template, result), cost)
        return result, cost

    def _is_pure(self, func: Any) -> bool:
        """Whether the schema of `func` speaks of no shared memory."""
        known = self._pure.get(func)
        if known is None:
            values = (*func._schema.arguments, *func._schema.returns)
            known = self._pure[func] = all(value.alias_info is None for value in values)
        return known

    @staticmethod
    def _key(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """None if the arguments are not all of the kinds that say what is made."""
        try:
            key = (func, _key_of(args), _key_of(tuple(kwargs.items())))
            hash(key)
        except TypeError:
            return None
        return key


def _key_of(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        if value.device.type != "meta" or value.layout is not torch.strided:
            raise TypeError("a tensor whose result may depend on more than its shape")
        return value.shape, value.stride(), value.dtype
    if isinstance(value, (list, tuple)):
        return tuple([_key_of(item) for item in value])
    return type(value), value  # 1, 1.0 and True are equal


def _is_new(result: Any, arguments: list[torch.Tensor]) -> bool:
    """Whether all tensors of `result` are on `meta` and have memory of their own, whatever the schema says."""
    taken = {tensor.untyped_storage()._cdata for tensor in arguments}
    for leaf in tree_leaves(result):
        if isinstance(leaf, torch.Tensor):
            storage = leaf.untyped_storage()._cdata
            if leaf.device.type != "meta" or leaf.layout is not torch.strided or storage in taken:
                return False
            taken.add(storage)
    return True


def _template(leaf: Any) -> Any:
    return _Like(leaf.size(), leaf.stride(), leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf


def _filled(template: Any) -> Any:
    if isinstance(template, _Like):
        return template.made()
    return tree_map(lambda leaf: leaf.made() if isinstance(leaf, _Like) else leaf, template)
