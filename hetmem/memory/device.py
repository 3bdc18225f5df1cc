"""The accelerator's memory as a pool of slots. Here: the simulated one; it lives in host memory and acts like a GPU.

It holds memory and knows link speeds; it does not know chunks, traces or which slot is taken by whom.
"""

from __future__ import annotations

import torch

from hetmem.memory.mapping import Mapping
from hetmem.units import parse_size

POISON = 0xFF
"""The byte a freed slot is filled with under `sanitize`: NaN in every floating-point format, -1 in integers."""


class SimDevice:
    """A simulated accelerator: a bounded pool in host memory, with link speeds if they are given.

    `memory`: capacity in bytes or as a string; None = the budget's. `host_to_device`, `device_to_host`: bytes per
    second (ints or strings such as "12GB"); None = as fast as this machine copies. Operators compute on the CPU;
    `hetmem` sees to it that they meet only memory of this device, as on a GPU.
    """

    def __init__(
        self,
        memory: int | str | None = None,
        *,
        host_to_device: int | str | None = None,
        device_to_host: int | str | None = None,
    ) -> None:
        self.memory_bytes = None if memory is None else parse_size(memory, "SimDevice(memory)")
        self.host_to_device = None if host_to_device is None else parse_size(host_to_device, "host_to_device")
        self.device_to_host = None if device_to_host is None else parse_size(device_to_host, "device_to_host")
        self.torch_device = torch.device("cpu")

    def __repr__(self) -> str:
        return f"SimDevice(memory={self.memory_bytes})"

    def pool(self, slot_bytes: int, slots: int) -> DevicePool:
        """A pool of `slots` slots of `slot_bytes` each; its memory is touched only as slots are used."""
        return DevicePool(slot_bytes, slots)


class DevicePool:
    """Equal slots of device memory, by number."""

    def __init__(self, slot_bytes: int, slots: int) -> None:
        self.slot_bytes = slot_bytes
        self.slots = slots
        self._mapping = Mapping(max(1, slot_bytes * slots))
        self.address = self._mapping.address
        self._touched = [False] * slots

    def buffer(self, slot: int, offset_bytes: int, nbytes: int) -> memoryview:
        """`nbytes` of memory from `offset_bytes` of `slot` on; it may reach into the slots that follow."""
        first = slot + offset_bytes // self.slot_bytes
        last = slot + max(0, offset_bytes + nbytes - 1) // self.slot_bytes
        for index in range(first, last + 1):
            self._touched[index] = True
        return self._mapping.buffer(slot * self.slot_bytes + offset_bytes, nbytes)

    def flat(self, slot: int, dtype: torch.dtype, numel: int, offset_elements: int = 0) -> torch.Tensor:
        """A 1-D tensor over slot memory, with a storage of its own."""
        nbytes = numel * dtype.itemsize
        return torch.frombuffer(self.buffer(slot, offset_elements * dtype.itemsize, nbytes), dtype=dtype)

    def poison(self, slot: int, span: int) -> None:
        """Overwrite `span` slots so that whoever still reads them gets NaN."""
        flat = torch.frombuffer(self.buffer(slot, 0, span * self.slot_bytes), dtype=torch.uint8)
        flat.fill_(POISON)

    def give_back(self, free: list[int], keep: int) -> None:
        """Return the memory of touched slots among `free` to the system until at most `keep` slots hold memory."""
        excess = sum(self._touched) - keep
        for slot in reversed(free):
            if excess <= 0:
                return
            if self._touched[slot]:
                self._mapping.discard(slot * self.slot_bytes, self.slot_bytes)
                self._touched[slot] = False
                excess -= 1
