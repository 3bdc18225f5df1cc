"""The accelerator's memory as a pool of slots. It holds memory and does not know which slots are taken."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from hetmem.memory.tensor_views import Memory, address_of, elements

POISON = 0xFF
"""The byte a freed slot is filled with under `sanitize`: NaN in every floating-point format, -1 in integers."""


class SlotMemory(Protocol):
    """Where memory of slots comes from and goes to."""

    def empty(self, nbytes: int) -> Memory:
        """Bytes of the device."""
        ...

    def last_use(self, memory: Any) -> None:
        """`memory`, which `empty` gave, is dropped next."""


class DevicePool:
    """Places for chunks on `device`, by number, each of one or more slots of `slot_bytes`.

    A place takes memory when a chunk first comes to lie there, and keeps it until that is given back. `slots` is how
    many may hold memory: before a place is prepared, others are given back.

    Memory that was given back is safe for its next user, and memory that was just taken may still be read by compute
    that was asked for earlier; see `ComputeStreams`.
    """

    def __init__(self, slot_bytes: int, slots: int, device: torch.device, source: SlotMemory) -> None:
        self.slot_bytes = slot_bytes
        self.slots = slots
        self._device = device
        self._source = source
        self._memory: dict[int, Memory] = {}
        self._spans: dict[int, int] = {}
        self.held_slots = 0
        """The slots that hold memory."""

    def held_bytes(self) -> int:
        """What these have taken of the device's memory."""
        return self.held_slots * self.slot_bytes

    def holds_place(self, place: int) -> bool:
        """Whether there is memory at `place`."""
        return place in self._memory

    def prepare(self, place: int, span: int) -> None:
        """Have memory for `span` slots at `place`, where there is none. Other compute may still be using it."""
        self._memory[place] = self._source.empty(span * self.slot_bytes)
        self._spans[place] = span
        self.held_slots += span

    def flat(self, place: int, dtype: torch.dtype, numel: int, offset_elements: int = 0) -> torch.Tensor:
        """A 1-D tensor over memory of `place`, with a storage of its own."""
        if numel == 0:
            return torch.empty(0, dtype=dtype, device=self._device)
        return elements(self._memory[place], dtype, numel, offset_elements * dtype.itemsize)

    def poison(self, place: int) -> None:
        """Overwrite `place`, on the stream of compute, so that a stale reader gets NaN."""
        if place in self._memory:  # there may have been none for it
            self.flat(place, torch.uint8, self._spans[place] * self.slot_bytes).fill_(POISON)

    def give_back(self, free: list[int], keep: int) -> None:
        """Return the memory of places among `free`, those with the highest numbers first, until at most `keep` slots
        hold memory."""
        for place in reversed(free):
            if self.held_slots <= keep:
                return
            if place in self._memory:
                self.held_slots -= self._spans.pop(place)
                self._source.last_use(self._memory.pop(place))

    def holds(self, address: int) -> bool:
        """Whether `address` lies in a slot."""
        return any(
            0 <= address - address_of(memory) < self._spans[place] * self.slot_bytes
            for place, memory in self._memory.items()
        )
