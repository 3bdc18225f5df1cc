"""Updates on the device of chunks that live in host memory: states are brought there, updated, and sent home.

Here are slots on the device, the gradients that stay there until their update has read them, and the choice of chunks.
How a gradient gets here is `engine.gradients`'s.

Note "streamed": parameter and states of a chunk are copied into a slot, and its gradients into a place beside it if
they are not in one, and the kernel runs behind them on the same stream, so that compute waits for neither. When both
are over the place is free, and the results go home on the other stream; then a copy for operators is made from the
slot, where one was given up. Nothing of the chunk is read from home meanwhile: its block is suspended, as in any
update. A slot is free again when what it held is home, for whatever comes behind the compute that made that copy.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from hetmem.base.weak import weakly
from hetmem.engine.gradients import GradientSink, has_hooks_of_the_user
from hetmem.engine.runtime import Runtime
from hetmem.memory.chunk import Chunk, Memory, Role
from hetmem.memory.device import Device
from hetmem.optim.chunk_update import ChunkUpdate, DeviceWork, Opened, Slot
from hetmem.optim.options import Gradients, Rule
from hetmem.schedule.blocks import Link
from hetmem.schedule.gradients import wait_until
from hetmem.schedule.trace import Tier
from hetmem.schedule.update_split import SLOTS, Facts, Fitting, StreamedShare, Way
from hetmem.schedule.updates import DeviceUpdates, GradientPlaces

Groups = Mapping[int, dict[str, Any]]
"""The parameter groups of an optimizer, by the `id`s of the parameters that it updates."""


class KeptGradients(GradientPlaces[Chunk, Memory]):
    """The places on the device for gradients that stay there until their update has read them."""

    def __init__(self, sink: GradientSink) -> None:
        super().__init__()
        self._sink = sink

    def close(self) -> None:
        """Have no places; what is in them goes home first. Nothing may be borrowed."""
        for chunk in self.chunks:
            self.bring_home(chunk)
        self.give_up()

    def keep(self, chunk: Chunk) -> Memory:
        """Make a free place that of `chunk`, and return the memory of its gradients there."""
        return _of(chunk, self.take(chunk))

    def flat(self, chunk: Chunk, place: Memory) -> torch.Tensor:
        """Return the gradients of `chunk` in `place`, 1-D."""
        return chunk.over(Role.GRAD, _of(chunk, place))

    def read(self, chunk: Chunk) -> None:
        """End the life of gradients of `chunk`, which its update has read."""
        self._sink.retire(chunk, chunk.parameters)
        self.leave(chunk)

    def bring_home(self, chunk: Chunk) -> None:
        """Send the gradients of `chunk` to host memory; see `GradientSink.bring_home`."""
        self._sink.bring_home(chunk)
        self.leave(chunk)


def _of(chunk: Chunk, place: Memory) -> Memory:
    """The memory at the end of `place` that gradients of `chunk` take; what is before is another chunk's slot."""
    return place[len(place) - chunk.role_nbytes(Role.GRAD) :]


class StreamedUpdates(DeviceUpdates[Chunk, ChunkUpdate, Slot, Memory]):
    """The updates of one optimizer that run on the device, each in a slot. A chunk that cannot be brought is as it was.

    `to_host` takes an update whose slots were given back, `ended` is called after each one that is over.
    """

    def __init__(
        self, runtime: Runtime, kept: KeptGradients, to_host: Callable[[ChunkUpdate], None], ended: Callable[[], None]
    ) -> None:
        super().__init__(kept)
        self.kept: KeptGradients = kept
        self._runtime, self._traffic = runtime, runtime.traffic
        self._to_host, self._ended = to_host, ended
        self.sent_home_bytes = 0
        """All but gradients."""

    # ---- slots -------------------------------------------------------------------------------------------------

    @property
    def slot_bytes(self) -> int:
        """Bytes of each slot; 0 if there are none."""
        slots = [*self._free, *(update.slot for update in self._running)]
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
        """Give the memory of all slots back; what was queued for them goes to the host, gradients first."""
        self._closing = True
        try:
            while self._running:
                self._traffic.wait_for_one()
            self.kept.close()
        finally:
            self._closing = False
        self._leave_all_to_host()
        if self._free:  # wait for compute that reads them: the memory may be another stream's next
            self._traffic.engine.copy_now(Link.HOST_TO_DEVICE, lambda: None, 0)
        for slot in self._free:
            self._runtime.memory.give_device(slot.memory, slot.nbytes)
        self._free.clear()

    # ---- updates -----------------------------------------------------------------------------------------------

    def _chunk(self, update: ChunkUpdate) -> Chunk:
        return update.chunk

    def _is_ready(self, update: ChunkUpdate) -> bool:
        return not self._traffic.gradients.arriving(update.chunk)

    @property
    def _reads_gradients(self) -> bool:
        return any(Role.GRAD in update.there for update in self._running)

    def _leave_to_host(self, update: ChunkUpdate) -> None:
        self._to_host(update)

    def _wait_until(self, reached: Callable[[], bool]) -> bool:
        return wait_until(self._traffic.executor, reached)

    def place_for(self, chunk: Chunk) -> Memory | None:
        """Return memory here for gradients of `chunk` that are about to arrive, once an update has read others that are
        here; None if all places are those of chunks whose gradients have not all arrived."""
        return self.kept.keep(chunk) if self.find_place() else None

    def works_on(self, chunk: Chunk) -> bool:
        """Whether something of `chunk` is on the device for its update."""
        return any(update.chunk is chunk for update in self._running)

    @property
    def under_way(self) -> bool:
        """Whether anything has begun and is not over."""
        return bool(self._running)

    def all(self) -> Iterator[ChunkUpdate]:
        """Iterate over what is queued or under way."""
        yield from self._queue
        yield from self._running

    def take(self, which: Callable[[ChunkUpdate], bool]) -> list[ChunkUpdate]:
        """Take those of the queue out."""
        taken = [update for update in self._queue if which(update)]
        for update in taken:
            self._queue.remove(update)
        return taken

    def _begin(self, update: ChunkUpdate, slot: Slot) -> None:
        chunk = update.chunk
        update.slot = slot
        update.opened = {role: chunk.flat(role) for role in update.needs}
        update.there = slot.views(chunk, [role for role in update.needs if role != Role.GRAD])
        update.borrowed = borrowed = None if self.kept.holds(chunk) else self.kept.borrow()
        update.there[Role.GRAD] = update.opened[Role.GRAD] if borrowed is None else self.kept.flat(chunk, borrowed)
        self._running.append(update)
        assert update.on_device is not None
        try:
            compute = update.on_device(update)
        except BaseException:
            self._fail(update)
            raise
        not_brought = {Role.COMPUTE} if borrowed is not None else {Role.COMPUTE, Role.GRAD}
        brought = [role for role in update.needs if role not in not_brought]
        pairs = [(update.there[role], update.opened[role]) for role in brought]
        work = _Bring(self._runtime.memory.device, pairs, update.there, compute)
        nbytes = sum(chunk.role_nbytes(role) for role in brought)
        behind = list(slot.marks)
        if borrowed is None:
            behind.append(self._traffic.engine.mark())  # compute may still be writing gradients
        self._traffic.executor.copy_beside(
            Link.HOST_TO_DEVICE, work, nbytes, partial(weakly(self._brought), weakref.ref(update)), behind
        )

    def _brought(self, brought: weakref.ref[ChunkUpdate], error: BaseException | None) -> None:
        """All of it is on the device, and updated."""
        update = brought()
        assert update is not None, "it is among those that run"
        if error is not None:
            self._fail(update)
            raise error
        self._have_read(update)
        chunk, roles = update.chunk, [role for role in update.needs if role != Role.GRAD]
        work = _SendHome([(update.opened[role], update.there[role]) for role in roles])
        nbytes = sum(chunk.role_nbytes(role) for role in roles)
        self.sent_home_bytes += nbytes
        self._traffic.executor.copy_beside(
            Link.DEVICE_TO_HOST, work, nbytes, partial(weakly(self._home), weakref.ref(update), work, nbytes)
        )

    def _have_read(self, update: ChunkUpdate) -> None:
        """Free the place of its gradients, which no stream reads any more."""
        del update.there[Role.GRAD]
        if update.borrowed is not None:
            self.kept.put_back(update.borrowed)
        else:
            with self._runtime.unwatched(), torch.no_grad():
                self.kept.read(update.chunk)

    def _home(
        self, sent: weakref.ref[ChunkUpdate], work: Callable[[], None], nbytes: int, error: BaseException | None
    ) -> None:
        """All of it is at home again. What did not get there is sent once more: the slot still holds it."""
        update = sent()
        assert update is not None, "it is among those that run"
        if error is not None:
            try:
                self._traffic.engine.copy_now(Link.DEVICE_TO_HOST, work, nbytes)
            except BaseException as again:  # a device that fails twice is lost, with everything on it
                update.ruined = True
                self._fail(update)
                raise again from RuntimeError("what the device has updated is not all at home: load a checkpoint")
        self._over(update, done=True)
        self._ended()

    def _fail(self, update: ChunkUpdate) -> None:
        """End what was not brought to the device: its home is as it was. What is owed is queued again."""
        again = update.owed and not update.ruined
        self._over(update, done=False, again=again)
        if again:
            self._queue.append(update)

    def _over(self, update: ChunkUpdate, *, done: bool, again: bool = False) -> None:
        slot, there, chunk = update.slot, update.there, update.chunk
        assert slot is not None
        with self._runtime.unwatched(), torch.no_grad():
            if not again:
                near = there[chunk.operand] if done else None
                self._traffic.end_update(chunk, renew=update.had_copy, near=near)
            slot.marks = [self._traffic.engine.mark()]
            self._running.remove(update)
            if update.borrowed is not None and Role.GRAD in there:
                self.kept.put_back(update.borrowed)
            self._free.append(slot)
            update.opened, update.there, update.slot, update.borrowed = {}, {}, None, None
            update.done(update, done)


class _Bring:
    """One transfer: homes to a slot, and the update there behind it. Holds the memory until both are over."""

    def __init__(
        self, device: Device, pairs: list[tuple[torch.Tensor, torch.Tensor]], there: Opened, update: DeviceWork
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


class UpdatePlaces:
    """The choice for one optimizer's chunks on one runtime: all at home without a `HardwareProfile` of the machine.

    With a store on NVMe all stays where its home is: such a step waits for the drive, wherever it updates, and updates
    on the host read it through staging.
    """

    def __init__(
        self, runtime: Runtime, rule: Rule, updates: StreamedUpdates, sink: GradientSink, gradients: Gradients
    ) -> None:
        self._runtime, self._rule, self._updates, self._sink = runtime, rule, updates, sink
        self._gradients_stay = gradients is Gradients.STREAMED
        self.share: StreamedShare | None = None

    def choose(self, groups: Callable[[], Groups]) -> None:
        """Look at the step so far."""
        runtime = self._runtime
        if runtime.hardware is None or not runtime.tracer.knows_a_backward() or not self._rule.has_kernel:
            return
        if runtime.memory.resident or runtime.memory.store is not None:
            return
        if self.share is None:
            self.share = StreamedShare(runtime.hardware, self._updates)
        sent = runtime.traffic.engine.links()[Link.DEVICE_TO_HOST].bytes - self._updates.sent_home_bytes
        sent += self._sink.stayed_bytes  # as if they had been sent: that is what the choice is about
        self.share.look(sent, runtime.memory.moved_bytes, lambda: self._facts(groups()))

    def same_on_device(self, groups: Groups) -> set[int]:
        """Return the `id`s of the parameters whose update has the same bits with their homes on the device."""
        if not self._rule.runs_on_device:
            return set()
        owned = [managed for managed in self._runtime.parameters if id(managed.parameter) in groups]
        if self._runtime.memory.device.torch_device.type != "cpu":  # else the host updates there too
            owned = [managed for managed in owned if self._equals_host(managed.chunk)]
        return {id(managed.parameter) for managed in owned}

    def way_of(self, update: ChunkUpdate) -> Way:
        """Where `update` runs."""
        if update.chunk.homes[Role.PARAM].tier is Tier.DEVICE:
            return Way.RESIDENT
        return Way.STREAMED if self._streams(update) else Way.HOST

    def place_on_device(self, chunk: Chunk) -> Memory | None:
        """Return memory for gradients of `chunk` that its update alone will see; see `GradientListener`."""
        hooked = any(has_hooks_of_the_user(managed.parameter) for managed in chunk.parameters)
        return self._updates.place_for(chunk) if self._comes_there(chunk) and not hooked else None

    def _streams(self, update: ChunkUpdate) -> bool:
        whole = len(update.parts) == len(update.chunk.parameters)
        return whole and all(part.at_home for part in update.parts) and self._comes_there(update.chunk)

    def _comes_there(self, chunk: Chunk) -> bool:
        """Whether updates of the whole of `chunk` are made on the device, with its states brought there."""
        if self.share is None or chunk.spec.index not in self.share.chosen or not self._updates.slot_bytes:
            return False
        return _in_host_memory(chunk)

    # ---- facts -------------------------------------------------------------------------------------------------

    def _facts(self, groups: Groups) -> Facts:
        chunks = self._runtime.chunks
        fitting = [chunk for chunk in chunks if self._fits(chunk, groups)]
        copy_bytes = fitting[0].compute_dtype.itemsize if fitting else 0
        return Facts(
            [Fitting(chunk.spec.index, chunk.numel, _bytes_there(chunk)) for chunk in fitting],
            sum(chunk.numel for chunk in chunks if chunk.moved),
            copy_bytes,
            copy_bytes if fitting and Role.COMPUTE in fitting[0].homes else 0,
            self._gradients_stay,
        )

    def _fits(self, chunk: Chunk, groups: Groups) -> bool:
        """Whether all of `chunk` can be updated on the device: float32, its homes in host memory."""
        if chunk.dtype is not torch.float32 or not any(role.is_state for role in chunk.homes):
            return False
        if not _in_host_memory(chunk):
            return False
        if not all(m.parameter.requires_grad and id(m.parameter) in groups for m in chunk.parameters):
            return False
        return self._equals_host(chunk)

    def _equals_host(self, chunk: Chunk) -> bool:
        copy_dtype = chunk.compute_dtype if Role.COMPUTE in chunk.homes else None
        return self._rule.equals_host(self._runtime.memory.device.torch_device, chunk.dtype, copy_dtype)


def _bytes_there(chunk: Chunk) -> int:
    """Bytes that an update of `chunk` may need on the device, gradients in all their bits."""
    others = sum(chunk.role_nbytes(role) for role in chunk.homes if role != Role.GRAD)
    return others + chunk.numel * chunk.dtype.itemsize


def _in_host_memory(chunk: Chunk) -> bool:
    """Whether all homes of `chunk` are there, but for gradients, which may be kept on the device."""
    return all(home.tier is Tier.HOST for role, home in chunk.homes.items() if role != Role.GRAD)
