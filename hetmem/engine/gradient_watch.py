"""Sees what the program does with gradients: uses of those in flight, which wait, and writes, also where no version
counts them.

Writes matter to gradients of which hetmem has a copy that a write makes stale: in staging, or in an update that has
read them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hetmem import torch_private
from hetmem.engine.param_views import hands_out, is_in_place, is_shared
from hetmem.memory.chunk import Chunk, ManagedParameter

_ORDINARY: Any = torch.Tensor
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By bytes of an element."""
_TILE = 1 << 17  # elements, which stay in a cache


class WatchedGradient(torch.Tensor):
    """The class of a gradient while the program has it, and hetmem has a staged copy of it or an update has used it.

    The first function of torch that may write to it, or that hands out its memory, makes it an ordinary tensor and is
    noted in the tensor's `__dict__`: for a gradient that was used with the checksum of its values before.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        met = [leaf for leaf in torch_private.tree_leaves((args, kwargs)) if type(leaf) is cls]
        writes = is_in_place(func) or "out" in kwargs or getattr(func, "__name__", "") == "__set__"
        for leaf in met:
            leaf.__class__ = _ORDINARY
            if writes:
                note_access(leaf)
        try:
            result = func(*args, **kwargs)
            for leaf in () if writes else met:
                if hands_out(leaf, func, result):
                    note_access(leaf)
            return result
        finally:
            for leaf in met:
                if "hetmem_accessed" not in vars(leaf):
                    leaf.__class__ = cls


class GradientInFlight(torch.Tensor):
    """The class of a gradient while its home may lack its value, as hooks of a backward may find it: a copy of it is in
    flight, or in staging and not written to NVMe. The first function of torch that gets one waits for all.

    Each model has a subclass of its own (`Flights`).
    """

    hetmem_arrive: Callable[[], Callable[[], None] | None]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (arrive := cls.hetmem_arrive()) is not None:
            arrive()
        for leaf in torch_private.tree_leaves((args, kwargs or {})):
            if type(leaf) is cls:  # its model is gone, or it was none of those awaited
                leaf.__class__ = _ORDINARY
        return func(*args, **(kwargs or {}))


class Flights:
    """The gradients of one model whose homes may lack their values, which the program waits for."""

    def __init__(self, arrive: Callable[[], Callable[[], None] | None]) -> None:
        """`arrive`: a weak reference to the function that waits for all of them, and then calls `end`."""
        name, fields = GradientInFlight.__name__, {"hetmem_arrive": arrive, "__module__": __name__}
        self.kind: Any = type(name, (GradientInFlight,), fields)
        """Their class."""
        self._begun: list[ManagedParameter] = []

    def begin(self, managed: ManagedParameter) -> None:
        """Have the program wait when it uses the gradient's home of `managed`, if there is one."""
        home: Any = managed.grad_home
        if home is not None:
            home.__class__ = self.kind
            self._begun += (managed,)

    @staticmethod
    def pause(managed: ManagedParameter) -> None:
        """Make the gradient's home of `managed` an ordinary tensor, until `begin` or `end`."""
        home: Any = managed.grad_home
        home.__class__ = _ORDINARY

    def end(self) -> None:
        """Make all of them ordinary tensors; those that an update has read are watched."""
        begun, self._begun = self._begun, []
        for managed in begun:
            home: Any = managed.grad_home
            if type(home) is self.kind:
                home.__class__ = _ORDINARY
                if "hetmem_used" in vars(home):
                    watch_gradient(home)


def note_access(gradient: Any) -> None:
    """Note, unless that is noted, that the program may write to `gradient`, which has all its values at home."""
    known = vars(gradient)
    if "hetmem_accessed" not in known:
        if type(gradient) is WatchedGradient:
            gradient.__class__ = _ORDINARY
        known["hetmem_accessed"] = _checksum(gradient) if "hetmem_used" in known else None


def watch_gradient(gradient: Any, *, used: bool = False) -> None:
    """Watch `gradient`, which the program may write to from now on; `used`: an update has read it."""
    if used:
        vars(gradient)["hetmem_used"] = True
    if type(gradient) is torch.Tensor and "hetmem_accessed" not in vars(gradient):
        gradient.__class__ = WatchedGradient


def end_watch(gradient: Any) -> None:
    """End `watch_gradient`."""
    if type(gradient) is WatchedGradient:
        gradient.__class__ = _ORDINARY
    for name in ("hetmem_used", "hetmem_accessed"):
        vars(gradient).pop(name, None)


def is_edited(gradient: torch.Tensor, version: int) -> bool:
    """Return whether the program has written to `gradient`, an update's, since it had that `version`."""
    with torch_private.NoFunctionsOfSubclasses():
        before = vars(gradient).get("hetmem_accessed")
        return gradient._version != version or (before is not None and before != _checksum(gradient))


def _checksum(gradient: torch.Tensor) -> int:
    """Return a number that hardly any edit of `gradient` leaves as it is; one in 2**64."""
    total = 0
    with torch_private.NoFunctions(), torch_private.NoDispatch(), torch.no_grad():
        values = torch.view_as_real(gradient) if gradient.is_complex() else gradient
        words = values.contiguous().view(-1).view(INTEGERS[values.itemsize])
        for tile in words.split(_TILE):
            wide = tile.to(torch.int64)
            total = (total * 0x9E3779B97F4A7C15 + int(wide.sum()) + 3 * int((wide * wide).sum())) % (1 << 64)
    return total


def watch_gradients(chunk: Chunk) -> None:
    """Watch the homes of gradients of `chunk`."""
    for managed in chunk.parameters:
        if managed.grad_home is not None:
            managed.grad_version = managed.grad_home._version
            watch_gradient(managed.grad_home)
            if is_shared(managed.grad_home):
                note_access(managed.grad_home)


def end_watch_of(chunk: Chunk) -> bool:
    """End `watch_gradients`, but of what an update has used; return whether the program may have written to any."""
    accessed = False
    for managed in chunk.parameters:
        if managed.grad_home is not None:
            known = vars(managed.grad_home)
            accessed |= "hetmem_accessed" in known or managed.grad_home._version != managed.grad_version
            if "hetmem_used" not in known:
                end_watch(managed.grad_home)
    return accessed
