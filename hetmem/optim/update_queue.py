"""Updates of chunks by the workers of the host: what `schedule.updates` decides, carried out on threads.

Everything but the tiles happens on the thread that trains, in `pump`; what a tile computes is the job's own.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from functools import partial

import torch

from hetmem.cpu.workers import Batch, WorkerPool
from hetmem.engine.build import recast_all
from hetmem.engine.events import Span
from hetmem.engine.runtime import Runtime
from hetmem.errors import CapacityError
from hetmem.memory.chunk import Chunk, Role
from hetmem.memory.tensor_views import without_graph
from hetmem.optim.device_gradients import KeptGradients
from hetmem.optim.device_updates import StreamedUpdates
from hetmem.optim.progress import Job
from hetmem.optim.rule import HalfComputedError
from hetmem.schedule.trace import Tier
from hetmem.schedule.updates import HostUpdates


class Updates(HostUpdates[Job]):
    """The jobs of one optimizer on one runtime. An error leaves a chunk as it was or updated, or says what is left."""

    def __init__(self, runtime: Runtime, workers: WorkerPool, kept: KeptGradients) -> None:
        super().__init__(lambda job: job.chunk.spec.index)
        self._runtime, self._traffic, self._workers = runtime, runtime.traffic, workers
        self.streamed: StreamedUpdates = StreamedUpdates(runtime, kept, self._queue.add, self._go_on)

    def add(self, job: Job) -> None:
        """Queue `job`."""
        if job.writes:
            job.had_copy = self._traffic.begin_update(job.chunk, keep_copy=job.keeps_copy)
        if job.streamed is None:
            self._queue.add(job)
        else:
            self.streamed.add(job)
        self._traffic.executor.keep(self)

    def _carry_out(self, command: Callable[[], None]) -> None:
        with self._runtime.unwatched(), without_graph():
            command()

    def finish(self) -> None:
        """Carry everything out, and lend a hand. Raises the error of a transfer or of a task; what could not be begun
        because of it stays queued."""
        stuck: Job | None = None
        while not self.idle:
            self.streamed.give_way()
            self.pump()
            if self._running:
                batch = self._running[0].batch
                assert batch is not None
                while batch.run_one():
                    self._traffic.executor.poll()  # what has come meanwhile makes room for more
            if self._traffic.executor.busy():
                self._traffic.wait_for_one()
            elif self._opening and not self._traffic.executor.make_way(self):
                if self._opening[0] is stuck:
                    raise self._cannot_open(stuck)
                stuck = self._opening[0]
                self.give_way()  # a read of it failed earlier: once more

    def wait_for(self, chunk: Chunk) -> None:
        """Nothing computes with `chunk`; what is queued stays so."""
        while any(job.chunk is chunk for job in self._running) or self.streamed.works_on(chunk):
            self._traffic.wait_for_one()

    def forget(self, chunk: Chunk) -> None:
        """Nothing that is queued of `chunk` is carried out."""
        for job in [job for job in self._queue if job.chunk is chunk]:
            self._dismiss(self._queue.take(job))
        self.streamed.forget(chunk)

    def hasten(self, chunk: Chunk) -> None:
        """Somebody waits for `chunk`: if it is queued it is next."""
        self._queue.hasten(chunk.spec.index)

    def close(self) -> None:
        """Carry everything out, or forget it where that fails, and end the threads; later work starts new ones."""
        try:
            self.finish()
        except BaseException:
            self.cancel(owed=True)
            raise
        self._workers.close()

    def owe(self) -> None:
        """The step that asked for what is queued or under way has ended."""
        for job in (*self._queue, *self._opening, *self._running, *self.streamed.jobs()):
            job.owed = True

    def cancel(self, *, owed: bool = False) -> None:
        """Forget what was not begun, what steps before this one owe only if `owed`, and wait for what was; errors are
        dropped, as one is on its way already."""
        self.give_way()
        self.streamed.cancel(owed=owed)
        stay = []
        while self._queue:
            job = self._queue.pop()
            if job.owed and not owed:
                stay.append(job)
            else:
                self._dismiss(job)
        while self._running:
            with contextlib.suppress(Exception):
                self._traffic.wait_for_one()
        for job in stay:
            self._queue.add(job)
        if self.idle:
            self._traffic.executor.forget(self)
        else:
            self._traffic.executor.keep(self)

    def _dismiss(self, job: Job) -> None:
        if job.writes:
            self._traffic.end_update(job.chunk)
        job.done(False)

    def _is_free(self, job: Job) -> bool:
        """Whether nothing else is under way with the chunk of `job`."""
        under_way = any(other.chunk is job.chunk for other in (*self._opening, *self._running))
        return not under_way and not self._traffic.gradients.arriving(job.chunk)

    def _has_places(self, job: Job) -> bool:
        return all(self._traffic.role_has_place(job.chunk, role) for role in job.roles)

    def _ask(self, job: Job) -> None:
        asked: list[Role] = []
        try:
            for role, load in job.roles.items():
                self._traffic.ask_role(job.chunk, role, load=load)
                asked.append(role)
        except BaseException:
            for role in asked:
                self._traffic.unask_role(job.chunk, role)
            raise

    def _unask(self, job: Job) -> None:
        for role in job.roles:
            self._traffic.unask_role(job.chunk, role)

    def _is_open(self, job: Job) -> bool:
        return all(self._traffic.role_is_there(job.chunk, role) for role in job.roles)

    def _run(self, job: Job) -> None:
        job.opened = {role: self._traffic.asked_role(job.chunk, role) for role in job.roles}
        try:
            job.copy = self._traffic.hold_copy(job.chunk) if job.keeps_copy else None
            tasks = job.tasks(job)
        except BaseException:
            self._close(job, failed=True)
            raise
        self._running.append(job)
        ended = self._traffic.executor.expect_job(partial(self._ended, job))
        job.began = time.perf_counter()
        job.batch = self._workers.begin([tasks[place] for place in job.left.places] or tasks, after=ended)

    def _ended(self, job: Job) -> None:
        self._running.remove(job)
        assert job.batch is not None
        try:
            if job.batch.error is not None:
                self._once_more(job.batch, job.batch.error)
        except BaseException as error:
            self._note_left(job, job.batch, error)
            self._close(job, failed=True)
            raise
        job.left.clear()
        self._close(job, failed=False)
        self._runtime.events.updates.append(Span(f"chunk {job.chunk.spec.index}", job.began, job.batch.ended))
        self._go_on()

    def _go_on(self) -> None:
        if self.idle:
            self._traffic.executor.forget(self)
        self.pump()

    @staticmethod
    def _once_more(batch: Batch, error: BaseException) -> None:
        """Tiles that failed (no memory for a temporary, say) run again, alone: the others have been computed, so that
        the chunk must not be left as it is."""
        again: BaseException | None = None
        for place, task in list(batch.failed.items()):
            try:
                with torch.inference_mode(False), torch.no_grad():
                    task()
                del batch.failed[place]
            except BaseException as caught:  # noqa: PERF203 - each may fail, and what is done need not be done again
                again = caught if again is None or isinstance(caught, HalfComputedError) else again
        if again is not None:
            raise error from again

    @staticmethod
    def _note_left(job: Job, batch: Batch, error: BaseException) -> None:
        """What has failed twice is left for a repetition, unless nothing else has changed a home."""
        in_place = any(job.chunk.homes[role].tier is not Tier.NVME for role in job.roles if role is not Role.GRAD)
        places, ruined = job.left.places, isinstance(error.__cause__, HalfComputedError)
        if places:
            places[:] = [places[place] for place in sorted(batch.failed)]
        elif job.writes and in_place and (ruined or len(batch.failed) < batch.tasks):
            places[:] = sorted(batch.failed)
        job.left.ruined |= ruined and bool(places)

    def _close(self, job: Job, *, failed: bool) -> None:
        """Give everything back, the last thing first, and all of it whatever raises: somebody waits for each."""
        traffic, chunk = self._traffic, job.chunk
        with self._runtime.unwatched(), without_graph(), contextlib.ExitStack() as back:
            back.callback(job.done, not failed)
            if job.writes and not failed:
                back.callback(traffic.write_back, [chunk.homes[role] for role in job.roles])
            if failed and job.owed and not job.left.ruined:
                if job.left.places:
                    job.roles = dict.fromkeys(job.roles, True)
                back.callback(self._queue.add, job)  # nobody else would ask for it again
            elif job.writes:
                back.callback(traffic.end_update, chunk, renew=job.had_copy and not job.keeps_copy)
            if failed and Role.COMPUTE in job.roles:
                back.callback(recast_all, chunk)  # parameters may be what they were, and their copies not
            for role in reversed(job.roles):
                back.callback(self._close_role, job, role, failed=failed)
            if job.copy is not None:
                back.callback(traffic.let_go_of_copy, chunk)
            job.opened, job.copy = {}, None

    def _close_role(self, job: Job, role: Role, *, failed: bool) -> None:
        """What was half computed in staging is dropped: its home is as it was. Beside homes that were changed in place
        it is kept."""
        changed = job.writes and role is not Role.GRAD
        self._traffic.close_role(job.chunk, role, dirty=changed and (not failed or bool(job.left.places)))
        if changed and failed:
            self._traffic.superseded(job.chunk, role)

    def _cannot_open(self, job: Job) -> CapacityError:
        """Nothing is under way that could make room for `job`."""
        names = ", ".join(role.name for role in job.roles)
        return CapacityError(
            f"no room in host staging for {names} of chunk {job.chunk.spec.index} together: raise Budget(host=…)"
        )
