"""Memory for the states of unmanaged parameters: blocks in host memory and on NVMe, within a hard budget, and
the slots through which pieces of them pass.

Must not know gradients, rules or steps.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from hetmem.base.config import Budget, ranks_here
from hetmem.base.units import format_enough, format_size, round_up
from hetmem.errors import BudgetError
from hetmem.memory.chunk import Role, elements
from hetmem.memory.cuda_device import CudaDevice
from hetmem.memory.host_memory import Mapping
from hetmem.memory.nvme_store import Extent, NvmeStore
from hetmem.optim.shards import Shard
from hetmem.placing.building_memory import check_directories, host_bytes
from hetmem.schedule.layout import ALIGNMENT_ELEMENTS

PAGE_ELEMENTS = 4096
"""Blocks and pieces are multiples of so many elements: whole pages in any dtype."""
BLOCK_ELEMENTS = 8 << 20
"""A block takes parameters until it has so many elements; a larger one is a block of its own."""
_BLOCKS = 16
"""Blocks take a 16th of the host budget at most, unless a parameter is larger: they lie on one tier as a whole."""
MOST_PIECE_ELEMENTS = 4 << 20
SLOTS = 4
"""Two pieces that are read ahead, one that is updated, one that is written back."""
_STAGING_SHARE = 4
"""Slots take a quarter of the host budget at most, as long as they can be smaller."""


@dataclass(frozen=True, slots=True)
class StateKind:
    """What the parameters of one block have in common."""

    dtype: torch.dtype
    roles: tuple[Role, ...]
    device: torch.device

    @property
    def state_nbytes(self) -> int:
        """Bytes of all states of one element."""
        return sum(self.itemsize(role) for role in self.roles)

    def itemsize(self, role: Role) -> int:
        """Return the bytes of one element of `role`."""
        return (role.dtype or self.dtype).itemsize

    def slot_nbytes(self, *, on_nvme: bool) -> int:
        """Return the bytes of one element of a piece in a slot: parameter and gradient of a device, states of NVMe."""
        return 2 * self.dtype.itemsize * (self.device.type != "cpu") + self.state_nbytes * on_nvme


@dataclass(eq=False)
class StateBlock:
    """States of `shards`, which begin at `offsets`, all roles one behind the other: `numel` elements of each, whole
    pages. `memory` is host memory, or the mapping of `extent`."""

    kind: StateKind
    shards: list[Shard] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    numel: int = 0
    memory: memoryview = field(default_factory=lambda: memoryview(b""))
    extent: Extent | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all states."""
        return self.numel * self.kind.state_nbytes

    @property
    def in_place(self) -> bool:
        """Whether states lie in host memory beside their parameters."""
        return self.extent is None and self.kind.device.type == "cpu"

    def role_offset(self, role: Role) -> int:
        """Return the offset of `role` in `memory`, in bytes."""
        before = self.kind.roles[: self.kind.roles.index(role)]
        return self.numel * sum(map(self.kind.itemsize, before))

    def homes(self) -> list[dict[str, torch.Tensor]]:
        """Return the states of each of `shards`, by the names of `kind.roles`, 1-D, each with a storage of its own."""
        return [
            {role.name: self.flat(role, offset, offset + shard.numel) for role in self.kind.roles}
            for shard, offset in zip(self.shards, self.offsets, strict=True)
        ]

    def flat(self, role: Role, start: int, stop: int) -> torch.Tensor:
        """Return elements [start, stop) of `role`, 1-D."""
        kind = self.kind
        offset = self.role_offset(role) + start * kind.itemsize(role)
        return elements(self.memory, role.dtype or kind.dtype, stop - start, offset)

    def part(self, role: Role, start: int, stop: int) -> Extent:
        """Return where elements [start, stop) of `role` lie on NVMe."""
        assert self.extent is not None
        itemsize = self.kind.itemsize(role)
        at = self.extent.offset + self.role_offset(role) + start * itemsize
        return Extent(self.extent.file, at, (stop - start) * itemsize)


class StateMemory:
    """The blocks of one optimizer within `budget`: exact, except for what a page rounds up. Blocks take host memory
    first, then NVMe. All memory is freed when this and all views of it are gone."""

    def __init__(self, budget: Budget) -> None:
        """Open the NVMe store, if there is one. Raises `BudgetError` for bad directories, and for limits of memory that
        an optimizer does not use."""
        for name in ("device", "device_chunks", "home_copies"):
            if getattr(budget, name) is not None:
                raise BudgetError(
                    f"Budget({name}=…) is for hetmem.manage: an optimizer over parameters that are not managed keeps "
                    f"states in host memory and on NVMe, so give its budget host=, nvme= and nvme_dir= alone"
                )
        limits = budget.limits()
        check_directories(limits)
        self.host_capacity_bytes = host_bytes(limits) // (ranks_here() if limits.host_bytes is None else 1)
        self.nvme_capacity_bytes = limits.nvme_bytes
        self.host_bytes = self.nvme_bytes = 0
        """Bytes in use."""
        self.store: NvmeStore | None = None
        if limits.nvme_bytes:
            self.store = NvmeStore(list(limits.nvme_directories), limits.nvme_bytes)
        self.blocks: list[StateBlock] = []
        self.piece_elements = 0
        self.slots: list[memoryview] = []
        self._unpin: list[Callable[[], None]] = []
        self.close = weakref.finalize(self, _end, self._unpin, self.store)
        """Ends page-locking and the threads of the store; blocks stay readable as long as tensors hold them."""
        self.close.atexit = False  # a fork has neither; and a process that ends, ends them

    def reserve(self, shards: Sequence[tuple[Shard, tuple[Role, ...]]], optimizer: str) -> list[StateBlock]:
        """Return new blocks for the states of `shards`, all zero. Raises `BudgetError`, in the name of `optimizer`, if
        there is no room, and `StoreError` if a drive has none, with nothing changed."""
        blocks = divided(shards, self.host_capacity_bytes)
        on_nvme = self._on_nvme(blocks, optimizer)
        beside = [block for block, away in zip(blocks, on_nvme, strict=True) if away]
        if beside:
            assert self.store is not None
            for block, extent in zip(beside, self.store.reserve_many(block.nbytes for block in beside), strict=True):
                block.extent, block.memory = extent, self.store.view(extent)
                self.nvme_bytes += block.nbytes
        for block in blocks:
            if block.extent is None and block.nbytes:
                mapping = Mapping(block.nbytes)
                mapping.keep_from_children()
                block.memory = mapping.buffer(0, block.nbytes)
                self.host_bytes += block.nbytes
        self.blocks += blocks
        self._make_slots()
        return blocks

    def _on_nvme(self, new: list[StateBlock], optimizer: str) -> list[bool]:
        """Return which of the `new` blocks go to NVMe: none, if all have room in host memory."""
        used = self.host_bytes - sum(map(len, self.slots)), self.nvme_bytes
        placed = place(new, self.blocks, used, self.host_capacity_bytes, self.nvme_capacity_bytes)
        if placed.missing_bytes > 0:
            raise BudgetError(self._no_room([*self.blocks, *new], placed.slots_bytes, placed.missing_bytes, optimizer))
        return placed.on_nvme

    def _no_room(self, blocks: list[StateBlock], slots: int, missing: int, optimizer: str) -> str:
        """Return the message for `blocks` that lack `missing` bytes."""
        states, host, nvme = sum(block.nbytes for block in blocks), self.host_capacity_bytes, self.nvme_capacity_bytes
        tiers = f"Budget(host=…) is {format_size(host)}"
        if self.store is not None:
            tiers += f" and Budget(nvme=…) {format_size(nvme)}"
        more = "" if self.store is not None else ", or give Budget(nvme=…, nvme_dir=…)"
        passing = f", and what passes to a device or NVMe takes {format_size(slots)} of host memory" if slots else ""
        return (
            f"{optimizer} has no room: its states take {format_size(states)}{passing}. {tiers}, so "
            f"{format_enough(missing)} are missing: raise Budget(host=…) to {format_enough(host + missing)}{more}"
        )

    def _make_slots(self) -> None:
        """Make slots for the present blocks, if those there are do not serve them."""
        elements_, nbytes = _slot(self.blocks, self.host_capacity_bytes, on_nvme=self.nvme_bytes > 0)
        if not nbytes or (self.slots and elements_ <= self.piece_elements and nbytes <= len(self.slots[0])):
            return
        while self._unpin:
            self._unpin.pop()()
        mapping = Mapping(SLOTS * nbytes)
        mapping.keep_from_children()
        devices = {block.kind.device for block in self.blocks if block.kind.device.type == "cuda"}
        for device in sorted(devices, key=str):
            self._unpin.append(CudaDevice(device.index).pin(mapping))
        self.host_bytes += SLOTS * nbytes - sum(map(len, self.slots))
        self.slots = [mapping.buffer(at * nbytes, nbytes) for at in range(SLOTS)]
        self.piece_elements = elements_


def _end(unpin: list[Callable[[], None]], store: NvmeStore | None) -> None:
    while unpin:
        unpin.pop()()
    if store is not None:
        store.close()


@dataclass(frozen=True, slots=True)
class Placed:
    """Which of some blocks go to NVMe, the bytes of all slots then, and those that are missing; 0 if all have room."""

    on_nvme: list[bool]
    slots_bytes: int
    missing_bytes: int


def place(
    new: Sequence[StateBlock], before: Sequence[StateBlock], used: tuple[int, int], host_bytes: int, nvme_bytes: int
) -> Placed:
    """Place `new` blocks beside those `before`, which have `used` bytes of `host_bytes` and of `nvme_bytes`. Pure."""
    every = [*before, *new]
    room = host_bytes - used[0]
    needed = sum(block.nbytes for block in new)
    alone = _slots_nbytes(every, host_bytes, on_nvme=used[1] > 0)
    if needed + alone <= room:
        return Placed([False] * len(new), alone, 0)
    if not nvme_bytes:
        return Placed([False] * len(new), alone, needed + alone - room)
    slots = _slots_nbytes(every, host_bytes, on_nvme=True)
    left, found = room - slots, list[bool]()
    for block in new:
        found.append(block.nbytes > left)
        left -= 0 if found[-1] else block.nbytes
    away = sum(block.nbytes for block, there in zip(new, found, strict=True) if there)
    return Placed(found, slots, max(0, -left, away - (nvme_bytes - used[1])))


def divided(shards: Sequence[tuple[Shard, tuple[Role, ...]]], host_bytes: int) -> list[StateBlock]:
    """Divide `shards` into blocks of about `BLOCK_ELEMENTS`, or a part of `host_bytes`."""
    most_bytes = host_bytes // _BLOCKS
    blocks: list[StateBlock] = []
    open_blocks: dict[StateKind, StateBlock] = {}
    for shard, roles in shards:
        kind = StateKind(shard.dtype, roles, shard.device)
        block = open_blocks.get(kind)
        most = min(BLOCK_ELEMENTS, most_bytes // max(1, kind.state_nbytes))
        if block is None or (block.numel and block.numel + shard.numel > most):
            block = open_blocks[kind] = StateBlock(kind)
            blocks.append(block)
        block.shards.append(shard)
        block.offsets.append(block.numel)
        block.numel = round_up(block.numel + shard.numel, ALIGNMENT_ELEMENTS)
    for block in blocks:
        block.numel = round_up(block.numel, PAGE_ELEMENTS)
    return blocks


def _slot(blocks: Sequence[StateBlock], host_bytes: int, *, on_nvme: bool) -> tuple[int, int]:
    """Return the elements of the largest piece, and the bytes of a slot for it: all slots take a quarter of
    `host_bytes` at most, unless not even the least ones do. No bytes if nothing passes through slots."""
    of_an_element = max((block.kind.slot_nbytes(on_nvme=on_nvme) for block in blocks if block.numel), default=0)
    largest = max((block.numel for block in blocks), default=0)
    piece = min(largest, MOST_PIECE_ELEMENTS)
    while piece > PAGE_ELEMENTS and SLOTS * piece * of_an_element * _STAGING_SHARE > host_bytes:
        piece = round_up(piece // 2, PAGE_ELEMENTS)
    return piece, piece * of_an_element


def _slots_nbytes(blocks: Sequence[StateBlock], host_bytes: int, *, on_nvme: bool) -> int:
    return SLOTS * _slot(blocks, host_bytes, on_nvme=on_nvme)[1]
