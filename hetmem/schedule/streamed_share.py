"""The streamed share: which chunks' states are sent to the device for their update, and the slots that takes there.

A run and a plan of it both ask here, step by step, and so choose alike. Pure: bytes in; numbers of chunks out. How much
is streamed is `schedule.update_split`'s; here are the facts it needs, the slots, and which chunks make up that part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

from hetmem.base.units import round_up
from hetmem.schedule.hardware import HardwareProfile
from hetmem.schedule.update_split import streamed_part, update_costs

SLOTS = 2
"""Chunks on the device at a time: while one is sent home, the next one is brought."""

_ALIGNMENT = 4096

_GRADIENT_BYTES = 4
"""Of an element: what fits is float32."""

_LARGE = 8
"""Chunks of more than so many times the bytes of the usual one are updated on the host: slots for them would take
memory that homes of many others fill. The usual one is that in which the middle byte lies of all but the largest two,
which may be an embedding and a head. It is not the middle chunk: between the weights there may be as many chunks that
hold a few biases, and then all that counts would be large."""


@dataclass(frozen=True, slots=True)
class Fitting:
    """Chunk `number`, all of which can be updated on the device: its elements, and the bytes of all its roles."""

    number: int
    numel: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Facts:
    """What the choice depends on beside the link: the chunks that fit, in order, the elements of those that live on the
    device, and the bytes of an element's copy as operators see it, and of the one at home (0 if there is none).
    `gradients_stay`: on the device, where the update reads them, and do not go home before."""

    fitting: Sequence[Fitting]
    resident_elements: int
    copy_bytes: int
    home_copy_bytes: int
    gradients_stay: bool = False


class Slots(Protocol):
    """Memory of the device that states are brought to."""

    @property
    def slot_bytes(self) -> int:
        """Of each of `SLOTS` slots; 0 if there are none."""
        ...

    def idle_bytes(self) -> int:
        """What nobody would ever use of the device, slots counted as used."""
        ...

    def take_slots(self, nbytes: int) -> bool:
        """Have slots of at least `nbytes` each; False if there is no memory."""
        ...

    def give_slots_back(self) -> None:
        """Have none."""


class StreamedShare:
    """The choice for one optimizer's chunks; `chosen` are their numbers.

    It is made between a backward and the updates of a step, once two steps have shown what crosses the link, and again
    when homes have moved to the device or back, or slots had to go.
    """

    def __init__(self, hardware: HardwareProfile, slots: Slots) -> None:
        self._hardware, self._slots = hardware, slots
        self._sent_home: int | None = None
        self._home_bytes = -1
        self.chosen: frozenset[int] = frozenset()

    def look(self, sent_home: int, moved_bytes: int, facts: Callable[[], Facts]) -> None:
        """`sent_home` bytes of gradients went to the host in all steps so far, or would have if all had; homes that
        have moved to the device, and slots, take `moved_bytes` there."""
        before, self._sent_home = self._sent_home, sent_home
        home_bytes = moved_bytes - SLOTS * self._slots.slot_bytes
        if home_bytes == self._home_bytes and (self._slots.slot_bytes or not self.chosen):
            return
        found = facts()
        sent = _but_large(found.fitting)
        if before is None:  # room for them, before homes take it
            self._have_slots(sent)
            return
        self._home_bytes = home_bytes
        part = self._part(found, sent_home - before) if sent else 0.0
        here = part > 0 and self._have_slots(sent)
        part *= sum(chunk.numel for chunk in found.fitting) / max(1, sum(chunk.numel for chunk in sent))
        self.chosen = spread(sent, part) if here else frozenset()
        if not self.chosen:
            self._slots.give_slots_back()

    def _have_slots(self, fitting: Sequence[Fitting]) -> bool:
        """Slots for the largest of `fitting`, in memory of the device that is idle."""
        nbytes = round_up(_slot_bytes(fitting), _ALIGNMENT)
        held = self._slots.slot_bytes
        if held >= nbytes:
            return bool(nbytes)
        return self._slots.idle_bytes() + SLOTS * held >= SLOTS * nbytes and self._slots.take_slots(nbytes)

    def _part(self, found: Facts, sent_home: int) -> float:
        """Of the chunks that fit, the part to be streamed. All copies have room: only those that are renewed cross."""
        away = sum(chunk.numel for chunk in found.fitting)
        elements = away + found.resident_elements
        costs = update_costs(
            self._hardware,
            elements,
            copy_bytes=found.copy_bytes,
            gradient_bytes=sent_home / away,
            home_copy_bytes=found.home_copy_bytes,
            gradients_stay=found.gradients_stay,
        )
        return streamed_part(costs, found.resident_elements / elements)


def _slot_bytes(fitting: Sequence[Fitting]) -> int:
    """For the states of any of `fitting`, and beside them the gradients of any other one."""
    gradients = [_GRADIENT_BYTES * chunk.numel for chunk in fitting]
    states = [chunk.nbytes - nbytes for chunk, nbytes in zip(fitting, gradients, strict=True)]
    return max(states, default=0) + max(gradients, default=0)


def _but_large(fitting: Sequence[Fitting]) -> list[Fitting]:
    """`fitting` without those that need slots too large; see `_LARGE`."""
    sizes = sorted(chunk.nbytes for chunk in fitting)
    others = sizes[:-2] or sizes
    usual = next((size for size, upto in zip(others, accumulate(others), strict=True) if 2 * upto >= sum(others)), 0)
    return [chunk for chunk in fitting if chunk.nbytes <= _LARGE * usual]


def spread(chunks: Sequence[Fitting], part: float) -> frozenset[int]:
    """So great a `part` of `chunks` (all of them from 1 on), by elements, evenly among them: both places are busy all
    the time."""
    due, chosen = 0.0, set()
    for chunk in chunks:
        due += part * chunk.numel
        if due >= chunk.numel / 2:
            due -= chunk.numel
            chosen.add(chunk.number)
    return frozenset(chosen)
