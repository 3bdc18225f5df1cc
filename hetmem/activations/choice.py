"""Which storages leave as soon as they may: all of them, or those without which a step does not fit.

Note "auto": the first step of a kind moves nothing until the device has no room; then those saved first leave. From
what that step has shown `schedule.saved` says which must leave, and the next one, which is traced anew, has these leave
as soon as they may. Whatever else still had to leave in it joins them, until nothing has to.

Note "homes": homes of weights and states fill what is idle of the device, so what leaves makes room for them. Once
steps have run that were not measured, their times say whether more is to leave for that: see `schedule.saved`.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Protocol

from hetmem.activations.pace import last_step
from hetmem.engine.runtime import Runtime
from hetmem.schedule.saved import AT_ONCE, SavedRound

ALL_BYTES = 1 << 62
"""More than any device has."""
_STEADY = 3
"""After so many rounds that were not measured the times of the last step count."""
_BALANCED = 2
"""So many times at most more leaves for homes: each time steps are measured once more."""


class Choice(Protocol):
    """Says which storages leave; told what becomes of each, by its number."""

    looks_at_all: bool
    """Whether it is to be told also of those that stay when only graphs hold them."""

    def forward_begins(self) -> None:
        """Note that a forward with a graph begins; its segment has not begun yet."""
        ...

    def saved(self, number: int, nbytes: int) -> bool:
        """Note that a storage is saved; return whether it leaves as soon as it may."""
        ...

    def freed(self, number: int) -> None:
        """Note that only graphs hold a storage."""
        ...

    def left(self, number: int, nbytes: int, *, forced: bool) -> None:
        """Note that a storage leaves; `forced`: for want of room."""
        ...

    def used(self, number: int) -> None:
        """Note that the backward uses a storage, in which it is on the device."""
        ...

    def needs(self, own_bytes: int) -> None:
        """Note that the device needs `own_bytes` beside chunks and what crosses the links."""
        ...

    def to_go(self, missing_bytes: int, leaving_bytes: int) -> int:
        """Return the bytes that are to leave where so many are missing, and so many are leaving already."""
        ...


class Everything:
    """Has all leave."""

    looks_at_all = False

    def forward_begins(self) -> None:
        """Nothing is learned."""

    def saved(self, number: int, nbytes: int) -> bool:
        """All leave."""
        return True

    def freed(self, number: int) -> None:
        """Nothing is learned."""

    def left(self, number: int, nbytes: int, *, forced: bool) -> None:
        """Nothing is learned."""

    def used(self, number: int) -> None:
        """Nothing is learned."""

    def needs(self, own_bytes: int) -> None:
        """Nothing is learned."""

    def to_go(self, missing_bytes: int, leaving_bytes: int) -> int:
        """All."""
        return ALL_BYTES


class WhatMust:
    """Has those leave without which the step does not fit; see note "auto"."""

    def __init__(self, runtime: Runtime, *, beside: bool) -> None:
        """`beside`: copies are made beside compute, so that what crosses a link takes memory meanwhile."""
        self._runtime, self._lag = runtime, AT_ONCE if beside else 0
        runtime.tracer.grows = 1  # a larger batch is measured, as other storages may have to leave
        self._round = SavedRound()
        self._chosen: dict[Hashable, set[int]] = {}
        """By forward, the places of those that leave."""
        self._key: Hashable = None
        self._count = 0
        """Storages that the forward has saved."""
        self._away: dict[int, int] = {}
        """The bytes of those that have left and were not used yet."""
        self._forced: set[int] = set()
        self._measured = False
        self._known = SavedRound()
        """The last one that was measured."""
        self._steady = self._balanced = 0
        self.looks_at_all = False

    def forward_begins(self) -> None:
        """Begin a round, if the last one is over, and choose by what it has shown."""
        if self._round.used or not self._round.intervals:
            if self._measured and self._round.intervals:
                self._known, self._steady = self._round, 0
                self._choose()
            elif self._round.used:
                self._steady += 1
                if self._steady == _STEADY and self._balanced < _BALANCED:
                    self._balance()
            self._round, self._away, self._forced, self._measured = SavedRound(), {}, set(), True
        self._key = None

    def _balance(self) -> None:
        """Let more leave if the step is shorter with what they make room for; see note "homes"."""
        room, known = self._runtime.room, self._known
        elsewhere, pace = room.movable_bytes(), last_step(self._runtime)
        if not elsewhere or pace is None:
            return
        leaving = {(key, at) for key, places in self._chosen.items() for at in places}
        places = known.to_leave_for_homes(pace, elsewhere, room.saved_bytes, leaving)
        if places:
            self._chosen = {key: {at for of, at in places if of == key} for key, _ in places}
            self._balanced += 1
            room.needs_less()

    def _choose(self) -> None:
        recorded, room = self._round, self._runtime.room
        places: set[tuple[Hashable, int]] = set()
        is_new = self._chosen.keys().isdisjoint(key for key, _ in recorded.places.values())
        if is_new:
            places = recorded.to_leave(room.saved_bytes(), self._lag)
        places = places or recorded.places_of(self._forced)
        for key, at in places:
            self._chosen.setdefault(key, set()).add(at)
        if places:
            self._runtime.tracer.measure_again()

    def saved(self, number: int, nbytes: int) -> bool:
        """Return whether it was chosen."""
        tracer = self._runtime.tracer
        if self._key is None:
            self._key, self._count = tracer.key, 0
            self._measured = self._measured and tracer.measured
            self.looks_at_all = tracer.measured
        place = (self._key, self._count)
        self._count += 1
        if self._measured:
            self._round.save(number, place, nbytes, self._needed())
        chosen = self._chosen.get(self._key)
        return chosen is not None and place[1] in chosen

    def freed(self, number: int) -> None:
        """Note it where the round is measured."""
        self._round.free(number)

    def left(self, number: int, nbytes: int, *, forced: bool) -> None:
        """Note it where the round is measured."""
        if self._measured:
            self._away[number] = nbytes
            self._round.free(number)
            if forced:
                self._forced.add(number)

    def used(self, number: int) -> None:
        """Note it where the round is measured."""
        self._round.used = True
        if self._measured:
            self._round.use(number, self._needed())
            self._away.pop(number, None)

    def needs(self, own_bytes: int) -> None:
        """Note it where the round is measured."""
        if self._measured:
            self._round.need(own_bytes + sum(self._away.values()))

    def _needed(self) -> int:
        return self._runtime.room.own_bytes() + sum(self._away.values())

    def to_go(self, missing_bytes: int, leaving_bytes: int) -> int:
        """Return what is missing beside those that leave already."""
        return missing_bytes - leaving_bytes
