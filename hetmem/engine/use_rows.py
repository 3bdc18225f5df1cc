"""Leases copies for several uses at once: a row of uses between which nothing has to move.

In a segment that follows its trace it is known what is used next, and when something is fetched or evicted next
(`Residency.still`). Copies that are used up to there are leased together, and each use itself changes nothing but
counts. Transfers and evictions are those of single uses: nothing would have moved between them.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any

from hetmem.engine.device_limit import DeviceRoom
from hetmem.engine.events import EventLog
from hetmem.engine.homes import Memory
from hetmem.engine.param_views import are_held
from hetmem.engine.traffic import Traffic
from hetmem.memory.chunk import ManagedParameter
from hetmem.schedule.trace import DEVICE, Moment, SegmentTrace
from hetmem.schedule.tracer import StepTracer

_VERSION, _VERSION_SEEN = attrgetter("counter._version"), attrgetter("version")
_BLOCKS, _BYTES, _OWN_BYTES = attrgetter("blocks"), attrgetter("non_model_bytes"), attrgetter("own_bytes")
LEAST, MOST = 2, 64
"""The least and the most uses in a row."""

BACKWARD_OF = "backward of "
"""What a moment is called in which a backward uses a weight, as it was saved: this, and the weight's name."""


class Together(list[ManagedParameter]):
    """Parameters that are used together, often the same ones: `blocks` are theirs, and `uses` says how many each has.
    Both are counted at the first use, as only then blocks have their numbers for good."""

    __slots__ = ("blocks", "uses")

    def __init__(self, used: Iterable[ManagedParameter] = ()) -> None:
        super().__init__(used)
        self.uses: dict[int, int] = {}
        self.blocks: tuple[int, ...] = ()

    def counted(self) -> dict[int, int]:
        """Set `uses` and `blocks`; return `uses`."""
        uses: dict[int, int] = {}
        for managed in self:
            block = managed.chunk.operand_block
            uses[block] = uses[block] + 1 if block in uses else 1
        self.blocks, self.uses = (*uses,), uses
        return uses


class UseRow:
    """Uses of different parameters, `used`, at the `moments` of a trace; `begun` of them have begun."""

    __slots__ = ("begun", "blocks", "length", "logged", "used", "worst")

    def __init__(self, used: Iterable[ManagedParameter], moments: Sequence[Moment]) -> None:
        self.used = Together(used)
        self.used.counted()
        most, own = max(map(_BYTES, moments)), max(chain.from_iterable(map(_OWN_BYTES, moments)))
        self.worst = Moment("a row", (), most, (own,))
        self.blocks, self.length, self.begun = [*map(_BLOCKS, moments)], len(moments), 0
        entries = ((0.0, moment.operator, moment.blocks, 0, moment.non_model_bytes) for moment in moments)
        self.logged: list[Any] = [*chain.from_iterable(entries)]
        """The entries of the log, one behind the other, without the time and the bytes of chunks."""


class UseRows:
    """The rows of one model."""

    def __init__(
        self, memory: Memory, traffic: Traffic, tracer: StepTracer, room: DeviceRoom, events: EventLog
    ) -> None:
        self._memory, self._traffic, self._tracer, self._room, self._events = memory, traffic, tracer, room, events
        self._residency = traffic.residency
        self._slots, self._slot_bytes = traffic.residency.taken[DEVICE], memory.device_pool.slot_bytes
        self._watched = memory.device.watched
        self.open: UseRow | None = None
        """The row of saved weights that is leased: the backward uses them in this order."""
        self._saved: dict[str, ManagedParameter] = {}
        """By the operator of the moment in which a backward uses it; filled as the first row is looked for."""
        self._of: dict[Hashable, tuple[SegmentTrace, dict[tuple[int, int], UseRow | None]]] = {}
        """The rows of saved weights by the key of their segment: of a trace, by first moment and length."""

    def begin(self, row: UseRow) -> bool:
        """Begin a lease of each of `row.used`. Returns False, with nothing begun, if more memory is needed than now, or
        one of them was written to since its last use."""
        room, used = self._room, row.used
        if room.leaving or room.ahead or not room.is_as_left(row.worst, beside_gradients=self._watched):
            return False
        if [*map(_VERSION, used)] != [*map(_VERSION_SEEN, used)]:
            return False
        self._residency.lease(used.uses)
        self._tracer.expect(row.worst)
        row.begun = 0
        return True

    def count(self, row: UseRow, begun: int) -> None:
        """Count the first `begun` uses of `row` as uses of the schedule, and log them."""
        if not begun:
            return
        self._tracer.pass_over(begun)
        self._residency.pass_over(row.blocks if begun == row.length else row.blocks[:begun])
        chunk_bytes, logged = self._slots.used * self._slot_bytes + self._memory.device_home_bytes, row.logged
        self._room.statistics.device_in_use(chunk_bytes, row.worst.non_model_bytes)
        logged[::5], logged[3::5] = [self._events.now()] * row.length, [chunk_bytes] * row.length
        self._events.moments.append(logged if begun == row.length else logged[: 5 * begun])
        self._events.unpacked += begun

    # ---- saved weights ---------------------------------------------------------------------------------------------

    def begin_saved(self, held: dict[ManagedParameter, None]) -> None:
        """Open the row of the saved weights that the backward is known to use next, if there is one. `held`: weights
        whose copies are in use."""
        trace, tracer = self._tracer.followed, self._tracer
        if trace is None:
            return
        at = tracer.position
        length = self._residency.still(at, MOST)
        if length < LEAST:
            return
        if tracer.key not in self._of or self._of[tracer.key][0] is not trace:
            self._of[tracer.key] = trace, {}
        rows = self._of[tracer.key][1]
        if (at, length) not in rows:
            rows[at, length] = self._find(trace.moments[at : at + length])
        row = rows[at, length]
        if row is not None and True not in map(held.__contains__, row.used) and self.begin(row):
            self.open = row

    def _find(self, moments: Sequence[Moment]) -> UseRow | None:
        """Return the longest row that begins with the first of `moments`; None if there is none."""
        used: dict[ManagedParameter, None] = {}
        for chunk in () if self._saved else self._memory.chunks:
            self._saved.update((BACKWARD_OF + managed.name, managed) for managed in chunk.parameters)
        for moment in moments:
            managed = self._saved.get(moment.operator)
            if managed is None or managed in used or moment.blocks != (managed.chunk.operand_block,):
                break
            used[managed] = None
        return UseRow(used, moments[: len(used)]) if len(used) >= LEAST else None

    def end_saved(self) -> list[ManagedParameter]:
        """End the row that is open, and the leases of its weights but of the last one that was used; of no weight that
        was used, if tensors hold the copy of one, or one was written to. Returns those whose leases go on."""
        row, self.open = self.open, None
        if row is None:
            return []
        begun, over = row.begun, dict(row.used.uses)
        before, last = (row.used[: begun - 1], row.used[begun - 1 : begun]) if begun else ([], [])
        self.count(row, begun)
        if are_held(before) or [*map(_VERSION, before)] != [*map(_VERSION_SEEN, before)]:
            last = row.used[:begun]
        for managed in last:
            over[managed.chunk.operand_block] -= 1
            if not over[managed.chunk.operand_block]:
                del over[managed.chunk.operand_block]
        if over:
            self._traffic.release_all(over)
        return last
