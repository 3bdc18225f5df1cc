"""Tensors over memory that hetmem owns. Every view has a storage of its own: its reference count says who holds it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from hetmem import torch_private
from hetmem.memory import mapping

Memory = memoryview | torch.Tensor
"""Host memory, or a 1-D uint8 tensor on a device."""


def elements(memory: Memory, dtype: torch.dtype, numel: int, offset_bytes: int = 0) -> torch.Tensor:
    """`numel` elements of `dtype` from `offset_bytes` of `memory` on, 1-D."""
    if type(memory) is memoryview:
        if numel == 0:
            return torch.empty(0, dtype=dtype, device="cpu")
        return torch.frombuffer(memory, dtype=dtype, count=numel, offset=offset_bytes)
    if numel == 0:
        return torch.empty(0, dtype=dtype, device=memory.device)
    part = memory[offset_bytes : offset_bytes + numel * dtype.itemsize]
    alone: torch.Tensor = torch_private.from_dlpack(
        torch_private.to_dlpack(part)
    )  # the public way may wait for a stream
    return alone.view(dtype)


def address_of(memory: Memory) -> int:
    """The address of the first byte."""
    return mapping.address_of(memory) if isinstance(memory, memoryview) else memory.data_ptr()


def give_away(view: torch.Tensor) -> bool:
    """Let every other holder of the memory of `view` (its storage) keep its present values, in memory of its own,
    as does `view`. False if that cannot be done: on a GPU, with torch before 2.13."""
    storage = view.untyped_storage()
    before, swap = storage.data_ptr(), getattr(storage, "_swap_data_ptr_", None)
    if swap is not None:
        swap(storage.clone())
    else:
        storage.share_memory_()
    return storage.data_ptr() != before


_AS_IT_IS = nullcontext()


def without_graph() -> AbstractContextManager[None]:
    """`torch.no_grad()` where it changes anything: within a backward it does not, and takes more than a small copy."""
    return torch.no_grad() if torch.is_grad_enabled() else _AS_IT_IS


# ---- a tensor that is kept in fewer bits -------------------------------------------------------------------------


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
