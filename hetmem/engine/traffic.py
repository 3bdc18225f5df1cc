"""Leases copies: has blocks brought to tiers as `schedule.residency` decides, and waits for them.

It knows chunks and slots, and nothing of operators, autograd or optimizers. Commands are carried out by `executor`. A
lease (one use of a copy on a tier) begins with `acquire` or `ask` and ends with `release` or `abandon`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from operator import attrgetter

import torch

from hetmem.engine.events import LOGGER, EventLog
from hetmem.engine.executor import Executor
from hetmem.engine.gradient_watch import GradientCopies
from hetmem.engine.homes import Memory
from hetmem.engine.param_views import Bindings
from hetmem.errors import CapacityError, StateError
from hetmem.memory.chunk import Chunk, Home, Role
from hetmem.memory.transfer import TransferEngine
from hetmem.schedule.blocks import PLACED, CopyState, in_flight_bytes
from hetmem.schedule.gradients import wait_until
from hetmem.schedule.residency import Residency
from hetmem.schedule.trace import DEVICE, Tier
from hetmem.schedule.tracer import StepTracer

_OPERAND_BLOCK = attrgetter("operand_block")
_LOADING = (CopyState.WAITING, CopyState.LOADING)


class Traffic:
    """Leases the copies of one model: `residency` decides what moves, `executor` moves it, this asks and waits."""

    def __init__(
        self,
        memory: Memory,
        residency: Residency,
        engine: TransferEngine,
        bindings: Bindings,
        tracer: StepTracer,
        events: EventLog,
        *,
        sanitize: bool,
    ) -> None:
        self.residency, self.engine, self._ordered = residency, engine, engine.ordered
        residency.tell(events.story)
        self._memory, self._tracer, self._events = memory, tracer, events
        self.executor = Executor(memory, residency, engine, bindings, events, sanitize=sanitize)
        self.execute, self.wait_for_one = self.executor.execute, self.executor.wait_for_one
        self.gradients = GradientCopies(engine, residency, self.executor, in_flight_bytes(memory.device_bytes))
        self.updating = self.executor.updating
        self.before_updates: Callable[[], object] = lambda: None
        """Called before copies become stale, as their homes are updated: ends leases of what is not in use."""
        self._unfetched: set[tuple[int, Tier]] = set()  # copies to be overwritten, and not logged yet
        for role in (Role.PARAM, Role.COMPUTE):
            for chunk in memory.chunks:
                if role in chunk.homes:
                    self.register_home(chunk, role)

    # ---- homes -------------------------------------------------------------------------------------------------

    def register_home(self, chunk: Chunk, role: Role) -> None:
        """Register the home of `role` with the residency, unless operators see the home itself."""
        if self._memory.uses_copies:
            block = self.residency.add(self._memory.block(chunk, role))
            self._memory.number(chunk, role, block)
            self.executor.chunk_of_block[block] = (chunk, role)

    def ensure_homes(self, chunks: Iterable[Chunk], roles: Iterable[Role]) -> None:
        """Give each of `roles` of `chunks` a home where it has none. Raises `BudgetError` if there is no room."""
        for role in roles:
            missing = [chunk for chunk in chunks if role not in chunk.homes]
            if missing:
                self._memory.reserve(missing, role)
            for chunk in missing:
                self.register_home(chunk, role)

    # ---- leases ------------------------------------------------------------------------------------------------

    def acquire(self, block: int, tier: Tier, *, load: bool = True) -> int:
        """Begin a lease of `block` on `tier`, wait for the copy and return its slot. No lease is begun if this
        raises."""
        residency = self.residency
        events, state = self._events, residency.state(block, tier)
        missing = tier is Tier.DEVICE and state is not CopyState.VALID
        if missing:
            if state is CopyState.STALE:
                self._mark_use(block)  # still in use, and replaced in its slot
            if state is not CopyState.LOADING:
                events.faults.append((events.now(), block))
        awaited, events.awaited = events.awaited, block if missing else events.awaited
        try:
            self.ask(block, tier, load=load, urgent=True)
            self._wait_for(block, tier)
        finally:
            events.awaited = awaited
        self._log_unfetched(block, tier)
        return residency.place(block, tier)

    def use(self, uses: Mapping[int, int], reached: tuple[int, ...] = ()) -> bool:
        """Begin leases of copies on the device, by block their number, after the schedule was moved on to a use of the
        blocks `reached`. Returns False, with none begun, if compute launched from now on may not see one of the copies.
        None is begun if this raises."""
        ordered = self._ordered
        commands = self.residency.use(uses, DEVICE, coming=ordered, reached=reached)
        if commands is None:
            return False
        try:
            if commands:
                self.execute(commands)
            if not ordered or all(map(self._order_compute, uses)):
                return True
        except BaseException:
            self.release_all(uses)
            raise
        self.release_all(uses)
        return False

    def _order_compute(self, block: int) -> bool:
        """Order compute behind the copy of `block` on the device, VALID or in flight; return False if impossible."""
        return self.residency.state(block, DEVICE) is not CopyState.LOADING or self.executor.order_compute_after(block)

    def ask(self, block: int, tier: Tier, *, load: bool = True, urgent: bool = False) -> None:
        """Begin a lease without waiting for the copy to be VALID. No lease is begun if this raises."""
        if not load and self.residency.state(block, tier) is None:
            self._unfetched.add((block, tier))
        commands = self.residency.acquire(block, tier, load=load)
        if not commands:
            return
        try:
            self.execute(commands, urgent=block if urgent else -1)
        except BaseException:
            self.abandon(block, tier)
            raise

    def _wait_for(self, block: int, tier: Tier) -> None:
        """Wait for the copy of a lease, which ends if this raises."""
        try:
            present = self._until(partial(self._has_arrived, block, tier))
        except BaseException:
            self.abandon(block, tier)
            raise
        if not present:  # other leases of the copy stay
            raise self._withdraw(block, tier)

    def _until(self, reached: Callable[[], bool]) -> bool:
        """Wait until `reached()`; return False if neither what this rank has under way, nor updates that other ranks
        still compute a part of, bring it about."""
        while not wait_until(self.executor, reached):
            if not self._await_ranks():
                return reached()  # which updates that all have computed by now have brought about
        return True

    def _await_ranks(self) -> bool:
        """Wait until all ranks have computed one more update; return False if there is none."""
        ranks, before = self._memory.ranks, self._shared
        if ranks is None or not before:
            return False
        ranks.waits.until(lambda: self._shared < before, "updates that other ranks compute", self.executor.pump)
        return True

    @property
    def _shared(self) -> int:
        return sum(worker.shared for worker in self.executor.workers)

    def _has_arrived(self, block: int, tier: Tier) -> bool:
        if self.residency.state(block, tier) is CopyState.VALID:
            return True
        return tier is Tier.DEVICE and self.executor.order_compute_after(block)

    def release(self, block: int, tier: Tier, *, dirty: bool = False, uses: int = 1) -> None:
        """End `uses` leases; the slot is free behind all launched compute that uses the copy."""
        if tier is Tier.DEVICE and self._ordered:
            self._mark_use(block)
        commands = self.residency.release(block, tier, dirty=dirty, uses=uses)
        if commands:
            self.execute(commands)

    def bring_all(self, blocks: Sequence[int]) -> list[int]:
        """Request copies of all of `blocks` that are missing on the device, without a lease; return the blocks whose
        copies are VALID then."""
        residency = self.residency
        if residency.all_on_device(blocks):
            return [*blocks]
        if commands := residency.prefetch(blocks, DEVICE):
            self.execute(commands)
        return residency.in_state(blocks, CopyState.VALID)

    def release_all(self, uses: Mapping[int, int]) -> None:
        """End leases on the device, by block their number; slots are free behind launched compute that uses them."""
        if self._ordered:
            for block in uses:
                self._mark_use(block)
        commands = self.residency.release_all(uses)
        if commands:
            self.execute(commands)

    def abandon(self, block: int, tier: Tier) -> None:
        """End a lease that `ask` has begun, in any state of its copy."""
        state = self.residency.state(block, tier)
        if state is CopyState.WAITING:
            self._withdraw(block, tier)
        elif state is not None and self.residency.uses(block, tier):
            self._log_unfetched(block, tier)
            self.release(block, tier)

    def _withdraw(self, block: int, tier: Tier) -> CapacityError:
        self._unfetched.discard((block, tier))
        return self.residency.withdraw(block, tier)

    def _log_unfetched(self, block: int, tier: Tier) -> None:
        if (block, tier) in self._unfetched:
            self._unfetched.discard((block, tier))
            self._events.copies.append((self._events.now(), block, int(tier), True))

    def _mark_use(self, block: int) -> None:
        """Mark the use of a copy, also of one superseded while in use: the slot's next copy comes behind the mark."""
        if self._ordered and (slot := self.residency.slot_taken(block, Tier.DEVICE)) >= 0:
            self.executor.mark_use(slot)

    # ---- the device --------------------------------------------------------------------------------------------

    def has_copy(self, block: int) -> bool:
        """Return whether the device has a copy of `block`, after waiting for one in flight. A copy that waits for a
        slot does not count, as it may wait for the caller."""
        while self.residency.state(block, DEVICE) is CopyState.LOADING:
            self.wait_for_one()  # may raise an interrupt
        return self.residency.state(block, DEVICE) is CopyState.VALID

    def copy_counts(self, chunk: Chunk) -> bool:
        """Return whether operators launched from now on may see the copy of `chunk` on the device."""
        block, state = chunk.operand_block, self.residency.state(chunk.operand_block, Tier.DEVICE)
        return state is CopyState.VALID or (state in _LOADING and self.executor.order_compute_after(block))

    def newest(self, chunk: Chunk, role: Role) -> torch.Tensor:
        """Return the staged copy of `role` as a flat tensor, or its home."""
        block = chunk.homes[role].block
        if block is not None and self.residency.state(block, Tier.HOST) is CopyState.VALID:
            return self.executor.staged(chunk, role, self.residency.slot(block, Tier.HOST))
        return chunk.flat(role)

    # ---- roles in host memory ----------------------------------------------------------------------------------

    def open_role(self, chunk: Chunk, role: Role, *, load: bool) -> torch.Tensor:
        """Return `role` of `chunk` in host (or device) memory as a flat tensor, until `close_role`; with `load=False`
        its content is undefined unless it was staged already."""
        block = self._reach(chunk, role, load=load)
        if block is None:
            return chunk.flat(role)
        slot = self.acquire(block, Tier.HOST, load=load)
        try:
            while self.residency.writing(block):
                self.wait_for_one()
        except BaseException:
            self.release(block, Tier.HOST)
            raise
        return self.executor.staged(chunk, role, slot)

    def ask_role(self, chunk: Chunk, role: Role, *, load: bool) -> None:
        """Begin `open_role` without waiting: see `role_has_arrived`. Nothing is begun if this raises."""
        block = self._reach(chunk, role, load=load)
        if block is not None:
            self.ask(block, Tier.HOST, load=load)

    def _reach(self, chunk: Chunk, role: Role, *, load: bool) -> int | None:
        """Return the block of a role on NVMe, and note its use in the trace; None for any other role."""
        block = staged_block(chunk.homes[role])
        if block is not None:
            self._tracer.host_use(block, reads=load)
            self.residency.reach((block,), Tier.HOST)
        return block

    def role_has_arrived(self, chunk: Chunk, role: Role) -> bool:
        """Return whether the role that `ask_role` requested has arrived."""
        home, residency = chunk.homes[role], self.residency
        if home.tier is not Tier.NVME:
            return True
        assert home.block is not None
        return residency.state(home.block, Tier.HOST) is CopyState.VALID and not residency.writing(home.block)

    def role_has_slot(self, chunk: Chunk, role: Role) -> bool:
        """Return whether the role that `ask_role` requested has a slot."""
        block = staged_block(chunk.homes[role])
        return block is None or self.residency.state(block, Tier.HOST) in PLACED

    def asked_role(self, chunk: Chunk, role: Role) -> torch.Tensor:
        """Return the role that `ask_role` requested, which has arrived, until `close_role`."""
        block = staged_block(chunk.homes[role])
        if block is None:
            return chunk.flat(role)
        self._log_unfetched(block, Tier.HOST)
        return self.executor.staged(chunk, role, self.residency.slot(block, Tier.HOST))

    def unask_role(self, chunk: Chunk, role: Role) -> None:
        """End `ask_role` before the role was used."""
        block = staged_block(chunk.homes[role])
        if block is not None:
            self.abandon(block, Tier.HOST)

    def close_role(self, chunk: Chunk, role: Role, *, dirty: bool) -> None:
        """End the lease of `open_role`, or of `ask_role`."""
        block = staged_block(chunk.homes[role])
        if block is not None:
            self.release(block, Tier.HOST, dirty=dirty)

    # ---- homes and their copies --------------------------------------------------------------------------------

    def write_back(self, homes: Iterable[Home]) -> list[int]:
        """Begin to write the dirty copies of `homes` back to NVMe; return the blocks of all homes on NVMe."""
        blocks = [block for block in map(staged_block, homes) if block is not None]
        for block in blocks:
            self.execute(self.residency.settle(block))
        return blocks

    def wait_until_written(self, homes: Iterable[Home]) -> None:
        """Write the dirty copies of `homes` back to NVMe, and wait. An error is raised once no write is in flight."""
        blocks = self.write_back(homes)
        try:
            for block in blocks:
                while self.residency.dirty(block):
                    if not self.residency.writing(block):  # its write has just failed
                        self.execute(self.residency.settle(block))
                    self.wait_for_one()
        except Exception:
            self.executor.wait_while(lambda: any(map(self.residency.writing, blocks)))
            raise

    def superseded(self, chunk: Chunk, role: Role, *, but_device: bool = False) -> None:
        """Drop every copy of `role` as stale, as its home was written to; `but_device`: all but the device's."""
        block = chunk.homes[role].block
        if block is None or not self.residency.copied(block):
            return
        self.wait_until_written([chunk.homes[role]])
        for tier in (Tier.HOST, Tier.DEVICE):  # in this order: staging may be copied to the device meanwhile
            if but_device and tier is Tier.DEVICE:
                return
            while self.residency.state(block, tier) in _LOADING and self.residency.in_flight():
                self.wait_for_one()
            if self.residency.state(block, tier) is not CopyState.WAITING:  # its fetch has not begun: not stale
                self.execute(self.residency.invalidate(block, tier))

    def forget_copies(self) -> None:
        """Drop every copy on every tier; none may be in use."""
        self.executor.drain()
        for tier in (Tier.DEVICE, Tier.HOST):
            for block in self.residency.resident(tier):
                self.execute(self.residency.invalidate(block, tier))

    # ---- updates -----------------------------------------------------------------------------------------------

    def begin_updates(self, chunks: Sequence[Chunk], *, keep_copies: bool = False) -> list[Chunk]:
        """Fetch nothing from the homes of the parameters of `chunks`, which other threads write, until `end_updates`.
        Drops their device copies, or with `keep_copies` leaves them to be remade. Returns the chunks that have one."""
        self.before_updates()
        for chunk in chunks if self.updating else ():
            self.wait_for_update(chunk)
        self.updating |= {*chunks}
        if self._events.observed:
            for chunk in chunks:
                LOGGER.debug("update %s", chunk.label(Role.PARAM))
        of_block = {
            block: chunk for block, chunk in zip(map(_OPERAND_BLOCK, chunks), chunks, strict=True) if block >= 0
        }
        self.residency.suspend(of_block)
        try:
            for block in self.residency.in_state(of_block, CopyState.LOADING):
                self.has_copy(block)  # waits: nothing is dropped before, as commands are carried out in order
            valid = self.residency.in_state(of_block, CopyState.VALID)
            if valid and not keep_copies and (commands := self.residency.invalidate_all(valid, DEVICE)):
                self.execute(commands)
        except BaseException:
            self.end_updates(chunks)
            raise
        return [*map(of_block.__getitem__, valid)]

    def end_updates(self, chunks: Iterable[Chunk], *, renew: Sequence[Chunk] = ()) -> None:
        """End `begin_updates`, and fetch copies of `renew` to the device again."""
        self.updating -= {*chunks}
        blocks = {*map(_OPERAND_BLOCK, chunks)} - {-1}
        commands = self.residency.resume(blocks) if blocks else []
        if renew:
            commands += self.residency.prefetch(map(_OPERAND_BLOCK, renew), DEVICE)
        if commands:
            self.execute(commands)

    @contextmanager
    def updated_at_home(self, chunks: Iterable[Chunk]) -> Iterator[None]:
        """Let this thread write the parameters of `chunks` at home, on the device, in the body; then remake copies."""
        if self.executor.are_working_copies([*chunks]):  # the whole model, and nothing else reads or writes it
            yield
            self.executor.copy_homes_again([*chunks])
            return
        with ExitStack() as begun:
            for chunk in chunks:
                self.begin_updates([chunk], keep_copies=True)
                begun.callback(self._end_update_here, chunk)
            yield

    def _end_update_here(self, chunk: Chunk) -> None:
        with suppress(Exception):  # a failed prefetch is repeated at its use
            self.end_updates([chunk])
        self.executor.copy_homes_again([chunk])

    def wait_for_update(self, chunk: Chunk) -> None:
        """Wait until no other thread writes parameters or reads gradients of `chunk`."""
        if chunk not in self.updating:
            return
        if not self._until(lambda: chunk not in self.updating):
            told = self._events.story(chunk.operand_block)
            raise StateError(f"the update of {chunk.label(Role.PARAM)} was never begun; its last events: {told}")

    def wait_for_updates(self) -> None:
        """Wait until all parameters are at home, also on NVMe, as the last step has updated them."""
        while self.updating:
            self.wait_for_update(next(iter(self.updating)))
        self.wait_until_written([chunk.homes[Role.PARAM] for chunk in self._memory.chunks])


def staged_block(home: Home) -> int | None:
    """Return the block of `home` if it is on NVMe, and so used through staging; else None."""
    return home.block if home.tier is Tier.NVME else None
