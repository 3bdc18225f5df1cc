"""Which storages that autograd saves leave the device, so that a step fits: the fewest, those saved longest first.

Pure numbers, for a run and a plan alike. Time is a clock that ticks whenever a storage is saved, or used by the
backward.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field

from hetmem.schedule.trace import NEVER

AT_ONCE = 2
"""So many storages may cross a link at one time, however large: one crosses while the next is asked for."""


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


def to_leave(saved: Sequence[SavedInterval], needed_bytes: Sequence[int], room_bytes: int) -> set[int]:
    """Return the indices of those of `saved` that have to be away while they are not used, for a step to fit.

    `needed_bytes`: the most that each tick needs of the device if all stay; `room_bytes`: what there is. Those with the
    longest gap between save and use go first, as one that goes then frees most of the step; none that frees nothing of
    a tick that has too little room. If all of them are too few, all that help are returned.
    """
    missing = {tick: needed - room_bytes for tick, needed in enumerate(needed_bytes) if needed > room_bytes}
    leaving: set[int] = set()
    for index in sorted(range(len(saved)), key=lambda index: (-saved[index].gap, index)):
        if not missing:
            break
        each = saved[index]
        relieved = [tick for tick in missing if each.free_at < tick < each.used_at]
        if relieved:
            leaving.add(index)
        for tick in relieved:
            missing[tick] -= each.nbytes
            if missing[tick] <= 0:
                del missing[tick]
    return leaving


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

    def to_leave(self, room_bytes: int) -> set[tuple[Hashable, int]]:
        """Return the places of those that have to leave; see `to_leave`."""
        numbers = [number for number, each in self.intervals.items() if each.free_at < NEVER]
        chosen = to_leave([self.intervals[number] for number in numbers], self.needed_bytes, room_bytes)
        return {self.places[numbers[index]] for index in chosen}

    def places_of(self, numbers: Iterable[int]) -> set[tuple[Hashable, int]]:
        """Return the places of the storages with `numbers`."""
        return {self.places[number] for number in numbers if number in self.places}
