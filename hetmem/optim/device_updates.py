"""Updates on the device of chunks that live in host memory: states are brought there, updated, and sent home.

It knows jobs, slots on the device and the two directions of the link; which chunks come here is
`update_placement`'s, and which gradients are here already `device_gradients`'s.

Note "streamed": parameter and states of a chunk are copied into a slot, and its gradients into a place beside it if
they are not in one, and the kernel runs behind them on the same stream, so that compute waits for neither. When both
are over the place is free, and the results go home on the other stream; then a copy for operators is made from the
slot, where one was given up. Nothing of the chunk is read from home meanwhile: its block is suspended, as in any
update. A slot is free again when what it held is home, for whatever comes behind the compute that made that copy.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from hetmem.engine.runtime import Runtime
from hetmem.memory.chunk import Chunk, Role
from hetmem.memory.device import Device
from hetmem.memory.tensor_views import Memory
from hetmem.optim.device_gradients import KeptGradients
from hetmem.optim.progress import Job, Opened, Update
from hetmem.optim.rule import HalfComputedError
from hetmem.schedule.blocks import Link
from hetmem.schedule.update_split import SLOTS
from hetmem.schedule.updates import DeviceUpdates


@dataclass(slots=True, eq=False)
class Slot:
    """Memory of the device for one chunk; `marks` are of the compute that last read it."""

    memory: Memory
    nbytes: int
    marks: list[Any] = field(default_factory=list)

    def views(self, chunk: Chunk, roles: Sequence[Role]) -> Opened:
        """Flat tensors over `roles` of `chunk`, one behind the other."""
        found, at = {}, 0
        for role in roles:
            found[role] = chunk.over(role, self.memory[at : at + chunk.role_nbytes(role)])
            at += chunk.role_nbytes(role)
        return found


@dataclass(slots=True, eq=False)
class _UnderWay:
    job: Job
    slot: Slot
    there: Opened
    borrowed: Memory | None
    """Where its gradients are brought to, as long as they are needed; None if they are there."""

    @property
    def reads_gradients(self) -> bool:
        """Whether the kernel is not over."""
        return Role.GRAD in self.there


class StreamedUpdates(DeviceUpdates[Chunk, Job, Slot, Memory]):
    """Those jobs of one optimizer that run on the device, each in a slot. A chunk that cannot be brought is as it was.

    `to_host` takes a job whose slots were given back, `ended` is called after each one that is over.
    """

    def __init__(
        self, runtime: Runtime, kept: KeptGradients, to_host: Callable[[Job], None], ended: Callable[[], None]
    ) -> None:
        super().__init__(kept)
        self.kept: KeptGradients = kept
        self._runtime, self._traffic = runtime, runtime.traffic
        self._to_host, self._ended = to_host, ended
        self._running: list[_UnderWay] = []
        self.sent_home_bytes = 0
        """All but gradients."""

    # ---- slots -------------------------------------------------------------------------------------------------

    @property
    def slot_bytes(self) -> int:
        """Of each slot; 0 if there are none."""
        slots = [*self._free, *(one.slot for one in self._running)]
        return slots[0].nbytes if slots else 0

    def idle_bytes(self) -> int:
        """See `schedule.update_split`; what slots take is not idle."""
        return self._runtime.memory.idle_bytes(self._runtime.room.non_model_peak_bytes)

    def take_slots(self, nbytes: int) -> bool:
        """Have slots of `nbytes` each, where there are none; False if the device's allocator has no memory."""
        if self.slot_bytes >= nbytes:
            return True
        self.give_slots_back()
        memory = self._runtime.memory
        with self._runtime.room.moving_homes():
            try:
                for _ in range(SLOTS):
                    slot = Slot(memory.take_device(nbytes), nbytes)
                    slot.marks.append(self._traffic.engine.mark())  # compute may still be zeroing it
                    self._free.append(slot)
                    self.kept.open([slot.memory])
            except torch.OutOfMemoryError:
                self.give_slots_back()
                return False
        return True

    def give_slots_back(self) -> None:
        """The memory of all slots is the device's again; what was queued for them goes to the host, gradients first."""
        self._closing = True
        try:
            while self._running:
                self._traffic.wait_for_one()
            self.kept.close()
        finally:
            self._closing = False
        self._leave_all_to_host()
        if self._free:  # wait for compute that reads them: the memory may be another stream's next
            self._traffic.engine.copy_now(Link.HOST_TO_DEVICE, _nothing, 0)
        for slot in self._free:
            self._runtime.memory.give_device(slot.memory, slot.nbytes)
        self._free.clear()

    # ---- jobs --------------------------------------------------------------------------------------------------

    def _chunk(self, job: Job) -> Chunk:
        return job.chunk

    def _is_ready(self, job: Job) -> bool:
        return not self._traffic.gradients.arriving(job.chunk)

    @property
    def _reads_gradients(self) -> bool:
        return any(one.reads_gradients for one in self._running)

    def _leave_to_host(self, job: Job) -> None:
        self._to_host(job)

    def _wait(self) -> bool:
        return self._traffic.executor.go_on()

    def place_for(self, chunk: Chunk) -> Memory | None:
        """Memory here for gradients of `chunk` that are about to arrive; waits for an update to have read those of
        another one. None if all places are those of chunks whose gradients have not all arrived."""
        return self.kept.keep(chunk) if self.find_place() else None

    def works_on(self, chunk: Chunk) -> bool:
        """Whether something of `chunk` is on the device for its update."""
        return any(one.job.chunk is chunk for one in self._running)

    def jobs(self) -> Iterator[Job]:
        """What is queued or under way."""
        yield from self._queue
        yield from (one.job for one in self._running)

    def forget(self, chunk: Chunk) -> None:
        """Nothing that is queued of `chunk`, whose gradients were to come to host memory, is carried out."""
        for job in [job for job in self._queue if job.chunk is chunk]:
            self._queue.remove(job)
            self._dismiss(job)

    def cancel(self, *, owed: bool) -> None:
        """As `Updates.cancel`."""
        for job in [job for job in self._queue if owed or not job.owed]:
            self._queue.remove(job)
            self._dismiss(job)
        while self._running:
            with contextlib.suppress(Exception):
                self._traffic.wait_for_one()

    def _dismiss(self, job: Job) -> None:
        self._traffic.end_update(job.chunk)
        job.done(False)

    def _begin(self, job: Job, slot: Slot) -> None:
        chunk = job.chunk
        job.began = time.perf_counter()
        job.opened = {role: chunk.flat(role) for role in job.roles}
        there = slot.views(chunk, [role for role in job.roles if role != Role.GRAD])
        borrowed = None if self.kept.holds(chunk) else self.kept.borrow()
        there[Role.GRAD] = job.opened[Role.GRAD] if borrowed is None else self.kept.flat(chunk, borrowed)
        one = _UnderWay(job, slot, there, borrowed)
        self._running.append(one)
        assert job.streamed is not None
        try:
            update = job.streamed(job)
        except BaseException:
            self._fail(one)
            raise
        not_brought = {Role.COMPUTE} if borrowed is not None else {Role.COMPUTE, Role.GRAD}
        brought = [role for role in job.roles if role not in not_brought]
        work = _Bring(
            self._runtime.memory.device,
            [(one.there[role], job.opened[role]) for role in brought],
            one.there,
            update,
        )
        nbytes = sum(chunk.role_nbytes(role) for role in brought)
        behind = list(slot.marks)
        if borrowed is None:
            behind.append(self._traffic.engine.mark())  # compute may still be writing gradients
        self._traffic.executor.copy_beside(Link.HOST_TO_DEVICE, work, nbytes, partial(self._brought, one), behind)

    def _brought(self, one: _UnderWay, error: BaseException | None) -> None:
        """All of it is on the device, and updated."""
        if error is not None:
            self._fail(one)
            raise error
        self._have_read(one)
        chunk, roles = one.job.chunk, [role for role in one.job.roles if role != Role.GRAD]
        work = _SendHome([(one.job.opened[role], one.there[role]) for role in roles])
        nbytes = sum(chunk.role_nbytes(role) for role in roles)
        self.sent_home_bytes += nbytes
        self._traffic.executor.copy_beside(Link.DEVICE_TO_HOST, work, nbytes, partial(self._home, one, work, nbytes))

    def _have_read(self, one: _UnderWay) -> None:
        """The place of its gradients is free for others, which no stream reads any more."""
        del one.there[Role.GRAD]
        if one.borrowed is not None:
            self.kept.put_back(one.borrowed)
        else:
            with self._runtime.unwatched(), torch.no_grad():
                self.kept.read(one.job.chunk)

    def _home(self, one: _UnderWay, work: Callable[[], None], nbytes: int, error: BaseException | None) -> None:
        """All of it is at home again. What did not get there is sent once more: the slot still holds it."""
        if error is not None:
            try:
                self._traffic.engine.copy_now(Link.DEVICE_TO_HOST, work, nbytes)
            except BaseException as again:  # a device that fails twice is lost, with everything on it
                one.job.left.places[:], one.job.left.ruined = [0], True
                self._fail(one)
                raise again from HalfComputedError("what the device has updated is not all at home: load a checkpoint")
        chunk = one.job.chunk
        with self._runtime.unwatched(), torch.no_grad():
            self._traffic.end_update(chunk, renew=one.job.had_copy, near=one.there[chunk.operand])
            one.slot.marks = [self._traffic.engine.mark()]
            self._over(one)
            one.job.done(True)
        self._ended()

    def _fail(self, one: _UnderWay) -> None:
        """`one` was not brought to the device: its home is as it was. Nobody else would ask again for what is owed."""
        job = one.job
        with self._runtime.unwatched(), torch.no_grad():
            again = job.owed and not job.left.ruined
            if not again:
                self._traffic.end_update(job.chunk, renew=job.had_copy)
            one.slot.marks = [self._traffic.engine.mark()]
            self._over(one)
            job.done(False)
            if again:
                self._queue.append(job)

    def _over(self, one: _UnderWay) -> None:
        self._running.remove(one)
        if one.borrowed is not None and one.reads_gradients:
            self.kept.put_back(one.borrowed)
        self._free.append(one.slot)
        one.job.opened = {}


def _nothing() -> None:
    """Only what comes before it is waited for."""


class _Bring:
    """One transfer: homes to a slot, and the update there behind it. Holds the memory until both are over."""

    def __init__(
        self, device: Device, pairs: list[tuple[torch.Tensor, torch.Tensor]], there: Opened, update: Update
    ) -> None:
        self._device, self._pairs, self.there, self._update = device, pairs, there, update

    def __call__(self) -> None:
        with torch.inference_mode(False), torch.no_grad():  # on whatever thread
            for target, source in self._pairs:
                self._device.copy_in(target, source)
            self._update(self.there)


class _SendHome:
    """The transfer back."""

    def __init__(self, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._pairs = pairs

    def __call__(self) -> None:
        with torch.inference_mode(False), torch.no_grad():
            for target, source in self._pairs:
                target.copy_(source, non_blocking=True)
