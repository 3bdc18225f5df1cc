"""Gradients on their way on the simulator's clock: home, or to a place on the device where their update reads them.

The counterpart of `engine.gradients`. Pure. When an update begins is `planner.step_program`'s.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Container, Mapping
from functools import partial

from hetmem.planner.reservation import Arrangement, with_own_gradients
from hetmem.planner.simulated_device_updates import StreamedUpdates
from hetmem.planner.simulated_trace import Notes
from hetmem.planner.simulator import SimulatedTraffic
from hetmem.schedule.queues import Complete, Lending
from hetmem.schedule.trace import Tier


class GradientSink:
    """Gradients of the chunks of one run. `arrivals` counts those of each parameter in a step.

    Chunks that are lent homes of gradients have one from the first arrival to their update; those of which
    `comes_there` is true have it on the device, as far as `streamed` has places; the bytes of these are `stayed_bytes`.
    `new_bytes`, by tier: homes that gradients have for good and had not when the run began. Gradients are written
    to NVMe once those of all parameters of a chunk that are `awaited` are there; None: when the backward is over.
    """

    def __init__(
        self,
        traffic: SimulatedTraffic,
        notes: Notes,
        streamed: StreamedUpdates,
        blocks: Mapping[tuple[str, int], int],
        comes_there: Callable[[int], bool],
        set_aside: tuple[int, ...],
        awaited: Callable[[int], Collection[int]] | None,
    ) -> None:
        self._traffic, self._notes, self._streamed, self._blocks = traffic, notes, streamed, blocks
        self._comes_there, self._awaited = comes_there, awaited
        self._complete: Complete[int] = Complete()
        self.arrivals: Counter[int] = Counter()
        self.stayed_bytes = 0
        self.new_bytes: Counter[Tier] = Counter()
        self._lending = Lending(set_aside)
        self._lent: dict[int, int] = {}
        """The bytes of the homes in host memory that gradients were lent, by chunk."""
        self._stayed: Counter[int] = Counter()
        """Bytes that have arrived in chunks whose gradients stay on the device."""
        self._arriving: Counter[int] = Counter()

    def begin_step(self) -> None:
        """No gradient has arrived."""
        self.arrivals.clear()
        self._stayed.clear()

    def begin_backward(self) -> None:
        """Of the backward that begins no gradient has arrived."""
        self._complete.begin()

    def send(self, arrangement: Arrangement, parameter: int, device_bytes: int) -> Arrangement:
        """A gradient of `parameter`, of `device_bytes` as it was made, arrives. Returns `arrangement`, where its chunk
        has got a home of its own for that if there was no other. Raises `NoRoom` if there is none at all."""
        chunk = arrangement.chunk_of[parameter]
        if chunk in arrangement.lent and not self.waits(chunk) and not self._lend(arrangement, chunk):
            arrangement = self._give(arrangement, chunk)
        spec = arrangement.ground.chunks[chunk]
        nbytes = arrangement.elements[parameter] * spec.itemsize
        tier = arrangement.homes["grad"][chunk]
        if tier is Tier.DEVICE:
            return arrangement
        if self._streamed.keeps(chunk):
            self._stayed[chunk] += nbytes
            self.stayed_bytes += nbytes
            return arrangement
        self._arriving[chunk] += 1
        if tier is Tier.HOST:
            self._traffic.send_gradient(nbytes, device_bytes, partial(self._home, chunk, None))
            return arrangement
        block = self._blocks["grad", chunk]
        if self._awaited is not None:
            self._complete.comes(chunk, parameter, self._awaited, adds=parameter in self.arrivals)
        load = any(other in self.arrivals for other in spec.parameters)
        self._notes.staged(block, reads=load)
        self._traffic.open_staged(block, load=load)
        self._traffic.send_gradient(nbytes, device_bytes, partial(self._home, chunk, block))
        return arrangement

    def _home(self, chunk: int, staged: int | None) -> None:
        """A gradient of `chunk` is at home, or in the `staged` block of it."""
        self._arriving[chunk] -= 1
        if staged is not None:
            self._traffic.release(staged, Tier.HOST, dirty=True)
            if chunk in self._complete and not self.arriving(chunk):
                self._traffic.execute(self._traffic.residency.settle(staged))

    def arriving(self, chunk: int) -> bool:
        """Whether gradients of `chunk` are on their way."""
        return bool(self._arriving[chunk])

    # ---- homes that are lent -----------------------------------------------------------------------------------

    def _lend(self, arrangement: Arrangement, chunk: int) -> bool:
        """A home for gradients of `chunk` until their update has read them; False if there is none."""
        self._traffic.poll()
        if self._comes_there(chunk) and self._streamed.keep(chunk):
            return True
        return self._lend_home(arrangement, chunk)

    def _lend_home(self, arrangement: Arrangement, chunk: int) -> bool:
        """One in host memory: waits for it as long as anything is under way."""
        nbytes, traffic, made_way = arrangement.ground.home_bytes(chunk, "grad"), self._traffic, False
        while (place := self._lending.take(nbytes)) is None:
            if not self._lending.lends(nbytes):
                return False
            traffic.pump()
            if traffic.busy():
                traffic.wait_for_one()
                made_way = False
            elif made_way or not traffic.make_way():
                return False
            else:
                made_way = True
        self._lent[chunk] = place
        return True

    def _give(self, arrangement: Arrangement, chunk: int) -> Arrangement:
        """Gradients of `chunk` get a home of their own, for good."""
        arrangement = with_own_gradients(arrangement, chunk)
        tier = arrangement.homes["grad"][chunk]
        self.new_bytes[tier] += arrangement.ground.home_bytes(chunk, "grad")
        self._traffic.rehome(self._blocks["grad", chunk], tier)
        return arrangement

    def waits(self, chunk: int) -> bool:
        """Whether gradients of `chunk` have a home that was lent for them."""
        return chunk in self._lent or self._streamed.keeps(chunk)

    def retire(self, chunk: int) -> None:
        """The update of `chunk` has read its gradients."""
        if chunk in self._lent:
            self._lending.give(self._lent.pop(chunk))

    def bring_home(self, arrangement: Arrangement, but: Container[int]) -> Arrangement:
        """The backward is over: what has stayed on the device goes home, except gradients of chunks in `but`. Returns
        `arrangement` as `send` does."""
        for chunk in self._streamed.kept():
            if chunk not in but:
                if not self._lend_home(arrangement, chunk):
                    arrangement = self._give(arrangement, chunk)
                self._traffic.send_home(arrangement.role_bytes(chunk, "grad"))
                self.stayed_bytes -= self._stayed[chunk]
                self._streamed.give_up(chunk)
        return arrangement
