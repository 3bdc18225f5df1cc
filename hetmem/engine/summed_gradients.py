"""Adds the gradients of several micro-batches up on the device, in their order, and sends each sum home once.

The backwards of `hetmem.accumulate` take turns at each layer, so the gradients of a weight from all micro-batches come
one after the other. The first one waits as autograd made it; the sum has the dtype of the home. A weight for whose sum
there is no room, or whose `p.grad` was there before, is added up at home, as one whose gradients come in other ways is.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from operator import attrgetter
from typing import cast

import torch

from hetmem.engine.gradient_views import add_arrived, show_first_gradient, show_gradient, take_gradient
from hetmem.engine.sink import Sink
from hetmem.memory.chunk import Chunk, ManagedParameter, Role
from hetmem.memory.hidden_gradient import HiddenGradient, stored
from hetmem.schedule.trace import Tier

_NBYTES = attrgetter("nbytes")


class _Sum:
    """The sum of `count` gradients of a parameter, of which `left` more are expected."""

    __slots__ = ("count", "home", "is_own", "left", "value")

    def __init__(self, home: torch.Tensor, value: torch.Tensor, left: int) -> None:
        self.home, self.value, self.left, self.count = home, value, left, 1
        self.is_own = False
        """Whether it was made here: what autograd made may be read by the rest of its backward."""

    def bytes_with(self, arrived: torch.Tensor, dtype: torch.dtype) -> int:
        """Return how many bytes more it takes, in `dtype`, with `arrived`, the second one."""
        return arrived.numel() * dtype.itemsize - self.value.nbytes

    def add(self, arrived: torch.Tensor, dtype: torch.dtype) -> None:
        """Add `arrived`, in the order of a loop."""
        if not self.is_own:
            self.value, self.is_own = self.value.to(dtype, copy=True), True
        self.value.add_(arrived)
        self.count += 1
        self.left -= 1


class SummedGradients:
    """The sums of one model, in a backward of several micro-batches."""

    def __init__(self, sink: Sink) -> None:
        self._sink = cast("Callable[[], Sink]", weakref.ref(sink))
        self._expected: dict[ManagedParameter, int] = {}
        self.sums: dict[ManagedParameter, _Sum] = {}
        """By parameter, what was added up so far; `p.grad` is its home, in flight."""
        self._hiding = 0
        self._counts: Counter[ManagedParameter] = Counter()
        """How many gradients of each came in this backward."""
        self._usual: dict[ManagedParameter, float] = {}
        """Of a micro-batch of the last backward in which graphs hid parameters, how many came."""
        self._open: dict[Chunk, set[ManagedParameter]] = {}
        """By chunk, the parameters whose sum may be made here, and is not complete."""
        self.runs = False
        """Whether such a backward runs."""

    def expect(self, arrivals: Mapping[ManagedParameter, int], hiding: int = 0) -> None:
        """Expect so many gradients of each parameter in the backward that begins next; of those with none, which
        `hiding` of the micro-batches may compute within checkpoints, as many of each as in the last one."""
        self._hiding = hiding
        hidden = {managed: round(count * hiding) for managed, count in self._usual.items() if not arrivals.get(managed)}
        self._expected = {managed: count for managed, count in {**arrivals, **hidden}.items() if count > 1}

    def begin(self, fresh: Iterable[ManagedParameter]) -> None:
        """Begin a backward; `fresh`: the parameters without a gradient, or hooks of the program."""
        self.runs = bool(self._expected or self._hiding)
        self._counts.clear()
        loans = self._sink().loans
        loans.sums = loans.took_sums = self.runs
        for managed in fresh if self.runs else ():
            if managed in self._expected:
                self._open.setdefault(managed.chunk, set()).add(managed)

    def end(self) -> None:
        """End a backward: send what is left."""
        try:
            self.send_all()
        finally:
            self.runs = self._sink().loans.sums = False
            if self._hiding:
                self._usual = {managed: count / self._hiding for managed, count in self._counts.items()}
            self._open.clear()
            self._expected.clear()

    def take(self, managed: ManagedParameter, weight: torch.Tensor, arrived: torch.Tensor) -> bool:
        """Do `add` of `arrived`, the gradient of the working weight `weight`. Return False, with nothing changed, if
        there is more to it."""
        shown = managed.parameter.grad
        if managed not in self.sums:
            return shown is None and self._take_first(managed, weight, arrived)
        known = self.sums[managed]
        home = known.home
        if type(shown) is HiddenGradient:
            shown = shown.gradient
        if known.is_own and shown is home and managed.grad_home is home:  # most of them
            add_arrived(known.value, weight, arrived)
            known.count += 1
            known.left -= 1
        elif self._add(managed, arrived, shown):
            take_gradient(weight)
        else:
            return False
        if not known.left:
            self._close(managed)
        return True

    def _take_first(self, managed: ManagedParameter, weight: torch.Tensor, arrived: torch.Tensor) -> bool:
        sink, chunk = self._sink(), managed.chunk
        if chunk not in self._open or managed not in self._open[chunk]:
            return False
        if sink.tells:
            sink.tell_coming(managed)
        if not self._begin(managed, arrived, None):  # expects a second one
            return False
        view = managed.grad_view
        show_first_gradient(managed.parameter, weight, self.sums[managed].home if view is None else view)
        if view is None:
            sink.flights.begin(managed)
        return True

    def add(self, managed: ManagedParameter, arrived: torch.Tensor, previous: torch.Tensor | None) -> bool:
        """Take `arrived`, a dense gradient of `managed` that is on the device; `previous`: `p.grad` before. Return
        False if it is to be sent alone, behind what was added up before it."""
        known = self.sums.get(managed)
        if known is None and managed not in self._open.get(managed.chunk, ()):
            self._counts[managed] += 1
            return False
        with self._sink().runtime.own_work():
            taken = self._begin(managed, arrived, previous) if known is None else self._add(managed, arrived, previous)
            if taken:
                self._show(managed)
                if not self.sums[managed].left:
                    self._close(managed)
            else:
                self._counts[managed] += 1
                self._leave(managed)
        return taken

    def _begin(self, managed: ManagedParameter, arrived: torch.Tensor, previous: torch.Tensor | None) -> bool:
        sink, chunk = self._sink(), managed.chunk
        if previous is not None or arrived.device != sink.runtime.memory.device.torch_device:
            return False
        if not self._has_room(arrived.nbytes):
            return False
        sink.prepare_home(managed, arrived, adds=True)
        if chunk.homes[Role.GRAD].tier is not Tier.HOST or (
            chunk.hides and managed.stepped_by not in sink.loans.consumers
        ):
            return False
        if managed.grad_home is None or (managed.grad_view is None) is chunk.hides:
            managed.open_grad_home()
        elif managed.grad_view is not None:
            managed.grad_view.begin(managed.grad_home)
        assert managed.grad_home is not None
        self.sums[managed] = _Sum(managed.grad_home, arrived, self._expected[managed] - 1)
        self._count(arrived.nbytes)
        return True

    def _add(self, managed: ManagedParameter, arrived: torch.Tensor, previous: torch.Tensor | None) -> bool:
        known, dtype = self.sums[managed], managed.chunk.dtype
        if stored(previous) is not known.home or managed.grad_home is not known.home:
            return False  # the program has dropped or replaced it
        if more := 0 if known.is_own else known.bytes_with(arrived, dtype):
            if not self._has_room(more):
                return False
            self._count(more)
        known.add(arrived, dtype)
        return True

    def _show(self, managed: ManagedParameter) -> None:
        """Show the home to which the sum will go."""
        show_gradient(managed.parameter, managed.grad_home if managed.grad_view is None else managed.grad_view)
        if managed.grad_view is None:
            self._sink().flights.begin(managed)

    def _count(self, nbytes: int) -> None:
        copies = self._sink().runtime.traffic.gradients
        copies.gathered_bytes += nbytes
        copies.summed_bytes += nbytes

    def _has_room(self, more: int) -> bool:
        runtime = self._sink().runtime
        now = runtime.traffic.gradients.summed_bytes
        found = bool(runtime.room.has_room_for_sums(now + more, now))
        runtime.all_copies.crowd_sums |= not found and bool(runtime.all_copies.leased)
        return found

    def _leave(self, managed: ManagedParameter) -> None:
        """Have gradients of `managed` added up at home from here on, behind the sum so far."""
        if managed in self.sums:
            self._send([managed])
            if self._sink().tells:  # its update may have begun
                self._sink().tell_coming(managed)
        self._close(managed)

    def _close(self, managed: ManagedParameter) -> None:
        """Note that no more gradients of `managed` are to be added up here; send its chunk if it was the last."""
        members = self._open.get(managed.chunk, set())
        members.discard(managed)
        if not members:
            self._send([each for each in managed.chunk.parameters if each in self.sums])

    def send_all(self) -> None:
        """Send all sums, complete or not."""
        if not self.sums:
            return
        with self._sink().runtime.own_work():
            while self.sums:
                chunk = next(iter(self.sums)).chunk
                self._open.pop(chunk, None)
                self._send([each for each in chunk.parameters if each in self.sums])

    def _send(self, together: list[ManagedParameter]) -> None:
        """Send the sums of `together`, of one chunk, and tell listeners of all gradients in them."""
        if not together:
            return
        sink, sums = self._sink(), [self.sums.pop(managed) for managed in together]
        values, homes = [each.value for each in sums], [each.home for each in sums]
        self._counts.update({managed: each.count for managed, each in zip(together, sums, strict=True)})
        self._count(-sum(map(_NBYTES, values)))
        self._open.get(together[0].chunk, set()).difference_update(together)
        work = partial(sink.runtime.memory.device.gradients_out, homes, values)
        try:
            sink.runtime.traffic.gradients.send(together[0].chunk, work, sum(map(_NBYTES, homes)), values)
        except BaseException:
            for managed in together:
                show_gradient(managed.parameter, None)
            raise
        if sink.tells:
            each_of_them = [each for each, of in zip(together, sums, strict=True) for _ in range(of.count)]
            sink.tell_arrived(each_of_them, [*zip(together, values, strict=True)])
