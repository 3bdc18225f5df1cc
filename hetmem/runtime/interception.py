"""How torch tells the runtime what it uses: module hooks, a function mode, and saved-tensor hooks. No logic of its own.

Modes and saved-tensor hooks are entered by the forward hook of whichever module is called first and left when that
returns.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves, tree_map

from hetmem.errors import ManageError
from hetmem.runtime.gradients import GradientSink
from hetmem.runtime.hooks import AfterForward, BeforeForward, BeforeStateDict
from hetmem.runtime.operators import OperatorFaults
from hetmem.runtime.runtime import Runtime
from hetmem.runtime.saved import SavedTensors
from hetmem.runtime.segments import Segments, in_backward, signature
from hetmem.runtime.share import ResidentShare


class _Compute:
    """A stretch of compute on one thread: a forward, or what a backward computes once more of one.

    `task` is the backward that it is within, -1 for none; `called`: a call of a module began it, and ends it;
    `modules` are those that run, outermost first;
    `leave` ends what was entered for it. What is computed within a node of autograd has no hook at its end: autograd
    restores what there was before it by itself, so `ends_with_node` is the mode that is gone then.
    """

    __slots__ = ("called", "ends_with_node", "leave", "modules", "task")

    def __init__(self, task: int, called: bool) -> None:
        self.task, self.called = task, called
        self.modules: list[torch.nn.Module] = []
        self.leave: list[Callable[[], None]] = []
        self.ends_with_node: TorchFunctionMode | None = None

    def is_over(self) -> bool:
        """Whether the node that it was within has run."""
        return self.ends_with_node is not None and self.ends_with_node not in _get_current_function_mode_stack()


class _OfThread(threading.local):
    """What computes on this thread, outermost first."""

    def __init__(self) -> None:
        self.here: list[_Compute] = []


class Interception:
    """The hooks of one managed module, and what is entered while one of its modules runs.

    Note "recomputation": a checkpoint computes a part of the forward once more, within a node of the backward or
    before it, when autograd unpacks what it saved. What it calls, a module or any function, is to find weights and
    inputs as it did within the forward. So modes are entered there, before the first call, whenever the checkpoint
    was within a forward of the model; a module that is called then is not an outermost one.
    """

    def __init__(self, module: torch.nn.Module, runtime: Runtime) -> None:
        self.runtime = runtime
        self.segments = Segments(runtime)
        self.gradients = GradientSink(runtime, self.segments)
        self.share = ResidentShare(runtime, self.gradients)
        self.gradients.nothing_computes = self._between_nodes
        self._computes = _OfThread()
        self._turn = threading.Lock()
        self._forward = (threading.get_ident(), _Compute(-1, True))
        """The last one, and its thread."""
        self._saved = SavedTensors(runtime, self.segments, self)
        self._handles: list[Any] = []
        self.arranged, self.removed = False, False
        before, after = BeforeForward(self), AfterForward(self)
        for part in module.modules():
            self._handles.append(part.register_forward_pre_hook(before, with_kwargs=True))
            self._handles.append(part.register_forward_hook(after, always_call=True))
        reading = BeforeStateDict(self)
        for part in module.modules():
            self._handles.append(part.register_state_dict_pre_hook(reading))
            self._handles.append(part._register_load_state_dict_pre_hook(reading))
        self._buffers = weakref.WeakMethod(module.buffers)
        if runtime.memory.streams:
            for managed in runtime.parameters:
                self.gradients.install(managed)

    def remove(self) -> None:
        """Take all hooks off."""
        self.removed = True
        self.reset()
        self.gradients.remove()
        for handle in self._handles:
            handle.remove()

    # ---- forward -----------------------------------------------------------------------------------------------

    def before_forward(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]] | None:
        """`module` is about to run; the outermost one enters the modes. Returns what to call it with, if not this.

        With mixed precision float32 inputs are cast to what the module computes in, as FSDP2 does it.
        """
        compute = self._current()
        if (
            compute is not None
            and compute.modules
            and compute.modules[0] is module
            and _calls_running(module, sys._getframe()) < 2
        ):
            self.reset()  # the last call ended by an interrupt, which runs no hooks
            compute = None
        if compute is not None:
            compute.modules.append(module)
            return None
        with self._turn:
            self._refuse_two_threads()
            compute = self._begin()
            compute.modules.append(module)
            if compute.task < 0:
                self._forward = threading.get_ident(), compute
        try:
            dtype = self.runtime.memory.mixed_precision
            if dtype is not None:
                args, kwargs = tree_map(lambda value: _cast(value, dtype), (args, kwargs))
            self._enter(compute, args, kwargs)
        except BaseException:
            self.reset()
            raise
        return None if dtype is None else (args, kwargs)

    def _enter(self, compute: _Compute, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        runtime, module = self.runtime, compute.modules[0]
        measured = runtime.sanitize
        if compute.task < 0:
            with runtime.unwatched():
                runtime.writes.notice_all()
            for managed in runtime.parameters:
                if managed.parameter.requires_grad and not managed.grad_hooked and runtime.memory.streams:
                    self.gradients.install(managed)
            measured = self.segments.begin_forward(signature(module, args, kwargs))
        if measured and runtime.memory.device.watched:
            buffers = self._buffers()
            with runtime.unwatched():
                runtime.monitor.count("inputs", tree_leaves((args, kwargs)))
                runtime.monitor.count("buffers", buffers() if buffers is not None else ())
            _push_mode(compute, runtime.monitor)
            if compute.task < 0:
                runtime.monitor.transformed = torch._C._functorch.maybe_current_level() is not None
                runtime.monitor.forward_runs = lambda: _calls_running(module, sys._getframe()) > 0
        self._enter_modes(compute, stands_by=measured and self.share.may_leave_device)

    def _enter_modes(self, compute: _Compute, *, stands_by: bool = False) -> OperatorFaults | None:
        """`stands_by`: also if the model is whole on the device, as it may have to leave that."""
        if not (self.runtime.memory.streams or stands_by):
            return None
        if compute.task >= 0:
            self.runtime.notice_writes_by_hooks()
        faults = OperatorFaults(self.runtime, self.gradients, self._saved)
        _push_mode(compute, faults)
        leave = self._saved.enter()
        if leave is not None:
            compute.leave.append(leave)
        return faults

    def after_forward(self, module: torch.nn.Module, output: Any) -> None:
        """`module` has returned or raised; the outermost one leaves the modes."""
        compute = self._current()
        if compute is None or not compute.modules or compute.modules[-1] is not module:
            return
        compute.modules.pop()
        if compute.modules or not compute.called:
            return
        measured = self.runtime.monitor in _get_current_dispatch_mode_stack()
        self._end(compute)
        if measured and compute.task < 0:
            self.runtime.monitor.watch_backward(output)

    # ---- what a backward computes once more ----------------------------------------------------------------------

    @contextmanager
    def recomputing(self) -> Iterator[None]:
        """A checkpoint within a forward of the model computes within, as that did."""
        if self._current() is not None:
            yield
            return
        compute = self._begin(called=False)
        try:
            self._enter_modes(compute)
            yield
        finally:
            self._end(compute)

    def recomputes_until_node_ends(self) -> None:
        """A function of the user's within a forward is at its backward now, and may compute something once more."""
        if self._current() is None and self.runtime.memory.streams:
            compute = self._begin(called=False)
            compute.ends_with_node = self._enter_modes(compute)
            compute.leave.clear()

    def _between_nodes(self) -> None:
        """A gradient arrives: nothing is computed, unless the whole backward is a part of a forward."""
        self._current()
        if not any(compute.task < 0 for compute in self._here()):
            self.runtime.bindings.go_home()

    # ---- stretches of compute ------------------------------------------------------------------------------------

    def _here(self) -> list[_Compute]:
        return self._computes.here

    def _current(self) -> _Compute | None:
        """What computes now; what has ended without a hook is forgotten."""
        here, task = self._here(), torch._C._current_graph_task_id()
        while here:
            last = here[-1]
            if last.task < task:
                return None  # this backward is within it
            if last.task == task and not last.is_over():
                return last
            self._end(last)
        return None

    def _refuse_two_threads(self) -> None:
        """Raise `ManageError` if a forward runs on another thread. Waiting could be for ever: it may be waiting itself,
        for threads that it has started."""
        thread, forward = self._forward
        if thread == threading.get_ident() or in_backward() or not forward.modules:
            return
        if _calls_running(forward.modules[0], sys._current_frames().get(thread)):
            raise ManageError(
                "a forward of this model runs on another thread: hetmem computes one at a time, as a device does; put "
                "a lock around the calls"
            )

    def _begin(self, *, called: bool = True) -> _Compute:
        compute = _Compute(torch._C._current_graph_task_id(), called)
        self._here().append(compute)
        return compute

    def _end(self, compute: _Compute) -> None:
        """`compute` is over, and what it has within it."""
        here = self._here()
        while compute in here:
            ended = here.pop()
            while ended.leave:
                ended.leave.pop()()
            if ended.task < 0:
                self.runtime.monitor.forward_runs = None
        if not any(compute.task < 0 for compute in here):
            self.runtime.bindings.go_home()

    def before_state_dict(self) -> None:
        """What users read, or write over, is what the last step made."""
        self.runtime.traffic.wait_for_updates()

    def before_assignment(self) -> None:
        """`load_state_dict(assign=True)`: nobody would manage the parameters that it puts in the place of these."""
        raise ManageError(
            "load_state_dict(assign=True) would put other parameters in the place of those that hetmem manages: leave "
            "assign=True out, which copies the values, or call hetmem.release(model) first"
        )

    def at_rest(self) -> bool:
        """Whether no forward or backward of the model runs on this thread: then every parameter is its home."""
        compute = self._current()
        if compute is not None and compute.modules and not _calls_running(compute.modules[0], sys._getframe()):
            self.reset()  # an interrupt ended it
        return not self._here() and not in_backward()

    def reset(self) -> None:
        """No module of the model is running."""
        here = self._here()
        if here:
            self._end(here[0])
        self._computes = _OfThread()
        self.runtime.monitor.forward_runs = None
        self.runtime.bindings.go_home()


def _push_mode(compute: _Compute, mode: Any) -> None:
    mode.__enter__()
    compute.leave.append(lambda: _leave_mode(mode))


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.dtype is torch.float32 else value


def _leave_mode(mode: Any) -> None:
    """Pop `mode` if it is on top; after an interrupt something else may be, and then it does no more harm there."""
    stack: Sequence[Any] = (
        _get_current_function_mode_stack()
        if isinstance(mode, TorchFunctionMode)
        else _get_current_dispatch_mode_stack()
    )
    if stack and stack[-1] is mode:
        mode.__exit__(None, None, None)


def _calls_running(module: torch.nn.Module, frame: FrameType | None) -> int:
    """How many calls of `module` are on the stack of a thread, `frame` being its top."""
    code, calls = torch.nn.Module._call_impl.__code__, 0
    while frame is not None:
        calls += frame.f_code is code and frame.f_locals.get("self") is module
        frame = frame.f_back
    return calls
