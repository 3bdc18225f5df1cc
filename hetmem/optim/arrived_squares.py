"""Squares of gradients that are summed on the device as they arrive, so that a step which needs their norm does not
read them at home.

Only gradients that the program cannot change are summed up here: those that an update consumes.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from hetmem.cpu import sums_where_it_is
from hetmem.memory.chunk import Chunk, ManagedParameter, Role
from hetmem.memory.hidden_gradient import HiddenGradient
from hetmem.optim.chunk_update import ChunkUpdate


class ArrivedSquares:
    """The sums of squares of the gradients of one step, of those that have arrived as a whole on `device`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sums: dict[ManagedParameter, torch.Tensor] = {}

    def add(self, whole: Iterable[tuple[ManagedParameter, torch.Tensor]]) -> None:
        """Sum up those of the gradients in `whole` that have at home the values, in the order, that they have here."""
        for managed, gradient in whole:
            chunk, dtype = managed.chunk, gradient.dtype
            if not chunk.hides or gradient.device != self._device or gradient.stride() != managed.stride:
                continue
            if dtype is not chunk.dtype_of(Role.GRAD) and chunk.dtype_of(Role.GRAD) is not torch.float32:
                continue
            flat = torch.as_strided(gradient.detach(), (managed.numel,), (1,), gradient.storage_offset())
            if (sums := sums_where_it_is(flat)) is not None:
                self._sums[managed] = sums

    def drop(self, parameters: Iterable[ManagedParameter]) -> None:
        """Forget the sums of `parameters`, whose gradients change at home."""
        for managed in parameters:
            self._sums.pop(managed, None)

    def clear(self) -> None:
        """Forget all, as the step ends."""
        self._sums.clear()

    def have(self, chunk: Chunk) -> bool:
        """Return whether each trained parameter of `chunk` has its sums."""
        return all(managed in self._sums for managed in chunk.parameters if managed.parameter.requires_grad)

    def give_to(self, update: ChunkUpdate) -> bool:
        """Make the sums those of `update`, if all its gradients are as they arrived, and have sums."""
        known = self._sums
        if not all(part.at_home for part in update.parts) or {*map(type, update.gradients)} != {HiddenGradient}:
            return False
        if not known.keys() >= {*update.members.managed}:
            return False
        update.sums = [*map(known.__getitem__, update.members.managed)]
        return True
