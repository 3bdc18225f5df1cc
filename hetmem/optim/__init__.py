"""Optimizers whose states live on hetmem's tiers."""

from hetmem.optim.adamw import AdamW
from hetmem.optim.elementwise import offload
from hetmem.optim.options import LossScale

__all__ = ["AdamW", "LossScale", "offload"]
