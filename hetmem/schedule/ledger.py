"""Records every copy on every cached tier and what is in flight between tiers, and makes all commands.

When and why to give a command is decided elsewhere (`supply`, `residency`).
"""

from __future__ import annotations

from collections import deque
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
    """Records of all copies: `caches` by tier, `in_flight` commands without an answer, and the last events of every
    block for error messages. `tick` counts uses.

    A `Fetch` or `Write` that is begun ends with one `done` or `failed`; a `Drop` is complete at once. A staged copy is
    in use while the device is fed from it.
    """

    def __init__(self, slots: dict[Tier, int], policy: EvictionPolicy) -> None:
        self.blocks: list[Block] = []
        self.counts = Counts()
        device = Cache(DEVICE, slots.get(DEVICE, 0), self.blocks, policy)
        host = Cache(HOST, slots.get(HOST, 0), self.blocks, policy, nearer=device)
        self.caches = (device, host)
        self.in_flight = 0
        self.tick = 0
        self._history: list[deque[tuple[int, str, Tier | None]]] = []

    def __del__(self) -> None:
        """Break the reference cycle between the tiers, so that no garbage collection is needed."""
        for cache in self.caches:
            vars(cache).clear()

    def add(self, block: Block) -> int:
        """Register `block`; returns its number."""
        self.blocks.append(block)
        self._history.append(deque(maxlen=24))
        return len(self.blocks) - 1

    def note(self, block: int, what: str, tier: Tier | None = None) -> None:
        """Record that `what` happened to `block`, for `illegal`. Frequent events are recorded inline."""
        self._history[block].append((self.tick, what, tier))

    def illegal(self, block: int, tier: Tier, event: str) -> StateError:
        """Return the error for `event` on the copy of `block` on `tier`, with the block's history."""
        copy = self.caches[tier].copies.get(block)
        notes = ((tick, f"{what} {at.name}" if at is not None else what) for tick, what, at in self._history[block])
        history = "; ".join(f"{tick}: {what}" for tick, what in notes)
        return StateError(f"{self.blocks[block].label}: {event} on {tier.name}, copy is {copy}; history: {history}")

    # ---- commands ----------------------------------------------------------------------------------------------

    def let_overwrite(self, block: int, tier: Tier, copy: Copy) -> None:
        """Make `copy` of `block`, which has a slot, VALID for uses that overwrite it as a whole."""
        self.caches[tier].touch(block)
        copy.fetched = self.tick
        copy.waiting = 0
        copy.state = VALID

    def fetch(self, block: int, source: Tier, tier: Tier, copy: Copy, commands: list[Command]) -> None:
        """Begin to fill `copy` of `block` on `tier`, which has a slot, from `source`."""
        copy.fetched = self.tick
        copy.waiting = 0
        copy.state = LOADING
        copy.load = True
        self.in_flight += 1
        cache = self.caches[tier]
        cache.loading += 1
        cache.touch(block)
        self.counts.fetches[tier] += 1
        if source is HOST and self.blocks[block].home is NVME:  # in use while the device is fed from it
            self.caches[HOST].copies[block].uses += 1
        self._history[block].append((self.tick, "fetch to", tier))
        commands += (_tuple(Fetch, (block, source, tier, copy.slot)),)

    def write(self, block: int, copy: Copy, commands: list[Command]) -> None:
        """Begin to write home `copy`, the dirty one of `block` in HOST staging."""
        copy.writing = True
        self.in_flight += 1
        self.caches[HOST].writing[block] = copy
        self.note(block, "write")
        commands.append(Write(block, copy.slot))

    def drop(self, block: int, tier: Tier, commands: list[Command], *, evicted: bool = False) -> None:
        """Forget the copy of `block` on `tier`, and count it if it was `evicted`. Raise `StateError` for a dirty one,
        whose changes would be lost."""
        cache = self.caches[tier]
        if cache.copies[block].dirty:
            raise self.illegal(block, tier, "dropping a dirty copy")
        self.counts.evictions[tier] += evicted
        copy = cache.remove(block)
        if copy.slot >= 0:
            cache.slots.give(copy.slot, self.blocks[block].span)
            commands += (_tuple(Drop, (block, tier, copy.slot)),)
        self._history[block].append((self.tick, "dropped on", tier))

    def answered(self, command: Fetch | Write, event: str) -> Copy:
        """Return the copy that `command` moved, which is no longer in flight: `event` is "done" or "failed"."""
        block, fetched = command.block, command if type(command) is Fetch else None
        tier = HOST if fetched is None else fetched.target
        cache = self.caches[tier]
        copy = cache.copies.get(block)
        in_flight = copy is not None and (copy.writing if fetched is None else copy.state is LOADING)
        if copy is None or not in_flight or copy.slot != command.slot:
            raise self.illegal(block, tier, f"{command} {event}")
        self.in_flight -= 1
        if fetched is None:
            copy.writing = False
            del cache.writing[block]
        else:
            cache.loading -= 1
            if fetched.source is HOST and self.blocks[block].home is NVME:
                self.caches[HOST].copies[block].uses -= 1
        self._history[block].append((self.tick, event, tier))
        return copy
