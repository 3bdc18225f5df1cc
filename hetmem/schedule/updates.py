"""Updates of chunks under way, for run and plan alike: whose turn it is. Pure.

What an update needs is brought to host memory, its tiles run on the workers, and all goes back. Reads for the next
update and writes of the last one go on meanwhile, and so may a backward or a forward. `HostUpdates` decides which is
next; how one is carried out, on threads and streams or on a clock, is in what is derived from it.

    queued -> opening (its roles are on their way) -> running -> over

Note "turns": updates of chunks that were queued go in the order in which the next forward wants their weights, and not
in that of their gradients, which is the opposite. What a step leaves undone is wanted late then, and a forward does not
wait for all of it at its first layer. The order changes no bits: each update is of its chunk alone.

Note "openings": updates run in the order in which they open, and one opens only once all that opened before it have a
place for each of their roles. So those need no more memory to be computed, and at most one, the last, holds places
while it waits for others: for those that the updates before it will give back. Two that each held what the other needs
would wait for ever.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import insort_right
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Generic, TypeVar

T = TypeVar("T")

AT_ONCE = 3
"""Updates opening or running together: while one is computed, the next ones are brought."""
_GIVEN_UP = 8
"""Times that updates give memory up for one wait: its copy crosses two tiers, and reads under way end first."""


class HostUpdates(ABC, Generic[T]):
    """Updates by the workers of the host."""

    def __init__(self, number: Callable[[T], int]) -> None:
        self._number = number
        self._queue: list[T] = []
        """In the order of their numbers, and of equal ones as they came: see note "turns"."""
        self._opening: deque[T] = deque()
        self._running: list[T] = []
        self._pumping = False
        self._given_up = 0
        """How often memory was given up in one wait since an update has run."""

    @property
    def idle(self) -> bool:
        """Whether nothing is queued or under way."""
        return not (self._queue or self._opening or self._running)

    def _put(self, update: T) -> None:
        """Queue `update`."""
        insort_right(self._queue, update, key=self._number)

    @abstractmethod
    def _is_free(self, update: T) -> bool:
        """Whether the gradients of `update` have arrived, and nothing else is under way with its chunk."""

    @abstractmethod
    def _has_places(self, update: T) -> bool:
        """Whether each role of `update`, which is opening, has a place in staging."""

    @abstractmethod
    def _is_open(self, update: T) -> bool:
        """Whether all roles of `update`, which is opening, are there."""

    @abstractmethod
    def _ask(self, update: T) -> None:
        """Command: bring the roles of `update` to host memory. Nothing is asked for if this raises."""

    @abstractmethod
    def _unask(self, update: T) -> None:
        """Command: take `_ask` back."""

    @abstractmethod
    def _run(self, update: T) -> None:
        """Command: compute `update`, which is open."""

    def _carry_out(self, command: Callable[[], None]) -> None:
        """Carry `command` out, and all that can be done then, in the middle of whatever the thread that trains does."""
        following: Callable[[], None] | None = command
        while following is not None:
            following()
            following = self._next()

    def pump(self) -> None:
        """Go on as far as that needs no waiting."""
        if self._pumping or self.idle:
            return
        self._pumping = True
        try:
            if (command := self._next()) is not None:
                self._carry_out(command)
        finally:
            self._pumping = False

    def _next(self) -> Callable[[], None] | None:
        """What can be done now: an update can open, or run; None if there is nothing."""
        update = next(filter(self._is_free, self._queue), None) if self._may_open() else None
        if update is not None:
            return partial(self._open, update)
        return self._run_first if self._opening and self._is_open(self._opening[0]) else None

    def _may_open(self) -> bool:
        """Whether an update may open; see the note "openings"."""
        if not self._queue or len((*self._opening, *self._running)) >= AT_ONCE:
            return False
        return not self._opening or self._has_places(self._opening[-1])  # those before had places when it opened

    def _open(self, update: T) -> None:
        self._queue.remove(update)
        try:
            self._ask(update)
        except BaseException:
            self._put(update)
            raise
        self._opening.append(update)

    def _run_first(self) -> None:
        self._given_up = 0
        self._run(self._opening.popleft())

    def give_way(self, *, again: bool) -> bool:
        """Let go of what is open but not computed with yet, for what needs its memory; False if that is nothing, or
        if it was let go of `again` and again in one wait though no update has run: it would be taken each time."""
        self._given_up = self._given_up + 1 if again else 0
        if self._given_up >= _GIVEN_UP:
            return False
        gives = bool(self._opening)
        while self._opening:
            update = self._opening.pop()
            self._unask(update)
            self._put(update)
        return gives
