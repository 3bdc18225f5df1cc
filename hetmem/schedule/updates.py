"""Orders the updates of chunks that are under way, in a run and a plan. Pure.

The roles that an update needs are brought to host memory, its tiles run on the workers, and the results are written
back. Reads for the next update and writes of the last one overlap with that, and so may a backward or a forward.
`HostUpdates` decides which update is next; its subclasses carry updates out, on threads and streams or on a clock.

    queued -> opening (its roles are in flight) -> running -> done

Note "turns": queued updates of chunks run in the order in which the next forward uses their weights, and not in that of
their gradients, which is the opposite. So the updates that a step leaves pending are those needed last, and a forward
does not wait for all of them at its first layer. The order changes no bits: each update is of its chunk alone.

Note "openings": updates run in the order in which they open, and one opens only once all that opened before it have a
slot for each of their roles. So these need no more memory, and at most one, the last, holds slots while it waits for
others: those that the updates before it will free. Two that each held what the other needs would deadlock.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import insort_right
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

AT_ONCE = 3
"""Updates opening or running together: while one is computed, the next ones are read."""
_MOST_RELEASES = 8
"""How often updates release memory for one wait: its copy crosses two tiers, and reads in flight must end first."""


class HostUpdates(ABC, Generic[T]):
    """Updates on the threads of the host."""

    def __init__(self, number: Callable[[T], int]) -> None:
        self._number = number
        self._queue: list[T] = []
        """In ascending order of their numbers, equal ones first in, first out: see note "turns"."""
        self._opening: deque[T] = deque()
        self._running: list[T] = []
        self._pumping = False
        self._releases = 0
        """How often updates have released memory in one wait since one has run."""

    @property
    def idle(self) -> bool:
        """Whether no update is queued, opening or running."""
        return not (self._queue or self._opening or self._running)

    def _put(self, update: T) -> None:
        if self._queue:
            insort_right(self._queue, update, key=self._number)
        else:
            self._queue = [update]

    @abstractmethod
    def _is_free(self, update: T) -> bool:
        """Return whether the gradients of `update` have arrived, and no other transfer or update uses its chunk."""

    @abstractmethod
    def _has_slots(self, update: T) -> bool:
        """Return whether each role of `update`, which is opening, has a slot in staging."""

    @abstractmethod
    def _is_open(self, update: T) -> bool:
        """Return whether all roles of `update`, which is opening, have arrived."""

    @abstractmethod
    def _request(self, update: T) -> None:
        """Carry out a command: bring the roles of `update` to host memory. If this raises, nothing was requested."""

    @abstractmethod
    def _cancel(self, update: T) -> None:
        """Carry out a command: release what `_request` asked for."""

    @abstractmethod
    def _run(self, update: T) -> None:
        """Carry out a command: compute `update`, which is open."""

    def _advance(self, update: T) -> None:
        """Open or run `update`, which `_next` has returned, and all that it returns after that."""
        following: T | None = update
        while following is not None:
            if self._opening and following is self._opening[0]:
                self._releases = 0
                self._run(self._opening.popleft())
            else:
                self._open(following)
            following = self._next()

    def pump(self) -> None:
        """Advance updates as far as that takes no waiting."""
        if self._pumping or not (self._queue or self._opening or self._running):
            return
        self._pumping = True
        try:
            if (update := self._next()) is not None:
                self._advance(update)
        finally:
            self._pumping = False

    def _next(self) -> T | None:
        """Return a queued update that can open now, or the first that opens, if that can run; None if there is none."""
        if self._queue and self._may_open():
            for update in self._queue:
                if self._is_free(update):
                    return update
        return self._opening[0] if self._opening and self._is_open(self._opening[0]) else None

    def _may_open(self) -> bool:
        """Return whether a queued update may open; see note "openings"."""
        if (*self._opening, *self._running)[AT_ONCE - 1 :]:
            return False
        return not self._opening or self._has_slots(self._opening[-1])  # those before it had slots when it opened

    def _open(self, update: T) -> None:
        self._queue.remove(update)
        try:
            self._request(update)
        except BaseException:
            self._put(update)
            raise
        self._opening.append(update)

    def give_way(self, *, again: bool) -> bool:
        """Release the roles of updates that are open and not running, for a transfer that needs their memory. Return
        False if there are none, or if they released them `again` and again in one wait without any update running."""
        self._releases = self._releases + 1 if again else 0
        if self._releases >= _MOST_RELEASES:
            return False
        gives = bool(self._opening)
        while self._opening:
            update = self._opening.pop()
            self._cancel(update)
            self._put(update)
        return gives
