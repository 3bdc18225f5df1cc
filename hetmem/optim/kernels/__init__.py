"""The optimizer's passes over host memory, each as tasks over tiles: AdamW and the norm."""

from hetmem.optim.kernels.norm import square_sum, square_sum_tasks, total
from hetmem.optim.kernels.tiles import TILE_ELEMENTS, Task
from hetmem.optim.kernels.update import AdamWStep, adamw, adamw_on_device, adamw_tasks, kernel_name

__all__ = [
    "TILE_ELEMENTS",
    "AdamWStep",
    "Task",
    "adamw",
    "adamw_on_device",
    "adamw_tasks",
    "kernel_name",
    "square_sum",
    "square_sum_tasks",
    "total",
]
