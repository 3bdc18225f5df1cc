"""What hetmem knows of `torch.compile`: who compiles, and how to keep them from code that is hetmem's own.

It knows of no model. torch's callback compiles the frames that a thread is about to run; None: they are not compiled;
False: none are compiled, but compiled code that exists runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch.utils.hooks import RemovableHandle

from hetmem import torch_private
from hetmem.memory.interrupts import HELD_BACK

_EVAL: Any = torch_private.eval_frame
_SKIP = _EVAL._FrameExecStrategy(_EVAL._FrameAction.SKIP, _EVAL._FrameAction.DEFAULT)
_FunctionT = TypeVar("_FunctionT", bound=Callable[..., Any])


def skipped(function: _FunctionT) -> _FunctionT:
    """`function` is compiled within what calls it, never by itself; what it calls may be."""
    _EVAL.set_code_exec_strategy(function.__code__, _SKIP)
    return function


def opaque(function: _FunctionT) -> _FunctionT:
    """`function` is never compiled: a graph ends before each call of it."""
    function.__dict__["_torchdynamo_disable"] = True
    return skipped(function)


set_compiler: Any = _EVAL.set_eval_frame
"""Has the callback that it is given compile the frames that this thread runs from here on. Returns the one so far."""


def uncompiled(function: _FunctionT) -> _FunctionT:
    """Run `function` and what it calls as they are, also where compiled code calls it."""

    @opaque
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        compiler = set_compiler(None)
        try:
            return function(*args, **kwargs)
        finally:
            if compiler is not None:
                set_compiler(compiler)

    return cast(_FunctionT, call)


def called_by_autograd(function: _FunctionT) -> _FunctionT:
    """The same, with interrupts held back: for what autograd calls some hundred times in a step."""

    @opaque
    @functools.wraps(function)
    def call(*args: Any) -> Any:
        compiler = set_compiler(None)
        try:
            with HELD_BACK:
                return function(*args)
        finally:
            if compiler is not None:
                set_compiler(compiler)

    return cast(_FunctionT, call)


def has_compiled_forward(module: torch.nn.Module) -> bool:
    """Whether a compiled function has the place of the `forward` of `module`."""
    return hasattr(module.__dict__.get("forward"), "_torchdynamo_orig_callable")


def compiles_itself(module: torch.nn.Module) -> bool:
    """Whether a call of `module` by another one is compiled, by whichever way that was asked for; transformers compiles
    flex attention, which takes memory for all pairs of tokens if it is not, by a function of its own."""
    wrapped = "_orig_mod" in module._modules or vars(module).get("_compiled_call_impl") is not None
    attention = getattr(vars(module).get("config"), "_attn_implementation", None)
    return wrapped or has_compiled_forward(module) or attention == "flex_attention"


def can_compile() -> bool:
    """Whether modules are to be compiled here: a dispatch mode would see nothing of what their code does."""
    return not torch_private.dispatch_mode_stack()


class Tracing:
    """What hooks ask of a model while code is made of its modules, or while it needs none of them, which may hold no
    more than this."""

    __slots__ = ("quiet", "region", "where")

    def __init__(self) -> None:
        self.region = False
        """Whether a region runs: a module with all its weights on the device, whose own modules need no hooks."""
        self.listen()

    def listen(self) -> None:
        """Have hooks of modules tell of each call."""
        self.quiet = 0
        """The thread on which a forward runs whose weights all are where operators find them; 0 for none."""
        self.where: Callable[[], torch.nn.Module | None] | None = None
        """The module, held weakly, whose call is the only one that has to be seen to end; None: each has to."""


def hook_forwards(parts: Iterable[torch.nn.Module], before: Any, after: Any) -> Iterator[RemovableHandle]:
    """Register `before` (with keyword arguments) and `after` (always called) with all of `parts`, under one number,
    as the number is a part of what compiled code is good for: so a block's is good for all that are like it. One after
    the other: of a part that refuses them those before it are known."""
    numbers: list[int] = []
    for index, part in enumerate(parts):
        for register in (
            partial(part.register_forward_pre_hook, before, with_kwargs=True),
            partial(part.register_forward_hook, after, always_call=True),
        ):
            handle = register()
            if index:
                _renumber(handle, numbers[len(numbers) - 2])
            numbers.append(handle.id)
            yield handle


def _renumber(handle: RemovableHandle, number: int) -> None:
    """`handle`, just registered, has `number`, which no other handle has."""
    for found in (handle.hooks_dict_ref, *handle.extra_dict_ref):
        hooks = found()
        if hooks is not None and handle.id in hooks:
            hooks[number] = hooks.pop(handle.id)
    handle.id = number
