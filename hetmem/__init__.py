"""hetmem: train PyTorch models larger than the accelerator, with device, host and NVMe memory as one hierarchy."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

_collects = gc.isenabled()
gc.disable()  # what is imported stays: a sixth of the time went to looking for garbage in it
try:
    import torch

    from hetmem.base.config import refuse_environment

    refuse_environment(torch.__version__)  # before what follows fails by something else

    from hetmem.api import manage, managed, release
    from hetmem.base.config import VERSION, Budget
    from hetmem.memory.device import SimDevice
    from hetmem.optim.adamw import AdamW
    from hetmem.report.live import progress
    from hetmem.report.report import MemoryReport, report
    from hetmem.schedule.blocks import FIFO, LRU, NextUse
finally:
    if _collects:
        gc.enable()

if TYPE_CHECKING:
    from hetmem import planner
    from hetmem.accumulation import accumulate
    from hetmem.checkpoint import export_weights, latest, load, load_weights, save
    from hetmem.losses import chunked_loss
    from hetmem.parking import park, parked, unpark
    from hetmem.planner import plan_ranks
    from hetmem.planner.states import plan_optimizer

    plan = planner.plan  # imported by name, mypy takes it for the module planner.plan

__version__ = VERSION

__all__ = [
    "FIFO",
    "LRU",
    "AdamW",
    "Budget",
    "MemoryReport",
    "NextUse",
    "SimDevice",
    "accumulate",
    "chunked_loss",
    "export_weights",
    "latest",
    "load",
    "load_weights",
    "manage",
    "managed",
    "park",
    "parked",
    "plan",
    "plan_optimizer",
    "plan_ranks",
    "progress",
    "release",
    "report",
    "save",
    "unpark",
]


def __getattr__(name: str) -> Any:
    if name in ("export_weights", "latest", "load", "load_weights", "save"):
        from hetmem import checkpoint  # most programs import hetmem more often than they save

        return getattr(checkpoint, name)
    if name == "accumulate":
        from hetmem.accumulation import accumulate

        return accumulate
    if name in ("plan", "plan_optimizer", "plan_ranks"):
        from hetmem import planner  # planning costs more to import than training does

        return getattr(planner, name)
    if name in ("park", "parked", "unpark"):
        from hetmem import parking

        return getattr(parking, name)
    if name == "chunked_loss":
        from hetmem.losses import chunked_loss

        return chunked_loss
    raise AttributeError(f"module 'hetmem' has no attribute {name!r}")
