"""Hooks of autograd for what arrives at a parameter, among those of the user.

They tell a sink of gradients, which they do not hold: a parameter must not keep its model alive.
"""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch

from hetmem.engine.runtime import Runtime
from hetmem.intercept.dynamo import called_by_autograd
from hetmem.intercept.phases import Segments
from hetmem.memory.chunk import ManagedParameter


class Sink(Protocol):
    """Who is told."""

    runtime: Runtime
    segments: Segments

    def before(self, managed: ManagedParameter) -> None:
        """A gradient of `managed` is about to be accumulated."""

    def after(self, managed: ManagedParameter) -> None:
        """It was."""

    def arrive(self) -> None:
        """All gradients have to be at home."""

    def send_home(self, managed: ManagedParameter) -> None:
        """Hooks of the user run at `managed`."""


def order_hooks(sink: Sink, parameter: torch.Tensor, own: int) -> list[Any]:
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

    def __init__(self, sink: Sink, managed: ManagedParameter) -> None:
        self._sink, self._key = weakref.ref(sink), id(managed.parameter)

    @called_by_autograd
    def __call__(self, grad: torch.Tensor) -> None:
        sink = self._sink()
        managed = None if sink is None else sink.runtime.bindings.by_id.get(self._key)
        if sink is not None and managed is not None:
            if not sink.segments.in_backward:
                sink.segments.on_backward()
            sink.before(managed)


class _Arrive:
    """Tensor hook, before those of the user, which may read gradients."""

    __torch_unserialize__ = True

    def __init__(self, sink: Sink, parameter: torch.Tensor) -> None:
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

    def __init__(self, sink: Sink, managed: ManagedParameter) -> None:
        self._sink, self._key = weakref.ref(sink), id(managed.parameter)

    @called_by_autograd
    def __call__(self, parameter: torch.Tensor) -> None:
        sink = self._sink()
        managed = None if sink is None else sink.runtime.bindings.by_id.get(self._key)
        if sink is not None and managed is not None:
            sink.after(managed)
