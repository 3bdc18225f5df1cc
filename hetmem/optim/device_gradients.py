"""Gradients that stay on the device until the update there has read them: whose is which place.

It knows chunks and memory; when an update runs is `device_updates`', and how a gradient gets here `engine.gradients`'.
"""

from __future__ import annotations

import torch

from hetmem.engine.gradients import GradientSink
from hetmem.memory.chunk import Chunk, Role
from hetmem.memory.tensor_views import Memory
from hetmem.schedule.updates import GradientPlaces


class KeptGradients(GradientPlaces[Chunk, Memory]):
    """The places of one optimizer on one runtime."""

    def __init__(self, sink: GradientSink) -> None:
        super().__init__()
        self._sink = sink

    def close(self) -> None:
        """Have no places; what is in them goes home first. Nothing may be borrowed."""
        for chunk in self.chunks:
            self.bring_home(chunk)
        self.give_up()

    def keep(self, chunk: Chunk) -> Memory:
        """Make a free place that of `chunk`, and return the memory of its gradients there."""
        return _of(chunk, self.take(chunk))

    def flat(self, chunk: Chunk, place: Memory) -> torch.Tensor:
        """Gradients of `chunk` in `place`, 1-D."""
        return chunk.over(Role.GRAD, _of(chunk, place))

    def read(self, chunk: Chunk) -> None:
        """The gradients of `chunk` were needed for the last time."""
        self._sink.retire(chunk, chunk.parameters)
        self.leave(chunk)

    def bring_home(self, chunk: Chunk) -> None:
        """The gradients of `chunk` go to host memory; see `GradientSink.bring_home`."""
        self._sink.bring_home(chunk)
        self.leave(chunk)


def _of(chunk: Chunk, place: Memory) -> Memory:
    """The memory at the end of `place` that gradients of `chunk` take; what is before is another chunk's slot."""
    return place[len(place) - chunk.role_nbytes(Role.GRAD) :]
