"""How far ahead of their use copies are fetched: what a plan may set, and `Residency` then does. Pure data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Prefetch:
    """Blocks of the next `uses_ahead` uses are fetched, at most `in_flight` at once on each tier."""

    uses_ahead: int = 8
    in_flight: int = 2


FARTHER = Prefetch(32, 4)
"""What a plan tries beside the default. Between the two nothing else was better in any case that was simulated."""
