"""Memory that gradients borrow from their arrival to their update: buffers that were set aside, in host memory and on
the device, and host memory that nothing else takes.

It knows bytes, and which homes lie in them; whose homes they are is `engine.homes`' business.
"""

from __future__ import annotations

from hetmem.memory.chunk import Home, RawMemory
from hetmem.memory.host_memory import HostPool, Loan
from hetmem.memory.nvme_store import NvmeStore
from hetmem.schedule.gradients import Lending
from hetmem.schedule.trace import Tier


class _Buffers:
    """Buffers of one tier that were set aside."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.lending = Lending()
        self.spare: dict[int, list[RawMemory]] = {}
        """Those that are not lent, by their bytes."""


class LentMemory:
    """What gradients of one model borrow; `host_pool` is also lent to activations."""

    def __init__(self, host_pool: HostPool) -> None:
        self._pool = host_pool
        self._buffers = {Tier.HOST: _Buffers(), Tier.DEVICE: _Buffers()}
        self._lent: dict[Home, RawMemory] = {}
        self._loans: dict[Home, Loan] = {}
        """Homes in memory that was not set aside."""
        self._on_drive: dict[Home, Loan] = {}
        self._loaned_bytes = 0
        self._activation_bytes = 0
        """The most bytes of activations in host memory when a gradient was lent memory."""

    def sizes(self, tier: Tier) -> list[int]:
        """Return the bytes of each buffer that was set aside on `tier`, lent or not."""
        return self._buffers[tier].sizes

    def spare_bytes(self, tier: Tier) -> int:
        """Return the bytes that were set aside on `tier` and are not lent now."""
        return self._buffers[tier].lending.free_bytes if tier in self._buffers else 0

    def add(self, tier: Tier, memory: RawMemory) -> None:
        """Set `memory` aside."""
        buffers = self._buffers[tier]
        buffers.sizes += (memory.nbytes,)
        buffers.spare.setdefault(memory.nbytes, []).append(memory)
        buffers.lending.add(memory.nbytes)

    def end(self, tier: Tier) -> list[RawMemory]:
        """Return all buffers of `tier`, which lends none any more; nothing, if one is lent now."""
        buffers = self._buffers[tier]
        if buffers.lending.free_bytes < sum(buffers.sizes):
            return []
        self._buffers[tier] = _Buffers()
        return [memory for spare in buffers.spare.values() for memory in spare]

    def lends(self, nbytes: int, tier: Tier) -> bool:
        """Return whether any buffer of `nbytes` or more was set aside on `tier`."""
        return self._buffers[tier].lending.lends(nbytes)

    def take(self, nbytes: int, tier: Tier) -> Home | None:
        """Lend a buffer of `tier` for `nbytes`; None if all that are large enough are lent."""
        buffers = self._buffers[tier]
        size = buffers.lending.take(nbytes)
        if size is None:
            return None
        memory = buffers.spare[size].pop()
        home = Home(tier, memory[:nbytes])
        self._lent[home] = memory
        return home

    def borrow(self, nbytes: int, *, leaves_activations: bool = True) -> Home | None:
        """Lend host memory that nothing else takes, beside what activations took at most if it `leaves_activations`;
        None if there is none."""
        leave = 0
        if leaves_activations:
            activations = self.activation_bytes
            self._activation_bytes = max(self._activation_bytes, activations)
            leave = self._activation_bytes - activations
        loan = self._pool.lend(nbytes, leave)
        if loan is None:
            return None
        home = Home(Tier.HOST, loan.memory[:nbytes])
        self._loans[home] = loan
        self._loaned_bytes += nbytes
        return home

    def borrow_on_drive(self, store: NvmeStore, nbytes: int) -> Home | None:
        """Lend memory of the drive that nothing else takes; None if there is none."""
        if (loan := store.lend(nbytes)) is None:
            return None
        home = Home(Tier.NVME, loan.memory[:nbytes], extent=loan.extent)
        self._on_drive[home] = loan
        return home

    @property
    def activation_bytes(self) -> int:
        """Bytes of activations in host memory."""
        return self._pool.lent_bytes - self._loaned_bytes

    def was_set_aside(self, home: Home) -> bool:
        """Return whether `home` lies in a buffer."""
        return home in self._lent

    def give_back(self, home: Home) -> bool:
        """Free the memory of `home` for others; return False if it was not lent."""
        memory = self._lent.pop(home, None)
        if memory is not None:
            buffers = self._buffers[home.tier]
            buffers.spare[memory.nbytes].append(memory)
            buffers.lending.give(memory.nbytes)
            return True
        if self._on_drive.pop(home, None) is not None:
            return True
        if self._loans.pop(home, None) is None:
            return False
        self._loaned_bytes -= home.memory.nbytes
        return True
