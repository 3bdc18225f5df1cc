"""Keeps parameters on the device while they are used: begins moments, and ends uses once no tensor holds a copy.

Callers say what is about to be used. It knows nothing of torch's hooks and modes, and nothing of optimizers; `traffic`
brings copies, `device_limit` limits them, and `write_check` handles writes by the program.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from operator import attrgetter
from typing import Any

import torch

from hetmem import torch_private
from hetmem.base.weak import weakly
from hetmem.engine.device_limit import DeviceRoom
from hetmem.engine.events import UNPACKED, EventLog
from hetmem.engine.homes import Memory
from hetmem.engine.param_views import Bindings, references
from hetmem.engine.traffic import Traffic
from hetmem.engine.use_rows import BACKWARD_OF, Together, UseRow, UseRows
from hetmem.engine.write_check import WriteCheck, refused_data
from hetmem.errors import CapacityError, DeviceOutOfMemoryError
from hetmem.memory.chunk import ManagedParameter, Role, without_graph
from hetmem.schedule.trace import DEVICE, Moment
from hetmem.schedule.tracer import StepTracer

_functions_around: Any = torch_private.function_modes_around
_BOUND = attrgetter("bound")


class Uses:
    """Tracks the uses of one model's parameters: each begins with `use` or `saved`, and ends once nothing holds the
    copy."""

    def __init__(
        self,
        memory: Memory,
        bindings: Bindings,
        traffic: Traffic,
        tracer: StepTracer,
        writes: WriteCheck,
        room: DeviceRoom,
        events: EventLog,
    ) -> None:
        self._memory, self._bindings, self._traffic, self._tracer = memory, bindings, traffic, tracer
        self._writes, self._room, self._unwatched = writes, room, room.monitor.unwatched
        self._events = events
        self._now, self._log, self._none_finished = events.now, events.moments.append, traffic.engine.none_finished
        self._slots, self._slot_bytes = traffic.residency.taken[DEVICE], memory.device_pool.slot_bytes
        self._gradients = traffic.gradients
        self._watched, self._buffer_bytes = memory.device.watched, memory.buffer_bytes
        self._peaks, self._reach = room.statistics, traffic.residency.reach_on_device
        self.give_leases_up: Callable[[], bool | None] = lambda: False
        """Called if copies that are used at once have no room: ends some uses, and returns whether it did."""
        self._held: dict[ManagedParameter, None] = {}
        """Parameters whose copies tensors hold, in the order in which that was first noticed."""
        self.release_working: Callable[[], None] = lambda: None
        """Called if all idle copies are to be freed: ends leases of working weights that nothing uses."""
        self.rows = UseRows(memory, traffic, tracer, room, events)
        traffic.before_updates = weakly(self.end_row)
        self._untracked: set[int] = set()
        """`id`s of parameters with a view whose writes count no version."""

    def _moment(self, operator: str, blocks: tuple[int, ...]) -> bool:
        """Begin a moment; the caller then moves the schedule on to its use of `blocks`. Returns whether it is the usual
        one: nothing is measured, and bytes in flight off the device do not count, or have room beside all copies."""
        tracer, room, gradients = self._tracer, self._room, self._gradients
        gradients.allowed_bytes = -1
        usual = not (tracer.measured or room.leaving or room.ahead)
        if usual:
            moment = tracer.moment(operator, blocks, self._buffer_bytes)
        else:
            live = room.look_at_allocator() if tracer.measured else self._buffer_bytes
            moment = tracer.moment(operator, blocks, live, room.leaving_bytes)
        if usual and (gradients.leaving or gradients.gathered_bytes) and self._watched:
            usual = as_left = room.is_as_left(moment, beside_gradients=True)
        else:
            as_left = usual and room.is_as_left(moment)
        if not as_left:
            with self._unwatched():
                room.before_moment(moment)
        self.log_moment(moment, operator, blocks)
        return usual

    def note_moment(self, operator: str, blocks: tuple[int, ...]) -> None:
        """Begin a moment, which uses many blocks, of a segment that is measured, or of which nothing is known."""
        self._events.unpacked += len(blocks)
        self._moment(operator, blocks)

    def log_all(self, moment: Moment, operator: str, blocks: tuple[int, ...]) -> None:
        """Log a moment that uses many blocks."""
        self._events.unpacked += len(blocks)
        self.log_moment(moment, operator, blocks)

    def log_moment(self, moment: Moment, operator: str, blocks: tuple[int, ...]) -> None:
        """Log a moment for reports."""
        expected, peaks = moment.non_model_bytes, self._peaks
        if not self._watched:  # the allocator's peak counts in the end
            expected = int(expected / self._tracer.growth)
        chunk_bytes = self._slots.used * self._slot_bytes + self._memory.device_home_bytes
        if (
            chunk_bytes > peaks.chunk_peak_bytes
            or expected > peaks.non_model_peak_bytes
            or chunk_bytes + expected > peaks.device_peak_bytes
        ):
            peaks.device_in_use(chunk_bytes, expected)
        self._log((self._now(), operator, blocks, chunk_bytes, expected))
        events = self._events
        events.unpacked += 1
        if events.unpacked > UNPACKED:
            events.pack()

    # ---- parameters on the device ------------------------------------------------------------------------------

    def use(self, operator: str, used: list[ManagedParameter]) -> None:
        """Do `lease`, and bind `used`. Binds nothing if it raises."""
        if self.lease(operator, used):
            self._bindings.bind(used)
            return
        with self._unwatched():
            self._bindings.bind(used)

    def lease(self, operator: str, used: list[ManagedParameter]) -> bool:
        """Begin a moment, and a lease of the copy of each of `used`; no lease if it raises. Returns whether no function
        mode is around."""
        if self._held or self.rows.open is not None or not self._none_finished():
            with self._unwatched():
                self.release_unheld()
                self._traffic.executor.poll()
        unseen = not _functions_around()
        for managed in used:
            if not unseen or managed.counter._version != managed.version:
                with self._unwatched():
                    self._notice_write(managed)
        if type(used) is not Together:
            used = Together(used)
        uses = used.uses or used.counted()
        blocks = used.blocks
        usual = self._moment(operator, blocks)
        if not (usual and unseen and self._traffic.use(uses, blocks)):
            with self._unwatched():
                if not (usual and unseen):
                    self._reach(blocks)
                self._acquire_all(operator, used)
        return unseen

    def use_in_a_row(self, row: UseRow) -> bool:
        """Do `use` for each use of `row`, which `Residency.still` counts, at once. Returns False, with nothing begun,
        if that is impossible now."""
        if {*map(_BOUND, row.used)} != {0} or _functions_around() or not self.rows.begin(row):
            return False
        self.rows.count(row, row.length)
        self._bindings.bind(row.used)
        return True

    def _acquire_all(self, operator: str, used: Iterable[ManagedParameter]) -> None:
        """Begin one more use of the block of each of `used`; none if this raises."""
        acquired: list[int] = []
        try:
            for managed in used:
                block = managed.chunk.operand_block
                self._acquire_device(managed, block, operator)
                acquired.append(block)
        except BaseException:
            for block in acquired:
                self._traffic.release(block, DEVICE)
            raise

    def end_use(
        self, used: Sequence[ManagedParameter], *, untracked: bool = False, writes: Collection[ManagedParameter] = ()
    ) -> None:
        """End `use`: writes to them go home, copies that no tensor holds may be evicted.

        `untracked`: a view was handed out whose writes count no version (`parameter.data`); `writes`: parameters that
        may have been written to without counting one.
        """
        first: BaseException | None = None
        with self._unwatched():
            for managed in used:
                try:
                    if managed.counter._version != managed.version:
                        self._writes.by_operator(managed)
                    elif managed in writes or managed.data_taken:
                        self._writes.compare(managed)
                except BaseException as error:  # noqa: PERF203 - a drive may fail: the others' uses end, too
                    first = first or error
            self._bindings.unbind(used)
            self.release(used, untracked=untracked)
        try:
            if first is not None:
                raise first
        finally:
            del first  # as in `Executor.execute`

    def release(self, used: Sequence[ManagedParameter], *, untracked: bool = False) -> None:
        """End one lease of each of `used`; if a tensor holds the copy, `release_unheld` ends it later."""
        over = used if type(used) is Together else Together(used)
        for managed in used:
            view = managed.slot_view
            if references(view.storage) > view.references:
                if untracked or managed.data_taken:
                    self._untracked.add(id(managed))
                if managed not in self._held:
                    self._held[managed] = None
                    self._bindings.rest_on(managed, managed.device)
                    over = Together(each for each in over if each is not managed)
                    continue
            managed.data_taken = False
        self._traffic.release_all(over.uses or over.counted())

    def end_call(self, used: Sequence[ManagedParameter]) -> None:
        """End uses of code whose functions are not seen, as `end_use`. In a region `.data` is not seen either: writes
        through it are looked for in measured segments, and later in weights that had any."""
        if not (self._tracer.measured or self._writes.uncounted or _functions_around()):
            for managed in used:
                if managed.data_taken or managed.counter._version != managed.version:
                    break
                if type(managed.working) is managed.kind and self._bindings.shows_no_copy(managed):
                    break
            else:
                if self._bindings.unbind(used) or type(used) is not Together:
                    self.release(used)
                else:
                    self._traffic.release_all(used.uses or used.counted())
                return
        with self._unwatched():
            set_anew = [
                managed
                for managed in used
                if type(managed.working) is managed.kind and self._bindings.shows_no_copy(managed)
            ]
            uncounted = self._writes.uncounted
            among = used if self._tracer.measured else [each for each in used if id(each) in uncounted]
            self.end_use(used, writes=among)
        if set_anew:
            raise refused_data(set_anew[0])

    def saved(self, managed: ManagedParameter) -> torch.Tensor:
        """Return the device view of `managed` for autograd; its use ends once no tensor holds its memory. Call it
        `unwatched`."""
        if not self._memory.uses_copies:
            return managed.home
        rows, row = self.rows, self.rows.open
        if row is not None and row.begun < row.length and row.used[row.begun] is managed and self._none_finished():
            row.begun += 1
            assert managed.device is not None
            return managed.device
        if self._held or row is not None:
            self.release_unheld()
        if not self._none_finished():
            self._traffic.executor.poll()
        operator = BACKWARD_OF + managed.name
        block = managed.chunk.operand_block
        usual = self._moment(operator, (block,))
        if managed in self._held:
            self._reach((block,))
        else:
            if not self._traffic.use({block: 1}, (block,)):
                self._acquire_device(managed, block, operator)
            self._held[managed] = None
            if usual:
                rows.begin_saved(self._held)
        assert managed.device is not None
        return managed.device

    def _acquire_device(self, managed: ManagedParameter, block: int, operator: str) -> None:
        """Begin a lease of the copy of `managed`, in `block`; none is begun if this raises. Call it `unwatched`."""
        if not self._traffic.use({block: 1}):
            try:
                self._acquire_with_more_room(block)
            except CapacityError as error:
                wanted = managed.chunk.spec.span * self._memory.device_pool.slot_bytes
                self._tracer.lacked_room = True
                raise self._room.shortage.error(operator, self._room.non_model_bytes, wanted) from error

    def _acquire_with_more_room(self, block: int) -> int:
        """Begin a lease of `block` on the device and return its slot, after freeing what other memory can be freed."""
        try:
            return self._traffic.acquire(block, DEVICE)
        except DeviceOutOfMemoryError:
            raise
        except torch.OutOfMemoryError:  # the allocator had no memory for the slot
            self.out_of_memory()
            return self._traffic.acquire(block, DEVICE)
        except CapacityError:
            if not (self._room.widen() or self.give_leases_up()):
                raise
            return self._acquire_with_more_room(block)

    def out_of_memory(self) -> None:
        """Free all device memory that no chunk in use needs, as the allocator has no room for an operator."""
        self.release_working()
        with self._unwatched():
            self.release_unheld()
            self._room.out_of_memory()

    def notice_writes_to_views(self) -> None:
        """Send the last writes of a forward to views of weights home, as it ends."""
        with self._unwatched():
            self.release_unheld()

    def notice_writes_by_hooks(self) -> None:
        """Honour writes to homes by hooks of the program, which run between the nodes of a backward, and `p.data = t`
        that no forward has noticed: that of this model may be the first one, or one of a hook."""
        self.end_row()
        for managed in list(self._held):
            self._notice_write(managed)
        with torch_private.NoFunctionsOfSubclasses():
            among = {*self._writes.touched, *self._bindings.exposed}
            set_anew = [managed for managed in among if self._bindings.is_elsewhere(managed)]
        if set_anew:
            self.rest_again(set_anew)

    def _notice_write(self, managed: ManagedParameter) -> None:
        """Honour a write to `managed` since its last use: to the home, or to a view of the held copy."""
        if managed.counter._version != managed.version:
            held = (
                managed in self._held
                and managed.device is not None
                and (managed.bound or self._bindings.is_watched(managed))
            )
            with self._unwatched(), torch_private.NoFunctionsOfSubclasses():
                self._writes.by_operator(managed) if held else self._writes.by_user(managed)

    def notice_data(self, managed: ManagedParameter) -> None:
        """Honour `parameter.data = value` outside compute, before autograd unpacks the parameter itself, whose present
        values torch uses. Call it `unwatched`."""
        with torch_private.NoFunctionsOfSubclasses():
            if self._bindings.is_elsewhere(managed):
                self._writes.by_user(managed)

    def read_at_home(self, managed: ManagedParameter) -> None:
        """Wait for the update of `managed`, which the program reads between the nodes of a backward."""
        with self._unwatched(), without_graph():
            self._traffic.wait_for_update(managed.chunk)
            self._traffic.wait_until_written([managed.chunk.homes[Role.PARAM]])

    def begin_update(self, used: Collection[ManagedParameter]) -> None:
        """Have `used`, which are as hetmem left them and will be updated, rest, so that a use is seen."""
        self._bindings.exposed |= {*used}
        if self._bindings.away:
            self._bindings.watch_again(used)

    def rest_again(self, used: Iterable[ManagedParameter]) -> None:
        """Have `used`, which were at home for the user, rest again, and honour writes there."""
        used = list(used)
        self._bindings.exposed.update(used)
        with self._unwatched(), torch_private.NoFunctionsOfSubclasses():
            for managed in self._writes.all_counted(used):
                set_anew = self._bindings.is_elsewhere(managed)
                if set_anew or managed.counter._version != managed.version:
                    self._writes.by_user(managed)
            if self._bindings.away:
                self._bindings.watch_again(used)

    def holds_copies(self) -> bool:
        """Return whether a tensor (a view of a weight, say) holds the memory of a copy on the device."""
        self.release_unheld()
        return bool(self._held)

    def end_row(self) -> None:
        """End the row of saved weights that is open, if one is; of these the last one stays in use."""
        if last := self.rows.end_saved():
            self.release_unheld()
            for managed in last:
                self._held[managed] = None

    def release_unheld(self) -> None:
        """End the uses of copies that no tensor holds any more."""
        if self.rows.open is not None:
            self.end_row()
        if not self._held:
            return
        for managed in [*self._held]:
            if self._untracked and id(managed) in self._untracked:
                self._writes.by_view(managed)
            if managed.counter._version != managed.version:
                self._notice_write(managed)
            if not self._bindings.are_held_by_others(managed):
                del self._held[managed]
                if managed.rest is not managed.stand_in:
                    self._bindings.rest_on(managed, None)
                if self._untracked:
                    self._untracked.discard(id(managed))
                self._traffic.release(managed.chunk.operand_block, DEVICE)

    def renew_held_copies(self) -> None:
        """Fetch stale copies anew of which the program holds a view, outside compute and `unwatched`. A module may
        keep one (`self.turned = self.weight.T`) and use that alone in its next forward: it must show new values."""
        self.release_unheld()
        for managed in list(self._held):
            if not self._traffic.copy_counts(managed.chunk):
                block = managed.chunk.operand_block
                self._acquire_device(managed, block, f"a kept view of {managed.name}")
                self._traffic.release(block, DEVICE)
