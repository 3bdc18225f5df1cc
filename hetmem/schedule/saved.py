"""Chooses which storages saved by autograd leave the device so that a step fits: the fewest, those saved longest first.

Pure, for a run and a plan. Time is a clock that ticks whenever a storage is saved, or used by the backward.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from hetmem.schedule.trace import NEVER

AT_ONCE = 2
"""How many storages may cross a link at one time, of any size: one crosses while the next is requested."""
LEAST_BYTES = 256 << 10
"""Smaller copies take longer to request than to make, and a step saves many of them."""
_LEAST_PART = 4096
"""On a small device the smallest storage that is moved is one in this many bytes of it."""
LOOKED_AT = 16
"""How many of the storages saved last are examined each time; most of those saved before stay where they are."""
MANY_CHUNKS = 4
"""Room for this many copies of the largest chunk is never left to prefetched activations."""


def least_bytes(device_bytes: int) -> int:
    """Return the bytes of the smallest storage that is worth moving."""
    return max(1, min(LEAST_BYTES, device_bytes // _LEAST_PART))


@dataclass(slots=True)
class SavedInterval:
    """A storage of `nbytes` that is saved at the tick `saved_at`. From `free_at` on only the graph holds it; moving it
    earlier would free nothing. The backward first uses it at `used_at`."""

    nbytes: int
    saved_at: int
    free_at: int = NEVER
    used_at: int = NEVER

    @property
    def gap(self) -> int:
        """Ticks for which it may be away."""
        return self.used_at - self.free_at


def to_leave(saved: Sequence[SavedInterval], needed_bytes: Sequence[int], room_bytes: int, lag: int = 0) -> set[int]:
    """Return the indices of those of `saved` that must be away while they are not used, so that a step fits.

    `needed_bytes`: the most that each tick needs of the device if all stay; `room_bytes`: the memory of the device.
    Storages with the longest gap between save and use are chosen first, as each of them frees memory for most of the
    step; none is chosen that frees nothing at a tick with too little room. If all together are too few, all that help
    are returned.

    `lag`: copies overlap with compute, so a storage takes memory for so many ticks after it begins to leave and before
    its use. The chosen ones are then spread over the step, so that the links work all along.
    """
    missing = {tick: needed - room_bytes for tick, needed in enumerate(needed_bytes) if needed > room_bytes}
    leaving: set[int] = set()
    by_gap = sorted(range(len(saved)), key=lambda index: (-saved[index].gap, index))
    for index in dict.fromkeys((*_spread(saved, missing, lag), *by_gap)) if lag else by_gap:
        if not missing:
            break
        each = saved[index]
        relieved = [tick for tick in missing if each.free_at + lag < tick < each.used_at - lag]
        if relieved:
            leaving.add(index)
        for tick in relieved:
            missing[tick] -= each.nbytes
            if missing[tick] <= 0:
                del missing[tick]
    return leaving


def _spread(saved: Sequence[SavedInterval], missing: Mapping[int, int], lag: int) -> Iterator[int]:
    """Yield the indices of as many storages as make up for the tick that lacks most, evenly spread among those that
    would be away then."""
    worst = max(missing, key=lambda tick: missing[tick], default=0)
    away = [index for index, each in enumerate(saved) if each.free_at + lag < worst < each.used_at - lag]
    part, due = missing.get(worst, 0) / max(1, sum(saved[index].nbytes for index in away)), 0.0
    for index in sorted(away, key=lambda index: saved[index].free_at):
        due += part * saved[index].nbytes
        if 2 * due >= saved[index].nbytes:
            due -= saved[index].nbytes
            yield index


@dataclass(slots=True)
class SavedRound:
    """What was saved between the first forward and the last backward of graphs that are alive together, as input of
    `to_leave`. A storage has a number, and across rounds a key: the forward that saved it, and its index among the
    storages that this forward saved."""

    intervals: dict[int, SavedInterval] = field(default_factory=dict)
    keys: dict[int, tuple[Hashable, int]] = field(default_factory=dict)
    needed_bytes: list[int] = field(default_factory=lambda: [0])
    used: bool = False
    """Whether a backward has begun."""

    def save(self, number: int, key: tuple[Hashable, int], nbytes: int, needed_bytes: int) -> None:
        """Record that a storage is saved while the device needs `needed_bytes`."""
        self.needed_bytes.append(needed_bytes)
        self.keys[number] = key
        self.intervals[number] = SavedInterval(nbytes, len(self.needed_bytes) - 1)

    def free(self, number: int) -> None:
        """Record that only graphs hold a storage from now on."""
        interval = self.intervals.get(number)
        if interval is not None and interval.free_at == NEVER:
            interval.free_at = len(self.needed_bytes) - 1

    def use(self, number: int, needed_bytes: int) -> None:
        """Record that the backward uses a storage while the device needs `needed_bytes`."""
        self.used = True
        interval = self.intervals.get(number)
        if interval is not None and interval.used_at == NEVER:
            self.needed_bytes.append(needed_bytes)
            interval.used_at = len(self.needed_bytes) - 1

    def need(self, needed_bytes: int) -> None:
        """Record that the device needs `needed_bytes` now if all saved storages stay."""
        self.needed_bytes[-1] = max(self.needed_bytes[-1], needed_bytes)

    def to_leave(self, room_bytes: int, lag: int = 0) -> set[tuple[Hashable, int]]:
        """Return the keys of the storages that must leave; see `to_leave`."""
        numbers = [number for number, each in self.intervals.items() if each.free_at < NEVER]
        saved = [self.intervals[number] for number in numbers]
        return self.keys_of(numbers[index] for index in to_leave(saved, self.needed_bytes, room_bytes, lag))

    def keys_of(self, numbers: Iterable[int]) -> set[tuple[Hashable, int]]:
        """Return the keys of the storages with `numbers`."""
        return {self.keys[number] for number in numbers if number in self.keys}
