"""A module's own weights are bound to their device copies for the length of its call.

So a weight's raw pointer is right for as long as the call that owns the weight. Where all of them do not fit beside what
is in use they are left to `faults`, one function at a time; so are those of modules around, where something else needs
their room.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from hetmem.errors import CapacityError
from hetmem.memory.chunk import ManagedParameter
from hetmem.runtime.compute import Call
from hetmem.runtime.gradients import GradientSink
from hetmem.runtime.runtime import Runtime
from hetmem.runtime.saved import SavedTensors
from hetmem.runtime.segments import in_backward


class Leases:
    """The weights of one model that are bound for calls of modules: `begin` and `end` are called around each."""

    def __init__(self, runtime: Runtime, gradients: GradientSink, saved: SavedTensors) -> None:
        self._runtime, self._gradients, self._saved = runtime, gradients, saved
        self._by_id = runtime.bindings.by_id
        self._bound: list[Call] = []
        """Calls that have weights bound, outermost first."""
        runtime.give_leases_up = self._give_up

    def begin(self, call: Call, module: torch.nn.Module) -> None:
        """Bind the own weights of `module`, which `call` calls, as far as they fit at once. Nothing is if this raises."""
        if not self._runtime.memory.streams:
            return
        by_id = self._by_id
        used = [by_id[id(each)] for each in module._parameters.values() if id(each) in by_id]
        if used:
            try:
                self.bind(call, used, type(module).__name__)
            except CapacityError:
                pass

    def bind(self, call: Call, used: Iterable[ManagedParameter], name: str) -> None:
        """Bind `used` until `end(call)`; they are called `name` together."""
        used = list(dict.fromkeys(used))
        if in_backward():
            self._gradients.recompute_with(used)
        fresh = [managed for managed in used if not managed.bound]
        if fresh:
            self._runtime.use(name, fresh)
        call.displaced = self._saved.displace_others()
        self.keep(call, used)

    def keep(self, call: Call, used: Iterable[ManagedParameter]) -> None:
        """`used`, which are bound, are so until `end(call)`."""
        for managed in used:
            managed.bound += 1
            call.used.append(managed)
        if call not in self._bound:
            self._bound.append(call)

    def end(self, call: Call) -> None:
        """`call` is over. On its thread, or on any if that one was interrupted."""
        if call.displaced is not None:
            self._saved.restore_others(call.displaced)
        if call.used:
            self._let_go(call)

    def _let_go(self, call: Call) -> None:
        used, call.used = call.used, []
        self._bound.remove(call)
        over = []
        for managed in used:
            managed.bound -= 1
            if not managed.bound:
                over.append(managed)
        if over:
            self._runtime.end_call(over)

    def _give_up(self) -> bool:
        """Something needs room on the device: the weights of the outermost call are unbound. False if there is none."""
        if not self._bound:
            return False
        self._let_go(self._bound[0])
        return True
