"""Reads the rows of an embedding that a batch names where its table lies, in place of copying the table to the device.

For a table that only one exact `torch.nn.Embedding` uses, where no gradient is asked for: nothing writes to it, and no
other operator needs it whole. Rows of a quantised one are decoded, if each has codes and scales of its own. Only
`engine.transfer` knows what the link carries.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from hetmem import torch_private
from hetmem.engine.runtime import Runtime
from hetmem.memory.chunk import ManagedParameter, Role
from hetmem.memory.coded import CodedHome, CodedTable
from hetmem.schedule.blocks import Link
from hetmem.schedule.formats import Coding
from hetmem.schedule.placement import ROWS_SHARE


def row_tables(module: torch.nn.Module, codings: Mapping[int, Coding]) -> set[int]:
    """Return the `id`s of the weights that only embeddings of torch's own class use, one each, which does not rescale
    them (`max_norm`), and whose rows can be read alone. `codings`: of those that are quantised, by `id`."""
    shared = Counter(id(p) for part in module.modules() for p in part._parameters.values() if p is not None)
    exact = (part for part in module.modules() if type(part) is torch.nn.Embedding and part.max_norm is None)
    tables = (part.weight for part in exact if shared[id(part.weight)] == 1)
    return {id(table) for table in tables if row_bytes(table, codings.get(id(table)))}


def row_bytes(table: torch.Tensor, coding: Coding | None) -> int:
    """Return the bytes at home of a row of `table` (rows, width), which has `coding` if it is quantised; 0 if its rows
    cannot be read alone."""
    if coding is None:
        return table.shape[1] * table.itemsize
    return coding.row_bytes if coding.columns == table.shape[1] else 0


def asks_for_nothing(table: torch.Tensor) -> bool:
    """Return whether no gradient of `table` is asked for by the operators that autograd sees now."""
    return not (table.requires_grad and torch.is_grad_enabled())


class EmbeddingRows:
    """The tables of one model whose rows are read; `tables` by `id` of the parameter."""

    def __init__(self, module: torch.nn.Module, runtime: Runtime) -> None:
        self._runtime = runtime
        by_id = runtime.bindings.by_id
        codings = {key: managed.code.coding for key, managed in by_id.items() if managed.code is not None}
        self.tables = {key: by_id[key] for key in row_tables(module, codings) if key in by_id}

    def reads(self, module: torch.nn.Module) -> bool:
        """Return whether `module`, of class `Embedding`, needs no copy of its table."""
        table = self.tables.get(id(module._parameters.get("weight")))
        return table is not None and module.max_norm is None and self._may_read(table)

    def _may_read(self, table: ManagedParameter) -> bool:
        return not self._runtime.memory.resident and asks_for_nothing(table.parameter)

    def read(
        self, used: list[ManagedParameter], args: Sequence[Any], options: Mapping[str, Any]
    ) -> torch.Tensor | None:
        """Return the rows that `torch.nn.functional.embedding` is asked for by `args` and `options`, of the table that
        is alone in `used`; None where its copy has to be used."""
        table, indices = used[0], args[0]
        if not _asks_for_rows(table, args, options):
            return None
        if len(used) > 1 or self.tables.get(id(table.parameter)) is not table or type(indices) is not torch.Tensor:
            return None
        if indices.numel() > table.shape[0] * ROWS_SHARE or torch_private.is_of_a_transform(indices):
            return None
        if not (self._may_read(table) and (table.code is not None or table.home.is_contiguous())):
            return None
        self._runtime.uses.read_at_home(table)
        dtype, device = table.chunk.compute_dtype, self._runtime.memory.device
        with torch.inference_mode(False):  # it is written to outside of that mode
            result = torch.empty((*indices.shape, table.shape[1]), dtype=dtype, device=device.torch_device)
        with self._runtime.unwatched():
            target, (home, row) = result.view(-1, table.shape[1]), _at_home(table)
            work, nbytes = partial(device.rows_in, target, home, indices.flatten()), indices.numel() * row
            if table.chunk.moved:  # no link is between
                work()
            else:
                self._runtime.traffic.engine.within_compute(Link.HOST_TO_DEVICE, work, nbytes)
        return result


def _asks_for_rows(table: ManagedParameter, args: Sequence[Any], options: Mapping[str, Any]) -> bool:
    """Return whether a call of `torch.nn.functional.embedding` only reads rows, and has no error that torch raises."""
    padding = args[2] if len(args) > 2 else options.get("padding_idx")
    max_norm = args[3] if len(args) > 3 else options.get("max_norm")
    known = getattr(args[0], "dtype", None) in (torch.int32, torch.int64)
    return known and max_norm is None and (padding is None or -table.shape[0] <= padding < table.shape[0])


def _at_home(table: ManagedParameter) -> tuple[torch.Tensor | CodedTable, int]:
    """Return what rows are read from, and the bytes of one."""
    if table.code is None:
        home = table.view(table.chunk.operand)
        return home, row_bytes(home, None)
    source = table.chunk.source(Role.PARAM)
    assert isinstance(source, CodedHome), table.name
    return CodedTable(table.code.coding, table.code.bytes_in(source.codes)), table.code.coding.row_bytes
