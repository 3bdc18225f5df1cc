"""Records every copy on every cached tier and what is in flight between tiers, and makes all commands.

When and why to give a command is decided elsewhere (`supply`, `residency`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hetmem.errors import StateError
from hetmem.schedule.blocks import (
    LOADING,
    VALID,
    Block,
    Command,
    Copy,
    Counts,
    Drop,
    EvictionPolicy,
    Fetch,
    Write,
)
from hetmem.schedule.cache import Cache
from hetmem.schedule.trace import DEVICE, HOST, NVME, Tier

_tuple: Any = tuple.__new__
"""Makes a named tuple from a tuple without the cost of its Python constructor."""


class Ledger:
    """Records of all copies: `caches` by tier. `tick` counts uses.

    A `Fetch` or `Write` that is begun ends with one `done` or `failed`; a `Drop` is complete at once. A staged copy is
    in use while the device is fed from it.
    """

    def __init__(self, slots: dict[Tier, int], policy: EvictionPolicy) -> None:
        self.blocks: list[Block] = []
        self.counts = Counts()
        device = Cache(DEVICE, slots.get(DEVICE, 0), self.blocks, policy)
        host = Cache(HOST, slots.get(HOST, 0), self.blocks, policy, nearer=device)
        self.caches = (device, host)
        self.tick = 0
        self.story: Callable[[int], str] | None = None
        """Says, for errors, what has become of the block with a number."""

    def __del__(self) -> None:
        """Break the reference cycle between the tiers, so that no garbage collection is needed."""
        for cache in self.caches:
            vars(cache).clear()

    @property
    def in_flight(self) -> int:
        """How many commands have no answer."""
        device, host = self.caches
        return device.loading + host.loading + len(host.writing)

    def add(self, block: Block) -> int:
        """Register `block`; returns its number."""
        self.blocks.append(block)
        return len(self.blocks) - 1

    def illegal(self, block: int, tier: Tier, event: str) -> StateError:
        """Return the error for `event` on the copy of `block` on `tier`."""
        copies = " and ".join(f"{cache.copies.get(block)} on {cache.tier.name}" for cache in self.caches)
        told = "" if self.story is None else f"; its last events: {self.story(block)}"
        label = self.blocks[block].label
        return StateError(f"{label}: {event} on {tier.name}, copies are {copies}; tick {self.tick}{told}")

    # ---- commands ----------------------------------------------------------------------------------------------

    def let_overwrite(self, block: int, tier: Tier, copy: Copy) -> None:
        """Make `copy` of `block`, which has a slot, VALID for uses that overwrite it as a whole."""
        self.caches[tier].touch(block)
        copy.fetched = self.tick
        copy.waiting = 0
        copy.state = VALID

    def fetch(self, block: int, source: Tier, cache: Cache, copy: Copy, commands: list[Command]) -> None:
        """Begin to fill `copy` of `block` in `cache`, which has a slot, from `source`."""
        tier, copy.fetched = cache.tier, self.tick
        copy.waiting = 0
        copy.state = LOADING
        copy.load = True
        cache.loading += 1
        cache.touch(block)
        self.counts.fetches[tier] += 1
        if source is HOST and self.blocks[block].home is NVME:  # in use while the device is fed from it
            self.caches[HOST].copies[block].uses += 1
        commands += (_tuple(Fetch, (block, source, tier, copy.slot)),)

    def write(self, block: int, copy: Copy, commands: list[Command]) -> None:
        """Begin to write home `copy`, the dirty one of `block` in HOST staging."""
        copy.writing = True
        self.caches[HOST].writing[block] = copy
        commands.append(Write(block, copy.slot))

    def drop(self, block: int, cache: Cache, commands: list[Command], *, evicted: bool = False) -> None:
        """Forget the copy of `block` in `cache`, and count it if it was `evicted`. Raise `StateError` for a dirty one,
        whose changes would be lost."""
        tier, copy = cache.tier, cache.copies[block]
        if copy.dirty:
            raise self.illegal(block, tier, "dropping a dirty copy")
        self.counts.evictions[tier] += evicted
        cache.too_early = cache.too_early or (evicted and block in cache.unused)
        cache.remove(block)
        if copy.slot >= 0:
            cache.slots.give(copy.slot, self.blocks[block].span)
            commands += (_tuple(Drop, (block, tier, copy.slot)),)

    def answered(self, command: Fetch | Write, event: str) -> tuple[Copy, Cache]:
        """Return the copy that `command` moved, which is no longer in flight, and the cache that has it: `event` is
        "done" or "failed"."""
        block, source, tier, slot = command if type(command) is Fetch else (command.block, None, HOST, command.slot)
        cache = self.caches[tier]
        if block not in cache.copies or (copy := cache.copies[block]).slot != slot:
            raise self.illegal(block, tier, f"{command} {event}")
        if not (copy.writing if source is None else copy.state is LOADING):
            raise self.illegal(block, tier, f"{command} {event}")
        if source is None:
            copy.writing = False
            del cache.writing[block]
        else:
            cache.loading -= 1
            if source is HOST and self.blocks[block].home is NVME:
                self.caches[HOST].copies[block].uses -= 1
        return copy, cache
