"""Hooks that hetmem registers with modules and with autograd, for gradients, beside those of the user.

A copy of the module, and a pickled one, has no-ops of Python's and torch's own in their place, so the file can be read
without hetmem. Hooks of gradients refer to a sink weakly: a parameter must not keep its model alive.
"""

from __future__ import annotations

import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from itertools import compress, product
from operator import contains, getitem, setitem
from types import FrameType
from typing import Any

import torch

from hetmem.engine.gradients import GradientSink
from hetmem.engine.param_views import run_through
from hetmem.engine.runtime import Section
from hetmem.engine.working_gradients import ArrivalHooks
from hetmem.errors import DeviceOutOfMemoryError, ManageError
from hetmem.intercept.diagnostics import ScriptError, refuse_conversion
from hetmem.intercept.dynamo import Tracing, called_by_autograd, opaque, set_compiler, skipped, told
from hetmem.intercept.forward_scope import outermost_of_modules, running
from hetmem.memory.chunk import ManagedParameter
from hetmem.memory.interrupts import HELD_BACK, HERE

Convert = Callable[[torch.Tensor], torch.Tensor]

Hooked = Any
"""The `Interception` that a hook calls, held weakly; it imports this module."""


class _OfThisModule:
    """A hook of one module that a copy of the module does not get."""

    def __getattr__(self, name: str) -> Any:
        if name == "__name__":  # `torch.jit.script` is the one that needs a name
            raise ScriptError()
        raise AttributeError(name)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")  # takes anything, and returns None


class BeforeForward(_OfThisModule):
    """The forward pre-hook. Compiled code that includes it reads `tracing`, see `dynamo`."""

    def __init__(self, hooked: Hooked, tracing: Tracing) -> None:
        self._hooked, self._tracing = weakref.ref(hooked), tracing

    @skipped
    def __call__(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]] | None:
        tracing = self._tracing
        where = tracing.where
        if tracing.quiet and tracing.quiet == HERE.ident and where is not None and where() is not module:
            if HELD_BACK.came:
                HELD_BACK.leave()
            return None  # if it is the same module, an interrupt has ended that forward
        if kwargs is None:  # torch's quantization has moved the hook into another module
            return None
        if tracing.region and torch.compiler.is_compiling():
            return None
        hooked = self._hooked()
        try:
            return None if hooked is None else hooked.before_forward(module, args, kwargs)
        except DeviceOutOfMemoryError as error:
            raise told(error) from None


class AfterForward(_OfThisModule):
    """The forward hook, called also after an error."""

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
    """Takes hetmem's forward hooks off parts of a model while their weights are where operators find them.

    Torch needs three times as many Python calls for a module with hooks. Each forward that generates a token takes them
    off and puts them back, so both run in C.
    """

    def __init__(self, names: Iterable[dict[str, Any]], numbers: Iterable[int]) -> None:
        """`names`: the `__dict__` of each part; `numbers`: of the two hooks of each."""
        each = [*product(names, _HOOKS)]
        self._where, self._names = [where for where, _ in each], [name for _, name in each]
        """The `__dict__` of each part, and the name of a dictionary of hooks there."""
        self._numbers = [*numbers]
        self._off: list[OrderedDict[int, Any]] = []
        """The dictionaries whose hooks were taken off."""
        self._hooks: list[Any] = []

    def take_off(self) -> bool:
        """Take the hooks off every part that has no others, until `put_back`. Returns whether none has: parts that also
        have hooks of others keep ours for good."""
        if self._off:
            return True
        found: list[Any] = [*map(getitem, self._where, self._names)]
        all_alone = {*map(len, found)} <= {1} and False not in map(contains, found, self._numbers)
        if not all_alone:
            alone = [len(of) == 1 and number in of for of, number in zip(found, self._numbers, strict=True)]
            lists = self._where, self._names, self._numbers
            self._where, self._names, self._numbers = ([*compress(of, alone)] for of in lists)
            found = [*map(getitem, self._where, self._names)]
        self._hooks, self._off = [*map(getitem, found, self._numbers)], found
        run_through(map(OrderedDict.clear, found))
        return all_alone

    def put_back(self) -> None:
        """Put the hooks back, before any registered meanwhile."""
        off, self._off = self._off, []
        added = True in map(bool, off)
        run_through(map(setitem, off, self._numbers, self._hooks))
        for hooks, number in zip(off, self._numbers, strict=True) if added else ():
            hooks.move_to_end(number, last=False)


_HOOKS = ("_forward_pre_hooks", "_forward_hooks")


class BeforeStateDict(_OfThisModule):
    """The pre-hook of `state_dict` and `load_state_dict`: waits for updates, and takes the turn. Raises `ManageError`
    within compute, where torch would get copies: perhaps in 16 bits, and all of them at once."""

    def __init__(self, hooked: Hooked) -> None:
        self._hooked = weakref.ref(hooked)
        self._reading: Section | None = None

    @HELD_BACK
    def __call__(self, *args: Any) -> None:
        hooked = self._hooked()
        if hooked is not None:
            self._take_turn(hooked, sys._getframe(2))  # frame 1 is of `HELD_BACK`
            hooked.settle_for_reading()
            if hooked.runtime.bindings.away and hooked.computes():
                raise ManageError(
                    "state_dict() and load_state_dict() within a forward or a backward of the model, where its weights "
                    "are copies on the device: call them before or after it"
                )
            if len(args) > 3 and args[2].get("assign_to_params_buffers"):  # `load_state_dict` passes metadata
                raise ManageError(
                    "load_state_dict(assign=True) would put other parameters in the place of those that hetmem "
                    "manages: leave assign=True out, which copies the values, or call hetmem.release(model) first"
                )

    def _take_turn(self, hooked: Hooked, by: FrameType) -> None:
        """Take the model's turn until the method of a module returns that calls the frame `by`."""
        turn, reading = hooked.runtime.turn, self._reading
        if reading is None or not turn.is_mine() or reading.is_over():
            if reading is not None:
                turn.give(reading)
            self._reading = turn.take("a state dict", running(outermost_of_modules(by)), hooked.gradients.is_whole)


class Conversions:
    """Replaces `_apply` of one module, which `to`, `cuda`, `half`, `share_memory` and the like call. A copy of the
    module has the `_apply` of its class."""

    __slots__ = ("_hooked", "_module")

    def __init__(self, module: torch.nn.Module, hooked: Hooked | None) -> None:
        self._module = weakref.ref(module)
        self._hooked = _none if hooked is None else weakref.ref(hooked)

    def __call__(self, convert: Convert, recurse: bool = True) -> torch.nn.Module:
        module, hooked = self._module(), self._hooked()
        assert module is not None, "a copy of a managed module was made without its class's knowing"
        if hooked is not None and not (isinstance(convert, _ExceptManaged) and convert.hooked is hooked):
            convert = _ExceptManaged(convert, hooked, module.parameters(recurse))  # submodules get the same one
        apply: Any = type(module)._apply
        converted: torch.nn.Module = apply(module, convert) if recurse else apply(module, convert, recurse=False)
        return converted

    def is_over(self) -> bool:
        """Return whether no model is hooked any more: the module is a copy of a managed one."""
        return self._hooked() is None

    def remove(self) -> None:
        """Restore `_apply` of the module's class."""
        module = self._module()
        if module is not None and vars(module).get("_apply") is self:
            del module._apply

    def __deepcopy__(self, memo: dict[int, Any]) -> Conversions:
        return type(self)(memo[id(self._module())], None)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._module(), "_apply")  # the class's: the copy has no attributes of its own yet


class _ExceptManaged:
    """Applies `convert` to all tensors but those of a module's `parameters` that `hooked` manages, and their gradients.
    Raises `ManageError` where these would get another dtype or other strides."""

    def __init__(self, convert: Convert, hooked: Hooked, parameters: Iterable[torch.Tensor]) -> None:
        self.hooked, self._convert = hooked, convert
        runtime, computes, found = hooked.runtime, hooked.is_computing(), list[ManagedParameter]()
        found += filter(None, map(runtime.bindings.by_id.get, map(id, parameters)))
        mixed, device = runtime.memory.mixed_precision is not None, runtime.memory.device.torch_device
        with runtime.unwatched(), torch.no_grad():
            refuse_conversion(found, convert, device, computes=computes, mixed=mixed)
            exempt = [each for managed in found for each in (managed.parameter, managed.parameter.grad)]
        self._exempt = {id(tensor): tensor for tensor in exempt if tensor is not None}

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if id(tensor) in self._exempt else self._convert(tensor)


def hook_conversions(modules: Iterable[torch.nn.Module], hooked: Hooked) -> Iterator[Conversions]:
    """Replace `_apply` of each of `modules` by a `Conversions`, unless it was replaced by the program."""
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
    """Order the tensor hooks of `parameter`: `_BeforeUserHooks` first, then the user's, which find all gradients at
    home, then `BeforeAccumulation`, which takes `p.grad` away. Returns the handle of a new hook, if there is one."""
    hooks: Any = parameter._backward_hooks
    own = next(key for key, hook in hooks.items() if isinstance(hook, BeforeAccumulation) and hook.is_of(sink))
    others = [(key, hook) for key, hook in hooks.items() if key != own and not isinstance(hook, _BeforeUserHooks)]
    made = [] if len(others) + 1 < len(hooks) else [parameter.register_hook(_BeforeUserHooks(sink, parameter))]
    for key, hook in (*others, (own, hooks[own])):
        del hooks[key]
        hooks[key] = hook
    return made


class BeforeAccumulation:
    """Tensor hook that takes `p.grad` away before autograd accumulates."""

    __slots__ = ("_key", "_sink")
    __torch_unserialize__ = True  # torch warns of hooks lost in pickling; this one is lost on purpose
    hetmem_own = True

    def __init__(self, sink: GradientSink, key: int) -> None:
        self._sink, self._key = weakref.ref(sink), key

    def is_of(self, sink: GradientSink) -> bool:
        """Return whether this hook calls `sink`."""
        return self._sink() is sink

    @called_by_autograd
    def __call__(self, grad: torch.Tensor) -> None:
        sink = self._sink()
        managed = None if sink is None else sink.runtime.bindings.by_id.get(self._key)
        if sink is not None and managed is not None:
            if not sink.runtime.in_backward:
                sink.segments.on_backward()
            sink.before(managed)


class _BeforeUserHooks:
    """Tensor hook that waits for gradients in flight, before the hooks of the user, which may read them."""

    __torch_unserialize__ = True
    hetmem_own = True

    def __init__(self, sink: GradientSink, parameter: torch.Tensor) -> None:
        self._sink, self._key = weakref.ref(sink), id(parameter)

    @called_by_autograd
    def __call__(self, grad: torch.Tensor) -> None:
        sink = self._sink()
        if sink is not None:
            managed = sink.runtime.bindings.by_id[self._key]
            sink.runtime.uses.read_at_home(managed)
            sink.send_home(managed)
            sink.wait_until_home()


class AfterAccumulation:
    """Post-accumulate hook that sends the gradient home."""

    __slots__ = ("_key", "_sink")
    hetmem_own = True

    def __init__(self, sink: GradientSink, key: int) -> None:
        self._sink, self._key = weakref.ref(sink), key

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


class WorkingGradient:
    """Post-accumulate hook of a working weight that sends the gradient home."""

    __slots__ = ("_managed", "_sink")
    __torch_unserialize__ = True

    def __init__(self, sink: GradientSink, managed: ManagedParameter) -> None:
        self._sink, self._managed = weakref.ref(sink), weakref.ref(managed)

    @opaque
    def __call__(self, weight: torch.Tensor) -> None:
        sink, managed = self._sink(), self._managed()
        if sink is not None and managed is not None:
            compiler = set_compiler(None)
            try:
                sink.working.arrived(managed, weight)
            finally:
                if HELD_BACK.came:
                    HELD_BACK.leave()
                if compiler is not None:
                    set_compiler(compiler)


HOOKS = ArrivalHooks(BeforeAccumulation, AfterAccumulation, order_hooks, WorkingGradient)
