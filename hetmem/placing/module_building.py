"""While a module is built, its parameters go to memory of the tiers, so they never fill host memory.

`filling` makes homes of it when all are there.

Note "ended twice": an interrupt may come before the first instruction of what ends something, also of a `with`. So that
is tried twice: where the first one was not begun the second one does it, and otherwise there is nothing left to do.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.nn.modules.module import register_module_parameter_registration_hook

from hetmem.base.config import Limits
from hetmem.engine.param_views import is_shared
from hetmem.memory.device import Device
from hetmem.memory.interrupts import HELD_BACK
from hetmem.placing.build import check_directories, host_bytes
from hetmem.placing.filling import BuildingMemory
from hetmem.torch_private import is_traceable_wrapper_subclass

_state = threading.local()
T = TypeVar("T")


def as_written(build: Callable[[], T]) -> T:
    """`build()`, where on this thread classes are without what `hetmem.managed` adds to them: for a plan of one."""
    before = getattr(_state, "as_written", False)
    try:  # see note "ended twice"
        try:
            _state.as_written = True
            return build()
        finally:
            _state.as_written = before
    finally:
        _state.as_written = before


def build_within(limits: Limits, device: Device, build: Callable[[], None]) -> BuildingMemory:
    """`build()`, while every parameter that any module registers moves to memory of the tiers, which is returned."""
    building = Building(limits, device)
    try:  # see note "ended twice"
        try:
            building.begin()
            build()
            building.place_pending()
        finally:
            building.end()
    except BaseException:
        building.memory.close()
        raise
    finally:
        building.end()
    return building.memory


class Building:
    """Moves every parameter that any module registers, on the thread that has begun it, to memory of the tiers.

    A parameter moves when another module registers its first one, and at the end: its own module has initialised it by
    then, mostly, and what writes to it later writes to its place. Reentrant use is an error of the caller.
    """

    def __init__(self, limits: Limits, device: Device) -> None:
        self._handle: Any = None
        check_directories(limits)
        given = [size for size in (limits.device_bytes, device.memory_bytes) if size is not None]
        self.memory = BuildingMemory(limits, host_bytes(limits), min(given, default=None))
        node = getattr(device, "node", None)  # of a GPU
        if node is not None:
            self.memory.mapping.prefer_node(node)
        self._pending: list[weakref.ref[torch.nn.Parameter]] = []
        self._module: weakref.ref[torch.nn.Module] | None = None
        """Which has registered what is pending."""

    @staticmethod
    def active() -> bool:
        """Whether a module is being built on this thread, or whatever is built is to be as it was written."""
        return getattr(_state, "building", None) is not None or getattr(_state, "as_written", False)

    @HELD_BACK
    def begin(self) -> None:
        """From here on."""
        self._handle = register_module_parameter_registration_hook(self._registered)
        _state.building = self

    @HELD_BACK
    def end(self) -> None:
        """Up to here, if it was begun and has not ended yet."""
        _state.building = None
        if self._handle is not None:
            self._handle.remove()

    def _registered(self, module: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None) -> None:
        if parameter is None or getattr(_state, "building", None) is not self:
            return
        if self._module is None or self._module() is not module:
            self.place_pending()
            self._module = weakref.ref(module)
        self._pending.append(weakref.ref(parameter))

    def place_pending(self) -> None:
        """Move what is pending."""
        pending, self._pending = self._pending, []
        for reference in pending:
            parameter = reference()
            if parameter is not None and _is_placed(parameter):
                self.memory.place(parameter)


def _is_placed(parameter: torch.nn.Parameter) -> bool:
    """Whether `parameter` can lie in memory of the tiers. Of two that are one in memory none does: `collect` sees what
    they are."""
    return (
        parameter.device.type == "cpu"
        and not torch.nn.parameter.is_lazy(parameter)
        and not is_traceable_wrapper_subclass(parameter)
        and parameter.layout is torch.strided
        and parameter.numel() > 0
        and not parameter.is_inference()
        and not is_shared(parameter)
        and torch.ops.aten.is_non_overlapping_and_dense.default(parameter)
    )
