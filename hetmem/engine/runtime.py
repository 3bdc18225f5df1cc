"""What one managed module is made of, and the segments of its steps. It knows nothing of torch's hooks and modes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Mapping
from contextlib import suppress
from enum import Enum
from typing import Any

from hetmem.base.hardware import HardwareProfile
from hetmem.engine.device_limit import DeviceRoom
from hetmem.engine.events import EventLog, Statistics
from hetmem.engine.homes import Memory
from hetmem.engine.param_views import Bindings
from hetmem.engine.traffic import Traffic
from hetmem.engine.turns import Turn
from hetmem.engine.uses import Uses
from hetmem.engine.write_check import WriteCheck
from hetmem.memory.host_pool import later
from hetmem.memory.transfer import TransferEngine
from hetmem.schedule.residency import Residency
from hetmem.schedule.trace import STEP, segment_name
from hetmem.schedule.tracer import StepTracer


class TrainingPhase(Enum):
    """What one model does now, as `Runtime.enter` was told."""

    IDLE = "idle"
    """The program's turn, also within forwards: it may write to weights and gradients."""
    BACKWARD = "backward"
    SETTLING = "settling"
    """A backward is over, and its gradients are not all at home yet."""
    STEP = "step"


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
        self.writes = WriteCheck(self.parameters, self.bindings, self.traffic, self.memory.store)
        self.room = DeviceRoom(memory, self.traffic, self.tracer, self.statistics, sanitize=sanitize)
        self.monitor = self.room.monitor
        self.unwatched = self.traffic.executor.unwatched = self.monitor.unwatched
        self.uses = Uses(memory, self.bindings, self.traffic, self.tracer, self.writes, self.room, self.events)
        self.turn = Turn(self.events.newest)
        self.phase, self.in_backward = TrainingPhase.IDLE, False
        self.trailing: Any
        """The parameters that are marked between calls of the model; set by what intercepts these."""
        self.hardware: HardwareProfile | None = None
        """What the machine can do, if that was given."""
        self.planned_optimizer: Mapping[str, str] = {}
        self.prediction: Mapping[str, object] | None = None
        """What the run's plan, if it has one, expects of it; for its report."""
        self._ended: Hashable | None = None
        self._finalizer = weakref.finalize(self, _dropped, engine, memory.pins)

    def close(self) -> None:
        """Wait for what is in flight and stop all threads; the homes stay readable as long as tensors hold them."""
        self.traffic.engine.close()
        self.memory.close()
        self._finalizer()

    # ---- segments and moments ----------------------------------------------------------------------------------

    def enter(self, phase: TrainingPhase) -> None:
        """Begin `phase`: a read of gradients that is under way as the program's turn begins may be torn."""
        self.phase, self.in_backward = phase, phase is TrainingPhase.BACKWARD
        self.traffic.executor.torn_reads.allow_writes(allowed=phase is TrainingPhase.IDLE)

    def begin_segment(self, key: Hashable, *, measured: bool, size: int = 0) -> None:
        """A forward, a backward or a step begins; `key` says which, so that its trace can be found again. `size`: the
        bytes of its inputs."""
        before = self.tracer.key if self.tracer.key is not None else self._ended
        self._ended = None
        self.room.look_at_allocator()
        self.tracer.begin(key, measured=measured, size=size)
        self.room.before_segment()
        self.events.begin_segment(segment_name(key))
        if before is not None:
            self.tracer.book.follows(before, key)
        with self.unwatched():
            self.traffic.executor.poll()
            self.expect(key)
            if key != STEP:
                self.uses.renew_what_is_held()

    def expect(self, key: Hashable) -> None:
        """Plan for the segment `key` and what usually comes after it."""
        if not self.traffic.residency.blocks:
            return  # nothing ever moves
        self.traffic.execute(self.traffic.residency.expect(self.tracer.book.schedules(key)))

    def forget_copies(self) -> None:
        """Drop every copy on every tier, those of which a write to NVMe failed once it is done; none may be in use."""
        self.traffic.wait_until_written(home for chunk in self.chunks for home in chunk.homes.values())
        self.uses.release_working()
        self.uses.let_go()
        self.traffic.forget_copies()

    def renew_touched(self) -> None:
        """A backward begins."""
        if not self.memory.uses_copies:
            return
        with self.unwatched():
            if self.writes.renew_touched():
                self.uses.renew_what_is_held()

    def hold_homes(self) -> None:
        """An optimizer has stepped, and the user may write to weights in whatever way: nothing is read ahead from the
        homes of those that are trained before the next forward, which makes their copies anew."""
        self.writes.stepped = True
        for chunk in self.chunks if not self.memory.resident else ():
            if any(managed.parameter.requires_grad for managed in chunk.parameters):
                self.traffic.hold(chunk)

    def after_step(self) -> None:
        """The weights are new: plan for what usually follows, and start to fetch for it. A step that is over must not
        look as if it had failed: what cannot be fetched ahead is asked for again, or refused, where it is used."""
        self.room.look_at_allocator()
        self.tracer.end()
        self.events.end_segment()
        self._ended = STEP
        self.hold_homes()
        with suppress(Exception), self.unwatched():
            self.uses.renew_what_is_held()
        if (follower := self.tracer.book.follower(STEP)) is not None:
            with suppress(Exception):
                self.expect(follower)


def _dropped(engine: TransferEngine, pins: list[Callable[[], None]]) -> None:
    """End a runtime that no object holds any more. The garbage collector calls this in the middle of anything, on any
    thread, so it joins no thread and takes no lock: a thread that collected a model while it started has waited for
    itself."""
    engine.abandon()
    for unpin in pins:
        later(unpin)
