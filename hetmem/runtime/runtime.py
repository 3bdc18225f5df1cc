"""What runs a managed module: segments and moments, and parameters on the device for as long as somebody needs them.

Hooks tell it what is about to be used. It knows nothing of torch's hooks and modes, and nothing of optimizers; copies
are `traffic`'s, writes that were not hetmem's are `writes`'.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

import torch

from hetmem.errors import CapacityError
from hetmem.memory.chunk import ManagedParameter
from hetmem.memory.transfer import TransferEngine
from hetmem.plan.hardware import HardwareProfile
from hetmem.plan.residency import Residency
from hetmem.plan.trace import STEP, Tier, TraceBook
from hetmem.runtime.bindings import Bindings
from hetmem.runtime.events import EventLog, MomentSeen
from hetmem.runtime.memory import Memory
from hetmem.runtime.monitor import DeviceMonitor
from hetmem.runtime.refusals import Refusals
from hetmem.runtime.shortage import Shortage
from hetmem.runtime.statistics import Statistics
from hetmem.runtime.tracer import StepTracer, segment_name
from hetmem.runtime.traffic import Traffic, param_block
from hetmem.runtime.trailing import Trailing
from hetmem.runtime.weak import weakly
from hetmem.runtime.writes import Writes


class Runtime:
    """Everything hetmem knows of one managed module. One thread at a time calls it: the one that trains.

    `residency` owns where copies are, the pools own bytes, `engine` owns threads; the runtime owns the order of
    events. Guarantees after every public method, also one that raised: every parameter outside compute is its home,
    no capacity is exceeded, and no copy is lost.
    """

    def __init__(self, memory: Memory, residency: Residency, engine: TransferEngine, *, sanitize: bool) -> None:
        self.memory = memory
        self.chunks = memory.chunks
        self.sanitize = sanitize
        self.tracer = StepTracer()
        self.statistics = Statistics()
        self.events = EventLog()
        self.parameters = [managed for chunk in self.chunks for managed in chunk.parameters]
        self.bindings = Bindings(self.parameters)
        self.traffic = Traffic(
            memory, residency, engine, self.bindings, self.tracer, self.statistics, self.events, sanitize=sanitize
        )
        self.writes = Writes(self.parameters, self.bindings, self.traffic, self.memory.store)
        self.monitor = DeviceMonitor(
            memory.is_home_address, memory.is_device_address, weakly(self.non_model_grew), strict=sanitize
        )
        self.trailing = Trailing(self.chunks, self.traffic, self.monitor)
        self.give_way: Callable[[int], None] = _nothing_to_give
        self.hardware: HardwareProfile | None = None
        """What the machine can do, if anybody has said so."""
        self.planned_optimizer: Mapping[str, str] = {}
        self._all_slots = sum(chunk.spec.span for chunk in self.chunks)
        self._shortage = Shortage(memory, residency, self.tracer)
        self.refusals = Refusals(memory, self._shortage)
        self._held: dict[int, ManagedParameter] = {}
        self._limit = memory.device_pool.slots
        self._first_uses = 0
        self._most_non_model = 0
        self._untracked: set[int] = set()
        self._ended: Hashable | None = None
        self._finalizer = weakref.finalize(self, _dropped, engine, memory.pins)
        memory.device.peak_bytes()  # what the process had there before is no need of this model

    def close(self) -> None:
        """Wait for what is in flight and stop all threads; the homes stay readable as long as somebody holds them."""
        self.traffic.engine.close()
        self.memory.close()
        self._finalizer()

    # ---- segments and moments ----------------------------------------------------------------------------------

    def begin_segment(self, key: Hashable, *, measured: bool) -> None:
        """A forward, a backward or a step begins; `key` says which, so that its trace can be found again."""
        before = self.tracer.key if self.tracer.key is not None else self._ended
        self._ended = None
        self._look_at_allocator()
        self.tracer.begin(key, measured=measured)
        if measured and self.tracer.known is None and not self.memory.device.watched:
            self._let_homes_go(self._guess)  # a part of a backward cannot be tried again with more room
        if self.refusals.room_bytes:
            self._leave_device(self.refusals.room_bytes)
        self.events.begin_segment(segment_name(key))
        if before is not None:
            self.tracer.book.follows(before, key)
        with self.unwatched():
            self.traffic.pending.poll()
            self.expect(key)

    def expect(self, key: Hashable) -> None:
        """Plan for the segment `key` and what usually comes after it."""
        for tier, schedule in self.tracer.book.schedules(key).items():
            self.traffic.execute(self.traffic.residency.expect(tier, schedule))

    def _moment(self, operator: str, blocks: tuple[int, ...]) -> None:
        memory, residency = self.memory, self.traffic.residency
        self.traffic.pending.poll()
        live = self._look_at_allocator() if self.tracer.measured else memory.buffer_bytes
        expected = self.tracer.moment(operator, blocks, live)
        self._let_homes_go(expected if memory.device.watched else self._room_seen)
        self._set_limit(expected if memory.device.watched else self._least_room())
        residency.reach(blocks, Tier.DEVICE)
        chunk_bytes = self.chunk_bytes()
        self.statistics.device_in_use(chunk_bytes, expected)
        staging = residency.used_slots(Tier.HOST) * memory.host_pool.slot_bytes
        seen = MomentSeen(time.perf_counter(), operator, blocks, chunk_bytes, expected, staging)
        self.events.moments.append(seen)

    def _look_at_allocator(self) -> int:
        """The bytes beside chunks now; where the device's allocator knows their peak, the last moment gets that."""
        if self.memory.device.watched:
            return self.monitor.live_bytes
        chunks = self.memory.device_pool.held_bytes() + self.memory.device_home_bytes
        peak = max(0, self.memory.device.peak_bytes() - chunks)
        if self.tracer.measured:
            self.tracer.grew(peak)
        self._most_non_model = max(self._most_non_model, peak)
        return peak

    def _least_room(self) -> int:
        """What a GPU must leave beside chunks: the most that was ever seen, so that slots stay where they are, or what
        would have been enough when its allocator refused memory.

        While a segment is measured nobody knows what is coming, so chunks keep to a quarter of the device; if they
        need more than that at once, `_acquire_device` takes it.
        """
        return max(self._room_seen, self._guess) if self.tracer.measured else self._room_seen

    @property
    def _guess(self) -> int:
        return self.memory.device_bytes * 3 // 4

    @property
    def _room_seen(self) -> int:
        return max(self._most_non_model, self.refusals.room_bytes)

    @property
    def non_model_peak_bytes(self) -> int:
        """The most that anything but chunks has ever needed of the device."""
        return max(self.statistics.non_model_peak_bytes, self._room_seen)

    def _let_homes_go(self, non_model_bytes: int) -> None:
        """Homes that moved to the device give way where copies would have less room for them."""
        if self.memory.moved_bytes:
            missing = self._all_slots * self.memory.device_pool.slot_bytes - self.memory.room_bytes(non_model_bytes)
            if missing > 0:
                self.give_way(missing)

    def _leave_device(self, non_model_bytes: int) -> bool:
        """A model that was put whole on the device makes room for `non_model_bytes`: what has none there goes to host
        memory, now and from now on. False if it is not, or if it must stay."""
        if self.memory.resident:
            self.give_way(0)
            if not self.memory.resident:
                self.tracer.book, self.tracer.key = TraceBook(), None  # operators were not seen to use it
                with self.unwatched():
                    self._let_homes_go(non_model_bytes)
                    self._set_limit(non_model_bytes)
                return True
        return False

    def _set_limit(self, non_model_bytes: int) -> None:
        """Leave room for `non_model_bytes` beside chunks."""
        limit = self.memory.device_slots(non_model_bytes)
        if limit != self._limit:
            before, self._limit = self._limit, limit
            self._look_at_allocator()
            self.traffic.limit_device(limit, before=before)
            self.memory.device.peak_bytes()  # what was given back by this is no peak of anything else

    def chunk_bytes(self) -> int:
        """Device bytes that chunks hold now."""
        slots = self.traffic.residency.used_slots(Tier.DEVICE)
        return slots * self.memory.device_pool.slot_bytes + self.memory.device_home_bytes

    def non_model_grew(self, operator: str, live_bytes: int) -> None:
        """An operator of a measured segment needs memory: give up idle chunks, as a GPU's allocator would be made to.

        Raises `DeviceOutOfMemoryError` if what is left in use does not fit beside it.
        """
        self.tracer.grew(live_bytes)
        with self.unwatched():
            self._let_homes_go(live_bytes)
            self._set_limit(live_bytes)
            while self.chunk_bytes() + live_bytes > self.memory.device_bytes and self.traffic.residency.in_flight():
                self.traffic.wait_for_one()
            if self.chunk_bytes() + live_bytes > self.memory.device_bytes:
                self.monitor.left |= self._leave_device(live_bytes)
        if self.chunk_bytes() + live_bytes > self.memory.device_bytes:
            raise self._shortage.error(operator, live_bytes)
        self.statistics.device_in_use(self.chunk_bytes(), live_bytes)

    def unwatched(self) -> AbstractContextManager[None]:
        """See `DeviceMonitor.unwatched`."""
        return self.monitor.unwatched()

    @contextmanager
    def moving_homes(self) -> Iterator[None]:
        """Homes move within: what they take, or took, of the device is no peak of anything else."""
        self._look_at_allocator()
        try:
            with self.unwatched(), torch.no_grad():
                yield
        finally:
            self.memory.device.peak_bytes()

    # ---- parameters on the device ------------------------------------------------------------------------------

    def use(self, operator: str, used: list[ManagedParameter]) -> None:
        """Bind `used` to their device copies for one operator. Nothing is bound if this raises."""
        with self.unwatched():
            self._let_go()
            for managed in used:
                if managed.first_use < 0:
                    managed.first_use = self._first_uses = self._first_uses + 1
                if managed.parameter._version != managed.version:
                    self.writes.by_user(managed)
                if managed.chunk in self.writes.unsure:
                    self.writes.make_sure(managed.chunk)
            blocks = [param_block(managed) for managed in used]
            self._moment(operator, tuple(dict.fromkeys(blocks)))
            acquired = 0
            try:
                for managed, block in zip(used, blocks, strict=True):
                    self._acquire_device(managed, block, operator)
                    acquired += 1
            except BaseException:
                for block in blocks[:acquired]:
                    self.traffic.release(block, Tier.DEVICE)
                raise
            self.bindings.bind(used)

    def end_use(
        self, used: list[ManagedParameter], *, untracked: bool = False, writes: Collection[ManagedParameter] = ()
    ) -> None:
        """The operator is over: parameters rest, what it wrote goes home, what nobody holds may be evicted.

        `untracked`: it handed out a view whose writes count no versions (`parameter.data`); `writes`: those that
        it may itself have written to without counting one.
        """
        with self.unwatched():
            self.bindings.unbind(used)
            for managed in used:
                if managed.parameter._version != managed.version:
                    self.writes.by_operator(managed)
                elif managed in writes:
                    self.writes.compare(managed)
                if self.bindings.held(managed) and id(managed) not in self._held:
                    self._held[id(managed)] = managed
                    if untracked:
                        self._untracked.add(id(managed))
                else:
                    self.traffic.release(param_block(managed), Tier.DEVICE)

    def end_region(self, used: list[ManagedParameter]) -> None:
        """`end_use` of code whose functions nobody sees. Writes that count no version are looked for where a segment is
        measured, and from then on in the weights that had such."""
        data_set = [(managed, managed.parameter.data) for managed in used if self.bindings.is_elsewhere(managed)]
        measured, uncounted = self.tracer.measured, self.writes.uncounted
        self.end_use(used, writes=used if measured else [managed for managed in used if id(managed) in uncounted])
        for managed, value in data_set:
            self.data_set(managed, value)

    def saved(self, managed: ManagedParameter) -> torch.Tensor:
        """The device view of `managed` for autograd; it stays on the device until nobody holds the view any more."""
        if not self.memory.streams:
            return managed.home
        with self.unwatched():
            self._let_go()
            operator, block = f"backward of {managed.name}", param_block(managed)
            self._moment(operator, (block,))
            if id(managed) not in self._held:
                self._acquire_device(managed, block, operator)
                self._held[id(managed)] = managed
            assert managed.device is not None
            return managed.device

    def _acquire_device(self, managed: ManagedParameter, block: int, operator: str) -> None:
        try:
            slot = self._acquire_with_more_room(block)
        except CapacityError as error:
            wanted = managed.chunk.spec.span * self.memory.device_pool.slot_bytes
            live = self.monitor.live_bytes if self.memory.device.watched else self._most_non_model
            raise self._shortage.error(operator, live, wanted) from error
        if managed.device is None:
            self.bindings.open_device(managed, self.memory.device_pool, slot)

    def _acquire_with_more_room(self, block: int) -> int:
        """A guess of the room beside chunks gives way where they need more at once than it leaves them."""
        try:
            return self.traffic.acquire(block, Tier.DEVICE)
        except torch.OutOfMemoryError:  # the allocator had no memory for the slot: idle chunks have some
            self.out_of_memory()
            return self.traffic.acquire(block, Tier.DEVICE)
        except CapacityError:
            if self._leave_device(self.monitor.live_bytes if self.memory.device.watched else self._room_seen):
                return self.traffic.acquire(block, Tier.DEVICE)
            if self.memory.device.watched or self._limit >= self.memory.device_slots(self._most_non_model):
                raise
            self._set_limit(self._most_non_model)
            return self.traffic.acquire(block, Tier.DEVICE)

    def out_of_memory(self) -> None:
        """The device's allocator has no room for an operator: give it all that no chunk in use needs."""
        with self.unwatched():
            self._let_go()
            self._look_at_allocator()
            self._leave_device(self._room_seen)
            self._let_homes_go(self._room_seen)
            before = self._limit
            try:
                self.traffic.limit_device(0, before=before)
                self.traffic.pending.drain()  # where an interrupt or a transfer's error is raised
                self.traffic.give_back_free()
            finally:
                self.traffic.limit_device(before, before=before)
                self.memory.device.peak_bytes()  # what was given back by this is no peak of anything else

    def notice_writes_to_views(self) -> None:
        """An operator met no parameter, but it may have written to a view of one: then that goes home too."""
        if self._held:
            self._notice_writes(self.writes.by_operator)

    def notice_writes_by_hooks(self) -> None:
        """Hooks of the user, which run between the nodes of a backward, may have written to homes: those count."""
        self._notice_writes(self.writes.by_user)

    def _notice_writes(self, count: Callable[[ManagedParameter], None]) -> None:
        for managed in self._held.values():
            if managed.parameter._version != managed.version and managed.device is not None:
                with self.unwatched():
                    count(managed)

    def data_set(self, managed: ManagedParameter, value: torch.Tensor) -> None:
        """`parameter.data = value` within compute."""
        with self.unwatched():
            self._untracked.discard(id(managed))
            self.writes.of_data(managed, value)

    def holds_copies(self) -> bool:
        """Whether somebody still has memory of a copy on the device (a view of a weight, say)."""
        self._let_go()
        return bool(self._held)

    def forget_copies(self) -> None:
        """Drop every copy on every tier, those of which a write to NVMe failed once it is done; none may be in use."""
        self.traffic.wait_until_written(home for chunk in self.chunks for home in chunk.homes.values())
        self._let_go()
        self.traffic.forget_copies()

    def _let_go(self) -> None:
        """Release the copies whose last holder is gone."""
        if not self._held:
            return
        for key, managed in list(self._held.items()):
            if id(managed) in self._untracked:
                self.writes.compare(managed)
            if not self.bindings.held(managed):
                del self._held[key]
                self._untracked.discard(id(managed))
                self.traffic.release(param_block(managed), Tier.DEVICE)

    def relearn(self) -> None:
        """Chunks hold other parameters now: what was traced is void."""
        self.bindings.learn(self.parameters)
        self.traffic.rename_blocks()
        self.tracer.forget()
        self._ended = None

    def after_step(self) -> None:
        """The weights are new: plan for what usually follows, and start to fetch for it."""
        self._look_at_allocator()
        self.tracer.end()
        self.events.end_segment()
        self._ended = STEP
        if (follower := self.tracer.book.follower(STEP)) is not None:
            self.expect(follower)


def _nothing_to_give(nbytes: int) -> None:
    """No homes have moved to the device."""


def _dropped(engine: TransferEngine, pins: list[Callable[[], None]]) -> None:
    """Nobody holds the runtime any more. The garbage collector calls this in the middle of anything, on any thread, so
    it joins no thread and takes no lock: a thread that collected a model while it started has waited for itself."""
    engine.abandon()
    for unpin in pins:
        unpin()
