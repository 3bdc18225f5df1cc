"""Moves homes to idle device memory, and back when something else needs it.

`schedule.placement` decides how much is idle and which chunks move. A chunk moves with all its roles: then its
gradients stay on the device, its update runs there, and its copy is a cast there. The former memory of each home stays
reserved. A model that was whole on the device becomes, once that memory is needed, one whose homes have all moved
there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from hetmem.base.weak import weakly
from hetmem.engine.gradient_views import is_consumed, is_home_gradient, move_gradient
from hetmem.engine.gradients import GradientSink
from hetmem.engine.param_views import is_shared, storage_references
from hetmem.engine.runtime import Runtime
from hetmem.engine.ways_back import borrow_ways_back, end_way_back, open_way_back
from hetmem.errors import ManageError
from hetmem.memory.chunk import Chunk, ManagedParameter, RawMemory, Role, elements
from hetmem.schedule.blocks import Link
from hetmem.schedule.placement import Candidate, choose
from hetmem.schedule.trace import Tier


class ResidentShare:
    """The homes of one runtime that have moved to the device."""

    def __init__(self, runtime: Runtime, sink: GradientSink, left_device: Callable[[], None]) -> None:
        self._runtime, self._sink = runtime, sink
        self._moved: list[Chunk] = []
        self._idle_seen = -1
        self._left_device = left_device
        runtime.room.give_way = weakly(self.shrink)

    def grow(self) -> None:
        """Fill idle device memory, between a backward and the updates of a step.

        Nothing moves before a whole step is traced, nor a chunk of which the program holds a view (a `state_dict`),
        which would show old values afterwards.
        """
        runtime, memory = self._runtime, self._runtime.memory
        if memory.resident or memory.ranks is not None or not runtime.tracer.knows_a_backward():
            return
        idle = memory.idle_bytes(runtime.room.non_model_peak_bytes)
        if idle == self._idle_seen:
            return
        self._idle_seen = idle
        updated = set[int]().union(*(listener.updates_on_device() for listener in self._sink.listeners))
        chunks = [chunk for chunk in runtime.chunks if not chunk.moved and _is_whole(chunk, updated)]
        candidates, sizes = [*map(self._candidate, chunks)], memory.lent.sizes(Tier.DEVICE)
        chosen = choose(candidates, idle, self._borrowed_there(), sizes)
        if not chosen:
            return
        for listener in self._sink.listeners:
            listener.synchronize()
        runtime.traffic.executor.drain()
        with runtime.room.moving_homes():
            if any(chunks[at] in self._sink.lent for at in chosen):
                self._idle_seen = -1  # their gradients wait for this step
            for at in chosen:
                if self._free_to_move(chunks[at]) and not self._move_in(chunks[at]):
                    return

    def shrink(self, nbytes: int) -> None:
        """Move homes of at least `nbytes` back, as far as possible: the last ones first, and at the end, after waiting,
        those that an update writes."""
        traffic, memory = self._runtime.traffic, self._runtime.memory
        if memory.resident:
            self._leave_device()
        if memory.in_codes and not memory.bound_to_device:
            self.bring_home(lends=self._sink.loans.lends)
        enough = memory.device_home_bytes - nbytes
        with self._runtime.room.moving_homes():
            last_first = list(reversed(self._moved))
            last_first.sort(key=traffic.updating.__contains__)
            for chunk in last_first:
                if memory.device_home_bytes <= enough:
                    break
                traffic.wait_for_update(chunk)
                if self._free_to_move(chunk) and self._can_move_back(chunk):
                    self._move_back(chunk)
            memory.end_aside_on_device()

    def _leave_device(self) -> None:
        """Treat the homes of a model that is whole on the device as moved there, if they may leave it."""
        runtime = self._runtime
        if not runtime.memory.may_leave_device:
            return
        runtime.memory.leave_device()
        for chunk in runtime.chunks:
            for role, home in chunk.homes.items():
                if home.block is None:
                    runtime.traffic.register_home(chunk, role)
        self._moved = list(runtime.chunks)
        for managed in runtime.parameters:
            self._sink.install(managed)
        self._left_device()

    def before_reserving(self, chunk: Chunk, roles: set[Role]) -> None:
        """Move `chunk` back before homes of `roles` are reserved, so that all its homes are together."""
        if chunk.moved and not roles <= chunk.homes.keys() and self._free_to_move(chunk):
            with self._runtime.room.moving_homes():
                if self._can_move_back(chunk):
                    self._move_back(chunk)

    def bring_home(self, *, lends: bool) -> None:
        """Move chunks that stay on the device to host memory, as far as it has room: for want of it before the
        optimizer, which keeps less than assumed, was known; or `in_codes`, where something else needs the device.
        `lends`: gradients need no homes of their own."""
        memory = self._runtime.memory
        memory.leave_in_codes()
        with self._runtime.room.moving_homes():
            for chunk in list(memory.staying):
                if not self._free_to_move(chunk) or not open_way_back(memory, chunk, gradients=not lends):
                    return
                self._move_back(chunk)
                del memory.staying[chunk]

    # ---- parking -----------------------------------------------------------------------------------------------

    def leaving(self) -> list[tuple[Chunk, bool]]:
        """Prepare all homes to leave the device: return their chunks, and whether each had moved there. Raises
        `ManageError` if one is held, and what `prepare` does."""
        chunks = [chunk for chunk in self._runtime.chunks if chunk.moved]
        for chunk in chunks:
            if not self._free_to_move(chunk) or (Role.GRAD not in chunk.homes and any(_own_gradients(chunk))):
                held = next((each.name for each in chunk.parameters if self._is_held(each)), chunk.parameters[0].name)
                raise ManageError(
                    f"{held} cannot leave the device: the program, or a graph that waits for its backward, holds its "
                    f"memory or its gradient (p.data, p.grad, a state_dict()): drop it, and call zero_grad()"
                )
        self.prepare(chunks)
        return [(chunk, chunk in self._moved) for chunk in chunks]

    def prepare(self, chunks: list[Chunk]) -> None:
        """Borrow memory for the homes of `chunks` where none is reserved, and page-lock what is the host's. Raises
        `BudgetError`, and what page-locking does, with nothing borrowed."""
        memory, statistics, began = self._runtime.memory, self._runtime.statistics, self._runtime.events.now()
        try:
            memory.page_lock_way_back(borrow_ways_back(memory, chunks))
        except BaseException:
            self.end_prepared(chunks)
            raise
        statistics.prepare_seconds += self._runtime.events.now() - began

    def end_prepared(self, chunks: list[Chunk]) -> None:
        """Give back what `prepare` has borrowed; it stays page-locked."""
        for chunk in chunks:
            end_way_back(self._runtime.memory, chunk)

    def leave(self, left: list[tuple[Chunk, bool]]) -> None:
        """Move the homes of chunks that `leaving` has prepared off the device."""
        with self._runtime.room.moving_homes():
            for chunk, _ in left:
                self._move_back(chunk)
            self._runtime.memory.end_aside_on_device()

    def come_back(self, left: list[tuple[Chunk, bool]]) -> None:
        """End `leave`, also one that an error has ended: move the homes of those of these chunks to the device that are
        not there. Raises torch.OutOfMemoryError, with nothing moved, if it has no room."""
        memory = self._runtime.memory
        self._runtime.outgoing.wait_for([chunk for chunk, _ in left])
        with self._runtime.room.moving_homes():
            memories: list[dict[Role, RawMemory]] = [{} for _ in left]
            try:
                for (chunk, _), into in zip(left, memories, strict=True):
                    for role, home in chunk.homes.items():
                        if home.tier is not Tier.DEVICE:
                            into[role] = memory.device.allocate(chunk.home_nbytes(role))
                borrowing = [self._sink.loans.bytes_for(chunk) for chunk, _ in left if self._borrows(chunk)]
                memory.set_aside_on_device(borrowing)
            except torch.OutOfMemoryError:
                for into in memories:
                    into.clear()  # the error holds this frame
                raise
            for (chunk, moved), into in zip(left, memories, strict=True):
                for role in into:
                    self._copy(Link.HOST_TO_DEVICE, chunk, role, into[role], chunk.homes[role].memory)
                memory.move_in(chunk, into)
                if moved and chunk not in self._moved:
                    self._moved.append(chunk)
                self._settle(chunk)
                end_way_back(memory, chunk)

    # ---- what may move -----------------------------------------------------------------------------------------

    def _borrows(self, chunk: Chunk) -> bool:
        """Return whether gradients of `chunk` borrow memory on the device, if its homes are there."""
        return self._sink.loans.lends and chunk.hides and (Role.GRAD not in chunk.homes or chunk in self._sink.lent)

    def _borrowed_there(self) -> list[int]:
        """Return the bytes that gradients of each chunk borrow whose homes are on the device."""
        there = [chunk for chunk in self._runtime.chunks if chunk.moved and self._borrows(chunk)]
        return [*map(self._sink.loans.bytes_for, there)]

    def _candidate(self, chunk: Chunk) -> Candidate:
        nbytes = sum(map(chunk.home_nbytes, chunk.homes.keys() - {Role.GRAD}))
        on_nvme = sum(chunk.home_nbytes(role) for role, home in chunk.homes.items() if home.tier is Tier.NVME)
        if self._borrows(chunk):
            return Candidate(nbytes, on_nvme, self._sink.loans.bytes_for(chunk))
        return Candidate(nbytes + chunk.capacity * chunk.dtype.itemsize, on_nvme)  # gradients in full precision

    def _free_to_move(self, chunk: Chunk) -> bool:
        """Return whether only hetmem holds the homes of `chunk`, and all listeners can follow."""
        if chunk in self._sink.lent or any(map(self._is_held, chunk.parameters)):
            return False
        if any(managed in self._sink.taken for managed in chunk.parameters):
            return False
        return all(listener.may_move(chunk) for listener in self._sink.listeners)

    def _is_held(self, managed: ManagedParameter) -> bool:
        """Return whether the program holds a view of a home, or has put another tensor into `p.grad`."""
        gradient, home = managed.parameter.grad, managed.grad_home
        gradient = None if is_consumed(gradient) else gradient
        if gradient is not None and not is_home_gradient(managed) and not self._can_get_home(gradient, managed.chunk):
            return True
        if not managed.numel:
            return False
        if home is not None and (home.data_ptr() != managed.grad_address or is_shared(home)):
            return True
        return storage_references(managed.home) > managed.home_references

    def _can_get_home(self, gradient: torch.Tensor, chunk: Chunk) -> bool:
        """Return whether `gradient`, which autograd allocated, can get a home when `chunk` leaves the device; not if it
        is a part of a larger buffer."""
        if Role.GRAD in chunk.homes or self._runtime.memory.gradient_place(chunk) is None or is_shared(gradient):
            return False
        return gradient.layout is torch.strided and gradient.dtype is chunk.dtype and not gradient.requires_grad

    def _can_move_back(self, chunk: Chunk) -> bool:
        if Role.GRAD in chunk.homes and chunk.homes[Role.GRAD].away is None:
            self._runtime.memory.use_gradient_place(chunk)
        lost = {role for role, home in chunk.homes.items() if home.away is None}
        return not lost or (lost == {Role.GRAD} and not any(is_home_gradient(m) for m in chunk.parameters))

    # ---- moving ------------------------------------------------------------------------------------------------

    def _move_in(self, chunk: Chunk) -> bool:
        """Move the homes of `chunk` to the device; False if its allocator has no memory, whatever the budget says."""
        memory, traffic = self._runtime.memory, self._runtime.traffic
        self._runtime.outgoing.wait_for((chunk,))
        for role in list(chunk.homes):
            traffic.superseded(chunk, role)
        borrows = self._borrows(chunk)
        roles = dict.fromkeys((*chunk.homes, *(() if borrows else (Role.GRAD,))))
        try:
            if borrows:
                memory.set_aside_on_device([self._sink.loans.bytes_for(chunk), *self._borrowed_there()])
            memories = {role: memory.device.allocate(chunk.home_nbytes(role)) for role in roles}
        except torch.OutOfMemoryError:
            return False
        for role, home in chunk.homes.items():
            self._copy(Link.HOST_TO_DEVICE, chunk, role, memories[role], home.memory)
        memory.move_in(chunk, memories)
        self._moved.append(chunk)
        self._settle(chunk)
        return True

    def _move_back(self, chunk: Chunk) -> None:
        traffic, block = self._runtime.traffic, chunk.operand_block
        self._runtime.outgoing.wait_for((chunk,))
        if block >= 0 and not traffic.residency.uses(block, Tier.DEVICE):
            traffic.executor.copy_homes_again([chunk])  # writes of the program to copies are detected in forwards only
        for role, home in chunk.homes.items():
            if home.away is not None:
                self._copy(Link.DEVICE_TO_HOST, chunk, role, home.away.memory, home.memory)
        gradients = self._gradients_sent(chunk)
        for role in list(chunk.homes):  # no copy that could fail follows
            self._runtime.memory.move_back(chunk, role)
        self._take_gradients(chunk, gradients)
        if chunk in self._moved:
            self._moved.remove(chunk)
        self._settle(chunk)

    def _gradients_sent(self, chunk: Chunk) -> list[tuple[ManagedParameter, torch.Tensor]]:
        """Copy the gradients of `chunk` that autograd allocated to host memory, and return them."""
        place = self._runtime.memory.gradient_place(chunk)
        if place is None:
            return []
        flat, sent = chunk.over(Role.GRAD, place.memory), []
        for managed, gradient in _own_gradients(chunk):
            work = partial(_copy, managed.shaped(managed.part(flat)), gradient.detach())
            self._runtime.traffic.engine.copy_now(Link.DEVICE_TO_HOST, work, gradient.nbytes)
            sent.append((managed, gradient))
        return sent

    def _take_gradients(self, chunk: Chunk, sent: list[tuple[ManagedParameter, torch.Tensor]]) -> None:
        """Make that host memory the gradients' home, and the tensors of `_gradients_sent` views of it."""
        if self._runtime.memory.use_gradient_place(chunk):
            self._runtime.traffic.register_home(chunk, Role.GRAD)
            for managed, gradient in sent:
                move_gradient(managed, gradient)

    def _copy(self, link: Link, chunk: Chunk, role: Role, target: RawMemory, source: RawMemory) -> None:
        """Copy the content of a home, if it has any."""
        if role is Role.GRAD and all(managed.grad_home is None for managed in chunk.parameters):
            return
        if role.is_state and not chunk.homes[role].written:
            return
        nbytes = chunk.role_nbytes(role)
        to, of = (elements(each, torch.uint8, nbytes) for each in (target, source))
        device = self._runtime.memory.device
        work = partial(device.copy_in, to, of) if link is Link.HOST_TO_DEVICE else partial(_copy, to, of)
        self._runtime.traffic.engine.copy_now(link, work, nbytes)

    def _settle(self, chunk: Chunk) -> None:
        """Bind parameters, gradients and states to the present homes of `chunk`."""
        for role in chunk.homes:
            if (block := chunk.homes[role].block) is not None:  # only device copies refer to it
                self._runtime.traffic.residency.blocks[block] = self._runtime.memory.block(chunk, role)
        for managed in chunk.parameters:
            if managed.code is None:  # else it shows no home
                self._runtime.bindings.move_home(managed, managed.view(Role.PARAM))
            move_gradient(managed, managed.grad_home if Role.GRAD in chunk.homes else None)
        for listener in self._sink.listeners:
            listener.moved(chunk)


def _is_whole(chunk: Chunk, updated: set[int]) -> bool:
    """Return whether `chunk` has trained parameters and all of them can be updated on the device."""
    trained = [id(managed.parameter) for managed in chunk.parameters if managed.parameter.requires_grad]
    return bool(trained) and updated.issuperset(trained)


def _own_gradients(chunk: Chunk) -> Iterator[tuple[ManagedParameter, torch.Tensor]]:
    for managed in chunk.parameters:
        gradient = managed.parameter.grad
        if gradient is not None and not is_consumed(gradient):
            yield managed, gradient


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source)
