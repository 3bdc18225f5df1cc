"""When updates happen."""

from __future__ import annotations

from enum import Enum


class Overlap(str, Enum):
    """How far updates of a step overlap with other work; the bits are the same with all of them.

    "off": all within `step`. "backward": chunk by chunk as gradients arrive; where a factor that needs all gradients
    (clipping, loss scaling) forbids it, in `step`. "speculative": also there, on trial, undone where the factor turns
    out not to be 1; takes host memory that the budget has left. "forward": as "backward", and `step` returns before
    all is done: the next forward waits for what it needs.
    """

    OFF = "off"
    BACKWARD = "backward"
    SPECULATIVE = "speculative"
    FORWARD = "forward"
