"""While a module is built: parameters go to a mapped file as they are registered, so they never fill host memory.

The file is only a place to wait in; `engine.build` moves what is in it to its homes.

Note "ended twice": an interrupt may come before the first instruction of what ends something, also of a `with`. So that
is tried twice: where the first one was not begun the second one does it, and otherwise there is nothing left to do.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.nn.modules.module import register_module_parameter_registration_hook

from hetmem.base.config import Limits
from hetmem.engine.build import is_lazy
from hetmem.engine.param_views import is_shared
from hetmem.memory.interrupts import HELD_BACK
from hetmem.memory.nvme_store import NvmeStore

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


def build_within(limits: Limits, build: Callable[[], None]) -> None:
    """`build()`, while every parameter that any module registers moves to NVMe, if `limits` has it."""
    building = Building(limits)
    try:  # see note "ended twice"
        try:
            building.begin()
            build()
        finally:
            building.end()
    finally:
        building.end()


class Building:
    """Moves every parameter that any module registers, on the thread that has begun it, to NVMe if `limits` has it.

    A parameter is moved when it is registered, before it is initialised: what `reset_parameters` writes goes to the
    file. Without an NVMe directory the module is built in ordinary memory. Reentrant use is an error of the caller.
    """

    def __init__(self, limits: Limits) -> None:
        self._store: NvmeStore | None = None
        self._handle: Any = None
        self._limits = limits

    @staticmethod
    def active() -> bool:
        """Whether a module is being built on this thread, or whatever is built is to be as it was written."""
        return getattr(_state, "building", None) is not None or getattr(_state, "as_written", False)

    @HELD_BACK
    def begin(self) -> None:
        """From here on."""
        if self._limits.nvme_directories:
            self._store = NvmeStore(list(self._limits.nvme_directories), self._limits.nvme_bytes, threads=1)
        self._handle = register_module_parameter_registration_hook(self._registered)
        _state.building = self

    @HELD_BACK
    def end(self) -> None:
        """Up to here, if it was begun and has not ended yet."""
        _state.building = None
        if self._handle is not None:
            self._handle.remove()
        if self._store is not None:
            self._store.close()  # the mappings live on as long as parameters are in them

    def _registered(self, module: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None) -> None:
        if (
            self._store is None
            or parameter is None
            or getattr(_state, "building", None) is not self
            or parameter.device.type != "cpu"
            or parameter.numel() == 0
            or is_lazy(parameter)
            or is_shared(parameter)  # of two that are one in memory none goes elsewhere: `collect` sees what they are
            or not torch.ops.aten.is_non_overlapping_and_dense.default(parameter)
        ):
            return
        nbytes = parameter.numel() * parameter.itemsize
        memory = self._store.view(self._store.reserve(nbytes))[:nbytes]
        flat = torch.frombuffer(memory, dtype=parameter.dtype)
        with torch.no_grad():
            place = flat.as_strided(parameter.shape, parameter.stride())
            place.copy_(parameter)
            parameter.data = place
