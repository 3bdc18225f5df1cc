"""hetmem: train PyTorch models larger than the accelerator, with device, host and NVMe memory as one hierarchy."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from hetmem.api import manage, managed, release
from hetmem.config import Budget
from hetmem.memory.device import SimDevice
from hetmem.optim.adamw import AdamW
from hetmem.plan.policy import FIFO, LRU, NextUse
from hetmem.report.live import progress
from hetmem.report.report import MemoryReport, report

if TYPE_CHECKING:
    from hetmem.checkpoint import load, load_weights, save
    from hetmem.planning import plan
    from hetmem.planning.plan import Plan

__version__ = "0.1.0"

__all__ = [
    "FIFO",
    "LRU",
    "AdamW",
    "Budget",
    "MemoryReport",
    "NextUse",
    "SimDevice",
    "load",
    "load_weights",
    "manage",
    "managed",
    "plan",
    "progress",
    "release",
    "report",
    "save",
]


def __getattr__(name: str) -> Any:
    if name in ("load", "load_weights", "save"):
        from hetmem import checkpoint  # most programs import hetmem more often than they save

        return getattr(checkpoint, name)
    raise AttributeError(f"module 'hetmem' has no attribute {name!r}")


class _CallablePackage(ModuleType):
    """`hetmem.plan` is the package of what decides, and for users the function that plans: `hetmem.planning.plan`."""

    def __call__(self, *args: Any, **keywords: Any) -> Plan:
        from hetmem.planning import plan  # planning costs more to import than training does

        return plan(*args, **keywords)


sys.modules["hetmem.plan"].__class__ = _CallablePackage
