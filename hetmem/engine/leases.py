"""Uses of copies: each is begun here, waited for, and given back or taken back, once, by whom it is.

It knows blocks and slots; which role of which chunk a block is, and what it is used for, it does not know.
"""

from __future__ import annotations

import time
from collections.abc import Container

from hetmem.engine.events import CopyChange, EventLog, Fault
from hetmem.engine.executor import Executor
from hetmem.engine.pending import Pending
from hetmem.errors import CapacityError
from hetmem.memory.chunk import Chunk
from hetmem.memory.transfer import TransferEngine
from hetmem.schedule.blocks import CopyState
from hetmem.schedule.residency import Residency
from hetmem.schedule.trace import Tier


class Uses:
    """Of the copies of one model. Who waits for a chunk that is `updating` has that update made first."""

    def __init__(
        self,
        residency: Residency,
        engine: TransferEngine,
        executor: Executor,
        pending: Pending,
        events: EventLog,
        updating: Container[Chunk],
    ) -> None:
        self._residency, self._engine, self._executor, self._pending = residency, engine, executor, pending
        self._events, self._updating = events, updating
        self._execute = executor.execute
        self._unfetched: set[tuple[int, Tier]] = set()
        """Copies that were asked for to be overwritten, of which the events do not know yet."""

    def acquire(self, block: int, tier: Tier, *, load: bool = True) -> int:
        """One more use of `block` on `tier`: its slot, once it is there. No use is left behind if this raises."""
        if tier is Tier.DEVICE and (slot := self._residency.acquire_again(block, tier)) is not None:
            self._executor.order_behind_making(slot)
            return slot
        missing = tier is Tier.DEVICE and self._residency.state(block, tier) is not CopyState.VALID
        start = time.perf_counter() if missing else 0.0
        if missing:
            self._mark_use(block)  # a stale copy that is still in use is replaced where it lies
        self.ask(block, tier, load=load, urgent=True)
        refused = self._wait_for(block, tier, hastens=missing)
        try:
            if refused is not None:  # others may use it, or wait for it: those uses are theirs
                raise refused
        finally:
            del refused  # the error would hold itself, and with the variables of its callers copies
        self.tell_of(block, tier)
        if missing:
            self._events.faults.append(Fault(start, block, time.perf_counter() - start))
        slot = self._residency.place(block, tier)
        if tier is Tier.DEVICE:
            self._executor.order_behind_making(slot)
        return slot

    def _wait_for(self, block: int, tier: Tier, *, hastens: bool) -> CapacityError | None:
        """What was asked for is there; or the error that it is not, and the use is taken back. So it is if this raises,
        which it does for what else fails."""
        chunk = self._executor.chunk_of_block[block][0]
        try:
            if hastens and chunk in self._updating:
                self._pending.hasten(chunk)
            while self._residency.state(block, tier) is not CopyState.VALID:
                if tier is Tier.DEVICE and self._executor.order_compute_after(block):
                    break
                if not self._pending.go_on():
                    return self._withdraw(block, tier)
        except BaseException:
            self.abandon(block, tier)
            raise
        return None

    def ask(self, block: int, tier: Tier, *, load: bool = True, urgent: bool = False) -> None:
        """Begin a use, and do not wait: it is there once the copy is VALID. None is begun if this raises."""
        if not load and self._residency.state(block, tier) is None:
            self._unfetched.add((block, tier))
        commands = self._residency.acquire(block, tier, load=load)
        if not commands:
            return
        try:
            self._execute(commands, urgent=block if urgent else None)
        except BaseException:
            self.abandon(block, tier)
            raise

    def release(self, block: int, tier: Tier, *, dirty: bool = False) -> None:
        """One use less; what compute does with the copy has been asked for by now."""
        if tier is Tier.DEVICE and self._engine.ordered:
            self._mark_use(block)
        commands = self._residency.release(block, tier, dirty=dirty)
        if commands:
            self._execute(commands)

    def release_all(self, blocks: list[int]) -> None:
        """`release` of each of `blocks` on the device, of a model of which nothing moves."""
        if self._engine.ordered:
            for block in dict.fromkeys(blocks):
                self._mark_use(block)
        commands = self._residency.release_all(blocks)
        if commands:
            self._execute(commands)

    def abandon(self, block: int, tier: Tier) -> None:
        """Take a use back that was asked for, wherever it has come to."""
        state = self._residency.state(block, tier)
        if state is CopyState.WAITING:
            self._withdraw(block, tier)
        elif state is not None and self._residency.uses(block, tier):
            self.tell_of(block, tier)
            self.release(block, tier)

    def tell_of(self, block: int, tier: Tier) -> None:
        """A copy is there. Where it is to be overwritten, no fetch has told of it."""
        if (block, tier) in self._unfetched:
            self._unfetched.discard((block, tier))
            self._events.copies.append(CopyChange(time.perf_counter(), block, tier, True))

    def _withdraw(self, block: int, tier: Tier) -> CapacityError:
        self._unfetched.discard((block, tier))
        return self._residency.withdraw(block, tier)

    def _mark_use(self, block: int) -> None:
        """Also of a copy that was superseded while it was in use: what comes to lie there must not come too early."""
        if self._engine.ordered and (slot := self._residency.slot_taken(block, Tier.DEVICE)) >= 0:
            self._executor.mark_use(slot)
