"""Saves and loads models and optimizers from and to any tiers, block by block and crash-safe."""

from hetmem.checkpoint.export import export_weights
from hetmem.checkpoint.kept import latest
from hetmem.checkpoint.save_load import load
from hetmem.checkpoint.saving import save
from hetmem.checkpoint.weights import load_weights

__all__ = ["export_weights", "latest", "load", "load_weights", "save"]
