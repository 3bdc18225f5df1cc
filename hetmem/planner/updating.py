"""How a run updates, as far as a plan of it depends on that: what it is told, as data. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Updating:
    """When updates are made, where, and how long gradients stay.

    `overlapped`: a chunk is updated as soon as all its gradients are there, as with `hetmem.AdamW(overlap="backward")`,
    from the second step on. `trails`: and a step does not wait for that, as with "forward". `streamed_gradients`:
    nobody sees gradients, as with `hetmem.AdamW(gradients="streamed")`, so that they have homes for a while only,
    updates begin in the first step, and gradients stay on the device where those read them there. `streamed_states`:
    states are sent to the device for their update, as by a run that knows the machine.
    """

    overlapped: bool = False
    trails: bool = False
    streamed_gradients: bool = False
    streamed_states: bool = False
