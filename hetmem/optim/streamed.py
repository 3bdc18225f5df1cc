"""Updates on the device of chunks that live in host memory: states are brought there, updated, and sent home.

It knows jobs, slots on the device and the two directions of the link; which chunks come here is `places`'s.

Note "streamed": parameter, gradient and states of a chunk are copied into a slot, and the kernel runs behind them on
the same stream, so that compute waits for neither. When both are over the results go home on the other stream, and
then a copy for operators is made from the slot, where one was given up. Nothing of the chunk is read from home
meanwhile: its block is suspended, as in any update. A slot is free again when what it held is home, for whatever comes
behind the compute that made that copy.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from hetmem.memory.chunk import Chunk, ManagedParameter, Role
from hetmem.memory.device import Device
from hetmem.memory.views import Memory
from hetmem.optim.rule import Streamed
from hetmem.plan.links import Link
from hetmem.plan.streaming import SLOTS
from hetmem.runtime.runtime import Runtime

if TYPE_CHECKING:
    from hetmem.optim.updates import Job, Opened

Updated = list[tuple[ManagedParameter, Streamed]]


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
    updated: Updated


class StreamedUpdates:
    """Those jobs of one optimizer that run on the device, each in a slot. A chunk that cannot be brought is as it was.

    `to_host` takes a job whose slots were given back, `ended` is called after each one that is over.
    """

    def __init__(self, runtime: Runtime, to_host: Callable[[Job], None], ended: Callable[[], None]) -> None:
        self._runtime, self._traffic = runtime, runtime.traffic
        self._to_host, self._ended = to_host, ended
        self._queue: deque[Job] = deque()
        self._running: list[_UnderWay] = []
        self._free: list[Slot] = []
        self.sent_home_bytes = 0

    # ---- slots -------------------------------------------------------------------------------------------------

    @property
    def slot_bytes(self) -> int:
        """Of each slot; 0 if there are none."""
        slots = [*self._free, *(one.slot for one in self._running)]
        return slots[0].nbytes if slots else 0

    def idle_bytes(self) -> int:
        """See `plan.share`; what slots take is not idle."""
        return self._runtime.memory.idle_bytes(self._runtime.non_model_peak_bytes)

    def take_slots(self, nbytes: int) -> bool:
        """Have slots of `nbytes` each, where there are none; False if the device's allocator has no memory."""
        if self.slot_bytes >= nbytes:
            return True
        self.give_slots_back()
        memory = self._runtime.memory
        with self._runtime.moving_homes():
            try:
                for _ in range(SLOTS):
                    slot = Slot(memory.take_device(nbytes), nbytes)
                    slot.marks.append(self._traffic.engine.mark())  # compute may still be zeroing it
                    self._free.append(slot)
            except torch.OutOfMemoryError:
                self.give_slots_back()
                return False
        return True

    def give_slots_back(self) -> None:
        """The memory of all slots is the device's again; what was queued for them goes to the host."""
        while self._queue:
            self._to_host(self._queue.popleft())
        while self._running:
            self._traffic.wait_for_one()
        if self._free:  # wait for compute that reads them: the memory may be another stream's next
            self._traffic.engine.copy_now(Link.HOST_TO_DEVICE, _nothing, 0)
        for slot in self._free:
            self._runtime.memory.give_device(slot.memory, slot.nbytes)
        self._free.clear()

    # ---- jobs --------------------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Whether nothing is queued or under way."""
        return not (self._queue or self._running)

    def add(self, job: Job) -> None:
        """Queue `job`, of a chunk all of whose roles have homes in host memory."""
        self._queue.append(job)

    def works_on(self, chunk: Chunk) -> bool:
        """Whether something of `chunk` is on the device for its update."""
        return any(one.job.chunk is chunk for one in self._running)

    def pump(self) -> None:
        """Begin what has a slot."""
        while self._queue and self._free and not self._traffic.gradients.arriving(self._queue[0].chunk):
            self._begin(self._queue.popleft(), self._free.pop())

    def cancel(self) -> None:
        """Forget what was not begun, and wait for what was; errors are dropped, as one is on its way already."""
        while self._queue:
            job = self._queue.popleft()
            self._traffic.end_update(job.chunk)
            job.done(False)
        while self._running:
            with contextlib.suppress(Exception):
                self._traffic.wait_for_one()

    def _begin(self, job: Job, slot: Slot) -> None:
        chunk = job.chunk
        job.began = time.perf_counter()
        job.opened = {role: chunk.flat(role) for role in job.roles}
        one = _UnderWay(job, slot, slot.views(chunk, list(job.roles)), [])
        self._running.append(one)
        assert job.streamed is not None
        try:
            one.updated = job.streamed(job)
        except BaseException:
            self._fail(one)
            raise
        brought = [role for role in job.roles if role != Role.COMPUTE]
        work = _Bring(
            self._runtime.memory.device,
            [(one.there[role], job.opened[role]) for role in brought],
            one.there,
            one.updated,
        )
        nbytes = sum(chunk.role_nbytes(role) for role in brought)
        self._traffic.pending.copy_beside(Link.HOST_TO_DEVICE, work, nbytes, partial(self._brought, one), slot.marks)

    def _brought(self, one: _UnderWay, error: BaseException | None) -> None:
        """All of it is on the device, and updated."""
        if error is not None:
            self._fail(one)
            raise error
        chunk, roles = one.job.chunk, [role for role in one.job.roles if role != Role.GRAD]
        work = _SendHome([(one.job.opened[role], one.there[role]) for role in roles])
        nbytes = sum(chunk.role_nbytes(role) for role in roles)
        self.sent_home_bytes += nbytes
        self._traffic.pending.copy_beside(Link.DEVICE_TO_HOST, work, nbytes, partial(self._home, one, work, nbytes))

    def _home(self, one: _UnderWay, work: Callable[[], None], nbytes: int, error: BaseException | None) -> None:
        """All of it is at home again. What did not get there is sent once more: the slot still holds it."""
        if error is not None:
            try:
                self._traffic.engine.copy_now(Link.DEVICE_TO_HOST, work, nbytes)
            except BaseException:  # a device that fails twice is lost, with everything on it
                self._fail(one)
                raise
        chunk = one.job.chunk
        with self._runtime.unwatched(), torch.no_grad():
            self._traffic.end_update(chunk, renew=one.job.had_copy, near=one.there[chunk.operand])
            one.slot.marks = [self._traffic.engine.mark()]
            self._over(one)
            one.job.done(True)
        self._ended()

    def _fail(self, one: _UnderWay) -> None:
        """`one` was not brought to the device: its home is as it was."""
        with self._runtime.unwatched(), torch.no_grad():
            for _, streamed in one.updated:
                streamed.undo()
            self._traffic.end_update(one.job.chunk, renew=one.job.had_copy)
            one.slot.marks = [self._traffic.engine.mark()]
            self._over(one)
            one.job.done(False)

    def _over(self, one: _UnderWay) -> None:
        self._running.remove(one)
        self._free.append(one.slot)
        one.job.opened = {}


def _nothing() -> None:
    """Only what comes before it is waited for."""


class _Bring:
    """One transfer: homes to a slot, and the update there behind it. Holds the memory until both are over."""

    def __init__(
        self, device: Device, pairs: list[tuple[torch.Tensor, torch.Tensor]], there: Opened, updated: Updated
    ) -> None:
        self._device, self._pairs, self.there, self._updated = device, pairs, there, updated

    def __call__(self) -> None:
        with torch.inference_mode(False), torch.no_grad():  # on whatever thread
            for target, source in self._pairs:
                self._device.copy_in(target, source)
            for managed, streamed in self._updated:
                streamed.there({role.name: managed.part(flat) for role, flat in self.there.items()})


class _SendHome:
    """The transfer back."""

    def __init__(self, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._pairs = pairs

    def __call__(self) -> None:
        with torch.inference_mode(False), torch.no_grad():
            for target, source in self._pairs:
                target.copy_(source, non_blocking=True)
