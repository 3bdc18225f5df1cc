"""Reads the rows of an embedding that a batch names where its table lies, in place of copying the table to the device.

For a frozen table that only one exact `torch.nn.Embedding` uses: nothing writes to it, its backward asks for nothing,
and no other operator needs it whole. Only `engine.transfer` knows what the link carries.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import torch

from hetmem import torch_private
from hetmem.engine.runtime import Runtime
from hetmem.memory.chunk import ManagedParameter
from hetmem.schedule.blocks import Link
from hetmem.schedule.placement import ROWS_SHARE


def row_tables(module: torch.nn.Module) -> set[int]:
    """Return the `id`s of the weights that only embeddings of torch's own class use, one each, which does not rescale
    them (`max_norm`)."""
    shared = Counter(id(p) for part in module.modules() for p in part._parameters.values() if p is not None)
    found: set[int] = set()
    for part in module.modules():
        if type(part) is torch.nn.Embedding and part.max_norm is None and shared[id(part.weight)] == 1:
            found.add(id(part.weight))
    return found


class EmbeddingRows:
    """The tables of one model whose rows are read; `tables` by `id` of the parameter."""

    def __init__(self, module: torch.nn.Module, runtime: Runtime) -> None:
        self._runtime = runtime
        by_id, found = runtime.bindings.by_id, row_tables(module)
        self.tables = {key: by_id[key] for key in found if key in by_id and by_id[key].code is None}

    def reads(self, module: torch.nn.Module) -> bool:
        """Return whether `module`, of class `Embedding`, needs no copy of its table."""
        table = self.tables.get(id(module._parameters.get("weight")))
        return table is not None and self._may_read(table)

    def _may_read(self, table: ManagedParameter) -> bool:
        return not (self._runtime.memory.resident or table.parameter.requires_grad)

    def read(self, used: list[ManagedParameter], indices: Any) -> torch.Tensor | None:
        """Return the rows `indices` of the table that is the only one of `used`; None where its copy has to be used."""
        table = used[0]
        if len(used) > 1 or self.tables.get(id(table.parameter)) is not table or type(indices) is not torch.Tensor:
            return None
        if indices.numel() > table.shape[0] * ROWS_SHARE or torch_private.is_of_a_transform(indices):
            return None
        if not (self._may_read(table) and table.home.is_contiguous()):
            return None
        self._runtime.uses.read_at_home(table)
        dtype, device = table.chunk.compute_dtype, self._runtime.memory.device
        with torch.inference_mode(False):  # it is written to outside of that mode
            result = torch.empty((*indices.shape, table.shape[1]), dtype=dtype, device=device.torch_device)
        with self._runtime.unwatched():
            role = table.chunk.operand
            home, target = table.view(role), result.view(-1, table.shape[1])
            nbytes = indices.numel() * table.shape[1] * home.itemsize
            work = partial(device.rows_in, target, home, indices.flatten())
            if table.chunk.moved:  # no link is between
                work()
            else:
                self._runtime.traffic.engine.within_compute(Link.HOST_TO_DEVICE, work, nbytes)
        return result
