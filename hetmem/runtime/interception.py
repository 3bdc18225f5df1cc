"""How torch tells the runtime what it uses: module hooks, a function mode, and saved-tensor hooks. No logic of its own.

Modes and saved-tensor hooks are entered by the forward hook of whichever module is called first and left when that
returns.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
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


class Interception:
    """The hooks of one managed module, and what is entered while one of its modules runs."""

    def __init__(self, module: torch.nn.Module, runtime: Runtime) -> None:
        self.runtime = runtime
        self.segments = Segments(runtime)
        self.gradients = GradientSink(runtime, self.segments)
        self.share = ResidentShare(runtime, self.gradients)
        self._stack: list[torch.nn.Module] = []
        self._saved = SavedTensors(runtime, self.segments)
        self._faults = OperatorFaults(runtime, self.gradients, self._saved)
        self._entered: list[Callable[[], None]] = []
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
        if self._stack and self._stack[0] is module and _calls_running(module) < 2:
            self.reset()  # the last call ended by an interrupt, which runs no hooks
        self._stack.append(module)
        if len(self._stack) > 1:
            return None
        try:
            dtype = self.runtime.memory.mixed_precision
            if dtype is not None:
                args, kwargs = tree_map(lambda value: _cast(value, dtype), (args, kwargs))
            self._enter(module, args, kwargs)
        except BaseException:
            self.reset()
            raise
        return None if dtype is None else (args, kwargs)

    def _enter(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        runtime = self.runtime
        measured = runtime.sanitize
        if not in_backward():
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
            self._push_mode(runtime.monitor)
            runtime.monitor.transformed = torch._C._functorch.maybe_current_level() is not None
            runtime.monitor.forward_runs = lambda: _calls_running(module) > 0
        if not runtime.memory.streams and not (measured and self.share.may_leave_device):
            return
        self._push_mode(self._faults)
        leave = self._saved.enter()
        if leave is not None:
            self._entered.append(leave)

    def _push_mode(self, mode: Any) -> None:
        mode.__enter__()
        self._entered.append(lambda: _leave_mode(mode))

    def after_forward(self, module: torch.nn.Module, output: Any) -> None:
        """`module` has returned or raised; the outermost one leaves the modes."""
        if not self._stack or self._stack[-1] is not module:
            return
        self._stack.pop()
        if self._stack:
            return
        measured = self.runtime.monitor in _get_current_dispatch_mode_stack()
        self.reset()
        if measured and not in_backward():
            self.runtime.monitor.watch_backward(output)

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
        if self._stack and not _calls_running(self._stack[0]):
            self.reset()  # an interrupt ended it
        return not self._stack and not in_backward()

    def reset(self) -> None:
        """No module of the model is running."""
        self._stack.clear()
        self.runtime.monitor.forward_runs = None
        while self._entered:
            self._entered.pop()()
        self.runtime.bindings.go_home()


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


def _calls_running(module: torch.nn.Module) -> int:
    """How many calls of `module` are on this thread's stack."""
    code, calls = torch.nn.Module._call_impl.__code__, 0
    frame = sys._getframe()
    while frame is not None:
        calls += frame.f_code is code and frame.f_locals.get("self") is module
        frame = frame.f_back  # type: ignore[assignment]
    return calls
