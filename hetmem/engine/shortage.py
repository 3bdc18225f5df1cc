"""Builds the errors that say what holds the device's memory, and which changes would be enough, the cheapest first."""

from __future__ import annotations

import logging
import textwrap
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hetmem import torch_private
from hetmem.base.units import MIB, format_size, round_down, round_up
from hetmem.engine.homes import Memory
from hetmem.engine.upward import LeavingActivations
from hetmem.errors import DeviceOutOfMemoryError
from hetmem.memory.device import out_of_memory
from hetmem.schedule.layout import PAGE_ELEMENTS
from hetmem.schedule.residency import Residency
from hetmem.schedule.trace import Tier, infers, segment_name
from hetmem.schedule.tracer import StepTracer

_MOST_PARTS = 64


@dataclass(frozen=True, slots=True)
class Needs:
    """What one moment needs of the device, in bytes.

    `live_bytes`: tensors that are neither copies nor homes of chunks; `lasting_bytes`: the part of these that does not
    depend on the batch; `copy_bytes`: all copies that the moment uses at once; `home_bytes`: homes on the device;
    `whole_bytes`: all homes of a model that is kept whole there, 0 if it is streamed; `largest_bytes`: the copy of the
    largest parameter, or a slot.
    """

    device_bytes: int
    usable_bytes: int
    chunk_cap_bytes: int
    live_bytes: int
    lasting_bytes: int
    copy_bytes: int
    largest_bytes: int
    home_bytes: int
    whole_bytes: int

    def passes(self, **instead: int) -> bool:
        """Return whether the moment would have room with the fields in `instead` replaced."""
        needs = replace(self, **instead)
        chunks = needs.copy_bytes + needs.home_bytes
        return needs.live_bytes + chunks <= needs.usable_bytes and chunks <= needs.chunk_cap_bytes


def remedies(needs: Needs, others: Sequence[Needs] = (), *, trains: bool = True) -> Iterator[str]:
    """Yield changes that give the failed moment (`needs`) and all known `others` room, the cheapest first; the last
    one, a larger budget, always does."""
    moments = (needs, *others)
    if needs.whole_bytes:
        yield from _streamed(moments)
    yield from _micro_batches(moments, trains=trains)
    copies = max(moment.copy_bytes for moment in moments)
    if not needs.whole_bytes and needs.device_bytes > needs.chunk_cap_bytes < needs.copy_bytes:
        yield f"raise Budget(device_chunks=…): this moment needs {format_size(copies)} of chunks at once"
        return
    lost = needs.device_bytes - needs.usable_bytes
    least = max(moment.copy_bytes + moment.live_bytes for moment in moments) + needs.home_bytes + lost
    yield f"raise Budget(device=…): this moment needs {format_size(round_up(least, MIB))}"


def _streamed(moments: Sequence[Needs]) -> Iterator[str]:
    """Yield a chunk limit that streams the model, if all `moments` have room with it."""
    needs = moments[0]
    cap = round_down(min(needs.usable_bytes - needs.live_bytes, needs.whole_bytes - 1), PAGE_ELEMENTS)
    if cap >= needs.largest_bytes and all(each.passes(home_bytes=0, chunk_cap_bytes=cap) for each in moments):
        yield f"set Budget(device_chunks={cap}), so that chunks are streamed instead of kept on the device"


def _micro_batches(moments: Sequence[Needs], *, trains: bool) -> Iterator[str]:
    """Yield the fewest micro-batches with which all `moments` have room: live bytes grow with the batch."""
    parts = 2
    while parts <= _MOST_PARTS:
        lives = [m.lasting_bytes + (m.live_bytes - m.lasting_bytes) // parts for m in moments]
        if all(moment.passes(live_bytes=live) for moment, live in zip(moments, lives, strict=True)):
            smaller = f"batch: with {parts} micro-batches" if trains else f"batch or prompt: with 1/{parts} of either"
            yield f"use a smaller {smaller} what is live here is about {format_size(lives[0])}"
            return
        parts *= 2


_NAMED = 3
_WIDTH = 80
_REHEARSALS = 4
"""How many shortages of one model are rehearsed: a search for the largest batch meets many."""

Called = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments of a forward, its tensors on `meta`."""


@dataclass(frozen=True, slots=True)
class Rehearsed:
    """What a step needs of the device while the program keeps the model's output, and without it; and each change that
    lets it run, the cheapest first. `has_loss`: the model returns its loss; else its forward was rehearsed, and a
    backward from its outputs."""

    device_bytes: int
    without_output_bytes: int
    has_loss: bool
    ways: tuple[str, ...]

    def paragraphs(self) -> list[str]:
        """Return the sentences, and an item for each way."""
        needs = f"The step needs {format_size(self.device_bytes)} of the device"
        if self.without_output_bytes < self.device_bytes:
            needs += f" ({format_size(self.without_output_bytes)} if the program keeps the loss alone, not the output)"
        if not self.has_loss:
            needs = (
                f"The model's forward and a backward from its outputs need {format_size(self.device_bytes)} of the "
                f"device, and a loss that the program computes by itself needs more"
            )
        what = f"{needs}, as a rehearsal with this batch shows. Any of these lets it run, the cheapest first:"
        return [what, *(f"- {way}" for way in self.ways)]


class Shortage:
    """Builds the error of one runtime that has no room for an operator, from its state at that moment."""

    def __init__(self, memory: Memory, residency: Residency, tracer: StepTracer) -> None:
        self._memory, self._residency, self._tracer = memory, residency, tracer
        self.activations: weakref.ref[LeavingActivations] | None = None
        """The activations that may leave, if any may; weak, as they hold the runtime."""
        self.refused_room_bytes = 0
        """Bytes beside chunks that would have been enough for allocations that were refused; 0: none was refused."""
        self.rehearse: Callable[[Called], Rehearsed | None] = lambda called: None
        """Rehearses the step with a forward that was called so."""
        self.called: Called | None = None
        """What the forward that runs, or whose backward runs, was called with, if its memory is not known yet."""
        self._rehearsals = 0
        self.last_message = ""
        """The message about the last refused allocation."""
        memory.device.tell_refusals(self.refused)

    def error(
        self, operator: str, live_bytes: int, wanted_bytes: int = 0, refused_bytes: int = 0
    ) -> DeviceOutOfMemoryError:
        """Return the error for `operator`, which had no room. `live_bytes`: tensors that are neither copies nor homes
        of chunks; `wanted_bytes`: of the copy that has no room; `refused_bytes`: of the allocation that has none."""
        holds, called = self._holds(operator, live_bytes, wanted_bytes), self.called
        first, plan = [out_of_memory(self._memory.device), holds], self._plan()
        found = DeviceOutOfMemoryError(_lines([*first, self._ways_out(live_bytes + refused_bytes), plan]))
        if called is not None and self._rehearsals < _REHEARSALS and not self._stays():
            usual = str(found)

            def more() -> str:
                told = self._rehearsed(called)
                return _lines([*first, *told, plan]) if told else usual

            found.more = more
        return found

    def _rehearsed(self, called: Called) -> list[str]:
        """Return what the step needs, and what lets it run, in paragraphs; none if no rehearsal can say."""
        self._rehearsals += 1
        found = self.rehearse(called)
        return [] if found is None else found.paragraphs()

    def _said(self, operator: str, live_bytes: int, wanted_bytes: int, refused_bytes: int) -> str:
        ways = self._ways_out(live_bytes + refused_bytes)
        return f"{self._holds(operator, live_bytes, wanted_bytes)} {ways} {self._plan()}"

    def _holds(self, operator: str, live_bytes: int, wanted_bytes: int) -> str:
        memory = self._memory
        in_use = self._in_use()
        copies = sum(in_use.values())
        wanted = f", and {format_size(wanted_bytes)} more for the chunk it uses" if wanted_bytes else ""
        return (
            f"No room for {operator} ({self._where()}): activations and other tensors take "
            f"{format_size(live_bytes)}, copies of parameters in use {format_size(copies)}{_names(in_use)}"
            f"{memory.homes_on_device()}{wanted}, of {format_size(memory.device_bytes)}, the device budget{self._cap()}"
            f"{self._stays()}. {self._activations_that_stay()}"
        ).rstrip()

    def refused(self, asked_bytes: int, allocated_bytes: int) -> None:
        """Note that the device's allocator has refused `asked_bytes`, with `allocated_bytes` allocated; on any thread.

        From the next moment on chunks get that much less. An operator of a forward is called again then; a node of a
        backward cannot be, so there this logs what holds memory, before torch raises.
        """
        memory = self._memory
        chunks = memory.device_pool.held_bytes() + memory.device_home_bytes
        enough = min(memory.usable_bytes - chunks + asked_bytes, memory.usable_bytes)
        self.refused_room_bytes = max(self.refused_room_bytes, enough)
        live_bytes = max(0, allocated_bytes - chunks)
        what = f"an allocation of {format_size(asked_bytes)}"
        said = self._said(what, live_bytes, 0, asked_bytes)
        given = min(asked_bytes, memory.device_pool.held_bytes())
        self.last_message = f"{said} From now on chunks leave {format_size(given)} more: the next step may have room"
        if torch_private.current_graph_task() != -1:
            logging.getLogger("hetmem").error(self.last_message)

    def _where(self) -> str:
        key = self._tracer.key
        if key is None:
            return "outside a step"
        without = " without gradients" if infers(key) else ""
        name = segment_name(key)
        early = name == "forward" and torch_private.current_graph_task() != -1  # the model's first gradient is to come
        return f"{'a backward after ' if early else ''}moment {self._tracer.position} of the {name}{without}"

    def _in_use(self) -> dict[str, int]:
        residency, slot = self._residency, self._memory.device_pool.slot_bytes
        return {
            residency.blocks[block].label: residency.blocks[block].span * slot
            for block in residency.resident(Tier.DEVICE)
            if residency.uses(block, Tier.DEVICE) and residency.slot_taken(block, Tier.DEVICE) >= 0
        }

    def _blocks_needed(self) -> set[int]:
        """Return the blocks of all copies that this moment needs at once, also those that had no room."""
        residency = self._residency
        used = [block for block in residency.resident(Tier.DEVICE) if residency.uses(block, Tier.DEVICE)]
        return {*self._tracer.blocks(), *used}

    def _activations_that_stay(self) -> str:
        """Return a sentence on why activations that might have left the device did not, or ""."""
        moves = None if self.activations is None else self.activations()
        return "" if moves is None else moves.shortage()

    def _cap(self) -> str:
        cap = self._memory.device_chunk_bytes
        return f" (chunks may have {format_size(cap)} of it)" if cap < self._memory.device_bytes else ""

    def _stays(self) -> str:
        """Return why a model that is whole on the device cannot leave it, if host memory has no room for it, or ""."""
        memory = self._memory
        if not memory.resident or memory.has_room_away:
            return ""
        return (
            f"; its homes cannot go to host memory, where they need {format_size(memory.away_bytes)} and "
            f"{format_size(memory.host_pool.free_bytes)} are left of Budget(host=…)"
        )

    def _ways_out(self, live_bytes: int) -> str:
        """Return sentences on the changes that would give this and all known moments room, the cheapest first."""
        needs = self._needs(live_bytes, self._blocks_needed())
        moments = dict.fromkeys((moment.non_model_bytes, moment.blocks) for moment in self._tracer.known_moments())
        others = [self._needs(nbytes, set(blocks)) for nbytes, blocks in moments]
        trains = not infers(self._tracer.key)
        ways = ", or ".join(remedies(needs, others, trains=trains))
        more = "Activation checkpointing needs less too" if trains else "A cache of keys and values grows by each token"
        return f"Any of these lets this moment pass, the cheapest first: {ways}. {more}."

    def _plan(self) -> str:
        trains = not infers(self._tracer.key)
        return (
            f"Before a run, hetmem plan MODULE:FUNCTION --input … {'' if trains else '--inference '}--device-memory "
            f"{self._memory.device_bytes} --host-memory {self._memory.host_pool.capacity_bytes} says what the whole "
            f"{'step' if trains else 'forward'} needs."
        )

    def _needs(self, live_bytes: int, blocks: set[int]) -> Needs:
        """Return what a moment needs that uses `blocks`."""
        memory, residency = self._memory, self._residency
        slot_bytes = memory.device_pool.slot_bytes
        return Needs(
            memory.device_bytes,
            memory.usable_bytes,
            memory.device_chunk_bytes,
            live_bytes,
            min(live_bytes, memory.buffer_bytes),
            sum(residency.blocks[block].span for block in blocks) * slot_bytes,
            max(slot_bytes, *(p.numel * c.compute_dtype.itemsize for c in memory.chunks for p in c.parameters)),
            memory.device_home_bytes,
            memory.device_home_bytes if memory.resident else 0,
        )


def _names(sizes: dict[str, int]) -> str:
    if not sizes:
        return ""
    names = sorted(sizes, key=lambda name: sizes[name], reverse=True)
    more = f", and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f" ({'; '.join(names[:_NAMED])}{more})"


def _lines(paragraphs: Sequence[str]) -> str:
    """Return `paragraphs` in lines that a terminal does not break, items of a list indented."""
    lines: list[str] = []
    for each in paragraphs:
        indent = "  " if each.startswith("- ") else ""
        lines += textwrap.wrap(each, _WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines)
