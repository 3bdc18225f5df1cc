"""hetmem: train PyTorch models larger than the accelerator, with device, host and NVMe memory as one hierarchy."""

from hetmem.api import manage, managed, release
from hetmem.config import Budget
from hetmem.memory.device import SimDevice
from hetmem.optim.adamw import AdamW
from hetmem.plan.policy import FIFO, LRU, NextUse
from hetmem.report.report import MemoryReport, report

__all__ = [
    "FIFO",
    "LRU",
    "AdamW",
    "Budget",
    "MemoryReport",
    "NextUse",
    "SimDevice",
    "manage",
    "managed",
    "release",
    "report",
]
