"""Installs the hooks of a managed module: on module calls, on unbound parameters and on saved tensors.

A module's own weights are bound to their device copies during its call (`leases`), any other weight during one torch
function (`faults`). Modes and saved-tensor hooks stay on torch's stacks from the start of a forward to its end."""

from __future__ import annotations

import os
import sys
import threading
import weakref
from functools import partial
from itertools import chain
from types import FrameType
from typing import Any

import torch

from hetmem import torch_private
from hetmem.activations.offload import Activations
from hetmem.base.weak import weakly
from hetmem.engine.gradients import GradientSink
from hetmem.engine.rows import EmbeddingRows
from hetmem.engine.runtime import Runtime, in_backward
from hetmem.intercept.diagnostics import explain, refuse_a_fork, refuse_a_stream, refuse_a_surrounding
from hetmem.intercept.dynamo import Tracing, hook_forwards, opaque, set_compiler, skipped, uncompiled
from hetmem.intercept.faults import Faults
from hetmem.intercept.forward_scope import CALLS, Call, Compute, Stretches, calling_frame, drop_ended_modes
from hetmem.intercept.hooks import HOOKS, AfterForward, BeforeForward, BeforeStateDict, PartHooks, hook_conversions
from hetmem.intercept.leases import Leases, Regions
from hetmem.intercept.phases import StepSegments, cast_inputs, has_float32, leaves_of, tensors_within, without_memory
from hetmem.intercept.saved_tensors import SavedTensors
from hetmem.memory.chunk import ManagedParameter
from hetmem.memory.interrupts import HELD_BACK
from hetmem.placing.rehome import ResidentShare
from hetmem.placing.working import WorkingWeights

_graph_task: Any = torch_private.current_graph_task


class Interception:
    """Owns the hooks of one managed module, and the modes and saved-tensor hooks entered while it runs.

    Note "recomputation": a checkpoint recomputes a part of the forward within a node of the backward, and must find
    weights and inputs as the forward did. So parameters rest during the whole backward, and only a forward casts
    inputs. Hooks of the user find parameters at home.
    """

    def __init__(self, module: torch.nn.Module, runtime: Runtime, activations: str = "keep") -> None:
        self.runtime = runtime
        self.activations: Activations | None = None
        self.activations_asked = activations
        if activations != "keep":
            self.activations = Activations(runtime, all_leave=activations == "offload")
        self.segments = StepSegments(runtime)
        self.gradients = GradientSink(runtime, self.segments, HOOKS)
        self.working = WorkingWeights(module, runtime, self.gradients)
        self.share = ResidentShare(runtime, self.gradients, weakly(self._left_device))
        self.stretches = Stretches()
        self.process = os.getpid()
        self._outermost: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        """Modules that users have called: a checkpoint around one calls it again, and its inputs are cast again."""
        self.last_forward: Compute | None = None
        self._saved = SavedTensors(runtime, self.segments, self.activations)
        rows = EmbeddingRows(module, runtime)
        self._faults = Faults(runtime, self.gradients, self._saved, self, rows)
        self._tracing = Tracing()
        self.leases = Leases(runtime, self.gradients, self._saved, self._tracing, self.working, rows)
        self.backwards = 0
        """Number of nested backwards that run."""
        self._handles: list[Any] = []
        self.removed = False
        self._regions = Regions(runtime, self.leases, self._tracing)
        self._model = weakref.ref(module)
        try:
            self._install(module)
        except BaseException:
            self.remove()
            raise

    def _install(self, module: torch.nn.Module) -> None:
        parts = [part for part in module.modules() if part is module or next(part.parameters(), None) is not None]
        self._handles += hook_forwards(parts, BeforeForward(self, self._tracing), AfterForward(self, self._tracing))
        numbers = [handle.id for handle in self._handles]  # those of one part are those of all
        self._parts = PartHooks(map(vars, parts[1:]), numbers[2:])
        self.leases.rows.hook(parts[1:], numbers[2:4])
        reading = BeforeStateDict(self)
        for part in module.modules():  # also those that are given weights later
            self._handles.append(part.register_state_dict_pre_hook(reading))
            self._handles.append(part._register_load_state_dict_pre_hook(reading))
        self._handles += hook_conversions(module.modules(), self)
        if self.runtime.memory.uses_copies:
            self.gradients.install_all()

    def remove(self) -> None:
        """Remove all hooks."""
        self.removed = True
        if self.activations is not None:
            self.activations.closed = True
        self.reset()
        self.working.release()
        self.runtime.marks.stop()
        self.gradients.remove()
        for handle in self._handles:
            handle.remove()

    # ---- forward -----------------------------------------------------------------------------------------------

    @opaque
    def before_forward(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]] | None:
        """Bind weights for the call of `module` that begins, and return its new arguments, or None to keep them."""
        compiles = compiler = set_compiler(None)
        try:
            frame: Any = sys._getframe(2)
            here = self.stretches.here
            if (
                (here and (around := here[-1]).enclosed and around.task == _graph_task())
                and (compiler is None and frame.f_code is CALLS)
                and not (self._regions.may_begin or "forward" in module.__dict__)
            ):  # an ordinary nested call, as most are
                calls = around.calls
                if self._tracing.where is None:
                    calls += (Call(module, frame),)
                if not around.all_at_once or self.runtime.all_copies.missing:
                    self.leases.begin(calls[-1], module, recomputed=around.task >= 0)
                return None
            if frame.f_code is not CALLS:
                frame = calling_frame(module, frame)
            with HELD_BACK:
                if self._regions.encloses(frame):
                    return None
                compute, call = self.current(frame and frame.f_back), Call(module, frame)
                if compute is not None:
                    compute.calls.append(call)
                else:
                    compute, args, kwargs = self._begin_with(call, compiler, module, args, kwargs)
                compiles = self._regions.begin(compute, call, module, compiler)
                if not self._regions.runs:
                    alone = not self.runtime.memory.uses_copies and self._regions.are_none_in(compute)
                    begins = compiles is None and not compute.calls[1:] and not alone
                    begins = begins and compute.enter_forward(frame, partial(self._run, compute, module))
                    if compute.all_at_once or alone:
                        if not compute.calls[1:]:
                            self._tracing.where = weakref.ref(module)
                        if self.runtime.all_copies.missing:
                            self.leases.begin(call, module, recomputed=compute.task >= 0)
                        else:
                            self._tracing.quiet = compute.thread
                            if module is self._model() and not (self._regions.any_asked or self.activations):
                                self._parts.take_off()
                    elif not begins:
                        self.leases.begin(call, module, recomputed=compute.task >= 0)
                return (args, kwargs) if len(compute.calls) == 1 else None
        except BaseException:
            compiles = compiler
            raise
        finally:
            if HELD_BACK.came:
                HELD_BACK.leave()
            if compiles is not None:
                set_compiler(compiles)

    @skipped
    def _run(self, compute: Compute, module: torch.nn.Module, forward: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call `forward` of `module`, whose call began `compute`, with weights bound, as they are not in its hooks."""
        call = compute.calls[0]
        try:
            with HELD_BACK:
                if not compute.all_at_once:
                    self.leases.begin(call, module, recomputed=compute.task >= 0)
            compute.enclosed = True
            try:
                output = forward(*args, **kwargs)
            finally:
                compute.enclosed = False  # in one instruction: an interrupt cannot prevent it
            with HELD_BACK:
                if self.leases.row.used:
                    self.leases.end(self.leases.row)
                self.leases.end(call)
            return output
        except BaseException as error:
            if not isinstance(error, Exception):
                self._break_off(compute)
            raise

    @uncompiled
    @HELD_BACK
    def _break_off(self, compute: Compute) -> None:
        """End `compute` after a `KeyboardInterrupt` or the like, after which torch calls no hooks."""
        compute.has_ended(None)
        self._leave(compute, None)

    def _begin_working_weights(self, compute: Compute, module: torch.nn.Module) -> bool:
        """Have modules compute with working weights in `compute`, just begun with `module`; return whether nothing
        moves meanwhile, so that all copies are used at once."""
        streams, working, saved = not self.runtime.memory.resident, self.working, self._saved
        compute.working_weights = compute.shows_working = True
        alone = self._regions.are_none_in(compute, measured=streams and working.holds_all)
        alone = alone and not self._regions.any_asked and not saved.casts.are_made()
        if compute.task >= 0:
            alone = alone and (streams or not self.runtime.tracer.measured)
            by_call = self._regions.are_none_in(compute, measured=True) and not self._regions.any_asked
            all_at_once, compute.shows_working = working.enter_again(all_at_once=alone, by_call=by_call)
            return all_at_once
        others = streams and (self.gradients.within_step or saved.others)
        others = others or (streams and torch.is_autocast_enabled(self.runtime.memory.device.torch_device.type))
        alone = alone and not others and self.activations is None and saved.is_alone()
        alone = alone and torch_private.transform_level() is None
        joined, trains, anew = self.segments.joined, torch.is_grad_enabled(), self.segments.several
        if joined is not None and joined.leases:
            return working.enter_leased(all_at_once=alone)
        if alone and (joined is None or (joined.may_lease and trains and streams)):
            backward = self.segments.backward_key() if trains else None
            if working.begin(type(module).__name__, backward, anew=anew, turns=joined is not None):
                if joined is not None:
                    joined.leases = True
                    working.hold()
                return True
        if joined is not None:
            joined.may_lease = False
        in_place = working.enter(anew=anew)
        plain = alone and in_place and working.serve and not (compute.operators or compute.functions)
        if plain and (joined is None or joined.may_have_rows):
            self.leases.rows.begin()
        elif joined is not None:
            joined.may_have_rows, self.leases.rows.learned = False, None
        return False

    def _begin_with(
        self, call: Call, compiler: Any, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Compute, tuple[Any, ...], dict[str, Any]]:
        """Begin a stretch of compute with `call`, its outermost; return it and the arguments to call `module` with."""
        refuse_a_fork("a forward", self.process)
        memory, moves = self.runtime.memory, self.activations is not None
        refuse_a_stream("a forward", memory.device, lambda: moves or memory.uses_copies or memory.may_leave_device)
        refuse_a_surrounding(self._model() or module, streams=memory.uses_copies)
        compute = self._begin(call)
        self._tracing.listen()  # within a recomputation: the enclosing forward's module hooks run again
        compute.compiler = compiler
        if compute.task < 0:
            self.last_forward = compute
            self._regions.compile_for(compiler)
        try:
            dtype, leaves = memory.mixed_precision, leaves_of(args, kwargs)
            if compute.task < 0:
                self._outermost.add(module)
            if dtype is not None and module in self._outermost and has_float32(leaves):
                args, kwargs = cast_inputs(dtype, args, kwargs)
                leaves = leaves_of(args, kwargs)
            self._enter(compute, module, leaves, (*kwargs,))
            if compute.task < 0:
                shortage, measured = self.runtime.room.shortage, self.runtime.tracer.measured
                shortage.called = None
                first = measured and torch.is_grad_enabled() and not self.segments.several
                if first and module is self._model() and torch_private.transform_level() is None:
                    with self.runtime.unwatched():
                        shortage.called = without_memory(memory.device.torch_device, args, kwargs)
            return compute, args, kwargs
        except BaseException:
            self.reset()
            raise

    def _enter(self, compute: Compute, module: torch.nn.Module, leaves: list[Any], names: tuple[str, ...]) -> None:
        runtime = self.runtime
        measured, transformed = runtime.sanitize, torch_private.transform_level() is not None
        if compute.task < 0:
            if torch.is_grad_enabled():
                runtime.turn.trainers.add(compute.section.thread)
            key, size = self.segments.look_at(module, leaves, names, transformed=transformed)
            if self.gradients.unhooked and runtime.memory.uses_copies:
                self.gradients.install_all()
            joined = self.segments.joined
            if self.activations is not None and torch.is_grad_enabled() and not (joined and joined.began):
                self.activations.choice.forward_begins()
            measured = self.segments.begin_forward(key, size)
        if measured and (runtime.memory.device.watched or self._regions.will_be_none_in(compute, module)):
            with runtime.unwatched():
                runtime.monitor.count("inputs", chain.from_iterable(map(tensors_within, leaves)))
                runtime.monitor.count("buffers", (self._model() or module).buffers())
            compute.enter_operators(runtime.monitor.__torch_dispatch__)
            if compute.task < 0:
                runtime.monitor.transformed = transformed
        more = runtime.tracer.unseen_growth > 1 and not runtime.memory.device.watched
        self._enter_modes(compute, module, may_lack_memory=measured or more)

    def _enter_modes(self, compute: Compute, module: torch.nn.Module, *, may_lack_memory: bool) -> None:
        memory = self.runtime.memory
        leaves = may_lack_memory and (memory.uses_copies or memory.may_leave_device)
        if leaves:
            compute.enter_functions(self._faults.within_unknown_memory)
        if not memory.uses_copies:
            if compute.task < 0 and (leaves or self.activations is not None):
                self._saved.enter(compute)
            return
        if compute.task < 0:
            self.gradients.within_step = self.gradients.half_stepped
        with torch_private.NoFunctionsOfSubclasses():  # parameters are watched
            compute.all_at_once = self._begin_working_weights(compute, module)
        if compute.task >= 0:
            self.runtime.uses.notice_writes_by_hooks()
            self.gradients.rest_again()
        else:
            with self.runtime.unwatched():
                self.runtime.bindings.leave_home()
        if not compute.all_at_once:
            self._saved.enter(compute)

    def _left_device(self) -> None:
        """Bind weights module by module from here on, as homes have left the device during compute."""
        self._parts.put_back()
        bindings = self.runtime.bindings
        self.gradients.is_parted |= bool(self.stretches.here)
        for compute in self.stretches.here:
            if compute.task < 0:
                bindings.leave_home()
            compute.working_weights = compute.shows_working = True
            self.working.enter(anew=False)
        self.working.make()
        for _ in range(self.backwards):
            bindings.leave_home()

    @opaque
    def after_forward(self, module: torch.nn.Module, output: Any) -> None:
        """Unbind the weights of the call of `module` that has returned or raised; the outermost leaves the modes."""
        compiles = set_compiler(None)
        try:
            frame: Any = sys._getframe(2)
            here = self.stretches.here
            if frame.f_code is not CALLS:
                frame = calling_frame(module, frame)
            elif here and here[-1].enclosed and not self._regions.may_end:
                calls = here[-1].calls
                call = calls[-1]
                if call.number == id(frame) and call.module() is module:  # a nested call; the stretch goes on
                    del calls[-1]
                    self.leases.end(call)
                    return
            with HELD_BACK:
                explain(sys.exc_info()[1], module, self._model() or module, self.runtime.bindings.by_id)
                if self._regions.encloses(frame):
                    return
                compiles = self._regions.end(frame, compiles)
                compute = self.current(frame or sys._getframe())
                if compute is None or not compute.calls or not compute.calls[-1].is_made_in(frame):
                    return
                self.leases.end(compute.calls.pop())
                if not compute.calls:
                    compiles = compute.compiler
                    self._leave(compute, output)
        finally:
            if HELD_BACK.came:
                HELD_BACK.leave()
            if compiles is not None:
                set_compiler(compiles)

    def _leave(self, compute: Compute, output: Any) -> None:
        """End `compute`, whose outermost call has ended, and notice what it wrote to views of weights."""
        measured = compute.operators is not None
        try:
            if compute.task < 0:
                self.runtime.uses.notice_writes_to_views()
        finally:
            self._end(compute)
        if compute.task < 0 and measured:
            self.runtime.monitor.watch_backward(output)

    # ---- backward ------------------------------------------------------------------------------------------------

    def computes(self) -> bool:
        """Return whether this thread is within a forward or a node of a backward."""
        if self.current(sys._getframe()) is not None:
            return True
        if in_backward():
            node = torch_private.current_node()
            return node is not None and not hasattr(node, "variable")
        self._forget_interrupted()
        return False

    def note_unbound_use(self, *, hands_out: bool) -> bool:
        """Note that a function uses a weight that no module call has bound, and `hands_out` its memory. Returns whether
        its copy is to be leased as long as all are."""
        self.working.exist()
        if hands_out:
            self.working.cannot_serve = True
        if self.working.in_backward:
            self.segments.on_backward()
        return self.working.holds_all or any(compute.all_at_once for compute in self.stretches.here)

    def keep(self, used: list[ManagedParameter]) -> bool:
        """Keep `used` bound until the innermost module call ends. Returns False if no module is called."""
        compute = self.current(sys._getframe())
        if compute is not None:
            self.leases.keep(compute.calls[-1], used)
        return compute is not None

    # ---- stretches of compute ------------------------------------------------------------------------------------

    def current(self, top: FrameType | None) -> Compute | None:
        """Return the stretch of compute that the stack below `top` is in, and end those that ended without a hook."""
        here, task = self.stretches.here, _graph_task()
        while here and (here[-1].task > task or here[-1].has_ended(top)):
            self._end(here[-1])
        return here[-1] if here and here[-1].task == task else None  # else this backward is within it

    def _begin(self, call: Call) -> Compute:
        compute = Compute(call, weakly(self._end), self.leases.end)
        within = compute.task >= 0 or self.stretches.here or self.segments.joined
        ready = None if within else self.gradients.is_whole
        compute.section = self.runtime.turn.take("a forward", weakly(compute.runs), ready)
        HELD_BACK.begin_segment()
        self.stretches.here.append(compute)
        return compute

    def _end(self, compute: Compute) -> None:
        """End `compute` and every stretch of compute entered within it."""
        here, over = self.stretches.here, list[Compute]()
        self._tracing.listen()
        self._parts.put_back()
        self._regions.abandon(here[here.index(compute) :] if compute in here else ())
        while compute in here:
            ended = here.pop()
            over.append(ended)
            self._unbind(ended)
            ended.end()
            if ended.thread == threading.get_ident():
                HELD_BACK.end_segment()
            if ended.task < 0:
                self.runtime.bindings.go_home()
                self._saved.casts.go_home()
                if not torch.is_grad_enabled() and self.segments.joined is None:
                    self.runtime.events.end_segment()  # no backward follows
        if not here and not self.backwards and self.segments.joined is None:
            if self.runtime.bindings.away:
                self.runtime.bindings.all_home()
            self.runtime.marks.resume()
        for each in over:
            self.runtime.turn.give(each.section)

    def _forget_interrupted(self) -> None:
        """End forwards that an interrupt has ended, also on another thread; see note "interrupts"."""
        self.current(sys._getframe())
        drop_ended_modes()
        if self.segments.joined is not None:
            return  # forwards of other threads wait for their turn
        if not self.stretches.here and self.last_forward is not None and not self.last_forward.runs():
            self._regions.abandon([self.last_forward])
            self._rest_of(self.last_forward)

    def _rest_of(self, compute: Compute) -> None:
        """Unbind what `compute`, which an interrupt has ended, perhaps on another thread, has left bound."""
        self._unbind(compute)
        if not in_backward():
            self.backwards = 0
            self.runtime.bindings.all_home()

    def _unbind(self, compute: Compute) -> None:
        if self.leases.row.used:
            self.leases.end(self.leases.row)
        if self.segments.joined is None:
            self.leases.rows.learned = None
        while compute.calls:
            self.leases.end(compute.calls.pop())
        if compute.working_weights:
            compute.working_weights = False
            self.working.end(shown=compute.shows_working, all_at_once=compute.all_at_once)

    def settle_for_reading(self) -> None:
        """Wait for pending updates, so that a read of a weight sees the last step's value."""
        with self.runtime.turn.held("a state dict"):
            self._forget_interrupted()
            self.runtime.traffic.wait_for_updates()

    def is_computing(self) -> bool:
        """Return whether a forward of the model runs on this thread."""
        with self.runtime.turn.held("a look at a model"):
            self._forget_interrupted()
        return bool(self.stretches.here)

    def at_rest(self) -> bool:
        """Return whether no forward or backward runs on this thread, so that every parameter is its home."""
        return not self.is_computing() and not in_backward()

    def reset(self) -> None:
        """End all stretches of compute of the model."""
        if self.stretches.here:
            self._end(self.stretches.here[0])
        if self.segments.joined is None:  # else forwards of other threads wait for their turn
            if self.last_forward is not None:
                self._rest_of(self.last_forward)
            self.stretches = Stretches()
        drop_ended_modes()
