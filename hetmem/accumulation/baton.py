"""Lets one of several threads run at a time: the one that has the baton. It does not know what they compute.

Micro-batches are numbered from 0, and each has a thread. They run in rounds: the baton goes to the next number that
has not ended, and after the last one to the first.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Protocol

from hetmem.memory.interrupts import HELD_BACK


class Unwound(BaseException):
    """Ends a micro-batch where it waits, as another one has failed. Not an `Exception`, which a program may handle."""


class Exchanged(Protocol):
    """State of the process that each micro-batch has for itself."""

    def enter(self, number: int) -> None:
        """Begin or go on with the micro-batch `number`."""

    def leave(self, number: int) -> None:
        """Keep what the micro-batch `number` has, as another one goes on."""


class _Mine(threading.local):
    """What each thread knows of itself, read without a call."""

    number: int | None = None


class Baton:
    """Passes the turn among `count` threads. `after_round` is called, by the thread that has the baton, after the last
    one has had it in each round; what it raises is raised there.

    The calling thread waits in `run` while the others have the baton. If one of them fails, `break_off` has each of the
    others raise `Unwound` where it waits, one after the other.
    """

    def __init__(self, count: int, exchanged: Exchanged, after_round: Callable[[], None] = lambda: None) -> None:
        self._exchanged, self._after_round = exchanged, after_round
        self._gates = [threading.Lock() for _ in range(count)]
        for gate in self._gates:
            gate.acquire()
        self.running: list[int] = []
        """The micro-batches that have not ended, in order."""
        self._over = threading.Lock()
        self._over.acquire()
        self._broken_off = False
        self.mine = _Mine()
        """`mine.number` is the number of the micro-batch that the calling thread runs; None on other threads."""

    # ---- the calling thread ------------------------------------------------------------------------------------

    def run(self, numbers: Iterable[int]) -> None:
        """Have `numbers`, whose threads are in `begin` or come there, run until each has called `end`. An exception
        raised here meanwhile, as by Ctrl-C, breaks them off, and is raised once all have ended."""
        self.running = [*numbers]
        begun, interrupt = False, list[BaseException]()
        while self.running:
            try:
                with HELD_BACK:
                    if not begun:
                        begun = True
                        self._gates[self.running[0]].release()
                self._over.acquire()
            except BaseException as error:  # noqa: PERF203 - each interrupt is raised here
                self.break_off()
                interrupt.append(error)
        if interrupt:
            raise interrupt.pop(0)

    def break_off(self) -> None:
        """Have all that wait, or will wait, raise `Unwound`."""
        self._broken_off = True

    # ---- the threads that run ----------------------------------------------------------------------------------

    def begin(self, number: int) -> None:
        """Wait until `number`, which the calling thread runs from here on, has the baton."""
        self.mine.number = number
        self._gates[number].acquire()
        if self._broken_off:
            raise Unwound
        self._exchanged.enter(number)

    def pass_on(self, number: int) -> None:
        """Give the baton to the next one, and wait until it comes back. Raises `Unwound` if they are broken off."""
        if self._broken_off:
            raise Unwound
        running = self.running
        if running[-1] == number:
            self._after_round()
            following = running[0]
        else:
            following = running[running.index(number) + 1]
        if following != number:
            self._exchanged.leave(number)
            self._gates[following].release()
            self._gates[number].acquire()
            if self._broken_off:
                raise Unwound
            self._exchanged.enter(number)

    def end(self, number: int) -> None:
        """Give the baton to the next one, for good, or to the thread in `run` if there is none. Never raises."""
        self.mine.number = None
        self._exchanged.leave(number)
        at = self.running.index(number)
        del self.running[at]
        if self.running:
            self._gates[self.running[at % len(self.running)]].release()
        else:
            self._over.release()
