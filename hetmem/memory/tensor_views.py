"""Tensors over memory that hetmem owns. Every view has a storage of its own: its reference count says who holds it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

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
