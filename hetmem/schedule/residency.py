"""Where every copy of a block is: a state machine that turns events into commands.

It decides on numbers, not on tensors: it does no I/O, takes no locks, and the same events give the same commands. Every
public method is an event, and the commands it returns must be carried out in order. A `Drop` is complete at once; every
`Fetch` and `Write` is answered by exactly one `done` or `failed`.

Note "copies": a block has one home, which holds its memory all the time. A copy on a faster tier is a cache of it. A
dirty copy (only in HOST staging) is newer than its home until its `Write` is done, and keeps its slot until then, so
nothing is read from a home to which a write is in flight.

    ABSENT -> WAITING (wanted, no slot or source yet) -> LOADING (in flight) -> VALID -> STALE (superseded, in use)

This module handles uses, answers to commands, and changes of homes. `Supply` decides what to fetch next and what to
evict, `Ledger` keeps the records and makes the commands, `Cache` is the state of one tier.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from hetmem.errors import CapacityError
from hetmem.schedule.blocks import (
    LOADING,
    PLACED,
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
    """Owns one fact: which tier holds a copy of which block, in which slot.

    `slots` is the number of slots by cached tier, a hard capacity that includes loads in flight. Blocks are prefetched
    up to `lookahead` uses ahead of the schedule's position, at most `in_flight` of them at once (per tier).
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
        """The slots of each cached tier; `used` counts the taken ones, loads in flight included."""
        self.reach_on_device = self._device.reach
        """The method `reach` for the device."""
        self.blocks, self.counts, self.add = self._ledger.blocks, self._ledger.counts, self._ledger.add
        self.suspend = self._supply.suspend
        """Event without commands: see `Supply.suspend`."""

    def tell(self, story: Callable[[int], str]) -> None:
        """Have errors end with `story` of the block's number: its last events."""
        self._ledger.story = story

    # ---- facts -------------------------------------------------------------------------------------------------

    def state(self, block: int, tier: Tier) -> CopyState | None:
        """Return the state of the copy of `block` on `tier`; None if there is no copy."""
        copies = self._caches[tier].copies
        return copies[block].state if block in copies else None

    def in_state(self, blocks: Iterable[int], state: CopyState) -> list[int]:
        """Return those of `blocks` whose copy on the device is in `state`."""
        copies, found = self._device.copies, list[int]()
        for block in blocks:
            if block in copies and copies[block].state is state:
                found += (block,)
        return found

    def copied(self, block: int) -> bool:
        """Return whether `block` has a copy in any state on any tier."""
        device, host = self._caches
        return block in device.copies or block in host.copies

    def all_on_device(self, blocks: Iterable[int | None]) -> bool:
        """Return whether each of `blocks` has a VALID copy on the device."""
        copies = self._caches[DEVICE].copies
        states = [copies[block].state if block in copies else None for block in blocks]
        return states.count(VALID) == len(states)

    def slot(self, block: int, tier: Tier) -> int:
        """Return the first slot of the copy of `block` on `tier`, which must be VALID."""
        copy = self._caches[tier].copies.get(block)
        if copy is None or copy.state is not VALID:
            raise self._ledger.illegal(block, tier, "slot asked for")
        return copy.slot

    def place(self, block: int, tier: Tier) -> int:
        """Return the first slot of the copy of `block` on `tier`, which must be VALID or LOADING."""
        copy = self._caches[tier].copies.get(block)
        if copy is None or copy.state not in PLACED:
            raise self._ledger.illegal(block, tier, "place asked for")
        return copy.slot

    def slot_taken(self, block: int, tier: Tier) -> int:
        """Return the first slot of the copy of `block` on `tier` in any state; -1 if it has none."""
        copy = self._caches[tier].copies.get(block)
        return -1 if copy is None else copy.slot

    def dirty(self, block: int) -> bool:
        """Return whether the HOST copy of `block` is newer than its home."""
        copy = self._caches[HOST].copies.get(block)
        return copy is not None and copy.dirty

    def uses(self, block: int, tier: Tier) -> int:
        """Return the use count of the copy of `block` on `tier`; 0 if there is no copy."""
        copy = self._caches[tier].copies.get(block)
        return copy.uses if copy else 0

    def resident(self, tier: Tier) -> list[int]:
        """Return the blocks with a copy (in any state) on `tier`, the oldest request first."""
        return list(self._caches[tier].copies)

    def writing(self, block: int) -> bool:
        """Return whether the HOST copy of `block` is being written home, so that it must not be changed."""
        copy = self._caches[HOST].copies.get(block)
        return copy is not None and copy.writing

    def free_slots(self, tier: Tier) -> list[int]:
        """Return the free slots of `tier`; of places with several slots, the number of the place."""
        return self._caches[tier].slots.free()

    def allowed_slots(self, tier: Tier) -> int:
        """Return the present limit of slots on `tier`."""
        return self._caches[tier].limit

    def in_flight(self) -> int:
        """Count the commands that were not answered yet."""
        return self._ledger.in_flight

    # ---- events ------------------------------------------------------------------------------------------------

    def reach(self, blocks: tuple[int, ...], tier: Tier) -> None:
        """Move the schedule of `tier` on to a use of `blocks`; each of them is acquired next."""
        self._caches[tier].reach(blocks)

    def acquire(self, block: int, tier: Tier, *, load: bool = True) -> list[Command]:
        """Count one use of `block` on `tier`, and fetch a missing copy; it may be used once its state is VALID.

        `load=False` says that the whole copy will be overwritten, so an absent one is not filled. If the copy is still
        WAITING when nothing is in flight, there is no room for it: `withdraw` the use.
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
        """Count `uses` of `blocks`, whose device copies are VALID, in a segment in which nothing moves; return their
        first slots."""
        cache, ledger = self._device, self._ledger
        ledger.tick += 1
        found = [cache.copies[block] for block in blocks]
        for copy, more in zip(found, uses, strict=True):
            copy.uses += more
            copy.last_use = ledger.tick
        cache.meet(blocks)
        return [copy.slot for copy in found]

    def use(
        self, uses: Mapping[int, int], tier: Tier, *, coming: bool = False, reached: tuple[int, ...] = ()
    ) -> list[Command] | None:
        """Acquire each block as often as `uses` says, if all its copies are VALID (or LOADING, if `coming`): the usual
        case. Return the commands; None, with nothing acquired, if any copy is not. `reached`: `reach` these first."""
        cache = self._caches[tier]
        copies, ledger = cache.copies, self._ledger
        if reached:
            cache.reach(reached)
        for block in uses:
            if block not in copies or (
                (state := copies[block].state) is not VALID and not (coming and state is LOADING)
            ):
                return None
        cache.meet(uses)
        for block in uses:
            copy = copies[block]
            ledger.tick = copy.last_use = ledger.tick + 1
            copy.uses += uses[block]
        commands: list[Command] = []
        self._supply.prefetch(cache, commands)
        return commands

    def still(self, at: int, most: int) -> int:
        """Return how many of the uses that the device's schedule expects from its position `at` on, up to `most`, move
        nothing: their copies are VALID, and nothing can be prefetched before."""
        cache, copies = self._device, self._device.copies
        schedule = cache.schedule
        if schedule.position != at or schedule.absent or schedule.skipped or self._supply.waiting:
            return 0
        end = schedule.segment if schedule.segment < cache.prefetch_at else cache.prefetch_at - 1
        if end > at + most:
            end = at + most
        for use in range(at, end):
            for block in schedule.uses[use % schedule.count]:
                if block not in copies or copies[block].state is not VALID:
                    return use - at
        return end - at if end > at else 0

    def lease(self, uses: Mapping[int, int]) -> None:
        """Acquire each block, whose copy on the device is VALID, as often as `uses` says, for uses that `pass_over`
        counts."""
        copies = self._device.copies
        for block in uses:
            copies[block].uses += uses[block]

    def pass_over(self, row: Iterable[Iterable[int]]) -> None:
        """Count that the next uses that the device's schedule expects, of the blocks in `row`, have begun: those that
        are `still`, and leased."""
        cache, copies = self._device, self._device.copies
        unused, tick, touched = cache.unused, self._ledger.tick, list[int]()
        for blocks in row:
            for block in blocks:
                if block in unused:
                    unused.remove(block)
                tick = copies[block].last_use = tick + 1
                touched += (block,)
            cache.schedule.position += 1
        self._ledger.tick, cache.is_known = tick, True
        cache.touch_all(touched)

    def withdraw(self, block: int, tier: Tier) -> CapacityError:
        """Take back one waiting use of `block`, which is still WAITING although nothing is in flight, and return the
        error to raise."""
        copy = self._caches[tier].copies.get(block)
        if copy is None or copy.waiting <= 0:
            raise self._ledger.illegal(block, tier, "withdraw")
        return self._supply.withdraw(block, tier)

    def release(self, block: int, tier: Tier, *, dirty: bool = False, uses: int = 1) -> list[Command]:
        """End `uses` of the copy of `block` on `tier`; `dirty` says that they changed it (HOST staging only)."""
        cache = self._caches[tier]
        if block not in cache.copies or (copy := cache.copies[block]).uses - uses < copy.waiting:
            raise self._ledger.illegal(block, tier, f"release(dirty={dirty})")
        if dirty and (tier is not HOST or copy.state is not VALID or copy.writing):
            raise self._ledger.illegal(block, tier, f"release(dirty={dirty})")
        copy.uses = left = copy.uses - uses
        if not left and copy.last_use < cache.prefetched_at:
            cache.prefetch_at = 0
        if dirty:
            cache.touch(block)
            copy.dirty = copy.load = True
        commands: list[Command] = []
        if not left and (copy.state is STALE or not copy.load):
            self._ledger.drop(block, cache, commands)
        if self._supply.waiting or tier is HOST or cache.slots.used > cache.limit:
            self._supply.go_on(cache, commands)
        return commands

    def release_all(self, uses: Mapping[int, int]) -> list[Command]:
        """Release each block on the device as often as `uses` says; requests and evictions follow once, at the end."""
        cache, copies = self._device, self._device.copies
        commands: list[Command] = []
        for block in uses:
            if block not in copies or (left := (copy := copies[block]).uses - uses[block]) < copy.waiting:
                raise self._ledger.illegal(block, DEVICE, "release")
            copy.uses = left
            if not left:
                if copy.last_use < cache.prefetched_at:
                    cache.prefetch_at = 0
                if copy.state is STALE or not copy.load:
                    self._ledger.drop(block, cache, commands)
        if self._supply.waiting or cache.slots.used > cache.limit:
            self._supply.go_on(cache, commands)
        return commands

    def settle(self, block: int) -> list[Command]:
        """Begin to write a dirty HOST copy home; it stays VALID meanwhile, and is clean when the write is done."""
        commands: list[Command] = []
        copy = self._caches[HOST].copies.get(block)
        if copy is not None and copy.dirty and not copy.writing:
            self._ledger.write(block, copy, commands)
        return commands

    def invalidate(self, block: int, tier: Tier) -> list[Command]:
        """Drop the copy of `block` on `tier` if it is idle, and make it STALE if it is in use: its home was written."""
        cache = self._caches[tier]
        copy = cache.copies.get(block)
        if copy is None:
            return []
        if copy.dirty or copy.state in (LOADING, WAITING):
            raise self._ledger.illegal(block, tier, "invalidate")
        commands: list[Command] = []
        if copy.uses == 0:
            self._ledger.drop(block, cache, commands)
            self._supply.serve(commands)
        else:
            copy.state = STALE
        return commands

    def invalidate_all(self, blocks: Iterable[int], tier: Tier) -> list[Command]:
        """Do `invalidate` for each of `blocks`, which have VALID copies."""
        commands: list[Command] = []
        cache, drop = self._caches[tier], self._ledger.drop
        for block in blocks:
            copy = cache.copies[block]
            if copy.dirty or copy.state is not VALID:
                raise self._ledger.illegal(block, tier, "invalidate")
            if copy.uses:
                copy.state = STALE
            else:
                drop(block, cache, commands)
        if self._supply.waiting:
            self._supply.serve(commands)
        return commands

    def limit(self, tier: Tier, slots: int) -> list[Command]:
        """Allow at most `slots` slots of `tier` from now on. Idle copies beyond that are evicted at once; copies in use
        and loads in flight are, as soon as they are idle."""
        cache = self._caches[tier]
        cache.set_limit(slots)
        commands: list[Command] = []
        self._supply.trim(cache, commands)
        self._supply.serve(commands)
        return commands

    def expect(self, schedules: Mapping[Tier, Schedule]) -> list[Command]:
        """Set the schedule of each tier and begin to prefetch. All schedules are set first, as uses on both tiers are
        compared by one clock."""
        for tier, schedule in schedules.items():
            self._caches[tier].expect(schedule)
        commands: list[Command] = []
        for tier in schedules:
            self._supply.prefetch(self._caches[tier], commands)
        return commands

    def resume(self, blocks: Iterable[int]) -> list[Command]:
        """Let `blocks` come to the device again, and serve the requests that waited for their homes."""
        self._supply.resume(blocks)
        commands: list[Command] = []
        if self._supply.waiting:
            self._supply.serve(commands)
        self._supply.prefetch(self._caches[DEVICE], commands)
        return commands

    def prefetch(self, blocks: Iterable[int], tier: Tier) -> list[Command]:
        """Bring each of `blocks` to `tier` without a use, if no more urgent copy has to be evicted for it."""
        commands: list[Command] = []
        for block in blocks:
            self._supply.prefetch_block(block, tier, commands)
        return commands

    def done(self, command: Fetch | Write) -> list[Command]:
        """Take note that `command` was carried out: a written copy is clean, a fetched one VALID."""
        copy, cache = self._ledger.answered(command, "done")
        block, supply, (device, host) = command.block, self._supply, self._caches
        commands: list[Command] = []
        if type(command) is Fetch:
            copy.state = VALID
            if not copy.uses and block not in cache.unused:
                cache.prefetch_at = 0
        else:
            copy.dirty = False
            cache.touch(block)
        if device.slots.used > device.limit:
            supply.trim(device, commands)
        if host.slots.used > host.limit:
            supply.trim(host, commands)
        if supply.waiting:
            supply.serve(commands)
        if self.blocks[block].home is NVME:  # other prefetches must depend on uses alone, not on when loads end
            supply.prefetch(device, commands)
        return commands

    def failed(self, command: Fetch | Write) -> list[Command]:
        """Take note that `command` failed. Its source is unchanged, and the copy of a failed write stays dirty. A
        failed fetch leaves no copy, or a STALE one until its uses are released (its slot may still be read)."""
        copy, cache = self._ledger.answered(command, "failed")
        commands: list[Command] = []
        if type(command) is Fetch:
            copy.state = STALE
            if not copy.uses:
                self._ledger.drop(command.block, cache, commands)
            for cache in self._caches:
                self._supply.trim(cache, commands)
        self._supply.serve(commands)
        return commands
