"""Gradients that stay on the device until the update there has read them: whose is which place.

It knows chunks and memory; when an update runs is `device_updates`', and how a gradient gets here `engine.gradients`'.

Note "kept": a chunk whose states come to the device for their update needs its gradients there too, and nobody else
ever sees them if they are streamed. So their home, from the arrival of the first to the end of the kernel that reads
them, is a place beside the slots, and nothing of them crosses the link. There are as many places as slots; an update
whose gradients are in host memory borrows one to bring them to.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from hetmem.engine.gradients import GradientSink
from hetmem.memory.chunk import Chunk, Role
from hetmem.memory.tensor_views import Memory


class KeptGradients:
    """The places of one optimizer on one runtime: each is free, borrowed, or that of a chunk."""

    def __init__(self, sink: GradientSink) -> None:
        self._sink = sink
        self._free: list[Memory] = []
        self._places: dict[Chunk, Memory] = {}

    @property
    def has_room(self) -> bool:
        """Whether a place is free."""
        return bool(self._free)

    def holds(self, chunk: Chunk) -> bool:
        """Whether gradients of `chunk` are, or arrive, here."""
        return chunk in self._places

    @property
    def chunks(self) -> list[Chunk]:
        """Those of which gradients are here."""
        return list(self._places)

    def open(self, places: Iterable[Memory]) -> None:
        """Have `places`, each large enough for the gradients of any chunk at its end."""
        self._free.extend(places)

    def close(self) -> None:
        """Have no places; what is in them goes home first. Nothing may be borrowed."""
        for chunk in self.chunks:
            self.bring_home(chunk)
        self._free.clear()

    def keep(self, chunk: Chunk) -> Memory:
        """A free place becomes that of `chunk`. Returns the memory of its gradients there."""
        self._places[chunk] = self._free.pop()
        return _of(chunk, self._places[chunk])

    def borrow(self) -> Memory:
        """A free place, to be put back."""
        return self._free.pop()

    def put_back(self, place: Memory) -> None:
        """End `borrow`."""
        self._free.append(place)

    def flat(self, chunk: Chunk, place: Memory) -> torch.Tensor:
        """Gradients of `chunk` in `place`, 1-D."""
        return chunk.over(Role.GRAD, _of(chunk, place))

    def read(self, chunk: Chunk) -> None:
        """The gradients of `chunk` were needed for the last time."""
        self._sink.retire(chunk, chunk.parameters)
        self._free.append(self._places.pop(chunk))

    def bring_home(self, chunk: Chunk) -> None:
        """The gradients of `chunk` go to host memory; see `GradientSink.bring_home`."""
        self._sink.bring_home(chunk)
        self._free.append(self._places.pop(chunk))


def _of(chunk: Chunk, place: Memory) -> Memory:
    """The memory at the end of `place` that gradients of `chunk` take; what is before is another chunk's slot."""
    return place[len(place) - chunk.role_nbytes(Role.GRAD) :]
