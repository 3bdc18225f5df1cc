"""Binds a module's own weights to their device copies during its call, or during a compiled region.

So a weight's raw pointer is valid during the call of the module that owns the weight. Weights that do not fit together
beside the copies in use are left to `faults`, one function at a time; so are those of enclosing modules whose room
something else needs.

Note "regions": code that `torch.compile` makes takes weights as inputs and calls no torch function that a mode would
see, so the runtime treats a region as one operator: all weights of a module and its submodules are on the device while
it runs. A region is the outermost module that is compiled and whose weights take at most a part of the device: of a
model that is compiled as a whole, the largest such modules. Nothing else is compiled, as code with a graph break at
each use of a weight is slower than eager code.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from threading import get_ident
from types import FrameType
from typing import Any

import torch

from hetmem import torch_private
from hetmem.base.warning import warn_user
from hetmem.base.weak import weakly
from hetmem.engine.gradient_views import hide_gradients, show_gradient
from hetmem.engine.gradients import GradientSink
from hetmem.engine.rows import EmbeddingRows
from hetmem.engine.runtime import Runtime
from hetmem.engine.use_rows import Together
from hetmem.errors import CapacityError, DeviceOutOfMemoryError
from hetmem.intercept.dynamo import Tracing, can_compile, compiles_itself, has_compiled_forward
from hetmem.intercept.forward_scope import Call, Compute
from hetmem.intercept.rows import Rows
from hetmem.intercept.saved_tensors import Pack, SavedTensors
from hetmem.memory.chunk import ManagedParameter
from hetmem.placing.working import WorkingWeights

_NONE = id(None)  # what a module without a bias has in `_parameters`
_top_hooks: Any = torch_private.autograd._top_saved_tensors_default_hooks
_is_autocast = torch.is_autocast_enabled


class Leases:
    """Binds the weights of one model for module calls: `begin` and `end` are called around each."""

    def __init__(
        self,
        runtime: Runtime,
        gradients: GradientSink,
        saved: SavedTensors,
        tracing: Tracing,
        working: WorkingWeights,
        rows: EmbeddingRows,
    ) -> None:
        self._rows = rows
        self._gradients, self._saved, self._tracing, self._working = gradients, saved, tracing, working
        self._copies = runtime.all_copies
        self._memory, self._uses, self._by_id = runtime.memory, runtime.uses, runtime.bindings.by_id
        self._known: dict[tuple[int, ...], list[ManagedParameter]] = {}
        """Results of `_learn`, by the `id`s of a module's parameters."""
        self.rows = Rows(runtime, saved, working)
        self.row = Call(self, None)
        """Has the lease of the row that is open, if one is."""
        self._bound: list[Call] = []
        """Calls with bound weights, outermost first."""
        self.casts = saved.casts
        self._device_type = runtime.memory.device.torch_device.type
        runtime.uses.give_leases_up = weakly(self._give_up)

    def begin(self, call: Call, module: torch.nn.Module, *, recomputed: bool) -> None:
        """Bind the own weights of `module`, which `call` calls, if all fit at once; or have its working weights show
        their copies. Binds nothing if it raises. `recomputed`: within a backward."""
        if type(module) is torch.nn.Embedding and self._rows.reads(module):
            return
        keys = (*map(id, module._parameters.values()),)
        try:
            used = self._known[keys]
        except KeyError:
            used = self._learn(keys)
            if keys not in self._known:
                call.changed += ((self._working.modules.cover_again, self._working.modules.uncover(module)),)
        if recomputed and (shown := self._working.modules.show_in(module)) is not None:
            call.changed += ((self._working.modules.hide_in, shown),)
        if self._copies.missing:
            if self._working.arrive(used, type(module).__name__):
                self._tracing.quiet = get_ident()
            return
        if used and self._memory.uses_copies:
            if self.row.used:
                self.end(self.row)
            try:
                self.bind(call, used, type(module).__name__, recomputed=recomputed)
                if _is_autocast(self._device_type):
                    call.changed += ((self.casts.enter_cache_again, self.casts.leave_cache()),)
                elif self.rows.learned is not None and call.used is used:
                    self._follow(call, module, used)
            except DeviceOutOfMemoryError as error:
                if not isinstance(error.__cause__, CapacityError):
                    raise

    def _learn(self, keys: tuple[int, ...]) -> list[ManagedParameter]:
        """Return the managed ones of the parameters with the `id`s `keys`, or none if they are in several chunks that
        never fit on the device together."""
        memory = self._memory
        used = Together(dict.fromkeys(self._by_id[key] for key in keys if key in self._by_id))
        chunks = {managed.chunk for managed in used}
        slots = sum(chunk.spec.span for chunk in chunks)
        fit = len(chunks) < 2 or slots * memory.device_pool.slot_bytes <= memory.device_chunk_bytes
        if all(key in self._by_id or key == _NONE for key in keys):  # else `functional_call` has made some
            self._known[keys] = used if fit else []
        return used if fit else []

    def bind(self, call: Call, used: list[ManagedParameter], name: str, *, recomputed: bool) -> None:
        """Bind `used` until `end(call)`, as one use called `name`."""
        if recomputed or self._gradients.within_step:
            self._gradients.notify_use(used)
        fresh = used
        if self._bound or self._copies.leased:
            for managed in used:
                if managed.bound:
                    fresh = [managed for managed in used if not managed.bound]
                    break
        if fresh:
            self._uses.use(name, fresh)
        top = _top_hooks(True)
        if top is not None and type(top[0]) is not Pack:
            call.changed += ((self._saved.restore_others, self._saved.displace_others(used)),)
        if call.used:
            call.used = [*call.used, *used]
        else:
            self._bound += (call,)
            call.used = used
        for managed in used:
            managed.bound += 1
        if self.casts.alive:
            self.casts.renew(fresh)

    def _follow(self, call: Call, module: torch.nn.Module, used: list[ManagedParameter]) -> None:
        """Begin the row behind `call` of `module`, if there is one."""
        row = self.rows.follow(call, module, used)
        if row is None or not self.rows.begin_row(row):
            return
        self.row.changed, self.row.used = ((self.rows.end_row, row),), row.used
        for managed in row.uses.used:
            managed.bound += 1
        call.used = ()
        self._bound[-1] = self.row  # in the place of `call`, as `bind` has added it

    def end_row_before(self, operator: str, used: list[ManagedParameter]) -> None:
        """End the row that is open if the function `operator`, which uses `used`, is what comes behind it."""
        if self.row.used and self.rows.come_behind(operator, used):
            self.end(self.row)

    def end_row_at_border(self) -> None:
        """End the row that is open, as another micro-batch goes on."""
        if self.row.used:
            self.end(self.row)
        self.rows.pass_border()

    def keep(self, call: Call, used: list[ManagedParameter]) -> None:
        """Keep `used`, which are bound, bound until `end(call)`."""
        for managed in used:
            managed.bound += 1
        if not call.used:
            self._bound.append(call)
        call.used = Together((*call.used, *used))  # `bind` may have given it a list of `_known`

    def end(self, call: Call) -> None:
        """Unbind what is bound for `call` alone. Called on its thread, or on any if that one was interrupted."""
        if call.changed:
            for restore, before in call.changed:
                if before is not None:
                    restore(before)
            call.changed = ()
        over, call.used = call.used, ()
        if not over:
            return
        if call.step is not None:
            self.rows.note_end(call.step)
        if self._bound[-1] is call:
            del self._bound[-1]
        else:
            self._bound.remove(call)
        others = 0
        for managed in over:
            managed.bound -= 1
            others += managed.bound
        if others:
            over = [managed for managed in dict.fromkeys(over) if not managed.bound]
        if over:
            self._uses.end_call(over)
            if self.casts.alive:
                self.casts.drop(over)

    def _give_up(self) -> bool:
        """Unbind the weights of the outermost call, to free device memory. Returns False if none is bound."""
        if not self._bound:
            return False
        self.end(self._bound[0])
        return True


# ---- compiled regions: see note "regions" ----------------------------------------------------------------------------

_PART = 4
"""A region takes at most this fraction (1 / _PART) of the device, so that the next one's weights are fetched while it
computes, and never more than the chunk limit."""


@dataclass(frozen=True, slots=True, eq=False)
class _Region:
    """A region: `call` within `compute`, gradients `hidden` meanwhile, and the Dynamo callback `outside` of it."""

    compute: Compute
    call: Call
    hidden: list[tuple[torch.Tensor, torch.Tensor]]
    outside: Any


class Regions:
    """Begins and ends the compiled regions of one model, of which at most one runs."""

    def __init__(self, runtime: Runtime, leases: Leases, tracing: Tracing) -> None:
        self._runtime, self._leases, self._tracing = runtime, leases, tracing
        self.compiler: Any = None
        """The Dynamo callback that compiles the last forward as a whole, or None."""
        self.runs = self.may_begin = self.may_end = False
        """Whether a region runs; whether a call may be a region or within one; whether the end of a call may end a
        region, or a call that runs in eager mode."""
        self._running: _Region | None = None
        self._eager: tuple[Compute, Call, Any] | None = None
        """A call of a compiled module that must run in eager mode, and the stance of `torch.compiler` set for it."""
        self._warned = False
        self.any_asked = False
        """Whether compiling a part of the model was ever asked for."""

    def compile_for(self, compiler: Any) -> None:
        """Begin a forward that `compiler` compiles as a whole; None: nothing does."""
        self.compiler = compiler
        self.may_begin = self.runs or compiler is not None

    def are_none_in(self, compute: Compute, *, measured: bool = False) -> bool:
        """Return whether only autograd sees how `compute`, which has just begun, uses weights, and, if `measured`, what
        measures it."""
        modes = not measured and (compute.operators or compute.functions)
        return not (modes or len(compute.calls) > 1) and compute.compiler is None and self.compiler is None

    def will_be_none_in(self, compute: Compute, module: torch.nn.Module) -> bool:
        """Return whether no part of `compute`, begun with `module`, is compiled, which an operator mode prevents."""
        asked = compute.compiler is not None or self.compiler is not None or self.any_asked
        return not (asked or any(map(compiles_itself, module.modules())))

    def encloses(self, frame: FrameType | None) -> bool:
        """Return whether `frame` makes a call within the region."""
        region = self._running
        if region is None or region.call.is_made_in(frame):
            return False
        if region.call.is_on(frame):
            return True
        self._close()  # an interrupt has ended it, and no hook ran
        return False

    def begin(self, compute: Compute, call: Call, module: torch.nn.Module, compiler: Any) -> Any:
        """Begin a region with `call` of `module`, if `compiler`, in effect at the call, or that of the whole forward
        would compile it and it can be one. Returns the callback that compiles it. Raises what `Uses.use` does."""
        asked = (compiler is not None and compiler is not self.compiler) or has_compiled_forward(module)
        self.any_asked |= asked
        if not asked and self.compiler is None:
            return None
        used = self._weights(module)
        room = self._has_room(used)
        if has_compiled_forward(module) and not (room and can_compile()) and self._eager is None:
            self._eager, self.may_end = (compute, call, torch.compiler.set_stance("force_eager")), True
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
            casts = self._leases.casts
            call.changed += ((casts.enter_cache_again, casts.leave_cache(compiled=True)),)
            return None
        return self.compiler if compiler is None else compiler

    def _weights(self, module: torch.nn.Module) -> list[ManagedParameter]:
        """Return the weights of `module` that need a device copy."""
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
            warn_user(
                f"hetmem: this {type(module).__name__} is not compiled, as its weights take more than 1/{_PART} of the "
                f"device, or than Budget(device_chunks=…): compile its parts, or the whole model, of which the parts "
                f"that can be are compiled",
            )

    def end(self, frame: FrameType | None, compiler: Any) -> Any:
        """End the call that `frame` makes, which may be a region. Returns the callback that compiles what follows:
        `compiler` if it is none."""
        if self._eager is not None and self._eager[1].is_made_in(frame):
            self._leave_eager()
        region = self._running
        if region is None or not region.call.is_made_in(frame):
            return compiler
        self._close()
        return region.outside

    def abandon(self, computes: Collection[Compute]) -> None:
        """End the region within any of `computes`, which have ended."""
        if self._running is not None and self._running.compute in computes:
            self._close()
        if self._eager is not None and self._eager[0] in computes:
            self._leave_eager()

    def _close(self) -> None:
        region, self._running = self._running, None
        self.runs, self.may_end = False, self._eager is not None
        self.may_begin = self.compiler is not None
        self._tracing.region = False
        if region is not None:
            self._leases.end(region.call)
            with torch_private.NoFunctionsOfSubclasses():
                for parameter, gradient in region.hidden:
                    show_gradient(parameter, gradient)
            region.compute.enter_functions_again()

    def _leave_eager(self) -> None:
        eager, self._eager = self._eager, None
        self.may_end = self._running is not None
        if eager is not None:
            eager[2].__exit__(None, None, None)
