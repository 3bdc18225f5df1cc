"""Saving and loading of models and optimizers on whatever tiers they are, streaming and crash-safe."""

from hetmem.checkpoint.loading import load
from hetmem.checkpoint.saving import save

__all__ = ["load", "save"]
