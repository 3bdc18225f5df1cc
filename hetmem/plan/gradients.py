"""Gradients on their way on the simulator's clock: home, or to a place on the device where their update reads them.

The counterpart of `runtime.gradients`. Pure. When an update begins is `plan.rehearsal`'s.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Mapping
from functools import partial

from hetmem.plan.arrangement import Arrangement
from hetmem.plan.notes import Notes
from hetmem.plan.placement import Ground
from hetmem.plan.simulator import SimulatedTraffic
from hetmem.plan.streamed import StreamedUpdates
from hetmem.plan.streaming import LENT_CHUNKS
from hetmem.plan.trace import Tier


class GradientSink:
    """Gradients of the chunks of one run. `arrivals` counts those of each parameter in a step.

    `lends`: they have homes only from their arrival to their update, and those of a chunk of which `comes_there` is
    true stay on the device, as far as `streamed` has places; the bytes of these are `stayed_bytes`.
    """

    def __init__(
        self,
        traffic: SimulatedTraffic,
        notes: Notes,
        streamed: StreamedUpdates,
        blocks: Mapping[tuple[str, int], int],
        comes_there: Callable[[int], bool],
        *,
        lends: bool,
    ) -> None:
        self._traffic, self._notes, self._streamed, self._blocks = traffic, notes, streamed, blocks
        self._comes_there = comes_there
        self.lends = lends
        self.arrivals: Counter[int] = Counter()
        self.stayed_bytes = 0
        self._lent: Counter[int] = Counter()
        """Bytes that have arrived in chunks whose gradients have a home."""
        self._arriving: Counter[int] = Counter()
        self._ground: Ground | None = None
        self._sizes: set[int] = set()

    def begin_step(self) -> None:
        """No gradient has arrived."""
        self.arrivals.clear()
        self._lent.clear()

    def send(self, arrangement: Arrangement, parameter: int, device_bytes: int) -> None:
        """A gradient of `parameter`, of `device_bytes` as it was made, arrives."""
        chunk = arrangement.chunk_of[parameter]
        spec = arrangement.ground.chunks[chunk]
        nbytes = arrangement.elements[parameter] * spec.itemsize
        tier = arrangement.homes["grad"][chunk]
        if tier is Tier.DEVICE:
            return
        if self.is_lent(arrangement, chunk):
            first = chunk not in self._lent
            self._lent[chunk] += nbytes
            if self._streamed.keeps(chunk) or (first and self._comes_there(chunk) and self._streamed.keep(chunk)):
                self.stayed_bytes += nbytes
                return
        self._arriving[chunk] += 1
        if tier is Tier.HOST:
            self._traffic.send_gradient(nbytes, device_bytes, partial(self._home, chunk, None))
            return
        block = self._blocks["grad", chunk]
        self._notes.staged(block)
        self._traffic.open_staged(block, load=any(other in self.arrivals for other in spec.parameters))
        self._traffic.send_gradient(nbytes, device_bytes, partial(self._home, chunk, block))

    def _home(self, chunk: int, staged: int | None) -> None:
        """A gradient of `chunk` is at home, or in the `staged` block of it."""
        self._arriving[chunk] -= 1
        if staged is not None:
            self._traffic.release(staged, Tier.HOST, dirty=True)

    def arriving(self, chunk: int) -> bool:
        """Whether gradients of `chunk` are on their way."""
        return bool(self._arriving[chunk])

    def is_lent(self, arrangement: Arrangement, chunk: int) -> bool:
        """Whether gradients of `chunk` get homes for a while. Not those of a size that nothing was set aside for: the
        first one takes a home of its own, and all others go there."""
        if not self.lends:
            return False
        if arrangement.ground is not self._ground:
            ground = self._ground = arrangement.ground
            sizes = sorted((ground.home_bytes(other, "grad") for other in arrangement.homes["grad"]), reverse=True)
            self._sizes = set(sizes[:LENT_CHUNKS])
        return arrangement.ground.home_bytes(chunk, "grad") in self._sizes

    def waits(self, chunk: int) -> bool:
        """Whether gradients of `chunk` have a home that was lent for them."""
        return chunk in self._lent

    def bring_home(self, arrangement: Arrangement, but: Container[int]) -> None:
        """The backward is over: what has stayed on the device goes home, except gradients of chunks in `but`."""
        for chunk in self._streamed.kept():
            if chunk not in but:
                self._traffic.send_home(arrangement.role_bytes(chunk, "grad"))
                self.stayed_bytes -= self._lent[chunk]
                self._streamed.give_up(chunk)
