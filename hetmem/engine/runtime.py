"""Connects the parts of one managed module, begins its segments, and lets one thread at a time compute with it.

It knows nothing of torch's hooks and modes.

Note "turns": a forward, a backward, a step, and any other access to a model's memory is a section of one thread;
sections of the same thread nest. Another thread waits until the outermost section ends; threads are served in order.
Between the sections of a step another thread may have its turn, so a program gets the results that it would get if one
thread made all these calls in the same order. A section belongs to the object that keeps it, and ends as it is given
back, or as that object is gone. One whose owner stays, and that no hook sees end, as a forward that Ctrl-C ends, is
over once its call is not on the stack of its thread.
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from threading import get_ident

from hetmem import torch_private
from hetmem.base.config import turn_timeout_seconds
from hetmem.base.hardware import HardwareProfile
from hetmem.engine.all_copies import AllCopies
from hetmem.engine.device_limit import DeviceRoom
from hetmem.engine.events import EventLog, Statistics
from hetmem.engine.homes import Memory
from hetmem.engine.outgoing import Outgoing
from hetmem.engine.param_views import Bindings
from hetmem.engine.parameter_marks import ParameterMarks
from hetmem.engine.traffic import Traffic
from hetmem.engine.uses import Uses
from hetmem.engine.write_check import WriteCheck
from hetmem.errors import ManageError
from hetmem.memory.interrupts import HELD_BACK
from hetmem.memory.transfer import TransferEngine
from hetmem.schedule.residency import Residency
from hetmem.schedule.trace import STEP, segment_name
from hetmem.schedule.tracer import StepTracer


class Runtime:
    """The state of one managed module. Only the thread that has the `turn` calls it.

    `residency` owns where copies are, the pools own bytes, `engine` owns threads; the runtime owns the order of events.
    Guarantees after every public method, also one that raised: every parameter outside compute is its home, no capacity
    is exceeded, and no copy is lost.
    """

    def __init__(self, memory: Memory, residency: Residency, engine: TransferEngine, *, sanitize: bool) -> None:
        self.memory = memory
        self.chunks = memory.chunks
        self.sanitize = sanitize
        self.tracer = StepTracer()
        self.statistics = Statistics()
        self.events = EventLog(clock=engine.clock, asynchronous=engine.ordered)
        self.parameters = [managed for chunk in self.chunks for managed in chunk.parameters]
        self.bindings = Bindings(self.parameters)
        self._engine = engine
        self.traffic = Traffic(memory, residency, engine, self.bindings, self.tracer, self.events, sanitize=sanitize)
        self.outgoing = Outgoing(self.events)
        self.writes = WriteCheck(self.parameters, self.bindings, self.traffic, self.outgoing)
        self.room = DeviceRoom(memory, self.traffic, self.tracer, self.statistics, sanitize=sanitize)
        self.monitor = self.room.monitor
        self.unwatched, self.traffic.executor.watch = self.monitor.unwatched, self.monitor
        self.own_work = self.monitor.own_work
        self.uses = Uses(memory, self.bindings, self.traffic, self.tracer, self.writes, self.room, self.events)
        self.all_copies = AllCopies(memory, self.traffic, self.tracer, self.room, self.uses)
        self.turn = Turn(self.outgoing)
        self.in_backward = False
        """Whether a backward of the model runs."""
        self.marks = ParameterMarks(memory, self.bindings, self.writes, self.outgoing, self.uses.read_at_home)
        self.hardware: HardwareProfile | None = None
        """The rates of the machine, if they were given."""
        self.may_join = False
        """Whether this process manages the model alone for want of a process group, and has not stepped yet."""
        self.prediction: Mapping[str, object] | None = None
        """The forecast of the run's plan, if it has one, for reports."""
        self.loss: str | None = None
        """The kernel of `hetmem.chunked_loss` that ran last, in words, for reports."""
        self.at_end: list[Callable[[], None]] = []
        """Called once, as the model is released or dropped, or the process ends. None refers to this runtime."""
        self._finalizer = weakref.finalize(self, _dropped, os.getpid(), engine, memory.pins, self.at_end)

    def close(self) -> None:
        """Wait for transfers in flight and stop all threads; homes stay readable as long as tensors hold them."""
        self.traffic.engine.close()
        self.memory.close()
        self._finalizer()

    # ---- segments and moments ----------------------------------------------------------------------------------

    def begin_segment(self, key: Hashable, *, measured: bool, size: int = 0) -> None:
        """Begin a forward, a backward or a step. `key` identifies its trace; `size`: the bytes of its inputs."""
        if self.uses.rows.open is not None:
            self.uses.end_row()
        self.room.look_at_allocator()
        self.tracer.begin(key, measured=measured, size=size)
        self.room.before_segment()
        self.events.begin_segment(segment_name(key))
        with self.unwatched():
            self.traffic.executor.poll()
            self.expect(key)
            if key != STEP:
                self.uses.renew_held_copies()
                if self.all_copies.leased:
                    self.all_copies.renew()

    def expect(self, key: Hashable) -> None:
        """Give the residency the schedules of the segment `key` and of those that usually follow it."""
        if not self.traffic.residency.blocks or self.traffic.executor.has_working_copies:
            return  # nothing moves
        self.traffic.execute(self.traffic.residency.expect(self.tracer.book.schedules(key)))

    def forget_copies(self) -> None:
        """Drop every copy on every tier, after writing dirty ones to NVMe (again, if a write failed); none may be in
        use."""
        self.traffic.wait_until_written(home for chunk in self.chunks for home in chunk.homes.values())
        self.uses.release_working()
        self.uses.release_unheld()
        self.traffic.forget_copies()

    def renew_touched(self) -> None:
        """Remake copies of weights that the program may have written to since the forward, as a backward begins."""
        if not self.memory.uses_copies:
            return
        with self.unwatched(), torch_private.NoFunctionsOfSubclasses():
            if self.writes.renew_touched():
                self.uses.renew_held_copies()
                if self.all_copies.leased:
                    self.all_copies.renew()

    def after_step(self) -> None:
        """End a step, which has updated the weights, and begin to fetch for the segment that usually follows. Errors
        are dropped, as the step itself has succeeded: a failed fetch is repeated, or raises, where the weight is
        used."""
        self.room.look_at_allocator()
        self.tracer.end()
        self.events.end_segment()
        with suppress(Exception), self.unwatched():
            self.uses.renew_held_copies()
            if self.all_copies.leased:
                self.all_copies.renew()
        self.writes.stepped = True
        follower = self.tracer.book.follower(STEP)
        if follower is not None and not self.writes.handed_out:
            with suppress(Exception):
                self.expect(follower)


def _dropped(
    process: int, engine: TransferEngine, pins: list[Callable[[], None]], at_end: list[Callable[[], None]]
) -> None:
    """End a runtime to which nothing refers any more. The garbage collector may call this anywhere, on any thread, so
    it joins no thread and takes no lock: a thread that collects a model while it starts would wait for itself. A child
    of `process`, made by `fork()`, has none of this."""
    if os.getpid() != process:
        return
    engine.abandon()
    for call in (*pins, *at_end):
        call()


# ---- turns: see note "turns" -----------------------------------------------------------------------------------------


def in_backward() -> bool:
    """Return whether autograd is running a backward on this thread."""
    return bool(torch_private.current_graph_task() != -1)


_ACTS_FOR: dict[int, int] = {}
"""By thread, the one whose turn it shares."""


def acting_thread() -> int:
    """Return the thread that the calling one acts for: itself, or the one whose turn it shares."""
    thread = get_ident()
    return _ACTS_FOR.get(thread, thread)


def is_sharing_a_turn() -> bool:
    """Return whether the calling thread shares the turn of another one."""
    return get_ident() in _ACTS_FOR


@contextmanager
def sharing_the_turn(threads: Iterable[int]) -> Iterator[None]:
    """Have `threads`, of which one runs at a time, share the turns of the calling thread in the body."""
    shared = dict.fromkeys(threads, get_ident())
    _ACTS_FOR.update(shared)
    try:
        yield
    finally:
        for thread in shared:
            del _ACTS_FOR[thread]


_COMPUTE = ("a forward", "a step", "hetmem.accumulate")
_POLL_SECONDS = 0.05
_NUMBERS = itertools.count()


class Section:
    """One use of a model by a thread, called `what` in messages. Ends as the thread gives the turn back, as nothing
    refers to this object any more, or once `runs` returns False."""

    __slots__ = ("__weakref__", "runs", "thread", "what")

    def __init__(self, what: str, thread: int, runs: Callable[[], bool | None] | None) -> None:
        self.what, self.thread, self.runs = what, thread, runs

    def is_over(self) -> bool:
        """Return whether the section has ended without giving the turn back."""
        return self.thread not in sys._current_frames() or (self.runs is not None and not self.runs())

    def __str__(self) -> str:
        names = (thread.name for thread in threading.enumerate() if thread.ident == self.thread)
        return f"{self.what} on thread {next(names, 'that has ended')!r}"


class _Rehearsing(threading.local):
    runs = False


REHEARSAL = _Rehearsing()
"""Whether this thread rehearses a step, for which the thread that has the turn waits."""


class Turn:
    """The turn of one model: the exclusive right of a thread to compute with it."""

    def __init__(self, outgoing: Outgoing) -> None:
        self._outgoing = outgoing
        self.number = next(_NUMBERS)
        """Its place in the order in which several turns are taken."""
        self.parked = False
        """Whether the model has given the device back: it is read, and computes nothing."""
        self.trainers: set[int] = set()
        """Threads that have computed forwards with a graph, so that a backward of theirs may be of this model."""
        self._changed = threading.Condition()
        self._sections: list[weakref.ref[Section]] = []
        """The sections that have not ended, oldest first; held weakly, as what fails to give one back drops it."""
        self._queue: list[Section] = []
        self._given = 0
        self._last: Section | None = None

    def take(
        self, what: str, runs: Callable[[], bool | None] | None = None, ready: Callable[[], bool] | None = None
    ) -> Section:
        """Begin a section of this thread once no other thread has the turn, and `ready` returns True. The
        caller keeps the section as long as it is to last.

        Raises `ManageError` once it has waited for `turn_timeout_seconds`: two threads may wait for each other; and at
        once in a rehearsal, and for compute with a model that is parked. Before compute, the error of a save in the
        background that failed.
        """
        if what.startswith(_COMPUTE):
            self.refuse_if_parked(what)
            if self._outgoing.failed is not None:
                self._outgoing.raise_error()
        if REHEARSAL.runs:
            raise ManageError("a rehearsal uses a managed model: a function of the model's copy refers to the original")
        section = Section(what, acting_thread() if _ACTS_FOR else get_ident(), runs)
        while True:
            with self._changed:
                if self._queue or self._sections:
                    self._wait_in_line(section)
                if ready is None or ready():
                    self._sections.append(weakref.ref(section, self._sections.remove))
                    return section
                given = self._given
                self._wait(section, partial(self._may_be, ready, given))

    def refuse_if_parked(self, what: str) -> None:
        """Raise `ManageError` in the name of `what` if the model is parked."""
        if self.parked:
            raise ManageError(f"{what} of a parked model, which is not on the device: call hetmem.unpark(model) first")

    def give(self, section: Section) -> None:
        """End `section`."""
        with self._changed:
            if (own := weakref.ref(section)) in self._sections:
                self._sections.remove(own)
                self._last = section
                self._given += 1
                self._changed.notify_all()

    @contextmanager
    def held(self, what: str, ready: Callable[[], bool] | None = None) -> Iterator[None]:
        """Hold the turn in the body; see `take`."""
        section = self.take(what, ready=ready)
        try:
            yield
        finally:
            self.give(section)

    def is_mine(self) -> bool:
        """Return whether this thread has the turn, or shares it."""
        return self._has(acting_thread() if _ACTS_FOR else get_ident())

    # ---- inside ------------------------------------------------------------------------------------------------

    def _has(self, thread: int) -> bool:
        return any(section.thread == thread for section in self._running())

    def _running(self) -> list[Section]:
        return [section for own in tuple(self._sections) if (section := own()) is not None]

    def _may_be(self, ready: Callable[[], bool], given: int) -> bool:
        """Return whether `ready` may be True, which was False when turns had been `given` that often."""
        return self._given != given or (not self._sections and ready())  # a thread may have ended

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
        for other in self._running():
            if other.is_over():
                self._sections.remove(weakref.ref(other))
        return not self._sections

    def _wait(self, section: Section, over: Callable[[], bool]) -> None:
        patience = turn_timeout_seconds()
        until = time.monotonic() + patience
        while not over():
            HELD_BACK.raise_here()
            if time.monotonic() >= until:
                running = self._running()
                other = running[0] if running else self._last
                raise ManageError(_stuck(section, other, patience, ready=bool(running)))
            self._changed.wait(min(_POLL_SECONDS, patience / 4))


def _stuck(section: Section, other: Section | None, patience: float, *, ready: bool) -> str:
    if ready:
        waits = f"it waits for {other}: does that wait for this thread (its model, a lock, a join)?"
    else:
        waits = (
            f"{other} has begun to update weights (overlap=) and no step() has followed: hold the lock around backward "
            f"and step together, or set overlap='off'"
        )
    return (
        f"{section} has waited {patience:g} s for its turn, as one thread computes with a model at a time: {waits} "
        f"(HETMEM_TURN_TIMEOUT says how many seconds to wait)"
    )
