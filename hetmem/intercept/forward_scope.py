"""A stretch of compute on a thread, and the modes and hooks on torch's stacks meanwhile. Knows no model.

Note "interrupts": Ctrl-C ends a forward without torch's hooks, and not always within `forward_within`, so modes can
stay on the stacks of a thread that never calls the model again. So a mode holds no strong reference, and first
checks whether the calls it was entered for are still on the stack of their thread; if not, it does nothing. While a
frame of hetmem's is around the outermost `forward` (`Compute.enclosed`) there is nothing to check.

Note "compiled functions": a function compiled by `torch.compile` and called by a forward (attention with a user's
score function, say) is traced through the function modes on the stack, as if they were a part of it. So the mode passes
calls through while Dynamo traces, and the graph breaks where an unbound weight is used.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from threading import get_ident, local
from types import FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from hetmem import torch_private
from hetmem.errors import DeviceOutOfMemoryError
from hetmem.intercept.dynamo import set_compiler, skipped, told
from hetmem.memory.chunk import ManagedParameter
from hetmem.torch_private import TorchDispatchMode

_AUTOGRAD: Any = torch_private.autograd
_get_compiler: Any = torch_private.eval_frame.get_eval_frame_callback

Handler = Callable[[Any, Any, Sequence[Any], dict[str, Any]], Any]
"""Called instead of a function or operator, with it, its types, arguments and keyword arguments."""


CALLS: Any = next(
    (each for each in torch_private.call_of_a_module.__code__.co_consts if getattr(each, "co_name", "") == "inner"),
    None,
)
"""The code object in which torch calls a module with hooks that is not compiled; None in a torch without it."""


class Call:
    """A call of a module; it keeps neither the module nor a frame alive. `used` are the weights bound until it ends.
    `changed` is what else it changed meanwhile: functions that restore that, and what each is called with, or None."""

    __slots__ = ("changed", "module", "number", "step", "used")

    def __init__(self, module: object, frame: FrameType | None) -> None:
        """Describe the call that torch's `frame` makes, see `calling_frame`."""
        self.module, self.number = weakref.ref(module), id(frame)
        self.used: Sequence[ManagedParameter] = ()
        self.changed: tuple[tuple[Callable[[Any], None], Any], ...] = ()
        self.step: Any = None

    def is_made_in(self, frame: FrameType | None) -> bool:
        """Return whether `frame` makes this call; after an error torch calls hooks in another frame. A new frame may
        have the `id` of one that is gone, so the module is compared too."""
        return frame is not None and id(frame) == self.number and frame.f_locals.get("self", self) is self.module()

    def is_on(self, frame: FrameType | None) -> bool:
        """Return whether this call is on the stack that has `frame` on top."""
        while frame is not None:
            if id(frame) == self.number and frame.f_locals.get("self", self) is self.module():  # as in `is_made_in`
                return True
            frame = frame.f_back
        return False


def calling_frame(module: object, hook: FrameType) -> FrameType | None:
    """Return the frame in which torch calls `module`, for a hook of it that runs in the frame `hook`: the innermost
    one whose `self` is the module."""
    frame: FrameType | None = hook
    while frame is not None and frame.f_locals.get("self") is not module:
        frame = frame.f_back
    return frame


def outermost_of_modules(frame: FrameType) -> FrameType:
    """Return the frame of the method of a module, like `state_dict`, that `frame`, one of torch's, is a part of."""
    while frame.f_back is not None and frame.f_back.f_globals.get("__name__") == torch.nn.Module.__module__:
        frame = frame.f_back
    return frame


def running(frame: FrameType | None) -> Callable[[], bool]:
    """Return a function that any thread may call: whether `frame`, a method's on the current thread, still runs."""
    owner = None if frame is None else frame.f_locals.get("self")
    if frame is None or owner is None:
        return lambda: False
    call, thread, bottom = Call(owner, frame), get_ident(), _bottom(frame)
    return lambda: _runs_elsewhere([call], thread, bottom)


def _bottom(frame: FrameType) -> int:
    """Return the `id` of the first frame of the thread that `frame` is of."""
    while frame.f_back is not None:
        frame = frame.f_back
    return id(frame)


def _runs_elsewhere(calls: Sequence[Call], thread: int, bottom: int) -> bool:
    """Return whether any of `calls` is on the stack of `thread`, which runs meanwhile. A frame that returns during the
    walk loses its `f_back`, so a walk that does not reach `bottom` counts as found."""
    frame, last = sys._current_frames().get(thread), None
    while frame is not None:
        if any(call.is_made_in(frame) for call in calls):
            return True
        last, frame = frame, frame.f_back
    return last is not None and id(last) != bottom


class Compute:
    """A stretch of compute on one thread: a forward, or a part of one that a backward recomputes.

    `task` is autograd's number of the backward around it, -1 for none; `calls` are the module calls that run, outermost
    first. The stretch ends with its first call; see note "interrupts". `ended` is called once it is found to have
    ended, and `on_interrupted` with each call that an interrupt has ended.
    """

    def __init__(self, began: Call, ended: Callable[[Compute], None], on_interrupted: Callable[[Call], None]) -> None:
        self.task, self.thread = torch_private.current_graph_task(), get_ident()
        self.calls, self.on_interrupted, self.is_over = [began], on_interrupted, False
        self.enclosed = False
        """Whether a frame of hetmem's is around the outermost `forward`, which sees every end of that: a module called
        on its thread, in the same backward if in any, is called within the stretch. A call within that an interrupt has
        ended may stay among `calls` meanwhile, and its weights bound."""
        self.functions_running = 0
        """Number of calls of `functions` that have not returned: while there is one, the stretch runs."""
        self.functions: Handler | None = None
        self.operators: Handler | None = None
        self.compiler: Any = None
        """The Dynamo callback in effect where this stretch began; see `dynamo`."""
        self.working_weights = self.shows_working = self.all_at_once = False
        """Whether this stretch computes with working weights, see `placing.working`; whether all modules show theirs
        meanwhile; and whether all copies that it uses are leased as long as it, so that no module call has to."""
        self._bottom = _bottom(sys._getframe())
        self.section: Any = None
        """Its section of its thread's turn, see `engine.runtime`."""
        self._ended = ended
        self._left: tuple[list[TorchFunctionMode], list[TorchFunctionMode]] = ([], [])

    def runs(self) -> bool:
        """Return whether the stretch runs, for a mode on any thread; if its own thread finds that not so, end it."""
        if self.is_over or self.functions_running or self.enclosed:
            return not self.is_over
        if self.thread != get_ident():
            return _runs_elsewhere(tuple(self.calls), self.thread, self._bottom)
        top = sys._getframe(1)
        for call in reversed(self.calls):  # run at every torch function
            if call.is_on(top):
                return True
        self._ended(self)
        return False

    def has_ended(self, top: FrameType | None) -> bool:
        """Return whether this stretch has ended, judged from the frames below `top` on the calling thread. Drops calls
        that an interrupt has ended."""
        while self.calls and not self.calls[-1].is_on(top):
            self.on_interrupted(self.calls.pop())
        return not self.calls

    @staticmethod
    def enter_forward(frame: FrameType | None, around: Callable[..., Any]) -> bool:
        """Have `frame`, of the code `CALLS`, call `around(forward, …)` instead of `forward(…)`, as torch calls no hooks
        after a `KeyboardInterrupt` or the like. Returns False if `frame` is of other code."""
        if frame is None or frame.f_back is None or frame.f_code is not CALLS:
            return False
        cell = frame.f_back.f_locals["inner"].__closure__[CALLS.co_freevars.index("forward_call")]
        cell.cell_contents = partial(around, cell.cell_contents)
        return True

    def enter_functions(self, handler: Handler) -> None:
        """Call `handler` instead of torch's functions."""
        self.functions = handler
        _Functions(self).__enter__()

    def leave_functions(self) -> None:
        """Suspend `enter_functions` until `enter_functions_again`."""
        stack = torch_private.function_mode_stack()
        self._left = [mode for mode in stack if not (isinstance(mode, _Functions) and mode.compute() is self)], stack
        _exchange_modes(stack, self._left[0])

    def enter_functions_again(self) -> None:
        """Resume `enter_functions`, on the thread of the stretch. Does nothing if modes entered meanwhile have not been
        left, or if the stretch has ended."""
        (others, before), self._left = self._left, ([], [])
        if not self.is_over and before and torch_private.function_mode_stack() == others:
            _exchange_modes(others, before)

    def enter_operators(self, handler: Handler) -> None:
        """Call `handler` instead of operators."""
        self.operators = handler
        _Operators(self).__enter__()

    def end(self) -> None:
        """Mark the stretch as ended, and take its modes off torch's stacks."""
        self.is_over = True
        self.functions = self.operators = None  # these may reference a checkpoint's hooks, and so its model
        self.calls.clear()
        drop_ended_modes()


class Stretches(local):
    """The stretches of compute of one model on this thread."""

    def __init__(self) -> None:
        self.here: list[Compute] = []
        """Those that run, outermost first."""


class _Functions(TorchFunctionMode):
    """The function mode of a `Compute`."""

    def __init__(self, compute: Compute) -> None:
        super().__init__()
        self.compute = weakref.ref(compute)

    @skipped
    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torch.compiler.is_dynamo_compiling():  # never true where this runs; see note "compiled functions"
            return func(*args, **(kwargs or {}))
        compute = self.compute()
        if compute is None or not compute.runs() or compute.functions is None:
            return func(*args, **(kwargs or {}))
        compiler = _get_compiler()
        if compiler is not None:
            set_compiler(None)
        compute.functions_running += 1
        try:
            return compute.functions(func, types, args, kwargs or {})
        except DeviceOutOfMemoryError as error:
            raise told(error) from None
        finally:
            compute.functions_running -= 1
            if compiler is not None:
                set_compiler(compiler)


class _Operators(TorchDispatchMode):
    """The dispatch mode of a `Compute`."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: torch may compile under this mode, as `torch.cond` does, and compiled code runs under it."""
        return True

    def __init__(self, compute: Compute) -> None:
        super().__init__()
        self.compute = weakref.ref(compute)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        compute = self.compute()
        if compute is None or not compute.runs() or compute.operators is None:
            return func(*args, **(kwargs or {}))
        try:
            return compute.operators(func, types, args, kwargs or {})
        except DeviceOutOfMemoryError as error:
            raise told(error) from None


class Hook:
    """The pack hook of a `Compute` for saved tensors; None: of the node that runs, at whose end autograd removes it."""

    def __init__(self, compute: Compute | None) -> None:
        self._compute = None if compute is None else weakref.ref(compute)

    def is_active(self) -> bool:
        """Return whether the hook is in effect, on the thread that asks."""
        compute = None if self._compute is None else self._compute()
        return self._compute is None or (compute is not None and compute.runs())

    def is_over(self) -> bool:
        """Return whether the hook will not be in effect again."""
        if self._compute is None:
            return bool(torch_private.current_graph_task() == -1)
        compute = self._compute()
        return compute is None or compute.is_over


def _is_over(mode: object) -> bool:
    """Return whether `mode` was entered for a `Compute` that has ended."""
    if not isinstance(mode, (_Functions, _Operators)):
        return False
    compute = mode.compute()
    return compute is None or compute.is_over


def drop_ended_modes() -> None:
    """Take modes and hooks whose compute has ended off this thread's stacks: function modes anywhere, dispatch modes
    and hooks on top only. A mode whose handler runs is off the stack meanwhile, and comes back behind it."""
    functions, operators = torch_private.function_mode_stack(), torch_private.dispatch_mode_stack()
    if any(map(_is_over, functions)):
        _exchange_modes(functions, [mode for mode in functions if not _is_over(mode)])
    while operators and _is_over(operators[-1]):
        operators.pop().__exit__(None, None, None)
    while (top := _AUTOGRAD._top_saved_tensors_default_hooks(True)) and isinstance(top[0], Hook) and top[0].is_over():
        _AUTOGRAD._pop_saved_tensors_default_hooks()


def _exchange_modes(before: Sequence[TorchFunctionMode], after: Sequence[TorchFunctionMode]) -> None:
    """Replace the stack of function modes, `before`, by `after`."""
    for _ in before:
        torch_private.pop_mode()
    for mode in after:
        torch_private.push_mode(mode)
