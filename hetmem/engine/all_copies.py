"""Leases all copies of a model whose homes are elsewhere, from the begin of a forward to the end of its backward.

Only where all of them fit on the device at once, beside the most that any known segment needs: nothing is evicted then,
so what autograd saves stays where it is.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from itertools import chain
from operator import attrgetter

from hetmem.engine.device_limit import DeviceRoom
from hetmem.engine.homes import Memory
from hetmem.engine.param_views import are_held
from hetmem.engine.traffic import Traffic
from hetmem.engine.use_rows import Together
from hetmem.engine.uses import Uses
from hetmem.memory.chunk import Chunk
from hetmem.schedule.trace import DEVICE, Moment
from hetmem.schedule.tracer import StepTracer

_OPERAND_BLOCK = attrgetter("operand_block")
_BLOCKS, _PARAMETERS = attrgetter("blocks"), attrgetter("parameters")


class AllCopies:
    """The leases of one model: each chunk here has one for each of its parameters."""

    def __init__(self, memory: Memory, traffic: Traffic, tracer: StepTracer, room: DeviceRoom, uses: Uses) -> None:
        self._memory, self._traffic, self._tracer, self._room, self._uses = memory, traffic, tracer, room, uses
        self._unwatched = room.monitor.unwatched
        self.leased: dict[Chunk, None] = {}
        self.missing: set[Chunk] = set()
        """Those that the running forward is known to use, and that are still on their way."""
        self.crowd_sums = False
        """Whether a sum of gradients had no room beside all copies: it displaces copies that are not leased."""

    def begin(self, operator: str, backward: Hashable | None, *, goes_on: bool, turns: bool) -> list[Chunk] | None:
        """Treat the segment that has just begun, called `operator`, as one moment, and request all copies in its trace;
        return the chunks whose copies are leased from now on, with those leased before. `backward` is the key of the
        backward that may follow. None, with nothing begun, if too little is known or not all copies fit; `goes_on`: a
        graph holds all copies that are leased, so these are used whatever is known. `turns`: micro-batches take
        turns, and sums of their gradients need room beside all copies, too."""
        tracer, room, traffic = self._tracer, self._room, self._traffic
        moving = room.shortage.activations is not None or bool(traffic.gradients.leaving)
        moving = moving or (turns and self.crowd_sums)
        if tracer.known is None or tracer.measured or tracer.unseen_growth > 1 or moving:
            return self._go_on(operator) if goes_on and self.leased else None
        blocks = (*dict.fromkeys(chain.from_iterable(map(_BLOCKS, tracer.known.moments))),)
        moment = tracer.all_ahead(blocks)
        if moment is None or not (room.has_room_for(moment) and (backward is None or self._fits(backward))):
            return self._go_on(operator) if goes_on and self.leased else None
        chunks = [traffic.executor.chunk_of_block[block][0] for block in blocks]
        if [chunk.operand_block for chunk in chunks] != [*blocks]:
            return None
        with self._unwatched():
            self._uses.release_unheld()
            traffic.executor.poll()
            if not room.is_as_left(moment):
                room.before_moment(moment)
            self.renew()
            wanted = [chunk for chunk in chunks if chunk not in self.leased]
            present = {*traffic.bring_all([chunk.operand_block for chunk in wanted])} if wanted else set()
            found = [chunk for chunk in wanted if chunk.operand_block in present]
            uses = dict(zip(map(_OPERAND_BLOCK, found), map(len, map(_PARAMETERS, found)), strict=True))
            if found and traffic.use(uses):
                self.leased.update(dict.fromkeys(found))
        self.missing = {chunk for chunk in wanted if chunk not in self.leased}
        tracer.all_at_once(moment)
        self._uses.log_all(moment, operator, blocks)
        return [*self.leased]

    def _go_on(self, operator: str) -> list[Chunk]:
        """Record one moment that uses all copies that are leased, and return their chunks."""
        with self._unwatched():
            self.renew()
        self._uses.note_moment(operator, (*map(_OPERAND_BLOCK, self.leased),))
        return [*self.leased]

    def _fits(self, backward: Hashable) -> bool:
        """Return whether there is room beside all copies for `backward` and whatever else may run before it."""
        tracer, room, book = self._tracer, self._room, self._tracer.book
        later = book.get(backward)
        if later is None:
            return False
        needed = [Moment("backward", (), *later.worst).times(tracer.growth)]
        needed += [Moment("a segment", (), *trace.worst) for trace in book.traces()]
        return all(map(room.has_room_for, needed))

    def lease(self, chunks: Iterable[Chunk], operator: str) -> None:
        """Begin the leases of `chunks`, which are not leased, for a use called `operator`; waits for their copies.
        Begins none if this raises."""
        chunks = [*chunks]
        self._uses.lease(operator, Together(chain.from_iterable(map(_PARAMETERS, chunks))))
        self.leased.update(dict.fromkeys(chunks))
        self.missing.difference_update(chunks)

    def begin_backward(self) -> None:
        """Treat the backward that has just begun as one moment, if all copies in its trace are leased."""
        tracer, room = self._tracer, self._room
        if not self.leased:
            return
        if tracer.known is None or tracer.measured:
            self._go_on("backward")
            return
        blocks = (*dict.fromkeys(chain.from_iterable(map(_BLOCKS, tracer.known.moments))),)
        moment = tracer.all_ahead(blocks)
        if moment is None or not {*blocks}.issubset(map(_OPERAND_BLOCK, self.leased)):
            return
        if not room.is_as_left(moment):
            with self._unwatched():
                room.before_moment(moment)
        tracer.all_at_once(moment)
        self._uses.log_all(moment, "backward", blocks)

    def renew(self) -> None:
        """Fetch stale copies anew that are leased. Call it `unwatched`."""
        if self._traffic.residency.all_on_device([chunk.operand_block for chunk in self.leased]):
            return
        for chunk in self.leased:
            if not self._traffic.copy_counts(chunk):
                self._traffic.acquire(chunk.operand_block, DEVICE)
                self._traffic.release(chunk.operand_block, DEVICE)

    def are_held(self, times: int) -> bool:
        """Return whether more than `times` tensors have the memory of any leased copy."""
        return are_held(chain.from_iterable(map(_PARAMETERS, self.leased)), times)

    def release(self) -> None:
        """End all leases; copies that tensors hold stay as long as these."""
        leased, self.leased = self.leased, {}
        self.missing = set()
        if not leased:
            return
        used = Together(chain.from_iterable(map(_PARAMETERS, leased)))
        held = are_held(used)
        with self._unwatched():
            if held:
                self._uses.release(used)
                return
            for managed in used:
                managed.data_taken = False
            self._traffic.release_all(used.counted())
