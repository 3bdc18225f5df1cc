"""Where every block is: one pure state machine that turns events into commands.

It decides on numbers, never on tensors: it does no I/O, takes no locks, and the same events give the same commands.
Every public method is an event; what it returns must be carried out in order. A `Drop` is complete at once; every
`Fetch` and `Write` is answered by exactly one `done` or `failed`.

Note "copies": a block has one home that always holds a place for it. A copy on a faster tier is a cache of it. A
dirty copy (only in HOST staging) is newer than its home until its `Write` is done, and keeps its slot until then,
so nothing is ever read from a home that a write is still on its way to.

    ABSENT -> WAITING (wanted, no slot or source yet) -> LOADING (in flight) -> VALID -> STALE (superseded, in use)

Here is what a use, an answer or a change of a home means for copies. `Supply` decides what comes in next and what
gives way, `Ledger` keeps the books and makes the commands, `Cache` knows one tier.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from hetmem.errors import CapacityError
from hetmem.schedule.blocks import (
    LOADING,
    STALE,
    VALID,
    WAITING,
    Command,
    Copy,
    CopyState,
    EvictionPolicy,
    Fetch,
    NextUse,
    Write,
)
from hetmem.schedule.ledger import Ledger
from hetmem.schedule.supply import Supply
from hetmem.schedule.trace import DEVICE, HOST, NVME, Schedule, Tier


class Residency:
    """Owner of one fact: which tier holds which copy of which block, in which slot.

    `slots` is the number of slots per cached tier; it is a hard capacity, loads in flight included. `lookahead` is
    how many uses ahead of the schedule's position blocks are prefetched, at most `in_flight` at once (per tier).
    """

    def __init__(
        self,
        slots: dict[Tier, int],
        policy: EvictionPolicy | None = None,
        *,
        lookahead: int = 8,
        in_flight: int | Mapping[Tier, int] = 2,
    ) -> None:
        self._ledger = Ledger(slots, policy or NextUse())
        self._supply = Supply(
            self._ledger, lookahead, dict.fromkeys(Tier, in_flight) if isinstance(in_flight, int) else in_flight
        )
        self._caches = self._ledger.caches
        self._device = self._caches[DEVICE]
        self.taken = tuple(cache.slots for cache in self._caches)
        """Of each cached tier, whose `used` are the slots that are taken, loads in flight included."""
        self.reach_on_device = self._device.reach
        """`reach` on the device, where weights are used."""
        self.blocks, self.counts, self.add = self._ledger.blocks, self._ledger.counts, self._ledger.add
        self.suspend = self._supply.suspend
        """Events that give no commands: see `Supply`."""

    # ---- facts -------------------------------------------------------------------------------------------------

    def state(self, block: int, tier: Tier) -> CopyState | None:
        """The state of the copy of `block` on `tier`; None if there is none."""
        copies = self._caches[tier].copies
        return copies[block].state if block in copies else None

    def copied(self, block: int) -> bool:
        """Whether there is a copy of `block`, of any state, on any tier."""
        device, host = self._caches
        return block in device.copies or block in host.copies

    def all_on_device(self, blocks: Iterable[int | None]) -> bool:
        """Whether each of `blocks` has a VALID copy on the device."""
        copies = self._caches[DEVICE].copies
        states = [copies[block].state if block in copies else None for block in blocks]
        return states.count(VALID) == len(states)

    def span_of(self, blocks: Iterable[int]) -> int:
        """How many slots copies of `blocks` take."""
        known = self.blocks
        return sum([known[block].span for block in blocks])

    def slot(self, block: int, tier: Tier) -> int:
        """The first slot of the VALID copy of `block` on `tier`."""
        copy = self._caches[tier].copies.get(block)
        if copy is None or copy.state is not VALID:
            raise self._ledger.illegal(block, tier, "slot asked for")
        return copy.slot

    def place(self, block: int, tier: Tier) -> int:
        """The first slot of the copy of `block` on `tier` that is VALID, or that something in flight makes so."""
        copy = self._caches[tier].copies.get(block)
        if copy is None or copy.state not in (VALID, LOADING):
            raise self._ledger.illegal(block, tier, "place asked for")
        return copy.slot

    def slot_taken(self, block: int, tier: Tier) -> int:
        """The first slot of the copy of `block` on `tier`, in whatever state; -1 if it has none."""
        copy = self._caches[tier].copies.get(block)
        return -1 if copy is None else copy.slot

    def dirty(self, block: int) -> bool:
        """Whether the HOST copy of `block` is newer than its home."""
        copy = self._caches[HOST].copies.get(block)
        return copy is not None and copy.dirty

    def uses(self, block: int, tier: Tier) -> int:
        """The use count of the copy of `block` on `tier`; 0 if there is none."""
        copy = self._caches[tier].copies.get(block)
        return copy.uses if copy else 0

    def resident(self, tier: Tier) -> list[int]:
        """The blocks with a copy (of any state) on `tier`, oldest request first."""
        return list(self._caches[tier].copies)

    def writing(self, block: int) -> bool:
        """Whether the HOST copy of `block` is on its way home, so that it must not be changed."""
        copy = self._caches[HOST].copies.get(block)
        return copy is not None and copy.writing

    def free_slots(self, tier: Tier) -> list[int]:
        """The slots, or the first ones of places, of `tier` that are free."""
        return self._caches[tier].slots.free()

    def allowed_slots(self, tier: Tier) -> int:
        """How many slots of `tier` may be taken now."""
        return self._caches[tier].limit

    def in_flight(self) -> int:
        """Commands not yet answered."""
        return self._ledger.in_flight

    # ---- events ------------------------------------------------------------------------------------------------

    def reach(self, blocks: tuple[int, ...], tier: Tier) -> None:
        """A use of `blocks` at once begins on `tier`: each is acquired next. Says where in the schedule that is."""
        self._caches[tier].reach(blocks)

    def acquire(self, block: int, tier: Tier, *, load: bool = True) -> list[Command]:
        """Use `block` on `tier`: one more use, and commands that bring it there. It is there once its state is VALID.

        `load=False` says that the whole copy will be overwritten, so nothing is fetched into an absent one. A copy
        that is WAITING although nothing is in flight cannot be had: `withdraw` the use.
        """
        commands: list[Command] = []
        ledger, cache = self._ledger, self._caches[tier]
        ledger.tick += 1
        cache.meet((block,))
        copy = cache.copies.get(block)
        if copy is not None and copy.state is VALID:
            copy.uses += 1
            copy.last_use = ledger.tick
            self._supply.prefetch(cache, commands)
            return commands
        self.counts.faults[tier] += load and (copy is None or copy.state is not LOADING)
        if copy is None:
            copy = cache.add(block, Copy(WAITING, load=load))
        elif copy.state is STALE:
            copy.state = WAITING
            copy.load = load
            cache.touch(block)
        copy.uses += 1
        copy.last_use = ledger.tick
        if copy.state is WAITING:
            copy.waiting += 1
            copy.load = copy.load or load
            self._supply.request(block, tier)
        self._supply.serve(commands)
        self._supply.prefetch(cache, commands)
        return commands

    def use_all(self, blocks: Sequence[int], uses: Sequence[int]) -> list[int]:
        """So many `uses` more of each of `blocks`, whose copies on the device are VALID, in a segment in which nothing
        moves: their first slots."""
        cache, ledger = self._device, self._ledger
        ledger.tick += 1
        found = [cache.copies[block] for block in blocks]
        for copy, more in zip(found, uses, strict=True):
            copy.uses += more
            copy.last_use = ledger.tick
        cache.meet(blocks)
        return [copy.slot for copy in found]

    def use(self, uses: Mapping[int, int], tier: Tier, *, coming: bool = False) -> list[Command] | None:
        """Do as so many times `acquire` of each block where the copies are VALID, or may be `coming`, as most are: what
        is to be carried out. None, and no use counts, where one is not."""
        cache, ledger = self._caches[tier], self._ledger
        copies = cache.copies
        for block in uses:
            if block not in copies:
                return None
            state = copies[block].state
            if state is not VALID and not (coming and state is LOADING):
                return None
        schedule, unused, touch = cache.schedule, cache.unused, cache.touch  # as `Cache.meet`, without its calls
        if schedule.unmet == (*uses,):
            schedule.unmet = ()
        else:
            schedule.meet(uses)
        for block in uses:
            if block in unused:
                unused.remove(block)
            touch(block)
            copy = copies[block]
            ledger.tick = copy.last_use = ledger.tick + 1
            copy.uses += uses[block]
        commands: list[Command] = []
        if schedule.position >= cache.ask_at:
            self._supply.prefetch(cache, commands)
        return commands

    def withdraw(self, block: int, tier: Tier) -> CapacityError:
        """Take one waiting use of `block` back and say why it cannot be had: for a request that is still WAITING
        although nothing is in flight any more."""
        copy = self._caches[tier].copies.get(block)
        if copy is None or copy.waiting <= 0:
            raise self._ledger.illegal(block, tier, "withdraw")
        return self._supply.withdraw(block, tier)

    def release(self, block: int, tier: Tier, *, dirty: bool = False, uses: int = 1) -> list[Command]:
        """So many `uses` of the copy less; `dirty` says that one changed it (HOST staging only)."""
        cache = self._caches[tier]
        if block not in cache.copies or (copy := cache.copies[block]).uses - uses < copy.waiting:
            raise self._ledger.illegal(block, tier, f"release(dirty={dirty})")
        if dirty and (tier is not HOST or copy.state is not VALID or copy.writing):
            raise self._ledger.illegal(block, tier, f"release(dirty={dirty})")
        copy.uses = left = copy.uses - uses
        if not left and copy.last_use < cache.asked_at:
            cache.ask_at = 0
        if dirty:
            cache.touch(block)
            copy.dirty = copy.load = True
            self._ledger.note(block, "dirty")
        commands: list[Command] = []
        if not left and (copy.state is STALE or not copy.load):
            self._ledger.drop(block, tier, commands)
        if self._supply.waiting or tier is HOST or cache.slots.used > cache.limit:
            self._supply.go_on(cache, commands)
        return commands

    def release_all(self, uses: Mapping[int, int]) -> list[Command]:
        """`release` of each block on the device; what follows is asked for once."""
        cache = self._device
        commands: list[Command] = []
        for block in uses:
            if block not in cache.copies or (copy := cache.copies[block]).uses - uses[block] < copy.waiting:
                raise self._ledger.illegal(block, DEVICE, "release")
            copy.uses = left = copy.uses - uses[block]
            if not left:
                if copy.last_use < cache.asked_at:
                    cache.ask_at = 0
                if copy.state is STALE or not copy.load:
                    self._ledger.drop(block, DEVICE, commands)
        if self._supply.waiting or cache.slots.used > cache.limit:
            self._supply.go_on(cache, commands)
        return commands

    def settle(self, block: int) -> list[Command]:
        """Start to write the HOST copy home if it is dirty; it stays VALID meanwhile and is clean when that is done."""
        commands: list[Command] = []
        copy = self._caches[HOST].copies.get(block)
        if copy is not None and copy.dirty and not copy.writing:
            self._ledger.write(block, copy, commands)
        return commands

    def invalidate(self, block: int, tier: Tier) -> list[Command]:
        """The copy of `block` on `tier` is superseded: an idle one is dropped, one in use turns STALE."""
        cache = self._caches[tier]
        copy = cache.copies.get(block)
        if copy is None:
            return []
        if copy.dirty or copy.state in (LOADING, WAITING):
            raise self._ledger.illegal(block, tier, "invalidate")
        commands: list[Command] = []
        if copy.uses == 0:
            self._ledger.drop(block, tier, commands)
            self._supply.serve(commands)
        else:
            copy.state = STALE
            self._ledger.note(block, "stale on", tier)
        return commands

    def limit(self, tier: Tier, slots: int) -> list[Command]:
        """From now on at most `slots` slots of `tier`. What is idle beyond it is given up at once; copies in use and
        loads in flight stay, and are given up as soon as they may be."""
        cache = self._caches[tier]
        cache.set_limit(slots)
        commands: list[Command] = []
        self._supply.trim(cache, commands)
        self._supply.serve(commands)
        return commands

    def expect(self, schedules: Mapping[Tier, Schedule]) -> list[Command]:
        """The schedule of each tier is what comes next there; prefetching starts. All are known before anything begins,
        as what both use is compared by one clock."""
        for tier, schedule in schedules.items():
            self._caches[tier].expect(schedule)
        commands: list[Command] = []
        for tier in schedules:
            self._supply.prefetch(self._caches[tier], commands)
        return commands

    def resume(self, block: int) -> list[Command]:
        """The home of `block` can be read again: what waited for it goes on."""
        self._supply.resume(block)
        commands: list[Command] = []
        self._supply.serve(commands)
        self._supply.prefetch(self._caches[DEVICE], commands)
        return commands

    def prefetch(self, block: int, tier: Tier) -> list[Command]:
        """Bring `block` to `tier` without using it, if that harms nothing more urgent."""
        commands: list[Command] = []
        self._supply.prefetch_block(block, tier, commands)
        return commands

    def done(self, command: Fetch | Write) -> list[Command]:
        """`command` was carried out: what it wrote is clean, what it fetched is VALID."""
        copy, block = self._ledger.answered(command, "done"), command.block
        commands: list[Command] = []
        supply, (device, host) = self._supply, self._caches
        if type(command) is Fetch:
            copy.state, cache = VALID, self._caches[command.target]
            if not copy.uses and block not in cache.unused:
                cache.ask_at = 0
        else:
            copy.dirty = False
            host.touch(block)
        if device.slots.used > device.limit:
            supply.trim(device, commands)
        if host.slots.used > host.limit:
            supply.trim(host, commands)
        if supply.waiting:
            supply.serve(commands)
        if self.blocks[block].home is NVME:  # else what is fetched ahead follows from uses alone
            supply.prefetch(device, commands)
        return commands

    def failed(self, command: Fetch | Write) -> list[Command]:
        """`command` failed: the source is as it was, and a failed write leaves its copy dirty. A failed fetch leaves
        no copy, or a STALE one until its uses are released (the slot may still be read)."""
        copy = self._ledger.answered(command, "failed")
        commands: list[Command] = []
        if type(command) is Fetch:
            copy.state = STALE
            if not copy.uses:
                self._ledger.drop(command.block, command.target, commands)
            for cache in self._caches:
                self._supply.trim(cache, commands)
        self._supply.serve(commands)
        return commands
