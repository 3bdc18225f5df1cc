"""Chooses the saved storages that leave the device as soon as they can: all, or those that do not fit in a step.

Note "auto": the first step of a kind moves nothing until the device has no room; then the storages saved first leave.
From the record of that step `schedule.saved` decides which must leave, and in the next one, which is measured again,
these leave as soon as they can. Storages that still had to leave for lack of room join them, until there are none.
"""

from __future__ import annotations

from collections.abc import Hashable

from hetmem.engine.runtime import Runtime
from hetmem.schedule.saved import AT_ONCE, SavedRound

ALL_BYTES = 1 << 62
"""More bytes than any device has."""


class LeavingChoice:
    """Chooses the storages that leave: see note "auto", or all. Callers report what becomes of each, by number."""

    def __init__(self, runtime: Runtime, *, all_leave: bool, beside: bool) -> None:
        """Choose all if `all_leave`. `beside`: transfers overlap compute, and so take device memory meanwhile."""
        self._runtime, self._all_leave, self._lag = runtime, all_leave, AT_ONCE if beside else 0
        if not all_leave:
            runtime.tracer.grows = 1  # a larger batch is measured, as other storages may have to leave
        self.looks_at_all = False
        """Whether `freed` is to be called for staying storages, too."""
        self._round = SavedRound()
        self._chosen: dict[Hashable, set[int]] = {}
        """By key of the forward, the indices of the storages that leave, in order of saving."""
        self._key: Hashable = None
        self._count = 0
        """Number of storages that the forward has saved."""
        self._away: dict[int, int] = {}
        """Bytes of storages that have left and were not used yet, by number."""
        self._forced: set[int] = set()
        """Storages that have left for lack of room."""
        self._measured = False

    def forward_begins(self) -> None:
        """Begin a round, if the last one has ended, and choose by its record. Call it for each forward with a graph,
        before its segment begins."""
        if self._all_leave:
            return
        if self._round.used or not self._round.intervals:
            if self._measured and self._round.intervals:
                self._choose()
            self._round, self._away, self._forced, self._measured = SavedRound(), {}, set(), True
        self._key = None

    def _choose(self) -> None:
        recorded, room = self._round, self._runtime.room
        leaving: set[tuple[Hashable, int]] = set()
        is_new = self._chosen.keys().isdisjoint(key for key, _ in recorded.keys.values())
        if is_new:
            leaving = recorded.to_leave(room.saved_bytes(), self._lag)
        leaving = leaving or recorded.keys_of(self._forced)
        for key, at in leaving:
            self._chosen.setdefault(key, set()).add(at)
        if leaving:
            self._runtime.tracer.measure_again()

    def saved(self, number: int, nbytes: int) -> bool:
        """Note that a storage is saved; return whether it leaves as soon as it can."""
        if self._all_leave:
            return True
        tracer = self._runtime.tracer
        if self._key is None:
            self._key, self._count = tracer.key, 0
            self._measured = self._measured and tracer.measured
            self.looks_at_all = tracer.measured
        key = (self._key, self._count)
        self._count += 1
        if self._measured:
            self._round.save(number, key, nbytes, self._needed())
        chosen = self._chosen.get(self._key)
        return chosen is not None and key[1] in chosen

    def freed(self, number: int) -> None:
        """Note that only graphs refer to a storage."""
        self._round.free(number)

    def left(self, number: int, nbytes: int, *, forced: bool) -> None:
        """Note that a storage leaves; `forced`: for lack of room."""
        if self._measured:
            self._away[number] = nbytes
            self._round.free(number)
            if forced:
                self._forced.add(number)

    def used(self, number: int) -> None:
        """Note that the backward uses a storage, which is on the device then."""
        self._round.used = True
        if self._measured:
            self._round.use(number, self._needed())
            self._away.pop(number, None)

    def needs(self, own_bytes: int) -> None:
        """Note that the device needs `own_bytes` beside chunks and storages in flight."""
        if self._measured:
            self._round.need(own_bytes + sum(self._away.values()))

    def _needed(self) -> int:
        return self._runtime.room.own_bytes() + sum(self._away.values())

    def to_go(self, missing_bytes: int, leaving_bytes: int) -> int:
        """Return the bytes that are to leave if `missing_bytes` have no room, of which some are leaving already."""
        return ALL_BYTES if self._all_leave else missing_bytes - leaving_bytes
