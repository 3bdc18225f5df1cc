"""A module's own weights are bound to their device copies for the length of its call.

So a weight's raw pointer is right for as long as the call that owns the weight. Where all of them do not fit beside
what is in use they are left to `faults`, one function at a time; so are those of modules around, where something else
needs their room."""

from __future__ import annotations

from typing import Any

import torch

from hetmem import torch_private
from hetmem.base.weak import weakly
from hetmem.engine.gradients import GradientSink
from hetmem.engine.runtime import Runtime
from hetmem.errors import CapacityError, DeviceOutOfMemoryError
from hetmem.intercept.forward_scope import Call
from hetmem.intercept.saved_tensors import Pack, SavedTensors
from hetmem.memory.chunk import ManagedParameter

_top_hooks: Any = torch_private.autograd._top_saved_tensors_default_hooks


class Leases:
    """The weights of one model that are bound for calls of modules: `begin` and `end` are called around each."""

    def __init__(self, runtime: Runtime, gradients: GradientSink, saved: SavedTensors) -> None:
        self._runtime, self._gradients, self._saved = runtime, gradients, saved
        self._by_id = runtime.bindings.by_id
        self._bound: list[Call] = []
        """Calls that have weights bound, outermost first."""
        self.casts = saved.casts
        self._device_type = runtime.memory.device.torch_device.type
        runtime.give_leases_up = weakly(self._give_up)

    def begin(self, call: Call, module: torch.nn.Module, *, recomputed: bool) -> None:
        """Bind the own weights of `module`, which `call` calls, if all fit at once. Nothing is bound if this raises.
        `recomputed`: within a backward."""
        by_id, used = self._by_id, list[ManagedParameter]()
        for key in map(id, module._parameters.values()):
            if key in by_id:
                used += (by_id[key],)
        if used and self._runtime.memory.uses_copies and (not used[1:] or self._fit(used)):
            try:
                self.bind(call, used, type(module).__name__, recomputed=recomputed)
                if torch.is_autocast_enabled(self._device_type):  # asked here, as it is at each call
                    call.left = self.casts.leave_cache()
            except DeviceOutOfMemoryError as error:
                if not isinstance(error.__cause__, CapacityError):
                    raise

    def begin_whole(self, call: Call, module: torch.nn.Module) -> bool:
        """Bind all weights of the model, none of which moves, until `end(call)`; False if some may."""
        if not self._runtime.use_all(type(module).__name__):
            return False
        call.displaced = self._saved.displace_others()
        self.keep(call, self._runtime.parameters)
        return True

    def displace_hooks(self) -> None:
        """Have saved-tensor hooks of the program, which are on top, keep aliases of weights."""
        self._saved.displace_others()

    def _fit(self, used: list[ManagedParameter]) -> bool:
        """Whether chunks may ever have room for all of `used` at once."""
        memory = self._runtime.memory
        slots = sum(chunk.spec.span for chunk in {managed.chunk for managed in used})
        return slots * memory.device_pool.slot_bytes <= memory.device_chunk_bytes

    def bind(self, call: Call, used: list[ManagedParameter], name: str, *, recomputed: bool) -> None:
        """Bind `used` until `end(call)`; they are called `name` together."""
        if recomputed or self._gradients.within_step:
            self._gradients.use_again(used)
        fresh = used
        for managed in used:
            if managed.bound or used[1:]:
                fresh = list(dict.fromkeys(managed for managed in used if not managed.bound))
                break
        if fresh:
            self._runtime.use(name, fresh)
        top = _top_hooks(True)
        if top is not None and type(top[0]) is not Pack:
            call.displaced = self._saved.displace_others()
        if not call.used:
            self._bound.append(call)
        for managed in used:
            managed.bound += 1
        call.used += used
        if self.casts.alive:
            self.casts.renew(fresh)

    def keep(self, call: Call, used: list[ManagedParameter]) -> None:
        """`used`, which are bound, are so until `end(call)`."""
        if not call.used:
            self._bound.append(call)
        for managed in used:
            managed.bound += 1
        call.used += used

    def end(self, call: Call) -> None:
        """`call` is over. On its thread, or on any if that one was interrupted."""
        if call.displaced is not None:
            self._saved.restore_others(call.displaced)
        if call.left is not None:
            self.casts.enter_cache_again(call.left)
            call.left = None
        if call.used:
            self._let_go(call)

    def _let_go(self, call: Call) -> None:
        used, call.used = call.used, []
        if self._bound[-1] is call:
            self._bound.pop()
        else:
            self._bound.remove(call)
        over = used
        for managed in used:
            managed.bound -= 1
            if managed.bound or used[1:]:
                over = []
        if not over:
            over = list(dict.fromkeys([managed for managed in used if not managed.bound]))
        if over:
            self._runtime.end_call(over)
            if self.casts.alive:
                self.casts.drop(over)

    def _give_up(self) -> bool:
        """Something needs room on the device: the weights of the outermost call are unbound. False if there is none."""
        if not self._bound:
            return False
        self._let_go(self._bound[0])
        return True
