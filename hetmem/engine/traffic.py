"""Leases of copies: brings blocks to tiers by what `schedule.residency` decides, and waits where it must.

It knows chunks and slots, and nothing of operators, autograd or optimizers. Commands are carried out by `executor`.
"""

from __future__ import annotations

import time
from collections.abc import Container, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress

import torch

from hetmem.base.weak import weakly
from hetmem.engine.build import recast_all
from hetmem.engine.events import CopyChange, EventLog, Fault, Statistics
from hetmem.engine.executor import Executor, GradientCopies, Pending
from hetmem.engine.homes import Memory
from hetmem.engine.param_views import Bindings
from hetmem.errors import CapacityError, StateError
from hetmem.memory.chunk import Chunk, Home, ManagedParameter, Role
from hetmem.memory.transfer import TransferEngine
from hetmem.schedule.blocks import PLACED, CopyState, in_flight_bytes
from hetmem.schedule.residency import Residency
from hetmem.schedule.trace import Tier
from hetmem.schedule.tracer import StepTracer


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


_LOADING = (CopyState.WAITING, CopyState.LOADING)


class Traffic:
    """Every copy between tiers. `residency` says what, `executor` does it; here is when, and who waits for it."""

    def __init__(
        self,
        memory: Memory,
        residency: Residency,
        engine: TransferEngine,
        bindings: Bindings,
        tracer: StepTracer,
        statistics: Statistics,
        events: EventLog,
        *,
        sanitize: bool,
    ) -> None:
        self.residency = residency
        self.engine = engine
        self._memory = memory
        self._tracer = tracer
        self.executor = Executor(memory, residency, engine, bindings, statistics, events, sanitize=sanitize)
        self.execute, self.wait_for_one = self.executor.execute, self.executor.wait_for_one
        self.pending = Pending(residency, engine, self.executor)
        self.gradients = GradientCopies(
            engine, self.pending, self.executor, weakly(self.close_role), in_flight_bytes(memory.device_bytes)
        )
        self.updating: set[Chunk] = set()
        self._uses = Uses(residency, engine, self.executor, self.pending, events, self.updating)
        self.acquire, self.release, self.release_all = self._uses.acquire, self._uses.release, self._uses.release_all
        for role in (Role.PARAM, Role.COMPUTE):
            for chunk in memory.chunks:
                if role in chunk.homes:
                    self.register_home(chunk, role)

    # ---- homes -------------------------------------------------------------------------------------------------

    def register_home(self, chunk: Chunk, role: Role) -> None:
        """Let the residency know the home of `role`, unless operators see the home itself."""
        home = chunk.homes[role]
        if self._memory.streams:
            home.block = self.residency.add(self._memory.block(chunk, role))
            self.executor.chunk_of_block[home.block] = (chunk, role)

    def ensure_homes(self, chunks: Iterable[Chunk], roles: Iterable[Role]) -> None:
        """Give each of `roles` of `chunks` a home where it has none. Raises `BudgetError` if there is no room."""
        for role in roles:
            missing = [chunk for chunk in chunks if role not in chunk.homes]
            if not missing:
                continue
            self._memory.reserve(missing, role)
            for chunk in missing:
                self.register_home(chunk, role)

    def home_moved(self, chunk: Chunk, role: Role) -> None:
        """The home of `role` is on another tier than it was, with no copies but on the device."""
        block = chunk.homes[role].block
        if block is not None:
            self.residency.blocks[block] = self._memory.block(chunk, role)

    # ---- the device --------------------------------------------------------------------------------------------

    def limit_device(self, slots: int, *, before: int) -> None:
        """Chunks may have `slots` slots of the device from now on; what is less than `before` is given back."""
        self.execute(self.residency.limit(Tier.DEVICE, slots))
        if slots < before:
            self._memory.device_pool.give_back(self.residency.free_slots(Tier.DEVICE), slots)

    def give_back_free(self) -> None:
        """Return the memory of all slots that nobody has."""
        self._memory.device_pool.give_back(self.residency.free_slots(Tier.DEVICE), 0)

    def device_copy(self, chunk: Chunk) -> torch.Tensor | None:
        """The device copy of `chunk` as a flat tensor, if there is one. One that waits for room is none: the caller may
        be what it waits for."""
        block = chunk.operand_block
        if block is None:
            return None
        while self.residency.state(block, Tier.DEVICE) is CopyState.LOADING:
            self.wait_for_one()
        if self.residency.state(block, Tier.DEVICE) is not CopyState.VALID:
            return None
        return self.executor.on_device(chunk, self.residency.slot(block, Tier.DEVICE))

    def copy_counts(self, chunk: Chunk) -> bool:
        """Whether the copy on the device is what operators see, or will be before any that is asked for from now on."""
        block = chunk.operand_block
        state = None if block is None else self.residency.state(block, Tier.DEVICE)
        if block is None or state is not CopyState.LOADING:
            return state is CopyState.VALID
        return self.executor.order_compute_after(block)

    def copy_equals_home(self, chunk: Chunk) -> None:
        """The copy on the device, if there is one, has just come to say what the newest copy in host memory says."""
        home = chunk.homes[Role.PARAM]
        assert home.block is not None
        if chunk.operand == Role.COMPUTE or home.tier is Tier.DEVICE:
            return
        if self.residency.state(home.block, Tier.DEVICE) in PLACED:
            self.executor.fingerprints.take(chunk, self.newest(chunk, Role.PARAM))

    def copy_home_again(self, chunk: Chunk) -> None:
        """Have the copy of `chunk`, whose home is on the device too, say what that says now. Waits for nothing."""
        block = chunk.operand_block
        if block is None or chunk in self.updating:
            return
        if Role.COMPUTE in chunk.homes:
            recast_all(chunk)
        if self.residency.state(block, Tier.DEVICE) is CopyState.VALID:
            copy = self.executor.on_device(chunk, self.residency.slot(block, Tier.DEVICE))
            self._memory.device.copy_in(copy, chunk.flat(chunk.operand))
            self.executor.mark_making(self.residency.slot(block, Tier.DEVICE))

    def newest(self, chunk: Chunk, role: Role) -> torch.Tensor:
        """The newest that host memory, or NVMe, holds of `role` of `chunk`, as a flat tensor."""
        block = chunk.homes[role].block
        if block is not None and self.residency.state(block, Tier.HOST) is CopyState.VALID:
            return self.executor.staged(chunk, role, self.residency.slot(block, Tier.HOST))
        return chunk.flat(role)

    # ---- host memory -------------------------------------------------------------------------------------------

    def open_role(self, chunk: Chunk, role: Role, *, load: bool) -> torch.Tensor:
        """`role` of `chunk` in host (or device) memory as a flat tensor, to be closed by `close_role`.

        With `load=False` its content is undefined where it was not in staging already.
        """
        home = chunk.homes[role]
        if home.tier is not Tier.NVME:
            return chunk.flat(role)
        assert home.block is not None
        self._tracer.host_use(home.block, reads=load)
        self.residency.reach((home.block,), Tier.HOST)
        slot = self.acquire(home.block, Tier.HOST, load=load)
        try:
            while self.residency.writing(home.block):
                self.wait_for_one()
        except BaseException:
            self.release(home.block, Tier.HOST)
            raise
        return self.executor.staged(chunk, role, slot)

    def ask_role(self, chunk: Chunk, role: Role, *, load: bool) -> None:
        """Begin what `open_role` does, and do not wait: see `role_is_there`. Nothing is asked for if this raises."""
        home = chunk.homes[role]
        if home.tier is Tier.NVME:
            assert home.block is not None
            self._tracer.host_use(home.block, reads=load)
            self.residency.reach((home.block,), Tier.HOST)
            self._uses.ask(home.block, Tier.HOST, load=load)

    def role_is_there(self, chunk: Chunk, role: Role) -> bool:
        """Whether what `ask_role` asked for has come, and `asked_role` has it."""
        home, residency = chunk.homes[role], self.residency
        if home.tier is not Tier.NVME:
            return True
        assert home.block is not None
        return residency.state(home.block, Tier.HOST) is CopyState.VALID and not residency.writing(home.block)

    def role_has_place(self, chunk: Chunk, role: Role) -> bool:
        """Whether what `ask_role` asked for is there or needs no more room to come."""
        home = chunk.homes[role]
        return home.tier is not Tier.NVME or (
            home.block is not None and self.residency.state(home.block, Tier.HOST) in PLACED
        )

    def asked_role(self, chunk: Chunk, role: Role) -> torch.Tensor:
        """What `ask_role` asked for and has come, to be closed by `close_role`."""
        home = chunk.homes[role]
        if home.tier is not Tier.NVME:
            return chunk.flat(role)
        assert home.block is not None
        self._uses.tell_of(home.block, Tier.HOST)
        staged = self.executor.staged(chunk, role, self.residency.slot(home.block, Tier.HOST))
        if self.executor.exposed.mixed(home.block):
            staged.copy_(chunk.flat(role))  # nobody writes there while hetmem is asked
            self.executor.exposed.forget(home.block)
        return staged

    def unask_role(self, chunk: Chunk, role: Role) -> None:
        """Take `ask_role` back."""
        home = chunk.homes[role]
        if home.tier is Tier.NVME:
            assert home.block is not None
            self._uses.abandon(home.block, Tier.HOST)

    def close_role(self, chunk: Chunk, role: Role, *, dirty: bool) -> None:
        """End the use of `open_role`."""
        block = chunk.homes[role].block
        if chunk.homes[role].tier is Tier.NVME:
            assert block is not None
            self.release(block, Tier.HOST, dirty=dirty)

    def settle(self, homes: Iterable[Home]) -> None:
        """Start to write the dirty ones among `homes` to NVMe."""
        for home in homes:
            if home.tier is Tier.NVME:
                assert home.block is not None
                self.execute(self.residency.settle(home.block))

    def wait_until_written(self, homes: Iterable[Home]) -> None:
        """Write the dirty ones among `homes` to NVMe, and wait for that. Where one fails its error comes when no other
        is being written: nobody meets half of a home, or has what he writes to it overwritten."""
        blocks = [home.block for home in homes if home.tier is Tier.NVME and home.block is not None]
        for block in blocks:
            self.execute(self.residency.settle(block))
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
        """The home of `role` was written to directly: no copy of it may be used any more, but perhaps the device's."""
        block = chunk.homes[role].block
        if block is None:
            return
        if not self.residency.copied(block):
            self.executor.exposed.forget(block)
            return
        self.wait_until_written([chunk.homes[role]])
        for tier in (Tier.HOST, Tier.DEVICE):  # in this order: the device is fed from staging while we wait
            if but_device and tier is Tier.DEVICE:
                return
            while self.residency.state(block, tier) in _LOADING and self.residency.in_flight():
                self.wait_for_one()
            if self.residency.state(block, tier) is not CopyState.WAITING:  # what is not there yet is not old
                self.execute(self.residency.invalidate(block, tier))
            self.executor.exposed.forget(block)

    def hold(self, chunk: Chunk) -> None:
        """The user may write to the parameters of `chunk` next: until a forward begins nothing is read ahead from their
        home. 16-bit copies at home are: see `home_copies`."""
        home = chunk.homes[Role.PARAM]
        if home.block is not None and home.tier is not Tier.DEVICE and chunk.operand == Role.PARAM:
            self.residency.hold(home.block)

    def outdate(self, chunk: Chunk) -> None:
        """The user may have written to the parameters of `chunk`: no copy of their home counts. While an update trails,
        or is being written to NVMe, it was not his turn."""
        block = chunk.homes[Role.PARAM].block
        if block is not None and chunk not in self.updating and not self.residency.dirty(block):
            self.superseded(chunk, Role.PARAM)

    def forget_read_ahead(self, chunks: Iterable[Chunk]) -> None:
        """A step begins, and the user may have written to the parameters of `chunks`: what was staged of those on NVMe
        is read again."""
        on_nvme = [chunk for chunk in chunks if chunk.homes[Role.PARAM].tier is Tier.NVME]
        for chunk in on_nvme:
            self.hold(chunk)
        for chunk in on_nvme:
            self.outdate(chunk)
        self.residency.lift(home.block for home in (chunk.homes[Role.PARAM] for chunk in on_nvme))

    def forget_copies(self) -> None:
        """Drop every copy on every tier; nothing may be in use."""
        self.pending.drain()
        for tier in (Tier.DEVICE, Tier.HOST):
            for block in self.residency.resident(tier):
                self.execute(self.residency.invalidate(block, tier))

    # ---- updates -----------------------------------------------------------------------------------------------

    def begin_update(self, chunk: Chunk, *, keep_copy: bool) -> bool:
        """The parameters of `chunk` will be written at home, by other threads: until `end_update` nothing is fetched
        from there. The device copy is given up, or with `keep_copy` stays, to be written too; whether there is one."""
        self.wait_for_update(chunk)
        self.updating.add(chunk)
        block = chunk.operand_block
        if block is None:
            return False
        self.residency.suspend(block)
        self.hold(chunk)
        try:
            found = self.device_copy(chunk) is not None  # may wait, and an interrupt come in
            if found and not keep_copy:
                self.execute(self.residency.invalidate(block, Tier.DEVICE))
        except BaseException:
            self.updating.discard(chunk)
            self.execute(self.residency.resume(block))
            raise
        return found

    def end_update(self, chunk: Chunk, *, renew: bool = False, near: torch.Tensor | None = None) -> None:
        """The parameters of `chunk` are what they will be; with `renew` a copy on the device is wanted again, made of
        `near`, which says on the device what the home of operands says, if it is there."""
        self.updating.discard(chunk)
        block = chunk.operand_block
        if block is not None:
            self.copy_equals_home(chunk)
            self.executor.near = None if near is None else (chunk, near)
            try:
                self.execute(self.residency.resume(block))
                if renew:
                    self.execute(self.residency.prefetch(block, Tier.DEVICE))
            finally:
                self.executor.near = None

    @contextmanager
    def updated_at_home(self, chunks: Iterable[Chunk]) -> Iterator[None]:
        """Let this thread write the parameters of `chunks` at home, on the device; copies say the same behind that."""
        with ExitStack() as begun:
            for chunk in chunks:
                self.begin_update(chunk, keep_copy=True)
                begun.callback(self._end_update_here, chunk)
            yield

    def _end_update_here(self, chunk: Chunk) -> None:
        """An update that is made must not look as if it had failed: what cannot be fetched ahead is asked for again."""
        with suppress(Exception):
            self.end_update(chunk)
        self.copy_home_again(chunk)

    def hold_copy(self, chunk: Chunk) -> torch.Tensor | None:
        """The device copy of `chunk`, if there is one, in use until `let_go_of_copy`."""
        copy = self.device_copy(chunk)
        if copy is not None:
            block = chunk.operand_block
            assert block is not None
            self._uses.ask(block, Tier.DEVICE)  # it is there
        return copy

    def let_go_of_copy(self, chunk: Chunk) -> None:
        """End the use of `hold_copy`."""
        assert chunk.operand_block is not None
        self.release(chunk.operand_block, Tier.DEVICE)

    def wait_for_update(self, chunk: Chunk) -> None:
        """No other thread writes parameters, or reads gradients, of `chunk`."""
        if chunk in self.updating:
            self.pending.hasten(chunk)
        while chunk in self.updating:
            if not self.pending.go_on():
                raise StateError(f"the update of {chunk.label(Role.PARAM)} was never begun")

    def trails(self, chunk: Chunk) -> bool:
        """Whether the home of the parameters of `chunk` is not what the last step made, or not yet on NVMe."""
        home = chunk.homes[Role.PARAM]
        on_its_way = home.tier is Tier.NVME and home.block is not None and self.residency.dirty(home.block)
        return chunk in self.updating or on_its_way

    def wait_for_updates(self) -> None:
        """All parameters are at home, also on NVMe, as the last step made them."""
        while self.updating:
            self.wait_for_update(next(iter(self.updating)))
        self.wait_until_written([chunk.homes[Role.PARAM] for chunk in self._memory.chunks])


def param_block(managed: ManagedParameter) -> int:
    """The block of what operators see of the chunk that `managed` lies in, whose home is not on the device."""
    homes = managed.chunk.homes  # asked at every use of a weight
    block = homes[Role.COMPUTE if Role.COMPUTE in homes else Role.PARAM].block
    assert block is not None, f"{managed.name} has its home on the device"
    return block
