"""Which chunks have had every gradient of a backward, so that these are written to NVMe while it goes on: a run and a
plan of it both ask here. Pure.

Note "writes of gradients": users find gradients at home when a backward is over, so each is written by then. Written
only where somebody wants their place, and at the end, they leave the drive idle while the device computes. A write of
a chunk that gets more is made again, so the last one is waited for. Where updates begin in the backward nothing is
written early: what is written may go, and an update that comes later has to read it again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable
from typing import Generic, TypeVar

ChunkT = TypeVar("ChunkT", bound=Hashable)


class Complete(Generic[ChunkT]):
    """The chunks of a backward to which no more gradients come."""

    def __init__(self) -> None:
        self._missing: dict[ChunkT, set[int]] = {}
        self._came_again: set[ChunkT] = set()
        self._added_to: set[ChunkT] = set()

    def begin(self) -> None:
        """A backward begins: none has come."""
        self._missing.clear()

    def comes(self, chunk: ChunkT, parameter: int, awaited: Callable[[ChunkT], Collection[int]], *, adds: bool) -> None:
        """A gradient of `parameter` is on its way to `chunk`, where one of each that is `awaited` comes, by whatever
        numbers; it `adds` to what an earlier backward has left."""
        if adds:
            self._added_to.add(chunk)
        elif chunk in self._added_to:
            return  # the next backward will want what this one leaves
        missing = self._missing.get(chunk)
        if missing is None:
            missing = self._missing[chunk] = set(awaited(chunk))
        elif not missing:
            self._came_again.add(chunk)  # a backward has several of a parameter, and nobody knows how many
        missing.discard(parameter)

    def __contains__(self, chunk: ChunkT) -> bool:
        """Whether no other gradient of `chunk` is expected in this backward."""
        return chunk in self._missing and not self._missing[chunk] and chunk not in self._came_again
