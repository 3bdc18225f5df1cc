"""Gives the result and the cost of an operator on `meta`, and keeps a builder from filling real memory.

Costs are floating-point operations and bytes, from the shapes that an operator was called with. A meta kernel takes up
to a millisecond, and equal layers call it with equal shapes, so results are cached by the shapes of the arguments,
unless they share memory with them or the operator writes to its arguments.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from hetmem.base.units import GIB, format_size
from hetmem.memory.live_bytes import operator_of
from hetmem.planner.plan import PlanError
from hetmem.torch_private import TorchDispatchMode, tree_leaves, tree_map


def tensor_bytes(values: Any) -> int:
    """Return the bytes of all tensors among `values`, each read or written once."""
    return sum(leaf.numel() * leaf.itemsize for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor))


def flops_of(func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> int:
    """Count the floating-point operations of a matrix operator; 0 for any other."""
    packet = func._overloadpacket
    name = str(packet).removeprefix("aten.")
    if name in _FLASH:
        count, operands = _FLASH[name]
        return int(count(*(operand.shape for operand in args[:operands])))
    if name == "_grouped_mm":
        return _grouped(args)
    known: Callable[..., int] | None = flop_registry.get(packet)
    return int(known(*args, **kwargs, out_val=result)) if known is not None else 0


def _grouped(args: Any) -> int:
    """Count those of a grouped product: each group of rows times its own matrix, or one outer product per group."""
    left, right = args[0], args[1]
    if left.dim() == right.dim() == 2:
        return int(2 * prod(left.shape) * right.shape[-1])
    return int(2 * prod(left.shape[-2:]) * (left.shape[0] if left.dim() == 3 else 1) * right.shape[-1])


_FLASH: dict[str, tuple[Callable[..., int], int]] = {
    "_scaled_dot_product_flash_attention_for_cpu": (sdpa_flop_count, 3),
    "_scaled_dot_product_flash_attention_for_cpu_backward": (sdpa_backward_flop_count, 4),
}
"""Operators that torch's own counter does not know: its count of a similar one, and how many operands that takes."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Floating-point operations of a matrix operator in `dtype` (0 for others), and the bytes it reads and writes."""

    flops: int
    nbytes: int
    dtype: str


_GROUPED_MM = getattr(torch.ops.aten._grouped_mm, "default", None) if hasattr(torch.ops.aten, "_grouped_mm") else None


def _grouped_product(args: Any) -> torch.Tensor:
    """Call a grouped product in any dtype: on `meta` torch knows only bfloat16."""
    left, right, *others = args
    if left.dtype is torch.bfloat16 or not left.is_meta:
        return torch.ops.aten._grouped_mm(*args)  # type: ignore[no-any-return]
    narrow = (torch.empty_like(factor, dtype=torch.bfloat16) for factor in (left, right))
    made: torch.Tensor = torch.ops.aten._grouped_mm(*narrow, *others)
    return torch.empty_like(made, dtype=left.dtype)


class Results:
    """Calls operators, or answers from its cache of results by shapes. One plan has one.

    `fuses_dropout`: the device's attention kernel applies dropout, as on GPUs; CPUs materialize the matrix of scores.
    """

    def __init__(self, *, fuses_dropout: bool = False) -> None:
        self.fuses_dropout = fuses_dropout
        self._known: dict[Any, tuple[Any, Cost]] = {}
        self.last: Any = ""
        """The operator that was called last, not answered from the cache."""

    def of(self, func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Cost]:
        """Return the result of `func(*args, **kwargs)`, and its cost."""
        key, known = None, None
        if operator_of(func).is_pure:
            with suppress(TypeError):  # arguments whose shapes do not determine the result
                key = id(func), _key_of(args), _key_of(tuple(kwargs.items()))
                known = self._known.get(key)
        if known is not None:
            made, cost = known
            return _like(made) if isinstance(made, torch.Tensor) else tree_map(_like, made), cost
        self.last = func
        result = _grouped_product(args) if func is _GROUPED_MM else func(*args, **kwargs)
        flops, nbytes = flops_of(func, args, kwargs, result), tensor_bytes((args, kwargs, result))
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        cost = Cost(flops, nbytes, str(tensors[0].dtype).removeprefix("torch.") if tensors else "")
        if key is not None and _is_new(result, tensors):
            self._known[key] = (tree_map(_like, result), cost)
        return result, cost


def attention(
    results: Results,
    func: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Call attention as devices run it: `meta` would take the path that materializes the matrix of scores."""
    fused = dropout_p == 0.0 or (query.is_meta and results.fuses_dropout)
    plain = fused and query.dim() == 4 and query.shape[-1] == value.shape[-1]
    if not plain or (attn_mask is not None and attn_mask.requires_grad):
        result: torch.Tensor = func(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
        return result
    if enable_gqa:
        repeats = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype)
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    output: torch.Tensor = flash(query, key, value, 0.0, is_causal, attn_mask=attn_mask, scale=scale)[0]
    return output


def _key_of(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        if not value.is_meta or value.layout is not torch.strided:
            raise TypeError("a tensor whose result may depend on more than its shape")
        return value.shape, value.stride(), value.dtype
    if isinstance(value, (list, tuple)):
        return tuple([_key_of(item) for item in value])
    return type(value), value  # 1, 1.0 and True are equal


def _is_new(result: Any, arguments: list[torch.Tensor]) -> bool:
    """Return whether all tensors of `result` are on `meta` and have memory of their own, whatever the schema says."""
    taken = {tensor.untyped_storage()._cdata for tensor in arguments}
    for leaf in tree_leaves(result):
        if isinstance(leaf, torch.Tensor):
            storage = leaf.untyped_storage()._cdata
            if leaf.device.type != "meta" or leaf.layout is not torch.strided or storage in taken:
                return False
            taken.add(storage)
    return True


def _like(leaf: Any) -> Any:
    """Return a tensor on `meta` like `leaf`, with memory of its own; anything else as it is."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype, device="meta")


MOST_BYTES = GIB
"""A builder may make so many bytes of real tensors (position tables, masks, constants), but no real weights."""


class RefuseRealMemory(TorchDispatchMode):
    """Raises `PlanError` once more than `MOST_BYTES` of tensors outside of `meta` are alive."""

    def __init__(self) -> None:
        super().__init__()
        self._alive: weakref.WeakValueDictionary[int, torch.UntypedStorage] = weakref.WeakValueDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        self._check(func, _asked_bytes(args, kwargs))
        result = func(*args, **kwargs)
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.device.type != "meta" and leaf.layout is torch.strided:
                self._alive[leaf.untyped_storage()._cdata] = leaf.untyped_storage()
                self._check(func, 0)
        return result

    def _check(self, func: Any, more_bytes: int) -> None:
        nbytes = more_bytes + sum(storage.nbytes() for storage in self._alive.values())
        if nbytes > MOST_BYTES:
            raise PlanError(
                f"the builder takes real memory: with {func} it has {format_size(nbytes)} of tensors that are not on "
                f"the meta device. Leave device=… out of what it makes, so that planning can say where tensors go, and "
                f"load weights afterwards"
            )


def _asked_bytes(args: Any, kwargs: dict[str, Any]) -> int:
    """Return the bytes that a factory function is about to allocate; 0 for other calls. Its first argument is sizes."""
    device = kwargs.get("device")
    shaped = args and isinstance(args[0], (list, tuple)) and all(type(size) is int for size in args[0])
    if not shaped or device is None or torch.device(device).type == "meta":
        return 0
    dtype = kwargs.get("dtype") or torch.get_default_dtype()
    return int(prod(args[0]) * dtype.itemsize)


def rows_of(batch: Any, without: int) -> int:
    """Return the rows of `batch`: the most frequent first dimension of its tensors (positions and masks may have
    others), or `without` if it has no tensors."""
    sizes = Counter(tensor.shape[0] for tensor in _tensors(batch))
    return sizes.most_common(1)[0][0] if sizes else without


def rows_and_tokens(batch: Any) -> tuple[int, int]:
    """Return the rows and tokens of `batch`; tokens are the elements of its largest integer tensor, else rows."""
    rows = rows_of(batch, 1)
    return rows, max((tensor.numel() for tensor in _tensors(batch) if not tensor.dtype.is_floating_point), default=rows)


def _tensors(batch: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.dim()]
