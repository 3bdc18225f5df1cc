"""Which storages that autograd saves leave the device, so that a step fits: the fewest, those saved longest first.

Pure numbers, for a run and a plan alike. Time is a clock that ticks whenever a storage is saved, or used by the
backward.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from hetmem.schedule.trace import NEVER

AT_ONCE = 2
"""So many storages may cross a link at one time, however large: one crosses while the next is asked for."""
LEAST_BYTES = 256 << 10
"""Below this a copy takes longer to ask for than to make, and a step saves many such."""
_LEAST_PART = 4096
"""A storage below this part of the device is none that counts either."""
LOOKED_AT = 16
"""So many of those saved last are looked at each time; of those before, most stay where they are."""
MANY_CHUNKS = 4
"""Of so many copies, the largest, chunks need not give any for activations that come before their use."""


def least_bytes(device_bytes: int) -> int:
    """Return the bytes of the smallest storage that is worth moving."""
    return max(1, min(LEAST_BYTES, device_bytes // _LEAST_PART))


@dataclass(slots=True)
class SavedInterval:
    """A storage of `nbytes` that is saved at the tick `saved_at`. Only the graph holds it from `free_at` on, up to
    which moving it would free nothing; its first use in the backward is at `used_at`."""

    nbytes: int
    saved_at: int
    free_at: int = NEVER
    used_at: int = NEVER

    @property
    def gap(self) -> int:
        """How long it may be away."""
        return self.used_at - self.free_at


def to_leave(saved: Sequence[SavedInterval], needed_bytes: Sequence[int], room_bytes: int, lag: int = 0) -> set[int]:
    """Return the indices of those of `saved` that have to be away while they are not used, for a step to fit.

    `needed_bytes`: the most that each tick needs of the device if all stay; `room_bytes`: what there is. Those with the
    longest gap between save and use go first, as one that goes then frees most of the step; none that frees nothing of
    a tick that has too little room. If all of them are too few, all that help are returned.

    `lag`: copies are made beside compute, so that for so many ticks one that leaves, or comes back, is still there, or
    already. Then those that leave are spread over the step, in which the links have time for them all along.
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
    """The indices of as many of those that would be away when most is missing as make up for that, evenly among
    them."""
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
    """What was saved between the first forward and the last backward of graphs that live at once, as `to_leave` takes
    it. A storage is known by its number, and across rounds by its place: the forward that saved it, and which of the
    storages that this saved it was."""

    intervals: dict[int, SavedInterval] = field(default_factory=dict)
    places: dict[int, tuple[Hashable, int]] = field(default_factory=dict)
    needed_bytes: list[int] = field(default_factory=lambda: [0])
    used: bool = False
    """Whether a backward has begun."""

    def save(self, number: int, place: tuple[Hashable, int], nbytes: int, needed_bytes: int) -> None:
        """Note that a storage is saved while the device needs `needed_bytes`."""
        self.needed_bytes.append(needed_bytes)
        self.places[number] = place
        self.intervals[number] = SavedInterval(nbytes, len(self.needed_bytes) - 1)

    def free(self, number: int) -> None:
        """Note that only graphs hold a storage from now on."""
        interval = self.intervals.get(number)
        if interval is not None and interval.free_at == NEVER:
            interval.free_at = len(self.needed_bytes) - 1

    def use(self, number: int, needed_bytes: int) -> None:
        """Note that the backward uses a storage while the device needs `needed_bytes`."""
        self.used = True
        interval = self.intervals.get(number)
        if interval is not None and interval.used_at == NEVER:
            self.needed_bytes.append(needed_bytes)
            interval.used_at = len(self.needed_bytes) - 1

    def need(self, needed_bytes: int) -> None:
        """Note that the device needs so much now, with all on it that was saved."""
        self.needed_bytes[-1] = max(self.needed_bytes[-1], needed_bytes)

    def to_leave(self, room_bytes: int, lag: int = 0) -> set[tuple[Hashable, int]]:
        """Return the places of those that have to leave; see `to_leave`."""
        numbers = [number for number, each in self.intervals.items() if each.free_at < NEVER]
        saved = [self.intervals[number] for number in numbers]
        return self.places_of(numbers[index] for index in to_leave(saved, self.needed_bytes, room_bytes, lag))

    def places_of(self, numbers: Iterable[int]) -> set[tuple[Hashable, int]]:
        """Return the places of the storages with `numbers`."""
        return {self.places[number] for number in numbers if number in self.places}
