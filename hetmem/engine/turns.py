"""Which thread computes with a model: one at a time, and each other one waits for its turn.

Note "turns": a forward, a backward, a step, and whatever else reads or writes what a model has on its tiers, is a
section of one thread; those of the same thread lie within each other. Another thread's comes when the outermost is
over, in the order in which the threads asked. Between the sections of a step another thread may have its turn, so that
any program gets what it would get if each of these calls were made by one thread, in the same order. A section that
ends without a word, as a forward does that Ctrl-C ends, is over once its call is not on the stack of its thread.
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from threading import get_ident

from hetmem import torch_private
from hetmem.base.config import turn_timeout_seconds
from hetmem.errors import ManageError
from hetmem.memory.interrupts import HELD_BACK


def in_backward() -> bool:
    """Whether autograd is running a backward on this thread."""
    return bool(torch_private.current_graph_task() != -1)


class Running:
    """Backwards that run now, each by the thread that has called it; those within a node of another are left out.

    Note "backwards that raise": autograd does not report it, and drops what it was to call at the end. A device has a
    thread of its own for the backward, which may drop that last, some time after the caller has got the error. Until
    then the next backward would look like a part of the one that has raised, and its gradients would not be waited for.
    So a backward is over, too, once none of those that it may be is running; on a thread of autograd's that is any.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._by_thread: dict[int, int] = {}

    def begin(self) -> None:
        """This thread calls a backward."""
        self._by_thread[threading.get_ident()] = next(self._numbers)

    def end(self) -> None:
        """It has returned or raised."""
        self._by_thread.pop(threading.get_ident(), None)

    def here(self) -> frozenset[int]:
        """The backwards that the node which runs on this thread may be of."""
        own = self._by_thread.get(threading.get_ident())
        return frozenset(self.all() if own is None else (own,))

    def callers(self) -> tuple[int, ...]:
        """The threads that have called them."""
        return tuple(self._by_thread)

    def all(self) -> tuple[int, ...]:
        """Their numbers."""
        return tuple(self._by_thread.values())


RUNNING = Running()
"""Of the process."""


_POLL_SECONDS = 0.05
_NUMBERS = itertools.count()
_WAITING: dict[int, Turn] = {}
"""By thread, the turn that it waits for."""


class Section:
    """`what` a thread does with a model, until it gives the turn back, or `runs` says that it does so no more."""

    __slots__ = ("native", "runs", "thread", "what")

    def __init__(self, what: str, thread: int, runs: Callable[[], bool | None] | None) -> None:
        self.what, self.thread, self.runs = what, thread, runs
        self.native = threading.get_native_id()

    def is_over(self) -> bool:
        """Whether it has ended without a word."""
        return self.thread not in sys._current_frames() or (self.runs is not None and not self.runs())

    def __str__(self) -> str:
        names = (thread.name for thread in threading.enumerate() if thread.ident == self.thread)
        return f"{self.what} on thread {next(names, 'that has ended')!r}"


class Turn:
    """That of one model. `progress` says something else whenever the model's transfers and updates have moved on."""

    def __init__(self, progress: Callable[[], Hashable]) -> None:
        self.number = next(_NUMBERS)
        """Several turns are taken in this order."""
        self.trainers: set[int] = set()
        """The threads that have computed forwards with a graph: a backward of theirs may be of this model."""
        self._progress = progress
        self._changed = threading.Condition()
        self._sections: list[Section] = []
        self._queue: list[Section] = []
        self._given = 0
        self._last: Section | None = None

    def take(
        self, what: str, runs: Callable[[], bool | None] | None = None, ready: Callable[[], bool] | None = None
    ) -> Section:
        """Begin a section of this thread once no other one has the turn, and `ready` says that it may begin.

        Raises `ManageError` if that would be never: two threads wait for each other, or the one that has the turn has
        done nothing for as long as `turn_timeout_seconds` says.
        """
        section = Section(what, self._acting(), runs)
        while True:
            with self._changed:
                if self._queue or self._sections:
                    self._wait_in_line(section)
                self._sections.append(section)
                if ready is None or ready():
                    return section
                self._sections.remove(section)
                self._changed.notify_all()
                given = self._given
                self._wait(section, lambda given=given: self._given != given)  # type: ignore[misc]

    def take_if_free(self, what: str) -> Section | None:
        """The same, or None where it would have to wait."""
        with self._changed:
            free = not self._queue and not self._sections
            return self.take(what) if free or self.is_mine() else None

    def give(self, section: Section) -> None:
        """`section` is over."""
        with self._changed:
            if section in self._sections:
                self._sections.remove(section)
                self._last = section
                self._given += 1
                self._changed.notify_all()

    @contextmanager
    def held(self, what: str, ready: Callable[[], bool] | None = None) -> Iterator[None]:
        """A section that is the body of a `with`."""
        section = self.take(what, ready=ready)
        try:
            yield
        finally:
            self.give(section)

    def is_mine(self) -> bool:
        """Whether this thread has it."""
        return self._has(self._acting())

    # ---- inside ------------------------------------------------------------------------------------------------

    def _acting(self) -> int:
        """Return the thread that this one works for: one of autograd's own works for the caller of the backward."""
        me = get_ident()
        callers = RUNNING.callers() if in_backward() else ()
        if callers and me not in callers:
            return next(filter(self._has, callers), callers[0])
        return me

    def _has(self, thread: int) -> bool:
        return any(section.thread == thread for section in tuple(self._sections))

    def _wait_in_line(self, section: Section) -> None:
        if self._has(section.thread):
            return
        self._queue.append(section)
        try:
            self._wait(section, lambda: self._queue[0] is section and self._is_free())
        finally:
            self._queue.remove(section)
            self._changed.notify_all()

    def _is_free(self) -> bool:
        for other in tuple(self._sections):
            if other.is_over():
                self._sections.remove(other)
        return not self._sections

    def _wait(self, section: Section, over: Callable[[], bool]) -> None:
        patience = turn_timeout_seconds()
        seen, since = None, time.monotonic()
        _WAITING[section.thread] = self
        try:
            while not over():
                HELD_BACK.raise_here()
                other = self._who_has_it(section)
                now = (other, _worked(other), self._given, self._progress())
                if now != seen:
                    seen, since = now, time.monotonic()
                elif time.monotonic() - since >= patience:
                    raise ManageError(_stuck(section, other, patience, ready=bool(self._sections)))
                self._changed.wait(min(_POLL_SECONDS, patience / 4))
        finally:
            del _WAITING[section.thread]

    def _who_has_it(self, section: Section) -> Section | None:
        """The one that `section` waits for, or that one waits for itself, and so on. Raises `ManageError` if that is of
        the same thread."""
        last = next(iter(self._sections), self._last)
        for _ in tuple(_WAITING):
            turn = None if last is None else _WAITING.get(last.thread)
            following = None if turn is None else next(iter(tuple(turn._sections)), None)
            if following is None:
                break
            if following.thread == section.thread:
                raise ManageError(
                    f"{section} waits for {last}, which waits for {following}: have both take their models in the same "
                    f"order"
                )
            last = following
        return last


def _worked(section: Section | None) -> Hashable:
    """What is another thing whenever the thread of `section` has run meanwhile."""
    if section is None or section.thread not in sys._current_frames():
        return None
    try:
        with open(f"/proc/self/task/{section.native}/schedstat", "rb") as file:
            return file.read()
    except OSError:
        return None


def _stuck(section: Section, other: Section | None, patience: float, *, ready: bool) -> str:
    if ready:
        waits = (
            f"it waits for {other}, which has done nothing meanwhile: does that wait for this thread (a lock, a join)?"
        )
    else:
        waits = (
            f"{other} has begun to update weights (overlap=) and no step() has followed: hold the lock around backward "
            f"and step together, or set overlap='off'"
        )
    return (
        f"{section} has waited {patience:g} s for its turn, as one thread computes with a model at a time: {waits} "
        f"(HETMEM_TURN_TIMEOUT says how many seconds to wait)"
    )
