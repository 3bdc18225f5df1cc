"""Hooks of autograd for what arrives at a parameter, among those of the user.

They tell a sink of gradients, which they do not hold: a parameter must not keep its model alive.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from hetmem.engine.gradients import ArrivalHooks, GradientSink
from hetmem.intercept.dynamo import called_by_autograd, opaque, set_compiler
from hetmem.memory.chunk import ManagedParameter
from hetmem.memory.interrupts import HELD_BACK


def order_hooks(sink: GradientSink, parameter: torch.Tensor, own: int) -> list[Any]:
    """The user's hooks for what arrives at `parameter` find all gradients at home, its own too: that is taken away by
    the hook with the number `own`, behind them. Returns the handle of a hook that is new, if one is."""
    hooks: Any = parameter._backward_hooks
    others = [(key, hook) for key, hook in hooks.items() if key != own and not isinstance(hook, _Arrive)]
    made = [] if len(others) + 1 < len(hooks) else [parameter.register_hook(_Arrive(sink, parameter))]
    for key, hook in (*others, (own, hooks[own])):
        del hooks[key]
        hooks[key] = hook
    return made


class BeforeArrival:
    """Tensor hook: runs before autograd accumulates."""

    __torch_unserialize__ = True  # torch warns of hooks that are lost on pickling; this one is meant to be

    def __init__(self, sink: GradientSink, managed: ManagedParameter) -> None:
        self._sink, self._key = weakref.ref(sink), id(managed.parameter)

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
            if type(parameter) is managed.unbound_kind:
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
            sink.runtime.read_at_home(managed)
            sink.send_home(managed)
            sink.arrive()


class AfterArrival:
    """Post-accumulate hook: takes what arrived."""

    def __init__(self, sink: GradientSink, managed: ManagedParameter) -> None:
        self._sink, self._key = weakref.ref(sink), id(managed.parameter)

    @opaque
    def __call__(self, parameter: torch.Tensor) -> None:
        sink = self._sink()
        by_id = {} if sink is None else sink.runtime.bindings.by_id
        if sink is not None and self._key in by_id:
            compiler = set_compiler(None)
            try:
                with HELD_BACK:
                    sink.after(by_id[self._key])
            finally:
                if compiler is not None:
                    set_compiler(compiler)


HOOKS = ArrivalHooks(BeforeArrival, AfterArrival, order_hooks)
