"""Memory that homes on the device go to when they leave it: in host memory, or on the drive where that has no room.

It is reserved for good for chunks that leave for good, and lent to those of a parked model until they are back. Homes
that have moved to the device for a while need none: what they had elsewhere stays reserved.
"""

from __future__ import annotations

from collections.abc import Iterable

from hetmem.base.units import format_enough, format_size
from hetmem.engine.homes import Memory
from hetmem.errors import BudgetError
from hetmem.memory.chunk import Chunk, Home, Role
from hetmem.memory.nvme_store import NvmeStore
from hetmem.schedule.trace import Tier


def open_way_back(memory: Memory, chunk: Chunk, *, gradients: bool) -> bool:
    """Reserve host memory for all homes of `chunk`, which stays on the device, if there is room for these and, with
    `gradients`, for its gradients. Returns whether there is."""
    wanted = dict.fromkeys((*chunk.homes, *((Role.GRAD,) if gradients else ())))
    if sum(map(chunk.home_nbytes, wanted)) > memory.host_pool.free_bytes:
        return False
    for role, home in chunk.homes.items():
        home.away = Home(Tier.HOST, memory.host_pool.reserve(chunk.home_nbytes(role)))
    return True


def borrow_ways_back(memory: Memory, chunks: Iterable[Chunk]) -> list[Home]:
    """Borrow host memory, or memory of the drive where that has no room, for each home of `chunks` that has none
    reserved there, and return what was borrowed. Raises `BudgetError`, with nothing borrowed, if none has room."""
    found, store, lent = dict[Home, Home](), memory.store, memory.lent
    for chunk in chunks:
        for role, home in _without_way_back(chunk):
            nbytes = chunk.home_nbytes(role)
            away = lent.borrow(nbytes, leaves_activations=False)
            if away is None:
                store = _drive(memory)
                away = None if store is None else lent.borrow_on_drive(store, nbytes)
            if away is None:
                for each in found.values():
                    lent.give_back(each)
                raise _no_room(memory, chunks, store)
            found[home] = away
    for home, away in found.items():
        home.away = away
    return [*found.values()]


def end_way_back(memory: Memory, chunk: Chunk) -> None:
    """Give back what `borrow_ways_back` has borrowed for `chunk`, whose homes are on the device."""
    for home in chunk.homes.values():
        if home.away is not None and memory.lent.give_back(home.away):
            home.away = None


def _without_way_back(chunk: Chunk) -> list[tuple[Role, Home]]:
    return [(role, home) for role, home in chunk.homes.items() if home.tier is Tier.DEVICE and home.away is None]


def _drive(memory: Memory) -> NvmeStore | None:
    """Return the store, or one for parked homes alone; None without a budget of NVMe."""
    if memory.store is not None or not memory.nvme_directories:
        return memory.store
    if memory.parked_store is None:
        memory.parked_store = NvmeStore(memory.nvme_directories, memory.nvme_bytes)
    return memory.parked_store


def _no_room(memory: Memory, chunks: Iterable[Chunk], store: NvmeStore | None) -> BudgetError:
    needed = sum(chunk.home_nbytes(role) for chunk in chunks for role, _ in _without_way_back(chunk))
    free = memory.host_pool.loan_room_bytes(0)
    drive = 0 if store is None else memory.nvme_bytes - store.reserved_bytes - store.lent_bytes
    on_drive = f", and the drive {format_size(drive)}" if drive else ""
    return BudgetError(
        f"homes on the device take {format_size(needed)}, and host memory has {format_size(free)} for them{on_drive}: "
        f"raise Budget(host=…) by {format_enough(max(1, needed - free - drive))}"
    )
