"""Updates of chunks on the threads of the host: carries out what `schedule.updates` decides.

All but the tiles runs on the thread that trains, in `pump`; a tile's work comes from its update.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import chain, product
from operator import attrgetter

from hetmem.base.calls import call_all
from hetmem.base.weak import weakly
from hetmem.cpu.workers import WorkerPool
from hetmem.engine.runtime import Runtime
from hetmem.errors import CapacityError
from hetmem.memory.chunk import Chunk, Role
from hetmem.optim.chunk_update import ChunkUpdate
from hetmem.schedule.trace import Tier
from hetmem.schedule.updates import HostUpdates

_CHUNKS = attrgetter("chunks")


class Updates(HostUpdates[ChunkUpdate]):
    """The updates of one optimizer on one runtime. After an error a chunk is unchanged, updated, or `corrupt`."""

    def __init__(self, runtime: Runtime, workers: WorkerPool, owner: Callable[[], object]) -> None:
        super().__init__(lambda update: update.chunk.spec.index)
        self._runtime, self._traffic, self._workers = runtime, runtime.traffic, workers
        self._owner = owner  # returns the optimizer; a reference would be a cycle
        self._on_end = weakly(self._ended)
        self._held: set[ChunkUpdate] = set()
        """Updates that have asked for the chunks that a save in the background has not written yet."""
        ranks = runtime.memory.ranks
        self._of_ranks = None if ranks is None else ranks.updates
        self._shared: list[tuple[Sequence[Chunk], Sequence[Chunk]]] = []
        """Chunks of which other ranks may still compute a part, and those whose copies are to be fetched again."""

    def add(self, update: ChunkUpdate) -> None:
        """Queue a pass of `update`."""
        if update.writes:
            update.had_copies = self._traffic.begin_updates(update.chunks)
            if self._of_ranks is not None:
                self._of_ranks.begin(numbers(update.chunks))
        self._put(update)
        self._traffic.executor.keep(self._owner())

    def _advance(self, update: ChunkUpdate) -> None:
        with self._runtime.own_work():
            super()._advance(update)

    def finish(self) -> None:
        """Carry everything out, and compute tasks on this thread too. Raises the error of a transfer or task; updates
        that could not begin because of it stay queued."""
        stuck: ChunkUpdate | None = None
        while not self.idle:
            self.pump()
            if self._running:
                batch = self._running[0].batch
                assert batch is not None
                while batch.run_one():
                    self._traffic.executor.poll()  # transfers that ended make room for more updates
            if self._traffic.executor.busy():
                with self._runtime.outgoing.waiting() if self._held and not self._running else nullcontext():
                    self._traffic.wait_for_one()
            elif self._opening and not self._traffic.executor.make_way(self):
                if self._opening[0] is stuck:
                    raise self._cannot_open(stuck)
                stuck = self._opening[0]
                self.give_way(again=False)  # a read of it has failed: try once more

    @property
    def shared(self) -> int:
        """How many updates it has computed its part of, and another rank perhaps not yet."""
        return len(self._shared)

    def pump(self) -> None:
        """Advance updates as far as that takes no waiting."""
        if self._shared:
            self.end_shared()
        super().pump()

    def _may_open(self) -> bool:
        """Return whether an update may open: of ranks without a drive any number, so that workers end those that trail
        behind a step also where this rank's thread waits for another one, as in a collective of the program."""
        if self._of_ranks is not None and not self._runtime.memory.staging_slots:
            return bool(self._queue)
        return super()._may_open()

    def end_shared(self, *, abandoned: bool = False) -> bool:
        """End updates of which all ranks have computed their part, or all of them; return whether that is so of all."""
        if self._of_ranks is None:
            return True
        with self._runtime.own_work():
            for each in [*self._shared]:
                if abandoned or self._of_ranks.computed_by_all(numbers(each[0])):
                    self._shared.remove(each)
                    self._traffic.end_updates(each[0], renew=each[1])
        return not self._shared

    def wait_for(self, chunk: Chunk) -> None:
        """Wait until no update computes with `chunk`; queued updates stay queued."""
        while any(chunk in update.chunks for update in self._running):
            self._traffic.wait_for_one()

    def forget(self, chunk: Chunk) -> None:
        """Dismiss queued updates of `chunk`."""
        self._dismiss(lambda update: chunk in update.chunks)

    def close(self) -> None:
        """Carry everything out, or dismiss it if that fails, and end the threads; later work starts new ones."""
        try:
            self.finish()
        except BaseException:
            self.cancel(detached=True)
            raise
        self._workers.close()

    def detach(self) -> None:
        """Note that the step of all updates queued or under way has ended."""
        for update in (*self._queue, *self._opening, *self._running):
            update.detached = True

    def cancel(self, *, detached: bool = False) -> None:
        """Dismiss what has not begun (updates of steps that have ended only if `detached`) and wait for the rest. Its
        errors are dropped, as the caller raises one already."""
        self.give_way(again=False)
        self._dismiss(lambda update: detached or not update.detached)
        while self._running:
            with contextlib.suppress(Exception):
                self._traffic.wait_for_one()
        if self.idle:
            self._traffic.executor.forget(self._owner())
        else:
            self._traffic.executor.keep(self._owner())

    def _dismiss(self, which: Callable[[ChunkUpdate], bool]) -> None:
        for update in [update for update in self._queue if which(update)]:
            self._queue.remove(update)
            if update.writes:
                self._traffic.end_updates(update.chunks)
            update.done(update, False)

    def _is_free(self, update: ChunkUpdate) -> bool:
        under_way, on_their_way = (*self._opening, *self._running), self._traffic.gradients.sends.on_their_way
        if under_way and not set(update.chunks).isdisjoint(chain.from_iterable(map(_CHUNKS, under_way))):
            return False
        if on_their_way and not on_their_way.keys().isdisjoint(update.chunks):
            return False
        return self._runtime.outgoing.save is None or not (update.writes and self._is_held(update))

    def _is_held(self, update: ChunkUpdate) -> bool:
        """Return whether a save in the background has yet to write the chunks of `update`; it writes them next, and
        that is a job to wait for."""
        outgoing = self._runtime.outgoing
        if (save := outgoing.save) is None or not outgoing.holds(update.chunks):
            return False
        if update not in self._held:
            self._held.add(update)
            tag = self._traffic.executor.expect(partial(weakly(self._released), weakref.ref(update)))
            save.call_when_out(update.chunks, self._traffic.engine.reporter(tag))
        return True

    def _released(self, update: weakref.ref[ChunkUpdate], _: BaseException | None) -> None:
        if (released := update()) is not None:
            self._held.discard(released)
        self.pump()

    def _has_slots(self, update: ChunkUpdate) -> bool:
        return not update.staged or all(self._traffic.role_has_slot(update.chunk, role) for role in update.staged)

    def _request(self, update: ChunkUpdate) -> None:
        asked: list[Role] = []
        homes = update.chunk.homes  # an update of several chunks stages nothing
        update.staged = []
        for role in update.needs:
            if homes[role].tier is Tier.NVME:
                update.staged += (role,)
        try:
            for role in update.staged:
                self._traffic.ask_role(update.chunk, role, load=update.needs[role])
                asked.append(role)
        except BaseException:
            for role in asked:
                self._traffic.unask_role(update.chunk, role)
            raise

    def _cancel(self, update: ChunkUpdate) -> None:
        for role in update.staged:
            self._traffic.unask_role(update.chunk, role)

    def _is_open(self, update: ChunkUpdate) -> bool:
        return not update.staged or all(self._traffic.role_has_arrived(update.chunk, role) for role in update.staged)

    def _run(self, update: ChunkUpdate) -> None:
        if update.staged:
            asked = {role: self._traffic.asked_role(update.chunk, role) for role in update.staged}
            update.opened = {update.chunk: asked}
        try:
            tasks = update.tasks(update)
            if update.writes and self._of_ranks is not None:
                tasks = self._of_ranks.counted(numbers(update.chunks), tasks)
        except BaseException:
            self._close(update, failed=True)
            raise
        self._running.append(update)
        tag = self._traffic.executor.expect(partial(self._on_end, weakref.ref(update)))
        update.began = self._runtime.events.now()
        update.batch = self._workers.begin(tasks, after=self._traffic.engine.reporter(tag))

    def _ended(self, ended: weakref.ref[ChunkUpdate], _: BaseException | None) -> None:
        update = ended()
        assert update is not None, "it is among those that run"
        self._running.remove(update)
        batch, update.batch = update.batch, None  # its errors would keep frames alive
        assert batch is not None
        with self._runtime.own_work():
            if batch.error is not None:
                homes = [update.chunk.homes[role] for role in update.needs if role is not Role.GRAD]
                update.corrupt = update.writes and any(home.tier is not Tier.NVME for home in homes)  # else: staging
                try:
                    raise batch.error
                finally:
                    self._close(update, failed=True)
            self._close(update, failed=False)
            self._runtime.events.updates.append((_label(update), update.began, batch.ended))
            if self.idle:
                self._traffic.executor.forget(self._owner())
            else:
                self.pump()

    def _close(self, update: ChunkUpdate, *, failed: bool) -> None:
        """Release all roles of `update` in reverse order, each of them whatever raises."""
        traffic, chunks = self._traffic, update.chunks
        roles = update.needs if failed else update.staged
        back: list[Callable[[], object]] = []
        for role, chunk in product(roles, chunks):
            if role in chunk.homes:
                back += (partial(self._close_role, update, chunk, role, failed=failed),)
        if failed and Role.COMPUTE in update.needs:
            back += [chunk.recast for chunk in chunks]  # parameters may be unchanged and their copies not
        if failed and update.detached and not update.corrupt:
            back += (partial(self._put, update),)  # no step would repeat it
        elif update.writes:
            renew = () if self._runtime.writes.handed_out else update.had_copies
            if self._of_ranks is not None and not failed:
                self._shared.append((chunks, renew))
            else:
                back += (partial(traffic.end_updates, chunks, renew=renew),)
        if update.writes and update.staged and not failed:
            back += (partial(traffic.write_back, [update.chunk.homes[role] for role in update.staged]),)
        back += (partial(update.done, update, not failed),)
        update.opened = {}
        call_all(iter(back))

    def _close_role(self, update: ChunkUpdate, chunk: Chunk, role: Role, *, failed: bool) -> None:
        """Release `role`; after a failure, drop what was half computed in staging, as its home is unchanged."""
        changed = update.writes and role is not Role.GRAD
        self._traffic.close_role(chunk, role, dirty=changed and not failed)
        if changed and failed:
            self._traffic.superseded(chunk, role)

    def _cannot_open(self, update: ChunkUpdate) -> CapacityError:
        names = ", ".join(role.name for role in update.needs)
        return CapacityError(
            f"no room in host staging for {names} of chunk {update.chunk.spec.index} together: raise Budget(host=…)"
        )


def numbers(chunks: Iterable[Chunk]) -> list[int]:
    """Return the numbers of `chunks`, the same on all ranks."""
    return [chunk.spec.index for chunk in chunks]


def _label(update: ChunkUpdate) -> str:
    first, last = update.chunk.spec.index, update.chunks[-1].spec.index
    return f"chunk {first}" if first == last else f"chunks {first} to {last}"
