"""Builds modules in memory of the tiers, so that their parameters never fill host memory.

Note "ended twice": an interrupt may come before the first instruction of code that ends something, also of a `with`. So
ending is tried twice: the second call does it if the first did not begin, and otherwise has nothing left to do.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch
from torch.nn.modules.module import register_module_parameter_registration_hook

from hetmem.base.config import Limits
from hetmem.base.units import format_size, round_down, round_up
from hetmem.engine.homes import Memory
from hetmem.engine.param_views import is_shared, storage_references
from hetmem.errors import BudgetError
from hetmem.memory.chunk import Chunk, Role, address_of, elements, give_away
from hetmem.memory.device import Device
from hetmem.memory.heap import Freed, untouched
from hetmem.memory.host_memory import PAGE_BYTES, Mapping, free_host_bytes
from hetmem.memory.interrupts import HELD_BACK
from hetmem.memory.nvme_store import NvmeStore
from hetmem.torch_private import is_traceable_wrapper_subclass

_ALIGNMENT_BYTES = 512
_NOWHERE = range(0)
HOST_SHARE = 0.6
"""Share of the free memory that is used without a budget. The rest is for the system and the program."""

_state = threading.local()
T = TypeVar("T")


class BuildingMemory:
    """The memory of the tiers that a module is built in: host memory first, then NVMe, then ordinary memory for
    parameters that will have their home on the device.

    `host_bytes`: what homes may take of host memory. `device_bytes`: the device budget, None = unknown. Without `keeps`
    it has addresses for values and forgets them, as those of another rank count.
    """

    def __init__(self, limits: Limits, host_bytes: int, device_bytes: int | None, *, keeps: bool = True) -> None:
        self._keeps = keeps
        self.host_bytes = round_down(host_bytes, PAGE_BYTES)
        self.mapping = Mapping(max(PAGE_BYTES, self.host_bytes))
        self.store: NvmeStore | None = None
        self._limits, self._device_bytes = limits, device_bytes
        self._host_used = self._beside_bytes = 0
        self._placed: list[torch.Tensor] = []
        self.freed = Freed()
        """Blocks of ordinary memory that parameters were in before, or were copied through."""
        self._files: dict[int, range] = {}
        """Addresses used in each file of the store."""

    def place(self, parameter: torch.nn.Parameter) -> None:
        """Move `parameter`, which is dense and in ordinary memory, to the tiers' memory while it has room."""
        nbytes = parameter.numel() * parameter.itemsize
        memory = self._take(nbytes)
        if memory is None:
            self._stay(nbytes)
            return
        flat = elements(memory, parameter.dtype, parameter.numel())
        if self._keeps:
            _copy_touched(address_of(memory), parameter.data_ptr(), nbytes)
        with torch.no_grad():
            parameter.data = flat.as_strided(parameter.shape, parameter.stride())
        self.freed.add(nbytes)
        self._placed.append(flat)

    def _take(self, nbytes: int) -> memoryview | None:
        start = round_up(self._host_used, _ALIGNMENT_BYTES)
        if start + nbytes <= self.host_bytes:
            self._host_used = start + nbytes
            return self.mapping.buffer(start, nbytes)
        if not self._limits.nvme_directories:
            return None
        if self.store is None:
            self.store = NvmeStore(list(self._limits.nvme_directories), self._limits.nvme_bytes)
        if self.store.reserved_bytes + round_up(nbytes, PAGE_BYTES) > self.store.capacity_bytes:
            return None
        extent = self.store.reserve(nbytes)
        memory = self.store.view(extent)
        begin = address_of(memory) - extent.offset
        self._files[extent.file] = range(begin, begin + extent.offset + extent.nbytes)
        return memory[:nbytes]

    def forget(self) -> None:
        """Free what the modules so far have written, unless their values count."""
        if not self._keeps:
            self.mapping.drop(0, self._host_used)

    def leave(self, data: torch.Tensor) -> None:
        """Free the memory of `data`, which has been copied to a home in other memory, if it is in this one."""
        if source := self.source(data):
            self.mapping.drop(source.start - self.mapping.address, len(source))

    def _stay(self, nbytes: int) -> None:
        """Count bytes that stay in ordinary memory, and refuse more than the device could hold in the end."""
        self._beside_bytes += nbytes
        if self._device_bytes is not None and self._beside_bytes > self._device_bytes:
            raise BudgetError(
                f"the parameters that are built so far fill host memory ({format_size(self.host_bytes)}) and NVMe "
                f"({format_size(self._limits.nvme_bytes)}), and {format_size(self._beside_bytes)} of them are beside, "
                f"which the device ({format_size(self._device_bytes)}) has no room for: raise Budget(host=…), or "
                f"Budget(nvme=…, nvme_dir=…)"
            )

    def hand_over(self, module: torch.nn.Module) -> None:
        """Release this memory for homes, over the parameters of `module` in it. Other tensors that share it get memory
        of their own and keep their values."""
        owned = {parameter.untyped_storage()._cdata for parameter in module.parameters()}
        for flat in self._placed:
            if storage_references(flat) > 2 + (flat.untyped_storage()._cdata in owned):
                give_away(flat)
        self._placed.clear()
        if self.store is not None:
            self.store.forget()

    def source(self, data: torch.Tensor) -> range:
        """Return the addresses of `data` if it is in this memory."""
        start = data.data_ptr()
        host = self.mapping.address
        if host <= start < host + self._host_used or self.on_disk(start):
            return range(start, start + data.numel() * data.itemsize)
        return _NOWHERE

    def on_disk(self, address: int) -> bool:
        """Return whether `address` is in the store."""
        return any(address in known for known in self._files.values())

    def clear(self, memory: Memory) -> None:
        """Zero the gaps in the homes in this memory, and release the memory that no home uses."""
        for chunk in memory.chunks:
            for role, home in chunk.homes.items():
                if isinstance(home.memory, memoryview):
                    _clear_gaps(chunk, role, home.memory)
        pool = memory.host_pool
        used = min(round_up(pool.reserved_bytes, PAGE_BYTES), self.mapping.nbytes)
        self.mapping.shorten(max(PAGE_BYTES, pool.capacity_bytes), used)
        if self.store is not None and self.store is memory.store:
            self.store.trim()
        elif self.store is not None:
            self.store.close()

    def close(self) -> None:
        """Close the store."""
        if self.store is not None:
            self.store.close()


def _copy_touched(target: int, source: int, nbytes: int) -> None:
    """Copy `nbytes` from address `source` to `target`, where zeros are, without pages that were never
    written: these are zeros too, and reading them would touch them."""
    end = source + nbytes
    zeros = untouched(source, nbytes) or range(end, end)
    for start, stop in (source, zeros.start), (zeros.stop, end):
        ctypes.memmove(target + start - source, start, stop - start)


def _clear_gaps(chunk: Chunk, role: Role, home: memoryview) -> None:
    """Zero the parts of `home` that no parameter uses."""
    memory = np.frombuffer(home, np.uint8)
    if chunk.codes and role == Role.PARAM:
        last = chunk.codes[-1]
        memory[last.start + last.coding.nbytes : chunk.home_nbytes(role)] = 0
        return
    itemsize, end = chunk.dtype_of(role).itemsize, 0
    for managed in chunk.parameters:
        memory[end : managed.offset * itemsize] = 0
        end = (managed.offset + managed.numel) * itemsize
    memory[end : chunk.home_nbytes(role)] = 0


def as_written(build: Callable[[], T]) -> T:
    """Return `build()` without what `hetmem.managed` adds to classes, on this thread: for a plan."""
    before = getattr(_state, "as_written", False)
    try:  # see note "ended twice"
        try:
            _state.as_written = True
            return build()
        finally:
            _state.as_written = before
    finally:
        _state.as_written = before


def build_within(limits: Limits, device: Device, build: Callable[[], None], *, keeps: bool = True) -> BuildingMemory:
    """Run `build()` while every parameter that a module registers moves to memory of the tiers; return that memory.
    `keeps`: whether that has its values, too."""
    building = Building(limits, device, keeps=keeps)
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
    """Moves every parameter that any module registers, on the thread that began it, to memory of the tiers.

    A parameter that was never written moves as it is registered, so that it is initialised where it lies then. Any
    other moves when another module registers its first one, and at the end: usually nothing else holds its memory by
    then. Reentrant use is an error of the caller.
    """

    def __init__(self, limits: Limits, device: Device, *, keeps: bool = True) -> None:
        self._handle: Any = None
        check_directories(limits)
        given = [size for size in (limits.device_bytes, device.memory_bytes) if size is not None]
        self.memory = BuildingMemory(limits, host_bytes(limits), min(given, default=None), keeps=keeps)
        self._pending: list[weakref.ref[torch.nn.Parameter]] = []
        self._module: weakref.ref[torch.nn.Module] | None = None
        """The module that registered the pending parameters."""

    @staticmethod
    def active() -> bool:
        """Return whether a module is being built on this thread, here or by `as_written`."""
        return getattr(_state, "building", None) is not None or getattr(_state, "as_written", False)

    @HELD_BACK
    def begin(self) -> None:
        """Begin to move registered parameters."""
        self._handle = register_module_parameter_registration_hook(self._registered)
        _state.building = self

    @HELD_BACK
    def end(self) -> None:
        """End that, if it has begun and not ended yet."""
        _state.building = None
        if self._handle is not None:
            self._handle.remove()

    def _registered(self, module: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None) -> None:
        if parameter is None or getattr(_state, "building", None) is not self:
            return
        if self._module is None or self._module() is not module:
            self.place_pending()
            self._module = weakref.ref(module)
        if _is_placed(parameter) and untouched(parameter.data_ptr(), parameter.numel() * parameter.itemsize):
            self.memory.place(parameter)
        else:
            self._pending.append(weakref.ref(parameter))

    def place_pending(self) -> None:
        """Move the pending parameters."""
        pending, self._pending = self._pending, []
        for reference in pending:
            parameter = reference()
            if parameter is not None and _is_placed(parameter):
                self.memory.place(parameter)
        self.memory.forget()


def _is_placed(parameter: torch.nn.Parameter) -> bool:
    """Return whether `parameter` can lie in memory of the tiers. Parameters that share memory cannot: `collect` refuses
    them."""
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


def check_directories(limits: Limits) -> None:
    """Raise `BudgetError` for a path of the NVMe tier that is no directory or not writable, even if unused."""
    for directory in limits.nvme_directories:
        if not os.path.isdir(directory) or not os.access(directory, os.W_OK | os.X_OK):
            what = "is no directory" if not os.path.isdir(directory) else "may not be written to"
            raise BudgetError(
                f"Budget(nvme_dir=…): {str(directory)!r} {what}: name an existing, writable directory on the disk to "
                f"use"
            )


def host_bytes(limits: Limits) -> int:
    """Return the bytes of host memory for homes and staging."""
    if limits.host_bytes is not None:
        return limits.host_bytes
    return int(free_host_bytes() * HOST_SHARE)
