"""The room of chunks on the device, and the error that says why there is none.

On a watched device every tensor is counted as it is made; of a GPU only its allocator's peaks are known, and what it
refused. Everything else comes before chunks: slots are given back, homes that moved to the device go back to host
memory. Copies come before homes that moved.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

from hetmem import torch_private
from hetmem.base.units import MIB, format_size, round_down, round_up
from hetmem.base.weak import weakly
from hetmem.engine.events import Statistics
from hetmem.engine.homes import Memory
from hetmem.engine.traffic import Traffic
from hetmem.errors import DeviceOutOfMemoryError
from hetmem.memory.live_bytes import DeviceMonitor
from hetmem.schedule.layout import PAGE_ELEMENTS
from hetmem.schedule.residency import Residency
from hetmem.schedule.trace import Moment, Tier
from hetmem.schedule.tracer import StepTracer, segment_name

_MOST_PARTS = 64


@dataclass(frozen=True, slots=True)
class Needs:
    """The device at one moment, in bytes.

    `live_bytes` is what is neither copies nor homes of chunks, `lasting_bytes` the part of it that does not depend on
    the batch; `copy_bytes` are all copies that the moment uses at once, of `copies` chunks whose largest parameter has
    `largest_elements` (that of the model: `model_elements`); `home_bytes` are homes on the device. `whole_bytes` is
    what keeping the model whole there takes, 0 if it is streamed. An element takes `itemsize` at home and
    `compute_itemsize` in a copy.
    """

    device_bytes: int
    usable_bytes: int
    chunk_cap_bytes: int
    live_bytes: int
    lasting_bytes: int
    copy_bytes: int
    copies: int
    largest_elements: int
    model_elements: int
    home_bytes: int
    whole_bytes: int
    slot_bytes: int
    itemsize: int
    compute_itemsize: int

    def passes(
        self,
        *,
        live_bytes: int | None = None,
        copy_bytes: int | None = None,
        home_bytes: int | None = None,
        cap_bytes: int | None = None,
    ) -> bool:
        """Whether the moment would pass with these figures in place of its own."""
        live = self.live_bytes if live_bytes is None else live_bytes
        chunks = self.copy_bytes if copy_bytes is None else copy_bytes
        chunks += self.home_bytes if home_bytes is None else home_bytes
        return live + chunks <= self.usable_bytes and chunks <= (
            self.chunk_cap_bytes if cap_bytes is None else cap_bytes
        )


def remedies(needs: Needs, others: Sequence[Needs] = ()) -> Iterator[str]:
    """Changes that let the moment that failed pass, and all `others` that are known, the cheapest first; the last one,
    a larger budget, always does."""
    moments = (needs, *others)
    if needs.whole_bytes:
        yield from _streamed(moments)
    else:
        yield from _smaller_chunks(moments)
    yield from _micro_batches(moments)
    copies = max(moment.copy_bytes for moment in moments)
    if not needs.whole_bytes and needs.device_bytes > needs.chunk_cap_bytes < needs.copy_bytes:
        yield f"raise Budget(device_chunks=…): this moment needs {format_size(copies)} of chunks at once"
        return
    lost = needs.device_bytes - needs.usable_bytes
    least = max(moment.copy_bytes + moment.live_bytes for moment in moments) + needs.home_bytes + lost
    yield f"raise Budget(device=…): this moment needs {format_size(round_up(least, MIB))}"


def _streamed(moments: Sequence[Needs]) -> Iterator[str]:
    """States leave the device; what activations leave there is for chunks, and too little to keep the model whole."""
    needs = moments[0]
    cap = round_down(min(needs.usable_bytes - needs.live_bytes, needs.whole_bytes - 1), PAGE_ELEMENTS)
    largest = max(needs.slot_bytes, needs.model_elements * needs.compute_itemsize)
    if cap >= largest and all(moment.passes(home_bytes=0, cap_bytes=cap) for moment in moments):
        yield f"set Budget(device_chunks={cap}), so that chunks are streamed instead of kept on the device"


def _smaller_chunks(moments: Sequence[Needs]) -> Iterator[str]:
    """Chunks just large enough for the largest parameter in use; a larger one takes several slots."""
    needs = moments[0]
    elements = round_up(needs.largest_elements, PAGE_ELEMENTS)
    sizes = [m.copies * round_up(m.largest_elements, elements) * needs.compute_itemsize for m in moments]
    widest = round_up(needs.model_elements, elements) * needs.compute_itemsize
    if (
        sizes[0] < needs.copy_bytes
        and widest + needs.lasting_bytes + needs.home_bytes <= needs.usable_bytes
        and widest + needs.home_bytes <= needs.chunk_cap_bytes
        and all(moment.passes(copy_bytes=size) for moment, size in zip(moments, sizes, strict=True))
    ):
        size = elements * needs.itemsize
        yield f"set chunk_bytes={size}: then the chunks in use take {format_size(sizes[0])}"


def _micro_batches(moments: Sequence[Needs]) -> Iterator[str]:
    """The fewest micro-batches, whose gradients add up, with which all pass: live bytes grow with the batch."""
    parts = 2
    while parts <= _MOST_PARTS:
        lives = [m.lasting_bytes + (m.live_bytes - m.lasting_bytes) // parts for m in moments]
        if all(moment.passes(live_bytes=live) for moment, live in zip(moments, lives, strict=True)):
            yield f"use a smaller batch: with {parts} micro-batches what is live here is about {format_size(lives[0])}"
            return
        parts *= 2


_NAMED = 3
_MANY_CHUNKS = 4
"""Of so many copies, the largest, chunks need not give any for activations that come before their use."""


class Transit(Protocol):
    """What autograd has saved and crosses the links, as far as the device's room goes; see `activations.offload`."""

    @property
    def ahead_bytes(self) -> int:
        """What chunks are to leave it, as long as they have enough."""
        ...

    def give_way(self) -> bool:
        """Drop something that lies at home as well; False if there is nothing."""
        ...

    def make_room(self, nbytes: int) -> bool:
        """Let so many bytes leave, as far as there are some that may; return whether any does."""
        ...

    def needs(self, own_bytes: int) -> None:
        """Note that so much is needed beside chunks and what crosses the links."""
        ...

    def shortage(self) -> str:
        """Return a sentence on what could not leave, and why."""
        ...


class Shortage:
    """The facts of one runtime at the moment at which it has no room for `operator`."""

    def __init__(self, memory: Memory, residency: Residency, tracer: StepTracer) -> None:
        self._memory, self._residency, self._tracer = memory, residency, tracer
        self.activations: weakref.ref[Transit] | None = None
        """What moves activations, if anything does: it holds the runtime, which must not hold it."""

    def error(
        self, operator: str, live_bytes: int, wanted_bytes: int = 0, refused_bytes: int = 0
    ) -> DeviceOutOfMemoryError:
        """`live_bytes`: what is neither copies nor homes of chunks; `wanted_bytes`: of the copy that finds no room;
        `refused_bytes`: what else finds none, which `operator` names."""
        memory = self._memory
        in_use = self._in_use()
        copies = sum(in_use.values())
        wanted = f", and {format_size(wanted_bytes)} more for the chunk it uses" if wanted_bytes else ""
        return DeviceOutOfMemoryError(
            f"out of device memory in {operator} ({self._where()}): activations and other tensors take "
            f"{format_size(live_bytes)}, copies of parameters in use {format_size(copies)}{_names(in_use)}"
            f"{memory.homes_on_device()}{wanted}, of {format_size(memory.device_bytes)}, the device budget{self._cap()}"
            f"{self._stays()}. {self._activations_that_stay()}"
            f"{self._ways_out(live_bytes + refused_bytes)}"
        )

    def _where(self) -> str:
        key = self._tracer.key
        return "outside a step" if key is None else f"moment {self._tracer.position} of the {segment_name(key)}"

    def _in_use(self) -> dict[str, int]:
        residency, slot = self._residency, self._memory.device_pool.slot_bytes
        return {
            residency.blocks[block].label: residency.blocks[block].span * slot
            for block in residency.resident(Tier.DEVICE)
            if residency.uses(block, Tier.DEVICE) and residency.slot_taken(block, Tier.DEVICE) >= 0
        }

    def _blocks_needed(self) -> set[int]:
        """The blocks of all copies that this moment needs at once, those it could not have included."""
        residency = self._residency
        used = [block for block in residency.resident(Tier.DEVICE) if residency.uses(block, Tier.DEVICE)]
        return {*self._tracer.blocks(), *used}

    def _activations_that_stay(self) -> str:
        """Why activations that might have left the device did not."""
        moves = None if self.activations is None else self.activations()
        return "" if moves is None else moves.shortage()

    def _cap(self) -> str:
        cap = self._memory.device_chunk_bytes
        return f" (chunks may have {format_size(cap)} of it)" if cap < self._memory.device_bytes else ""

    def _stays(self) -> str:
        """Why a model that is whole on the device does not leave it, if that is for want of room."""
        memory = self._memory
        if not memory.resident or memory.has_room_away:
            return ""
        return (
            f"; its homes cannot go to host memory, where they need {format_size(memory.away_bytes)} and "
            f"{format_size(memory.host_pool.free_bytes)} are left of Budget(host=…)"
        )

    def _ways_out(self, live_bytes: int) -> str:
        """What would let this moment pass, and all others that are known, cheapest first."""
        needs = self._needs(live_bytes, self._blocks_needed())
        moments = dict.fromkeys((moment.non_model_bytes, moment.blocks) for moment in self._tracer.known_moments())
        others = [self._needs(nbytes, set(blocks)) for nbytes, blocks in moments]
        ways = ", or ".join(remedies(needs, others))
        known = "what is known of the step" if self._tracer.measured else "the step"
        most = max((m.copy_bytes + m.live_bytes + m.home_bytes for m in (needs, *others)), default=0)
        return (
            f"Any of these lets this moment pass, the cheapest first: {ways}. Activation checkpointing needs less too. "
            f"In all {known} needs {format_size(most)} of the device; before a run, hetmem plan MODULE:FUNCTION "
            f"--input … --device-memory {self._memory.device_bytes} --host-memory "
            f"{self._memory.host_pool.capacity_bytes} says what the whole step needs"
        )

    def _needs(self, live_bytes: int, blocks: set[int]) -> Needs:
        """What a moment needs that uses `blocks`; without any it is as if it used the largest parameter."""
        memory, residency = self._memory, self._residency
        chunks = [chunk for chunk in memory.chunks if chunk.operand_block in blocks] or memory.chunks
        largest = max(managed.numel for chunk in chunks for managed in chunk.parameters)
        slot_bytes = memory.device_pool.slot_bytes
        return Needs(
            memory.device_bytes,
            memory.usable_bytes,
            memory.device_chunk_bytes,
            live_bytes,
            min(live_bytes, memory.buffer_bytes),
            sum(residency.blocks[block].span for block in blocks) * slot_bytes,
            len(blocks),
            largest,
            max(managed.numel for chunk in memory.chunks for managed in chunk.parameters),
            memory.device_home_bytes,
            memory.device_home_bytes if memory.resident else 0,
            slot_bytes,
            max(chunk.dtype.itemsize for chunk in chunks),
            max(chunk.compute_dtype.itemsize for chunk in chunks),
        )


def _names(sizes: dict[str, int]) -> str:
    if not sizes:
        return ""
    names = sorted(sizes, key=lambda name: sizes[name], reverse=True)
    more = f", and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f" ({'; '.join(names[:_NAMED])}{more})"


class Refusals:
    """Of one runtime, from when it is made."""

    def __init__(self, memory: Memory, shortage: Shortage) -> None:
        self._memory, self._shortage = memory, shortage
        self.room_bytes = 0
        """What would have been enough beside chunks; 0 while nothing was refused."""
        self.said = ""
        """Who held what when it happened last."""
        memory.device.tell_refusals(self.refused)

    def refused(self, asked_bytes: int, allocated_bytes: int) -> None:
        """The device's allocator has refused `asked_bytes`, with `allocated_bytes` handed out; on any thread.

        From the next moment on chunks have so much less than they have now. An operator of a forward is tried again
        then; a part of a backward cannot be tried again, so there this logs what holds memory, before torch raises.
        """
        memory = self._memory
        chunks = memory.device_pool.held_bytes() + memory.device_home_bytes
        self.room_bytes = max(self.room_bytes, min(memory.usable_bytes - chunks + asked_bytes, memory.usable_bytes))
        live_bytes = max(0, allocated_bytes - chunks)
        what = f"an allocation of {format_size(asked_bytes)}"
        error = self._shortage.error(what, live_bytes, refused_bytes=asked_bytes)
        given = min(asked_bytes, memory.device_pool.held_bytes())
        self.said = f"{error}. From now on chunks leave {format_size(given)} more: the next step may have room"
        if torch_private.current_graph_task() != -1:  # Python sees no error of a backward's node before it
            logging.getLogger("hetmem").error(self.said)


class DeviceRoom:
    """Of one managed module. `sanitize`: see `DeviceMonitor`."""

    def __init__(
        self, memory: Memory, traffic: Traffic, tracer: StepTracer, statistics: Statistics, *, sanitize: bool
    ) -> None:
        self._memory, self._traffic, self._tracer, self._statistics = memory, traffic, tracer, statistics
        self.monitor = DeviceMonitor(
            memory.is_home_address, memory.is_device_address, weakly(self.non_model_grew), strict=sanitize
        )
        self.shortage = Shortage(memory, traffic.residency, tracer)
        self.refusals = Refusals(memory, self.shortage)
        self.give_way: Callable[[int], None] = _nothing_to_give
        """Homes of so many bytes at least, or all of a model that is whole on the device (0), leave it if they can."""
        self.leaving: dict[int, int] = {}
        """Device memory of activations on their way home, by number; that keeps it."""
        self.ahead: dict[int, int] = {}
        """The same of those that have come, or are coming, and that no node has asked for yet."""
        self._all_slots = sum(chunk.spec.span for chunk in memory.chunks)
        self._many_slots = _MANY_CHUNKS * max(chunk.spec.span for chunk in memory.chunks)
        self._limit = memory.device_pool.slots
        self._most_non_model = 0
        self._harmless = memory.usable_bytes - memory.device_chunk_bytes
        """So much of anything else takes nothing of what chunks may have."""
        self._left = -1
        """The bytes of homes on the device when nothing took any of that."""
        memory.device.peak_bytes()  # what the process had there before is no need of this model
        traffic.gradients.sent = weakly(self.gradient_sent)

    # ---- what is needed ----------------------------------------------------------------------------------------

    def chunk_bytes(self) -> int:
        """Device bytes that chunks hold now."""
        slots = self._traffic.residency.used_slots(Tier.DEVICE)
        return slots * self._memory.device_pool.slot_bytes + self._memory.device_home_bytes

    @property
    def non_model_bytes(self) -> int:
        """What anything but chunks needs: now, or at most where only peaks are known."""
        return self.monitor.live_bytes if self._memory.device.watched else self._most_non_model

    @property
    def non_model_peak_bytes(self) -> int:
        """The most that anything but chunks has ever needed of the device."""
        return max(self._statistics.non_model_peak_bytes, self._room_seen)

    def look_at_allocator(self) -> int:
        """The bytes beside chunks now; where the device's allocator knows their peak, the last moment gets that."""
        if self._memory.device.watched:
            return self.monitor.live_bytes
        chunks = self._memory.device_pool.held_bytes() + self._memory.device_home_bytes
        peak = max(0, self._memory.device.peak_bytes() - chunks)
        if self._tracer.measured:
            self._tracer.grew(peak)
        self._most_non_model = max(self._most_non_model, peak)
        return peak

    @property
    def _guess(self) -> int:
        return self._memory.device_bytes * 3 // 4

    @property
    def _room_seen(self) -> int:
        return max(self._most_non_model, self.refusals.room_bytes)

    @property
    def _room_wanted(self) -> int:
        """For the segment that runs, whose inputs may be larger than any that were seen."""
        return min(int(self._room_seen * self._tracer.unseen_growth), self._memory.usable_bytes)

    def _least_room(self) -> int:
        """What a GPU must leave beside chunks: the most that was ever seen, so that slots stay where they are, or what
        would have been enough when its allocator refused memory.

        What a segment unlike any before needs is unknown, so chunks keep to a quarter of the device; if they need more
        than that at once, `widen` takes it.
        """
        return max(self._room_seen, self._guess) if self._tracer.is_unseen else self._room_wanted

    # ---- when it changes ---------------------------------------------------------------------------------------

    def before_segment(self) -> None:
        """A segment has begun, and nothing of it has run."""
        if self._tracer.is_unseen and self._tracer.known is None and not self._memory.device.watched:
            self._let_homes_go(self._guess)  # a part of a backward cannot be tried again with more room
        if self.refusals.room_bytes:
            self._leave_device(self.refusals.room_bytes)
        known = self._tracer.known
        if self._memory.device.watched and known is not None and known.opening.non_model_bytes:
            self.before_moment(known.opening.times(self._tracer.growth))

    def is_as_left(self, expected: Moment) -> bool:
        """Whether `before_moment` would find that chunks may have all that they may ever have, as they did before."""
        if self._left != self._memory.device_home_bytes:
            return False
        return (expected.non_model_bytes if self._memory.device.watched else self._room_wanted) <= self._harmless

    def has_room_for_all(self, expected: Moment) -> bool:
        """Whether chunks may have all the slots that there are for them beside what is `expected`."""
        needed = expected.non_model_bytes if self._memory.device.watched else self._least_room()
        return self._memory.device_slots(needed) >= self._all_slots

    def before_moment(self, expected: Moment) -> None:
        """Anything but chunks is expected to need what it says in the moment that begins."""
        watched = self._memory.device.watched
        needed = expected.non_model_bytes if watched else self._room_wanted
        self._let_homes_go(needed)
        self._set_limit(expected.non_model_bytes if watched else self._least_room())
        self._wait_for_leaving()
        if needed <= self._harmless and not self._tracer.measured:
            self._left = self._memory.device_home_bytes

    def gradient_sent(self) -> None:
        """A gradient has begun its way home: from here on the trace knows what else there is."""
        if self._memory.device.watched:
            own_bytes = 0
            if self._tracer.measured:
                live_bytes = (
                    self.monitor.live_bytes
                )  # before the others: they may die any time, and are none of it then
                own_bytes = live_bytes - self.leaving_bytes
            self._tracer.sent(own_bytes)
            if self._traffic.gradients.leaving or self.leaving or self.ahead:
                self._wait_for_leaving()

    @property
    def leaving_bytes(self) -> int:
        """Device memory of gradients and activations on their way, which is needed no more, or not yet."""
        gradients = self._traffic.gradients
        leaving = gradients.leaving_bytes if gradients.leaving else 0
        return leaving + sum(self.leaving.values()) + sum(self.ahead.values())

    def _wait_for_leaving(self) -> None:
        """Wait for what is on its way, of which there may be more than in the segment that was measured, until there is
        room for it beside what chunks may take."""
        if not self._memory.device.watched or self._tracer.measured:
            return
        room = self._room_beside_chunks()
        while 0 < self.leaving_bytes > room:
            if not self._give_way():
                self._traffic.wait_for_one()

    def _room_beside_chunks(self) -> int:
        """What the device has beside chunks and what the trace expects."""
        memory = self._memory
        copies = min(self._limit, self._all_slots) * memory.device_pool.slot_bytes
        chunks = max(self.chunk_bytes(), copies + memory.device_home_bytes)
        return memory.device_bytes - chunks - self._tracer.own_bytes

    def _give_way(self) -> bool:
        moves = self._activations
        return moves is not None and moves.give_way()

    @property
    def _activations(self) -> Transit | None:
        return None if self.shortage.activations is None else self.shortage.activations()

    def transit_grew(self) -> None:
        """An activation has begun its way home."""
        self._wait_for_leaving()

    def has_room_ahead(self, nbytes: int) -> bool:
        """Whether an activation of `nbytes` may come before it is asked for."""
        if not self._memory.device.watched:
            return True
        if self._tracer.measured:
            return self.chunk_bytes() + self.monitor.live_bytes + nbytes <= self._memory.device_bytes
        return self.leaving_bytes + nbytes <= self._room_beside_chunks()

    def count(self, what: str, tensor: torch.Tensor) -> None:
        """`what` takes the memory of `tensor` from now on, which no operator has made."""
        if self._memory.device.watched and self._tracer.measured:
            self.monitor.count(what, (tensor,))

    def non_model_grew(self, operator: str, live_bytes: int) -> None:
        """An operator of a measured segment needs memory: give up idle chunks, as a GPU's allocator would be made to,
        and wait for gradients on their way home. The trace has what is left beside chunks then.

        Raises `DeviceOutOfMemoryError` if what is left in use does not fit beside it.
        """
        with self.monitor.unwatched():
            self._let_homes_go(live_bytes)
            self._set_limit(live_bytes)
            while (missing := self.chunk_bytes() + live_bytes - self._memory.device_bytes) > 0:
                if not (self._let_activations_go(missing) or self._give_way()):
                    if not self._anything_leaves():
                        break
                    self._traffic.wait_for_one()
                live_bytes = min(live_bytes, self.monitor.live_bytes)
            self._tracer.grew(live_bytes, self.leaving_bytes)
            if self.chunk_bytes() + live_bytes > self._memory.device_bytes:
                self.monitor.left |= self._leave_device(live_bytes)
        if self.chunk_bytes() + live_bytes > self._memory.device_bytes:
            raise self.shortage.error(operator, live_bytes)
        self._statistics.device_in_use(self.chunk_bytes(), live_bytes)
        if (moves := self._activations) is not None:
            moves.needs(live_bytes - self.leaving_bytes)

    def own_bytes(self) -> int:
        """What is needed now beside chunks, and beside what crosses the links where that is known."""
        return self.look_at_allocator() - (self.leaving_bytes if self._memory.device.watched else 0)

    def saved_bytes(self) -> int:
        """What the device has for all but homes that must be there and as many copies as let some come before their
        use."""
        memory, slots = self._memory, 0
        if memory.uses_copies:
            blocks = self._traffic.residency.blocks
            used = {moment.blocks for trace in self._tracer.book.traces() for moment in trace.moments}
            most = max((sum(blocks[block].span for block in at_once) for at_once in used), default=0)
            slots = max(most, min(self._many_slots, self._all_slots))
        copies = min(slots * memory.device_pool.slot_bytes, memory.device_chunk_bytes)
        return memory.usable_bytes - (memory.device_home_bytes - memory.moved_bytes) - copies

    def _anything_leaves(self) -> bool:
        """Whether something is under way at whose end less of the device is taken."""
        leaving = self._traffic.gradients.under_way or bool(self.leaving or self.ahead)
        return leaving or bool(self._traffic.residency.in_flight())

    def _let_activations_go(self, nbytes: int) -> bool:
        moves = self._activations
        return moves is not None and moves.make_room(nbytes)

    def widen(self) -> bool:
        """Chunks in use at once need more than they may have, and nothing is under way any more: let them have what was
        only guessed to be needed beside them, or what gradients have left that were on their way when the moment began.
        False if there is no such room."""
        watched = self._memory.device.watched
        before = self.leaving_bytes, self.monitor.live_bytes
        self._let_activations_go(self._memory.device_pool.slot_bytes)
        if self._give_way() or before != (self.leaving_bytes, self.monitor.live_bytes):
            if watched and self._tracer.measured:
                self._set_limit(self.monitor.live_bytes)
            return True
        needed = self.monitor.live_bytes if watched else self._most_non_model
        if self._leave_device(needed if watched else self._room_seen):
            return True
        if (watched and not self._tracer.measured) or self._limit >= self._memory.device_slots(needed):
            return False
        if watched:
            self._tracer.begins_with(needed)
        self._set_limit(needed)
        return True

    def out_of_memory(self) -> None:
        """The device's allocator has no room for an operator: give it all that no chunk in use needs."""
        self.look_at_allocator()
        self._let_activations_go(self._memory.device_bytes)
        while self._give_way():
            pass
        self._leave_device(self._room_seen)
        self._let_homes_go(self._room_seen)
        before = self._limit
        try:
            self._traffic.limit_device(0, before=before)
            self._traffic.executor.drain()  # where an interrupt or a transfer's error is raised
            self._traffic.gradients.wait()  # they are on the device as long as they are on their way
            self._traffic.executor.wait_while(lambda: bool(self.leaving))
            self._traffic.give_back_free()
        finally:
            self._traffic.limit_device(before, before=before)
            self._memory.device.peak_bytes()  # what was given back by this is no peak of anything else

    @contextmanager
    def moving_homes(self) -> Iterator[None]:
        """Homes move within: what they take, or took, of the device is no peak of anything else."""
        self.look_at_allocator()
        try:
            with self.monitor.unwatched(), torch.no_grad():
                yield
        finally:
            self._memory.device.peak_bytes()

    # ---- who gives way -----------------------------------------------------------------------------------------

    def _let_homes_go(self, non_model_bytes: int) -> None:
        """Homes that moved to the device give way where copies would have less room for them."""
        if self._memory.moved_bytes:
            missing = self._all_slots * self._memory.device_pool.slot_bytes - self._memory.room_bytes(non_model_bytes)
            if missing > 0:
                self.give_way(missing)

    def _leave_device(self, non_model_bytes: int) -> bool:
        """A model that was put whole on the device makes room for `non_model_bytes`: what has none there goes to host
        memory, now and from now on. False if it is not, or if it must stay."""
        if self._memory.resident:
            self.give_way(0)
            if not self._memory.resident:
                self._tracer.forget_traces()  # operators were not seen to use it
                with self.monitor.unwatched():
                    self._let_homes_go(non_model_bytes)
                    self._set_limit(non_model_bytes)
                return True
        return False

    def _set_limit(self, non_model_bytes: int) -> None:
        """Leave room for `non_model_bytes` beside chunks."""
        self._left = -1
        limit = self._memory.device_slots(non_model_bytes)
        if self.shortage.activations is not None and (moves := self._activations) is not None:
            less = self._memory.device_slots(non_model_bytes + moves.ahead_bytes)
            limit = max(less, min(limit, self._many_slots))  # chunks that are many leave activations room to come
        if limit != self._limit:
            before, self._limit = self._limit, limit
            self.look_at_allocator()
            self._traffic.limit_device(limit, before=before)
            self._memory.device.peak_bytes()  # what was given back by this is no peak of anything else


def _nothing_to_give(nbytes: int) -> None:
    """No homes have moved to the device."""
