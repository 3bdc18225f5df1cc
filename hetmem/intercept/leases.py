"""A module's own weights are bound to their device copies for the length of its call, or of a compiled region.

So a weight's raw pointer is right for as long as the call that owns the weight. Where all of them do not fit beside
what is in use they are left to `faults`, one function at a time; so are those of modules around, where something else
needs their room.

Where all copies that a forward is known to use fit at once, they are asked for together as it begins, and are bound
until it ends: those that are there at once, the others by their modules. Once all are, hooks of modules have nothing to
do.

Note "regions": code that `torch.compile` makes takes weights as inputs and calls no torch function that a mode would
see, so a region is to the runtime what an operator is otherwise: all weights of a module, and of those in it, are on
the device for as long as it runs. It is the outermost module that is compiled and whose weights take no more than a
part of the device: of a model that is compiled as a whole the largest such modules are. What is outside of regions is
never compiled, as code with a graph's end at each use of a weight is slower than none.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Collection, Hashable
from dataclasses import dataclass
from threading import get_ident
from types import FrameType
from typing import Any

import torch

from hetmem import torch_private
from hetmem.base.weak import weakly
from hetmem.engine.gradient_views import hide_gradients, show_gradient
from hetmem.engine.gradients import GradientSink
from hetmem.engine.runtime import Runtime
from hetmem.errors import CapacityError, DeviceOutOfMemoryError
from hetmem.intercept.dynamo import Tracing, can_compile, has_compiled_forward
from hetmem.intercept.forward_scope import Call, Compute
from hetmem.intercept.saved_tensors import Pack, SavedTensors
from hetmem.memory.chunk import ManagedParameter

_NONE = id(None)  # what a module has in the place of a bias
_top_hooks: Any = torch_private.autograd._top_saved_tensors_default_hooks


class Leases:
    """The weights of one model that are bound for calls of modules: `begin` and `end` are called around each."""

    def __init__(self, runtime: Runtime, gradients: GradientSink, saved: SavedTensors, tracing: Tracing) -> None:
        self._runtime, self._gradients, self._saved, self._tracing = runtime, gradients, saved, tracing
        self._forward: Call | None = None
        """The outermost call of a forward for whose length all of its weights are bound."""
        self._to_come: set[ManagedParameter] = set()
        """Those that are not bound yet."""
        self._departed: set[Hashable] = set()
        """The keys of forwards that used other weights than they are known to."""
        self._by_id = runtime.bindings.by_id
        self._known: dict[tuple[int, ...], list[ManagedParameter]] = {}
        """By the `id`s of a module's parameters, `_learn` of these."""
        self._bound: list[Call] = []
        """Calls that have weights bound, outermost first."""
        self.casts = saved.casts
        self._device_type = runtime.memory.device.torch_device.type
        runtime.uses.give_leases_up = weakly(self._give_up)

    def begin(self, call: Call, module: torch.nn.Module, *, recomputed: bool) -> None:
        """Bind the own weights of `module`, which `call` calls, if all fit at once. Nothing is bound if this raises.
        `recomputed`: within a backward."""
        keys = (*map(id, module._parameters.values()),)
        used = self._known[keys] if keys in self._known else self._learn(keys)
        if self._forward is not None:
            used = [managed for managed in used if not managed.bound]
            call = self._forward
        if used and self._runtime.memory.uses_copies:
            try:
                self.bind(call, used, type(module).__name__, recomputed=recomputed)
                if call is not self._forward and torch.is_autocast_enabled(self._device_type):  # asked at each call
                    call.left = self.casts.leave_cache()
                if self._to_come:
                    self._to_come.difference_update(used)
                    self._look_at_hooks()
            except DeviceOutOfMemoryError as error:
                if not isinstance(error.__cause__, CapacityError):
                    raise

    def begin_all(self, call: Call, module: torch.nn.Module) -> None:
        """Bind all that the forward of `module` is known to use until `call` is over, if all fits at once."""
        runtime, others = self._runtime, self._saved.others or self._gradients.within_step
        if others or runtime.memory.resident or runtime.tracer.key in self._departed:
            return
        begun = runtime.uses.begin_all(type(module).__name__)
        if begun is not None:
            used, there = begun
            if there:
                runtime.bindings.bind(there)
                self.keep(call, there)
            self._forward, self._to_come = call, set(used).difference(there)
            self._tracing.where = weakref.ref(module)
            self._look_at_hooks()

    def _look_at_hooks(self) -> None:
        if not self._to_come:
            self._tracing.quiet = get_ident()

    def end_all(self) -> None:
        """Have modules within bind their own weights from here on; what is bound is so until the forward is over."""
        self._forward, self._to_come = None, set()
        self._tracing.listen()

    def departs(self) -> None:
        """Note that a function uses a weight that the forward which runs was not known to use."""
        if self._forward is not None and not self._to_come:
            self._departed.add(self._runtime.tracer.key)

    def _learn(self, keys: tuple[int, ...]) -> list[ManagedParameter]:
        """Find those of the parameters with the `id`s `keys` that are managed: none where chunks can never have room
        for all of them at once, if these are several."""
        memory = self._runtime.memory
        used = [*dict.fromkeys(self._by_id[key] for key in keys if key in self._by_id)]
        chunks = {managed.chunk for managed in used}
        slots = sum(chunk.spec.span for chunk in chunks)
        fit = len(chunks) < 2 or slots * memory.device_pool.slot_bytes <= memory.device_chunk_bytes
        if all(key in self._by_id or key == _NONE for key in keys):  # not what `functional_call` makes anew each time
            self._known[keys] = used if fit else []
        return used if fit else []

    def bind(self, call: Call, used: list[ManagedParameter], name: str, *, recomputed: bool) -> None:
        """Bind `used` until `end(call)`; they are called `name` together."""
        if recomputed or self._gradients.within_step:
            self._gradients.use_again(used)
        fresh = used
        for managed in used:
            if managed.bound:
                fresh = [managed for managed in used if not managed.bound]
                break
        if fresh:
            self._runtime.uses.use(name, fresh)
        top = _top_hooks(True)
        if top is not None and type(top[0]) is not Pack and call is not self._forward:
            call.displaced = self._saved.displace_others(used)
        if not call.used:
            self._bound += (call,)
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
        if call is self._forward:
            self.end_all()
        used = call.used
        if not used:
            return
        call.used = []
        if self._bound[-1] is call:
            del self._bound[-1]
        else:
            self._bound.remove(call)
        for managed in used:
            managed.bound -= 1
        over = used if not used[1:] else [*dict.fromkeys(used)]
        for managed in over:
            if managed.bound:
                over = [managed for managed in over if not managed.bound]
                break
        if over:
            self._runtime.uses.end_call(over)
            if self.casts.alive:
                self.casts.drop(over)

    def _give_up(self) -> bool:
        """Something needs room on the device: the weights of the outermost call are unbound. False if there is none."""
        if not self._bound:
            return False
        self.end(self._bound[0])
        return True


# ---- compiled regions: see note "regions" ----------------------------------------------------------------------------

_PART = 4
"""A region has at most one part in so many of the device, so that the next one's weights come while it computes, and
never more than chunks may have of it."""


@dataclass(frozen=True, slots=True, eq=False)
class _Region:
    """`call` within `compute`; gradients are `hidden` meanwhile, and `outside` compiles what is around it."""

    compute: Compute
    call: Call
    hidden: list[tuple[torch.Tensor, torch.Tensor]]
    outside: Any


class Regions:
    """The region of one model that runs, if one does, and who would compile one."""

    def __init__(self, runtime: Runtime, leases: Leases, tracing: Tracing) -> None:
        self._runtime, self._leases, self._tracing = runtime, leases, tracing
        self.compiler: Any = None
        """What compiles the last forward as a whole."""
        self.runs = self.may_begin = self.may_end = False
        """Whether a region runs; whether a call may be one, or within one; whether the end of a call may be that of
        one, or of what must not compile by itself."""
        self._running: _Region | None = None
        self._held_back: tuple[Compute, Call, Any] | None = None
        """A call of what would compile by itself and must not, and what torch kept of how it compiled before."""
        self._warned = False
        self.any_asked = False
        """Whether a part of the model was ever to be compiled by itself."""

    def compile_for(self, compiler: Any) -> None:
        """A forward begins; `compiler` compiles it as a whole, if it is not None."""
        self.compiler = compiler
        self.may_begin = self.runs or compiler is not None

    def runs_around(self, frame: FrameType | None) -> bool:
        """Whether `frame` makes a call within the region."""
        region = self._running
        if region is None or region.call.is_made_in(frame):
            return False
        if region.call.is_on(frame):
            return True
        self._close()  # an interrupt has ended it without a word
        return False

    def begin(self, compute: Compute, call: Call, module: torch.nn.Module, compiler: Any) -> Any:
        """`call`, of `module`, is a region, if `compiler`, which the call came with, or that of the whole forward is to
        compile it and it can be one. Returns who compiles it. Raises what `Uses.use` does."""
        asked = (compiler is not None and compiler is not self.compiler) or has_compiled_forward(module)
        self.any_asked |= asked
        if not asked and self.compiler is None:
            return None
        used = self._weights(module)
        room = self._has_room(used)
        if has_compiled_forward(module) and not (room and can_compile()) and self._held_back is None:
            self._held_back, self.may_end = (compute, call, torch.compiler.set_stance("force_eager")), True
        if not room:
            if asked:
                self._warn(module)
            return None
        compute.leave_functions()
        name = f"compiled {type(module).__name__}"
        try:
            if used:
                self._leases.bind(call, used, name, recomputed=compute.task >= 0)
            self._runtime.bindings.as_ordinary(used)
        except BaseException:
            compute.enter_functions_again()
            raise
        self.runs = self.may_begin = self.may_end = True
        self._running, self._tracing.region = _Region(compute, call, hide_gradients(used), compiler), True
        if not can_compile():
            call.left = self._leases.casts.leave_cache(compiled=True)
            return None
        return self.compiler if compiler is None else compiler

    def _weights(self, module: torch.nn.Module) -> list[ManagedParameter]:
        """Those of `module` that are brought to the device."""
        by_id = self._runtime.bindings.by_id
        if not self._runtime.memory.uses_copies:
            return []
        return [by_id[id(parameter)] for parameter in module.parameters() if id(parameter) in by_id]

    def _has_room(self, used: list[ManagedParameter]) -> bool:
        memory = self._runtime.memory
        slots = sum(chunk.spec.span for chunk in {managed.chunk for managed in used})
        room = min(memory.device_bytes // _PART, memory.device_chunk_bytes)
        return slots * memory.device_pool.slot_bytes <= room

    def _warn(self, module: torch.nn.Module) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"hetmem: this {type(module).__name__} is not compiled, as its weights take more than 1/{_PART} of the "
                f"device, or than Budget(device_chunks=…): compile its parts, or the whole model, of which the parts "
                f"that can be are compiled",
                stacklevel=2,
            )

    def end(self, frame: FrameType | None, compiler: Any) -> Any:
        """The call that `frame` makes has returned or raised; it may be a region. Returns who compiles what follows,
        `compiler` if it is none."""
        if self._held_back is not None and self._held_back[1].is_made_in(frame):
            self._release()
        region = self._running
        if region is None or not region.call.is_made_in(frame):
            return compiler
        self._close()
        return region.outside

    def abandon(self, computes: Collection[Compute]) -> None:
        """All of `computes` are over, and so is a region within."""
        if self._running is not None and self._running.compute in computes:
            self._close()
        if self._held_back is not None and self._held_back[0] in computes:
            self._release()

    def _close(self) -> None:
        region, self._running = self._running, None
        self.runs, self.may_end = False, self._held_back is not None
        self.may_begin = self.compiler is not None
        self._tracing.region = False
        if region is not None:
            self._leases.end(region.call)
            with torch_private.NoFunctionsOfSubclasses():
                for parameter, gradient in region.hidden:
                    show_gradient(parameter, gradient)
            region.compute.enter_functions_again()

    def _release(self) -> None:
        held_back, self._held_back = self._held_back, None
        self.may_end = self._running is not None
        if held_back is not None:
            held_back[2].__exit__(None, None, None)
