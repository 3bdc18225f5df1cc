"""The optimizer's passes over host memory, each as tasks over tiles: AdamW, AdamW on smaller states, and the norm."""

from hetmem.optim.kernels.compact import GROUP_ELEMENTS, Codes8Bit, adamw_8_bit_tasks, adamw_compact_tasks
from hetmem.optim.kernels.compare import compare_tasks
from hetmem.optim.kernels.norm import square_sum, square_sum_tasks, square_sums_on_device, sums_of_tiles, total
from hetmem.optim.kernels.tiles import TILE_ELEMENTS, Task
from hetmem.optim.kernels.update import AdamWStep, adamw, adamw_on_device, adamw_tasks, kernel_name

__all__ = [
    "GROUP_ELEMENTS",
    "TILE_ELEMENTS",
    "AdamWStep",
    "Codes8Bit",
    "Task",
    "adamw",
    "adamw_8_bit_tasks",
    "adamw_compact_tasks",
    "adamw_on_device",
    "adamw_tasks",
    "compare_tasks",
    "kernel_name",
    "square_sum",
    "square_sum_tasks",
    "square_sums_on_device",
    "sums_of_tiles",
    "total",
]
