"""Hooks of a module that survive pickling and copying, as hooks of nothing."""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch

from hetmem.memory.interrupts import HELD_BACK
from hetmem.runtime.compiled import Tracing, opaque, skipped


class Hooked(Protocol):
    """Who is told."""

    def before_forward(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]] | None:
        """`module` is about to run. Returns what to call it with, if not this."""

    def after_forward(self, module: torch.nn.Module, output: Any) -> None:
        """`module` has returned or raised."""

    def before_state_dict(self) -> None:
        """Weights are to be read, or written over."""

    def before_assignment(self) -> None:
        """Other parameters are to take the place of the module's."""


class BeforeForward:
    """A forward pre-hook. Code that is compiled with it within goes by what `tracing` says, see `compiled`."""

    def __init__(self, hooked: Hooked | None = None, tracing: Tracing | None = None) -> None:
        self._hooked = _nothing if hooked is None else weakref.ref(hooked)
        self._tracing = tracing or Tracing()

    @skipped
    def __call__(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]] | None:
        if self._tracing.region and torch.compiler.is_compiling():
            return None
        return self._tell(module, args, kwargs)

    @opaque
    def _tell(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]] | None:
        hooked = self._hooked()
        if hooked is not None:
            return hooked.before_forward(module, args, kwargs)
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), ())


class AfterForward:
    """The forward hook beside it."""

    def __init__(self, hooked: Hooked | None = None, tracing: Tracing | None = None) -> None:
        self._hooked = _nothing if hooked is None else weakref.ref(hooked)
        self._tracing = tracing or Tracing()

    @skipped
    def __call__(self, module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not (self._tracing.region and torch.compiler.is_compiling()):
            self._tell(module, output)

    @opaque
    def _tell(self, module: torch.nn.Module, output: Any) -> None:
        hooked = self._hooked()
        if hooked is not None:
            hooked.after_forward(module, output)

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), ())


class BeforeStateDict:
    """A pre-hook of state dicts, and of loading them, beside these."""

    def __init__(self, hooked: Hooked | None = None) -> None:
        self._hooked = _nothing if hooked is None else weakref.ref(hooked)

    @HELD_BACK
    def __call__(self, *args: Any) -> None:
        hooked = self._hooked()
        if hooked is not None:
            hooked.before_state_dict()
            if len(args) > 3 and args[2].get("assign_to_params_buffers"):  # of what is loaded
                hooked.before_assignment()

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), ())


def _nothing() -> None:
    return None
