"""While a module is built: parameters go to a mapped file as they are registered, so they never fill host memory.

The file is only a place to wait in; `construction` moves what is in it to its homes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

import torch
from torch.nn.modules.module import register_module_parameter_registration_hook

from hetmem.config import Limits
from hetmem.memory.nvme import NvmeStore
from hetmem.runtime.bindings import is_shared
from hetmem.runtime.construction import is_lazy

_state = threading.local()


@contextmanager
def as_written() -> Iterator[None]:
    """On this thread classes are built without what `hetmem.managed` adds to them: for a plan of one."""
    before, _state.as_written = getattr(_state, "as_written", False), True
    try:
        yield
    finally:
        _state.as_written = before


class Building:
    """A context in which every parameter that any module registers moves to NVMe, if `limits` has it.

    A parameter is moved when it is registered, before it is initialised: what `reset_parameters` writes goes to the
    file. Without an NVMe directory the module is built in ordinary memory. Reentrant use is an error of the caller.
    """

    def __init__(self, limits: Limits) -> None:
        self._store: NvmeStore | None = None
        self._limits = limits

    @staticmethod
    def active() -> bool:
        """Whether a module is being built on this thread, or whatever is built is to be as it was written."""
        return getattr(_state, "building", None) is not None or getattr(_state, "as_written", False)

    def __enter__(self) -> Building:
        if self._limits.nvme_directories:
            self._store = NvmeStore(list(self._limits.nvme_directories), self._limits.nvme_bytes, threads=1)
        self._handle = register_module_parameter_registration_hook(self._registered)
        _state.building = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _state.building = None
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
