"""Runs the micro-batches of a step layer by layer: `accumulate`."""

from __future__ import annotations

from hetmem.accumulation.call import accumulate

__all__ = ["accumulate"]
