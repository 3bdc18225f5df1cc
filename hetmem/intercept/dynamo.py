"""Keeps `torch.compile` from compiling hetmem's own code, and says which modules are compiled. Knows no model.

Dynamo's callback (the "compiler" here) compiles the frames that a thread is about to run; None: they are not compiled;
False: none are compiled, but existing compiled code runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch.utils.hooks import RemovableHandle

from hetmem import torch_private
from hetmem.errors import DeviceOutOfMemoryError
from hetmem.memory.interrupts import HELD_BACK

_EVAL: Any = torch_private.eval_frame
_SKIP = _EVAL._FrameExecStrategy(_EVAL._FrameAction.SKIP, _EVAL._FrameAction.DEFAULT)
_FunctionT = TypeVar("_FunctionT", bound=Callable[..., Any])


def skipped(function: _FunctionT) -> _FunctionT:
    """Have Dynamo never begin a graph with `function`. It may inline it into a caller, and compile what it calls."""
    _EVAL.set_code_exec_strategy(function.__code__, _SKIP)
    return function


def opaque(function: _FunctionT) -> _FunctionT:
    """Have Dynamo never compile `function`: the graph breaks before each call of it."""
    function.__dict__["_torchdynamo_disable"] = True
    return skipped(function)


set_compiler: Any = _EVAL.set_eval_frame
"""Sets the callback that compiles the frames this thread runs from here on, and returns the previous one."""


def uncompiled(function: _FunctionT) -> _FunctionT:
    """Run `function` and all that it calls in eager mode, also where compiled code calls it."""

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


told = uncompiled(DeviceOutOfMemoryError.told)
"""Of an error that a compiled block raises too: what is rehearsed for its message is no code of the block."""


def called_by_autograd(function: _FunctionT) -> _FunctionT:
    """Do as `uncompiled`, with interrupts held back: for functions that autograd calls hundreds of times in a step."""

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
    """Return whether a compiled function replaces the `forward` of `module`."""
    return hasattr(module.__dict__.get("forward"), "_torchdynamo_orig_callable")


def compiles_itself(module: torch.nn.Module) -> bool:
    """Return whether a call of `module` by another one is compiled, by any way to ask for that. transformers compiles
    flex attention, which in eager mode takes memory for all pairs of tokens, by a function of its own."""
    wrapped = "_orig_mod" in module._modules or vars(module).get("_compiled_call_impl") is not None
    attention = getattr(vars(module).get("config"), "_attn_implementation", None)
    return wrapped or has_compiled_forward(module) or attention == "flex_attention"


def can_compile() -> bool:
    """Return whether modules may be compiled here: not under a dispatch mode, which does not see into compiled code."""
    return not torch_private.dispatch_mode_stack()


class Tracing:
    """The state that a model's module hooks read first, to return at once where they can. Compiled code keeps it alive,
    so it refers to no model strongly."""

    __slots__ = ("quiet", "region", "where")

    def __init__(self) -> None:
        self.region = False
        """Whether a region runs: a compiled module with all its weights on the device, in which hooks do nothing."""
        self.listen()

    def listen(self) -> None:
        """Have the hooks of all modules run."""
        self.quiet = 0
        """The thread of a forward whose weights all are where operators find them (pre-hooks do nothing), or 0."""
        self.where: Callable[[], torch.nn.Module | None] | None = None
        """The only module, held weakly, whose hook after a call has to run; None: all have to."""


def hook_forwards(parts: Iterable[torch.nn.Module], before: Any, after: Any) -> Iterator[RemovableHandle]:
    """Register `before` (with keyword arguments) and `after` (always called) with all of `parts`, under one number:
    compiled code guards on the number, so a block's code serves all blocks like it. Yields handles one by one: if a
    part raises, the caller has those before it."""
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
    """Change the number of `handle`, just registered, to `number`."""
    for found in (handle.hooks_dict_ref, *handle.extra_dict_ref):
        hooks = found()
        if hooks is not None and handle.id in hooks:
            hooks[number] = hooks.pop(handle.id)
    handle.id = number
