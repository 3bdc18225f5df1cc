"""Owns the memory of one managed module: pools and homes, and their bytes on each tier.

The one writer of `Chunk.homes`. It reserves and frees memory, moves no bytes, and knows neither operators nor copies.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from hetmem.base.units import format_size
from hetmem.engine.lent_memory import LentMemory
from hetmem.errors import BudgetError, DeviceOutOfMemoryError
from hetmem.memory.chunk import Chunk, Home, ManagedParameter, RawMemory, Role, address_of
from hetmem.memory.device import Device, DevicePool, out_of_memory
from hetmem.memory.host_memory import HostPool
from hetmem.memory.nvme_store import Extent, NvmeStore
from hetmem.ranks.group import Ranks, not_yet
from hetmem.schedule.blocks import Block
from hetmem.schedule.gradients import more_aside, set_aside
from hetmem.schedule.layout import Layout
from hetmem.schedule.placement import Room, idle_bytes, place, place_copies, room_bytes
from hetmem.schedule.trace import Tier

_NAMES = {"param": "parameters", "grad": "gradients", "exp_avg": "first moments", "exp_avg_sq": "second moments"}

_STATES_ALONE = "of a group of ranks NVMe takes states alone: "
_WITHOUT_STAGING = (
    "hetmem.manage found room in host memory for what trains, with two states, and set none aside to reach the drive "
    "through: call it before weights are frozen that train later, or "
)

ALLOCATOR_SHARE = 0.03
"""Share of a GPU's budget left to torch's allocator, which rounds sizes up and fragments memory."""


@dataclass(slots=True, eq=False)
class Memory:
    """All memory of one managed module, and the address ranges of its homes and slots."""

    layout: Layout
    chunks: list[Chunk]
    device: Device
    device_bytes: int
    device_chunk_bytes: int
    device_pool: DevicePool
    host_pool: HostPool
    store: NvmeStore | None
    nvme_bytes: int
    buffer_bytes: int
    staging_slots: int
    mixed_precision: torch.dtype | None
    pins: list[Callable[[], None]]
    """Functions that end page-locking, and the exclusion of host memory from forked processes."""
    resident: bool
    """Whether all homes are on the device, without memory reserved elsewhere, until `leave_device`."""
    in_codes: bool = False
    """Whether all homes are there in a model with quantised weights, which are decoded into slots, until it leaves."""
    copied: bool = True
    """Whether copies use host memory, which must be page-locked then."""
    ranks: Ranks | None = None
    """The group of ranks that share all homes, if there are several."""
    nvme_directories: list[Path] = field(default_factory=list)
    parked_store: NvmeStore | None = None
    """The drive of a model that uses none but while it is parked."""
    _page_locks: tuple[int, Callable[[], None]] | None = None
    """The first byte of host memory that is page-locked, as all behind it are, and the one of `pins` that ends that."""
    device_home_bytes: int = 0
    bound_to_device: bool = False
    """Whether another optimizer than hetmem's has stepped, whose states would stay where parameters were."""
    staying: dict[Chunk, None] = field(default_factory=dict)
    """The chunks whose homes are on the device because no other tier has room, or all of them, `in_codes`."""
    _staying_bytes: int = 0
    unstaged: dict[Chunk, int] = field(default_factory=dict)
    """The chunks with all homes in host memory, and how many homes of the size of their parameters it has room for
    while their optimizer is unknown: see `schedule.staging`."""
    _expected: dict[Chunk, tuple[Role, ...]] = field(default_factory=dict)
    """The roles that an optimizer keeps of those."""
    uses_copies: bool = field(init=False)
    """Whether operators see copies; else they see the homes, which are all on the device in the compute dtype."""
    usable_bytes: int = field(init=False)
    """The device's bytes without `ALLOCATOR_SHARE`, on a GPU."""
    _gradient_reserves: dict[Chunk, Home] = field(default_factory=dict)
    lent: LentMemory = field(init=False)
    _home_ranges: list[tuple[int, int]] = field(default_factory=list)
    _device_ranges: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.uses_copies = not self.resident or self.mixed_precision is not None
        unusable = 0 if self.device.watched else int(ALLOCATOR_SHARE * self.device_bytes)
        self.usable_bytes = self.device_bytes - unusable
        self.lent = LentMemory(self.host_pool)
        host = self.host_pool.mapping.address
        self._home_ranges.append((host, host + self.host_pool.capacity_bytes))
        if self.ranks is not None:
            mapping = self.ranks.pool.mapping
            self._home_ranges.append((mapping.private_address, mapping.private_address + mapping.nbytes))

    def __del__(self) -> None:
        """Break the reference cycles of chunks and their parameters, so that memory is freed without a collection."""
        for chunk in getattr(self, "chunks", ()):  # none if something has ended `__init__`
            chunk.parameters.clear()

    def close(self) -> None:
        """End page-locking and the store's threads and files. Homes stay readable as long as tensors hold them."""
        for store in (self.store, self.parked_store):
            if store is not None:
                store.close()
        while self.pins:
            self.pins.pop()()

    def page_lock(self) -> None:
        """Page-lock host memory, if copies use it and it is not locked yet. Raises what `Device.pin` does."""
        if self.copied:
            self._page_lock_from(0)

    def page_lock_way_back(self, borrowed: Iterable[Home]) -> None:
        """Page-lock the host memory of `borrowed`, and all behind it, which is lent first. Raises as `page_lock`."""
        start = self.host_pool.mapping.address
        if starts := [address_of(home.memory) - start for home in borrowed if home.tier is Tier.HOST]:
            self._page_lock_from(min(starts))

    def _page_lock_from(self, start: int) -> None:
        """Page-lock host memory from byte `start` on, in one piece, as a copy must not cross two."""
        if self._page_locks is not None:
            first, unpin = self._page_locks
            if first <= start:
                return
            self._page_locks = None
            self.pins.remove(unpin)
            unpin()
        self.pins.append(self.device.pin(self.host_pool.mapping, start))
        self._page_locks = start, self.pins[-1]

    def parameters(self) -> Iterator[ManagedParameter]:
        """Yield the parameters whose values have been moved to their homes by now."""
        return (managed for chunk in self.chunks for managed in chunk.parameters)

    @property
    def moved_bytes(self) -> int:
        """Bytes of homes that have moved to the device, and may leave it."""
        return 0 if self.resident or self.in_codes else self.device_home_bytes - self._staying_bytes

    # ---- reserving ---------------------------------------------------------------------------------------------

    def reserve(self, chunks: Iterable[Chunk], role: Role) -> None:
        """Give `role` of each of `chunks` a home. Raises `BudgetError` if there is no room, or `DeviceOutOfMemoryError`
        where the chunk's other homes are on the device; nothing is reserved then."""
        chunks = [chunk for chunk in chunks if role not in chunk.homes]
        settled: list[Chunk] = []
        try:
            for chunk in chunks:
                if self.resident or chunk.moved or chunk in self.staying:
                    self._settle_on_device(chunk, role)
                    settled.append(chunk)
            room, what = self.room(), f"{role.name} of {len(chunks)} chunks"
            if self.ranks is not None and not role.is_state:
                room = Room(room.host_bytes, 0, _STATES_ALONE)
            chunks = [chunk for chunk in chunks if role not in chunk.homes]
            chunks.sort(key=lambda chunk: chunk not in self.unstaged)
            sizes = [chunk.home_nbytes(role) for chunk in chunks]
            apart = sum(chunk in self.unstaged for chunk in chunks)
            tiers = place(sizes[:apart], Room(self.host_pool.free_bytes, 0), what) + place(sizes[apart:], room, what)
        except (BudgetError, DeviceOutOfMemoryError):
            for chunk in settled:
                self._unsettle(chunk, role)
            raise
        self._place(role, list(zip(chunks, sizes, tiers, strict=True)))

    def _settle_on_device(self, chunk: Chunk, role: Role) -> None:
        self._settle(chunk, role, self._allocate(chunk.home_nbytes(role), chunk.label(role)))

    def _allocate(self, nbytes: int, what: str) -> RawMemory:
        """Return zeroed device memory for `what`, of chunks whose homes are there."""
        try:
            return self.device.allocate(nbytes)
        except torch.OutOfMemoryError as error:
            raise DeviceOutOfMemoryError(
                f"{out_of_memory(self.device)} The device has no memory for {what}, whose other homes are there: "
                f"{format_size(nbytes)} wanted"
                f"{self.homes_on_device()}, copies of parameters take "
                f"{format_size(self.device_pool.held_bytes())}, of {format_size(self.device_bytes)}, the device "
                f"budget: lower Budget(device_chunks=…), or Budget(device=…) if others use the device too"
            ) from error

    def homes_on_device(self) -> str:
        """Return the bytes of homes on the device, by role, as a part of a sentence; "" if there are none."""
        found: Counter[str] = Counter()
        for chunk in self.chunks:
            for role, home in chunk.homes.items():
                found[role.name] += chunk.home_nbytes(role) if home.tier is Tier.DEVICE else 0
        parts = [f"{_NAMES.get(name, name)} {format_size(nbytes)}" for name, nbytes in found.items() if nbytes]
        return f", homes on the device {', '.join(parts)}" if parts else ""

    def reserve_copies(self, chunks: Iterable[Chunk]) -> None:
        """Give the 16-bit copies of `chunks` homes as far as there is room."""
        wanted = [(chunk, chunk.home_nbytes(Role.COMPUTE)) for chunk in chunks]
        beside = [chunk.homes[Role.PARAM].tier for chunk, _ in wanted]
        tiers = place_copies([nbytes for _, nbytes in wanted], beside, self.room())
        placed = [
            (chunk, nbytes, tier) for (chunk, nbytes), tier in zip(wanted, tiers, strict=True) if tier is not None
        ]
        self._place(Role.COMPUTE, placed)

    def room(self, *, of_all: bool = False) -> Room:
        """Return the room for homes in host memory and on NVMe; `of_all`: also for those of chunks that are never
        staged, which get theirs before others."""
        owed = 0 if of_all else sum(map(self._owed_bytes, self.unstaged))
        host = max(0, self.host_pool.free_bytes - owed)
        if self.store and self.staging_slots:
            return Room(host, self.nvme_bytes - self.store.reserved_bytes)
        return Room(host, 0, _WITHOUT_STAGING) if self.nvme_bytes else Room(host, 0)

    def expect(self, chunk: Chunk, roles: tuple[Role, ...]) -> None:
        """Keep host memory free for homes of `roles` of `chunk`, and no more, if it is never staged."""
        if chunk in self.unstaged:
            self._expected[chunk] = roles

    def _owed_bytes(self, chunk: Chunk) -> int:
        """Return the bytes of homes of `chunk`, which is never staged, that host memory is kept free for."""
        if chunk.moved or chunk in self.staying:
            return 0
        if chunk in self._expected:
            return sum(chunk.home_nbytes(role) for role in self._expected[chunk] if role not in chunk.homes)
        there = sum(chunk.home_nbytes(role) for role in chunk.homes if role != Role.COMPUTE)
        return max(0, self.unstaged[chunk] * chunk.home_nbytes(Role.PARAM) - there)

    def _place(self, role: Role, placed: list[tuple[Chunk, int, Tier]]) -> None:
        """Reserve memory for homes of `role`: chunk, bytes and tier of each are in `placed`."""
        on_disk = [(chunk, size) for chunk, size, tier in placed if tier is Tier.NVME]
        if on_disk:
            assert self.store is not None
            if self.ranks is not None:
                extents = [self._reserve_on_drive(self.ranks, chunk, role) for chunk, _ in on_disk]
            else:
                extents = self.store.reserve_many([size for _, size in on_disk])
            for (chunk, size), extent in zip(on_disk, extents, strict=True):
                memory = self.store.view(extent)
                private = None if self.ranks is None else self.ranks.pool.mapping.private(memory)
                chunk.homes[role] = Home(Tier.NVME, memory, extent=extent, private=private)
                self._home_ranges.append(_range(memory, size))
        for chunk, size, tier in placed:
            if tier is Tier.HOST and self.ranks is not None:
                memory = self.ranks.pool.reserve_home(chunk.spec.index, repr(role), size)
                mapping = self.ranks.pool.mapping
                own = partial(mapping.is_written, memory)
                private = mapping.private(memory)
                chunk.homes[role] = Home(Tier.HOST, memory, untouched=True, private=private, has_own_pages=own)
            elif tier is Tier.HOST:
                memory = self.host_pool.reserve(size)
                chunk.homes[role] = Home(Tier.HOST, memory, untouched=self.host_pool.is_untouched(memory))

    @staticmethod
    def _reserve_on_drive(ranks: Ranks, chunk: Chunk, role: Role) -> Extent:
        """Reserve a home of states on the drive that `ranks` share. Raises `ManageError` for states with scales, whose
        tiles are no whole blocks there."""
        if role.scale_block:
            raise not_yet("moments='8bit' on NVMe")
        assert ranks.drive is not None
        return ranks.drive.reserve_home(
            chunk.spec.index, repr(role), chunk.home_nbytes(role), chunk.dtype_of(role).itemsize
        )

    def _settle(self, chunk: Chunk, role: Role, memory: RawMemory) -> Home:
        """Make `memory`, on the device, the home of `role`."""
        home, nbytes = Home(Tier.DEVICE, memory), chunk.home_nbytes(role)
        self._device_ranges.append(_range(memory, nbytes))
        self.device_home_bytes += nbytes
        self._staying_bytes += nbytes * (chunk in self.staying)
        chunk.homes[role] = home
        return home

    def _unsettle(self, chunk: Chunk, role: Role) -> Home:
        home, nbytes = chunk.homes[role], chunk.home_nbytes(role)
        self._device_ranges.remove(_range(home.memory, nbytes))
        self.device_home_bytes -= nbytes
        self._staying_bytes -= nbytes * (chunk in self.staying)
        return chunk.homes.pop(role)

    # ---- homes that move to the device and back ----------------------------------------------------------------

    def move_in(self, chunk: Chunk, memories: Mapping[Role, RawMemory]) -> None:
        """Make `memories`, on the device, the homes of `chunk`; the memory of its old homes stays reserved."""
        for role, memory in memories.items():
            before = chunk.homes.get(role)
            home = self._settle(chunk, role, memory)
            if before is not None:
                home.away, home.block, home.written = before, before.block, before.written

    def move_back(self, chunk: Chunk, role: Role) -> None:
        """End `move_in` of one role: its home is its old one again, or there is none."""
        home = self._unsettle(chunk, role)
        if home.away is not None:
            home.away.written, home.away.block = home.written, home.block
            chunk.homes[role] = home.away

    @property
    def has_room_away(self) -> bool:
        """Whether host memory has room for all homes and gradients."""
        return self.away_bytes <= self.host_pool.free_bytes

    @property
    def may_leave_device(self) -> bool:
        """Whether the model is whole on the device, and may leave it."""
        return self.resident and not self.bound_to_device and self.has_room_away

    @property
    def away_bytes(self) -> int:
        """Bytes that all homes and gradients would take in host memory."""
        return sum(chunk.home_nbytes(role) for chunk in self.chunks for role in _roles_away(chunk))

    def leave_device(self) -> None:
        """Let the homes of a model that is whole on the device leave it: reserve host memory for each, and for
        gradients (see `gradient_place`)."""
        for chunk in self.chunks:
            for role in _roles_away(chunk):
                away = Home(Tier.HOST, self.host_pool.reserve(chunk.home_nbytes(role)))
                if role in chunk.homes:
                    chunk.homes[role].away = away
                else:
                    self._gradient_reserves[chunk] = away
        self.resident, self.uses_copies = False, True
        self.copied = True
        self.page_lock()

    def leave_in_codes(self) -> None:
        """Let the homes of a model that is whole on the device `in_codes` leave it."""
        if self.in_codes:
            self.in_codes, self.copied = False, True
            self.page_lock()

    def gradient_place(self, chunk: Chunk) -> Home | None:
        """Return the memory that `leave_device` reserved for gradients of `chunk`, if it is unused."""
        return self._gradient_reserves.get(chunk)

    def use_gradient_place(self, chunk: Chunk) -> bool:
        """Make `gradient_place`, if there is one, the home of gradients, or where they go from the device."""
        place = self._gradient_reserves.pop(chunk, None)
        if place is None:
            return False
        home = chunk.homes.setdefault(Role.GRAD, place)
        if home is not place:
            home.away = place
        return True

    def idle_bytes(self, non_model_bytes: int) -> int:
        """Return the device bytes that a step leaves idle: see `schedule.placement`."""
        copies = sum(chunk.spec.span for chunk in self.chunks) * self.device_pool.slot_bytes
        held = self.device_home_bytes + copies
        return idle_bytes(self.usable_bytes, self.device_chunk_bytes, non_model_bytes, held)

    def set_aside(self, chunks: Iterable[Chunk]) -> None:
        """Reserve host memory for gradients of a few of `chunks` at a time, to be lent: see `schedule.gradients`."""
        for nbytes in set_aside([chunk.lent_nbytes for chunk in chunks], self.room().host_bytes):
            self.lent.add(Tier.HOST, self.host_pool.reserve(nbytes))

    def set_aside_on_device(self, sizes: Iterable[int]) -> None:
        """Allocate device memory for gradients of a few at a time of the chunks that borrow it, of these `sizes`, to be
        lent. Raises `DeviceOutOfMemoryError` if the device has none."""
        for nbytes in more_aside(sizes, self.lent.sizes(Tier.DEVICE)):
            memory = self._allocate(nbytes, "gradients of chunks")
            self.lent.add(Tier.DEVICE, memory)
            self._count_on_device(memory, nbytes)

    def end_aside_on_device(self) -> None:
        """Free what was set aside on the device, if no homes are there any more."""
        if not any(chunk.moved for chunk in self.chunks):
            for memory in self.lent.end(Tier.DEVICE):
                self._count_on_device(memory, -memory.nbytes)

    @property
    def spare_bytes(self) -> int:
        """Bytes of host memory that were set aside and are not lent now."""
        return self.lent.spare_bytes(Tier.HOST)

    def lends(self, chunk: Chunk, *, wide: bool = False) -> bool:
        """Return whether memory for gradients of `chunk` was set aside at all; `wide` as in `lend`."""
        tier = Tier.DEVICE if chunk.moved else Tier.HOST
        return self.lent.lends(chunk.sum_nbytes if wide else chunk.lent_nbytes, tier)

    def lend(self, chunk: Chunk, *, wide: bool) -> bool:
        """Give gradients of `chunk` a home in memory that was set aside, or of the host that nothing else takes, in the
        dtype in which they arrive, or a `wide` one for a sum; False if there is none now."""
        nbytes, tier = chunk.sum_nbytes if wide else chunk.lent_nbytes, Tier.DEVICE if chunk.moved else Tier.HOST
        home = self.lent.take(nbytes, tier)
        if home is None and tier is Tier.HOST and not self.staging_slots:  # with NVMe, states take all that homes leave
            home = self.lent.borrow(nbytes)
        if home is None:
            return False
        self.keep_gradients(chunk, home)
        if wide:
            chunk.gradient_dtype = None
        return True

    @property
    def activation_bytes(self) -> int:
        """Bytes of activations in host memory."""
        return self.lent.activation_bytes

    def narrow_gradients(self, chunks: Iterable[Chunk]) -> None:
        """Have homes of gradients of `chunks`, which are to be reserved, keep the dtype in which these arrive."""
        for chunk in chunks:
            chunk.gradient_dtype = chunk.compute_dtype

    def keep_narrow(self, chunks: Iterable[Chunk]) -> None:
        """Give gradients of `chunks` host memory in the dtype in which they arrive, that makes room for a sum. Raises
        `BudgetError` if there is none."""
        for chunk in chunks:
            if (home := self.lent.borrow(chunk.lent_nbytes, leaves_activations=False)) is None:
                raise BudgetError(
                    f"host memory has no room for the gradients of chunk {chunk.spec.index}, "
                    f"{format_size(chunk.lent_nbytes)}, which all stay until their norm is known: raise Budget(host=…)"
                )
            self.keep_gradients(chunk, home)

    def keep_gradients(self, chunk: Chunk, home: Home) -> None:
        """Make the lent `home` that of gradients of `chunk`, in the dtype in which they arrive, until
        `take_gradients`."""
        chunk.homes[Role.GRAD] = home
        if home.tier is Tier.DEVICE and not self.lent.was_set_aside(home):
            self._count_on_device(home.memory, chunk.lent_nbytes)
        chunk.gradient_dtype = None if chunk.compute_dtype is chunk.dtype else chunk.compute_dtype

    def take_gradients(self, chunk: Chunk) -> Home:
        """End `lend`, or `keep_gradients`, and return the home, whose memory is not free before `end_loan`."""
        chunk.gradient_dtype = None
        home = chunk.homes.pop(Role.GRAD)
        if home.tier is Tier.DEVICE and not self.lent.was_set_aside(home):
            self._count_on_device(home.memory, -chunk.lent_nbytes)
        return home

    def _count_on_device(self, memory: RawMemory, nbytes: int) -> None:
        """Count `memory` on the device that gradients are lent, or with negative `nbytes` that there is none."""
        self.device_home_bytes += nbytes
        span = _range(memory, abs(nbytes))
        (self._device_ranges.append if nbytes > 0 else self._device_ranges.remove)(span)

    def end_loan(self, home: Home) -> None:
        """Free the memory of `home` for other loans, if it was lent."""
        self.lent.give_back(home)

    def number(self, chunk: Chunk, role: Role, block: int) -> None:
        """Note the residency's block number of the home of `role`."""
        chunk.homes[role].block = block
        if role is chunk.operand:
            chunk.operand_block = block

    def block(self, chunk: Chunk, role: Role) -> Block:
        """Return the residency's description of `role` of `chunk`. A home on the device counts as one in host memory,
        as a 16-bit copy is one transfer from either."""
        home = chunk.homes[role].tier
        span = chunk.spec.span
        if role.dtype is not None:  # only ever staged, in slots sized for the widest dtype
            span = -(-chunk.home_nbytes(role) // self.host_pool.slot_bytes) if self.host_pool.slot_bytes else 1
        return Block(chunk.label(role), Tier.HOST if home is Tier.DEVICE else home, span)

    def device_slots(self, non_model_bytes: int) -> int:
        """Return how many device slots chunks may take while everything else takes `non_model_bytes`."""
        room = self.room_bytes(non_model_bytes)
        return max(0, room // self.device_pool.slot_bytes) if self.uses_copies else 0

    def room_bytes(self, non_model_bytes: int) -> int:
        """Return the bytes left for copies beside `non_model_bytes`; below zero if homes take more."""
        return room_bytes(self.usable_bytes, self.device_chunk_bytes, non_model_bytes, self.device_home_bytes)

    def is_home_address(self, address: int) -> bool:
        """Return whether `address` lies in host memory or a mapped file that hetmem owns."""
        return any(start <= address < end for start, end in self._home_ranges)

    def is_device_address(self, address: int) -> bool:
        """Return whether `address` lies in device memory that chunks own."""
        return self.device_pool.holds(address) or any(start <= address < end for start, end in self._device_ranges)


def _roles_away(chunk: Chunk) -> dict[Role, None]:
    """Return the roles of `chunk` that need memory elsewhere before its homes may leave the device."""
    trained = any(managed.parameter.requires_grad for managed in chunk.parameters)
    return dict.fromkeys((*chunk.homes, *((Role.GRAD,) if trained else ())))


def _range(memory: RawMemory, nbytes: int) -> tuple[int, int]:
    start = address_of(memory)
    return start, start + nbytes
