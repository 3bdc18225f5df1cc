"""Gradients on their way on the simulator's clock: home, or to a place on the device where their update reads them.

The counterpart of `engine.gradients`. Pure. When an update begins is `planner.step_program`'s.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Container, Mapping
from functools import partial

from hetmem.planner.reservation import Arrangement, with_own_gradients
from hetmem.planner.simulated_trace import Notes
from hetmem.planner.simulated_updates import SimulatedDeviceUpdates
from hetmem.planner.simulator import SimulatedTraffic
from hetmem.schedule.gradients import Lending
from hetmem.schedule.trace import Tier


class SimulatedGradients:
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
        streamed: SimulatedDeviceUpdates,
        blocks: Mapping[tuple[str, int], int],
        comes_there: Callable[[int], bool],
        set_aside: tuple[int, ...],
        awaited: Callable[[int], Collection[int]] | None,
    ) -> None:
        self._arrangement: Arrangement
        self._traffic, self._notes, self._streamed, self._blocks = traffic, notes, streamed, blocks
        self._kept = streamed.kept
        self._comes_there, self._awaited = comes_there, awaited
        self.arrivals: Counter[int] = Counter()
        self.stayed_bytes = 0
        self.new_bytes: Counter[Tier] = Counter()
        self._lending = Lending(set_aside)
        self._lent: dict[int, int] = {}
        """The bytes of the homes in host memory that gradients were lent, by chunk."""
        self._stayed: Counter[int] = Counter()
        """Bytes that have arrived in chunks whose gradients stay on the device."""

    def begin_step(self) -> None:
        """No gradient has arrived."""
        self.arrivals.clear()
        self._stayed.clear()

    def begin_backward(self) -> None:
        """Of the backward that begins no gradient has arrived."""
        self._traffic.gradients.complete.begin()

    def send(self, arrangement: Arrangement, parameter: int, device_bytes: int) -> Arrangement:
        """A gradient of `parameter`, of `device_bytes` as it was made, arrives. Returns `arrangement`, where its chunk
        has got a home of its own for that if there was no other. Raises `NoRoom` if there is none at all."""
        self._arrangement = arrangement
        chunk, sends = arrangement.chunk_of[parameter], self._traffic.gradients
        if chunk in arrangement.lent and not self.waits(chunk):
            sends.find_place(chunk, self)
            arrangement = self._arrangement
        spec = arrangement.ground.chunks[chunk]
        nbytes = arrangement.elements[parameter] * spec.itemsize
        tier = arrangement.homes["grad"][chunk]
        if tier is Tier.DEVICE:
            return arrangement
        if self._kept.holds(chunk):
            self._stayed[chunk] += nbytes
            self.stayed_bytes += nbytes
            return arrangement
        if tier is Tier.HOST:
            self._traffic.send_gradient(chunk, nbytes, device_bytes)
            return arrangement
        block = self._blocks["grad", chunk]
        if self._awaited is not None:
            sends.complete.comes(chunk, parameter, self._awaited, adds=parameter in self.arrivals)
        load = any(other in self.arrivals for other in spec.parameters)
        self._notes.staged(block, reads=load)
        self._traffic.open_staged(block, load=load)
        self._traffic.send_gradient(chunk, nbytes, device_bytes, partial(self._staged, chunk, block))
        return arrangement

    def _staged(self, chunk: int, block: int) -> None:
        """A gradient of `chunk` is in staging, in `block`."""
        self._traffic.release(block, Tier.HOST, dirty=True)
        if self._traffic.gradients.to_be_written(chunk):
            self._traffic.execute(self._traffic.residency.settle(block))

    # ---- places: see `schedule.gradients.Places` ----------------------------------------------------------------

    def keep(self, chunk: int) -> bool:
        """Keep gradients of `chunk` on the device, where their update reads them; False if they go home."""
        if not (self._comes_there(chunk) and self._streamed.find_place()):
            return False
        self._kept.take(chunk)
        return True

    def lend(self, chunk: int) -> bool:
        """Give gradients of `chunk` a place that was set aside; False if all that are large enough are lent."""
        place = self._lending.take(self._arrangement.ground.home_bytes(chunk, "grad"))
        if place is not None:
            self._lent[chunk] = place
        return place is not None

    def may_lend(self, chunk: int) -> bool:
        """Whether a place for gradients of `chunk` was set aside, lent or not."""
        return self._lending.lends(self._arrangement.ground.home_bytes(chunk, "grad"))

    def give_own(self, chunk: int) -> None:
        """Give gradients of `chunk` a home for good. Raises `NoRoom` if there is none."""
        self._arrangement = arrangement = with_own_gradients(self._arrangement, chunk)
        tier = arrangement.homes["grad"][chunk]
        self.new_bytes[tier] += arrangement.ground.home_bytes(chunk, "grad")
        self._traffic.rehome(self._blocks["grad", chunk], tier)

    def waits(self, chunk: int) -> bool:
        """Whether gradients of `chunk` have a home that was lent for them."""
        return chunk in self._lent or self._kept.holds(chunk)

    def retire(self, chunk: int) -> None:
        """The update of `chunk` has read its gradients."""
        if chunk in self._lent:
            self._lending.give(self._lent.pop(chunk))

    def bring_home(self, arrangement: Arrangement, but: Container[int]) -> Arrangement:
        """The backward is over: what has stayed on the device goes home, except gradients of chunks in `but`. Returns
        `arrangement` as `send` does."""
        self._arrangement = arrangement
        for chunk in self._kept.chunks:
            if chunk not in but:
                if not self._traffic.gradients.lend(chunk, self):
                    self.give_own(chunk)
                self._traffic.send_home(self._arrangement.role_bytes(chunk, "grad"))
                self.stayed_bytes -= self._stayed[chunk]
                self._kept.leave(chunk)
        return self._arrangement
