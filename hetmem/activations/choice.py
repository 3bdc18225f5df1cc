"""Which storages leave as soon as they may: all of them, or those without which a step does not fit.

Note "auto": the first step of a kind moves nothing until the device has no room; then those saved first leave. From
what that step has shown `schedule.saved` says which must leave, and the next one, which is traced anew, has these leave
as soon as they may. Whatever else still had to leave in it joins them, until nothing has to.
"""

from __future__ import annotations

from collections.abc import Hashable

from hetmem.engine.runtime import Runtime
from hetmem.schedule.saved import AT_ONCE, SavedRound

ALL_BYTES = 1 << 62
"""More than any device has."""


class LeavingChoice:
    """Has those storages leave without which the step does not fit, see note "auto", or all of them; is told what
    becomes of each, by its number."""

    def __init__(self, runtime: Runtime, *, all_leave: bool, beside: bool) -> None:
        """`beside`: copies are made beside compute, so that what crosses a link takes memory meanwhile."""
        self._runtime, self._all_leave, self._lag = runtime, all_leave, AT_ONCE if beside else 0
        if not all_leave:
            runtime.tracer.grows = 1  # a larger batch is measured, as other storages may have to leave
        self.looks_at_all = False
        """Whether it is to be told also of those that stay when only graphs hold them."""
        self._round = SavedRound()
        self._chosen: dict[Hashable, set[int]] = {}
        """By forward, the keys of storages that leave."""
        self._key: Hashable = None
        self._count = 0
        """Storages that the forward has saved."""
        self._away: dict[int, int] = {}
        """The bytes of those that have left and were not used yet."""
        self._forced: set[int] = set()
        self._measured = False

    def forward_begins(self) -> None:
        """Begin a round, if the last one is over, and choose by what it has shown: a forward with a graph begins, whose
        segment has not begun yet."""
        if self._all_leave:
            return
        if self._round.used or not self._round.intervals:
            if self._measured and self._round.intervals:
                self._choose()
            self._round, self._away, self._forced, self._measured = SavedRound(), {}, set(), True
        self._key = None

    def _choose(self) -> None:
        recorded, room = self._round, self._runtime.room
        keys: set[tuple[Hashable, int]] = set()
        is_new = self._chosen.keys().isdisjoint(forward for forward, _ in recorded.keys.values())
        if is_new:
            keys = recorded.to_leave(room.saved_bytes(), self._lag)
        keys = keys or recorded.keys_of(self._forced)
        for forward, at in keys:
            self._chosen.setdefault(forward, set()).add(at)
        if keys:
            self._runtime.tracer.measure_again()

    def saved(self, number: int, nbytes: int) -> bool:
        """Note that a storage is saved; return whether it leaves as soon as it may."""
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
        """Note that only graphs hold a storage."""
        self._round.free(number)

    def left(self, number: int, nbytes: int, *, forced: bool) -> None:
        """Note that a storage leaves; `forced`: for want of room."""
        if self._measured:
            self._away[number] = nbytes
            self._round.free(number)
            if forced:
                self._forced.add(number)

    def used(self, number: int) -> None:
        """Note that the backward uses a storage, in which it is on the device."""
        self._round.used = True
        if self._measured:
            self._round.use(number, self._needed())
            self._away.pop(number, None)

    def needs(self, own_bytes: int) -> None:
        """Note that the device needs `own_bytes` beside chunks and what crosses the links."""
        if self._measured:
            self._round.need(own_bytes + sum(self._away.values()))

    def _needed(self) -> int:
        return self._runtime.room.own_bytes() + sum(self._away.values())

    def to_go(self, missing_bytes: int, leaving_bytes: int) -> int:
        """Return the bytes that are to leave where so many are missing, and so many are leaving already."""
        return ALL_BYTES if self._all_leave else missing_bytes - leaving_bytes
