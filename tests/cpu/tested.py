"""What tests of `hetmem.cpu` use of it: the one file that follows when it moves. For this folder only."""

from __future__ import annotations

from hetmem.cpu import (
    GROUP_ELEMENTS,
    TILE_ELEMENTS,
    AdamWStep,
    Codes8Bit,
    adamw,
    adamw_8_bit_tasks,
    adamw_compact_tasks,
    adamw_on_device,
    adamw_tasks,
    compact,
    kernel_name,
    llvm,
    loops,
    norm,
    on_device,
    square_sum,
    square_sums_on_device,
    sums_of_tiles,
    total,
    update,
    workers,
)
from hetmem.cpu.loops import BLOCK, RUN
from hetmem.cpu.norm import square_sum_tasks
from hetmem.cpu.on_device import adamw_as_on_host, equals_host
from hetmem.cpu.update import update_by_torch
from hetmem.cpu.workers import WorkerPool, one_torch_thread
from hetmem.cuda import adam, reference

__all__ = [
    "BLOCK",
    "GROUP_ELEMENTS",
    "RUN",
    "TILE_ELEMENTS",
    "AdamWStep",
    "Codes8Bit",
    "WorkerPool",
    "adam",
    "adamw",
    "adamw_8_bit_tasks",
    "adamw_as_on_host",
    "adamw_compact_tasks",
    "adamw_on_device",
    "adamw_tasks",
    "compact",
    "equals_host",
    "kernel_name",
    "llvm",
    "loops",
    "norm",
    "on_device",
    "one_torch_thread",
    "reference",
    "square_sum",
    "square_sum_tasks",
    "square_sums_on_device",
    "sums_of_tiles",
    "total",
    "update",
    "update_by_torch",
    "workers",
]
