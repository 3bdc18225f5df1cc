"""Hooks of a module, and of autograd for what arrives at its parameters, among those of the user.

In a copy of the module, and where it is pickled, torch's and Python's own things take their place that do nothing: the
file can be read without hetmem. Hooks of gradients tell a sink, which they do not hold: a parameter must not keep its
model alive.
"""

from __future__ import annotations

import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from itertools import compress, product
from operator import contains, getitem, setitem
from types import FrameType
from typing import Any

import torch

from hetmem.engine.gradients import ArrivalHooks, GradientSink
from hetmem.engine.runtime import Section
from hetmem.errors import ManageError
from hetmem.intercept.diagnostics import refuse_conversion
from hetmem.intercept.dynamo import Tracing, called_by_autograd, opaque, set_compiler, skipped
from hetmem.intercept.forward_scope import outermost_of_modules, running
from hetmem.memory.chunk import ManagedParameter
from hetmem.memory.interrupts import HELD_BACK, HERE
from hetmem.placing.working import run_through

Convert = Callable[[torch.Tensor], torch.Tensor]

Hooked = Any
"""The `Interception` that is told, held weakly: it imports this."""


class _OfThisModule:
    """A hook of a module, which its copies do not have."""

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")  # takes anything, and returns None


class BeforeForward(_OfThisModule):
    """A forward pre-hook. Code that is compiled with it within goes by what `tracing` says, see `dynamo`."""

    def __init__(self, hooked: Hooked, tracing: Tracing) -> None:
        self._hooked, self._tracing = weakref.ref(hooked), tracing

    @skipped
    def __call__(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]] | None:
        tracing = self._tracing
        where = tracing.where
        if tracing.quiet and tracing.quiet == HERE.ident and where is not None and where() is not module:
            return None  # else an interrupt has ended the forward that was quiet
        if kwargs is None:  # moved into another module, as torch's quantization does
            return None
        if self._tracing.region and torch.compiler.is_compiling():
            return None
        hooked = self._hooked()
        if hooked is None:
            return None
        called_with: tuple[Any, dict[str, Any]] | None = hooked.before_forward(module, args, kwargs)
        return called_with


class AfterForward(_OfThisModule):
    """The forward hook beside it."""

    def __init__(self, hooked: Hooked, tracing: Tracing) -> None:
        self._hooked, self._tracing = weakref.ref(hooked), tracing

    @skipped
    def __call__(self, module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
        where = self._tracing.where
        if where is not None and where() is not module:
            return
        if not (self._tracing.region and torch.compiler.is_compiling()):
            hooked = self._hooked()
            if hooked is not None:
                hooked.after_forward(module, output)


class PartHooks:
    """The hooks around the forwards of a model's `parts`; `handles` begin with two of the model and two of each part.

    Torch calls a module that has hooks in three times as many calls of Python. A forward of the model whose weights all
    are where operators find them needs those of its own call alone: for its length, each part without others' hooks has
    none. Each forward that generates takes them off and puts them back, so by C alone.
    """

    def __init__(self, parts: Iterable[torch.nn.Module], handles: Sequence[Any]) -> None:
        each = [*product(map(vars, parts), _HOOKS)]
        self._where, self._names = [names for names, _ in each], [name for _, name in each]
        """The `__dict__` of each part, and the name of a dictionary of hooks there."""
        self._numbers = [handle.id for handle in handles[len(_HOOKS) :]]
        self._off: list[OrderedDict[int, Any]] = []
        """The dictionaries whose hooks were taken off; none if none were."""
        self._hooks: list[Any] = []

    def take_off(self) -> None:
        """Take the hooks off every part that has no others, until `put_back`."""
        if self._off:
            return
        found: list[Any] = [*map(getitem, self._where, self._names)]
        if not (set(map(len, found)) <= {1} and all(map(contains, found, self._numbers))):
            alone = [len(of) == 1 and number in of for of, number in zip(found, self._numbers, strict=True)]
            lists = self._where, self._names, self._numbers  # those of parts that have hooks of others stay for good
            self._where, self._names, self._numbers = ([*compress(of, alone)] for of in lists)
            found = [*map(getitem, self._where, self._names)]
        self._hooks, self._off = [*map(getitem, found, self._numbers)], found
        run_through(map(OrderedDict.clear, found))

    def put_back(self) -> None:
        """Have them where they were, before those that came meanwhile."""
        off, self._off = self._off, []
        added = any(off)
        run_through(map(setitem, off, self._numbers, self._hooks))
        for hooks, number in zip(off, self._numbers, strict=True) if added else ():
            hooks.move_to_end(number, last=False)


_HOOKS = ("_forward_pre_hooks", "_forward_hooks")


class BeforeStateDict(_OfThisModule):
    """A pre-hook of state dicts, and of loading them, beside these."""

    def __init__(self, hooked: Hooked) -> None:
        self._hooked = weakref.ref(hooked)
        self._reading: Section | None = None

    @HELD_BACK
    def __call__(self, *args: Any) -> None:
        hooked = self._hooked()
        if hooked is not None:
            self._take_turn(hooked, sys._getframe(2))  # behind `HELD_BACK`
            hooked.settle_for_reading()
            if len(args) > 3 and args[2].get("assign_to_params_buffers"):  # of what is loaded
                raise ManageError(
                    "load_state_dict(assign=True) would put other parameters in the place of those that hetmem "
                    "manages: leave assign=True out, which copies the values, or call hetmem.release(model) first"
                )

    def _take_turn(self, hooked: Hooked, by: FrameType) -> None:
        """The model is this thread's as long as the method of a module runs that calls `by`."""
        turn, reading = hooked.runtime.turn, self._reading
        if reading is None or not turn.is_mine() or reading.is_over():
            if reading is not None:
                turn.give(reading)
            self._reading = turn.take("a state dict", running(outermost_of_modules(by)), hooked.is_whole)


class Conversions:
    """In the place of `_apply` of one module, through which `to`, `cuda`, `half`, `share_memory` and the like go. A
    copy of the module has that of its class there."""

    __slots__ = ("_hooked", "_module")

    def __init__(self, module: torch.nn.Module, hooked: Hooked | None) -> None:
        self._module = weakref.ref(module)
        self._hooked = _none if hooked is None else weakref.ref(hooked)

    def __call__(self, convert: Convert, recurse: bool = True) -> torch.nn.Module:
        module, hooked = self._module(), self._hooked()
        assert module is not None, "a copy of a managed module was made without its class's knowing"
        if hooked is not None and not (isinstance(convert, _AllBut) and convert.hooked is hooked):
            convert = _AllBut(convert, hooked, module.parameters(recurse))  # also for the modules in this one
        apply: Any = type(module)._apply
        converted: torch.nn.Module = apply(module, convert) if recurse else apply(module, convert, recurse=False)
        return converted

    def is_over(self) -> bool:
        """Whether it tells nothing of conversions: the module is a copy of one that was managed."""
        return self._hooked() is None

    def remove(self) -> None:
        """Take it off."""
        module = self._module()
        if module is not None and vars(module).get("_apply") is self:
            del module._apply

    def __deepcopy__(self, memo: dict[int, Any]) -> Conversions:
        return type(self)(memo[id(self._module())], None)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._module(), "_apply")  # of a copy that has nothing yet but its class


class _AllBut:
    """`convert`, but of those of a module's `parameters` that `hooked` manages, and of their gradients, which stay.
    Raises `ManageError` where they would get another dtype, or strides."""

    def __init__(self, convert: Convert, hooked: Hooked, parameters: Iterable[torch.Tensor]) -> None:
        self.hooked, self._convert = hooked, convert
        runtime, computes, found = hooked.runtime, hooked.is_computing(), list[ManagedParameter]()
        found += filter(None, map(runtime.bindings.by_id.get, map(id, parameters)))
        mixed, device = runtime.memory.mixed_precision is not None, runtime.memory.device.torch_device
        with runtime.unwatched(), torch.no_grad():
            refuse_conversion(found, convert, device, computes=computes, mixed=mixed)
        kept = [each for managed in found for each in (managed.parameter, managed.parameter.grad)]
        self._kept = {id(tensor): tensor for tensor in kept if tensor is not None}

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if id(tensor) in self._kept else self._convert(tensor)


def hook_conversions(modules: Iterable[torch.nn.Module], hooked: Hooked) -> Iterator[Conversions]:
    """Tell `hooked` of conversions of `modules`, one by one, leaving out any that has another `_apply`."""
    for module in modules:
        found = vars(module).get("_apply")
        of_class = getattr(found, "__func__", None) is type(module)._apply
        if found is None or of_class or (isinstance(found, Conversions) and found.is_over()):
            module._apply = Conversions(module, hooked)  # type: ignore[method-assign]
            yield vars(module)["_apply"]


def _none() -> None:
    return None


# ---- gradients -------------------------------------------------------------------------------------------------------


def order_hooks(sink: GradientSink, parameter: torch.Tensor) -> list[Any]:
    """The user's hooks for what arrives at `parameter` find all gradients at home, its own too: that is taken away by
    `BeforeArrival`, behind them. Returns the handle of a hook that is new, if one is."""
    hooks: Any = parameter._backward_hooks
    own = next(key for key, hook in hooks.items() if isinstance(hook, BeforeArrival) and hook.is_of(sink))
    others = [(key, hook) for key, hook in hooks.items() if key != own and not isinstance(hook, _Arrive)]
    made = [] if len(others) + 1 < len(hooks) else [parameter.register_hook(_Arrive(sink, parameter))]
    for key, hook in (*others, (own, hooks[own])):
        del hooks[key]
        hooks[key] = hook
    return made


class BeforeArrival:
    """Tensor hook: runs before autograd accumulates."""

    __slots__ = ("_key", "_sink")
    __torch_unserialize__ = True  # torch warns of hooks that are lost on pickling; this one is meant to be

    def __init__(self, sink: GradientSink, key: int) -> None:
        self._sink, self._key = weakref.ref(sink), key

    def is_of(self, sink: GradientSink) -> bool:
        """Whether it tells `sink`."""
        return self._sink() is sink

    @opaque
    def __call__(self, grad: torch.Tensor) -> None:
        sink = self._sink()
        bindings = None if sink is None else sink.runtime.bindings
        if sink is not None and bindings is not None and self._key in bindings.by_id:
            managed = bindings.by_id[self._key]
            if bindings.resting or not (sink.is_simple and sink.runtime.in_backward):
                self._tell(sink, managed)
                return
            parameter = managed.parameter  # as `_tell`, where nothing calls Python: an interrupt finds all or nothing
            if type(parameter) is managed.watched_kind:
                sink.sent_home += (managed,)
                parameter.__class__ = managed.kind
            if parameter.grad is not None or managed in sink.taken:
                self._tell(sink, managed)
            else:
                sink.taken[managed] = None

    @called_by_autograd
    def _tell(self, sink: GradientSink, managed: ManagedParameter) -> None:
        if not sink.runtime.in_backward:
            sink.segments.on_backward()
        sink.before(managed)


class _Arrive:
    """Tensor hook, before those of the user, which may read gradients."""

    __torch_unserialize__ = True

    def __init__(self, sink: GradientSink, parameter: torch.Tensor) -> None:
        self._sink, self._key = weakref.ref(sink), id(parameter)

    @called_by_autograd
    def __call__(self, grad: torch.Tensor) -> None:
        sink = self._sink()
        if sink is not None:
            managed = sink.runtime.bindings.by_id[self._key]
            sink.runtime.uses.read_at_home(managed)
            sink.send_home(managed)
            sink.arrive()


class AfterArrival:
    """Post-accumulate hook: takes what arrived."""

    __slots__ = ("_key", "_sink")

    def __init__(self, sink: GradientSink, key: int) -> None:
        self._sink, self._key = weakref.ref(sink), key

    @HELD_BACK.covers
    @opaque
    def __call__(self, parameter: torch.Tensor) -> None:
        sink = self._sink()
        by_id = {} if sink is None else sink.runtime.bindings.by_id
        if sink is not None and self._key in by_id:
            compiler = set_compiler(None)
            try:
                sink.after(by_id[self._key])
            finally:
                if HELD_BACK.came:
                    HELD_BACK.leave()
                if compiler is not None:
                    set_compiler(compiler)


HOOKS = ArrivalHooks(BeforeArrival, AfterArrival, order_hooks)
