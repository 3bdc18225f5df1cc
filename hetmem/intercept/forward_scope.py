"""A stretch of compute on a thread, and what is on torch's stacks for its length. It knows of no model.

Note "interrupts": Ctrl-C ends a forward and runs none of torch's hooks, so what is on torch's stacks stays there, on a
thread that may live for ever and never call the model again. So what is put there holds nothing, and looks first
whether the calls that it was put there for are on the stack of their thread; once they are not, it does nothing.

Note "compiled functions": a function that `torch.compile` makes code of, and that a forward calls (attention with a
score of the user's, say), is traced with what is on the stack of function modes, as if that were a part of it. So there
the mode is nothing; where an unbound weight is used the graph ends.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from threading import get_ident
from types import FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from hetmem import torch_private
from hetmem.intercept.dynamo import set_compiler, skipped
from hetmem.memory.chunk import ManagedParameter
from hetmem.torch_private import TorchDispatchMode

_AUTOGRAD: Any = torch_private.autograd
_get_compiler: Any = torch_private.eval_frame.get_eval_frame_callback

Handler = Callable[[Any, Any, Sequence[Any], dict[str, Any]], Any]
"""Is called in the place of a function or an operator: with it, types, arguments and keyword arguments."""


CALLS: Any = next(
    (each for each in torch_private.call_of_a_module.__code__.co_consts if getattr(each, "co_name", "") == "inner"),
    None,
)
"""What torch calls a module that has hooks in, and these, as long as it is not compiled; None in a torch without."""


class Call:
    """A call of a module; it holds neither the module nor a frame. `used` are the weights that are bound for its
    length, `displaced` the hooks of others that gave way for that, `left` the cache of `torch.autocast` that did."""

    __slots__ = ("_plain", "displaced", "left", "module", "number", "used")

    def __init__(self, module: object, frame: FrameType | None) -> None:
        """`frame`: that of torch's which makes the call, see `calling_frame`."""
        self.module, self.number = weakref.ref(module), id(frame)
        self._plain = frame is not None and frame.f_code is CALLS
        self.used: list[ManagedParameter] = []
        self.displaced: Any = None
        self.left: Any = None

    def is_made_in(self, frame: FrameType | None) -> bool:
        """Whether `frame` makes it; torch calls hooks after an error in another one. A frame that is gone may have left
        its memory to another one."""
        return frame is not None and id(frame) == self.number and frame.f_locals.get("self", self) is self.module()

    def is_on(self, frame: FrameType | None) -> bool:
        """Whether it is on the stack that has `frame` on top."""
        plain = self._plain  # the numbers of fewer frames are asked for
        while frame is not None:
            if (
                (not plain or frame.f_code is CALLS)
                and id(frame) == self.number
                and frame.f_locals.get("self", self) is self.module()  # as in `is_made_in`
            ):
                return True
            frame = frame.f_back
        return False


def calling_frame(module: object, hook: FrameType) -> FrameType | None:
    """The frame in which torch calls `module`, asked by one of its hooks, which runs in the frame `hook`: the innermost
    one with the module as `self`."""
    frame: FrameType | None = hook
    while frame is not None and frame.f_locals.get("self") is not module:
        frame = frame.f_back
    return frame


def forward_within(frame: FrameType | None, around: Callable[..., Any]) -> bool:
    """Have `around(forward, …)` called in the place of the `forward(…)` that `frame`, one of `CALLS`, is about to call:
    it sees each error, and torch's hooks an `Exception` only. False if it is another frame."""
    if frame is None or frame.f_back is None or frame.f_code is not CALLS:
        return False
    cell = frame.f_back.f_locals["inner"].__closure__[CALLS.co_freevars.index("forward_call")]
    cell.cell_contents = partial(around, cell.cell_contents)
    return True


def outermost_of_modules(frame: FrameType) -> FrameType:
    """The call of a module's method, like `state_dict`, that `frame`, which is torch's, is a part of."""
    while frame.f_back is not None and frame.f_back.f_globals.get("__name__") == torch.nn.Module.__module__:
        frame = frame.f_back
    return frame


def running(frame: FrameType | None) -> Callable[[], bool]:
    """Whether `frame`, in which an object's method runs on this thread, still does so; to be asked by any thread."""
    owner = None if frame is None else frame.f_locals.get("self")
    if frame is None or owner is None:
        return lambda: False
    call, thread, bottom = Call(owner, frame), get_ident(), _bottom(frame)
    return lambda: _runs_elsewhere([call], thread, bottom)


def _bottom(frame: FrameType) -> int:
    """What identifies the first frame of the thread that `frame` is of."""
    while frame.f_back is not None:
        frame = frame.f_back
    return id(frame)


def _runs_elsewhere(calls: Sequence[Call], thread: int, bottom: int) -> bool:
    """Whether any of `calls` is on the stack of `thread`, which runs meanwhile. A frame that has just returned has none
    below it any more, so only who gets to the `bottom` knows that none is."""
    frame, last = sys._current_frames().get(thread), None
    while frame is not None:
        if any(call.is_made_in(frame) for call in calls):
            return True
        last, frame = frame, frame.f_back
    return last is not None and id(last) != bottom


class Compute:
    """A stretch of compute on one thread: a forward, or what a backward computes once more of one.

    `task` is the backward that it is within, -1 for none; `calls` are those of modules that run, outermost first.
    It is over when the call that began it is; see note "interrupts". `ended` is called when it is found to be over, and
    `let_go` with each call of it that an interrupt has ended.
    """

    def __init__(self, began: Call, ended: Callable[[Compute], None], let_go: Callable[[Call], None]) -> None:
        self.task, self.thread = torch_private.current_graph_task(), get_ident()
        self.calls, self.let_go, self.is_over = [began], let_go, False
        self.functions_running = 0
        """Functions that `functions` was called for and that have not returned: while there is one, it is under way."""
        self.functions: Handler | None = None
        self.operators: Handler | None = None
        self.compiler: Any = None
        """Who compiles what is around it; see `dynamo`."""
        self.leases = self.works = False
        """Whether all weights may be bound for its length; whether modules have working weights meanwhile, see
        `placing.working`."""
        self._bottom = _bottom(sys._getframe())
        self.section: Any = None
        """Its part of the turn of its thread, see `engine.runtime`."""
        self._ended = ended
        self._left: tuple[list[TorchFunctionMode], list[TorchFunctionMode]] = ([], [])

    def runs(self) -> bool:
        """Whether it is under way, asked by what is on torch's stacks, on any thread; if not, it ends."""
        if self.is_over or self.functions_running:
            return not self.is_over
        if self.thread != get_ident():
            return _runs_elsewhere(tuple(self.calls), self.thread, self._bottom)
        top = sys._getframe(1)
        for call in reversed(self.calls):  # asked at every function of torch's
            if call.is_on(top):
                return True
        self._ended(self)
        return False

    def has_ended(self, top: FrameType | None) -> bool:
        """Whether it is over, asked by its thread, `top` being the top of the stack that counts. Forgets what calls of
        it an interrupt has ended."""
        while self.calls and not self.calls[-1].is_on(top):
            self.let_go(self.calls.pop())
        return not self.calls

    def is_computing(self, top: FrameType | None) -> bool:
        """Whether it is the one that computes now, as its innermost call is on the stack that has `top` on top."""
        calls = self.calls
        if not calls or self.task != torch_private.current_graph_task():
            return False
        call, frame = calls[-1], top
        while frame is not None and frame.f_code is not CALLS:
            frame = frame.f_back
        if frame is not None and id(frame) == call.number and frame.f_locals["self"] is call.module():
            return True  # the innermost call of a module with hooks on the stack, as mostly
        return call.is_on(top)

    def pop(self, module: torch.nn.Module, frame: FrameType) -> Call | None:
        """Its innermost call, which is over, if that is of `module` by `frame`, and not the one that began it."""
        calls = self.calls
        if calls[1:2] and calls[-1].number == id(frame) and calls[-1].module() is module:
            call = calls[-1]
            del calls[-1]
            return call
        return None

    def enter_functions(self, handler: Handler) -> None:
        """`handler` is called in the place of torch's functions."""
        self.functions = handler
        _Functions(self).__enter__()

    def leave_functions(self) -> None:
        """`enter_functions` does not count until `enter_functions_again`."""
        stack = torch_private.function_mode_stack()
        self._left = [mode for mode in stack if not (isinstance(mode, _Functions) and mode.compute() is self)], stack
        _exchange_modes(stack, self._left[0])

    def enter_functions_again(self) -> None:
        """On its thread; nothing happens if what was entered meanwhile has not been left, or if it is over."""
        (others, before), self._left = self._left, ([], [])
        if not self.is_over and before and torch_private.function_mode_stack() == others:
            _exchange_modes(others, before)

    def enter_operators(self, handler: Handler) -> None:
        """`handler` is called in the place of operators."""
        self.operators = handler
        _Operators(self).__enter__()

    def end(self) -> None:
        """It is over."""
        self.is_over = True
        self.functions = self.operators = None  # these may hold a checkpoint's hooks, and so its model
        self.calls.clear()
        forget_what_is_over()


class _Functions(TorchFunctionMode):
    """What is on torch's stack of function modes for a `Compute`."""

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
        finally:
            compute.functions_running -= 1
            if compiler is not None:
                set_compiler(compiler)


class _Operators(TorchDispatchMode):
    """What is on torch's stack of dispatch modes for a `Compute`."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """torch compiles under it, as `torch.cond` does by itself, and what is compiled runs under it."""
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
        return compute.operators(func, types, args, kwargs or {})


class Hook:
    """What is on autograd's stack of hooks for saved tensors for a `Compute`, or (None) for the node that runs, at
    whose end autograd takes it away: what packs, by calling it."""

    def __init__(self, compute: Compute | None) -> None:
        self._compute = None if compute is None else weakref.ref(compute)

    def counts(self) -> bool:
        """Whether it is to do anything, asked by its thread."""
        compute = None if self._compute is None else self._compute()
        return self._compute is None or (compute is not None and compute.runs())

    def is_over(self) -> bool:
        """Whether it does nothing any more."""
        if self._compute is None:
            return bool(torch_private.current_graph_task() == -1)
        compute = self._compute()
        return compute is None or compute.is_over


def _is_over(mode: object) -> bool:
    """Whether `mode` was entered for a `Compute`, and does nothing any more."""
    if not isinstance(mode, (_Functions, _Operators)):
        return False
    compute = mode.compute()
    return compute is None or compute.is_over


def forget_what_is_over() -> None:
    """Take what is over off this thread's stacks: a function mode wherever it is, a dispatch mode and hooks if they are
    on top. The one in whose place something is called just now is not there, and comes back after that."""
    functions, operators = torch_private.function_mode_stack(), torch_private.dispatch_mode_stack()
    if any(map(_is_over, functions)):
        _exchange_modes(functions, [mode for mode in functions if not _is_over(mode)])
    while operators and _is_over(operators[-1]):
        operators.pop().__exit__(None, None, None)
    while (top := _AUTOGRAD._top_saved_tensors_default_hooks(True)) and isinstance(top[0], Hook) and top[0].is_over():
        _AUTOGRAD._pop_saved_tensors_default_hooks()


def _exchange_modes(before: Sequence[TorchFunctionMode], after: Sequence[TorchFunctionMode]) -> None:
    """The stack of function modes, `before`, is `after`."""
    for _ in before:
        torch_private.pop_mode()
    for mode in after:
        torch_private.push_mode(mode)
