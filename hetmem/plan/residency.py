"""Where every block is: one pure state machine that turns events into commands.

It decides on numbers, never on tensors: it does no I/O, takes no locks, and the same events give the same commands.
Every public method is an event; what it returns must be carried out in order. A `Drop` is complete at once; every
`Fetch` and `Write` is answered by exactly one `done` or `failed`.

Note "copies": a block has one home that always holds a place for it. A copy on a faster tier is a cache of it. A
dirty copy (only in HOST staging) is newer than its home until its `Write` is done, and keeps its slot until then,
so nothing is ever read from a home that a write is still on its way to.

    ABSENT -> WAITING (wanted, no slot or source yet) -> LOADING (in flight) -> VALID -> STALE (superseded, in use)
"""

from __future__ import annotations

from collections import deque

from hetmem.errors import CapacityError, StateError
from hetmem.plan.cache import Block, Cache, Copy, CopyState
from hetmem.plan.commands import Command, Counts, Drop, Fetch, Write
from hetmem.plan.policy import EvictionPolicy, NextUse
from hetmem.plan.trace import Schedule, Tier


class Residency:
    """Owner of one fact: which tier holds which copy of which block, in which slot.

    `slots` is the number of slots per cached tier; it is a hard capacity, loads in flight included. `lookahead` is
    how many uses ahead of the schedule's position blocks are prefetched, at most `in_flight` at once per tier.
    Prefetching follows Cao, Felten, Karlin, Li, "A study of integrated prefetching and caching strategies"
    (SIGMETRICS 1995): fetch the next missing block, give up the one needed furthest, never do harm.
    """

    def __init__(
        self,
        slots: dict[Tier, int],
        policy: EvictionPolicy | None = None,
        *,
        lookahead: int = 8,
        in_flight: int = 2,
    ) -> None:
        self.blocks: list[Block] = []
        self.counts = Counts()
        self._lookahead = lookahead
        self._in_flight = in_flight
        policy = policy or NextUse()
        device = Cache(Tier.DEVICE, slots.get(Tier.DEVICE, 0), self.blocks, policy)
        host = Cache(Tier.HOST, slots.get(Tier.HOST, 0), self.blocks, policy, nearer=device)
        self._caches = (device, host)
        self._waiting: list[tuple[Tier, int]] = []
        self._flying = 0
        self._suspended: set[int] = set()
        self._tick = 0
        self._history: list[deque[tuple[int, str]]] = []

    # ---- facts -------------------------------------------------------------------------------------------------

    def add(self, block: Block) -> int:
        """Register `block`; returns its number."""
        self.blocks.append(block)
        self._history.append(deque(maxlen=24))
        return len(self.blocks) - 1

    def state(self, block: int, tier: Tier) -> CopyState | None:
        """The state of the copy of `block` on `tier`; None if there is none."""
        copy = self._caches[tier].copies.get(block)
        return copy.state if copy else None

    def slot(self, block: int, tier: Tier) -> int:
        """The first slot of the VALID copy of `block` on `tier`."""
        copy = self._caches[tier].copies.get(block)
        if copy is None or copy.state is not CopyState.VALID:
            raise self._illegal(block, tier, "slot asked for", copy)
        return copy.slot

    def place(self, block: int, tier: Tier) -> int:
        """The first slot of the copy of `block` on `tier` that is VALID, or that something in flight makes so."""
        copy = self._caches[tier].copies.get(block)
        if copy is None or copy.state not in (CopyState.VALID, CopyState.LOADING):
            raise self._illegal(block, tier, "place asked for", copy)
        return copy.slot

    def slot_taken(self, block: int, tier: Tier) -> int:
        """The first slot of the copy of `block` on `tier`, in whatever state; -1 if it has none."""
        copy = self._caches[tier].copies.get(block)
        return -1 if copy is None else copy.slot

    def dirty(self, block: int) -> bool:
        """Whether the HOST copy of `block` is newer than its home."""
        copy = self._caches[Tier.HOST].copies.get(block)
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
        copy = self._caches[Tier.HOST].copies.get(block)
        return copy is not None and copy.writing

    def free_slots(self, tier: Tier) -> list[int]:
        """The slots of `tier` that nobody has."""
        return [slot for slot, owner in enumerate(self._caches[tier].slots.owners()) if owner is None]

    def used_slots(self, tier: Tier) -> int:
        """Slots taken on `tier`, loads in flight included."""
        return self._caches[tier].slots.used

    def in_flight(self) -> int:
        """Commands not yet answered."""
        return self._flying

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
        self._tick += 1
        self.counts.acquires += 1
        cache = self._caches[tier]
        cache.meet(block)
        copy = cache.copies.get(block)
        if copy is not None and copy.state is CopyState.VALID:
            copy.uses += 1
            copy.last_use = self._tick
            self._prefetch(cache, commands)
            return commands
        self.counts.faults[tier] += load
        if copy is None:
            copy = cache.add(block, Copy(CopyState.WAITING, load=load))
        elif copy.state is CopyState.STALE:
            copy.state = CopyState.WAITING
            copy.load = load
        copy.uses += 1
        copy.last_use = self._tick
        if copy.state is CopyState.WAITING:
            copy.waiting += 1
            copy.load = copy.load or load
            if (tier, block) not in self._waiting:
                self._waiting.append((tier, block))
                self._note(block, f"acquire on {tier.name}")
        self._progress(commands)
        self._prefetch(cache, commands)
        return commands

    def withdraw(self, block: int, tier: Tier) -> CapacityError:
        """Take one waiting use of `block` back and say why it cannot be had: for a request that is still WAITING
        although nothing is in flight any more."""
        error = CapacityError(self._no_room(block, tier))
        copy = self._caches[tier].copies.get(block)
        if copy is None or copy.waiting <= 0:
            raise self._illegal(block, tier, "withdraw", copy)
        self._withdraw(tier, block)
        return error

    def release(self, block: int, tier: Tier, *, dirty: bool = False) -> list[Command]:
        """One use of the copy less; `dirty` says that this use changed it (HOST staging only)."""
        cache = self._caches[tier]
        copy = cache.copies.get(block)
        changeable = tier is Tier.HOST and copy is not None and copy.state is CopyState.VALID and not copy.writing
        if copy is None or copy.uses <= copy.waiting or (dirty and not changeable):
            raise self._illegal(block, tier, f"release(dirty={dirty})", copy)
        copy.uses -= 1
        cache.touch(block)
        if dirty:
            copy.dirty = copy.load = True
            self._note(block, "dirty")
        commands: list[Command] = []
        if copy.uses == 0 and (copy.state is CopyState.STALE or not copy.load):
            self._drop(tier, block, commands)
        self._enforce_limit(cache, commands)
        if self._waiting:
            self._progress(commands)
        self._prefetch(cache, commands)
        return commands

    def settle(self, block: int) -> list[Command]:
        """Start to write the HOST copy home if it is dirty; it stays VALID meanwhile and is clean when that is done."""
        commands: list[Command] = []
        copy = self._caches[Tier.HOST].copies.get(block)
        if copy is not None and copy.dirty and not copy.writing:
            self._write(block, copy, commands)
        return commands

    def invalidate(self, block: int, tier: Tier) -> list[Command]:
        """The copy of `block` on `tier` is superseded: an idle one is dropped, one in use turns STALE."""
        copy = self._caches[tier].copies.get(block)
        if copy is None:
            return []
        if copy.dirty or copy.state in (CopyState.LOADING, CopyState.WAITING):
            raise self._illegal(block, tier, "invalidate", copy)
        commands: list[Command] = []
        if copy.uses == 0:
            self._drop(tier, block, commands)
            self._progress(commands)
        else:
            copy.state = CopyState.STALE
            self._note(block, f"stale on {tier.name}")
        return commands

    def limit(self, tier: Tier, slots: int) -> list[Command]:
        """From now on at most `slots` slots of `tier`. What is idle beyond it is given up at once; copies in use and
        loads in flight stay, and are given up as soon as they may be."""
        self._caches[tier].limit = max(0, min(slots, self._caches[tier].slots.count))
        commands: list[Command] = []
        self._enforce_limit(self._caches[tier], commands)
        if self._waiting:
            self._progress(commands)
        return commands

    def expect(self, tier: Tier, schedule: Schedule) -> list[Command]:
        """`schedule` is what comes next on `tier`; prefetching starts."""
        self._caches[tier].expect(schedule)
        commands: list[Command] = []
        self._prefetch(self._caches[tier], commands)
        return commands

    def suspend(self, block: int) -> None:
        """The home of `block` is being rewritten: until `resume` nothing brings it to the device."""
        self._suspended.add(block)

    def resume(self, block: int) -> list[Command]:
        """The home of `block` can be read again: what waited for it goes on."""
        self._suspended.discard(block)
        commands: list[Command] = []
        self._progress(commands)
        self._prefetch(self._caches[Tier.DEVICE], commands)
        return commands

    def prefetch(self, block: int, tier: Tier) -> list[Command]:
        """Bring `block` to `tier` without using it, if that harms nothing more urgent."""
        commands: list[Command] = []
        if not self._waiting and block not in self._caches[tier].copies:
            self._prefetch_one(self._caches[tier], block, commands)
        return commands

    def done(self, command: Fetch | Write) -> list[Command]:
        """`command` was carried out."""
        copy = self._answered(command, "done")
        commands: list[Command] = []
        if isinstance(command, Write):
            copy.dirty = False
            self._note(command.block, "written")
        else:
            copy.state = CopyState.VALID
            self._note(command.block, f"valid on {command.target.name}")
            self._end_feeding(command)
        for cache in self._caches:
            self._enforce_limit(cache, commands)
        if self._waiting:
            self._progress(commands)
        for cache in self._caches:
            self._prefetch(cache, commands)
        return commands

    def failed(self, command: Fetch | Write) -> list[Command]:
        """`command` failed: the source is as it was, and a failed write leaves its copy dirty. A failed fetch leaves
        no copy, or a STALE one until its uses are released (somebody may look at the slot)."""
        copy = self._answered(command, "failed")
        commands: list[Command] = []
        if isinstance(command, Write):
            self._note(command.block, "write failed")
        else:
            self._end_feeding(command)
            self._note(command.block, "fetch failed")
            copy.state = CopyState.STALE
            if copy.uses == 0:
                self._drop(command.target, command.block, commands)
            for cache in self._caches:
                self._enforce_limit(cache, commands)
        self._progress(commands)
        return commands

    # ---- inside ------------------------------------------------------------------------------------------------

    def _answered(self, command: Fetch | Write, event: str) -> Copy:
        """The copy that `command` moved, which is not in flight any more."""
        tier = Tier.HOST if isinstance(command, Write) else command.target
        cache = self._caches[tier]
        copy = cache.copies.get(command.block)
        in_flight = copy is not None and (
            copy.writing if isinstance(command, Write) else copy.state is CopyState.LOADING
        )
        if copy is None or not in_flight or copy.slot != command.slot:
            raise self._illegal(command.block, tier, f"{command} {event}", copy)
        self._flying -= 1
        if isinstance(command, Write):
            copy.writing = False
            del cache.writing[command.block]
        else:
            cache.loading -= 1
        cache.touch(command.block)
        return copy

    def _progress(self, commands: list[Command]) -> None:
        """Move waiting copies on: find their source, then a slot, then fetch. Oldest request first."""
        for tier, block in list(self._waiting):
            if (tier, block) not in self._waiting:
                continue  # feeding the device has started it meanwhile
            copy = self._caches[tier].copies[block]
            if tier is Tier.DEVICE and block in self._suspended:
                continue
            if not copy.load:
                source = None
            elif self.blocks[block].home is Tier.NVME and tier is Tier.DEVICE:
                if not self._feed(block, commands):
                    continue
                source = Tier.HOST
            else:
                source = self.blocks[block].home
            if copy.slot < 0:
                slot = self._make_room(tier, self.blocks[block].span, commands)
                if slot is None:
                    continue
                copy.slot = slot
                self._caches[tier].slots.take(slot, self.blocks[block].span, block)
            self._waiting.remove((tier, block))
            self._start(tier, block, copy, source, commands)

    def _start(self, tier: Tier, block: int, copy: Copy, source: Tier | None, commands: list[Command]) -> None:
        copy.fetched = self._tick
        copy.waiting = 0
        if source is None:
            copy.state = CopyState.VALID
            return
        copy.state = CopyState.LOADING
        copy.load = True
        self._flying += 1
        self._caches[tier].loading += 1
        self._caches[tier].touch(block)
        self.counts.fetches[tier] += 1
        if source is Tier.HOST and self.blocks[block].home is Tier.NVME:
            self._caches[Tier.HOST].copies[block].uses += 1
            self._caches[Tier.HOST].touch(block)
        self._note(block, f"fetch {source.name}->{tier.name}")
        commands.append(Fetch(block, source, tier, copy.slot))

    def _feed(self, block: int, commands: list[Command]) -> bool:
        """Whether staging holds a VALID copy of `block` to feed the device from; asks for one if it has none."""
        staged = self._caches[Tier.HOST].copies.get(block)
        if staged is None:
            staged = self._caches[Tier.HOST].add(block, Copy(CopyState.WAITING))
        elif staged.state is CopyState.STALE:
            staged.state = CopyState.WAITING
        if staged.state is CopyState.WAITING:
            if staged.slot < 0:
                slot = self._make_room(Tier.HOST, self.blocks[block].span, commands)
                if slot is None:
                    if staged.uses == 0:
                        self._caches[Tier.HOST].remove(block)
                    return False
                staged.slot = slot
                self._caches[Tier.HOST].slots.take(slot, self.blocks[block].span, block)
            if (Tier.HOST, block) in self._waiting:
                self._waiting.remove((Tier.HOST, block))
            self._start(Tier.HOST, block, staged, Tier.NVME, commands)
        return staged.state is CopyState.VALID

    def _end_feeding(self, command: Fetch) -> None:
        if command.source is Tier.HOST and self.blocks[command.block].home is Tier.NVME:
            self._caches[Tier.HOST].copies[command.block].uses -= 1
            self._caches[Tier.HOST].touch(command.block)

    def _make_room(self, tier: Tier, span: int, commands: list[Command], needed_at: int | None = None) -> int | None:
        """The first of `span` free slots in a row, giving up idle copies for it; None if that must wait.

        With `needed_at` (a prefetch) only clean copies that are needed later than that are given up.
        """
        cache = self._caches[tier]
        slot = cache.slots.find(span) if cache.slots.used + span <= cache.limit else None
        if slot is not None:
            return slot
        if needed_at is not None:
            victims = cache.harmless_victims(span, needed_at)
        else:
            # What is staged for another request is spared: two could take it from each other for ever.
            spared = {block for other, block in self._waiting if other is not tier}
            if cache.writing_slots() < span:
                victims = cache.victims(span, spared)
            else:  # a write on its way makes room, but what is clean and not needed for long gives way at once
                victims = cache.harmless_victims(span, cache.schedule.position + 2 * self._lookahead, spared)
        dirty = [block for block in victims if cache.copies[block].dirty]
        for block in dirty:
            self._write(block, cache.copies[block], commands)
        if dirty or not victims:
            return None
        for block in victims:
            self._evict(tier, block, commands)
        return cache.slots.find(span)

    def _enforce_limit(self, cache: Cache, commands: list[Command]) -> None:
        for block in cache.excess():
            if cache.copies[block].dirty:
                self._write(block, cache.copies[block], commands)
            else:
                self._evict(cache.tier, block, commands)

    def _prefetch(self, cache: Cache, commands: list[Command]) -> None:
        """Start what the schedule uses next and is missing, while that harms nothing (waiting requests go first)."""
        if self._waiting or cache.loading >= self._in_flight:
            return
        flying = cache.loading
        for block in cache.missing(self._lookahead):
            if flying >= self._in_flight or not self._prefetch_one(cache, block, commands):
                return
            flying += 1

    def _prefetch_one(self, cache: Cache, block: int, commands: list[Command]) -> bool:
        tier = cache.tier
        if tier is Tier.DEVICE and block in self._suspended:
            return True
        home, span = self.blocks[block].home, self.blocks[block].span
        if home <= tier:
            return True
        if tier is Tier.DEVICE and home is Tier.NVME:
            staged = self._caches[Tier.HOST].copies.get(block)
            if staged is None:
                return self._prefetch_one(self._caches[Tier.HOST], block, commands)
            if staged.state is not CopyState.VALID:
                return False
        slot = self._make_room(tier, span, commands, cache.schedule.next_use(block))
        if slot is None:
            return False
        cache.slots.take(slot, span, block)
        copy = cache.add(block, Copy(CopyState.WAITING, slot=slot, last_use=self._tick))
        source = Tier.HOST if tier is Tier.DEVICE else Tier.NVME
        self._start(tier, block, copy, source, commands)
        return True

    def _write(self, block: int, copy: Copy, commands: list[Command]) -> None:
        copy.writing = True
        self._flying += 1
        self._caches[Tier.HOST].writing[block] = copy
        self._caches[Tier.HOST].touch(block)
        self.counts.writes += 1
        self._note(block, "write")
        commands.append(Write(block, copy.slot))

    def _evict(self, tier: Tier, block: int, commands: list[Command]) -> None:
        self.counts.evictions[tier] += 1
        self._drop(tier, block, commands)

    def _drop(self, tier: Tier, block: int, commands: list[Command]) -> None:
        copy = self._caches[tier].remove(block)
        if copy.dirty:
            raise self._illegal(block, tier, "dropping a dirty copy", copy)
        if copy.slot >= 0:
            self._caches[tier].slots.give(copy.slot, self.blocks[block].span)
            commands.append(Drop(block, tier, copy.slot))
        self._note(block, f"dropped on {tier.name}")

    def _withdraw(self, tier: Tier, block: int) -> None:
        copy = self._caches[tier].copies[block]
        copy.uses -= 1
        copy.waiting -= 1
        if copy.waiting:
            return
        self._waiting.remove((tier, block))
        if copy.slot >= 0:
            copy.state = CopyState.STALE  # it had a stale copy before it asked
            self._caches[tier].touch(block)
        else:
            self._caches[tier].remove(block)

    def _note(self, block: int, what: str) -> None:
        self._history[block].append((self._tick, what))

    def _no_room(self, block: int, tier: Tier) -> str:
        held = [self.blocks[b].label for b, copy in self._caches[tier].copies.items() if not copy.idle]
        return (
            f"no room on {tier.name} for {self.blocks[block].label}: it needs {self.blocks[block].span} slot(s), "
            f"{self._caches[tier].limit} may be used, {self._caches[tier].slots.used} are, in use or in flight: "
            f"{', '.join(held[:8]) or 'nothing'}{' …' if len(held) > 8 else ''}"
        )

    def _illegal(self, block: int, tier: Tier, event: str, copy: Copy | None) -> StateError:
        history = "; ".join(f"{tick}: {what}" for tick, what in self._history[block])
        return StateError(f"{self.blocks[block].label}: {event} on {tier.name}, copy is {copy}; history: {history}")

    # ---- invariants --------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise `AssertionError` if an invariant of the state machine does not hold (for tests and `sanitize`)."""
        for cache in self._caches:
            cache.check()
            tier = cache.tier
            for block, copy in cache.copies.items():
                waits = (tier, block) in self._waiting
                assert waits == (copy.state is CopyState.WAITING) == (copy.waiting > 0), "a wait is lost"
