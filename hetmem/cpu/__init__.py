"""The optimizer's passes over host memory, each as tasks over tiles: AdamW, AdamW on smaller states, and the norm."""

from hetmem.cpu.adamw import (
    AdamWStep,
    PreparedRuns,
    adamw_on_device,
    adamw_tasks,
    kernel_name,
)
from hetmem.cpu.norm import square_sum_tasks, sums_where_it_is, total
from hetmem.cpu.small_states import GROUP_ELEMENTS, prepare_small
from hetmem.cpu.workers import TILE_ELEMENTS, Task

__all__ = [
    "GROUP_ELEMENTS",
    "TILE_ELEMENTS",
    "AdamWStep",
    "PreparedRuns",
    "Task",
    "adamw_on_device",
    "adamw_tasks",
    "kernel_name",
    "prepare_small",
    "square_sum_tasks",
    "sums_where_it_is",
    "total",
]
