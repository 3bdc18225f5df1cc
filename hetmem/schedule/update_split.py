"""Says where updates run: which chunks' homes move to idle device memory, and whose states are sent there. Pure.

A run and a plan of it both ask here, step by step, and so choose alike. Idle memory of the device is filled with homes
(`choose`), whatever the link is busy with; of the other chunks so many have their states brought to slots on the device
for their update that the slowest of all links and memories is done soonest (`streamed_part`).

Note "busy": a resource is busy for the bytes that go through it. The cores of the host have what they update. Its
memory has that too, and whatever crosses the link, which is read or written there; its rate is twice that of a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate, combinations
from typing import Protocol

from hetmem.base.hardware import HardwareProfile
from hetmem.base.units import round_up

WORTH = 0.97
"""What is not done by default has to be this much faster: streaming states takes slots on the device and a second way
through every step, and other settings have to be told to a run."""

UPDATE_BYTES = 28
"""Traffic of the memory in which a float32 parameter is updated: 16 bytes read, 12 written."""
_STATE_BYTES = 12
"""Of a float32 parameter and its two moments: what crosses a link each way if its states are streamed."""
_GRADIENT_BYTES = 4
"""Of its gradient, which comes back with the states if it has gone home."""


class Way(Enum):
    """Where a parameter is updated, and where its states live meanwhile."""

    HOST = "host"
    STREAMED = "streamed"
    RESIDENT = "resident"


Costs = Mapping[Way, Mapping[str, float]]
"""For each way, the seconds that each resource is busy if all parameters are updated so."""


def update_costs(
    hardware: HardwareProfile,
    parameters: int,
    *,
    copy_bytes: float,
    gradient_bytes: float,
    home_copy_bytes: float = 0.0,
    gradients_stay: bool = False,
) -> dict[Way, dict[str, float]]:
    """The costs of one step of AdamW over `parameters` float32 parameters, in seconds.

    Bytes for each parameter: `copy_bytes` of the copy that operators see, as it crosses the link, `gradient_bytes` of
    the gradient that does. With streamed states the gradient comes back to the device, or `gradients_stay` there, the
    copy is made there, and `home_copy_bytes` of it go home with the states.
    """
    up, down = hardware.host_to_device.bytes_per_second, hardware.device_to_host.bytes_per_second
    both, host = hardware.both_ways_bytes_per_second, hardware.host
    returned = 0 if gradients_stay else _GRADIENT_BYTES
    memory = max(2 * host.copy_bytes_per_second, host.update_bytes_per_second)
    moved = {  # to the device, to the host, through the cores of the host, of device memory
        Way.HOST: (copy_bytes, gradient_bytes, UPDATE_BYTES, 2 * copy_bytes),
        Way.STREAMED: (
            _STATE_BYTES + returned,
            (0.0 if gradients_stay else gradient_bytes) + _STATE_BYTES + home_copy_bytes,
            0,
            UPDATE_BYTES + 2 * _STATE_BYTES + returned + copy_bytes,
        ),
        Way.RESIDENT: (0.0, 0.0, 0, UPDATE_BYTES + copy_bytes),
    }
    return {
        way: {
            "host_to_device": parameters * to / up,
            "device_to_host": parameters * back / down,
            "both_ways": parameters * (to + back) / both,
            "host_cores": parameters * on_host / host.update_bytes_per_second,
            "host_memory": parameters * (on_host + to + back) / memory,
            "device_memory": parameters * in_device / hardware.device.bytes_per_second,
        }
        for way, (to, back, on_host, in_device) in moved.items()
    }


def streamed_part(costs: Costs, resident: float) -> float:
    """Of the parameters that do not live on the device, where a part `resident` of all does, return the part whose
    states are best streamed there for their update: none, unless what is slowest is done noticeably sooner so.

    Each resource is busy for a linear function of that part; the least of the greatest of them lies at an end, or where
    two cross.
    """
    away, host, streamed = 1 - resident, costs[Way.HOST], costs[Way.STREAMED]
    lines = [
        (away * host[name] + resident * costs[Way.RESIDENT][name], streamed[name] - host[name]) for name in sorted(host)
    ]

    def seconds(part: float) -> float:
        return max(at + part * slope for at, slope in lines)

    crossings = ((other[0] - one[0], one[1] - other[1]) for one, other in combinations(lines, 2))
    parts = [0.0, *(of / by for of, by in crossings if by and 0 < of / by < away), away]
    best = min(parts, key=seconds)
    return best / away if seconds(best) < WORTH * seconds(0.0) else 0.0


SLOTS = 2
"""Chunks on the device at a time: while one is sent home, the next one is brought."""

_ALIGNMENT = 4096

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

    def idle_bytes(self) -> int:
        """The bytes of the device that are never used, slots counted as used."""

    def take_slots(self, nbytes: int) -> bool:
        """Have slots of at least `nbytes` each; False if there is no memory."""

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
        part = part_sent(self._hardware, found, sent_home - before) if sent else 0.0
        here = part > 0 and self._have_slots(sent)
        part *= sum(chunk.numel for chunk in found.fitting) / max(1, sum(chunk.numel for chunk in sent))
        self.chosen = spread(sent, part) if here else frozenset()
        if not self.chosen:
            self._slots.give_slots_back()

    def _have_slots(self, fitting: Sequence[Fitting]) -> bool:
        """Slots for the largest of `fitting`, in memory of the device that is idle."""
        nbytes = _slot_bytes(fitting)
        held = self._slots.slot_bytes
        if held >= nbytes:
            return bool(nbytes)
        return self._slots.idle_bytes() + SLOTS * held >= SLOTS * nbytes and self._slots.take_slots(nbytes)


def part_sent(hardware: HardwareProfile, found: Facts, sent_home: int) -> float:
    """Of the chunks that fit, the part whose states are to be sent to the device, where a step sends `sent_home` bytes
    of gradients home. All copies have room: only those that are renewed cross."""
    away = sum(chunk.numel for chunk in found.fitting)
    if not away:
        return 0.0
    elements = away + found.resident_elements
    costs = update_costs(
        hardware,
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
    return round_up(max(states, default=0) + max(gradients, default=0), _ALIGNMENT)


def slots_bytes(fitting: Sequence[Fitting]) -> int:
    """What the slots take of the device that states of `fitting` are sent to."""
    return SLOTS * _slot_bytes(_but_large(fitting))


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


MARGIN_SHARE = 1 / 16
"""Of the device: stays free beside the most that was ever needed for anything but chunks."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A chunk whose homes may move: what they take of the device, and how much of that lies on NVMe now, in bytes."""

    device_bytes: int
    nvme_bytes: int = 0


def room_bytes(usable_bytes: int, chunk_cap_bytes: int, non_model_bytes: int, home_bytes: int) -> int:
    """Return what is left for copies on a device of `usable_bytes`, beside `home_bytes` of homes and `non_model_bytes`
    of everything else; below zero if these take more. Homes and copies take at most `chunk_cap_bytes`."""
    return min(chunk_cap_bytes, usable_bytes - non_model_bytes) - home_bytes


def idle_bytes(usable_bytes: int, chunk_cap_bytes: int, non_model_bytes: int, chunk_bytes: int) -> int:
    """The bytes that are never used of a device of `usable_bytes`; below zero if that is less than nothing.

    `chunk_cap_bytes`: the most that chunks may take; `non_model_bytes`: the most that everything else has taken at one
    time; `chunk_bytes`: homes that are on the device, and a copy of each chunk: where not all copies fit, nothing is
    idle, as a slot saves more bytes of the link in a step than a home of its size.
    """
    margin = int(MARGIN_SHARE * usable_bytes)
    return room_bytes(usable_bytes, chunk_cap_bytes, non_model_bytes + margin, chunk_bytes)


def choose(candidates: Sequence[Candidate], idle: int) -> list[int]:
    """The numbers of the candidates that move into `idle` bytes, in the order in which they do.

    First those with the greatest part on NVMe, the slowest tier; of equal ones the first given, which should be the
    first used: its gradient arrives last, and a step waits for its update. Whatever does not fit is passed over.
    """
    order = sorted(range(len(candidates)), key=lambda at: -candidates[at].nvme_bytes / candidates[at].device_bytes)
    chosen = []
    for at in order:
        if candidates[at].device_bytes <= idle:
            chosen.append(at)
            idle -= candidates[at].device_bytes
    return chosen
