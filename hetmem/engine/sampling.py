"""What a few elements of a chunk's home were when its copy on the device was made: whether the home was written since.

Reads host memory only: a copy on a GPU could be looked at only by waiting for all that was asked of the GPU before. It
does not know copies, nor who writes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hetmem.memory.chunk import Chunk, ManagedParameter

_SAMPLES = 16  # of each parameter, at least, if it has as many
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By the bytes of an element, what its bits are read as."""


@dataclass(slots=True, eq=False)
class _Places:
    """Which elements of a chunk are looked at: `index`, of which those of each parameter are `parts`."""

    index: torch.Tensor
    parts: dict[ManagedParameter, slice]

    def part(self, managed: ManagedParameter | None) -> slice:
        return slice(None) if managed is None else self.parts[managed]


class Fingerprints:
    """Of the chunks of one model, where homes are in host memory or on NVMe."""

    def __init__(self) -> None:
        self._places: dict[Chunk, _Places] = {}
        self._bits: dict[Chunk, torch.Tensor] = {}

    def take(self, chunk: Chunk, values: torch.Tensor) -> None:
        """A copy of `chunk` is made from `values`, its flat parameters in host memory, and from now on says that."""
        self._bits[chunk] = _bits(values, self._places_of(chunk).index)

    def differ(self, chunk: Chunk, values: torch.Tensor, managed: ManagedParameter | None = None) -> bool:
        """Whether `values` have other bits than when they were last taken, if they were; of the whole chunk, or of
        `managed`."""
        places, before = self._places_of(chunk), self._bits.get(chunk)
        part = places.part(managed)
        return before is None or not torch.equal(_bits(values, places.index[part]), before[part])

    def unequal(
        self, chunk: Chunk, values: torch.Tensor, others: torch.Tensor, managed: ManagedParameter | None = None
    ) -> bool:
        """Whether two copies in host memory differ, `others` in the dtype of `values`."""
        places = self._places_of(chunk)
        index = places.index[places.part(managed)]
        theirs = others.index_select(0, index).to(values.dtype)
        return not torch.equal(_bits(values, index), _bits(theirs, torch.arange(index.numel(), device="cpu")))

    def offsets(self, chunk: Chunk) -> list[int]:
        """The bytes of its home that are looked at."""
        return [at * chunk.dtype.itemsize for at in self._places_of(chunk).index.tolist()]

    def _places_of(self, chunk: Chunk) -> _Places:
        found = self._places.get(chunk)
        if found is None:
            runs, parts, start = [], {}, 0
            for managed in chunk.parameters:
                step = max(1, managed.numel // _SAMPLES)
                runs.append(torch.arange(managed.offset, managed.offset + managed.numel, step, device="cpu"))
                parts[managed] = slice(start, start + runs[-1].numel())
                start = parts[managed].stop
            found = self._places[chunk] = _Places(
                torch.cat([torch.empty(0, dtype=torch.int64, device="cpu"), *runs]), parts
            )
        return found


def _bits(values: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """As integers a NaN equals itself, and 0 is not -0."""
    return values.view(INTEGERS.get(values.itemsize, values.dtype)).index_select(0, index)
