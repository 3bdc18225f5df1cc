"""What one managed module is made of, the segments of its steps, and which thread computes with it: one at a time.

It knows nothing of torch's hooks and modes.

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
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager, suppress
from threading import get_ident

from hetmem import torch_private
from hetmem.base.config import turn_timeout_seconds
from hetmem.base.hardware import HardwareProfile
from hetmem.engine.device_limit import DeviceRoom
from hetmem.engine.events import EventLog, Statistics
from hetmem.engine.homes import Memory
from hetmem.engine.param_views import Bindings
from hetmem.engine.traffic import Traffic
from hetmem.engine.uses import Uses
from hetmem.engine.write_check import ParameterMarks, WriteCheck
from hetmem.errors import ManageError
from hetmem.memory.interrupts import HELD_BACK
from hetmem.memory.transfer import TransferEngine
from hetmem.schedule.residency import Residency
from hetmem.schedule.trace import STEP, segment_name
from hetmem.schedule.tracer import StepTracer


class Runtime:
    """Everything hetmem knows of one managed module. One thread at a time calls it: the one that has the `turn`.

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
        self.events = EventLog(clock=engine.clock, behind=engine.ordered)
        self.parameters = [managed for chunk in self.chunks for managed in chunk.parameters]
        self.bindings = Bindings(self.parameters)
        self._engine = engine
        self.traffic = Traffic(memory, residency, engine, self.bindings, self.tracer, self.events, sanitize=sanitize)
        self.writes = WriteCheck(self.parameters, self.bindings, self.traffic)
        self.room = DeviceRoom(memory, self.traffic, self.tracer, self.statistics, sanitize=sanitize)
        self.monitor = self.room.monitor
        self.unwatched = self.traffic.executor.unwatched = self.bindings.unwatched = self.monitor.unwatched
        self.uses = Uses(memory, self.bindings, self.traffic, self.tracer, self.writes, self.room, self.events)
        self.turn = Turn(self.events.newest)
        self.in_backward = False
        """Whether a backward of the model runs."""
        self.marks = ParameterMarks(memory, self.bindings, self.writes, self.uses.read_at_home)
        self.hardware: HardwareProfile | None = None
        """What the machine can do, if that was given."""
        self.prediction: Mapping[str, object] | None = None
        """What the run's plan, if it has one, expects of it; for its report."""
        self._finalizer = weakref.finalize(self, _dropped, engine, memory.pins)

    def close(self) -> None:
        """Wait for what is in flight and stop all threads; the homes stay readable as long as tensors hold them."""
        self.traffic.engine.close()
        self.memory.close()
        self._finalizer()

    # ---- segments and moments ----------------------------------------------------------------------------------

    def enter(self, *, backward: bool = False, step: bool = False) -> None:
        """Note that a `backward` or a `step` runs from here on; neither: it is the program's turn, also within a
        forward, to write to weights and gradients. A read of gradients that is under way then may be torn."""
        self.in_backward = backward
        self.traffic.executor.torn_reads.allow_writes(allowed=not (backward or step))

    def begin_segment(self, key: Hashable, *, measured: bool, size: int = 0) -> None:
        """A forward, a backward or a step begins; `key` says which, so that its trace can be found again. `size`: the
        bytes of its inputs."""
        self.room.look_at_allocator()
        self.tracer.begin(key, measured=measured, size=size)
        self.room.before_segment()
        self.events.begin_segment(segment_name(key))
        with self.unwatched():
            self.traffic.executor.poll()
            self.expect(key)
            if key != STEP:
                self.uses.renew_what_is_held()

    def expect(self, key: Hashable) -> None:
        """Plan for the segment `key` and what usually comes after it."""
        if not self.traffic.residency.blocks or self.traffic.executor.stands:
            return  # nothing moves
        self.traffic.execute(self.traffic.residency.expect(self.tracer.book.schedules(key)))

    def forget_copies(self) -> None:
        """Drop every copy on every tier, those of which a write to NVMe failed once it is done; none may be in use."""
        self.traffic.wait_until_written(home for chunk in self.chunks for home in chunk.homes.values())
        self.uses.release_working()
        self.uses.end_backward()
        self.uses.let_go()
        self.traffic.forget_copies()

    def renew_touched(self) -> None:
        """A backward begins."""
        if not self.memory.uses_copies:
            return
        with self.unwatched(), torch_private.NoFunctionsOfSubclasses():
            if self.writes.renew_touched():
                self.uses.renew_what_is_held()

    def after_step(self) -> None:
        """The weights are new: plan for what usually follows, and start to fetch for it. A step that is over must not
        look as if it had failed: what cannot be fetched ahead is asked for again, or refused, where it is used."""
        self.room.look_at_allocator()
        self.tracer.end()
        self.events.end_segment()
        with suppress(Exception), self.unwatched():
            self.uses.renew_what_is_held()
        self.writes.stepped = True
        follower = self.tracer.book.follower(STEP)
        if follower is not None and not self.writes.handed_out:
            with suppress(Exception):
                self.expect(follower)


def _dropped(engine: TransferEngine, pins: list[Callable[[], None]]) -> None:
    """End a runtime that no object holds any more. The garbage collector calls this in the middle of anything, on any
    thread, so it joins no thread and takes no lock: a thread that collected a model while it started has waited for
    itself."""
    engine.abandon()
    for unpin in pins:
        unpin()


# ---- turns: see note "turns" -----------------------------------------------------------------------------------------


def in_backward() -> bool:
    """Whether autograd is running a backward on this thread."""
    return bool(torch_private.current_graph_task() != -1)


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
        section = Section(what, get_ident(), runs)
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
        return self._has(get_ident())

    # ---- inside ------------------------------------------------------------------------------------------------

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
