"""Carries out what the residency commands, in its order, and takes note of what has ended: copies, gradients, jobs.

What follows from the end of a transfer is carried out before anything else goes on, always on the thread that trains.
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
from hetmem.base.weak import WeakOnes
from hetmem.engine.events import EventLog
from hetmem.engine.homes import Memory
from hetmem.engine.param_views import Bindings
from hetmem.memory.chunk import Chunk, Role, without_graph
from hetmem.memory.interrupts import HELD_BACK
from hetmem.memory.live_bytes import is_unseen
from hetmem.memory.transfer import Finished, TransferEngine
from hetmem.schedule.blocks import SMALL_BYTES, Command, CopyState, Drop, Fetch, Link, Write
from hetmem.schedule.residency import Residency
from hetmem.schedule.trace import DEVICE, NVME, Tier


class _ClearsFrames(ContextDecorator):
    """Clears the frames of an error that a transfer raises: some of their variables hold the error, and such a circle
    would keep all that is above, the program's tensors too, until garbage is collected."""

    def __enter__(self) -> None:
        """Clear nothing yet."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if at is not None:
            traceback.clear_frames(at)


_CLEARS_FRAMES = _ClearsFrames()


class Worker(Protocol):
    """Updates of one optimizer, behind what the program does."""

    def give_way(self, *, again: bool) -> bool:
        """Give memory up; return False if there is none to give, or if nothing came of it `again` and again."""

    def pump(self) -> None:
        """Go on as far as that needs no waiting."""

    def close(self) -> None:
        """End all work."""


class Executor:
    """Tells `engine` to copy, and `residency` what became of it; waits for copies and for jobs, which are no
    commands."""

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
        """Chunks whose parameters other threads write at home."""
        self._standing: tuple[list[Chunk], list[int], list[torch.Tensor], list[torch.Tensor]] = [], [], [], []
        self.workers: WeakOnes[Worker] = WeakOnes()
        """They go on whenever something has ended."""
        self._memory = memory
        self._residency = residency
        self._engine = engine
        self._bindings = bindings
        self._events = events
        self._sanitize = sanitize
        self.unwatched: Callable[[], AbstractContextManager[None]] = nullcontext
        """See `DeviceMonitor.unwatched`."""
        self._at_work: Callable[[], set[object] | None] = lambda: None
        self._commands: deque[Command] = deque()
        self._urgent: int | None = None
        self._executing = False
        self._jobs: dict[int, Callable[[BaseException | None], None]] = {}
        self._tags = itertools.count()
        self._fetching: dict[int, Fetch] = {}
        self._met: set[int] = set()
        """Blocks among those that compute is behind already."""
        self._compute_marks: dict[int, Any] = {}
        self._made: dict[int, Any] = {}
        """By slot, marks behind the compute that made the copy: a program may go on on another stream."""
        engine.observe = partial(_observe, events)

    def on_device(self, chunk: Chunk, slot: int) -> torch.Tensor:
        """Return `slot` of the device as a flat tensor of `chunk`'s elements."""
        return self._memory.device_pool.whole(slot, chunk.compute_dtype, chunk.numel)

    def staged(self, chunk: Chunk, role: Role, slot: int) -> torch.Tensor:
        """Return `slot` of staging as a flat tensor of `role`; see `Chunk.over`."""
        return chunk.over(role, self._memory.host_pool.staged(slot, chunk.role_nbytes(role)))

    # ---- jobs and workers --------------------------------------------------------------------------------------

    def expect(self, ended: Callable[[BaseException | None], None]) -> int:
        """Return a tag for something that begins and is no command, and that waiting for memory may have to wait for:
        the thread that trains calls `ended`, with its error, once the engine has reported the tag. The engine, which
        threads and a finalizer hold, never holds `ended`: a dropped model would live until then."""
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
        """Begin `work`, which moves `nbytes` that are no block's over `link`, behind the marks in `after`; see `expect`
        for `done`. Return its tag."""
        tag = self.expect(done)
        self._engine.copy(tag, link, work, nbytes, after)
        return tag

    def keep_in(self, at_work: set[object]) -> None:
        """Let `keep` count as long as `at_work` is held, where the model is: the work of a worker holds the runtime,
        which must not hold it."""
        self._at_work = weakref.ref(at_work)

    def keep(self, owner: object) -> None:
        """Keep `owner`, whose worker has begun something, alive until `forget`, or until the model is dropped."""
        if (at_work := self._at_work()) is not None:
            at_work.add(owner)

    def forget(self, owner: object) -> None:
        """End `keep`: its worker has finished everything."""
        if (at_work := self._at_work()) is not None:
            at_work.discard(owner)

    def make_way(self, worker: object = None, *, again: bool = False) -> bool:
        """Have one worker, other than `worker`, give memory up (see `Worker.give_way`); return False if none does."""
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
        with _CLEARS_FRAMES, HELD_BACK:
            try:
                while (finished := self._engine.take(wait=False)) is not None:
                    noted = True
                    self._note(finished)
            finally:
                finished = None  # its error would hold itself, by this function's variables
        return noted

    def poll(self) -> None:
        """Take note of what has ended meanwhile; workers go on if anything has."""
        if not self._engine.nothing_over() and self._note_all():
            self.pump()

    @_CLEARS_FRAMES
    @HELD_BACK
    def wait_for_one(self) -> None:
        """Wait until one transfer, or job, has ended. Its error is raised here, with the residency told."""
        finished = self._engine.take(wait=False)
        if finished is None:
            before = self._events.here()
            finished = self._engine.take(wait=True)
            self._events.waited(before)
            assert finished is not None
        self._note(finished)

    def wait_while(self, under_way: Callable[[], bool]) -> None:
        """Wait until `under_way` is False; what fails meanwhile is raised at the end."""
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
        """Wait until nothing is under way, whatever fails; then the first error is raised."""
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
        """Mark the end of what compute was asked to do with the copy in `slot`."""
        self._compute_marks[slot] = self._engine.mark()

    def mark_making(self, slot: int) -> None:
        """Mark the end of the compute that makes the copy in `slot`. A fetch into that slot comes behind it, too."""
        self.mark_use(slot)
        self._made[slot] = self._compute_marks[slot]

    def order_behind_making(self, slot: int) -> None:
        """Order compute behind `mark_making` of `slot`, if that may not be over."""
        if slot in self._made and not self._engine.order_compute_behind(self._made[slot]):
            del self._made[slot]

    def order_compute_after(self, block: int) -> bool:
        """Order compute behind the copy of `block` that is in flight to the device; return False if that cannot be."""
        fetch = self._fetching.get(block)
        if fetch is None or not self._engine.ordered:
            return False
        if block not in self._met and (end := self._engine.end_of(fetch)) is not None:
            self._met.add(block)
            self._events.waits_for(block, end)
        return self._engine.order_compute_after(fetch)

    # ---- copies that compute makes of homes on the device ------------------------------------------------------------

    def placed(self, chunk: Chunk) -> torch.Tensor | None:
        """Return the device copy of `chunk` as a flat tensor, if it is VALID."""
        block = chunk.operand_block
        if block < 0 or self._residency.state(block, DEVICE) is not CopyState.VALID:
            return None
        return self.on_device(chunk, self._residency.slot_taken(block, DEVICE))

    def stand(self, chunks: Sequence[Chunk], slots: Sequence[int]) -> None:
        """The copies of `chunks`, whose homes are on the device too, are leased in `slots` until this is called again:
        all are made anew in one call."""
        copies = [self.on_device(chunk, slot) for chunk, slot in zip(chunks, slots, strict=True)]
        self._standing = list(chunks), list(slots), copies, [chunk.flat(Role.PARAM) for chunk in chunks]

    @property
    def stands(self) -> bool:
        """Return whether copies `stand`: then all homes are on the device, and each has a copy that is in use."""
        return bool(self._standing[1])

    def order_behind_standing(self) -> None:
        """Order compute behind the making of the copies that `stand`."""
        for slot in self._standing[1] if self._engine.ordered else ():
            self.order_behind_making(slot)

    def all_stand(self, chunks: list[Chunk]) -> bool:
        """Return whether the copies of `chunks` `stand`, and of no others, and nothing updates any."""
        standing, slots = self._standing[:2]
        if not slots or chunks != standing or self.updating:
            return False
        return self._residency.all_on_device([chunk.homes[Role.PARAM].block for chunk in chunks])

    def copy_homes_again(self, chunks: list[Chunk]) -> None:
        """Make the copies of `chunks`, whose homes are on the device too, anew. Waits for nothing."""
        _, slots, copies, homes = self._standing
        if not self.all_stand(chunks):
            slots, copies, homes = [], [], []
            for chunk in chunks:
                if chunk in self.updating:
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
            self.mark_making(slot)

    # ---- commands ----------------------------------------------------------------------------------------------

    def execute(self, commands: list[Command], urgent: int | None = None) -> None:
        """Carry `commands` out, in the order in which the residency gave them. The fetch of `urgent` to the device is
        done here and now where nothing is gained by another thread.

        What follows from a command that is done at once goes behind the commands that were given with it: otherwise a
        slot could be filled before the drop of what it held. All are begun, also if one fails, as each is waited for;
        then the first error is raised.
        """
        waiting = self._commands
        waiting += commands
        if self._executing or not waiting:
            return
        first: BaseException | None = None
        self._executing, self._urgent = True, urgent
        try:
            if is_unseen():
                first = self._carry_out_all()
            else:
                with self.unwatched():
                    first = self._carry_out_all()
        finally:
            self._executing = False
        try:
            if first is not None:
                raise first
        finally:
            del first  # the error would hold itself, by this function's variables

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
        no_memory = isinstance(finished.error, torch.OutOfMemoryError) and kind is Fetch
        ahead = no_memory and not self._residency.uses(command.block, DEVICE)
        self.execute(self._residency.failed(command))
        if not ahead:  # else its use asks again, and has idle chunks give memory up
            raise finished.error

    def _fetched(self, block: int) -> None:
        self._fetching.pop(block, None)
        self._met.discard(block)

    def _carry_out_all(self) -> BaseException | None:
        first: BaseException | None = None
        waiting = self._commands
        while waiting:
            try:
                self._carry_out(waiting.popleft())
            except Exception as error:  # noqa: PERF203 - each may fail
                first = first or error
        try:
            return first
        finally:
            del first  # the error would hold itself, by this function's variables

    def _carry_out(self, command: Command) -> None:
        events = self._events
        if isinstance(command, Drop):
            block, tier, slot = command
            events.copies.append((events.now(), block, int(tier), False))
            if tier is DEVICE:
                pool = self._memory.device_pool
                self._bindings.close_device(self.chunk_of_block[block][0], pool, slot)
                if self._sanitize:
                    pool.poison(slot)
                    self.mark_use(slot)
            return
        if isinstance(command, Fetch):
            block, _, tier, slot = command
            events.copies.append((events.now(), block, int(tier), True))
            if tier is DEVICE:
                try:
                    arrived = self._fetch_to_device(command, block, slot)
                except BaseException:  # it cannot begin (the allocator has no memory for the slot, say): it has failed
                    self._fetched(block)
                    self.execute(self._residency.failed(command))
                    raise
                if arrived:
                    self._commands += self._residency.done(command)
                return
        chunk, role = self.chunk_of_block[command.block]
        extent = chunk.homes[role].extent
        assert extent is not None, f"{chunk.label(role)} is not on NVMe"
        memory = self._memory.host_pool.staged(command.slot, chunk.role_nbytes(role))
        if isinstance(command, Write):
            self._engine.write(command, extent, memory)
        else:
            self._engine.read(command, extent, memory)

    def _fetch_to_device(self, command: Fetch, block: int, slot: int) -> bool:
        """Begin to copy `block` into `slot`; return whether it is there already."""
        memory, engine, pool = self._memory, self._engine, self._memory.device_pool
        if slot in self._made:
            del self._made[slot]
        chunk, role = self.chunk_of_block[block]
        tier = chunk.homes[role].tier
        if tier is not NVME:
            source = chunk.flat(role)
        else:
            source = self.staged(chunk, role, self._residency.slot(block, Tier.HOST))
        if not pool.holds_place(slot):
            self._prepare(slot, chunk.spec.span)
        work = partial(memory.device.copy_in, pool.whole(slot, chunk.compute_dtype, chunk.numel), source)
        now, nbytes = block == self._urgent, source.nbytes
        if tier is DEVICE:  # a cast by compute, in its order; nothing crosses a link
            work()
            self.mark_making(slot)
        elif (now or nbytes < SMALL_BYTES) and engine.unlimited(Link.HOST_TO_DEVICE):
            before = self._events.here() if now else None
            engine.copy_now(Link.HOST_TO_DEVICE, work, nbytes, command)
            if before is not None:
                self._events.waited(before)
        else:
            self._fetching[block] = command
            marks = self._compute_marks
            engine.copy(command, Link.HOST_TO_DEVICE, work, nbytes, (marks[slot],) if slot in marks else ())
            return False
        return True

    def _prepare(self, slot: int, span: int) -> None:
        """Have memory for `span` slots at `slot`, which other compute may still use."""
        pool, keep = self._memory.device_pool, self._residency.allowed_slots(DEVICE) - span
        if pool.held_slots > keep:
            pool.give_back(self._residency.free_slots(DEVICE), keep)
        pool.prepare(slot, span)
        self.mark_use(slot)


def _observe(events: EventLog, link: Link, tag: Any, start: float, end: float, nbytes: int) -> None:
    """A function of the log alone: the engine's threads must not keep a model alive."""
    block = -1 if tag is None or type(tag) is int else tag.block
    events.transfers.append((link._value_, block, start, end, nbytes))
