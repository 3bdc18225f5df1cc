"""Sends the gradients of a chunk home together, in one transfer: each waits on the device, as autograd made it, until
the chunk has all of them.

It takes the first gradient of a parameter in a backward, from a working weight, where nothing reads gradients as they
arrive. All others are sent alone, behind those that wait here.

Note "room": what waits has room beside copies until the next moment of the trace, or the row of them that is leased
together: the moment looks whether it leaves that room (`Uses`), and what comes after it asks for as much as that left.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import Any, cast

import torch

from hetmem.engine.gradient_views import are_own, is_held, open_hidden_homes, show_first_gradient, show_gradient
from hetmem.engine.sink import Sink
from hetmem.engine.summed_gradients import SummedGradients
from hetmem.memory.chunk import Chunk, ManagedParameter, Role
from hetmem.schedule.trace import Tier

_HOOKS = attrgetter("parameter._backward_hooks"), attrgetter("parameter._post_accumulate_grad_hooks")
_TRAINS = attrgetter("parameter.requires_grad")


class Gathered:
    """Gradients of one chunk, of `dtype`, and their places at home; `missing` more are expected."""

    __slots__ = ("arrived", "dtype", "hides", "home_nbytes", "managed", "missing", "nbytes", "places")

    def __init__(self, dtype: torch.dtype, missing: int, *, hides: bool) -> None:
        self.dtype, self.missing, self.hides = dtype, missing, hides
        self.nbytes = self.home_nbytes = 0
        """Of these gradients on the device, and at home."""
        self.managed: list[ManagedParameter] = []
        self.places: list[torch.Tensor] = []
        self.arrived: list[torch.Tensor] = []


class GatheredGradients:
    """The gathered gradients of one model. How many a chunk gets is learned from the backward before."""

    def __init__(self, sink: Sink) -> None:
        self._sink = cast("Callable[[], Sink]", weakref.ref(sink))
        copies = sink.runtime.traffic.gradients
        self._copies: Callable[[], Any] = weakref.ref(copies)
        self._tracer = sink.runtime.tracer
        self.fresh: dict[ManagedParameter, None] = {}
        """Parameters that may be gathered: without hooks of the program, a gradient, or one that the program holds."""
        self.chunks: dict[Chunk, Gathered] = {}
        """Chunks some of whose gradients wait: another gradient of one is sent behind them."""
        self._counts: defaultdict[Chunk, int] = defaultdict(int)
        """How many gradients of each chunk were gathered in this backward."""
        self._usual: defaultdict[Chunk, int] = defaultdict(int)

    def begin(self, sums: SummedGradients) -> None:
        """Begin a backward. Call it without `__torch_function__`. `sums`: takes them if it is of several
        micro-batches."""
        sink = self._sink()
        self.send_all()
        self._counts.clear()
        sink.runtime.traffic.gradients.allowed_bytes = -1
        self.fresh = {} if sink.runtime.memory.resident or sink.ranked is not None else self._find_fresh()
        sums.begin(self.fresh)
        if sums.runs:
            self.fresh = {}

    def _find_fresh(self) -> dict[ManagedParameter, None]:
        runtime = self._sink().runtime
        managed_ones = runtime.parameters
        hooks = [max(map(len, filter(None, map(which, managed_ones))), default=0) for which in _HOOKS]
        if max(hooks) > 1:
            managed_ones = [each for each in managed_ones if max(len(which(each) or ()) for which in _HOOKS) < 2]
        memory = runtime.memory
        others = (
            runtime.chunks if memory.device_home_bytes or memory.staging_slots else ()
        )  # else all are in host memory
        elsewhere = {chunk for chunk in others if _is_elsewhere(chunk)}
        found = [each for each in managed_ones if each.parameter.grad is None and each.chunk not in elsewhere]
        shown = [each for each in found if each.grad_home is not None and each.grad_view is None]
        if not are_own([each.grad_home for each in shown], [each.grad_address for each in shown]):
            found = [each for each in found if not is_held(each)]
        elif len(shown) < len(found):
            found = [each for each in found if each.grad_view is None or not is_held(each)]
        return dict.fromkeys(found)

    def end(self) -> None:
        """End a backward: send what waits, and learn how many gradients each chunk had."""
        self.send_all()
        self._usual.update(self._counts)
        self.fresh = {}

    def take(self, managed: ManagedParameter, weight: torch.Tensor, arrived: torch.Tensor) -> bool:
        """Take `arrived`, a dense gradient of `weight`, which works for `managed`, one of `fresh`, and show its home.
        Return False, with nothing changed, if it is to be sent alone."""
        chunk = managed.chunk
        gathered = self.chunks[chunk] if chunk in self.chunks else self._begin(managed, arrived)
        if gathered is None:
            return False
        hides = chunk.hides
        if arrived.dtype is not gathered.dtype or hides is not gathered.hides:
            return False
        if hides and managed.stepped_by not in self._sink().loans.consumers:
            return False
        del self.fresh[managed]
        view = managed.grad_view
        if managed.grad_home is None or (view is None) is hides:
            managed.open_grad_home()
            view = managed.grad_view
        home: Any = managed.grad_home
        if view is not None and (view.gradient is not home or view.consumed or view.zeroed):
            view.begin(home)
        show_first_gradient(managed.parameter, weight, home if view is None else view)
        if view is None:
            self._sink().flights.begin(managed)
        gathered.managed += (managed,)
        gathered.places += (home,)
        gathered.arrived += (arrived,)
        gathered.missing -= 1
        gathered.nbytes += arrived.nbytes
        gathered.home_nbytes += home.nbytes
        self._tracer.gradients_sent += 1
        copies = self._copies()
        copies.gathered_bytes += arrived.nbytes
        if not gathered.missing:
            self.send(chunk)
        elif copies.gathered_bytes > copies.allowed_bytes and copies.gathered_bytes > copies.room_bytes():
            self.send_all()
        return True

    def note_alone(self, managed: ManagedParameter) -> None:
        """Count a gradient of `managed` that is sent alone, and may be gathered in the next backward."""
        if managed in self.fresh:
            del self.fresh[managed]
            self._counts[managed.chunk] += 1

    def _begin(self, managed: ManagedParameter, arrived: torch.Tensor) -> Gathered | None:
        """Begin to gather gradients of the chunk of `managed`; None if it is not to be."""
        sink, chunk = self._sink(), managed.chunk
        if sink.notifies or sink.runtime.traffic.updating:
            sink.tell_coming(managed)
        sink.prepare_home(managed, arrived, adds=False)
        if chunk.homes[Role.GRAD].tier is not Tier.HOST:
            return None
        if chunk.hides and chunk in sink.lent and managed.grad_home is None:
            open_hidden_homes(chunk)
        missing = (self._usual[chunk] or sum(map(_TRAINS, chunk.parameters))) - self._counts[chunk]
        gathered = Gathered(arrived.dtype, missing if missing > 0 else 1, hides=chunk.hides)
        self.chunks[chunk] = gathered
        return gathered

    def send_all(self) -> None:
        """Send everything that is gathered."""
        if not self.chunks:
            return
        with self._sink().runtime.own_work():
            while self.chunks:
                self.send(next(iter(self.chunks)))

    def send(self, chunk: Chunk) -> None:
        """Send what is gathered of `chunk`, and tell listeners that it has arrived."""
        gathered, sink, copies = self.chunks[chunk], self._sink(), self._copies()
        arrived = gathered.arrived
        del self.chunks[chunk]
        copies.gathered_bytes -= gathered.nbytes
        self._counts[chunk] += len(arrived)
        work = partial(sink.runtime.memory.device.gradients_out, gathered.places, arrived)
        try:
            copies.send(chunk, work, gathered.home_nbytes, arrived, gathered=True)
        except BaseException:
            for managed in gathered.managed:
                show_gradient(managed.parameter, None)
            raise
        if sink.notifies or sink.runtime.traffic.updating:
            sink.tell_arrived(gathered.managed, [*zip(gathered.managed, arrived, strict=True)])


def _is_elsewhere(chunk: Chunk) -> bool:
    """Return whether gradients of `chunk` have, or borrow, a home that is not in host memory."""
    return chunk.moved or (Role.GRAD in chunk.homes and chunk.homes[Role.GRAD].tier is not Tier.HOST)
