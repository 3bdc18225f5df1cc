"""Saving and loading of models and optimizers on whatever tiers they are, streaming and crash-safe."""

from hetmem.checkpoint.save_load import load, save
from hetmem.checkpoint.weights import load_weights

__all__ = ["load", "load_weights", "save"]
