"""Carries out the residency's commands, in its order, and handles the ends of copies, gradients and jobs.

The commands that follow from the end of a transfer are carried out first, always on the thread that trains.
"""

from __future__ import annotations

import itertools
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ContextDecorator, nullcontext
from functools import partial
from types import TracebackType
from typing import Any, Protocol

import torch

from hetmem import torch_private
from hetmem.base.weak import WeakList
from hetmem.engine.events import LOGGER, EventLog
from hetmem.engine.homes import Memory
from hetmem.engine.param_views import Bindings
from hetmem.memory.chunk import Chunk, Role, without_graph
from hetmem.memory.interrupts import HELD_BACK
from hetmem.memory.live_bytes import is_unseen
from hetmem.memory.transfer import Finished, TransferEngine
from hetmem.schedule.blocks import SMALL_BYTES, Command, CopyState, Drop, Fetch, Link, Write
from hetmem.schedule.residency import Residency
from hetmem.schedule.trace import DEVICE, NVME, Tier

_IN = Link.HOST_TO_DEVICE


class _ClearsFrames(ContextDecorator):
    """Clears the frames of an error that a transfer raises: some of their variables refer to the error, and such a
    cycle would keep the callers' frames, and the program's tensors, until garbage is collected."""

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if at is not None:
            traceback.clear_frames(at)


_CLEARS_FRAMES = _ClearsFrames()


class Worker(Protocol):
    """Runs the updates of one optimizer in the background."""

    def give_way(self, *, again: bool) -> bool:
        """Free memory; return False if there is none to free, or if that helped nothing `again` and again."""

    def pump(self) -> None:
        """Go on as far as possible without waiting."""

    def close(self) -> None:
        """End all work."""

    @property
    def shared(self) -> int:
        """How many updates it has computed its part of, and another rank perhaps not yet."""


class OperatorWatch(Protocol):
    """What watches operators; see `DeviceMonitor`."""

    own: bool

    def unwatched(self) -> AbstractContextManager[None]:
        """Return a context that hides what is carried out."""
        ...


class NoWatch:
    """Where nothing watches."""

    own = False
    unwatched = staticmethod(nullcontext[None])


class Executor:
    """Begins the transfers of commands, reports their ends to `residency`, and waits for transfers and other jobs."""

    def __init__(
        self,
        memory: Memory,
        residency: Residency,
        engine: TransferEngine,
        bindings: Bindings,
        events: EventLog,
        *,
        sanitize: bool,
    ) -> None:
        self.chunk_of_block: dict[int, tuple[Chunk, Role]] = {}
        self.updating: set[Chunk] = set()
        """Chunks whose parameters are being written at home by other threads."""
        self._working_copies: tuple[list[Chunk], list[int], list[torch.Tensor], list[torch.Tensor]] = [], [], [], []
        self.workers: WeakList[Worker] = WeakList()
        """Pumped whenever something has ended."""
        self._memory, self._device, self._pool = memory, memory.device, memory.device_pool
        self._residency = residency
        self._engine = engine
        self._bindings = bindings
        self._events = events
        self._sanitize, self._unlimited = sanitize, engine.unlimited(_IN)
        self.watch: OperatorWatch = NoWatch()
        self._at_work: Callable[[], set[object] | None] = lambda: None
        self._commands: deque[Command] = deque()
        self._urgent: int | None = None
        """The urgent block of the commands that are being carried out, -1 if there is none; None: nothing is."""
        self._jobs: dict[int, Callable[[BaseException | None], None]] = {}
        self._tags = itertools.count()
        self._fetching: dict[int, Fetch] = {}
        self._ordered: set[int] = set()
        """Blocks in `_fetching` behind whose copy compute is ordered already."""
        self._compute_marks: dict[int, Any] = {}
        """By slot, marks behind the compute that last used the slot."""
        self._now, self._log_change = events.now, events.copies.append
        engine.log = events.transfers.append  # which refers to no model: the engine's threads must not keep one alive

    def on_device(self, chunk: Chunk, slot: int) -> torch.Tensor:
        """Return `slot` of the device as a flat tensor of `chunk`'s elements."""
        return self._pool.views[slot][chunk.layout][0]

    def staged(self, chunk: Chunk, role: Role, slot: int) -> torch.Tensor:
        """Return `slot` of staging as a flat tensor of `role`; see `Chunk.over`."""
        return chunk.over(role, self._staging(chunk, role, slot))

    def _staging(self, chunk: Chunk, role: Role, slot: int) -> memoryview:
        return self._memory.host_pool.staged(slot, chunk.role_nbytes(role))

    # ---- jobs and workers --------------------------------------------------------------------------------------

    def expect(self, ended: Callable[[BaseException | None], None]) -> int:
        """Return a tag for a job that begins, and that a wait for memory may have to wait for. Once the engine reports
        the tag, the thread that trains calls `ended` with the error, or None. The engine, to which threads and a
        finalizer refer, never refers to `ended`, so that a dropped model is freed at once."""
        tag = next(self._tags)
        self._jobs[tag] = ended
        return tag

    def copy_beside(
        self,
        link: Link,
        work: Callable[[], None],
        nbytes: int,
        done: Callable[[BaseException | None], None],
        after: Sequence[Any] = (),
    ) -> int:
        """Begin `work`, which moves `nbytes` of no block over `link`, behind the marks in `after`; `done` is called as
        in `expect`. Returns its tag."""
        tag = self.expect(done)
        self._engine.copy(tag, link, work, nbytes, after)
        return tag

    def keep_in(self, at_work: set[object]) -> None:
        """Have `keep` add to `at_work`, which lives as long as the model: the work of a worker refers to the runtime,
        which must not refer to it."""
        self._at_work = weakref.ref(at_work)

    def keep(self, owner: object) -> None:
        """Keep `owner`, whose worker has begun something, alive until `forget`, or until the model is dropped."""
        if (at_work := self._at_work()) is not None:
            at_work.add(owner)

    def forget(self, owner: object) -> None:
        """End `keep`, as its worker has finished everything."""
        if (at_work := self._at_work()) is not None:
            at_work.discard(owner)

    def make_way(self, worker: object = None, *, again: bool = False) -> bool:
        """Have one worker, other than `worker`, free memory (see `Worker.give_way`); return False if none does."""
        return any(other.give_way(again=again) for other in self.workers if other is not worker)

    def end_workers(self) -> None:
        """Close all workers."""
        for worker in list(self.workers):
            worker.close()

    def pump(self) -> None:
        """Have all workers go on."""
        for worker in self.workers:
            worker.pump()

    # ---- waiting -----------------------------------------------------------------------------------------------

    def _note_all(self) -> bool:
        noted = False
        with HELD_BACK:
            try:
                while (finished := self._engine.take(wait=False)) is not None:
                    noted = True
                    self._note(finished)
            except BaseException as error:
                traceback.clear_frames(error.__traceback__)  # as `_CLEARS_FRAMES`, without a call where nothing fails
                raise
            finally:
                finished = None  # else its error would refer to itself, by this function's variables
        return noted

    def poll(self) -> None:
        """Handle what has ended meanwhile, and pump workers if anything has."""
        if not self._engine.none_finished() and self._note_all():
            self.pump()

    @_CLEARS_FRAMES
    @HELD_BACK
    def wait_for_one(self) -> None:
        """Wait until one transfer or job has ended. Raises its error, after the residency was told."""
        finished = self._engine.take(wait=False)
        if finished is None:
            before = self._events.here()
            finished = self._engine.take(wait=True)
            self._events.waited(before)
            assert finished is not None
        self._note(finished)

    def wait_while(self, under_way: Callable[[], bool]) -> None:
        """Wait until `under_way` is False; an error meanwhile is raised then."""
        try:
            while under_way():
                self.wait_for_one()
        except Exception:
            self.wait_while(under_way)
            raise

    def busy(self) -> bool:
        """Return whether anything is under way that `wait_for_one` can wait for."""
        return bool(self._residency.in_flight() or self._jobs)

    def drain(self) -> None:
        """Wait until no command is in flight; an error of a transfer is raised at once."""
        while self._residency.in_flight():
            self.wait_for_one()

    def quiesce(self) -> None:
        """Wait until nothing is under way, also after errors; then raise the first one."""
        first: BaseException | None = None
        while self.busy():
            try:
                self.wait_for_one()
            except Exception as error:  # noqa: PERF203 - each wait may fail
                first = first or error
        try:
            if first is not None:
                raise first
        finally:
            del first  # as in `execute`

    # ---- order of compute --------------------------------------------------------------------------------------

    def mark_use(self, slot: int) -> None:
        """Mark the end of the launched compute that uses the copy in `slot`."""
        self._compute_marks[slot] = self._engine.mark()

    def order_compute_after(self, block: int) -> bool:
        """Order compute behind the copy of `block` in flight to the device; return False if that is impossible."""
        fetch = self._fetching.get(block)
        if fetch is None or not self._engine.ordered:
            return False
        if block not in self._ordered and (end := self._engine.end_of(fetch)) is not None:
            self._ordered.add(block)
            self._events.waits_for(block, end)
        return self._engine.order_compute_after(fetch)

    # ---- copies that compute makes of homes on the device ------------------------------------------------------------

    def placed(self, chunk: Chunk) -> torch.Tensor | None:
        """Return the device copy of `chunk` as a flat tensor, if it is VALID."""
        block = chunk.operand_block
        if block < 0 or self._residency.state(block, DEVICE) is not CopyState.VALID:
            return None
        return self.on_device(chunk, self._residency.slot_taken(block, DEVICE))

    def set_working_copies(self, chunks: Sequence[Chunk], slots: Sequence[int]) -> None:
        """Note that the copies of `chunks`, whose homes are on the device too, are leased in `slots` until the next
        call: `copy_homes_again` remakes them in one operator."""
        copies = [self.on_device(chunk, slot) for chunk, slot in zip(chunks, slots, strict=True)]
        self._working_copies = list(chunks), list(slots), copies, [chunk.flat(Role.PARAM) for chunk in chunks]

    @property
    def has_working_copies(self) -> bool:
        """Whether there are working copies: then all homes are on the device, and each has a copy in use."""
        return bool(self._working_copies[1])

    def are_working_copies(self, chunks: list[Chunk]) -> bool:
        """Return whether exactly `chunks` have working copies, and none of them is being updated."""
        working, slots = self._working_copies[:2]
        if not slots or chunks != working or self.updating:
            return False
        return self._residency.all_on_device([chunk.homes[Role.PARAM].block for chunk in chunks])

    def copy_homes_again(self, chunks: list[Chunk]) -> None:
        """Remake the copies of `chunks`, whose homes are on the device too. Waits for nothing."""
        _, slots, copies, homes = self._working_copies
        if not self.are_working_copies(chunks):
            slots, copies, homes = [], [], []
            for chunk in chunks:
                if chunk in self.updating or chunk.codes:  # nothing writes to these
                    continue
                if Role.COMPUTE in chunk.homes:
                    chunk.recast()
                if (copy := self.placed(chunk)) is not None:
                    slots += (self._residency.slot_taken(chunk.operand_block, DEVICE),)
                    copies += (copy,)
                    homes += (chunk.flat(chunk.operand),)
        with without_graph():
            if copies:
                torch_private.foreach_copy(copies, homes)
        for slot in slots if self._engine.ordered else ():
            self.mark_use(slot)

    # ---- commands ----------------------------------------------------------------------------------------------

    def execute(self, commands: list[Command], urgent: int = -1) -> None:
        """Carry out `commands`, in the order in which the residency gave them. The fetch of the block `urgent` to the
        device runs on this thread if another one gains nothing.

        Commands that follow from one that is done at once are queued behind those given with it: otherwise a slot could
        be filled before its old copy is dropped. All are begun, also if one fails, as the residency waits for each;
        then the first error is raised.
        """
        waiting = self._commands
        waiting += commands
        if self._urgent is not None or not waiting:
            return
        self._urgent = urgent
        try:
            if self.watch.own or is_unseen():
                self._carry_out_all()
            else:
                with self.watch.unwatched():
                    self._carry_out_all()
        finally:
            self._urgent = None

    def _note(self, finished: Finished) -> None:
        command = finished.tag
        kind = type(command)
        if kind is not Fetch and kind is not Write:
            self._jobs.pop(command)(finished.error)
            return
        if kind is Fetch and command.target is DEVICE:
            self._fetched(command.block)
        if finished.error is None:
            self.execute(self._residency.done(command))
            return
        if self._fails(command, finished.error):
            raise finished.error

    def _fails(self, command: Fetch | Write, error: BaseException) -> bool:
        """Tell the residency that `command` failed. Returns whether to raise `error`: not where a prefetch found no
        memory, as the use of its block fetches it again, and frees memory of idle chunks."""
        no_memory = isinstance(error, torch.OutOfMemoryError) and type(command) is Fetch
        ahead = no_memory and not self._residency.uses(command.block, DEVICE)
        self.execute(self._residency.failed(command))
        return not ahead

    def _fetched(self, block: int) -> None:
        self._fetching.pop(block, None)
        self._ordered.discard(block)

    def _carry_out_all(self) -> None:
        first: BaseException | None = None
        waiting, carry_out = self._commands, self._carry_out_observed if self._events.observed else self._carry_out
        while waiting:
            try:
                carry_out(waiting.popleft())
            except Exception as error:  # noqa: PERF203 - each may fail
                first = first or error
        try:
            if first is not None:
                raise first
        finally:
            del first  # the error would refer to itself, by this function's variables

    def _carry_out_observed(self, command: Command) -> None:
        """Carry out `command`, for the log and torch's profiler by name."""
        chunk, role = self.chunk_of_block[command.block]
        if isinstance(command, Fetch):
            what = f"fetch {chunk.label(role)} from {command.source.name.lower()} to {command.target.name.lower()}"
        elif isinstance(command, Write):
            what = f"write {chunk.label(role)} to nvme"
        else:
            what = f"drop {chunk.label(role)} from {command.tier.name.lower()}"
        LOGGER.debug("%s", what)
        with torch_private.labelled(f"hetmem {what}"):
            self._carry_out(command)

    def _carry_out(self, command: Command) -> None:
        if type(command) is Drop:
            block, tier, slot = command
            self._log_change((self._now(), block, tier._value_, False))
            if tier is DEVICE:
                self._bindings.close_device(self.chunk_of_block[block][0])
                if self._sanitize:
                    self._pool.poison(slot)
                    self.mark_use(slot)
            return
        if type(command) is Fetch:
            block, _, tier, slot = command
            self._log_change((self._now(), block, tier._value_, True))
            if tier is DEVICE:
                self._fetch_to_device(command, block, slot)
                return
        chunk, role = self.chunk_of_block[command.block]
        extent = chunk.homes[role].extent
        assert extent is not None, f"{chunk.label(role)} is not on NVMe"
        memory = self._staging(chunk, role, command.slot)
        if type(command) is Write:
            self._engine.write(command, extent, memory)
        else:
            self._engine.read(command, extent, memory)

    def _fetch_to_device(self, command: Fetch, block: int, slot: int) -> None:
        """Copy `block` into `slot`, or begin to."""
        engine, pool, copy_in = self._engine, self._pool, self._device.copy_in
        chunk, role = self.chunk_of_block[block]
        tier = chunk.homes[role].tier
        try:
            if tier is not NVME:
                source = chunk.source(role)
            else:
                source = chunk.source(role, self._staging(chunk, role, self._residency.slot(block, Tier.HOST)))
            if not pool.holds_place(slot):
                self._prepare(slot, chunk.spec.span)
            target, nbytes, now = self._bindings.open_device(chunk, pool, slot), source.nbytes, block == self._urgent
            if tier is DEVICE:  # a cast on the compute stream; nothing crosses a link
                copy_in(target, source)
                self.mark_use(slot)
            elif (now or nbytes < SMALL_BYTES) and self._unlimited:
                before = self._events.here() if now else None
                engine.copy_now(_IN, copy_in, nbytes, command, target, source)
                if before is not None:
                    self._events.waited(before)
            else:
                self._fetching[block] = command
                marks, work = self._compute_marks, partial(copy_in, target, source)
                engine.copy(command, _IN, work, nbytes, (marks[slot],) if slot in marks else ())
                return
        except BaseException as error:  # it cannot begin: the allocator has no memory for the slot, say
            self._fetched(block)
            if self._fails(command, error):
                raise
            return
        if following := self._residency.done(command):
            self._commands += following

    def _prepare(self, slot: int, span: int) -> None:
        """Allocate memory for `span` slots at `slot`; launched compute may still use that memory."""
        pool, keep = self._pool, self._residency.allowed_slots(DEVICE) - span
        if pool.held_slots > keep:
            pool.give_back(self._residency.free_slots(DEVICE), keep)
        pool.prepare(slot, span)
        self.mark_use(slot)
