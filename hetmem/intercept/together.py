"""Has forwards that take turns, and the backwards behind them, count as one forward and one backward of their model.

The micro-batches of `hetmem.accumulate` compute on threads of their own, one at a time. These threads share the turn of
the thread that called it, and what they do is one segment of a step: so a weight is used by all of them in a row, and
the eviction policy and prefetching see one forward of all of their tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from operator import attrgetter

import torch

from hetmem.errors import ManageError
from hetmem.intercept import registry
from hetmem.intercept.backward import begin_for, end_for
from hetmem.intercept.interceptor import Interception
from hetmem.intercept.phases import Joined, RunningBackward
from hetmem.memory.interrupts import HELD_BACK

_PARAMETER = attrgetter("parameter")


class JoinedModels:
    """The managed models of one call, of `count` micro-batches of a model with these `parameters`."""

    def __init__(self, parameters: Iterable[torch.Tensor], count: int) -> None:
        found = registry.managed_among(parameters)
        self._models = sorted(found, key=lambda each: each.runtime.turn.number)
        self._count = count

    def __bool__(self) -> bool:
        """Return whether any parameter of the model is managed."""
        return bool(self._models)

    @property
    def moves_nothing(self) -> bool:
        """Whether the model is managed, and is whole on the device."""
        return bool(self._models) and all(each.runtime.memory.resident for each in self._models)

    @contextmanager
    def turns(self) -> Iterator[None]:
        """Hold the turns of all models in the body. Raises `ManageError` within a forward of one."""
        with ExitStack() as stack:
            for each in self._models:
                stack.enter_context(each.runtime.turn.held("hetmem.accumulate", each.gradients.is_whole))
                if each.is_computing():
                    raise ManageError("hetmem.accumulate is called within a forward of the model: call it outside")
            yield

    @contextmanager
    def joined(self) -> Iterator[None]:
        """Have all forwards in the body be one, until `backwards`; before that none may differentiate."""
        for each in self._models:
            each.segments.joined = Joined(self._count)
        try:
            yield
        finally:
            with HELD_BACK:
                for each, running in zip(self._models, self._running(), strict=True):
                    running.give_back()
                    _end_leases(each)
                    each.segments.joined = None
                    each.gradients.expect({})
                    if not each.backwards:
                        each.runtime.bindings.all_home()
                        each.runtime.marks.resume()

    @contextmanager
    def backwards(self) -> Iterator[None]:
        """Have all backwards in the body be one; to be entered once all forwards of `joined` have ended."""
        began = list[Interception]()
        try:
            with HELD_BACK:
                for each in self._models:
                    assert each.segments.joined is not None
                    _end_leases(each)
                    each.segments.joined.in_forwards = False
                    begin_for(each, accumulates=True)
                    began.append(each)
            yield
            self._settle()
        except BaseException:
            with suppress(Exception):  # the error that is raised counts
                self._settle()
            raise
        finally:
            with HELD_BACK:
                for each in began:
                    end_for(each)

    def expect(self, arrivals: Counter[int], hiding: int) -> None:
        """Tell sums, and optimizers that update within a backward, how many gradients of each parameter, by `id`, will
        arrive. `hiding`: how many graphs have more of them within checkpoints."""
        for each in self._models:
            counts = map(arrivals.__getitem__, map(id, map(_PARAMETER, each.runtime.parameters)))
            each.gradients.expect(dict(zip(each.runtime.parameters, counts, strict=True)), hiding)
            early = [listener for listener in each.gradients.listeners if listener.begins_early]
            for managed in each.runtime.parameters if early else ():
                for listener in early if id(managed.parameter) in arrivals else ():
                    listener.expect(managed, arrivals[id(managed.parameter)])

    def leave(self) -> None:
        """End the rows of uses that the forward which passes its turn on has leased together."""
        for each in self._models:
            if each.leases.rows.learned is not None:
                each.leases.end_row_at_border()

    def enter(self) -> None:
        """Have weights rest whose gradients of another micro-batch have arrived: this one's backward may recompute."""
        for each in self._models:
            if each.backwards and each.gradients.sent_home:
                with HELD_BACK:
                    each.gradients.rest_again()

    @HELD_BACK
    def _settle(self) -> None:
        """End the backward of each model that has begun one."""
        with ExitStack() as ends:
            for running in self._running():
                ends.callback(running.settle)

    def _running(self) -> list[RunningBackward]:
        return [each.segments.joined.running for each in self._models if each.segments.joined is not None]


def _end_leases(interception: Interception) -> None:
    """Have the copies that forwards have leased together stay so for their graphs alone, and end rows of uses."""
    joined = interception.segments.joined
    interception.leases.rows.learned = None
    if joined is not None and joined.leases:
        joined.leases = False
        interception.working.let_go()
