"""Which elements a launch moves from where to where: a table made once, kept on the device, used at every launch.

It knows element offsets from two base addresses, so the same table serves whatever slot a chunk lies in. It does not
know dtypes, addresses or kernels.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

TILE_ELEMENTS = 8192
"""What one block moves at a time: long enough to hide a block's start, short enough to share out small tensors."""

ALIGNED_ELEMENTS = 8
"""Elements of a 16-bit format in 16 bytes; tiles start where the destination is a multiple of that."""


class Segments:
    """Runs of elements `(source, destination, count)`: both starts in elements after their tensor's first.

    Destinations must not overlap; a count may be 0. `device`: where the kernels run. The table is copied there by the
    constructor, which waits for the copy. Raises ValueError for negative numbers and overlapping destinations.
    """

    def __init__(self, runs: Sequence[tuple[int, int, int]], device: torch.device | str) -> None:
        table = np.asarray(runs, dtype=np.int64).reshape(-1, 3)
        _check(table)
        self.runs = [(source, destination, count) for source, destination, count in table.tolist() if count > 0]
        self.numel = sum(count for _, _, count in self.runs)
        self.source_numel = max((source + count for source, _, count in self.runs), default=0)
        self.destination_numel = max((destination + count for _, destination, count in self.runs), default=0)
        self.tiles = [tile for run in self.runs for tile in _tiles(*run)]
        self.table = torch.tensor(self.tiles, dtype=torch.int64, device="cpu").reshape(-1, 3).to(device)

    def __repr__(self) -> str:
        return f"Segments({len(self.runs)} runs, {self.numel} elements, {len(self.tiles)} tiles)"


def _check(table: np.ndarray[tuple[int, int], np.dtype[np.int64]]) -> None:
    if (table < 0).any():
        first = tuple(table[(table < 0).any(axis=1)][0].tolist())
        raise ValueError(f"starts and counts must not be negative, got (source, destination, count) = {first}")
    ordered = table[table[:, 2] > 0]
    ordered = ordered[np.argsort(ordered[:, 1], kind="stable")]
    overlap = np.flatnonzero(ordered[:-1, 1] + ordered[:-1, 2] > ordered[1:, 1])
    if overlap.size:
        one, other = ordered[overlap[0]].tolist(), ordered[overlap[0] + 1].tolist()
        raise ValueError(f"destinations must not overlap: (source, destination, count) = {one} and {other}")


def _tiles(source: int, destination: int, count: int) -> list[tuple[int, int, int]]:
    """The run in tiles. The first ends where the destination becomes a multiple of 16 bytes, whatever its dtype."""
    first = min(count, -destination % ALIGNED_ELEMENTS)
    ends = [first, *range(first + TILE_ELEMENTS, count, TILE_ELEMENTS), count]
    starts = [0, *ends[:-1]]
    return [
        (source + start, destination + start, end - start)
        for start, end in zip(starts, ends, strict=True)
        if end > start
    ]
